# SPDX-License-Identifier: Apache-2.0
"""The index's files on this node: one folder for a namespace, shared by all processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from s3ec.errors import TierError


def no_bound(nbytes: int) -> None:
    """Room for everything: for folders outside of the tier."""


class NodeFolder:
    """Files of the index in one folder. Blocking and thread-safe; touches nothing when it is made.

    A file appears whole, by a rename, and is never changed afterwards: what is mapped stays good
    when its name is replaced or removed. ``missing`` alone is appended to.

    Attributes:
        path: The folder.
    """

    def __init__(self, path: Path, *, need_room: Callable[[int], None] = no_bound) -> None:
        """Names a folder.

        Args:
            path: Made where it is missing, for this user only.
            need_room: Asks the tier for so many bytes; raises TierError where there are none.
        """
        self.path = path
        self._need_room = need_room

    def write(self, name: str, pieces: list[bytes | memoryview]) -> None:
        """Write a whole file and name it.

        Raises:
            TierError: There is no room, or the disk refused.
        """
        raise NotImplementedError

    def try_claim(self, task: str) -> int | None:
        """Claim a task (``refresh``, ``child``) for this process; never waits.

        Returns:
            What ``release`` takes; None where another process has it. The kernel gives back what
            a process that ended had.

        Raises:
            TierError: The disk refused.
        """
        raise NotImplementedError

    def release(self, claim: int) -> None:
        """Give a claim back."""
        raise NotImplementedError

    def add_missing(self, digests: list[bytes]) -> None:
        """Tell the node's engines that the bucket does not hold these keys. Never raises."""
        raise NotImplementedError


__all__ = ["NodeFolder", "TierError", "no_bound"]
