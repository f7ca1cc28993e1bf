# SPDX-License-Identifier: Apache-2.0
"""``bench verify``: ``s3ec verify --deep`` beside a loop that only reads the same objects.

Both ask one SeaweedFS on this machine for the same objects, in turn. The audit compares
index and listing first, lists once more in the order of names, reads every object, and hashes every
byte; all of that is in its time.
"""

from __future__ import annotations

import contextlib

from s3ec.dev.bench import measure
from s3ec.dev.bench.context import Bench, Context, Spec

_ROW = "verify.ratio_to_raw"
_SPEED = "verify.gb_per_s"
ROWS = (Spec(_ROW, "ratio", ">= 0.75"), Spec(_SPEED, "GB/s"))
_ROUNDS = 4
# With fewer the comparison of index and listing would be a large part of the time.
_OBJECTS = 400
_OBJECTS_QUICK = 16
_RAW, _OURS = "raw obstore", "s3ec verify --deep"


def run(context: Context) -> None:
    """Measure; needs the SeaweedFS binary.

    Raises:
        CannotMeasureError: There is no server to be had.
    """
    from s3ec.corpus import Corpus
    from s3ec.dev.bench.corpus import filled
    from s3ec.dev.bench.raw_loops import RawLoop
    from s3ec.identity import Layout
    from s3ec.index.maker import rebuild

    count = _OBJECTS_QUICK if context.quick else _OBJECTS
    with contextlib.ExitStack() as stack:
        _, made = stack.enter_context(filled(context, count))
        loop = RawLoop(made)
        stack.callback(loop.close)
        corpus = stack.enter_context(Corpus(made.settings(context.scratch / "tier")))
        namespace = made.namespace.name
        corpus.run(lambda store: rebuild(store, Layout(namespace)))

        def audit() -> None:
            found = corpus.verify(namespace, deep=True)
            if not found.agrees or found.deep is None or found.deep.objects != count:
                raise RuntimeError(f"a sound corpus does not agree: {found}")

        cases = {_RAW: measure.timed(loop.fetch), _OURS: measure.timed(audit)}
        context.say(f"{context.rounds(_ROUNDS)} rounds")
        kept = measure.interleave(cases, rounds=context.rounds(_ROUNDS))
    nbytes = count * made.entry_bytes
    speeds = {case: [nbytes / one / 1e9 for one in times] for case, times in kept.items()}
    ratios = {_OURS: measure.ratios(speeds[_OURS], speeds[_RAW])}
    about = {"objects": count, "object_bytes": made.entry_bytes}
    for row, values, note in ((_ROW, ratios, f"over {_RAW}"), (_SPEED, speeds, "")):
        samples = count * len(kept[_OURS])
        context.report_median(row, values, _OURS, samples=samples, note=note, detail=about)


BENCH = Bench(ROWS, run)
