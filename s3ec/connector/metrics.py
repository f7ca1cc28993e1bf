# SPDX-License-Identifier: Apache-2.0
"""Every counter of s3ec, its name on /metrics and its meaning; and the counts of one engine.

``stats.py`` makes vLLM's metrics from the tables, and ``make docs`` makes docs/metrics.md from
them. Nothing here needs vLLM.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future

from s3ec.counters import Increments
from s3ec.node import Node
from s3ec.runtime import contained

log = logging.getLogger(__name__)

LINE_EVERY_S = 60.0
# Prefixes of the counters in the log line: it is not written while none of them changes.
_OF_INTEREST = ("lookups.", "hits", "misses", "fetch_items.", "save.items", "save_problem.")

_PREFIX = "vllm:s3ec_"
# Name, help, labels, and what their values mean, with a dot between those of two labels.
_Labelled = tuple[str, str, tuple[str, ...], dict[str, str]]

# counter of ours -> (Prometheus name without prefix and _total, help)
_PLAIN = {
    "hits": ("hits", "Encoder inputs that came from the cache and were not encoded."),
    "misses": ("misses", "Encoder inputs that were encoded."),
    "deferred_requests": ("deferred_requests", "Requests that waited for embeddings."),
    "deferred_seconds": ("deferred_seconds", "Total time that requests were deferred."),
    "defer_timeouts": ("defer_timeouts", "Deferrals that ended without the embedding."),
    "waits_declined": (
        "waits_declined",
        "Decisions to encode at once, because waiting was expected to cost more (`wait`).",
    ),
    "encode.seconds": ("encode_seconds", "Time that the encoder ran, as rank 0 measured it."),
    "encode.saved_seconds": (
        "saved_encoder_seconds",
        "Estimated encoder time that the hits saved, from measured encodes. Nothing is counted "
        "before the first measurement.",
    ),
    "encode.rows": ("encoded_rows", "Rows of embeddings that the encoder made in that time."),
    "load.items": ("loads", "Embeddings read into the encoder cache."),
    "load.bytes": ("load_bytes", "Bytes of embeddings read into the encoder cache."),
    "load.seconds": ("load_seconds", "Time spent inside start_load_caches."),
    "load.failed": ("load_failures", "Loads of granted files that failed."),
    "load.rescued": ("load_rescues", "Failed loads that the bucket then served."),
    "load.hung": ("load_hangs", "Loads for which the disk did not answer in time."),
    "save.items": ("saves", "Embeddings that the bucket confirmed."),
    "save.bytes": ("save_bytes", "Bytes of embeddings that the bucket confirmed."),
    "save.seconds": ("save_seconds", "Total time of uploads."),
    "save.queued": ("saves_queued", "Embeddings that entered the save queue."),
    "save.existed": ("saves_existing", "Uploads whose object was stored already."),
    "save.blocked": ("save_blocked", "Times that the encoder waited for a full save queue."),
    "save_declined": (
        "saves_declined",
        "Embeddings that were not stored (`save` = worth), because the engine encoded them for the "
        "first time, as far as it remembers.",
    ),
    "announced": ("announced", "Stored embeddings that were announced in the index."),
    "announce_failed": (
        "announce_failures",
        "Announcements in the index that failed. s3ec retries them.",
    ),
    "announce_dropped": (
        "announce_dropped",
        "Stored embeddings that are missing in the index until the next listing.",
    ),
    "tier.evicted": ("evictions", "Entries that this process evicted from the tier."),
    "tier.evicted_bytes": ("evicted_bytes", "Bytes that this process evicted."),
    "tier.bad_files": ("bad_files", "Bad files of this node's tier. s3ec deletes them."),
    "bad_objects": (
        "bad_objects",
        "Objects of the bucket that arrived damaged twice. Each is a miss for this process for "
        "an hour.",
    ),
    "tier.errors": ("tier_errors", "Operations that the disk refused."),
    "tier.hung": ("tier_hangs", "Times that the disk did not answer."),
    "store.retries": ("store_retries", "Requests to the store that were repeated."),
    "hedge.sent": ("hedges", "Late requests that were sent a second time."),
    "pace.slowed": ("slowdowns", "Times that the store asked for a lower request rate."),
    "index.refresh_failed": ("index_failures", "Refreshes of the index that failed."),
    "index.fetch_failed": (
        "index_fetch_failures",
        "Snapshots of the index whose download failed. s3ec retries it.",
    ),
    "index.unions": (
        "index_unions",
        "Snapshots of the index that this engine made by merging deltas.",
    ),
    "index.listings": (
        "index_listings",
        "Snapshots of the index that this engine made by listing the bucket.",
    ),
    "index.make_failed": (
        "index_make_failures",
        "Snapshots of the index that this engine could not make. s3ec retries it.",
    ),
    "index.refused": ("index_refused", "Unusable files of the index."),
    "index.vanished": ("index_vanished", "Embeddings in the index that are missing in the bucket."),
    "refused_identifiers": (
        "refused_identifiers",
        "Lookups of identifiers that may not be shared (request-scoped, too long).",
    ),
    "ids.refused": (
        "refused_client_ids",
        "Lookups of identifiers that are no content hash, with `trust_client_ids` off.",
    ),
    "unavailable_requests": (
        "unavailable_requests",
        "Requests without pixels whose embedding was not available.",
    ),
    "stopped_by_weights": (
        "stopped_by_weights",
        "1 after this engine has stopped loading and saving, since its weights may have changed.",
    ),
    "breaker.opened": (
        "breaker_opened",
        "Times that the breaker opened. s3ec then sends the store no requests for a while.",
    ),
    "internal_errors": ("internal_errors", "Errors inside s3ec that it caught."),
}
# gauge of ours, sent unchanged -> (Prometheus name, help, how the values of the scheduler's process
# and of all ranks are combined: their sum or the largest)
_GAUGES = {
    "level.spool_entries": (
        "spool_entries",
        "Embeddings of this engine's processes on this node's disk that are not confirmed yet by "
        "the bucket or in its index.",
        "sum",
    ),
    "level.spool_oldest_seconds": (
        "spool_oldest_seconds",
        "Age of the oldest of these embeddings. For one that a dead process left, the time since "
        "its last use on this node.",
        "max",
    ),
    "level.save_queue_entries": (
        "save_queue_entries",
        "Embeddings in memory that are not on a disk yet.",
        "sum",
    ),
    "level.breaker_open": (
        "breaker_open",
        "1 while the breaker is open in any process of this engine, so that it sends the store "
        "no requests.",
        "max",
    ),
    "level.index_entries": (
        "index_entries",
        "Rows of the index: of its snapshot and of the later deltas.",
        "max",
    ),
    "level.index_age_seconds": (
        "index_age_seconds",
        "Time since the bucket last answered a refresh of this node. Absent before the first.",
        "max",
    ),
    "level.tier_bytes": (
        "tier_bytes",
        "Bytes in `cache_dir`. All engines of a node report the same value: do not add them up.",
        "max",
    ),
    "level.tier_budget_bytes": (
        "tier_budget_bytes",
        "Upper limit of `tier_bytes` (`cache_bytes`).",
        "max",
    ),
}
_SOURCES = {
    "tier": "The entry was on this node's disk. s3ec only verified and opened it.",
    "bucket": "s3ec downloaded the entry.",
}
_REASONS = {
    "checksum": "The tensor's bytes do not match the checksum in the header.",
    "dtype": "s3ec does not store this data type.",
    "header": "The header is not one that s3ec writes.",
    "identifier": "The entry belongs to another identifier.",
    "length": "The entry has fewer or more bytes than its header says.",
    "namespace": "The entry belongs to another namespace.",
    "nonfinite": "The tensor holds NaN or infinity.",
    "shape": "Rows and width are not two positive numbers, or contradict each other.",
    "size": "The entry is larger than any valid entry can be.",
    "version": "The entry has a format that this release does not know.",
}
# prefix of counters -> metric
_LABELLED: dict[str, _Labelled] = {
    "fetch_items.": ("fetches", "Embeddings brought to this node.", ("source",), _SOURCES),
    "fetch_bytes.": ("fetch_bytes", "Bytes brought to this node.", ("source",), _SOURCES),
    "fetch_seconds.": ("fetch_seconds", "Total time of fetches.", ("source",), _SOURCES),
    "fetch.": (
        "fetch_outcomes",
        "Results of fetches.",
        ("outcome",),
        {
            "ready": "The embedding is on this node, verified and held open.",
            "absent": "Neither this node nor the bucket has it.",
            "mismatch": "The entry exists, but does not fit the request.",
            "corrupt": "The entry exists, but is unusable.",
            "unavailable": "The bucket or the disk did not answer in time.",
            "denied": "The bucket refused the request. The fetch is also counted as absent or "
            "unavailable.",
        },
    ),
    "corrupt.": ("corrupt", "Stored entries that were unusable.", ("reason",), _REASONS),
    "mismatch.": (
        "mismatches",
        "Entries that did not fit the request.",
        ("field",),
        {
            "rows": "The entry has another number of rows than the request.",
            "width": "The entry has another width than the namespace's record.",
            "dtype": "The entry has another data type than the namespace's record.",
            "modality": "The entry is of another modality than the request's item.",
            "placeholder": "A request without pixels claims another size than the entry has.",
            "size": "The object is larger than the request's embedding can be.",
            "no_record": "The namespace has no record of width and data type yet.",
        },
    ),
    "spool.": (
        "spool",
        "Embeddings that were taken over, uploaded late, left behind, or refused by the disk.",
        ("event",),
        {
            "adopted": "Taken over from a process that ended.",
            "replayed": "Adopted embeddings for which the bucket has answered.",
            "left": "Left for the next process when this one ended.",
            "refused": "Not written to the disk. s3ec uploads them from memory.",
        },
    ),
    "save_problem.": (
        "save_problems",
        "Embeddings that were not stored, or not at the first attempt.",
        ("reason",),
        {
            "unavailable": "An upload failed and is retried: the bucket gave no good answer.",
            "denied": "An upload failed and is retried: the bucket refused it.",
            "dropped": "The save queue was full. Not stored.",
            "abandoned": "Neither bucket nor spool had it before the process ended. Not stored.",
            "record": "Its width or data type differs from the namespace's record. Not stored.",
            "bad_object": "A bad object of the bucket has its name. Given up; see "
            "`s3ec_bad_objects`.",
            "shape": "The encoder's output was no tensor. Not stored.",
            "unreadable": "The spooled file cannot be read. s3ec retries it.",
            "vanished": "The spooled file is gone. Not stored.",
            "refused.identifier": "The identifier may not be shared. Not stored.",
            "refused.REASON": "The tensor cannot be stored. For REASON see the reasons of "
            "`s3ec_corrupt`.",
        },
    ),
    "encoded.": (
        "encoded",
        "Encoder inputs that were encoded, by reason. Their sum is `s3ec_misses`.",
        ("reason",),
        {
            "absent": "Neither the index nor this node had it, or the bucket did not have it.",
            "declined": "It is in the bucket, but waiting for it was not worth it (`wait`).",
            "late": "It is in the bucket, but did not arrive while the request waited.",
            "failed": "It is in the bucket, but its fetch failed a moment ago.",
            "unfit": "It is in the bucket, but it is unusable or has another size than the "
            "request needs.",
            "down": "The bucket's breaker is open, or this node's disk does not answer.",
            "unshared": "The identifier may not be shared, so nothing is stored under it.",
            "stopped": "This engine has stopped loading; its log says why.",
        },
    ),
    "place_bytes.": (
        "replica_bytes",
        "Bytes of embeddings that a replica served.",
        ("place",),
        {"PLACE": "The name of its bucket or server, with `_` for a dot."},
    ),
    "place.": (
        "replica_requests",
        "Results of requests to the replicas, and of copies to them.",
        ("place", "event"),
        {
            "PLACE.hits": "The replica served the embedding.",
            "PLACE.lag": "The replica did not have it. s3ec asks the next place, and does not "
            "ask this replica for it for a minute.",
            "PLACE.failed": "The replica gave no good answer. s3ec asks the next place.",
            "PLACE.bad": "The replica's copy was unusable. s3ec does not ask it for this "
            "embedding for an hour.",
            "PLACE.late": "The replica was late, and s3ec also asked the next place.",
            "PLACE.skipped": "s3ec did not ask the replica, because its breaker is open.",
            "PLACE.filled": "The replica accepted a copy (`fill`).",
            "PLACE.unfilled": "The replica did not accept a copy, or there was no time for one.",
            "PLACE.undeleted": "The replica did not delete an embedding that home has deleted.",
        },
    ),
    "lookups.": (
        "lookups",
        "Places where the encoder inputs of requests were found, once for each input that a step "
        "needed. A miss in one tier is a lookup in the next. So device misses are node hits plus "
        "node misses, node misses are bucket hits plus bucket misses, and bucket misses were "
        "encoded (`s3ec_misses`).",
        ("tier", "outcome"),
        {
            "device.hit": "vLLM's encoder cache held it when a step needed it, or got it in the "
            "same step for another input.",
            "device.miss": "The device did not hold it: `s3ec_hits` and `s3ec_misses` together.",
            "node.hit": "s3ec granted it from this node's disk. It had been used on this node "
            "before, or saved.",
            "node.miss": "This node's disk did not provide it in time.",
            "bucket.hit": "s3ec granted it after a download, and no request had loaded it since. "
            "In a pure producer, which loads nothing and reads no disk: the corpus holds it.",
            "bucket.miss": "The bucket did not provide it in time, so it was encoded: it is not "
            "there, not in the index, too slow, or the bucket is down.",
        },
    ),
}
# histogram of ours, up to the label's value -> metric
_HISTOGRAMS: dict[str, _Labelled] = {
    "fetch_time.": (
        "fetch_time_seconds",
        "Time of one fetch, from its start until the entry was open.",
        ("source",),
        _SOURCES,
    ),
    "load_time": (
        "load_time_seconds",
        "Time that one rank's step took to bring its embeddings into the encoder cache.",
        (),
        {},
    ),
    "save_time": (
        "save_time_seconds",
        "Time from the copy of an embedding off the device to the bucket's confirmation. "
        "Excludes embeddings that the bucket had already, and those that a dead process left.",
        (),
        {},
    ),
    "wait_time": (
        "wait_time_seconds",
        "Time that a request was deferred, without the time in which vLLM did not ask for it.",
        (),
        {},
    ),
}
# Only for debugging: counted, but not on /metrics.
NOT_EXPORTED = {
    "fetch_parked": "Fetches that waited for another process of the node.",
    "index.downloads": "Deltas and snapshots of the index that were downloaded.",
    "index.missing": "Times that a key was treated as absent for a while, since the bucket did "
    "not have it.",
    "skip.": "Chat requests that SkipPictures saw; it has a metric of its own.",
}
PLAIN = {ours: (_PREFIX + name, text) for ours, (name, text) in _PLAIN.items()}
GAUGES = {ours: (_PREFIX + name, text, how) for ours, (name, text, how) in _GAUGES.items()}
LABELLED = {ours: (_PREFIX + one[0], *one[1:]) for ours, one in _LABELLED.items()}
HISTOGRAMS = {ours: (_PREFIX + one[0], *one[1:]) for ours, one in _HISTOGRAMS.items()}


def label_values(labels: tuple[str, ...], spelt: str) -> list[str]:
    """Split the rest of a counter's name, after its prefix, into the values of the labels."""
    return spelt.split(".", len(labels) - 1) if labels else []


def zeros() -> dict[str, float]:
    """Return every counter with a label as 0, except labels whose values are not all known.

    Prometheus sees no increase in a series that begins at 1. An alert on the first error of a kind
    would stay silent.
    """
    return {
        prefix + value: 0.0
        for prefix, (_name, _text, _labels, meanings) in LABELLED.items()
        for value in meanings
        if not value.endswith(".REASON")  # stands for many
    }


class EngineMetrics:
    """Counts and gauges of one engine: its scheduler and all ranks.

    Everything is in memory, in the process of the scheduler half. That half adds the counts of the
    ranks to its own. Readers are vLLM's hook for stats (0.31 and newer) and the line in the log,
    which every release has.
    """

    def __init__(self, node: Node) -> None:
        """Start with all counts unreported.

        Args:
            node: Node of the scheduler half.
        """
        self._node = node
        self._wait = node.settings.wait
        self._unsent = Increments(node.counters)
        self._unsaid = Increments(node.counters)
        self._lock = threading.RLock()  # for _unsaid; a signal handler may close, see Counters
        self._line: Future[None] | None = None
        self._ranks: dict[int, Mapping[str, float]] = {}
        self._told = node.levels

    def on_report(self, levels: Mapping[int, Mapping[str, float]]) -> None:
        """Store gauges of ranks in other processes."""
        self._ranks.update(levels)

    def levels(self) -> dict[str, float]:
        """Return the gauges of the whole engine."""
        found = dict(self._node.levels)
        for of_rank in self._ranks.copy().values():
            for name, level in of_rank.items():
                before = found.get(name)
                if before is None:
                    found[name] = level
                elif GAUGES[name][2] == "sum":
                    found[name] = before + level
                else:
                    found[name] = max(before, level)
        return found

    def news(self) -> dict[str, float]:
        """Return the increments since the last call, and about once a second the gauges.

        Gauges come even without a change: a reader that has just started has none.
        """
        news = self._unsent.take()
        if self._node.levels is not self._told:
            self._told = self._node.levels
            news |= self.levels()
        return news

    def start(self) -> None:
        """Write a line to the log each minute, and at the end; returns at once."""
        self._line = self._node.loop.submit(self._tell_forever())

    def close(self) -> None:
        """Log the remaining counts. Idempotent."""
        if self._line is not None:
            self._line.cancel()
        self._tell()

    def _tell(self) -> None:
        with self._lock:
            line = line_of(self._unsaid.take(), wait=self._wait)
        if line is not None:
            log.info("%s", line)

    async def _tell_forever(self) -> None:
        while True:
            await asyncio.sleep(LINE_EVERY_S)
            with contained(self._node.counters, "the line in the log"):
                self._tell()


def line_of(counts: Mapping[str, float], *, wait: str = "auto") -> str | None:
    """Return one log line about some increments; None if none of them matters for it.

    Args:
        counts: Increments.
        wait: The setting `wait`.
    """
    if not any(name.startswith(_OF_INTEREST) for name in counts):
        return None

    def get(name: str) -> float:
        return counts.get(name, 0)

    device, node, bucket = (get(f"lookups.{tier}.hit") for tier in ("device", "node", "bucket"))
    said = [
        f"{device + node + bucket:.0f} hits ({device:.0f} device, {node:.0f} node, "
        f"{bucket:.0f} bucket)",
        f"{get('misses'):.0f} encoded",
    ]
    if fetched := get("fetch_items.bucket"):
        mean_ms = 1000 * get("fetch_seconds.bucket") / fetched
        said.append(f"{get('fetch_bytes.bucket') / 1e6:.1f} MB fetched in {mean_ms:.1f} ms each")
    if loads := get("load.items"):
        said.append(f"{loads:.0f} loads in {1000 * get('load.seconds') / loads:.2f} ms each")
    if saved := get("save.items"):
        said.append(f"{saved:.0f} saved ({get('save.bytes') / 1e6:.1f} MB)")
    if deferred := get("deferred_requests"):
        said.append(f"{deferred:.0f} requests waited, {get('deferred_seconds'):.2f} s in all")
    problems = sum(amount for name, amount in counts.items() if name.startswith("save_problem."))
    if problems:
        said.append(f"{problems:.0f} problems with saves")
    return "; ".join(["s3ec: " + ", ".join(said), *_why_encoded(counts, wait)])


def _why_encoded(counts: Mapping[str, float], wait: str) -> Iterator[str]:
    """Yield why images were encoded though the bucket has them."""

    def get(name: str) -> float:
        return counts.get(name, 0)

    if late := get("encoded.declined") + get("encoded.late"):
        times = []
        if fetched := get("fetch_items.bucket"):
            times.append(f"a fetch takes {_ms(get('fetch_seconds.bucket') / fetched)}")
        if get("encode.seconds"):
            verb = "" if times else " takes"
            times.append(f"an encode{verb} {_ms(get('encode.seconds') / get('misses'))}")
        why = "; ".join(filter(None, (", ".join(times), f"wait: {wait}")))
        yield f"{_pictures(late, 'in the bucket and')} encoded: {why}"
    if down := get("encoded.down"):
        yield f"{_pictures(down)} encoded while the bucket or the disk was not asked"
    if bad := get("encoded.failed") + get("encoded.unfit"):
        yield f"{_pictures(bad, 'in the bucket and')} encoded, since they could not be used"


def _pictures(count: float, where: str = "") -> str:
    """Return a phrase such as ``8 pictures are in the bucket and were``."""
    noun, be, was = ("picture", "is", "was") if count == 1 else ("pictures", "are", "were")
    return f"{count:.0f} {noun} " + (f"{be} {where} {was}" if where else was)


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.{0 if seconds >= 0.01 else 1}f} ms"
