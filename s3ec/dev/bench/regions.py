# SPDX-License-Identifier: Apache-2.0
"""``bench regions``: a corpus in several places, read by real engines behind delaying proxies.

Home and two places near are S3 servers of their own. A place near answers after 5 ms, home after
80. Each engine has an empty disk and is asked about the same pictures, in turn with the others.
Then one engine lives through a near place that lags, is slow, dead or hangs, and through a dead
home, with four requests at a time; each answer is compared with that of an engine of one bucket.
The requests at home are counted for four nodes that read the same entries.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from s3ec.dev.bench import engines, measure
from s3ec.dev.bench.context import Bench, CannotMeasureError, Context, Spec
from s3ec.dev.bench.corpus import NAMESPACE, key_of, upload
from s3ec.errors import ConfigError

if TYPE_CHECKING:
    from s3ec.codec import Shape
    from s3ec.dev.rigs.engine import EngineProcess
    from s3ec.dev.rigs.nursery import EngineForkServer
    from s3ec.dev.rigs.proxy import Exchange, FaultProxy
    from s3ec.testing.server import LocalS3

_WRONG, _FAILED = "regions.wrong_answers", "regions.failed_requests"
_NEAR, _LAG = "regions.near_p50_ratio", "regions.lag_p50_ratio"
_CLIENTS = 4
_HOME, _REDIS = "regions.home_requests_per_key", "regions.redis_ratio"
_LATE = "regions.late_requests"
ROWS = (
    Spec(_WRONG, "1", "== 0"),
    Spec(_FAILED, "1", "== 0"),
    Spec(_NEAR, "ratio", "<= 1.05"),
    Spec(_LAG, "ratio", "<= 1.15"),
    Spec(_LATE, "1", f"<= {_CLIENTS}"),
    Spec(_HOME, "1", "<= 1.1"),
    Spec(_REDIS, "ratio", "<= 0.6"),
)
_NEAR_S, _HOME_S = 0.005, 0.08
_PRESET = "embedding-2.75mb"
_ENCODE_S = 1.0  # so that what is encoded shows
_PICTURES, _PICTURES_QUICK = 40, 4
_FAULT_PICTURES, _FAULT_PICTURES_QUICK = 24, 4
_KEYS, _KEYS_QUICK = 1000, 50
_TOKENS = 2
_WARM_UP = 2
_LATE_SHARE = 1.25  # of the better of home and encoding
_LOOK_S = 0.0005
_LAG_S = 0.1  # from one copy of the replicator to the next, at most
_PHASES = ("lag", "near slow", "home dead", "near dead", "near hangs")
_HOME_BUCKET, _NEAR_BUCKET, _EMPTY_BUCKET = "regions-home", "regions-near", "regions-empty"
_SAVES = "vllm:s3ec_saves"
Prompt = list[dict[str, Any]]


@dataclass
class _Delay:
    """The upstream's reply, later; counts requests for entries, and at one of them does more."""

    delay_s: float
    entries: int = 0
    at: int = -1
    event: Callable[[], None] = lambda: None

    async def apply(self, exchange: Exchange) -> None:
        self.entries += "/objects/" in exchange.request.target
        if self.entries == self.at:
            self.at = -1
            self.event()
        await asyncio.sleep(self.delay_s)
        await exchange.send(await exchange.forward())


@dataclass
class _World:
    """Servers, proxies, model, pictures, and what engines are started with."""

    server: LocalS3
    servers: Mapping[str, LocalS3]  # near, and one that stays empty
    proxies: Mapping[str, FaultProxy]  # of these and of home
    delays: Mapping[str, _Delay]
    scratch: Path
    model: Path
    nursery: EngineForkServer
    started: int = 0

    def place(self, bucket: str, name: str) -> dict[str, Any]:
        return {
            "bucket": bucket,
            "endpoint_url": self.proxies[name].url,
            "region": "us-east-1",
        }

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
    with engines.local_server(_HOME_BUCKET) as server, _world(context, server) as world:
        _measure_nodes(context, server, world.servers["near"])
        count = _PICTURES_QUICK if context.quick else _PICTURES
        faults = _FAULT_PICTURES_QUICK if context.quick else _FAULT_PICTURES
        total = _WARM_UP + count + (len(_PHASES) + 1) * faults
        names = [secrets.token_hex(32) for _ in range(total)]
        files = engines.write_patterns(world.scratch / "pictures", total, 0)
        prompts = [engines.prompt(*each) for each in zip(files, names, strict=True)]
        lagging = _fill(context, world, prompts, names[-faults:])
        _measure_engines(context, world, prompts, count, faults, lagging)


@contextlib.contextmanager
def _world(context: Context, server: LocalS3) -> Iterator[_World]:
    from s3ec.dev.rigs.models import write_gemma3
    from s3ec.dev.rigs.nursery import EngineForkServer
    from s3ec.dev.rigs.proxy import FaultProxy, Rule
    from s3ec.dev.rigs.vllm_cpu import ONE_PROCESS
    from s3ec.testing.server import Identity, LocalS3

    context.say("building the model")
    scratch = context.scratch / "regions"
    scratch.mkdir()
    delays = {"near": _Delay(_NEAR_S), "empty": _Delay(_NEAR_S), "home": _Delay(_HOME_S)}
    keys = Identity("admin", access_key=server.access_key, secret_key=server.secret_key)
    with contextlib.ExitStack() as stack:
        near, empty = (stack.enter_context(LocalS3(admin=keys)) for _ in range(2))
        near.create_bucket(_NEAR_BUCKET)
        empty.create_bucket(_EMPTY_BUCKET)
        proxies = {}
        for name, each in (("near", near), ("empty", empty), ("home", server)):
            proxies[name] = stack.enter_context(FaultProxy(each.endpoint_url))
            proxies[name].add(Rule(delays[name]))
        env = server.env() | ONE_PROCESS
        nursery = stack.enter_context(EngineForkServer(scratch / "imports.log", env))
        model = write_gemma3(scratch / "model", _PRESET)
        servers = {"near": near, "empty": empty}
        yield _World(server, servers, proxies, delays, scratch, model, nursery)


def _replicate(world: _World, names: Sequence[str], lag_s: float) -> threading.Thread:
    """Copy these from home to near, in no order and one after the other; begun, not done."""
    source, target = world.server.client(), world.servers["near"].client()
    shuffled = random.sample(list(names), len(names))

    def copy() -> None:
        for name in shuffled:
            time.sleep(random.uniform(0, lag_s))
            body = source.get_object(Bucket=_HOME_BUCKET, Key=name)["Body"].read()
            target.put_object(Bucket=_NEAR_BUCKET, Key=name, Body=body)

    thread = threading.Thread(target=copy, name="replicator")
    thread.start()
    return thread


def _fill(
    context: Context, world: _World, prompts: Sequence[Prompt], late: Sequence[str]
) -> Sequence[str]:
    """Have all pictures encoded at home; the near bucket gets all but the late ones.

    Returns:
        Objects of these.
    """
    context.say(f"encoding {len(prompts)} pictures")
    settings = {"bucket": _HOME_BUCKET, "endpoint_url": world.server.endpoint_url}
    with world.engine(settings, "ec_producer") as producer:
        producer.slow_encoder(0.0)
        for prompt in prompts:
            producer.chat([prompt], max_tokens=1)
        saved = partial(engines.counters, producer)
        engines.until(lambda: saved().get(_SAVES, 0) >= len(prompts), "all is stored")
    pages = world.server.client().get_paginator("list_objects_v2").paginate(Bucket=_HOME_BUCKET)
    stored = [entry["Key"] for page in pages for entry in page.get("Contents", ())]
    ends = tuple(key_of(name).name for name in late)
    _replicate(world, [name for name in stored if not name.endswith(ends)], 0).join()
    return [name for name in stored if name.endswith(ends)]


def _measure_engines(
    context: Context,
    world: _World,
    prompts: Sequence[Prompt],
    count: int,
    faults: int,
    lagging: Sequence[str],
) -> None:
    one = world.place(_NEAR_BUCKET, "near")
    alone = world.place(_HOME_BUCKET, "home")
    legs = {
        "one bucket": one,
        "near": {**alone, "replicas": [one]},
        "home alone": alone,
        "lag": {**alone, "replicas": [world.place(_EMPTY_BUCKET, "empty")]},
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
        _live_through_faults(context, world, started, rest[count:], faults, lagging)


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
    lagging: Sequence[str],
) -> None:
    context.say(", ".join(_PHASES))
    subject = started["near"]
    # The last ones are what lags.
    parts = [prompts[at : at + faults] for at in range(0, len(prompts), faults)][::-1]
    # Of an engine of one bucket, which encodes what is not near yet.
    expected = [_answers(started["one bucket"], some) for some in parts[: len(_PHASES)]]
    if len({str(each) for some in expected for each in some}) < len(_PHASES) * faults * 2 // 3:
        raise CannotMeasureError("the answers do not tell the pictures apart")
    wrong = failed = 0
    seconds: dict[str, float] = {}
    for number, name in enumerate(_PHASES):
        with _event(name, world, lagging):
            begun = time.perf_counter()
            found = _answers(subject, parts[number])
            seconds[name] = time.perf_counter() - begun
        failed += sum(answer is None for answer in found)
        wrong += sum(
            answer is not None and answer != right
            for answer, right in zip(found, expected[number], strict=True)
        )
        if name == "home dead":  # before near dies for the others
            _measure_death(context, world, started, parts[-1])
    metrics = engines.counters(subject)
    detail = {
        "requests": len(_PHASES) * faults,
        "clients": _CLIENTS,
        "seconds": seconds,
        "replica": {name: each for name, each in metrics.items() if "s3ec_replica" in name},
        "encodes": metrics.get("vllm:s3ec_misses", 0),
    }
    context.report(_WRONG, wrong, samples=len(_PHASES) * faults, detail=detail)
    context.report(_FAILED, failed, samples=len(_PHASES) * faults, detail=detail)


@contextlib.contextmanager
def _event(name: str, world: _World, lagging: Sequence[str]) -> Iterator[None]:
    near, home, delay = world.servers["near"], world.server, world.delays["near"]
    if name == "lag":
        copying = _replicate(world, lagging, _LAG_S)
        yield
        copying.join()
    elif name == "near slow":
        delay.delay_s *= 10
        yield
        delay.delay_s /= 10
    elif name == "near hangs":
        os.kill(near.pid or 0, signal.SIGSTOP)
        yield
        os.kill(near.pid or 0, signal.SIGCONT)
    else:
        dead = home if name == "home dead" else near
        dead.kill()
        yield
        dead.restart()


def _measure_death(
    context: Context,
    world: _World,
    started: Mapping[str, EngineProcess],
    prompts: Sequence[Prompt],
) -> None:
    """Near dies at a third of the requests; the better of home and encoding is asked the same."""
    near, delay = world.servers["near"], world.delays["near"]
    ask = {"max_tokens": _TOKENS, "clients": _CLIENTS}
    alone_s, _ = started["home alone"].replay(prompts, **ask)
    started["near"].replay(prompts[:1], **ask)  # its breaker is closed, if near is alive
    delay.at, delay.event = delay.entries + len(prompts) // 3, near.kill
    seconds, _ = started["near"].replay(prompts, **ask)
    near.restart()
    bound_s = _LATE_SHARE * min(measure.percentile(alone_s, 95), _ENCODE_S)
    late = [each for each in seconds if each > bound_s]
    context.report(
        _LATE,
        len(late),
        samples=len(prompts),
        detail={
            "late_s": late,
            "bound_s": bound_s,
            "clients": _CLIENTS,
            "p50_s": {
                "near dies": measure.percentile(seconds, 50),
                "home alone": measure.percentile(alone_s, 50),
            },
            "note": "later than the p95 of the better of home and encoding by more than 25%; of "
            "the reach those in flight when near dies, one for each client",
        },
    )


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


def _measure_nodes(context: Context, server: LocalS3, near_server: LocalS3) -> None:
    """Count home's requests with write-back, and time fetches from a Redis."""
    from s3ec.codec import Shape
    from s3ec.dev.bench.fetcher import fetch_all
    from s3ec.dev.rigs.proxy import FaultProxy, Rule

    keys = [key_of(secrets.token_hex(32)) for _ in range(_KEYS_QUICK if context.quick else _KEYS)]
    # Of one width, since they are of one modality: 2 KB and 2.75 MB.
    shape = Shape(21504, 64, "bfloat16")
    small = Shape(16, 64, "bfloat16")
    bucket, near_bucket = "regions-nodes", "regions-nodes-near"
    server.create_bucket(bucket)
    near_server.create_bucket(near_bucket)
    home_delay, near_delay = _Delay(_HOME_S), _Delay(_NEAR_S)
    with contextlib.ExitStack() as stack:
        home = stack.enter_context(FaultProxy(server.endpoint_url))
        near = stack.enter_context(FaultProxy(near_server.endpoint_url))
        home.add(Rule(home_delay))
        near.add(Rule(near_delay))
        settings = {"bucket": bucket, "endpoint_url": home.url, "region": "us-east-1"}
        replica = {"bucket": near_bucket, "endpoint_url": near.url, "region": "us-east-1"}
        context.say(f"{len(keys)} entries read by one node, then by three")
        upload(server, bucket, keys, small)
        filled = {**settings, "replicas": [{**replica, "fill": True}]}
        with _node(context, filled, "first") as node:
            fetch_all(node, keys, small, look_s=_LOOK_S)
            counter = f"place.{near_bucket}.filled"
            engines.until(lambda: node.counters.get(counter) >= len(keys), "all is copied")
        for name in ("second", "third", "fourth"):
            with _node(context, filled, name) as node:
                fetch_all(node, keys, small, look_s=_LOOK_S)
        context.report(
            _HOME,
            home_delay.entries / len(keys),
            samples=4 * len(keys),
            detail={"home": home_delay.entries, "near": near_delay.entries, "keys": len(keys)},
        )
        servers = {bucket: server, near_bucket: near_server}
        _measure_redis(context, stack, servers, settings, replica, shape)


def _measure_redis(
    context: Context,
    stack: contextlib.ExitStack,
    servers: Mapping[str, LocalS3],
    settings: dict[str, Any],
    replica: dict[str, Any],
    shape: Shape,
) -> None:
    from s3ec.dev.bench.fetcher import fetch_all

    try:
        from s3ec.dev.rigs.valkey import Valkey

        valkey = stack.enter_context(Valkey())
    except ConfigError as exc:
        raise CannotMeasureError(f"no Valkey: {exc}") from exc
    keys = [key_of(secrets.token_hex(32)) for _ in range(8 if context.quick else 64)]
    for name, server in servers.items():
        upload(server, name, keys, shape)
    context.say(f"{len(keys)} entries of {shape.nbytes} bytes from a bucket and a Redis")
    redis = {"url": valkey.url, "fill": True}
    with _node(context, {**settings, "replicas": [redis]}, "filler") as node:
        fetch_all(node, keys, shape, look_s=_LOOK_S)
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
                fetch_all(node, [key], shape, look_s=_LOOK_S)
                times[name].append(time.perf_counter() - begun)
    ratios = measure.ratios(times["redis"], times["bucket"])
    context.report(
        _REDIS,
        measure.percentile(ratios, 50),
        samples=len(keys),
        detail={"seconds": measure.medians(times), "spread": measure.spread(ratios)},
    )


@contextlib.contextmanager
def _node(context: Context, settings: Mapping[str, Any], name: str) -> Iterator[Any]:
    from s3ec.config import load_settings
    from s3ec.node import Node

    given = {**settings, "cache_dir": str(context.scratch / name), "min_free_bytes": 0}
    node = Node(load_settings(given).settings, NAMESPACE, name=f"s3ec-bench-{name}")
    try:
        yield node
    finally:
        node.close(10)


BENCH = Bench(ROWS, run)
