# SPDX-License-Identifier: Apache-2.0
"""Made-up bases on this node's disk, as if they had been downloaded, and readers of them."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from s3ec.config import load_settings
from s3ec.dev.rigs.index_corpus import IndexCorpus, hits
from s3ec.identity import Key, Layout, Namespace
from s3ec.index.lookup import Base
from s3ec.index.manifest import BaseManifest
from s3ec.node import Node
from s3ec.testing.memory_store import MemoryBucket, MemoryStore

NAMESPACE = Namespace.from_descriptor({"model": "s3ec/bench"})
LAYOUT = Layout(NAMESPACE.name)
_TIMEOUT_S = 300.0
Mode = Literal["exact", "bloom"]


@dataclass(frozen=True, slots=True)
class Made:
    """One base; picklable.

    Attributes:
        entries: Keys in it.
        head: Its commit.
        folder: Its files, under their names in the bucket.
        cache_dir: Of a node that has downloaded them: the same files.
    """

    entries: int
    head: BaseManifest
    folder: Path
    cache_dir: Path

    @property
    def names(self) -> list[str]:
        """Names in the bucket of all files, the head's last."""
        files = []
        for shard in self.head.shards:
            files += [self.head.segment_name(LAYOUT, shard), self.head.bloom_name(LAYOUT, shard)]
        return [*files, LAYOUT.head(self.head.version)]

    def exact_files(self) -> list[tuple[str, int]]:
        """Names and sizes of what an exact reader downloads."""
        return [(self.head.segment_name(LAYOUT, it), it.segment.nbytes) for it in self.head.shards]

    def base(self) -> Base:
        """Its rows, apart from any reader."""
        paths = [self.folder / name for name, _ in self.exact_files()]
        return Base.open(self.head, paths, NAMESPACE.name, exact=True)

    def delete(self) -> None:
        """Give the disk back."""
        shutil.rmtree(self.folder)
        shutil.rmtree(self.cache_dir, ignore_errors=True)


def make(scratch: Path, entries: int) -> Made:
    """Write a base; per million keys a second and 43 MB of disk."""
    folder = scratch / f"bucket-{entries}"
    head = IndexCorpus(entries).write(folder, NAMESPACE.name)
    made = Made(head.entries, head, folder, scratch / f"node-{entries}")
    with reader(made, "exact", follow=False) as node:
        files = node.tier.open_index()
        for name in made.names[:-1]:
            path = Path(files.path(name.removeprefix(LAYOUT.manifest)))
            path.parent.mkdir(parents=True, exist_ok=True)
            os.link(folder / name, path)
    return made


@contextmanager
def reader(made: Made, mode: Mode, *, follow: bool = True) -> Iterator[Node]:
    """A node whose bucket, in memory, says that this is the base; its files are here already.

    Args:
        made: The base.
        mode: The setting ``index``.
        follow: Open it.
    """
    bucket = MemoryBucket()
    bucket.objects[LAYOUT.head(made.head.version)] = made.head.to_json()
    extra = {
        "bucket": "in-memory",
        "cache_dir": str(made.cache_dir),
        "min_free_bytes": 0,
        "index": mode,
    }
    node = Node(
        load_settings(extra).settings, NAMESPACE, store=MemoryStore(bucket), name="s3ec-bench"
    )
    try:
        if follow:
            load(node)
        yield node
    finally:
        node.close(10)


def load(node: Node) -> None:
    """Refresh until the base is open.

    Raises:
        RuntimeError: It cannot be opened, or not in time.
    """
    deadline = time.monotonic() + _TIMEOUT_S
    while True:
        node.loop.run(node.index.refresh(), timeout_s=_TIMEOUT_S)
        if node.index.loaded:
            break
        if time.monotonic() > deadline:
            raise RuntimeError(f"the base was not open after {_TIMEOUT_S:.0f} s")
    if node.counters.get("index.bases") != 1:
        raise RuntimeError(f"the base was not opened: {node.counters.snapshot()}")


class Keys:
    """Fresh keys for every round of a benchmark, as the scheduler has them."""

    def __init__(self, base: Base, seed: int = 0) -> None:
        self._base = base
        self._seed = seed
        self._random = np.random.default_rng([seed, 1 << 33])

    def hits(self, count: int) -> list[Key]:
        """Of the base, at random."""
        self._seed += 1
        return keys_of(hits(self._base, count, seed=self._seed))

    def misses(self, count: int) -> list[Key]:
        """Of nothing."""
        some = self._random.bytes(16 * count)
        return keys_of([some[at : at + 16] for at in range(0, 16 * count, 16)])


def keys_of(digests: Sequence[bytes]) -> list[Key]:
    """Keys whose names nobody asks for."""
    return [Key("", "", digest) for digest in digests]


def check_answers(contains: Callable[[Key], bool], keys: Sequence[Key], *, expected: bool) -> None:
    """See that what is timed answers as it should.

    Raises:
        RuntimeError: It does not.
    """
    wrong = sum(contains(key) is not expected for key in keys)
    if wrong:
        raise RuntimeError(f"{wrong} of {len(keys)} lookups did not say {expected}")
