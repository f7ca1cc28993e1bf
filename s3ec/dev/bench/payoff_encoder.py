# SPDX-License-Identifier: Apache-2.0
"""The part of ``bench payoff`` with real engines: what s3ec believes that encoding costs.

The encoder of a tiny model sleeps before it encodes. What each of its calls took is noted around
the call, and s3ec measures by vLLM's hooks alone. One engine for each role, asked in turn for one
new picture after another.
"""

from __future__ import annotations

import contextlib
import secrets
import statistics
from collections.abc import Iterator
from typing import TYPE_CHECKING

from s3ec.dev.bench.context import CannotMeasureError, Context
from s3ec.dev.bench.result import Spec
from s3ec.dev.rigs.vllm_cpu import NEW_PICTURES, ONE_PROCESS

if TYPE_CHECKING:
    from s3ec.dev.rigs.engine import EngineProcess

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
        CannotMeasureError: There is no vLLM.
    """
    from s3ec.dev.bench.soak_engine import write_patterns
    from s3ec.dev.rigs.engine import image, text

    pictures = write_patterns(context.scratch / "pictures", _PICTURES, 0)
    count = _QUICK_ENCODES if context.quick else _ENCODES
    errors: dict[str, float] = {}
    with _engines(context) as engines:
        for seconds in _ENCODE_S:
            for engine in engines.values():
                engine.slow_encoder(seconds)
                engine.encoder()
            for number in range(count):
                picture = pictures[number % _PICTURES]
                for engine in engines.values():
                    prompt = [image(picture, secrets.token_hex(32)), text("what is in it?")]
                    engine.chat([prompt], max_tokens=1)
            for role, engine in engines.items():
                found = engine.encoder()
                ((kind, row_s),) = found["learned"].items()
                true = statistics.median(took / rows for took, rows in found["times"][-_TOLD:])
                errors[f"{role}, {1000 * seconds:.0f} ms"] = ratio = row_s / true
                context.say(f"{role} {kind} {1000 * seconds:.0f} ms: learned {ratio:.3f} of it")
    worst = max(errors.values(), key=lambda one: max(one, 1 / one))
    context.report(
        _RATIO,
        max(worst, 1 / worst),
        samples=count * len(errors),
        detail={"learned_over_true": errors},
    )


@contextlib.contextmanager
def _engines(context: Context) -> Iterator[dict[str, EngineProcess]]:
    from s3ec.dev.rigs.engine import EngineProcess, ec_config
    from s3ec.dev.rigs.models import write_gemma3
    from s3ec.errors import ConfigError

    context.say(f"starting {len(_ROLES)} engines")
    scratch = context.scratch / "encoder"
    (scratch / "corpus").mkdir(parents=True)
    with contextlib.ExitStack() as stack:
        engines: dict[str, EngineProcess] = {}
        try:
            model = write_gemma3(scratch / "model")
        except (ConfigError, ImportError) as exc:
            raise CannotMeasureError(str(exc)) from exc
        for role in _ROLES:
            settings = {
                "url": f"file://{scratch}/corpus",
                "cache_dir": str(scratch / f"tier-{role}"),
                "min_free_bytes": 0,
            }
            engines[role] = stack.enter_context(
                EngineProcess(
                    model,
                    ec=ec_config(role, settings, ec_connector_module_path="s3ec.connector"),
                    log_path=scratch / f"{role}.log",
                    media=context.scratch,
                    env=ONE_PROCESS,
                    options=NEW_PICTURES,
                )
            )
        yield engines
