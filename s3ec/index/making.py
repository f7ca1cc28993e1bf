# SPDX-License-Identifier: Apache-2.0
"""How a base is made, and what came of it: for compactions and rebuilds."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from s3ec.counters import Report, unreported
from s3ec.errors import TierError
from s3ec.index.head import Head

GRACE_S = 3600.0
"""A reader that is slower than this finds files gone, and lists again."""
_PREFIX, _LOCK = "s3ec-work-", "lock"
# Between the making of a folder and its lock lies less.
_UNLOCKED_S = 3600.0


@dataclass(frozen=True, slots=True)
class Making:
    """How a base is made.

    Attributes:
        bloom_fpr: False positive rate of its filters.
        grace_s: How long what it supersedes is kept, by the server's clock.
        folder: Where a folder for temporary files may be made; None for the system's place. At
            most 42 bytes for each entry of the deltas, and for each object that is listed.
        clock: Seconds since the epoch.
        report: Told how far it is.
    """

    bloom_fpr: float = 0.01
    grace_s: float = GRACE_S
    folder: Path | None = None
    clock: Callable[[], float] = time.time
    report: Report = unreported


@dataclass(frozen=True, slots=True)
class Made:
    """What a compaction or a rebuild did.

    Attributes:
        head: The base that readers use now.
        merged: Deltas that went into it; 0 where a compaction had nothing to do.
        removed: Old objects deleted.
        corrupt: Deltas that are unusable and were left where they are: ULID to what is wrong.
    """

    head: Head
    merged: int
    removed: int
    corrupt: Mapping[str, str] = field(default_factory=dict)


@contextmanager
def temporary_folder(parent: Path | None, *names: str) -> Iterator[Path]:
    """A folder for one piece of work; those of processes that were killed are removed first.

    Args:
        parent: Where; None for the system's place.
        names: Of folders to make in it.

    Raises:
        TierError: It cannot be made.
    """
    with ExitStack() as stack:
        try:
            place = Path(parent or tempfile.gettempdir())
            _sweep(place)
            # A thread of a cancelled piece of work may still be writing there.
            made = tempfile.TemporaryDirectory(
                prefix=_PREFIX, dir=place, ignore_cleanup_errors=True
            )
            folder = Path(stack.enter_context(made))
            lock = stack.enter_context(open(folder / _LOCK, "wb"))
            fcntl.flock(lock, fcntl.LOCK_EX)
            for name in names:
                (folder / name).mkdir()
        except OSError as exc:
            raise TierError(f"cannot make a folder for temporary files: {exc}") from exc
        yield folder


def _sweep(place: Path) -> None:
    """Remove what others of this user left; a large compaction that was killed leaves 500 MB."""
    for folder in place.glob(_PREFIX + "*"):
        with suppress(OSError):
            if (
                folder.lstat().st_uid == os.geteuid()
                and not folder.is_symlink()
                and _is_dead(folder)
            ):
                shutil.rmtree(folder)


def _is_dead(folder: Path) -> bool:
    """Whether nobody holds its lock, which the kernel lets go with the process."""
    try:
        fd = os.open(folder / _LOCK, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:  # made just now, or half removed
        return time.time() - folder.lstat().st_mtime > _UNLOCKED_S
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True
