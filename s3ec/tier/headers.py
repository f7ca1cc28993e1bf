# SPDX-License-Identifier: Apache-2.0
"""An entry on the disk: its header against the file's size, its values against its header."""

from __future__ import annotations

import os
import threading

from s3ec import codec
from s3ec.codec import Header
from s3ec.errors import CorruptEntryError

_PART_BYTES = 256 * 2**10


class _Memory(threading.local):
    def __init__(self) -> None:
        self.part = memoryview(bytearray(_PART_BYTES))


_memory = _Memory()


def read_header(fd: int, nbytes: int) -> Header:
    """Parse the front of an open file; reads at most 16 KiB, so a forged size costs no memory.

    Args:
        nbytes: Size of the file.

    Raises:
        CorruptEntryError: Not an entry, or one of another size.
        OSError: It cannot be read.
    """
    header = codec.parse_header(os.pread(fd, 8 + codec.HEADER_LIMIT, 0))
    if nbytes != header.total_bytes:
        raise CorruptEntryError(f"{nbytes} bytes, expected {header.total_bytes}", reason="length")
    return header


def check_values(fd: int, header: Header) -> None:
    """Compare the values of an open file with its header's checksum.

    Reads them once, a part at a time: about 0.1 ms per MiB that the kernel has in memory.

    Raises:
        CorruptEntryError: They are others, or fewer.
        OSError: They cannot be read.
    """
    hashed = codec.running_checksum()
    nbytes = header.shape.nbytes
    done = 0
    while done < nbytes:
        part = _memory.part[: min(nbytes - done, _PART_BYTES)]
        count = os.preadv(fd, [part], header.data_start + done)
        if count == 0:
            break
        hashed.update(part[:count])
        done += count
    codec.check_sum(header, done, hashed.hexdigest())
