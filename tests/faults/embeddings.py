# SPDX-License-Identifier: Apache-2.0
"""The corpus of these tests: each number stands for one embedding, whose bytes follow from it."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from s3ec import codec
from s3ec.identity import OBJECT_SUFFIX, Key, Layout, Namespace, make_key

# 64 KiB each: large enough for a process to be killed in the middle of one.
ROWS, WIDTH = 256, 128
NAMESPACE = Namespace.from_descriptor({"model": "tiny"})
LAYOUT = Layout(NAMESPACE.name)
# The modality's record, as the corpus's first producer writes it.
RECORD = b'{"dtype":"bfloat16","width":%d}' % WIDTH


def identifier_at(number: int) -> str:
    return hashlib.sha256(str(number).encode()).hexdigest()


def key_at(number: int) -> Key:
    key = make_key(identifier_at(number))
    assert key is not None
    return key


def data_at(number: int) -> bytes:
    """A bfloat16 tensor's bytes, all finite: every other byte holds most of the exponent."""
    nbytes = ROWS * WIDTH * 2
    start = hashlib.sha512(str(number).encode()).digest()
    data = bytearray(start * (nbytes // len(start)))
    data[1::2] = b"\x3f" * (nbytes // 2)
    return bytes(data)


def body_at(number: int) -> bytes:
    """The one object that may ever stand under this number's name."""
    data = data_at(number)
    header = codec.Header(
        identifier=identifier_at(number),
        namespace=NAMESPACE.name,
        modality="image",
        shape=codec.Shape(ROWS, WIDTH, "bfloat16"),
        checksum=codec.checksum(data),
    )
    return codec.encode_header(header) + data


ENTRY_BYTES = len(body_at(0))


def spooled_below(cache_dir: Path) -> set[str]:
    """Digests, as hex. Two looks: an entry that is adopted moves, and a walk can miss it."""
    return _look_below(cache_dir) | _look_below(cache_dir)


def _look_below(cache_dir: Path) -> set[str]:
    # Not Path.rglob: it does not bear folders that vanish meanwhile.
    names = (name for _, _, files in os.walk(cache_dir / "v1" / "spool") for name in files)
    return {name[: -len(OBJECT_SUFFIX)].rpartition("--")[2] for name in names if "--" in name}
