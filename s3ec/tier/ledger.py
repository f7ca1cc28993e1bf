# SPDX-License-Identifier: Apache-2.0
"""The ledger: what this node's processes have compared with its checksum since the machine started.

So a new process need not hash the whole folder again. One file for the whole folder. A record, 56
bytes, little-endian: magic (4), xxh3-64 of the boot's id (8), xxh3-64 of the namespace (8), digest
(16), inode (8), monotonic seconds as a double (8), xxh32 of all that (4). The monotonic clock is
the same for all processes of a boot.
A record that is lost costs one more hash.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import xxhash

from s3ec.errors import CorruptEntryError, TierError
from s3ec.tier.files import DiskErrors, Folders, boot_id, read_small
from s3ec.tier.records import RecordLayout, append_records

_RECORD = RecordLayout(b"s3v\x01", "QQ16sQd")
RECORD_BYTES = _RECORD.nbytes
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
        records = b"".join(
            _RECORD.pack(self._boot, self._tag, digest, one.inode, one.seconds)
            for digest, one in verified
        )
        try:
            append_records(
                *(self._folders, self._folders.ledger, records), largest_bytes=LARGEST_BYTES
            )
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
        return {
            digest: Verified(inode, seconds)
            for boot, tag, digest, inode, seconds in _RECORD.parse(blob)[0]
            if (boot, tag) == (self._boot, self._tag)
        }
