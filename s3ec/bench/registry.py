# SPDX-License-Identifier: Apache-2.0
"""The benchmarks by name; a module is imported when it is asked for."""

from __future__ import annotations

import importlib
from dataclasses import dataclass

from s3ec.bench.context import Bench


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of ``s3ec bench list``.

    Attributes:
        module: Where its BENCH is.
        summary: What it measures.
        typical_s: How long it takes on two cores; ``all`` keeps this much time for it.
    """

    module: str
    summary: str
    typical_s: float


ENTRIES: dict[str, Entry] = {
    "hooks": Entry(
        "s3ec.bench.hooks",
        "What the scheduler's hooks cost, beside vLLM's own ECExampleConnector.",
        60,
    ),
}


def load(name: str) -> Bench:
    """Import one benchmark.

    Raises:
        KeyError: There is none of this name.
    """
    bench = importlib.import_module(ENTRIES[name].module).BENCH
    if not isinstance(bench, Bench):
        raise TypeError(f"{ENTRIES[name].module}.BENCH is not a Bench")
    return bench
