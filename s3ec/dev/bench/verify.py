# SPDX-License-Identifier: Apache-2.0
"""``bench verify``: ``s3ec verify --deep`` beside loops that only read the same objects.

All of them ask one SeaweedFS on this machine for the same objects, in turn. The audit compares
index and listing first, lists once more in the order of names, reads every object, and hashes every
byte; all of that is in its time.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable

from s3ec.dev.bench import measure
from s3ec.dev.bench.context import Bench, Context, Spec

_ROW = "verify.ratio_to_raw"
_SPEED = "verify.gb_per_s"
ROWS = (Spec(_ROW, "ratio", ">= 0.75"), Spec(_SPEED, "GB/s"))
_ROUNDS = 4
# With fewer the comparison of index and listing would be a large part of the time.
_OBJECTS = 400
_OBJECTS_QUICK = 16
_OURS = "s3ec verify --deep"


def run(context: Context) -> None:
    """Measure; needs the SeaweedFS binary.

    Raises:
        CannotMeasureError: There is no server to be had.
    """
    from s3ec.corpus import Corpus
    from s3ec.dev.bench import raw_loops
    from s3ec.dev.bench.corpus import filled
    from s3ec.identity import Layout
    from s3ec.index.maker import rebuild

    count = _OBJECTS_QUICK if context.quick else _OBJECTS
    with contextlib.ExitStack() as stack:
        _, made = stack.enter_context(filled(context, count))
        loops, missing = raw_loops.open_loops(made)
        cases: dict[str, Callable[[], float]] = {}
        for client, loop in loops.items():
            stack.callback(loop.close)
            cases[f"raw {client}"] = measure.timed(loop.fetch)
        corpus = stack.enter_context(Corpus(made.settings(context.scratch / "tier", "auto")))
        namespace = made.namespace.name
        corpus.run(lambda store: rebuild(store, Layout(namespace)))

        def audit() -> None:
            found = corpus.verify(namespace, deep=True)
            if not found.agrees or found.deep is None or found.deep.objects != count:
                raise RuntimeError(f"a sound corpus does not agree: {found}")

        cases[_OURS] = measure.timed(audit)
        context.say(f"{context.rounds(_ROUNDS)} rounds")
        kept = measure.interleave(cases, rounds=context.rounds(_ROUNDS))
    nbytes = count * made.entry_bytes
    speeds = {case: [nbytes / one / 1e9 for one in times] for case, times in kept.items()}
    raw = [case for case in speeds if case != _OURS]
    fastest = max(raw, key=lambda case: statistics.median(speeds[case]))
    ratios = {case: measure.ratios(speeds[case], speeds[fastest]) for case in speeds}
    about = {"objects": count, "object_bytes": made.entry_bytes, "not_installed": missing}
    for row, values in ((_ROW, ratios), (_SPEED, speeds)):
        samples = count * len(values[_OURS])
        note = f"the fastest is {fastest}"
        context.report_median(row, values, _OURS, samples=samples, note=note, detail=about)


BENCH = Bench(ROWS, run)
