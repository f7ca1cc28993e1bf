# SPDX-License-Identifier: Apache-2.0
"""The lock that makes one process of the node the one that evicts."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

from s3ec.tier.files import Folders
from s3ec.tier.processes import try_lock, unlock

_POLL_S = 0.01


class EvictLock:
    """Opened for each use, so threads exclude each other too and forks inherit nothing."""

    def __init__(self, folders: Folders) -> None:
        self._folders = folders

    def make(self) -> None:
        """Make the file now, because a full disk, which needs it most, has no room for it.

        Raises:
            OSError: The file system refused.
        """
        os.close(self._folders.open_own(self._folders.evict_lock))

    @contextmanager
    def hold(self, *, wait_s: float = 0.0) -> Iterator[bool]:
        """Hold it while the block runs.

        Args:
            wait_s: How long to wait for whoever holds it; a round takes seconds at most.

        Yields:
            False where somebody else holds it still.

        Raises:
            OSError: The file system refused.
        """
        fd = self._folders.open_own(self._folders.evict_lock)
        try:
            deadline_s = time.monotonic() + wait_s
            while not (alone := try_lock(fd)) and time.monotonic() < deadline_s:
                time.sleep(_POLL_S)
            try:
                yield alone
            finally:
                if alone:
                    unlock(fd)  # a child forked meanwhile would keep it locked
        finally:
            os.close(fd)
