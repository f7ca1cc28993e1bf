# SPDX-License-Identifier: Apache-2.0
"""``bench policy``: what vLLM's encoder cache gives up, by which rule, and what that costs.

The managers are real; the requests are replayed (``policy_replay.py``). Four rules: vLLM's own (in
the order of release), by last access, the cost-aware one, and the optimum (what is asked for again
last of all), which knows the future and says how many misses no rule can avoid.

The rows with a reach are for 10,000 pictures under Zipf's law, on a device that holds 5% of them
and a node whose disk holds 20%. ``policy_replay`` is the same for a trace of a real engine, or for
a workload by name.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from s3ec.dev.bench import measure
from s3ec.dev.bench.context import Bench, CannotMeasureError, Context
from s3ec.dev.bench.result import Result, Spec
from s3ec.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from s3ec.dev.bench.policy_replay import Costs, Item, Outcome, Replay

_FIFO, _BELADY = "lru_vs_fifo_encodes", "lru_vs_belady"
_SECONDS, _CALL, _RATIO = "tiered_vs_lru_seconds", "call_us", "call_ratio"
_ITEMS, _ACCESSES = 10_000, 200_000
_QUICK_ITEMS, _QUICK_ACCESSES = 1_000, 10_000
_CACHE, _NODE = 0.05, 0.2
_SHARES = (0.01, 0.02, 0.05, 0.1, 0.2)
_ROUNDS = 5
# Of an embedding of 256 rows, an assumption: Gemma3's encoder on an L4, a local SSD, and S3 in the
# same region. Only how they compare counts.
ENCODE_MS, NODE_MS, BUCKET_MS = 120.0, 3.0, 60.0


_ROWS = (
    Spec(f"policy.{_FIFO}", "ratio", "<= 1.005"),
    Spec(f"policy.{_BELADY}", "ratio"),
    Spec(f"policy.{_SECONDS}", "ratio", "<= 0.8"),
    Spec(f"policy.{_CALL}", "us", "<= 5"),
    Spec(f"policy.{_RATIO}", "ratio", "<= 2"),
)
_REPLAY_ROWS = tuple(Spec(f"policy_replay.{name}", "ratio") for name in (_FIFO, _BELADY, _SECONDS))


def _costs(encode_ms: float, node_ms: float, bucket_ms: float | None) -> Costs:
    from s3ec.dev.bench.policy_replay import Costs

    return Costs(encode_ms / 1e3, node_ms / 1e3, None if bucket_ms is None else bucket_ms / 1e3)


def run(
    context: Context,
    *,
    seed: int = 1,
    encode_ms: float = ENCODE_MS,
    node_ms: float = NODE_MS,
    bucket_ms: float = BUCKET_MS,
) -> None:
    """Measure the rows with a reach.

    Args:
        context: Takes them.
        seed: Of what is asked, and of how long requests last.
        encode_ms, node_ms, bucket_ms: Of 256 rows.

    Raises:
        CannotMeasureError: There is no vLLM of 0.32 or newer.
    """
    replay = _module()
    items, accesses = (_QUICK_ITEMS, _QUICK_ACCESSES) if context.quick else (_ITEMS, _ACCESSES)
    plain = replay.zipf_requests(1.0, items, accesses, seed=seed, scan=False)
    scanned = replay.zipf_requests(1.0, items, accesses, seed=seed, scan=True)
    whole = replay.distinct_rows(scanned)
    one = replay.Replay(
        plain,
        cache_rows=round(_CACHE * whole),
        node_rows=round(_NODE * whole),
        costs=_costs(encode_ms, node_ms, None),
        seed=seed,
    )
    _report_encodes(context, "policy", one)
    cases = {
        "encode or node": replace(one, requests=scanned),
        "bucket or node": replace(
            one, requests=scanned, costs=_costs(encode_ms, node_ms, bucket_ms)
        ),
        "no scan": one,
        "a fifth of the requests": replace(
            one,
            requests=replay.zipf_requests(1.0, items, accesses // 5, seed=seed, scan=True),
        ),
    }
    _report_seconds(context, "policy", cases, note=f"{accesses / items:g} requests a picture")
    _report_calls(context, replace(one, requests=scanned))


def run_replay(
    context: Context,
    *,
    trace: Path | None = None,
    zipf: tuple[float, int] | None = None,
    workload: str | None = None,
    cache_rows: Sequence[int] = (),
    factor: float = 0.1,
    seed: int = 1,
    encode_ms: float = ENCODE_MS,
    node_ms: float = NODE_MS,
    bucket_ms: float = BUCKET_MS,
) -> None:
    """Measure on requests of the caller's choice; without any, on the published shape ``scan``.

    Args:
        context: Takes the rows.
        trace: A file of ``s3ec trace``; the engine with most accesses is replayed.
        zipf: Exponent and number of pictures; 20 requests of one picture for each of them, and a
            scan in the middle.
        workload: A name of ``workloads.NAMES``.
        cache_rows: Sizes of the device's cache; the first is that of the rows. Empty for shares of
            all rows.
        factor: Of a workload.
        seed: Of what is random.
        encode_ms, node_ms, bucket_ms: Of 256 rows.

    Raises:
        ConfigError: The trace cannot be read, or a size is too small; names the option.
        CannotMeasureError: There is no vLLM of 0.32 or newer, or nothing was asked.
    """
    replay = _module()
    requests = _requests(trace, zipf, workload, factor, seed)
    if not requests:
        raise CannotMeasureError("nothing was asked")
    whole = replay.distinct_rows(requests)
    largest = max(item.rows for items in requests for item in items)
    for rows in cache_rows:
        if rows < largest:
            raise ConfigError(
                f"--cache-embeds: the largest embedding has {largest} rows, and {rows} hold none; "
                f"give {largest} or more"
            )
    sizes = list(cache_rows) or sorted({max(largest, round(one * whole)) for one in _SHARES})
    one = replay.Replay(
        requests,
        cache_rows=sizes[0] if cache_rows else max(largest, round(_CACHE * whole)),
        node_rows=max(largest, round(_NODE * whole)),
        costs=_costs(encode_ms, node_ms, None),
        seed=seed,
    )
    _report_encodes(context, "policy_replay", one, sizes=sizes)
    with_bucket = replace(one, costs=_costs(encode_ms, node_ms, bucket_ms))
    _report_seconds(
        context, "policy_replay", {"encode or node": one, "bucket or node": with_bucket}
    )


def _module() -> Any:
    try:
        from s3ec.dev.bench import policy_replay
    except ImportError as exc:
        raise CannotMeasureError(f"needs vLLM 0.32 or newer: {exc}") from exc
    return policy_replay


def _requests(
    trace: Path | None,
    zipf: tuple[float, int] | None,
    workload: str | None,
    factor: float,
    seed: int,
) -> list[list[Item]]:
    """Items by request."""
    from s3ec.dev.bench import workloads
    from s3ec.dev.bench.policy_replay import Item, zipf_requests

    if trace is not None:
        return traced(trace)
    if zipf is not None:
        exponent, items = zipf
        return zipf_requests(exponent, items, 20 * items, seed=seed, scan=True)
    made = workloads.make(workload or "scan", factor=factor, seed=seed)
    return [[Item(name, 256) for name in ask.images] for ask in made.requests]


def traced(path: Path) -> list[list[Item]]:
    """The requests of the engine with most accesses, in the order of their first ones."""
    from s3ec import trace
    from s3ec.dev.bench.policy_replay import Item

    by_engine: dict[int, dict[str, list[Item]]] = {}
    try:
        for access in trace.read(path):
            requests = by_engine.setdefault(access.engine, {})
            item = Item(access.item, access.rows, access.modality)
            requests.setdefault(access.request, []).append(item)
    except OSError as exc:
        raise ConfigError(f"--trace: cannot read {path}: {exc.strerror}") from exc
    if not by_engine:
        return []
    return list(max(by_engine.values(), key=lambda each: sum(map(len, each.values()))).values())


def _shown(outcomes: dict[str, Outcome]) -> dict[str, dict[str, float]]:
    return {
        policy: {
            "hit_ratio": one.device / one.accesses,
            "node": one.node,
            "bucket": one.bucket,
            "encoded": one.encoded,
            "seconds": one.seconds,
        }
        for policy, one in outcomes.items()
    }


def _report_encodes(
    context: Context, bench: str, alone: Replay, *, sizes: Sequence[int] = ()
) -> None:
    """Rows about a device with nothing behind it: what it lacks is encoded."""
    from s3ec.dev.bench.policy_replay import FIFO, LRU, OPTIMUM, POLICIES, distinct_rows

    whole = distinct_rows(alone.requests)
    sizes = list(sizes) or [max(1, round(share * whole)) for share in _SHARES]
    bare = replace(alone, node_rows=0)
    by_rows: dict[int, dict[str, Outcome]] = {}
    for rows in dict.fromkeys([alone.cache_rows, *sizes]):
        context.say(f"a device of {rows} rows")
        sized = replace(bare, cache_rows=rows)
        by_rows[rows] = {policy: sized.run(policy) for policy in POLICIES}
    found = by_rows[alone.cache_rows]
    detail = {
        "pictures": len({one.identifier for one in itertools.chain(*alone.requests)}),
        "rows": whole,
        "cache_rows": alone.cache_rows,
        "sizes": {str(rows): _shown(by_rows[rows]) for rows in sorted(by_rows)},
    }
    samples = found[LRU].accesses
    misses = {policy: one.misses for policy, one in found.items()}
    context.report(f"{bench}.{_FIFO}", misses[LRU] / misses[FIFO], samples=samples, detail=detail)
    context.report(
        f"{bench}.{_BELADY}",
        misses[LRU] / misses[OPTIMUM],
        samples=samples,
        detail={
            "cases": {
                f"{policy} / optimum": misses[policy] / misses[OPTIMUM]
                for policy in POLICIES
                if policy not in (LRU, OPTIMUM)
            }
        },
    )


def _report_seconds(
    context: Context, bench: str, cases: dict[str, Replay], *, note: str = ""
) -> None:
    """The cost-aware rule beside that of the last access, over a node's tier."""
    from s3ec.dev.bench.policy_replay import LRU, TIERED

    ratios, shown = {}, {}
    for name, one in cases.items():
        context.say(name)
        outcomes = {policy: one.run(policy) for policy in (LRU, TIERED)}
        ratios[name] = outcomes[TIERED].seconds / outcomes[LRU].seconds
        shown[name] = _shown(outcomes)
    first = next(iter(cases))
    context.report(
        f"{bench}.{_SECONDS}",
        ratios[first],
        samples=len(cases[first].requests),
        detail={"note": note, "cases": ratios, "outcomes": shown},
    )


def _report_calls(context: Context, one: Replay) -> None:
    """What a manager takes of the scheduler's time, in turn with vLLM's own."""
    from s3ec.dev.bench.policy_replay import FIFO, LRU, TIERED

    policies = (FIFO, LRU, TIERED)
    times: dict[str, list[float]] = {policy: [] for policy in policies}
    part = replace(one, requests=one.requests[: len(one.requests) // 4])
    for number in range(context.rounds(_ROUNDS)):
        context.say(f"calls, round {number + 1}")
        for policy in policies:
            times[policy].append(part.run(policy).call_us)
    ours = {policy: times[policy] for policy in (LRU, TIERED)}
    vllms = measure.medians(times)[FIFO]
    context.report_slowest(
        f"policy.{_CALL}", ours, samples=len(part.requests), others={"vLLM's": vllms}
    )
    ratios = {
        policy: [ours / theirs for ours, theirs in zip(times[policy], times[FIFO], strict=True)]
        for policy in (LRU, TIERED)
    }
    context.report_slowest(f"policy.{_RATIO}", ratios, samples=len(part.requests))


def _plot(figure: Figure, result: Result) -> None:
    """Hit ratio by the size of the device's cache, and seconds over a node's tier."""
    from s3ec.dev.bench import plot

    sizes: dict[str, Any] = {}
    cases: dict[str, Any] = {}
    for row in result.rows:
        sizes = row.detail.get("sizes") or sizes
        cases = row.detail.get("outcomes") or cases
    figure.set_size_inches(9.0, 4.2)
    figure.suptitle(plot.title(result))
    left, right = figure.subplots(1, 2)
    colours = {"fifo": plot.PLAIN, "lru": plot.OTHER, "tiered": plot.GOOD, "optimum": "black"}
    for policy, colour in colours.items():
        points = [(int(rows), found[policy]["hit_ratio"]) for rows, found in sizes.items()]
        style = "--" if policy == "optimum" else "-"
        left.plot(*zip(*points, strict=True), style, color=colour, marker="o", label=policy)
    left.set_xscale("log")
    shown = sorted(map(int, sizes))
    left.set_xticks(shown, [f"{rows / 1000:.4g}" for rows in shown], fontsize=8, rotation=45)
    left.minorticks_off()
    left.set_xlabel("thousand rows of embeddings on the device")
    left.set_ylabel("hit ratio, with nothing behind the device")
    left.legend()
    for place, found in enumerate(cases.values()):
        for offset, policy in ((-0.2, "lru"), (0.2, "tiered")):
            label = policy if place == 0 else None
            right.bar(
                *(place + offset, found[policy]["seconds"], 0.4),
                color=colours[policy],
                label=label,
            )
    right.legend()
    right.set_xticks(range(len(cases)), [name.replace(" ", "\n") for name in cases], fontsize=8)
    right.set_ylabel("seconds of encoding and loading")


BENCH = Bench(_ROWS, run, _plot)
REPLAY = Bench(_REPLAY_ROWS, run_replay, _plot)
