# SPDX-License-Identifier: Apache-2.0
"""``bench regions``: a corpus in several places, read by real engines behind delaying proxies.

A place near answers after 5 ms, home after 80. Each engine has an empty disk and is asked about the
same pictures, in turn with the others. Then one engine lives through a dead near place, a dead
home and a slow near place, with four requests at a time; each answer is compared with that of an
engine of one bucket. The requests at home are counted for four nodes that read the same entries.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from s3ec.dev.bench import engines, measure
from s3ec.dev.bench.context import Bench, CannotMeasureError, Context, Spec
from s3ec.dev.bench.corpus import MODALITY, entry_pieces, key_of
from s3ec.errors import ConfigError

if TYPE_CHECKING:
    from s3ec.codec import Shape
    from s3ec.dev.rigs.engine import EngineProcess
    from s3ec.dev.rigs.nursery import EngineForkServer
    from s3ec.dev.rigs.proxy import Exchange, FaultProxy
    from s3ec.testing.server import LocalS3

_WRONG, _FAILED = "regions.wrong_answers", "regions.failed_requests"
_NEAR, _LAG = "regions.near_p50_ratio", "regions.lag_p50_ratio"
_HOME, _REDIS = "regions.home_requests_per_key", "regions.redis_ratio"
ROWS = (
    Spec(_WRONG, "1", "== 0"),
    Spec(_FAILED, "1", "== 0"),
    Spec(_NEAR, "ratio", "<= 1.05"),
    Spec(_LAG, "ratio", "<= 1.15"),
    Spec(_HOME, "1", "<= 1.1"),
    Spec(_REDIS, "ratio", "<= 0.6"),
)
_NEAR_S, _HOME_S = 0.005, 0.08
_PRESET = "embedding-2.75mb"
_ENCODE_S = 1.0  # so that what is encoded shows
_PICTURES, _PICTURES_QUICK = 40, 4
_FAULT_PICTURES, _FAULT_PICTURES_QUICK = 24, 4
_KEYS, _KEYS_QUICK = 1000, 50
_CLIENTS, _TOKENS = 4, 2
_WARM_UP = 2
_HOME_BUCKET, _NEAR_BUCKET, _EMPTY_BUCKET = "regions-home", "regions-near", "regions-empty"
_SAVES = "vllm:s3ec_saves"
Prompt = list[dict[str, Any]]


@dataclass
class _Delay:
    """The upstream's reply, later; counts requests for entries."""

    delay_s: float
    entries: int = 0

    async def apply(self, exchange: Exchange) -> None:
        self.entries += "/objects/" in exchange.request.target
        await asyncio.sleep(self.delay_s)
        await exchange.send(await exchange.forward())


@dataclass
class _World:
    """Server, proxies, model, pictures, and what engines are started with."""

    server: LocalS3
    near: FaultProxy
    home: FaultProxy
    delays: Mapping[str, _Delay]
    scratch: Path
    model: Path
    nursery: EngineForkServer
    started: int = 0

    def place(self, bucket: str, proxy: FaultProxy, **more: Any) -> dict[str, Any]:
        return {"bucket": bucket, "endpoint_url": proxy.url, "region": "us-east-1", **more}

    @contextlib.contextmanager
    def engine(self, settings: Mapping[str, Any], role: str = "ec_consumer") -> Iterator[Any]:
        """An engine with an empty disk, which has answered a few questions."""
        from s3ec.dev.rigs.engine import EngineProcess, ec_config, text
        from s3ec.dev.rigs.vllm_cpu import NEW_PICTURES, ONE_PROCESS

        self.started += 1
        chosen = {
            "min_free_bytes": 0,
            "weights": "name",
            "wait": "always",
            "defer_timeout_s": 10.0,
            "cache_dir": str(self.scratch / f"tier-{self.started}"),
            **settings,
        }
        with EngineProcess(
            self.model,
            ec=ec_config(role, chosen, ec_connector_module_path="s3ec.connector"),
            log_path=self.scratch / f"engine-{self.started}.log",
            media=self.scratch,
            env=self.server.env() | ONE_PROCESS,
            options={**NEW_PICTURES, "dtype": "float32", "max_num_batched_tokens": 2048},
            nursery=self.nursery,
        ) as engine:
            engine.slow_encoder(_ENCODE_S)
            engine.chat([[text("what time is it?")]], max_tokens=_TOKENS)
            yield engine


def run(context: Context) -> None:
    """Measure all rows.

    Raises:
        CannotMeasureError: There is no S3 server, no vLLM, or no Valkey.
    """
    with engines.local_server(_HOME_BUCKET) as server:
        _measure_nodes(context, server)
        with _world(context, server) as world:
            count = _PICTURES_QUICK if context.quick else _PICTURES
            faults = _FAULT_PICTURES_QUICK if context.quick else _FAULT_PICTURES
            total = _WARM_UP + count + 3 * faults
            names = [secrets.token_hex(32) for _ in range(total)]
            files = engines.write_patterns(world.scratch / "pictures", total, 0)
            prompts = [engines.prompt(*each) for each in zip(files, names, strict=True)]
            _fill(context, world, prompts)
            _measure_engines(context, world, prompts, count, faults)


@contextlib.contextmanager
def _world(context: Context, server: LocalS3) -> Iterator[_World]:
    from s3ec.dev.rigs.models import write_gemma3
    from s3ec.dev.rigs.nursery import EngineForkServer
    from s3ec.dev.rigs.proxy import FaultProxy, Rule
    from s3ec.dev.rigs.vllm_cpu import ONE_PROCESS

    context.say("building the model")
    scratch = context.scratch / "regions"
    scratch.mkdir()
    delays = {"near": _Delay(_NEAR_S), "home": _Delay(_HOME_S)}
    for bucket in (_NEAR_BUCKET, _EMPTY_BUCKET):
        server.create_bucket(bucket)
    with contextlib.ExitStack() as stack:
        near, home = (stack.enter_context(FaultProxy(server.endpoint_url)) for _ in range(2))
        near.add(Rule(delays["near"]))
        home.add(Rule(delays["home"]))
        env = server.env() | ONE_PROCESS
        nursery = stack.enter_context(EngineForkServer(scratch / "imports.log", env))
        model = write_gemma3(scratch / "model", _PRESET)
        yield _World(server, near, home, delays, scratch, model, nursery)


def _fill(context: Context, world: _World, prompts: Sequence[Prompt]) -> None:
    """Have all pictures encoded at home; the near bucket gets all of it, the empty one nothing."""
    context.say(f"encoding {len(prompts)} pictures")
    settings = {"bucket": _HOME_BUCKET, "endpoint_url": world.server.endpoint_url}
    with world.engine(settings, "ec_producer") as producer:
        producer.slow_encoder(0.0)
        for prompt in prompts:
            producer.chat([prompt], max_tokens=1)
        saved = partial(engines.counters, producer)
        engines.until(lambda: saved().get(_SAVES, 0) >= len(prompts), "all is stored")
    client = world.server.client()
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=_HOME_BUCKET)
    for entry in [entry for page in pages for entry in page.get("Contents", ())]:
        source = {"Bucket": _HOME_BUCKET, "Key": entry["Key"]}
        client.copy_object(Bucket=_NEAR_BUCKET, Key=entry["Key"], CopySource=source)


def _measure_engines(
    context: Context, world: _World, prompts: Sequence[Prompt], count: int, faults: int
) -> None:
    one = world.place(_NEAR_BUCKET, world.near)
    alone = world.place(_HOME_BUCKET, world.home)
    legs = {
        "one bucket": one,
        "near": {**alone, "replicas": [one]},
        "home alone": alone,
        "lag": {**alone, "replicas": [world.place(_EMPTY_BUCKET, world.near)]},
    }
    context.say("starting four engines")
    with contextlib.ExitStack() as stack:
        started = {
            name: stack.enter_context(world.engine(settings)) for name, settings in legs.items()
        }
        warm, rest = prompts[:_WARM_UP], prompts[_WARM_UP:]
        for engine in started.values():
            engines.until(partial(_knows, engine, warm), "the index is read")
        context.say(f"{count} pictures asked of each")
        first_s: dict[str, list[float]] = {name: [] for name in legs}
        for number, prompt in enumerate(rest[:count]):
            turn = number % len(legs)
            order = [*legs][turn:] + [*legs][:turn]
            for name in order:
                (seconds,), _ = started[name].replay([prompt], max_tokens=_TOKENS, clients=1)
                first_s[name].append(seconds)
        for row, above, below in ((_NEAR, "near", "one bucket"), (_LAG, "lag", "home alone")):
            ratio = measure.percentile(first_s[above], 50) / measure.percentile(first_s[below], 50)
            context.report(
                row,
                ratio,
                samples=count,
                detail={
                    "p50_s": {name: measure.percentile(each, 50) for name, each in first_s.items()},
                    "spread": measure.spread(measure.ratios(first_s[above], first_s[below])),
                    "latency_s": {"near": _NEAR_S, "home": _HOME_S},
                    "note": f"time to the first token: {above} over {below}",
                },
            )
        _live_through_faults(context, world, started, rest[count:], faults)


def _knows(engine: EngineProcess, prompts: Sequence[Prompt]) -> bool:
    """Whether its index is there; a picture that it encoded before is no picture for later."""
    engine.replay(prompts, max_tokens=1, clients=1)
    return engines.counters(engine).get("vllm:s3ec_index_entries", 0) > 0


def _live_through_faults(
    context: Context,
    world: _World,
    started: Mapping[str, EngineProcess],
    prompts: Sequence[Prompt],
    faults: int,
) -> None:
    context.say("near dead, home dead, near slow")
    subject, reference = started["near"], started["one bucket"]
    expected = [
        _answers(reference, prompts[at : at + faults]) for at in range(0, 3 * faults, faults)
    ]
    if len({str(each) for some in expected for each in some}) < 2 * faults:
        raise CannotMeasureError("the answers do not tell the pictures apart")
    wrong = failed = 0
    seconds: dict[str, float] = {}
    slow = world.delays["near"]
    events: dict[str, contextlib.AbstractContextManager[None]] = {
        "near dead": world.near.refusing(),
        "home dead": world.home.refusing(),
        "near slow": _slowed(slow),
    }
    for number, (name, event) in enumerate(events.items()):
        some = prompts[number * faults : (number + 1) * faults]
        with event:
            begun = time.perf_counter()
            found = _answers(subject, some)
            seconds[name] = time.perf_counter() - begun
        failed += sum(answer is None for answer in found)
        wrong += sum(
            answer is not None and answer != right
            for answer, right in zip(found, expected[number], strict=True)
        )
    metrics = engines.counters(subject)
    detail = {
        "requests": 3 * faults,
        "clients": _CLIENTS,
        "seconds": seconds,
        "replica": {name: each for name, each in metrics.items() if "s3ec_replica" in name},
        "encodes": metrics.get("vllm:s3ec_misses", 0),
    }
    context.report(_WRONG, wrong, samples=3 * faults, detail=detail)
    context.report(_FAILED, failed, samples=3 * faults, detail=detail)


@contextlib.contextmanager
def _slowed(delay: _Delay) -> Iterator[None]:
    delay.delay_s *= 10
    try:
        yield
    finally:
        delay.delay_s /= 10


def _answers(engine: EngineProcess, prompts: Sequence[Prompt]) -> list[Any]:
    """What is said about each; some at a time. None for a request that got no answer."""
    said: list[Any] = []
    for at in range(0, len(prompts), _CLIENTS):
        for answer in engine.chat(prompts[at : at + _CLIENTS], max_tokens=_TOKENS, logprobs=1):
            tokens = answer["token_ids"]
            # To a thousandth, since other requests of a batch change the last bits.
            chances = [round(max(each.values()), 3) for each in answer["logprobs"]]
            said.append((tokens, chances) if tokens else None)
    return said


# -- requests at home, and Redis -----------------------------------------------------------------


def _measure_nodes(context: Context, server: LocalS3) -> None:
    """Count home's requests with write-back, and time fetches from a Redis."""
    from s3ec.codec import Shape
    from s3ec.dev.rigs.proxy import FaultProxy, Rule

    keys = [key_of(secrets.token_hex(32)) for _ in range(_KEYS_QUICK if context.quick else _KEYS)]
    # Of one width, since they are of one modality: 2 KB and 2.75 MB.
    shape = Shape(21504, 64, "bfloat16")
    small = Shape(16, 64, "bfloat16")
    bucket, near_bucket = "regions-nodes", "regions-nodes-near"
    for name in (bucket, near_bucket):
        server.create_bucket(name)
    home_delay, near_delay = _Delay(_HOME_S), _Delay(_NEAR_S)
    with contextlib.ExitStack() as stack:
        home, near = (stack.enter_context(FaultProxy(server.endpoint_url)) for _ in range(2))
        home.add(Rule(home_delay))
        near.add(Rule(near_delay))
        settings = {"bucket": bucket, "endpoint_url": home.url, "region": "us-east-1"}
        replica = {"bucket": near_bucket, "endpoint_url": near.url, "region": "us-east-1"}
        context.say(f"{len(keys)} entries read by one node, then by three")
        _put(server, bucket, keys, small)
        filled = {**settings, "replicas": [{**replica, "fill": True}]}
        with _node(context, filled, "first") as node:
            _fetch(node, keys, small)
            counter = f"place.{near_bucket}.filled"
            engines.until(lambda: node.counters.get(counter) >= len(keys), "all is copied")
        for name in ("second", "third", "fourth"):
            with _node(context, filled, name) as node:
                _fetch(node, keys, small)
        context.report(
            _HOME,
            home_delay.entries / len(keys),
            samples=4 * len(keys),
            detail={"home": home_delay.entries, "near": near_delay.entries, "keys": len(keys)},
        )
        _measure_redis(context, stack, server, settings, replica, shape)


def _measure_redis(
    context: Context,
    stack: contextlib.ExitStack,
    server: LocalS3,
    settings: dict[str, Any],
    replica: dict[str, Any],
    shape: Shape,
) -> None:
    try:
        from s3ec.dev.rigs.valkey import Valkey

        valkey = stack.enter_context(Valkey())
    except ConfigError as exc:
        raise CannotMeasureError(f"no Valkey: {exc}") from exc
    keys = [key_of(secrets.token_hex(32)) for _ in range(8 if context.quick else 64)]
    for name in (settings["bucket"], replica["bucket"]):
        _put(server, name, keys, shape)
    context.say(f"{len(keys)} entries of {shape.nbytes} bytes from a bucket and a Redis")
    redis = {"url": valkey.url, "fill": True}
    with _node(context, {**settings, "replicas": [redis]}, "filler") as node:
        _fetch(node, keys, shape)
        name = node.settings.replicas[0].name
        engines.until(lambda: node.counters.get(f"place.{name}.filled") >= len(keys), "copied")
    times: dict[str, list[float]] = {"bucket": [], "redis": []}
    with (
        _node(context, {**settings, "replicas": [replica]}, "bucket") as bucket,
        _node(context, {**settings, "replicas": [redis]}, "redis") as cache,
    ):
        for key in keys:
            for name, node in (("bucket", bucket), ("redis", cache)):
                begun = time.perf_counter()
                _fetch(node, [key], shape)
                times[name].append(time.perf_counter() - begun)
    ratios = measure.ratios(times["redis"], times["bucket"])
    context.report(
        _REDIS,
        measure.percentile(ratios, 50),
        samples=len(keys),
        detail={"seconds": measure.medians(times), "spread": measure.spread(ratios)},
    )


def _put(server: LocalS3, bucket: str, keys: Sequence[Any], shape: Shape) -> None:
    from s3ec.dev.bench.index_made import LAYOUT, NAMESPACE
    from s3ec.identity import canonical_json

    client = server.client()
    record = canonical_json({"width": shape.width, "dtype": shape.dtype}).encode()
    client.put_object(Bucket=bucket, Key=LAYOUT.modality(MODALITY), Body=record)
    for key in keys:
        body = b"".join(entry_pieces(key, NAMESPACE.name, shape))
        client.put_object(Bucket=bucket, Key=LAYOUT.object(key), Body=body)


@contextlib.contextmanager
def _node(context: Context, settings: Mapping[str, Any], name: str) -> Iterator[Any]:
    from s3ec.config import load_settings
    from s3ec.dev.bench.index_made import NAMESPACE
    from s3ec.node import Node

    given = {**settings, "cache_dir": str(context.scratch / name), "min_free_bytes": 0}
    node = Node(load_settings(given).settings, NAMESPACE, name=f"s3ec-bench-{name}")
    try:
        yield node
    finally:
        node.close(10)


def _fetch(node: Any, keys: Sequence[Any], shape: Shape) -> None:
    from s3ec.prefetch import FetchOutcome, FetchRequest

    node.prefetcher.submit([FetchRequest(key, MODALITY, shape.rows) for key in keys])
    left = len(keys)
    while left:
        for fetched in node.prefetcher.drain():
            left -= 1
            if fetched.outcome is not FetchOutcome.READY:
                raise RuntimeError(f"an entry ended as {fetched.outcome}")
        time.sleep(0.0005)


BENCH = Bench(ROWS, run)
