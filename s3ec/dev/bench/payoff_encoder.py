# SPDX-License-Identifier: Apache-2.0
"""The part of ``bench payoff`` with real engines: what s3ec believes that encoding costs.

The encoder of a tiny model sleeps before it encodes. What each of its calls took is noted around
the call, and s3ec measures by vLLM's hooks alone. One engine for each role, asked in turn for one
new picture after another.
"""

from __future__ import annotations

import secrets
import statistics

from s3ec.dev.bench import engines, measure
from s3ec.dev.bench.context import Context
from s3ec.dev.bench.result import Spec

_RATIO = "payoff.encode_learned_ratio"
ROWS = (Spec(_RATIO, "ratio", "<= 1.25"),)
_ENCODE_S = (0.015, 0.1, 1.0)
# What was learned before counts for little after so many, and a time five times as long, as the
# steps from one cost to the next one are, needs one more.
_ENCODES, _QUICK_ENCODES = 24, 16
_TOLD = 10  # the newest, which what was learned is compared with
_ROLES = ("ec_consumer", "ec_both", "ec_producer")
_PICTURES = 32


def run(context: Context) -> None:
    """Compare what was learned with what the encoder took.

    Raises:
        CannotMeasureError: There is no server or no vLLM.
    """
    from s3ec.dev.bench.soak_engine import write_patterns

    pictures = write_patterns(context.scratch / "pictures", _PICTURES, 0)
    count = _QUICK_ENCODES if context.quick else _ENCODES
    errors: dict[str, float] = {}
    with engines.running(context, {role: (role, {}) for role in _ROLES}) as rig:
        for seconds in _ENCODE_S:
            for engine in rig.by_name.values():
                engine.slow_encoder(seconds)
                engine.encoder()
            for number in range(count):
                picture = pictures[number % _PICTURES]
                for engine in rig.by_name.values():
                    engine.chat([engines.prompt([picture], [secrets.token_hex(32)])], max_tokens=1)
            for role, engine in rig.by_name.items():
                found = engine.encoder()
                ((kind, row_s),) = found["learned"].items()
                true = statistics.median(took / rows for took, rows in found["times"][-_TOLD:])
                errors[f"{role}, {1000 * seconds:.0f} ms"] = ratio = row_s / true
                context.say(f"{role} {kind} {1000 * seconds:.0f} ms: learned {ratio:.3f} of it")
    context.report(
        _RATIO,
        measure.furthest_from_one(errors.values()),
        samples=count * len(errors),
        detail={"learned_over_true": errors},
    )
