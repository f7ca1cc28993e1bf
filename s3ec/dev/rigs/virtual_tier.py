# SPDX-License-Identifier: Apache-2.0
"""A tier without files, for scheduler halves whose loads nobody reads."""

from __future__ import annotations

from collections.abc import Iterable

from s3ec.codec import Header
from s3ec.tier.open_entry import OpenEntry


class VirtualEntry(OpenEntry):
    """An entry without a file."""

    def __init__(self, path: str, header: Header) -> None:
        """Nothing is opened."""
        self.path, self.header = path, header
        self.nbytes = header.total_bytes
        self.fd = self.pid = self.device = self.inode = -1  # of no file, so nothing is closed
        self.verified_s = self.used_s = 0.0


class NoResidents:
    """A node that has nothing to grant at once."""

    def get(self, digest: bytes, now: float) -> None:
        """Nothing is here."""

    def release(self, entries: Iterable[OpenEntry]) -> None:
        """Nothing is open."""
