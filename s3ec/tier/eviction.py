# SPDX-License-Identifier: Apache-2.0
"""Removing entries in the order of their use: never used ones first, pinned ones never."""

from __future__ import annotations

import heapq
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

from s3ec.tier.census import Entry

# Sorted apart and merged as far as needed: one sort of all would keep the interpreter.
_CHUNK = 1024
_REMOVALS_PER_PAUSE = 64


@dataclass(frozen=True, slots=True)
class Evicted:
    """What went."""

    entries: int
    nbytes: int


def oldest_first(
    entries: Sequence[Entry], pause: Callable[[], None] | None = None
) -> Iterator[Entry]:
    """Entries by time of use; unused ones, whose times are below all others, come first."""
    order = attrgetter("mtime_ns")
    chunks = []
    for at in range(0, len(entries), _CHUNK):
        chunks.append(sorted(entries[at : at + _CHUNK], key=order))
        if pause is not None:
            pause()
    return heapq.merge(*chunks, key=order)


def evict(
    entries: Iterable[Entry],
    goal_bytes: int,
    *,
    objects: Path,
    remove: bool = True,
    pause: Callable[[], None] | None = None,
) -> Evicted:
    """Remove entries in the order given until ``goal_bytes`` are gone.

    Args:
        entries: Without what is pinned or spooled, since removing that frees nothing now.
        objects: ``Folders.objects``; folders below it that lost their last entry go too.
        remove: False only counts.
    """
    freed = removed = 0
    for entry in entries:
        if freed >= goal_bytes:
            break
        with suppress(OSError):
            found = os.lstat(entry.path)
            if (found.st_mtime_ns, found.st_ino) != (entry.mtime_ns, entry.inode):
                continue  # used, or written anew, since the walk
            if remove:
                os.unlink(entry.path)
                _remove_empty(entry.path, str(objects))
            freed += entry.nbytes
            removed += 1
        if pause is not None and removed % _REMOVALS_PER_PAUSE == 0:
            pause()
    return Evicted(removed, freed)


def _remove_empty(path: str, objects: str) -> None:
    """Remove folders that lost their last entry; publishing makes them again.

    Otherwise those of adapters and models long gone would pile up.
    """
    folder = os.path.dirname(path)
    with suppress(OSError):
        while folder != objects:
            os.rmdir(folder)
            folder = os.path.dirname(folder)
