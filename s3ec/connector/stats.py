# SPDX-License-Identifier: Apache-2.0
"""s3ec's counts on vLLM's own /metrics (vLLM 0.31 and newer)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm.distributed.ec_transfer.ec_connector import metrics as vllm_metrics

from s3ec.connector.connector import guarded
from s3ec.connector.metrics import GAUGES, HISTOGRAMS, LABELLED, PLAIN, label_values, zeros
from s3ec.counters import TIME_BOUNDS_S, Observed, observed


@dataclass
class S3ECStats(vllm_metrics.ECConnectorStats):
    """Counter increments since the last report, and gauge values; by the names of counters."""

    def reset(self) -> None:
        """Drop all values."""
        self.data.clear()

    @guarded(default=None)
    def aggregate(self, other: vllm_metrics.ECConnectorStats) -> S3ECStats:
        """Add another report to this one."""
        for name, amount in other.data.items():
            before = 0 if name in GAUGES else self.data.get(name, 0)
            self.data[name] = before + amount
        return self

    def is_empty(self) -> bool:
        """Return True if there is nothing to report."""
        return not self.data

    def reduce(self) -> dict[str, int | float]:
        """Return nothing for vLLM's log line: ours says more, on every release."""
        return {}


def _times(bucket: Observed) -> list[float]:
    """Return a time for each observation in a bucket: their mean."""
    mean_s = bucket.seconds / bucket.many if bucket.many else 0.0
    # Sums of floats are rounded, and this must not move the mean out of the bucket.
    if bucket.number < len(TIME_BOUNDS_S):
        mean_s = min(mean_s, TIME_BOUNDS_S[bucket.number])
    if bucket.number:
        mean_s = max(mean_s, math.nextafter(TIME_BOUNDS_S[bucket.number - 1], math.inf))
    return [mean_s] * bucket.many


class S3ECPromMetrics(vllm_metrics.ECConnectorPromMetrics):
    """One Prometheus metric per counter or gauge, with vLLM's own labels in front of ours."""

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
        self._takers: dict[tuple[str, int], Callable[[float], object] | None] = {}
        # Values as they were sent, so that a reader that starts later is right too. Of several API
        # servers, the one that got the last report is right.
        self._gauges = {
            ours: self._gauge_cls(
                name=name, documentation=text, labelnames=labelnames, multiprocess_mode="mostrecent"
            )
            for ours, (name, text, _) in GAUGES.items()
        }
        self._histograms = {
            prefix: self._histogram_cls(
                name=name,
                documentation=text,
                labelnames=[*labelnames, *labels],
                buckets=list(TIME_BOUNDS_S),
            )
            for prefix, (name, text, labels, _values) in HISTOGRAMS.items()
        }
        self._by_prefix = {
            prefix: self._counter_cls(
                name=name, documentation=text, labelnames=[*labelnames, *labels]
            )
            for prefix, (name, text, labels, _values) in LABELLED.items()
        }
        for engine_idx in per_engine_labelvalues:
            self.observe(dict.fromkeys([*PLAIN, *zeros()], 0), engine_idx)

    @guarded(default=None)
    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one report to the metrics."""
        for name, amount in transfer_stats_data.items():
            key = name, engine_idx
            if key not in self._takers:
                self._takers[key] = self._taker(name, engine_idx)
            take = self._takers[key]
            if take is not None:
                take(amount)
        for bucket in observed(transfer_stats_data):
            self._observe(bucket, engine_idx)

    def _taker(self, name: str, engine_idx: int) -> Callable[[float], object] | None:
        """Return the function that takes a value of ours for one engine; None if there is none.

        The caller keeps it: finding a metric's child costs several times as much as an increment.
        """
        values = self.per_engine_labelvalues[engine_idx]
        take: Callable[[float], object] | None = None
        if name in self._plain:
            take = self._plain[name].labels(*values).inc
        elif name in self._gauges:
            take = self._gauges[name].labels(*values).set
        else:
            for prefix, counter in self._by_prefix.items():
                if name.startswith(prefix):
                    ours = label_values(LABELLED[prefix][2], name[len(prefix) :])
                    take = counter.labels(*values, *ours).inc
                    break
        return take

    def _observe(self, bucket: Observed, engine_idx: int) -> None:
        values = self.per_engine_labelvalues[engine_idx]
        for prefix, histogram in self._histograms.items():
            if bucket.histogram.startswith(prefix):
                ours = label_values(HISTOGRAMS[prefix][2], bucket.histogram[len(prefix) :])
                of_source = histogram.labels(*values, *ours)
                for seconds in _times(bucket):
                    of_source.observe(seconds)
                return
