# SPDX-License-Identifier: Apache-2.0
"""s3ec's counts in vLLM's log line and on /metrics (vLLM 0.31 and newer)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from vllm.distributed.ec_transfer.ec_connector import metrics as vllm_metrics

from s3ec.connector.guard import guarded

# counter of ours -> (Prometheus name without _total, help, label value)
_PLAIN = {
    "hits": ("vllm:s3ec_hits", "Encoder inputs answered from the cache instead of encoded."),
    "misses": ("vllm:s3ec_misses", "Encoder inputs that were encoded."),
    "deferred_requests": ("vllm:s3ec_deferred_requests", "Requests that waited for embeddings."),
    "deferred_seconds": ("vllm:s3ec_deferred_seconds", "Time that requests were deferred."),
    "defer_timeouts": ("vllm:s3ec_defer_timeouts", "Deferrals that ended without the embedding."),
    "load.items": ("vllm:s3ec_loads", "Embeddings read into the encoder cache."),
    "load.bytes": ("vllm:s3ec_load_bytes", "Bytes of embeddings read into the encoder cache."),
    "load.seconds": ("vllm:s3ec_load_seconds", "Time spent inside start_load_caches."),
    "load.failed": ("vllm:s3ec_load_failures", "Reads of granted files that failed."),
    "load.rescued": ("vllm:s3ec_load_rescues", "Loads served by the bucket after such a failure."),
    "load.hung": ("vllm:s3ec_load_hangs", "Loads that the disk did not answer in time."),
    "save.items": ("vllm:s3ec_saves", "Embeddings that the bucket confirmed."),
    "save.bytes": ("vllm:s3ec_save_bytes", "Bytes of embeddings that the bucket confirmed."),
    "save.seconds": ("vllm:s3ec_save_seconds", "Time uploads took, in sum."),
    "save.existed": ("vllm:s3ec_saves_existing", "Uploads that found the object stored already."),
    "save.blocked": ("vllm:s3ec_save_blocked", "Times that a full save queue held the encoder up."),
    "announced": (
        "vllm:s3ec_announced",
        "Stored embeddings whose entry in the corpus's index the bucket confirmed.",
    ),
    "announce_failed": (
        "vllm:s3ec_announce_failures",
        "Attempts to write such entries that failed and are repeated.",
    ),
    "announce_dropped": (
        "vllm:s3ec_announce_dropped",
        "Stored embeddings that no index knows until it is rebuilt.",
    ),
    "tier.evicted": ("vllm:s3ec_evictions", "Entries that this process evicted from the tier."),
    "tier.evicted_bytes": ("vllm:s3ec_evicted_bytes", "Bytes that this process evicted."),
    "tier.quarantined": ("vllm:s3ec_quarantined", "Bad entries that were set aside."),
    "quarantined_objects": (
        "vllm:s3ec_quarantined_objects",
        "Objects of the bucket that came bad twice and are not asked for again for a while.",
    ),
    "tier.errors": ("vllm:s3ec_tier_errors", "Times that the disk refused."),
    "tier.hung": ("vllm:s3ec_tier_hangs", "Times that the disk was found not to answer."),
    "store.retries": ("vllm:s3ec_store_retries", "Requests to the store that were repeated."),
    "store.too_late": (
        "vllm:s3ec_store_retries_too_late",
        "Requests not repeated because the pause would have been too long.",
    ),
    "store.retry_budget_spent": (
        "vllm:s3ec_store_retries_unpaid",
        "Requests not repeated because too many were.",
    ),
    "store.slow_starts": (
        "vllm:s3ec_store_slow_starts",
        "Requests without an answer after a time that is long for this store.",
    ),
    "hedge.sent": ("vllm:s3ec_hedges", "Late requests that were sent a second time."),
    "hedge.won": ("vllm:s3ec_hedges_won", "Of those, the ones whose second answer came first."),
    "pace.slowed": ("vllm:s3ec_slowdowns", "Times that the store asked for fewer requests."),
    "index.refresh_failed": (
        "vllm:s3ec_index_failures",
        "Looks for news of the corpus that failed.",
    ),
    "index.downloaded_bytes": ("vllm:s3ec_index_bytes", "Bytes of the index that were downloaded."),
    "compact.bases": ("vllm:s3ec_index_compactions", "Bases of the index that this engine made."),
    "compact.failed": (
        "vllm:s3ec_index_compaction_failures",
        "Compactions of the index that failed and will be tried again.",
    ),
    "index.refused": ("vllm:s3ec_index_refused", "Files of the index that could not be used."),
    "index.vanished": (
        "vllm:s3ec_index_vanished",
        "Embeddings that the index holds and the bucket does not.",
    ),
    "index.rebuild_wanted": (
        "vllm:s3ec_index_rebuild_wanted",
        "Times that so many vanished that the index should be rebuilt.",
    ),
    "prefetch.overflow": ("vllm:s3ec_fetch_overflows", "Fetches that the full queue refused."),
    "refused_identifiers": (
        "vllm:s3ec_refused_identifiers",
        "Lookups of identifiers that may not be shared (request-scoped, too long).",
    ),
    "ids.refused": (
        "vllm:s3ec_refused_client_ids",
        "Lookups of identifiers that are no content hash, with trust_client_ids off.",
    ),
    "unavailable_requests": (
        "vllm:s3ec_unavailable_requests",
        "Requests without pixels whose embedding could not be had.",
    ),
    "stopped_by_weights": (
        "vllm:s3ec_stopped_by_weights",
        "1 once nothing is loaded or saved any more, since the weights may have changed.",
    ),
    "breaker.opened": ("vllm:s3ec_breaker_opened", "Times that the store was given a rest."),
    "internal_errors": ("vllm:s3ec_internal_errors", "Errors inside s3ec that were contained."),
}
# sum of ours that also goes down -> (Prometheus name, help)
_LEVELS = {
    "pace.withheld": (
        "vllm:s3ec_places_withheld",
        "Requests at a time that the store is not asked for, because it was too many for it.",
    ),
}
# prefix of counters -> (Prometheus name, help, label name)
_LABELLED = {
    "fetch_items.": ("vllm:s3ec_fetches", "Embeddings brought to this node.", "source"),
    "fetch_bytes.": ("vllm:s3ec_fetch_bytes", "Bytes brought to this node.", "source"),
    "fetch_seconds.": ("vllm:s3ec_fetch_seconds", "Time fetches took, in sum.", "source"),
    "fetch.": ("vllm:s3ec_fetch_outcomes", "How fetches ended.", "outcome"),
    "corrupt.": ("vllm:s3ec_corrupt", "Stored entries that were unusable.", "reason"),
    "mismatch.": ("vllm:s3ec_mismatches", "Entries that did not fit the request.", "field"),
    "spool.": (
        "vllm:s3ec_spool",
        "Embeddings that were taken over, uploaded late, left behind, or refused by the disk.",
        "event",
    ),
    "save_problem.": (
        "vllm:s3ec_save_problems",
        "Embeddings not stored, or not at the first try.",
        "reason",
    ),
}


@dataclass
class S3ECStats(vllm_metrics.ECConnectorStats):
    """Counter increments since the last report; ``data`` maps counter names to amounts."""

    def reset(self) -> None:
        """Forget everything."""
        self.data.clear()

    @guarded(default=None)
    def aggregate(self, other: vllm_metrics.ECConnectorStats) -> S3ECStats:
        """Add another report to this one."""
        for name, amount in other.data.items():
            self.data[name] = self.data.get(name, 0) + amount
        return self

    def is_empty(self) -> bool:
        """Whether there is nothing to report."""
        return not self.data

    def reduce(self) -> dict[str, int | float]:
        """The few figures of vLLM's log line."""
        return self._figures() or {}

    @guarded(default=None)
    def _figures(self) -> dict[str, int | float]:
        get = self.data.get
        hits, misses = get("hits", 0), get("misses", 0)
        loads, seconds = get("load.items", 0), get("load.seconds", 0.0)
        line: dict[str, int | float] = {
            "hits": int(hits),
            "misses": int(misses),
            "hit_rate": round(hits / (hits + misses), 3) if hits + misses else 0.0,
            "load_ms": round(1000 * seconds / loads, 2) if loads else 0.0,
            "fetched_mb": round(get("fetch_bytes.bucket", 0) / 1e6, 1),
            "saved_mb": round(get("save.bytes", 0) / 1e6, 1),
            "deferred": int(get("deferred_requests", 0)),
        }
        return line


class S3ECPromMetrics(vllm_metrics.ECConnectorPromMetrics):
    """A Prometheus counter or gauge per figure, with vLLM's own labels and at most one of ours."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._plain = {
            ours: self._counter_cls(name=name, documentation=text, labelnames=labelnames)
            for ours, (name, text) in _PLAIN.items()
        }
        self._levels = {
            ours: self._gauge_cls(
                name=name, documentation=text, labelnames=labelnames, multiprocess_mode="sum"
            )
            for ours, (name, text) in _LEVELS.items()
        }
        # Not by Gauge.inc, which Ray's has not.
        self._sums: Counter[tuple[str, int]] = Counter()
        self._by_prefix = {
            prefix: self._counter_cls(
                name=name, documentation=text, labelnames=[*labelnames, label]
            )
            for prefix, (name, text, label) in _LABELLED.items()
        }

    @guarded(default=None)
    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one report's increments."""
        values = self.per_engine_labelvalues[engine_idx]
        for name, amount in transfer_stats_data.items():
            if name in self._plain:
                self._plain[name].labels(*values).inc(amount)
                continue
            if name in self._levels:
                self._sums[name, engine_idx] += amount
                self._levels[name].labels(*values).set(self._sums[name, engine_idx])
                continue
            for prefix, counter in self._by_prefix.items():
                if name.startswith(prefix):
                    counter.labels(*values, name[len(prefix) :]).inc(amount)
                    break
