# SPDX-License-Identifier: Apache-2.0
"""``bench dead``: what a store that never answers costs an engine that has learnt so.

Two real engines, one without the connector and one whose index holds every image it is asked
about while its store swallows each request. They are asked in turn, round after round, so that a
slow moment of the machine hits both. Every image is new, so that each is looked up and encoded.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from s3ec.dev.bench import engines, measure
from s3ec.dev.bench.context import Bench, CannotMeasureError, Context, Spec

if TYPE_CHECKING:
    from s3ec.dev.rigs.engine import EngineProcess
    from s3ec.dev.rigs.proxy import FaultProxy
    from s3ec.testing.server import LocalS3

TTFT, STEP = "dead.ttft_p99_ratio", "dead.step_p99_ratio"
ROWS = (Spec(TTFT, "ratio", "<= 1.05"), Spec(STEP, "ratio", "<= 1.05"))
PLAIN, DEAD = "no connector", "store dead"
ROUNDS = 60
_ALONE, _TOGETHER, _TOKENS = 16, 8, 8
_GROUPS = 5
_PICTURES = 64
_WARM_UP = 2000  # at most; as many as it takes until the store counts as dead
_BUCKET = "dead"
Prompt = list[dict[str, Any]]
_NAMESPACE = re.compile(r"s3ec namespace (\S+) in ")
_OPENED, _ABSENT = "vllm:s3ec_breaker_opened", "vllm:s3ec_fetch_outcomes{outcome=absent}"
_HITS, _MISSES = "vllm:s3ec_hits", "vllm:s3ec_misses"


@dataclass
class RequestTimes:
    """Milliseconds of one engine in one round."""

    ttft: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)

    def add(self, reply: dict[str, Any]) -> None:
        self.steps += [each / 1e6 for each in reply["steps"]]


def run(context: Context) -> None:
    """Measure; needs the SeaweedFS binary and vLLM."""
    from s3ec.dev.rigs.proxy import FaultProxy

    rounds = context.rounds(ROUNDS)
    count = _WARM_UP + 2 * (rounds + 1) * (_ALONE + _TOGETHER)
    names = [secrets.token_hex(32) for _ in range(count)]
    pictures = engines.write_patterns(context.scratch / "pictures", _PICTURES, 0)
    asked = iter([engines.prompt(pictures[at % _PICTURES], name) for at, name in enumerate(names)])
    with (
        engines.local_server(_BUCKET) as server,
        FaultProxy(server.endpoint_url) as proxy,
        _engines(context, server, proxy.url) as both,
    ):
        dead = both[DEAD]
        found = _NAMESPACE.search(dead.log)
        if found is None:
            raise CannotMeasureError("the connector does not name its namespace")
        _announce(server.client(), found[1], names)
        _die(dead, proxy, asked)
        before = dead.counters()
        context.say(f"{rounds} rounds")
        cases: dict[str, Callable[[], RequestTimes]] = {
            name: lambda engine=engine: _round(engine, asked)  # type: ignore[misc]
            for name, engine in both.items()
        }
        kept = measure.interleave(cases, rounds=rounds, warmup=1)
        after = dead.counters()
    moved = {name: after[name] - before.get(name, 0) for name in after if "s3ec" in name}
    report(context, kept, {name: count for name, count in moved.items() if count})


@contextlib.contextmanager
def _engines(
    context: Context, server: LocalS3, endpoint_url: str
) -> Iterator[dict[str, EngineProcess]]:
    """Start both, each in one process: one without s3ec, one whose store is at this address."""
    from s3ec.dev.rigs.engine import EngineProcess, ec_config
    from s3ec.dev.rigs.models import write_gemma3
    from s3ec.dev.rigs.vllm_cpu import NEW_PICTURES, ONE_PROCESS

    context.say("starting two engines")
    model = write_gemma3(context.scratch / "model")
    settings = {
        "bucket": _BUCKET,
        "endpoint_url": endpoint_url,
        "min_free_bytes": 0,
        "index_refresh_s": 0.5,
        "weights": "name",
        "wait": "always",
        "cache_dir": str(context.scratch / "tier"),
    }
    ec = ec_config("ec_consumer", settings, ec_connector_module_path="s3ec.connector")
    both = {
        name: EngineProcess(
            model,
            ec=configuration,
            log_path=context.scratch / f"{name}.log",
            media=context.scratch,
            env=server.env() | ONE_PROCESS,
            options=NEW_PICTURES,
        )
        for name, configuration in ((PLAIN, None), (DEAD, ec))
    }
    with contextlib.ExitStack() as stack:
        for engine in both.values():
            stack.callback(engine.stop, 5)
        with ThreadPoolExecutor(len(both)) as pool:
            list(pool.map(EngineProcess.start, both.values()))
        yield both


def _round(engine: EngineProcess, asked: Iterator[Prompt]) -> RequestTimes:
    """Some requests one after another, for their first token; some at once, for many steps."""
    times = RequestTimes()
    for _ in range(_ALONE):
        reply = engine.timed([next(asked)], max_tokens=1)
        times.ttft.append(reply["whole"] / 1e6)
        times.add(reply)
    times.add(engine.timed([next(asked) for _ in range(_TOGETHER)], max_tokens=_TOKENS))
    return times


def _announce(client: Any, namespace: str, names: Sequence[str]) -> None:
    """Write an index that holds all of these; there are no objects."""
    from s3ec.identity import Layout, canonical_json, make_key
    from s3ec.index.deltas import encode_delta
    from s3ec.index.names import Names, deltas_prefix

    layout = Layout(namespace)
    digests = [key.digest for key in map(make_key, names) if key is not None]
    record = canonical_json({"width": 64, "dtype": "bfloat16"}).encode()
    client.put_object(Bucket=_BUCKET, Key=layout.modality("image"), Body=record)
    body = b"".join(encode_delta(digests, [9000] * len(digests), namespace))
    name = deltas_prefix(layout) + Names().next(time.time())
    client.put_object(Bucket=_BUCKET, Key=name, Body=body)


def _die(engine: EngineProcess, proxy: FaultProxy, asked: Iterator[Prompt]) -> None:
    """Wait until the engine knows the index, swallow its requests, wait for its breaker."""
    from s3ec.dev.rigs.proxy import Rule
    from s3ec.dev.rigs.proxy_faults import StallUpload

    def has(counter: str) -> bool:
        if engine.counters().get(counter, 0) > 0:
            return True
        engine.chat([next(asked)], max_tokens=1)
        return False

    # It asks for what the index holds, and finds that it is not there.
    engines.until(lambda: has(_ABSENT), "the engine has read the index", pause_s=0.0)
    proxy.add(Rule(StallUpload()))
    engines.until(lambda: has(_OPENED), "the breaker is open", pause_s=0.0)


def report(
    context: Context, kept: Mapping[str, list[RequestTimes]], moved: Mapping[str, float]
) -> None:
    if moved.get(_HITS, 0) or not moved.get(_MISSES, 0):
        raise CannotMeasureError(f"the engine was not asked without a store: {dict(moved)}")
    for row, what in ((TTFT, "ttft"), (STEP, "steps")):
        rounds = {name: [getattr(one, what) for one in times] for name, times in kept.items()}
        ms = {name: [value for one in times for value in one] for name, times in rounds.items()}
        groups = [
            measure.percentile(above, 99) / measure.percentile(below, 99)
            for above, below in zip(_groups(rounds[DEAD]), _groups(rounds[PLAIN]), strict=True)
        ]
        context.report(
            row,
            measure.percentile(ms[DEAD], 99) / measure.percentile(ms[PLAIN], 99),
            samples=len(ms[DEAD]),
            detail={
                "spread": measure.spread(groups),
                "note": f"p99 of all rounds; spread of {len(groups)} parts of the run",
                "counters": dict(moved),
            },
        )


def _groups(rounds: Sequence[Sequence[float]]) -> list[list[float]]:
    """Neighbouring rounds together."""
    size = max(1, len(rounds) // _GROUPS)
    parts = [rounds[start : start + size] for start in range(0, len(rounds), size)]
    return [[value for one in part for value in one] for part in parts]


BENCH = Bench(ROWS, run)
