# SPDX-License-Identifier: Apache-2.0
"""``bench advise``: what `s3ec advise` foretells of a hit, beside what a hit really gains.

Three presets of an encoder's cost and a store's distance. A producer fills the bucket. A consumer
with an empty tier, whose requests wait for the bucket, and an engine without the connector are
asked the same questions in turn. The foretold gain is that of ``s3ec advise``: encoding as the
producer's own metrics have it, and one object of the same size read through the same proxy.
"""

from __future__ import annotations

import secrets
import statistics
from pathlib import Path
from typing import TYPE_CHECKING

from s3ec.dev.bench import engines
from s3ec.dev.bench.context import Bench, CannotMeasureError, Context
from s3ec.dev.bench.result import Spec

if TYPE_CHECKING:
    from s3ec.dev.rigs.engine import EngineProcess

_ERROR = "advise.latency_error"
ROWS = (Spec(_ERROR, "ratio", "<= 0.2"),)
# Milliseconds of one encode, and those that the store takes longer.
_PRESETS = ((120.0, 5.0), (300.0, 60.0), (40.0, 150.0))
_QUESTIONS, _QUICK_QUESTIONS = 24, 10
# Whichever of these is a hit first says that the consumer has read the index.
_SENTINELS = 40
_PLAIN, _PRODUCER, _CONSUMER = "no connector", "producer", "consumer"
_SECONDS, _ENCODED = "vllm:s3ec_encode_seconds", "vllm:s3ec_encoded_rows"


def run(context: Context) -> None:
    """Measure; needs the SeaweedFS binary and vLLM.

    Raises:
        CannotMeasureError: There is no server or no vLLM, or what should be a hit was none.
    """
    from s3ec.dev.bench.soak_engine import write_patterns

    count = _QUICK_QUESTIONS if context.quick else _QUESTIONS
    pictures = write_patterns(context.scratch / "pictures", count + 1, 0)
    found: dict[str, dict[str, float]] = {}
    roles = {
        _PLAIN: None,
        _PRODUCER: ("ec_producer", {}),
        _CONSUMER: ("ec_consumer", {"wait": "always"}),
    }
    with engines.running(context, roles) as rig:
        for encode_ms, store_ms in _PRESETS:
            name = f"{encode_ms:.0f} ms to encode, {store_ms:.0f} ms to the store"
            context.say(name)
            for engine in rig.by_name.values():
                engine.slow_encoder(encode_ms / 1e3)
            found[name] = _compare(rig, pictures, count, store_ms)
            context.say(", ".join(f"{key} {value:.3g}" for key, value in found[name].items()))
    error = max(one["error"] for one in found.values())
    context.report(_ERROR, error, samples=count * len(_PRESETS), detail={"presets": found})


def _compare(
    rig: engines.Engines, pictures: list[Path], count: int, store_ms: float
) -> dict[str, float]:
    """Foretold and measured gain of one preset, in milliseconds, and how far they are apart."""
    from s3ec.dev.rigs.proxy import Rule
    from s3ec.dev.rigs.proxy_faults import Delay
    from s3ec.doctor.advise import Measured, inputs_of, measure_bucket, measure_tier
    from s3ec.payoff import Known, pay_off
    from s3ec.settings import Settings

    names = [secrets.token_hex(32) for _ in range(count)]
    sentinels = [secrets.token_hex(32) for _ in range(_SENTINELS)]
    encode_ms_a_row = _fill(rig.by_name[_PRODUCER], pictures, [*names, *sentinels])
    engines.follow(rig.by_name[_CONSUMER], pictures[-1], sentinels)
    rig.proxy.add(Rule(Delay(store_ms / 1e3)))
    try:
        here = Settings.model_validate(rig.settings)
        latency = measure_bucket(here, engines.ROWS * engines.WIDTH * 2)
        tier_ms = measure_tier(here.cache_dir, engines.ROWS * engines.WIDTH * 2)
        before = engines.counters(rig.by_name[_CONSUMER]).get(engines.HITS, 0)
        with_s3ec: list[float] = []
        without: list[float] = []
        for picture, identifier in zip(pictures, names, strict=False):
            prompt = engines.prompt([picture], [identifier])
            for name, times in ((_PLAIN, without), (_CONSUMER, with_s3ec)):
                (answer,) = rig.by_name[name].chat([prompt], max_tokens=1)
                times.append(answer["first_token_s"] * 1e3)
        hits = engines.counters(rig.by_name[_CONSUMER]).get(engines.HITS, 0) - before
    finally:
        rig.proxy.clear()
    if hits != count:
        raise CannotMeasureError(f"{hits:.0f} hits for {count} questions")
    known = Known(rows=engines.ROWS, width=engines.WIDTH)
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


def _fill(producer: EngineProcess, pictures: list[Path], names: list[str]) -> float:
    """Have these encoded and stored; milliseconds for a row, as the producer's metrics say."""
    before = engines.counters(producer)
    engines.fill(producer, pictures, names)
    after = engines.counters(producer)
    spent = {name: after.get(name, 0) - before.get(name, 0) for name in (_SECONDS, _ENCODED)}
    if not spent[_ENCODED]:
        raise CannotMeasureError("the producer does not say what encoding took")
    return spent[_SECONDS] / spent[_ENCODED] * 1e3


BENCH = Bench(ROWS, run)
