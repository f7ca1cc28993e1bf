# SPDX-License-Identifier: Apache-2.0
"""The ledger: what this node's processes have compared with its checksum since the machine started.

So a new process need not hash the whole folder again. One file for the whole folder. A record, 56
bytes, little-endian: magic (4), xxh3-64 of the boot's id (8), xxh3-64 of the namespace (8), digest
(16), inode (8), monotonic seconds as a double (8), xxh32 of all that (4). The monotonic clock is
the same for all processes of a boot.

The file is no truth: a record that is lost or damaged costs one more hash. So nothing is locked or
synced. Whoever makes the file large removes it.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass

import xxhash

from s3ec.errors import CorruptEntryError, TierError
from s3ec.tier.files import DiskErrors, Folders, boot_id, read_small

_MAGIC = b"s3v\x01"
_BODY = struct.Struct("<4sQQ16sQd")
_CHECK = struct.Struct("<I")
RECORD_BYTES = _BODY.size + _CHECK.size
LARGEST_BYTES = 16 * 2**20
"""A file of this size is begun anew."""


@dataclass(frozen=True, slots=True)
class Verified:
    """When a file was verified.

    Attributes:
        inode: Of the file.
        seconds: By the monotonic clock of this boot.
    """

    inode: int
    seconds: float


class Ledger:
    """What was verified in one namespace. Blocking and thread-safe; never raises."""

    def __init__(self, folders: Folders, namespace: str, disk_errors: DiskErrors) -> None:
        """Nothing is touched."""
        self._folders = folders
        self._failed = disk_errors.record
        self._boot = xxhash.xxh3_64_intdigest(boot_id().encode())
        self._tag = xxhash.xxh3_64_intdigest(namespace.encode())

    def append(self, verified: Iterable[tuple[bytes, Verified]]) -> None:
        """Note some entries by their digests."""
        records = b"".join(self._record(digest, one) for digest, one in verified)
        try:
            fd = self._folders.open_own(self._folders.ledger, os.O_APPEND)
            try:
                os.write(fd, records)
                if os.lseek(fd, 0, os.SEEK_CUR) >= LARGEST_BYTES:
                    os.unlink(self._folders.ledger)
            finally:
                os.close(fd)
        except FileNotFoundError:
            pass  # somebody else has begun it anew
        except (OSError, TierError) as exc:
            self._failed("note what was verified", exc)

    def read(self) -> dict[bytes, Verified]:
        """What was verified since the machine started, by digest; of several records the last."""
        try:
            blob = read_small(self._folders.ledger, max_bytes=2 * LARGEST_BYTES)
        except FileNotFoundError:
            return {}
        except (OSError, CorruptEntryError) as exc:
            self._failed("read what was verified", TierError(str(exc)))
            return {}
        found: dict[bytes, Verified] = {}
        at = blob.find(_MAGIC)
        while 0 <= at <= len(blob) - RECORD_BYTES:
            body = blob[at : at + _BODY.size]
            if _CHECK.unpack_from(blob, at + _BODY.size)[0] == xxhash.xxh32_intdigest(body):
                _, boot, tag, digest, inode, seconds = _BODY.unpack(body)
                if (boot, tag) == (self._boot, self._tag):
                    found[digest] = Verified(inode, seconds)
                at += RECORD_BYTES
            else:
                at += 1  # damaged, or written in part: the next one may begin anywhere
            at = blob.find(_MAGIC, at)
        return found

    def _record(self, digest: bytes, one: Verified) -> bytes:
        body = _BODY.pack(_MAGIC, self._boot, self._tag, digest, one.inode, one.seconds)
        return body + _CHECK.pack(xxhash.xxh32_intdigest(body))
