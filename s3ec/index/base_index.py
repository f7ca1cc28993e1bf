# SPDX-License-Identifier: Apache-2.0
"""The base of an index: all shards of one head, mapped, as one lookup."""

from __future__ import annotations

import os
from collections.abc import Sequence
from enum import Enum
from typing import Final, Literal

import numpy as np

from s3ec.errors import CorruptEntryError
from s3ec.index.bloom import Bloom
from s3ec.index.head import Head, Shard
from s3ec.index.rows import Facts
from s3ec.index.segment import LookupParts, Segment


class Unknown(Enum):
    """The answer of a filter that does not say no."""

    UNKNOWN = "unknown"


UNKNOWN: Final = Unknown.UNKNOWN


class Base:
    """Every key of one version, by its rows (exact) or by its filters. Immutable.

    All files are mapped when it is made, off the scheduler's thread; a lookup afterwards makes no
    system call and cannot fail, also once the files were unlinked. Any thread may look up.
    Dropping the last reference unmaps the files.

    Attributes:
        version: Of the head.
        entries: Keys.
        exact: Whether it knows rows; a filter says "maybe" for a few keys that are not there.
    """

    __slots__ = ("_blooms", "_finds", "_segments", "entries", "exact", "version")

    def __init__(self, head: Head, parts: Sequence[Segment | Bloom]) -> None:
        """Put a head's shards together.

        Args:
            head: What was committed.
            parts: For each shard in order its segment, or for each its filter.

        Raises:
            CorruptEntryError: A part is not what the head says of it.
        """
        segments: list[Segment] = []
        blooms: list[Bloom] = []
        if len(parts) != len(head.shards):
            raise CorruptEntryError(
                f"{len(parts)} files for {len(head.shards)} shards", reason="shape"
            )
        for shard, part in zip(head.shards, parts, strict=True):
            # One slot for each leading byte, so that a lookup needs no search for its shard.
            slots = shard.last - shard.first + 1
            if isinstance(part, Segment):
                _check_segment(shard, part)
                segments += [part] * slots
            else:
                _check_entries(shard, part, part.name)
                blooms += [part] * slots
        if segments and blooms:
            raise CorruptEntryError("rows and filters in one base", reason="shape")
        self.version = head.version
        self.entries = head.entries
        self.exact = not blooms
        self._segments = segments
        self._finds = [segment.find for segment in segments]  # bound once: 50 ns a lookup
        self._blooms = blooms

    @classmethod
    def open(
        cls,
        head: Head,
        paths: Sequence[str | os.PathLike[str]],
        namespace: str,
        *,
        exact: bool,
    ) -> Base:
        """Map the files of a head, which were checked when they were downloaded.

        Cost: some 0.1 ms a shard. To be called off the scheduler's thread.

        Args:
            head: What was committed.
            paths: One for each shard in order: segments where ``exact``, otherwise filters.
            namespace: Which one it must be of.
            exact: Which kind of files these are.

        Raises:
            CorruptEntryError: A file is not what the head says of it.
            OSError: A file cannot be opened.
        """
        if exact:
            return cls(head, [Segment.open(path, namespace) for path in paths])
        return cls(head, [Bloom.open(path, namespace) for path in paths])

    def maybe(self, hi: int, lo: int) -> bool:
        """Whether the base holds this digest, given as identity.split_digest does; no I/O."""
        finds = self._finds
        if finds:
            return finds[hi >> 56](hi, lo) >= 0
        return self._blooms[hi >> 56].maybe(hi, lo)

    def find(self, hi: int, lo: int) -> Facts | Literal[Unknown.UNKNOWN] | None:
        """What is known of a digest; None where it is not there.

        UNKNOWN where only a filter was asked, and did not say no.
        """
        if self.exact:
            segment = self._segments[hi >> 56]
            row = segment.find(hi, lo)
            return None if row < 0 else segment.facts(row)
        return UNKNOWN if self.maybe(hi, lo) else None

    def lookup_parts(self) -> list[LookupParts]:
        """Segment.lookup_parts for each leading byte; none where it is not exact."""
        return [segment.lookup_parts() for segment in self._segments]

    def segments(self) -> list[Segment]:
        """All shards in order; none where it is not exact."""
        return list(dict.fromkeys(self._segments))

    def close(self) -> None:
        """Let go of all files now; nobody may look up during or after it."""
        for segment in set(self._segments):
            segment.close()
        for bloom in set(self._blooms):
            bloom.close()


def _check_segment(shard: Shard, segment: Segment) -> None:
    """Structure only: two rows are read.

    Raises:
        CorruptEntryError: It has other rows than the head says.
    """
    _check_entries(shard, segment, segment.name)
    if segment.may_hold_tombstones and segment.rows().deleted.any():
        raise CorruptEntryError(f"{segment.name}: tombstones in a base", reason="shape")
    ends = segment.rows().digest_hi[[0, -1]] if len(segment) else np.empty(0, "<u8")
    if not all(shard.first <= int(hi) >> 56 <= shard.last for hi in ends):
        raise CorruptEntryError(
            f"{segment.name}: has digests outside of {shard.first:02x}-{shard.last:02x}",
            reason="order",
        )


def _check_entries(shard: Shard, part: Segment | Bloom, name: str) -> None:
    if len(part) != shard.entries:
        raise CorruptEntryError(
            f"{name}: {len(part)} entries, expected {shard.entries}", reason="size"
        )
