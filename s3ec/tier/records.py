# SPDX-License-Identifier: Apache-2.0
"""Records with checksums, by which the processes of a node tell each other something.

A file of them is no truth: a record that was lost, torn or damaged costs little. So nothing is
synced, and readers pass over what is no record.
"""

from __future__ import annotations

import struct
from typing import Any

import xxhash

_CHECK = struct.Struct("<I")


class RecordLayout:
    """A kind of record, little-endian: magic, fields, and xxh32 of both.

    Attributes:
        nbytes: Of one record.
    """

    def __init__(self, magic: bytes, fields: str) -> None:
        """Define it.

        Args:
            fields: In the words of ``struct``.
        """
        self._magic = magic
        self._body = struct.Struct(f"<{len(magic)}s{fields}")
        self.nbytes = self._body.size + _CHECK.size

    def pack(self, *fields: Any) -> bytes:
        """One record."""
        body = self._body.pack(self._magic, *fields)
        return body + _CHECK.pack(xxhash.xxh32_intdigest(body))

    def parse(self, blob: bytes) -> tuple[list[tuple[Any, ...]], int]:
        """Read a part of a file, which may begin and end anywhere and hold anything.

        Returns:
            The fields of each record, and how many bytes need not be read again.
        """
        found: list[tuple[Any, ...]] = []
        done = at = 0
        while (at := blob.find(self._magic, at)) >= 0:
            if at + self.nbytes > len(blob):
                return found, at
            end = at + self._body.size
            if _CHECK.unpack_from(blob, end)[0] == xxhash.xxh32_intdigest(blob[at:end]):
                found.append(self._body.unpack_from(blob, at)[1:])
                at = done = end + _CHECK.size
            else:
                at += 1  # the rest of a torn one, and a good one may begin inside
        return found, max(done, len(blob) - len(self._magic) + 1)
