# SPDX-License-Identifier: Apache-2.0
"""This process's own folder below ``pins/`` or ``spool/``, made when it is first needed."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from s3ec.errors import TierError
from s3ec.tier.files import Folders
from s3ec.tier.pin_folders import PinFolder


class OwnFolder:
    """Thread-safe without a lock of its own; made anew when it vanished; survives a fork."""

    def __init__(self, folders: Folders, parent: Path, *, end: Callable[[PinFolder], None]) -> None:
        """Nothing is made yet.

        Args:
            parent: ``folders.pins`` or ``folders.spool``.
            end: What becomes of the folder at close; must not raise.
        """
        self._folders = folders
        self._parent = parent
        self._end = end
        # By generation, so that threads which find the folder gone agree on its successor:
        # dict.setdefault is atomic.
        self._made: dict[int, PinFolder] = {}
        self._generation = 0
        self._closed = False

    def path(self) -> str:
        """Where to put files now.

        Raises:
            OSError: It could not be made.
            TierError: Closed.
        """
        generation = self._generation
        folder = self._made.get(generation)
        if folder is not None:
            return folder.path
        made = PinFolder.make(self._parent)
        folder = self._made.setdefault(generation, made)
        if folder is not made:
            made.remove()
        elif self._closed:  # meanwhile, or before
            self.close()
            raise TierError("the tier is closed")
        return folder.path

    def has_vanished(self, path: str) -> bool:
        """Whether that folder is gone; then all above it is made again, and ``path`` is new.

        Raises:
            OSError, TierError: What is above it could not be made.
        """
        if os.path.lexists(path):
            return False
        for generation, made in list(self._made.items()):
            if made.path == path:  # another thread may have noticed first
                self._generation = max(self._generation, generation + 1)
        self._folders.make()
        return True

    def owns(self, path: str) -> bool:
        """Whether a file lies in a folder of this process; a forked child has none at first."""
        folder = path.rpartition("/")[0]
        return any(made.path == folder for made in list(self._made.values()))

    def reopen(self) -> None:
        """Make the folder now, so that a file system that cannot do it is found at the start."""
        self._closed = False
        self.path()

    def close(self) -> None:
        """End all folders of this process."""
        self._closed = True
        for generation in list(self._made):
            folder = self._made.pop(generation, None)
            if folder is not None:
                self._end(folder)

    def after_fork(self) -> None:
        """In the child: the folders are the parent's. Its locks must not live on in us."""
        for folder in self._made.values():
            with suppress(OSError):
                os.close(folder.lock_fd)
        self._made.clear()
