# SPDX-License-Identifier: Apache-2.0
"""The benchmarks by name; a module is imported when it is asked for."""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass

from s3ec.dev.bench.context import Bench


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of ``s3ec bench list``.

    Attributes:
        module: Where it is.
        summary: What it measures.
        typical_s: How long it takes on two cores; ``all`` keeps this much time for it.
        alone: Only by its name: ``all`` would be too long with it.
        attribute: Its name in the module.
    """

    module: str
    summary: str
    typical_s: float
    alone: bool = False
    attribute: str = "BENCH"


ENTRIES: dict[str, Entry] = {
    "hooks": Entry(
        "s3ec.dev.bench.hooks",
        "What the scheduler's hooks cost, beside vLLM's own ECExampleConnector.",
        60,
    ),
    "fetch": Entry(
        "s3ec.dev.bench.fetch",
        "From the bucket into the tier, verified, beside raw GET loops of three S3 clients.",
        90,
    ),
    "fetch80": Entry(
        "s3ec.dev.bench.fetch",
        "The same with 80 ms to the bucket: `bench fetch --latency-ms 80`.",
        90,
    ),
    "fetch_8kb": Entry(
        "s3ec.dev.bench.fetch",
        "The same with embeddings of 8 KB.",
        60,
        attribute="SMALL",
    ),
    "fetch_30mb": Entry(
        "s3ec.dev.bench.fetch",
        "The same with embeddings of 30 MB.",
        90,
        attribute="LARGE",
    ),
    "load": Entry(
        "s3ec.dev.bench.load",
        "Into the encoder cache, verified, beside os.preadv and ECExampleConnector.",
        60,
    ),
    "save": Entry(
        "s3ec.dev.bench.save",
        "Inside save_caches, beside tensor.clone() and ECExampleConnector.",
        60,
    ),
    "index": Entry(
        "s3ec.dev.bench.index",
        "The index: lookups, memory, opening, compaction, and how soon a save is found.",
        240,
    ),
    "payoff": Entry(
        "s3ec.dev.bench.payoff",
        "What weighing waits gains, in vLLM's scheduler with a virtual clock.",
        600,
        alone=True,
    ),
    "encode": Entry(
        "s3ec.dev.bench.encode",
        "What one encode takes on this GPU, beside the estimate of `s3ec cost`.",
        300,
        alone=True,
    ),
    "rag": Entry(
        "s3ec.dev.bench.rag",
        "Questions over document images: vLLM alone, with s3ec, and with ECExampleConnector.",
        900,
        alone=True,
    ),
    "weights": Entry(
        "s3ec.dev.bench.weights",
        "The fingerprint of a 27B model's encoder, as an engine takes it when it starts.",
        20,
    ),
    "dead": Entry(
        "s3ec.dev.bench.dead",
        "A real engine whose store never answers, beside one without the connector.",
        600,
        alone=True,
    ),
    "soak": Entry(
        "s3ec.dev.bench.soak",
        "An hour of faults around real engines: wrong answers, deaths, losses, memory.",
        3900,
        alone=True,
    ),
    "precompute": Entry(
        "s3ec.dev.bench.precompute",
        "A job that fills a corpus beside vLLM's own loop; run again; and asked by a server.",
        1500,
        alone=True,
    ),
    "hydrate": Entry(
        "s3ec.dev.bench.hydrate",
        "A corpus to a node's tier, verified, beside raw loops that write files to the same disk.",
        900,
        alone=True,
    ),
    "verify": Entry(
        "s3ec.dev.bench.verify",
        "Every byte of a corpus checked, beside loops that read the same and check nothing.",
        240,
        alone=True,
    ),
    "gc": Entry(
        "s3ec.dev.bench.gc",
        "20,000 small objects deleted, beside boto3 with batches of 1000.",
        240,
        alone=True,
    ),
}

# `s3ec bench data`: how bytes move.
DATA = ("fetch", "fetch80", "fetch_8kb", "fetch_30mb", "load", "save")
# `s3ec bench corpus`: jobs over a corpus.
CORPUS = ("precompute", "hydrate", "verify", "gc")
_FAR = re.compile(r"fetch([1-9][0-9]{0,3})")


def together() -> list[str]:
    """What ``s3ec bench all`` runs."""
    return [name for name, entry in ENTRIES.items() if not entry.alone]


def load(name: str) -> Bench:
    """Import one benchmark; ``fetchMS`` is ``fetch`` with so many milliseconds to the bucket.

    Raises:
        KeyError: There is none of this name.
    """
    far = _FAR.fullmatch(name)
    if far is not None:
        from s3ec.dev.bench import fetch

        return fetch.far(int(far.group(1)))
    entry = ENTRIES[name]
    bench = getattr(importlib.import_module(entry.module), entry.attribute)
    if not isinstance(bench, Bench):
        raise TypeError(f"{entry.module}.{entry.attribute} is not a Bench")
    return bench
