# SPDX-License-Identifier: Apache-2.0
"""``bench advise``: what `s3ec advise` foretells of a hit, beside what a hit really gains.

Three presets of an encoder's cost and a store's distance. A producer fills the bucket. A consumer
with an empty tier, whose requests wait for the bucket, and an engine without the connector are
asked the same questions in turn. The foretold gain is that of ``s3ec advise``: encoding as the
producer's own metrics have it, and one object of the same size read through the same proxy.
"""

from __future__ import annotations

import contextlib
import secrets
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from s3ec.dev.bench.context import Bench, CannotMeasureError, Context
from s3ec.dev.bench.result import Spec
from s3ec.dev.rigs.vllm_cpu import NEW_PICTURES, ONE_PROCESS

if TYPE_CHECKING:
    from s3ec.dev.rigs.engine import EngineProcess
    from s3ec.dev.rigs.proxy import FaultProxy

_ERROR = "advise.latency_error"
ROWS = (Spec(_ERROR, "ratio", "<= 0.2"),)
# Milliseconds of one encode, and those that the store takes longer.
_PRESETS = ((120.0, 5.0), (300.0, 60.0), (40.0, 150.0))
_QUESTIONS, _QUICK_QUESTIONS = 24, 10
# Whichever of these is a hit first says that the consumer has read the index.
_SENTINELS = 40
_ROWS, _WIDTH = 64, 64  # of the tiny model
_BUCKET = "advise"
_PLAIN, _PRODUCER, _CONSUMER = "no connector", "producer", "consumer"
_HITS = "vllm:s3ec_hits"
_SAVED = "vllm:s3ec_saves"
_SECONDS, _ENCODED = "vllm:s3ec_encode_seconds", "vllm:s3ec_encoded_rows"
_PATIENCE_S = 60.0


def run(context: Context) -> None:
    """Measure; needs the SeaweedFS binary and vLLM.

    Raises:
        CannotMeasureError: There is no server or no vLLM, or what should be a hit was none.
    """
    from s3ec.dev.bench.soak_engine import write_patterns

    count = _QUICK_QUESTIONS if context.quick else _QUESTIONS
    pictures = write_patterns(context.scratch / "pictures", count + 1, 0)
    found: dict[str, dict[str, float]] = {}
    with _engines(context) as (engines, proxy, settings):
        for encode_ms, store_ms in _PRESETS:
            name = f"{encode_ms:.0f} ms to encode, {store_ms:.0f} ms to the store"
            context.say(name)
            for engine in engines.values():
                engine.slow_encoder(encode_ms / 1e3)
            found[name] = _compare(engines, proxy, settings, pictures, count, store_ms)
            context.say(", ".join(f"{key} {value:.3g}" for key, value in found[name].items()))
    error = max(one["error"] for one in found.values())
    context.report(_ERROR, error, samples=count * len(_PRESETS), detail={"presets": found})


def _compare(
    engines: dict[str, EngineProcess],
    proxy: FaultProxy,
    settings: dict[str, Any],
    pictures: list[Path],
    count: int,
    store_ms: float,
) -> dict[str, float]:
    """Foretold and measured gain of one preset, in milliseconds, and how far they are apart."""
    from s3ec.dev.rigs.proxy import Rule
    from s3ec.dev.rigs.proxy_faults import Delay
    from s3ec.doctor.advise import Measured, inputs_of, measure_bucket, measure_tier
    from s3ec.payoff import Known, pay_off
    from s3ec.settings import Settings

    names = [secrets.token_hex(32) for _ in range(count)]
    sentinels = [secrets.token_hex(32) for _ in range(_SENTINELS)]
    encode_ms_a_row = _fill(engines[_PRODUCER], pictures, [*names, *sentinels])
    _follow(engines[_CONSUMER], pictures[-1], sentinels)
    proxy.add(Rule(Delay(store_ms / 1e3)))
    try:
        here = Settings.model_validate(settings)
        latency = measure_bucket(here, _ROWS * _WIDTH * 2)
        tier_ms = measure_tier(here.cache_dir, _ROWS * _WIDTH * 2)
        before = _counters(engines[_CONSUMER]).get(_HITS, 0)
        with_s3ec: list[float] = []
        without: list[float] = []
        for picture, identifier in zip(pictures, names, strict=False):
            prompt = _prompt(picture, identifier)
            for name, times in ((_PLAIN, without), (_CONSUMER, with_s3ec)):
                (answer,) = engines[name].chat([prompt], max_tokens=1)
                times.append(answer["first_token_s"] * 1e3)
        hits = _counters(engines[_CONSUMER]).get(_HITS, 0) - before
    finally:
        proxy.clear()
    if hits != count:
        raise CannotMeasureError(f"{hits:.0f} hits for {count} questions")
    known = Known(rows=_ROWS, width=_WIDTH)
    found = Measured(encode_ms_a_row=encode_ms_a_row, latency=latency, tier_ms=tier_ms)
    inputs = inputs_of(known, found)
    foretold = pay_off(inputs).gain_ms
    gain = statistics.median(without) - statistics.median(with_s3ec)
    return {
        "encode_ms": inputs.encode_ms.value,
        "fetch_ms": inputs.fetch_ms.value,
        "foretold_ms": foretold,
        "measured_ms": gain,
        "error": abs(foretold - gain) / abs(gain),
        "without_ms": statistics.median(without),
        "with_ms": statistics.median(with_s3ec),
    }


def _counters(engine: EngineProcess) -> dict[str, float]:
    """Its counters as of now: vLLM takes them over in the steps of a request."""
    from s3ec.dev.rigs.engine import text

    for _ in range(2):
        engine.chat([[text("what time is it?")]], max_tokens=2)
    return engine.counters()


def _prompt(picture: Path, name: str) -> list[dict[str, Any]]:
    from s3ec.dev.rigs.engine import image, text

    return [image(picture, name), text("what is in it?")]


def _fill(producer: EngineProcess, pictures: list[Path], names: list[str]) -> float:
    """Have these encoded and stored; milliseconds for a row, as the producer's metrics say."""
    before = _counters(producer)
    for number, name in enumerate(names):
        producer.chat([_prompt(pictures[min(number, len(pictures) - 1)], name)], max_tokens=1)
    _until(
        lambda: _counters(producer).get(_SAVED, 0) - before.get(_SAVED, 0) >= len(names),
        "all is stored",
    )
    after = _counters(producer)
    spent = {name: after.get(name, 0) - before.get(name, 0) for name in (_SECONDS, _ENCODED)}
    if not spent[_ENCODED]:
        raise CannotMeasureError("the producer does not say what encoding took")
    return spent[_SECONDS] / spent[_ENCODED] * 1e3


def _follow(consumer: EngineProcess, picture: Path, sentinels: list[str]) -> None:
    """Wait until the consumer knows what was stored; each sentinel can be asked for once."""
    left = iter(sentinels)

    def is_hit() -> bool:
        before = _counters(consumer).get(_HITS, 0)
        consumer.chat([_prompt(picture, next(left))], max_tokens=1)
        return _counters(consumer).get(_HITS, 0) > before

    _until(is_hit, "the consumer has read the index", pause_s=1.0)


def _until(condition: Any, what: str, pause_s: float = 0.1) -> None:
    end = time.monotonic() + _PATIENCE_S
    while not condition():
        if time.monotonic() > end:
            raise CannotMeasureError(f"not so after {_PATIENCE_S:.0f} s: {what}")
        time.sleep(pause_s)


@contextlib.contextmanager
def _engines(
    context: Context,
) -> Iterator[tuple[dict[str, EngineProcess], FaultProxy, dict[str, Any]]]:
    """The three engines, the proxy before their bucket, and settings for that bucket."""
    from s3ec.dev.rigs.engine import EngineProcess, ec_config
    from s3ec.dev.rigs.models import write_gemma3
    from s3ec.dev.rigs.proxy import FaultProxy
    from s3ec.errors import ConfigError
    from s3ec.testing.server import LocalS3

    context.say("starting a server and three engines")
    with contextlib.ExitStack() as stack:
        try:
            server = stack.enter_context(LocalS3())
            model = write_gemma3(context.scratch / "model")
        except (ConfigError, ImportError) as exc:
            raise CannotMeasureError(str(exc)) from exc
        server.create_bucket(_BUCKET)
        stack.enter_context(_environment(server.env()))
        proxy = stack.enter_context(FaultProxy(server.endpoint_url))
        settings = {
            "bucket": _BUCKET,
            "endpoint_url": proxy.url,
            "min_free_bytes": 0,
            "index_refresh_s": 0.5,
            "wait": "always",
            "weights": "name",
        }
        roles = {_PLAIN: None, _PRODUCER: "ec_producer", _CONSUMER: "ec_consumer"}
        engines = {
            name: EngineProcess(
                model,
                ec=None
                if role is None
                else ec_config(
                    role,
                    {**settings, "cache_dir": str(context.scratch / f"tier-{role}")},
                    ec_connector_module_path="s3ec.connector",
                ),
                log_path=context.scratch / f"{role}.log",
                media=context.scratch,
                env=server.env() | ONE_PROCESS,
                options=NEW_PICTURES,
            )
            for name, role in roles.items()
        }
        for engine in engines.values():
            stack.callback(engine.stop, 5)
        with ThreadPoolExecutor(len(engines)) as pool:
            list(pool.map(EngineProcess.start, engines.values()))
        yield engines, proxy, {**settings, "cache_dir": str(context.scratch / "tier")}


@contextlib.contextmanager
def _environment(names: dict[str, str]) -> Iterator[None]:
    """The server's keys, for what this process asks of it."""
    from unittest import mock

    with mock.patch.dict("os.environ", names):
        yield


BENCH = Bench(ROWS, run)
