# SPDX-License-Identifier: Apache-2.0
"""Made-up indexes of any size, a shard at a time: the same seed gives the same digests.

Digests of real keys are parts of a SHA-256, so evenly spread numbers are like them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from s3ec.identity import Layout
from s3ec.index.bloom import build_bloom
from s3ec.index.lookup import Base
from s3ec.index.manifest import BaseFile, BaseManifest, Shard, shard_ranges
from s3ec.index.rows import Array, Rows
from s3ec.index.segment import encode_segment

WIDTH = 2048
_RUN = "0123456789abcdef"


@dataclass(frozen=True, slots=True)
class IndexCorpus:
    """A corpus of digests that exists as numbers only.

    Attributes:
        entries: Keys in it.
        seed: Which corpus of this size.
    """

    entries: int
    seed: int = 0

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """Leading bytes of each shard."""
        return shard_ranges(self.entries)

    def rows(self, shard: int) -> Rows:
        """All rows of one shard, sorted; 0.3 s and 60 MiB per million.

        Args:
            shard: Position in ``ranges``.
        """
        ranges = self.ranges
        count = self._count(shard, len(ranges))
        random = np.random.default_rng([self.seed, shard])
        first, last = ranges[shard]
        hi = random.integers(first << 56, (last + 1 << 56) - 1, count, "<u8", endpoint=True)
        hi.sort()
        embeddings = random.integers(16, 4096, count, "<u4")
        return Rows.of_digests(
            hi,
            random.integers(0, 2**64 - 1, count, "<u8", endpoint=True),
            nbytes=embeddings * np.uint64(2 * WIDTH) + np.uint64(1024),
            rows=embeddings,
            width=np.full(count, WIDTH),
            checksum=random.integers(0, 2**32 - 1, count, "<u4", endpoint=True),
            time_s=np.full(count, 1_700_000_000),
            dtype=np.ones(count),
        ).sorted_unique()

    def all_rows(self) -> Iterator[Rows]:
        """The rows of each shard in turn, so that one shard is in memory at a time."""
        for shard in range(len(self.ranges)):
            yield self.rows(shard)

    def misses(self, count: int) -> list[bytes]:
        """Digests that are not in the corpus, but for a chance of 2**-100."""
        random = np.random.default_rng([self.seed, 1 << 32])
        return [random.bytes(16) for _ in range(count)]

    def write(self, folder: Path, namespace: str, *, version: int = 1) -> BaseManifest:
        """Write a base below ``folder`` under its names in the bucket, its head last.

        Cost: per million keys 0.3 to 1 s and 43 MB of disk; the memory of one shard.
        """
        layout, shards = Layout(namespace), []
        for (first, last), rows in zip(self.ranges, self.all_rows(), strict=True):
            bloom = build_bloom(rows.digest_hi, rows.digest_lo, namespace)
            segment = encode_segment(rows, namespace)
            shard = Shard(first, last, len(rows), BaseFile.of(segment), BaseFile.of(bloom))
            _write(folder / layout.shard(version, _RUN, first, last), segment)
            _write(folder / layout.bloom(version, _RUN, first, last), bloom)
            shards.append(shard)
        entries = sum(shard.entries for shard in shards)
        head = BaseManifest(version, _RUN, 1_700_000_000, entries, tuple(shards))
        _write(folder / layout.head(version), [head.to_json()])
        return head

    def _count(self, shard: int, shards: int) -> int:
        """Rows of a shard, as chance would have it."""
        random = np.random.default_rng([self.seed, (1 << 32) + 1])
        counts: Array = random.multinomial(self.entries, [1 / shards] * shards)
        return int(counts[shard])


def hits(base: Base, count: int, *, seed: int = 0) -> list[bytes]:
    """Digests that an exact base holds, from all of its shards alike, in random order."""
    random = np.random.default_rng(seed)
    segments = [segment.rows() for segment in base.segments() if len(segment)]
    found: list[bytes] = []
    for rows in segments:
        picks = random.integers(0, len(rows), -(-count // len(segments)))
        found += [rows.digest(pick) for pick in picks.tolist()]
    return [found[at] for at in random.permutation(len(found))[:count].tolist()]


def _write(path: Path, pieces: list[bytes] | list[bytes | memoryview]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.writelines(pieces)
