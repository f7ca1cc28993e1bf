# SPDX-License-Identifier: Apache-2.0
"""What can be wrong with an object in the bucket: each function turns a good one into a bad one."""

from __future__ import annotations

import dataclasses
import random
from unittest import mock

from s3ec import codec
from s3ec.codec import Header, Shape
from s3ec.identity import FORMAT_VERSION


def flipped(blob: bytes) -> bytes:
    """One bit of the tensor differs."""
    place = codec.parse_header(blob).data_start + 1000
    return blob[:place] + bytes([blob[place] ^ 0x10]) + blob[place + 1 :]


def other_width(blob: bytes) -> bytes:
    """A sound entry for this image and namespace, from a model with narrower embeddings."""
    header = codec.parse_header(blob)
    shape = Shape(header.shape.rows, header.shape.width // 2, header.shape.dtype)
    return _entry(dataclasses.replace(header, shape=shape))


def other_modality(blob: bytes) -> bytes:
    """A sound entry of the same shape, of another kind of input."""
    return _entry(dataclasses.replace(codec.parse_header(blob), modality="video"))


def other_dtype(blob: bytes) -> bytes:
    """A sound entry of the same size, whose values are of another type."""
    header = codec.parse_header(blob)
    shape = Shape(header.shape.rows, header.shape.width, "float16")
    return _entry(dataclasses.replace(header, shape=shape))


def other_rows(blob: bytes) -> bytes:
    """A sound entry with half the rows that this image has."""
    header = codec.parse_header(blob)
    shape = Shape(header.shape.rows // 2, header.shape.width, header.shape.dtype)
    return _entry(dataclasses.replace(header, shape=shape))


def other_version(blob: bytes) -> bytes:
    """A sound entry of a format that is not known yet."""
    header = codec.parse_header(blob)
    with mock.patch.object(codec, "FORMAT_VERSION", FORMAT_VERSION + 1):
        return codec.encode_header(header) + blob[header.data_start :]


def other_model(blob: bytes) -> bytes:
    """A sound entry of the same shape, written for another model's namespace."""
    header = codec.parse_header(blob)
    return _entry(dataclasses.replace(header, namespace="another-model-0123456789abcdef"))


def not_finite(blob: bytes) -> bytes:
    """A sound entry, one of whose values is NaN."""
    header = codec.parse_header(blob)
    data = bytearray(blob[header.data_start :])
    data[1000:1002] = b"\xc0\x7f"  # bfloat16, little-endian
    sealed = dataclasses.replace(header, checksum=codec.checksum(data))
    return codec.encode_header(sealed) + bytes(data)


def huge(blob: bytes) -> bytes:
    """A sound header that promises ten gigabytes of zeros, and a few of them."""
    header = codec.parse_header(blob)
    rows = 10 * 10**9 // (2 * header.shape.width)
    shape = Shape(rows, header.shape.width, header.shape.dtype)
    return codec.encode_header(dataclasses.replace(header, shape=shape)) + bytes(1000)


def web_page(_: bytes) -> bytes:
    """What a proxy or a login page answers with status 200."""
    return b"<!doctype html><html><body><h1>Please sign in</h1></body></html>\n" * 20


def _entry(header: Header) -> bytes:
    # Any finite values do: the top bit pair of each bfloat16 is clear.
    rng = random.Random(0)
    data = bytes(rng.randrange(256) & 0x3F for _ in range(header.shape.nbytes))
    sealed = dataclasses.replace(header, checksum=codec.checksum(data))
    return codec.encode_header(sealed) + data
