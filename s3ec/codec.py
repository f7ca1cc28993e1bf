# SPDX-License-Identifier: Apache-2.0
"""One encoder output as bytes: a safetensors file with a single tensor and checked metadata.

The header is that of ``safetensors_file``, with one tensor ``ec_cache``: rows x width values,
row-major and little-endian. Nothing here needs torch, so tier, store and command line work without
it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from s3ec import safetensors_file
from s3ec.errors import CorruptEntryError
from s3ec.identity import FORMAT_VERSION, canonical_json
from s3ec.safetensors_file import plain_json

TENSOR_NAME = "ec_cache"
HEADER_LIMIT = safetensors_file.HEADER_LIMIT
checksum = safetensors_file.checksum
running_checksum = safetensors_file.running_checksum
# Far above any encoder output (a 10-minute video at 4 KiB a row is 1.5 GB); stops a forged
# header from asking for more memory than a node has.
MAX_TENSOR_BYTES = 8 * 2**30

# safetensors spelling -> (torch attribute, bytes per value). Encoder outputs are floating point.
DTYPES = {"BF16": ("bfloat16", 2), "F16": ("float16", 2), "F32": ("float32", 4)}
# An exponent with all bits set: such a value is NaN or infinite.
_EXPONENTS = {"bfloat16": 0x7F80, "float16": 0x7C00, "float32": 0x7F800000}
_SPELLING = {torch_name: spelling for spelling, (torch_name, _) in DTYPES.items()}
MADE_BY_CHARACTERS = 512
MADE_BY = re.compile(r"[a-z]+=[!-~]+(?: [a-z]+=[!-~]+)*")


@dataclass(frozen=True, slots=True)
class Shape:
    """Shape and dtype of an encoder output.

    Attributes:
        rows: Embeddings, one per placeholder token.
        width: Values per embedding.
        dtype: torch name, such as ``bfloat16``.
    """

    rows: int
    width: int
    dtype: str

    @property
    def nbytes(self) -> int:
        """Size of the tensor in bytes."""
        return self.rows * self.width * DTYPES[_SPELLING[self.dtype]][1]


@dataclass(frozen=True, slots=True)
class Header:
    """The checked facts of one entry.

    Attributes:
        identifier: vLLM's full identifier.
        namespace: Name of the namespace it was written for.
        modality: ``image``, ``video``, ``audio``...
        shape: Rows, width and dtype of the tensor.
        checksum: xxh3-128 of the tensor's bytes, 32 hex digits.
        placeholder: Metadata for a request without pixels (grid, timestamps); plain JSON. None
            if the writer could not see it.
        data_start: Offset of the tensor in the file, bytes.
        front_digest: xxh3-128 of all bytes in front of the tensor; empty if it was not read
            from an entry. A later reader of the same bytes need not parse them.
        made_by: Names and versions of the software and device that made it, such as ``vllm=0.32.0
            torch=2.13.0 platform=cpu``; empty if they are not known. Compared with no request.
    """

    identifier: str
    namespace: str
    modality: str
    shape: Shape
    checksum: str
    placeholder: Mapping[str, Any] | None = field(default_factory=dict)
    data_start: int = 0
    front_digest: str = field(default="", compare=False)
    made_by: str = ""

    @property
    def total_bytes(self) -> int:
        """Size of the whole file in bytes."""
        return self.data_start + self.shape.nbytes


def is_finite(data: memoryview | bytes | bytearray, dtype: str) -> bool:
    """Return True if no value is NaN or infinite; 0.05 ms per MiB, off the GIL, no memory.

    Read as integers, such values are the largest: positive ones of the signed type, negative ones
    of the unsigned one.

    Args:
        data: Whole values, little-endian.
        dtype: torch name.
    """
    import numpy as np

    if not len(data):
        return True
    exponent, nbytes = _EXPONENTS[dtype], DTYPES[_SPELLING[dtype]][1]
    sign = 1 << (8 * nbytes - 1)
    positive = int(np.frombuffer(data, f"<i{nbytes}").max())
    negative = int(np.frombuffer(data, f"<u{nbytes}").max())
    return positive < exponent and negative < sign + exponent


def encode_header(header: Header) -> bytes:
    """Return the bytes in front of the tensor.

    Raises:
        CorruptEntryError: The header would be larger than HEADER_LIMIT, or the placeholder is
            not plain JSON.
    """
    metadata = {
        "s3ec": str(FORMAT_VERSION),
        "identifier": header.identifier,
        "namespace": header.namespace,
        "modality": header.modality,
        "xxh3": header.checksum,
    }
    if header.placeholder is not None:
        metadata["placeholder"] = _placeholder_json(header.placeholder)
    if header.made_by:
        metadata["made_by"] = header.made_by
        _checked_made_by(metadata)  # do not write a header that readers would refuse
    return safetensors_file.encode_header(metadata, {TENSOR_NAME: _tensor_entry(header.shape)})


def _placeholder_json(placeholder: Mapping[str, Any]) -> str:
    try:
        text = canonical_json(dict(placeholder))
        plain_json(text)  # do not write a header that readers would refuse
    except (TypeError, ValueError, RecursionError) as exc:
        raise CorruptEntryError(f"placeholder is not plain JSON: {exc}", reason="header") from exc
    return text


def parse_header(blob: memoryview | bytes) -> Header:
    """Read and check the front of an entry; allocates at most HEADER_LIMIT.

    Args:
        blob: The first ``8 + HEADER_LIMIT`` bytes of an object, or all of a shorter one.

    Raises:
        CorruptEntryError: Not an entry of ours, or one that lies about itself.
    """
    metadata, tensors, front = safetensors_file.parse_header(blob, str(FORMAT_VERSION))
    if tensors.keys() != {TENSOR_NAME}:
        raise CorruptEntryError(f"header must hold one tensor `{TENSOR_NAME}`", reason="header")
    return _checked(metadata, tensors[TENSOR_NAME], front)


def _tensor_entry(shape: Shape) -> dict[str, Any]:
    """Return safetensors' header entry of a tensor of this shape, the only one in its file."""
    return {
        "dtype": _SPELLING[shape.dtype],
        "shape": [shape.rows, shape.width],
        "data_offsets": [0, shape.nbytes],
    }


def _checked(metadata: dict[str, str], tensor: object, front: bytes) -> Header:
    shape = _checked_shape(tensor)
    if not safetensors_file.CHECKSUM.fullmatch(metadata.get("xxh3", "")):
        raise CorruptEntryError("no checksum", reason="checksum")
    placeholder = None
    if "placeholder" in metadata:
        try:
            placeholder = plain_json(metadata["placeholder"])
        except (ValueError, RecursionError) as exc:
            raise CorruptEntryError("placeholder is not JSON", reason="header") from exc
        if not isinstance(placeholder, dict):
            raise CorruptEntryError("placeholder is not an object", reason="header")
    return Header(
        identifier=metadata.get("identifier", ""),
        namespace=metadata.get("namespace", ""),
        modality=metadata.get("modality", ""),
        shape=shape,
        checksum=metadata["xxh3"],
        placeholder=placeholder,
        data_start=len(front),
        front_digest=checksum(front),
        made_by=_checked_made_by(metadata),
    )


def _checked_made_by(metadata: Mapping[str, str]) -> str:
    made_by = metadata.get("made_by")
    if made_by is None:
        return ""
    if len(made_by) > MADE_BY_CHARACTERS or not MADE_BY.fullmatch(made_by):
        raise CorruptEntryError("made_by is no list of names and versions", reason="header")
    return made_by


def _checked_shape(tensor: Any) -> Shape:
    try:
        spelling, (rows, width) = tensor["dtype"], tensor["shape"]
    except (KeyError, TypeError, ValueError) as exc:
        raise CorruptEntryError(
            "the tensor has no type, or not two lengths", reason="shape"
        ) from exc
    if not isinstance(spelling, str) or spelling not in DTYPES:
        raise CorruptEntryError(
            f"dtype {spelling!r:.40} is not one of {list(DTYPES)}", reason="dtype"
        )
    # By type as well, since Python takes True and 1.0 for 1 and other readers don't.
    if not all(type(count) is int and count > 0 for count in (rows, width)):
        raise CorruptEntryError("rows and width must be positive numbers", reason="shape")
    shape = Shape(rows, width, DTYPES[spelling][0])
    if shape.nbytes > MAX_TENSOR_BYTES:
        raise CorruptEntryError(f"a tensor of {shape.nbytes} bytes is too large", reason="size")
    if canonical_json(tensor) != canonical_json(_tensor_entry(shape)):
        raise CorruptEntryError("the tensor is not where it should be", reason="shape")
    return shape


def verify(blob: memoryview | bytes, *, namespace: str, identifier: str) -> Header:
    """Check one whole entry from bucket or disk; reads every byte.

    Raises:
        CorruptEntryError: Wrong length, header, checksum, or written for another image or
            namespace. ``reason`` says which.
    """
    header = parse_header(blob)
    check_identity(header, namespace=namespace, identifier=identifier)
    check_data(header, memoryview(blob)[header.data_start :])
    return header


class Verifier:
    """Verifies an entry that arrives in parts, as ``verify``; keeps no part."""

    def __init__(self, first: memoryview | bytes, *, namespace: str, identifier: str) -> None:
        """Check the header and begin with the data.

        Args:
            first: The entry's front, with the whole header: ``8 + HEADER_LIMIT`` bytes or more,
                or all of a shorter entry.
            namespace: As for verify.
            identifier: As for verify.

        Raises:
            CorruptEntryError: As for verify; the checksum is compared only in finish.
        """
        self.header = parse_header(first)
        check_identity(self.header, namespace=namespace, identifier=identifier)
        self._hash = running_checksum()
        self._nbytes = 0
        self.feed(memoryview(first)[self.header.data_start :])

    def feed(self, part: memoryview | bytes) -> None:
        """Take the next bytes of the entry, whole values; off the GIL for large parts.

        Raises:
            CorruptEntryError: More than the header announced, or half a value (``reason`` is
                ``length``); or NaN or infinity (``nonfinite``).
        """
        self._nbytes += len(part)
        if self._nbytes > self.header.shape.nbytes:
            raise CorruptEntryError(
                f"goes on after {self.header.total_bytes} bytes", reason="length"
            )
        self._hash.update(part)
        _require_finite(self.header, part)

    def finish(self) -> None:
        """Check that the entry ends here, and its checksum.

        Raises:
            CorruptEntryError: ``reason`` is ``length`` or ``checksum``.
        """
        check_sum(self.header, self._nbytes, self._hash.hexdigest())


def check_identity(header: Header, *, namespace: str, identifier: str) -> None:
    """Refuse an entry that was written under another name, such as a copied object.

    Raises:
        CorruptEntryError: ``reason`` is ``identifier`` or ``namespace``.
    """
    if header.identifier != identifier:
        raise CorruptEntryError("written for another identifier", reason="identifier")
    if header.namespace != namespace:
        raise CorruptEntryError(
            f"written for namespace {header.namespace!r:.100}", reason="namespace"
        )


def check_data(header: Header, data: memoryview | bytes) -> None:
    """Compare the tensor's bytes with the header's length and checksum.

    Raises:
        CorruptEntryError: ``reason`` is ``length``, ``checksum``, or ``nonfinite``: no producer
            of ours stores NaN or infinity.
    """
    # Two passes over all of it, not piece by piece, though a piece would still be in the
    # processor's cache: each call waits for the GIL, up to 5 ms beside a busy thread.
    check_sum(header, len(data), checksum(data))
    _require_finite(header, data)


def _require_finite(header: Header, data: memoryview | bytes) -> None:
    dtype = header.shape.dtype
    if len(data) % DTYPES[_SPELLING[dtype]][1]:
        raise CorruptEntryError("ends in the middle of a value", reason="length")
    if not is_finite(data, dtype):
        raise CorruptEntryError("the tensor holds NaN or infinity", reason="nonfinite")


def check_sum(header: Header, nbytes: int, digest: str) -> None:
    """Compare a length and checksum that were computed in parts with those of the header.

    Args:
        nbytes: Number of bytes of the tensor.
        digest: Their ``checksum``.

    Raises:
        CorruptEntryError: ``reason`` is ``length`` or ``checksum``.
    """
    if nbytes != header.shape.nbytes:
        raise CorruptEntryError(
            f"{nbytes} bytes of tensor, expected {header.shape.nbytes}", reason="length"
        )
    if digest != header.checksum:
        raise CorruptEntryError("checksum differs", reason="checksum")
