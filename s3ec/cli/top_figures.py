# SPDX-License-Identifier: Apache-2.0
"""What ``s3ec top`` shows, as figures: a page of metrics -> Snapshot -> Interval -> Figures.

Nothing here asks a network or a clock. A sum is never shown by itself: an engine that starts again
begins at zero, and what a counter has lost is no event.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from s3ec.errors import ConfigError, UnavailableError

K = TypeVar("K")
_PREFIX = "vllm:s3ec_"
# vLLM's own, which say who counted; of all others a metric of ours has at most two.
_VLLM_LABELS = ("model_name", "engine")
TIERS = ("device", "node", "bucket")
# Histogram -> what the frame calls it.
TIMES = {
    "fetch_time_seconds{tier}": "disk fetch",
    "fetch_time_seconds{bucket}": "bucket fetch",
    "load_time_seconds": "load",
    "save_time_seconds": "save",
    "wait_time_seconds": "wait",
}
# Gauges of which the largest is of interest where several engines have one.
_LARGEST = {
    "index_age_seconds",
    "index_entries",
    "index_lag_seconds",
    "spool_oldest_seconds",
    "wait_price",
}
# Those that engines of one host share: they have the same folder.
_OF_HOST = {"tier_budget_bytes", "tier_bytes"}
# Counter -> what it means where it is not 0. All of them call for somebody.
_PROBLEMS = {
    "stopped_by_weights": "stopped: the weights may have changed",
    "internal_errors": "errors inside s3ec",
    "mismatches": "entries that do not fit",
    "corrupt": "corrupt entries",
    "save_problems": "saves with a problem",
    "announce_dropped": "stored and not in the index",
    "index_rebuild_wanted": "the index should be rebuilt",
    "load_failures": "failed loads",
    "tier_errors": "refusals of the disk",
    "tier_hangs": "hangs of the disk",
    "unavailable_requests": "requests without pixels that failed",
}
_LASTING = {"index_rebuild_wanted", "stopped_by_weights"}
# An index that has not been looked at for so long is stale: ten times the usual refresh.
STALE_INDEX_S = 100.0
# An entry that waits for the bucket longer than this waits for more than its turn.
OLD_SPOOL_S = 300.0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One page of metrics.

    Attributes:
        at_s: When it was read, by the reader's clock.
        counts: Counter -> sum since the engine's start. A name is that of docs/metrics.md without
            ``vllm:s3ec_`` and ``_total``; the values of our own labels follow in braces, such as
            ``lookups{hit,node}``, in the order of the labels' names.
        levels: The same for gauges.
        buckets: Histogram -> upper bound in seconds -> events up to there, since the start.
        models: Names of the models, as vLLM spells them.
    """

    at_s: float
    counts: Mapping[str, float]
    levels: Mapping[str, float]
    buckets: Mapping[str, Mapping[float, float]]
    models: tuple[str, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether the page has no metric of s3ec."""
        return not (self.counts or self.levels or self.buckets)


def parsed(text: str, at_s: float) -> Snapshot:
    """Read what ``/metrics`` answers.

    Raises:
        ConfigError: prometheus_client is not installed.
        UnavailableError: This is no page of metrics.
    """
    try:
        from prometheus_client.parser import text_string_to_metric_families
    except ImportError as exc:
        raise ConfigError(
            "`s3ec top` needs prometheus-client, which vLLM brings; pip install 's3ec[metrics]'"
        ) from exc
    counts: dict[str, float] = {}
    levels: dict[str, float] = {}
    buckets: dict[str, dict[float, float]] = {}
    models: set[str] = set()
    try:
        for family in text_string_to_metric_families(text):
            if not family.name.startswith(_PREFIX):
                continue
            for sample in family.samples:
                models.add(sample.labels.get("model_name", ""))
                key = _key(family.name, sample.labels)
                if sample.name == f"{family.name}_bucket":
                    bounds = buckets.setdefault(key, {})
                    bound = float(sample.labels["le"])
                    bounds[bound] = bounds.get(bound, 0.0) + sample.value
                elif sample.name == f"{family.name}_total":
                    counts[key] = counts.get(key, 0.0) + sample.value
                elif sample.name == family.name and not family.name.endswith("_created"):
                    levels[key] = _together(key)([levels.get(key, 0.0), sample.value])
    except (ValueError, KeyError, IndexError) as exc:
        raise UnavailableError(f"what it answers is no page of metrics: {exc}") from exc
    return Snapshot(at_s, counts, levels, buckets, tuple(sorted(models - {""})))


def _key(name: str, labels: Mapping[str, str]) -> str:
    # In the order of their names, as no page has to have them.
    ours = [labels[label] for label in sorted(labels) if label not in (*_VLLM_LABELS, "le")]
    return name.removeprefix(_PREFIX) + (f"{{{','.join(ours)}}}" if ours else "")


def _together(key: str) -> Callable[[Iterable[float]], float]:
    return max if key in _LARGEST | _OF_HOST else sum


@dataclass(frozen=True, slots=True)
class Interval:
    """What happened between two snapshots of one engine, or of several.

    Attributes:
        seconds: Between them.
        counts, buckets: As of a Snapshot, of this time only.
        restarted: A counter has gone down, so all counts are those since the start.
    """

    seconds: float
    counts: Mapping[str, float] = field(default_factory=dict)
    buckets: Mapping[str, Mapping[float, float]] = field(default_factory=dict)
    restarted: bool = False


def between(before: Snapshot, after: Snapshot) -> Interval:
    """What happened from one snapshot to the next one of the same engine."""
    seconds = after.at_s - before.at_s
    restarted = any(value > after.counts.get(key, 0.0) for key, value in before.counts.items())
    if restarted:
        return Interval(seconds, after.counts, after.buckets, restarted=True)
    counts = {key: value - before.counts.get(key, 0.0) for key, value in after.counts.items()}
    buckets = {
        key: {
            bound: max(0.0, count - before.buckets.get(key, {}).get(bound, 0.0))
            for bound, count in bounds.items()
        }
        for key, bounds in after.buckets.items()
    }
    return Interval(seconds, counts, buckets)


def merged(snapshots: Sequence[tuple[str, Snapshot]]) -> Snapshot:
    """Several engines as one. Each comes with its host: what a host has once is not added up."""
    per_host: dict[str, dict[str, list[float]]] = {}
    for host, snapshot in snapshots:
        of_host = per_host.setdefault(host, {})
        for key, value in snapshot.levels.items():
            of_host.setdefault(key, []).append(value)
    levels: dict[str, list[float]] = {}
    for of_host in per_host.values():
        for key, values in of_host.items():
            levels.setdefault(key, []).append(_together(key)(values))
    return Snapshot(
        max((snapshot.at_s for _, snapshot in snapshots), default=0.0),
        _added(snapshot.counts for _, snapshot in snapshots),
        {key: max(some) if key in _LARGEST else sum(some) for key, some in levels.items()},
        _added_buckets(snapshot.buckets for _, snapshot in snapshots),
        tuple(sorted({model for _, snapshot in snapshots for model in snapshot.models})),
    )


def merged_intervals(intervals: Sequence[Interval]) -> Interval:
    """The same time of several engines."""
    return Interval(
        max((interval.seconds for interval in intervals), default=0.0),
        _added(interval.counts for interval in intervals),
        _added_buckets(interval.buckets for interval in intervals),
        any(interval.restarted for interval in intervals),
    )


def _added(several: Iterable[Mapping[K, float]]) -> dict[K, float]:
    total: dict[K, float] = {}
    for one in several:
        for key, value in one.items():
            total[key] = total.get(key, 0.0) + value
    return total


def _added_buckets(
    several: Iterable[Mapping[str, Mapping[float, float]]],
) -> dict[str, Mapping[float, float]]:
    by_key: dict[str, list[Mapping[float, float]]] = {}
    for one in several:
        for key, bounds in one.items():
            by_key.setdefault(key, []).append(bounds)
    return {key: _added(each) for key, each in by_key.items()}


def quantile(bounds: Mapping[float, float], share: float) -> float | None:
    """As Prometheus estimates it: linear inside of a bucket. None without an event.

    Args:
        bounds: Upper bound -> events up to there, with infinity.
        share: 0.9 for the p90.
    """
    ordered = sorted(bounds.items())
    total = ordered[-1][1] if ordered else 0.0
    if total <= 0:
        return None
    rank, lower, below = share * total, 0.0, 0.0
    for bound, count in ordered:
        if count >= rank and count > below:
            if math.isinf(bound):
                return lower  # nobody knows how far above
            return lower + (bound - lower) * (rank - below) / (count - below)
        lower, below = bound, count
    return lower


@dataclass(frozen=True, slots=True)
class Lookups:
    """How one tier answered. Rates are None before there are two snapshots, as all rates here."""

    hit_ratio: float | None
    hits_per_s: float | None
    misses_per_s: float | None
    hit_ratio_since_start: float | None


@dataclass(frozen=True, slots=True)
class Times:
    """One histogram, of the interval; since the engine's start where nothing happened in it."""

    per_s: float | None
    p50_s: float | None
    p90_s: float | None
    since_start: bool


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that should be 0.

    Attributes:
        what: For people.
        count: Since the engine's start.
        recent: Of these, in the interval.
        lasts: It is a state, and not an event that is over.
    """

    what: str
    count: float
    recent: float
    lasts: bool


@dataclass(frozen=True, slots=True)
class Figures:
    """What a frame shows of one engine, or of all together.

    Attributes:
        lookups: Tier -> answers. ``all`` are the inputs of which none had to be encoded for a hit.
        times: Histogram, as of ``TIMES`` -> its quantiles.
        encoder_saved_s_per_min: What the encoder would have taken for the hits.
        encoder_ran_s_per_min: What it took.
        fetched_bytes_per_s, saved_bytes_per_s: From the bucket, and confirmed by it.
        deferred_per_s: Requests that began to wait.
        defer_timeouts_per_s: Waits that ended without the embedding.
        breakers_open: Engines that do not ask the store now. None where it is not said.
        problems: What is not 0, the most recent first.
    """

    lookups: Mapping[str, Lookups]
    times: Mapping[str, Times]
    encoder_saved_s_per_min: float | None
    encoder_ran_s_per_min: float | None
    fetched_bytes_per_s: float | None
    saved_bytes_per_s: float | None
    deferred_per_s: float | None
    defer_timeouts_per_s: float | None
    save_queue_count: float | None
    spool_count: float | None
    spool_bytes: float | None
    spool_oldest_s: float | None
    breakers_open: float | None
    index_count: float | None
    index_age_s: float | None
    index_lag_s: float | None
    tier_bytes: float | None
    tier_budget_bytes: float | None
    problems: Sequence[Problem]

    @property
    def needs_somebody(self) -> bool:
        """Whether anything is wrong right now, or has just gone wrong."""
        return bool(
            self.breakers_open
            or (self.spool_oldest_s or 0) > OLD_SPOOL_S
            or (self.index_age_s or 0) > STALE_INDEX_S
            or any(problem.recent or problem.lasts for problem in self.problems)
        )


def figures(now: Snapshot, interval: Interval | None) -> Figures:
    """What to show of a snapshot and of the time before it, None where there is no earlier one."""

    def rate(key: str, every_s: float = 1.0) -> float | None:
        if interval is None or interval.seconds <= 0:
            return None
        return every_s * interval.counts.get(key, 0.0) / interval.seconds

    level = now.levels.get
    return Figures(
        lookups=_lookups(now, interval),
        times={key: _times(key, now, interval) for key in TIMES},
        encoder_saved_s_per_min=rate("saved_encoder_seconds", 60.0),
        encoder_ran_s_per_min=rate("encode_seconds", 60.0),
        fetched_bytes_per_s=rate("fetch_bytes{bucket}"),
        saved_bytes_per_s=rate("save_bytes"),
        deferred_per_s=rate("deferred_requests"),
        defer_timeouts_per_s=rate("defer_timeouts"),
        save_queue_count=level("save_queue_entries"),
        spool_count=level("spool_entries"),
        spool_bytes=level("spool_bytes"),
        spool_oldest_s=level("spool_oldest_seconds"),
        breakers_open=level("breaker_open"),
        index_count=level("index_entries"),
        index_age_s=level("index_age_seconds"),
        index_lag_s=level("index_lag_seconds"),
        tier_bytes=level("tier_bytes"),
        tier_budget_bytes=level("tier_budget_bytes"),
        problems=_problems(now, interval),
    )


def _lookups(now: Snapshot, interval: Interval | None) -> dict[str, Lookups]:
    def hits_and_misses(counts: Mapping[str, float], tier: str) -> tuple[float, float]:
        get = counts.get
        if tier in TIERS:
            return get(f"lookups{{hit,{tier}}}", 0.0), get(f"lookups{{miss,{tier}}}", 0.0)
        # What the device holds is asked of nobody else, and never encoded.
        return get("hits", 0.0) + get("lookups{hit,device}", 0.0), get("misses", 0.0)

    found = {}
    for tier in (*TIERS, "all"):
        since_start = _ratio(*hits_and_misses(now.counts, tier))
        if interval is None or interval.seconds <= 0:
            found[tier] = Lookups(None, None, None, since_start)
            continue
        hits, misses = hits_and_misses(interval.counts, tier)
        found[tier] = Lookups(
            _ratio(hits, misses), hits / interval.seconds, misses / interval.seconds, since_start
        )
    return found


def _ratio(hits: float, misses: float) -> float | None:
    return hits / (hits + misses) if hits + misses > 0 else None


def _times(key: str, now: Snapshot, interval: Interval | None) -> Times:
    recent: Mapping[float, float] = {} if interval is None else interval.buckets.get(key, {})
    count = max(recent.values(), default=0.0)
    per_s = None
    if interval is not None and interval.seconds > 0:
        per_s = count / interval.seconds
    shown = recent if count else now.buckets.get(key, {})
    return Times(per_s, quantile(shown, 0.5), quantile(shown, 0.9), since_start=not count)


def _problems(now: Snapshot, interval: Interval | None) -> list[Problem]:
    found = []
    for key, count in now.counts.items():
        name, brace, label = key.partition("{")
        if not count or name not in _PROBLEMS:
            continue
        why = f" ({label.removesuffix('}')})" if brace else ""
        recent = 0.0 if interval is None else interval.counts.get(key, 0.0)
        found.append(Problem(_PROBLEMS[name] + why, count, recent, name in _LASTING))
    return sorted(found, key=lambda one: (not one.lasts, -one.recent, -one.count))
