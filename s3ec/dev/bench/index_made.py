# SPDX-License-Identifier: Apache-2.0
"""Made-up snapshots of any size, as if a node had downloaded them, and readers of them.

Digests of real keys are parts of a SHA-256, so evenly spread numbers are like them. The same seed
gives the same digests.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from s3ec.config import load_settings
from s3ec.dev.bench.corpus import NAMESPACE
from s3ec.identity import Key, Layout
from s3ec.index.bloom import write_bloom
from s3ec.index.local import NodeFolder
from s3ec.index.names import Names, SnapshotName, snapshots_prefix
from s3ec.index.snapshot import PARTS, Rows, Segment, merge, write_rows
from s3ec.node import Node
from s3ec.testing.memory_store import MemoryBucket, MemoryStore

LAYOUT = Layout(NAMESPACE.name)
_TIMEOUT_S = 300.0
# So old that a union of it is due.
_AGE_S = 3600.0


@dataclass(frozen=True, slots=True)
class Made:
    """One snapshot; picklable.

    Attributes:
        entries: Keys in it.
        name: Its name.
        cache_dir: Of a node that has downloaded it.
    """

    entries: int
    name: SnapshotName
    cache_dir: Path

    @property
    def folder(self) -> NodeFolder:
        """The node's files of the index."""
        return NodeFolder(self.cache_dir / "v1" / "index" / NAMESPACE.name)

    @property
    def object_name(self) -> str:
        """Its name in the bucket."""
        return f"{snapshots_prefix(LAYOUT)}{self.name}"

    @property
    def nbytes(self) -> int:
        """Size of its object."""
        return self.folder.rows_path(self.name).stat().st_size

    def segment(self) -> Segment:
        """Its rows, apart from any reader."""
        return Segment.open(self.folder.rows_path(self.name), NAMESPACE.name)

    def delete(self) -> None:
        """Give the disk back."""
        shutil.rmtree(self.cache_dir)


def make(scratch: Path, entries: int) -> Made:
    """Write a snapshot and its filter; 0.3 s and 24 MB of disk per million keys."""
    ulid = Names().next(time.time() - _AGE_S)
    made = Made(entries, SnapshotName(ulid, ulid), scratch / f"node-{entries}")
    with reader(made, follow=False):  # makes the folders
        rows, bloom = made.folder.rows_path(made.name), made.folder.filter_path(made.name)
        parts = (rows_of(entries, part) for part in range(PARTS))
        with made.folder.new_file(rows.name, 0, synced=False) as file:
            write_rows(file, NAMESPACE.name, parts, scratch)
        with made.folder.new_file(bloom.name, 0, synced=False) as file:
            write_bloom(file, made.segment().rows)
    return made


def rows_of(entries: int, part: int, *, seed: int = 0) -> Rows:
    """One of PARTS parts of so many rows, sorted; 0.3 s and 60 MiB per million.

    Args:
        entries: In all parts together.
        seed: Which corpus of this size.
    """
    counts = np.random.default_rng([seed, 1 << 32]).multinomial(entries, [1 / PARTS] * PARTS)
    random = np.random.default_rng([seed, part])
    width, count = 1 << 58, int(counts[part])
    hi = random.integers(part * width, (part + 1) * width - 1, count, "<u8", endpoint=True)
    lo = random.integers(0, 2**64 - 1, count, "<u8", endpoint=True)
    return merge([Rows(hi, lo, random.integers(2**16, 2**24, count, "<u4"))])


@contextmanager
def reader(made: Made, *, follow: bool = True) -> Iterator[Node]:
    """A node whose bucket, in memory, names this snapshot; its files are here already.

    Args:
        made: The snapshot.
        follow: Open it.
    """
    bucket = MemoryBucket()
    bucket.objects[made.object_name] = b""  # never read
    extra = {"bucket": "in-memory", "cache_dir": str(made.cache_dir), "min_free_bytes": 0}
    node = Node(
        load_settings(extra).settings, NAMESPACE, store=MemoryStore(bucket), name="s3ec-bench"
    )
    try:
        if follow:
            load(node, made)
        yield node
    finally:
        node.close(10)


def load(node: Node, made: Made) -> None:
    """Refresh until the snapshot is open.

    Raises:
        RuntimeError: It cannot be opened.
    """
    node.loop.run(node.index.refresh(now=True), timeout_s=_TIMEOUT_S)
    if node.index.counts().snapshot != made.name:
        raise RuntimeError(f"the snapshot was not opened: {node.counters.snapshot()}")


class Keys:
    """Fresh keys for every round of a benchmark, as the scheduler has them."""

    def __init__(self, segment: Segment, seed: int = 0) -> None:
        self._rows = segment.rows
        self._random = np.random.default_rng([seed, 1 << 33])

    def hits(self, count: int) -> list[Key]:
        """Of the snapshot, at random."""
        some = self._rows.select(self._random.integers(0, len(self._rows), count))
        halves = zip(some.hi.tolist(), some.lo.tolist(), strict=True)
        return keys_of([(hi << 64 | lo).to_bytes(16, "big") for hi, lo in halves])

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
