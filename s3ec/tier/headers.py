# SPDX-License-Identifier: Apache-2.0
"""The header of an entry on the disk, checked against the file's size."""

from __future__ import annotations

import os

from s3ec import codec
from s3ec.codec import Header
from s3ec.errors import CorruptEntryError


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
