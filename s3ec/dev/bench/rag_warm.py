# SPDX-License-Identifier: Apache-2.0
"""``bench rag_warm``: hits on a warm disk, beside vLLM's ECExampleConnector on a local folder.

The questions are those of ``bench rag``. For each encoder, with a language model and without, three
engines run side by side: s3ec, the example, and the example with one copy a load, which is what the
memory of a device costs at least. They are asked the same questions in turn, in several rounds, by
one client and by two. A ratio is the median over the rounds of two figures of one round.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from s3ec.dev.bench import measure, rag, rag_rig, workloads
from s3ec.dev.bench.context import Bench, Context, Spec
from s3ec.dev.bench.rag_rig import CONFIGS, Leg

_P50, _TOTAL, _PLAIN, _ENCODES, _LEGS = (
    "rag.warm_p50_ratio",
    "rag.warm_total_ratio",
    "rag.warm_p50_ratio_plain",
    "rag.warm_encodes",
    "rag.warm_legs",
)
ROWS = (
    Spec(_P50, "ratio", "<= 1.1"),
    Spec(_TOTAL, "ratio", "<= 1.1"),
    Spec(_PLAIN, "ratio", "<= 1.2"),
    Spec(_ENCODES, "1", "== 0"),
    Spec(_LEGS, "1"),
)
# Not the tiered manager: it would learn from round to round what is asked for often, and load less.
_NUMBERS = _OURS, _EXAMPLE, _COPIES = 8, 5, 7
_ENCODE_MS, _CLIENTS = (14, 60), (1, 2)
_LATENCY_MS = 20
_FACTOR, _ROUNDS = 2 / 135, 13


class Setting(NamedTuple):
    """What is the same for the three that are compared."""

    encode_ms: int
    language_model: bool
    clients: int

    @property
    def name(self) -> str:
        """For people."""
        model = "a" if self.language_model else "no"
        return f"{self.encode_ms} ms, {model} language model, clients: {self.clients}"


def run(context: Context, device: str = "cpu") -> None:
    """Measure all settings.

    Args:
        context: Takes the rows.
        device: Where the engines run: ``cpu`` or ``cuda``.
    """
    workload = workloads.questions(factor=_FACTOR)
    encode_ms = _ENCODE_MS[:1] if context.quick else _ENCODE_MS
    encoder = rag.encoder_for(context, "cpu")
    found: dict[Setting, Mapping[int, Leg]] = {}
    for ms in encode_ms:
        slow = replace(encoder, pause_s=ms / 1e3)
        with rag_rig.running(
            *(context, slow, workload, _NUMBERS, (_LATENCY_MS,)), device=device, name=f"{ms} ms"
        ) as rig:
            for language_model in (False, True):
                settings = [Setting(ms, language_model, clients) for clients in _CLIENTS]
                found |= _side_by_side(context, rig, settings, workload)
    loop = f"{context.rounds(_ROUNDS)} rounds"
    report(context, found, rag.about(workload, encoder, device, loop))


def _side_by_side(
    context: Context,
    rig: rag_rig.Rig,
    settings: Sequence[Setting],
    workload: workloads.Workload,
) -> dict[Setting, Mapping[int, Leg]]:
    """Start an engine of each configuration, and ask them in settings that differ in clients."""
    found: dict[Setting, Mapping[int, Leg]] = {one: _legs() for one in settings}
    with contextlib.ExitStack() as stack:
        engines = {}
        for number, leg in _legs().items():
            context.say(f"starting {leg.name}")
            started = rig.started(leg, language_model=settings[0].language_model)
            engines[number] = stack.enter_context(started)

        def ask(setting: Setting, leg: Leg) -> None:
            rig.ask(leg, engines[leg.number], workload.requests, setting.clients)

        for setting, legs in found.items():
            context.say(setting.name)
            asks = {leg.name: partial(ask, setting, leg) for leg in legs.values()}
            # All rounds count: most encodes are in the first one.
            measure.interleave(asks, rounds=context.rounds(_ROUNDS), warmup=0)
    return found


def _legs() -> dict[int, Leg]:
    return {n: Leg(n, _LATENCY_MS if CONFIGS[n].has_bucket else 0) for n in _NUMBERS}


def report(
    context: Context, found: Mapping[Setting, Mapping[int, Leg]], about: Mapping[str, Any]
) -> None:
    """Report all rows; each has the worst setting's figure.

    Args:
        context: Takes them.
        found: What was measured.
        about: What the run was of.
    """
    samples = sum(len(legs[_OURS].first_s) for legs in found.values())
    crowded = [one for one in found if one.language_model and one.clients > 1]
    for name, theirs, figure, settings in (
        (_P50, _COPIES, 0, found),
        (_TOTAL, _COPIES, 1, found),
        (_PLAIN, _EXAMPLE, 0, crowded),
    ):
        cases = {
            setting.name: measure.ratios(
                *([each[figure] for each in found[setting][n].rounds] for n in (_OURS, theirs))
            )
            for setting in settings
        }
        context.report_slowest(name, cases, samples=samples, note=f"({_OURS}) over ({theirs})")
    encodes = {setting.name: legs[_OURS].encodes for setting, legs in found.items()}
    context.report(_ENCODES, max(encodes.values()), samples=samples, detail={"cases": encodes})
    legs = {f"{one.name}: {leg.name}": leg for one, legs in found.items() for leg in legs.values()}
    rag.report_legs(context, _LEGS, legs, about)


BENCH = Bench(ROWS, run)
