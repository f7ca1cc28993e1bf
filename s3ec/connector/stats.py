# SPDX-License-Identifier: Apache-2.0
"""s3ec's counts in vLLM's log line and on /metrics (vLLM 0.31 and newer)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from vllm.distributed.ec_transfer.ec_connector import metrics as vllm_metrics

from s3ec.connector.guard import guarded
from s3ec.connector.metrics import LABELLED, LEVELS, PLAIN


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
            for ours, (name, text) in PLAIN.items()
        }
        self._levels = {
            ours: self._gauge_cls(
                name=name, documentation=text, labelnames=labelnames, multiprocess_mode="sum"
            )
            for ours, (name, text) in LEVELS.items()
        }
        # Not by Gauge.inc, which Ray's has not.
        self._sums: Counter[tuple[str, int]] = Counter()
        self._by_prefix = {
            prefix: self._counter_cls(
                name=name, documentation=text, labelnames=[*labelnames, label]
            )
            for prefix, (name, text, label, _values) in LABELLED.items()
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
