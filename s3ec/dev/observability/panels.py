# SPDX-License-Identifier: Apache-2.0
"""What the dashboard shows, in the order in which an operator asks. Data only.

``grafana.py`` makes examples/observability/dashboard.json of it, and ``picture.py`` draws it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["stat", "timeseries"]
# In an expression: the engines that are chosen, and the time over which a rate is taken.
WHERE = 'model_name=~"$model_name",instance=~"$instance",engine=~"$engine"'
OVER = "$__rate_interval"


def counted(name: str, labels: str = "") -> str:
    """Events a second of a counter, of all chosen engines together."""
    return f"sum(rate({selected(f'{name}_total', labels)}[{OVER}]))"


def selected(name: str, labels: str = "") -> str:
    """The series of a metric, of the chosen engines."""
    return f"vllm:s3ec_{name}{{{WHERE}{',' + labels if labels else ''}}}"


def counted_by(label: str, name: str) -> str:
    """Events a second by the value of a label."""
    return f"sum by ({label}) (rate({selected(f'{name}_total')}[{OVER}]))"


def timed(share: float, name: str, labels: str = "") -> str:
    """A quantile of a histogram."""
    buckets = selected(f"{name}_bucket", labels)
    return f"histogram_quantile({share}, sum by (le) (rate({buckets}[{OVER}])))"


# Inputs that nobody had to encode: the device held them, or s3ec brought them.
_HIT = 'outcome="hit"'
_DEVICE_HIT = 'tier="device",outcome="hit"'
_SPARED = f"({counted('lookups', _DEVICE_HIT)} + {counted('hits')})"
NOT_ENCODED = f"{_SPARED} / ({_SPARED} + {counted('misses')})"


@dataclass(frozen=True, slots=True)
class Query:
    """One expression and the name of its series; ``{{label}}`` is a label's value."""

    expression: str
    legend: str


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel.

    Attributes:
        title: What it shows.
        description: What it means, and when to worry.
        unit: Grafana's name of it.
        queries: Its series.
        kind: A number, or lines over time.
        stacked: Whether the lines add up to something.
        worry_from: A number of this size or larger is red; None: no number is.
        good_from: A number of this size or larger is green, below it is yellow.
        largest: Upper end of the scale.
    """

    title: str
    description: str
    unit: str
    queries: tuple[Query, ...]
    kind: Kind = "timeseries"
    stacked: bool = False
    worry_from: float | None = None
    good_from: float | None = None
    largest: float | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """Panels below one question."""

    question: str
    panels: tuple[Panel, ...]


def _quantiles(name: str, labels: str = "", word: str = "") -> tuple[Query, ...]:
    return tuple(
        Query(timed(share, name, labels), f"{word}p{100 * share:.0f}") for share in (0.5, 0.9)
    )


_PROBLEMS = " + ".join(
    f"sum(increase({selected(f'{name}_total')}[5m]))"
    for name in ("internal_errors", "corrupt", "mismatches", "announce_dropped", "load_failures")
)

ROWS = (
    Row(
        "Does it help, and is anything wrong?",
        (
            Panel(
                "Not encoded",
                "Share of the encoder inputs of requests that nobody had to encode. Low after a "
                "start, and where most images are new.",
                "percentunit",
                (Query(NOT_ENCODED, "not encoded"),),
                kind="stat",
                good_from=0.5,
                largest=1.0,
            ),
            Panel(
                "Encoder time saved a minute",
                "What the encoder would have taken for the hits. 60 s is one encoder that never "
                "rests.",
                "s",
                (Query(f"60 * {counted('saved_encoder_seconds')}", "saved"),),
                kind="stat",
            ),
            Panel(
                "Breakers open",
                "Engines that do not ask the bucket now, since it failed. Images are encoded, and "
                "saves wait on the node's disk.",
                "short",
                (Query(f"sum({selected('breaker_open')})", "open"),),
                kind="stat",
                worry_from=1,
            ),
            Panel(
                "Faults in 5 minutes",
                "Internal errors, corrupt entries, entries that do not fit, failed loads, and "
                "entries lost to the index. It should be 0.",
                "short",
                (Query(_PROBLEMS, "faults"),),
                kind="stat",
                worry_from=1,
            ),
            Panel(
                "Who answers",
                "Encoder inputs a second by what answered. Encoded is what is left: each costs the "
                "encoder's time.",
                "ops",
                (
                    Query(counted("lookups", _DEVICE_HIT), "device"),
                    Query(counted("lookups", 'tier="node",outcome="hit"'), "this node's disk"),
                    Query(counted("lookups", 'tier="bucket",outcome="hit"'), "bucket"),
                    Query(counted("misses"), "encoded"),
                ),
                stacked=True,
            ),
            Panel(
                "Hit ratio by tier",
                "Of what a tier was asked for, the share that it had. What one tier misses the "
                "next is asked for.",
                "percentunit",
                (
                    Query(
                        f"sum by (tier) (rate({selected('lookups_total', _HIT)}[{OVER}])) / "
                        f"sum by (tier) (rate({selected('lookups_total')}[{OVER}]))",
                        "{{tier}}",
                    ),
                    Query(NOT_ENCODED, "not encoded"),
                ),
                largest=1.0,
            ),
            Panel(
                "Encoder",
                "Seconds a second that the encoder ran, and that it would have run for the hits.",
                "s",
                (
                    Query(counted("encode_seconds"), "ran"),
                    Query(counted("saved_encoder_seconds"), "saved"),
                ),
            ),
            Panel(
                "Faults",
                "Each of them should be 0. docs/operations.md says what to do.",
                "ops",
                (
                    Query(counted("internal_errors"), "inside s3ec"),
                    Query(counted("corrupt"), "corrupt"),
                    Query(counted("mismatches"), "do not fit"),
                    Query(counted("load_failures"), "failed loads"),
                    Query(counted("tier_errors"), "disk refuses"),
                    Query(counted("index_vanished"), "in the index only"),
                    Query(f"max({selected('stopped_by_weights_total')})", "stopped by weights"),
                ),
            ),
        ),
    ),
    Row(
        "Does anybody wait for it?",
        (
            Panel(
                "Fetch from the bucket, and one encode",
                "A fetch that takes longer than an encode does not pay for the request that "
                "waits. `wait: auto` then encodes.",
                "s",
                (
                    *_quantiles("fetch_time_seconds", 'source="bucket"', "bucket "),
                    Query(f"{counted('encode_seconds')} / {counted('misses')}", "one encode, mean"),
                ),
            ),
            Panel(
                "Fetch and load on this node",
                "To verify and pin a file on this disk, and to bring a step's files to the device.",
                "s",
                (
                    *_quantiles("fetch_time_seconds", 'source="tier"', "fetch "),
                    *_quantiles("load_time_seconds", word="load "),
                ),
            ),
            Panel(
                "Requests that wait",
                "How long a request was deferred for embeddings that were on their way.",
                "s",
                _quantiles("wait_time_seconds"),
            ),
            Panel(
                "Decisions to wait",
                "Requests that began to wait, that waited in vain, and that encoded at once "
                "because waiting would have cost more.",
                "ops",
                (
                    Query(counted("deferred_requests"), "waited"),
                    Query(counted("defer_timeouts"), "in vain"),
                    Query(counted("waits_declined"), "encoded at once"),
                ),
            ),
        ),
    ),
    Row(
        "Is the bucket all right?",
        (
            Panel(
                "Traffic of the bucket",
                "Bytes a second that were fetched, and that the bucket confirmed.",
                "Bps",
                (
                    Query(counted("fetch_bytes", 'source="bucket"'), "fetched"),
                    Query(counted("save_bytes"), "saved"),
                ),
            ),
            Panel(
                "How fetches end",
                "Ready is a hit. Unavailable and denied are the bucket's trouble, corrupt and "
                "mismatch are bad bytes.",
                "ops",
                (Query(counted_by("outcome", "fetch_outcomes"), "{{outcome}}"),),
                stacked=True,
            ),
            Panel(
                "Time of a save",
                "From the device to the bucket's confirmation.",
                "s",
                _quantiles("save_time_seconds"),
            ),
            Panel(
                "Requests asked again",
                "Repeated after a failure, sent twice because the first was late, and pauses that "
                "the store asked for.",
                "ops",
                (
                    Query(counted("store_retries"), "repeated"),
                    Query(counted("hedges"), "sent twice"),
                    Query(counted("slowdowns"), "asked to slow down"),
                    Query(counted("breaker_opened"), "breaker opened"),
                ),
            ),
        ),
    ),
    Row(
        "Is everything stored?",
        (
            Panel(
                "Saves",
                "Embeddings a second: encoded, confirmed by the bucket, and there already.",
                "ops",
                (
                    Query(counted("misses"), "encoded"),
                    Query(counted("saves"), "confirmed"),
                    Query(counted("saves_existing"), "there already"),
                ),
            ),
            Panel(
                "Saves with a problem",
                "Unavailable and denied are tried again. All others are not stored.",
                "ops",
                (Query(counted_by("reason", "save_problems"), "{{reason}}"),),
                stacked=True,
            ),
            Panel(
                "What waits for the bucket",
                "Embeddings in memory and on the node's disk that the bucket has not confirmed. It "
                "grows while the bucket is down, and falls by itself.",
                "short",
                (
                    Query(f"sum({selected('spool_entries')})", "spool"),
                    Query(f"sum({selected('save_queue_entries')})", "save queue"),
                ),
            ),
            Panel(
                "Age of the oldest in the spool",
                "How long the bucket has confirmed nothing for it. Minutes are an outage.",
                "s",
                (Query(f"max({selected('spool_oldest_seconds')})", "oldest"),),
            ),
        ),
    ),
    Row(
        "Do disk and index keep up?",
        (
            Panel(
                "Disk tier",
                "Bytes on the node's disk, and the budget. A full tier is normal: it evicts what "
                "was used last the longest ago.",
                "bytes",
                (
                    Query(f"max by (instance) ({selected('tier_bytes')})", "{{instance}}"),
                    Query(f"max({selected('tier_budget_bytes')})", "budget"),
                ),
            ),
            Panel(
                "Evicted",
                "Bytes a second that went for newer ones, and those of them that nobody had read. "
                "Many unread bytes: the tier is small, or `save: worth` is better.",
                "Bps",
                (
                    Query(counted("evicted_bytes"), "evicted"),
                    Query(counted("never_read_bytes"), "never read"),
                ),
            ),
            Panel(
                "Index: what it knows",
                "Embeddings that the engine knows to be in the bucket.",
                "short",
                (Query(f"max by (instance) ({selected('index_entries')})", "{{instance}}"),),
            ),
            Panel(
                "Index: how fresh",
                "Age since the last refresh, and the time until an engine hears of a new "
                "embedding.",
                "s",
                (
                    Query(f"max({selected('index_age_seconds')})", "age"),
                    Query(f"max({selected('index_lag_seconds')})", "lag"),
                ),
            ),
        ),
    ),
)
