# SPDX-License-Identifier: Apache-2.0
"""Bad entries, moved out of every reader's way and kept for people to look at; bounded."""

from __future__ import annotations

import os
import re
import stat
from contextlib import suppress

from s3ec.tier.files import Folders, require_own_folders

KEPT_FILES = 32
# A few bad videos must not crowd out the entries that work.
KEPT_BYTES = 1 << 28


class Quarantine:
    """The folder of bad entries: the newest KEPT_FILES, together at most KEPT_BYTES.

    The newest is kept whatever its size.
    """

    def __init__(self, folders: Folders) -> None:
        self._folders = folders

    def take(self, source: str, label: str, reason: str, *, mtime_ns: int) -> bool:
        """Move whatever stands under ``source`` here.

        Args:
            label: Namespace and digest.
            reason: A word or two; becomes part of the file name.
            mtime_ns: When, for the order of what is kept.

        Returns:
            False where there was nothing to move.

        Raises:
            OSError, TierError: It could not be moved.
        """
        word = re.sub(r"[^a-z0-9]+", "-", reason.lower()).strip("-")[:32] or "unknown"
        target = f"{self._folders.quarantine}/{label}-{word}"
        for last in (False, True):
            try:
                require_own_folders((*self._folders.above, str(self._folders.quarantine)))
                os.rename(source, target)
                break
            except FileNotFoundError:
                if not os.path.lexists(source):
                    return False
                if last:
                    raise
                self._folders.make()
        # After the move: before it, the evictor would take the bad entry for a fresh one.
        with suppress(OSError):
            os.utime(target, ns=(mtime_ns, mtime_ns), follow_symlinks=False)
        self._prune()
        return True

    def _prune(self) -> None:
        """Drop what is past the bounds, oldest first. Folders stay: they are not our writing."""
        found: list[tuple[int, int, str]] = []
        with os.scandir(self._folders.quarantine) as items:
            for item in items:
                with suppress(FileNotFoundError):
                    status = item.stat(follow_symlinks=False)
                    if not stat.S_ISDIR(status.st_mode):
                        found.append((status.st_mtime_ns, status.st_size, item.path))
        found.sort(reverse=True)
        total = 0
        for rank, (_, nbytes, path) in enumerate(found):
            total += nbytes
            if rank and (rank >= KEPT_FILES or total > KEPT_BYTES):
                with suppress(OSError):
                    os.unlink(path)
