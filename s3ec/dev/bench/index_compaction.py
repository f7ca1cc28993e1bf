# SPDX-License-Identifier: Apache-2.0
"""Compaction of a base and a thousand deltas in a real bucket, in a process of its own."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from s3ec.counters import Counters
from s3ec.dev.bench.children import Child, anonymous_bytes_of, most_resident_bytes
from s3ec.dev.bench.context import Context
from s3ec.dev.bench.corpus import Corpus
from s3ec.dev.bench.index_bucket import settings_of
from s3ec.dev.bench.index_made import LAYOUT, NAMESPACE, Made
from s3ec.dev.rigs.index_corpus import IndexCorpus
from s3ec.index.base_writer import BuildOptions
from s3ec.index.compaction import compact
from s3ec.index.manifest import Ulids
from s3ec.index.rows import Rows
from s3ec.index.segment import encode_segment
from s3ec.store.open import open_store
from s3ec.store.retry import RetryStore

if TYPE_CHECKING:
    from s3ec.testing.server import LocalS3

# Those that an idle index has, and those that come later.
DELTAS, DELTAS_QUICK = (100, 900), (10, 40)
_ROWS = 1000
_UPLOADS = 4
_LOOK_S = 0.005
_TIMEOUT_S = 1800.0
PEAK, SECONDS = "compact.peak_mib", "compact.seconds"


def upload_deltas(server: LocalS3, corpus: Corpus, count: int, *, seed: int) -> None:
    """Put deltas of a thousand new keys each into the bucket.

    Args:
        count: How many.
        seed: Of their keys.
    """
    client = server.client()
    names = Ulids()

    def put(name: str, rows: Rows) -> None:
        body = b"".join(encode_segment(rows, NAMESPACE.name))
        client.put_object(Bucket=corpus.bucket, Key=LAYOUT.delta(name), Body=body)

    with ThreadPoolExecutor(_UPLOADS) as pool:
        named = [names.next(time.time()) for _ in range(count)]
        list(pool.map(put, named, _deltas(count, seed)))


def _deltas(count: int, seed: int) -> Iterator[Rows]:
    """Keys of another corpus, dealt out at random."""
    every = next(IndexCorpus(count * _ROWS, seed=seed).all_rows())  # fewer than fill a shard
    order = np.random.default_rng(seed).permutation(len(every))
    for some in np.array_split(order, count):
        yield every.select(np.sort(some))


def measure_compaction(context: Context, corpus: Corpus, made: Made, deltas: int) -> None:
    """Report time and peak memory of one compaction.

    The peak is of all anonymous memory of the process, the interpreter's included, looked at from
    outside every 5 ms. Files that it maps are the page cache's.
    """
    context.say(f"compaction of {made.entries} keys and {deltas} deltas")
    folder = context.scratch / "compaction"
    folder.mkdir()
    with Child(_compact, corpus, folder) as child:
        child.answer()  # that it is ready
        before = peak = anonymous_bytes_of(child.pid)
        child.tell("go")
        looks = 0
        deadline = time.monotonic() + _TIMEOUT_S
        while not child.has_answer and time.monotonic() < deadline:
            peak = max(peak, anonymous_bytes_of(child.pid))
            looks += 1
            time.sleep(_LOOK_S)
        done: dict[str, Any] = child.answer(1)
    about = {"entries": made.entries, "deltas": deltas, "entries_after": done["entries"]}
    context.report(
        PEAK,
        peak / 2**20,
        samples=looks,
        detail={
            **about,
            "before_mib": before / 2**20,
            "with_mapped_files_mib": done["most_resident_bytes"] / 2**20,
            "note": "anonymous memory of the process, the interpreter's included",
        },
    )
    context.report(SECONDS, done["seconds"], samples=1, detail=about)


def _compact(pipe: Connection, corpus: Corpus, folder: Path) -> None:
    """A child's whole life."""
    with corpus.environment():
        asyncio.run(_compact_once(pipe, corpus, folder))


async def _compact_once(pipe: Connection, corpus: Corpus, folder: Path) -> None:
    store = RetryStore(open_store(settings_of(corpus, folder)), Counters())
    try:
        gc.collect()
        pipe.send("ready")
        pipe.recv()
        started = time.perf_counter()
        made = await compact(store, LAYOUT, BuildOptions(folder=folder))
        seconds = time.perf_counter() - started
        if made is None:
            raise RuntimeError("nobody else compacts, and it was beaten")
        pipe.send(
            {
                "seconds": seconds,
                "entries": made.head.entries,
                "most_resident_bytes": most_resident_bytes(),
            }
        )
    finally:
        await store.close()
