# SPDX-License-Identifier: Apache-2.0
"""Tensors as the bytes of an entry, and back; torch is imported where it is needed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from s3ec.codec import DTYPES, Header, Shape, checksum, encode_header, is_finite
from s3ec.errors import CorruptEntryError

if TYPE_CHECKING:
    import torch


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """A contiguous CPU tensor's memory as bytes, without a copy; keeps the tensor alive."""
    import torch

    flat = tensor.detach().reshape(-1).view(torch.uint8)
    array: Any = flat.numpy()
    return memoryview(array).cast("B")


def describe(
    tensor: torch.Tensor,
    *,
    identifier: str,
    namespace: str,
    modality: str,
    placeholder: Mapping[str, Any] | None = None,
) -> Header:
    """The header of a tensor that is about to be stored.

    Args:
        tensor: Contiguous, on the CPU, shape (rows, width), dtype of codec.DTYPES.
        placeholder: As in the header: None where it is not known.

    Raises:
        CorruptEntryError: Not two-dimensional, empty, a dtype we do not store, or not finite
            (attention kernels have produced NaN; keeping it would spread it over a fleet).
    """
    dtype = str(tensor.dtype).removeprefix("torch.")
    if tensor.dim() != 2 or 0 in tensor.shape:
        raise CorruptEntryError(f"shape {tuple(tensor.shape)} is not (rows, width)", reason="shape")
    known = [name for name, _ in DTYPES.values()]
    if dtype not in known:
        raise CorruptEntryError(f"dtype {dtype} is not one of {known}", reason="dtype")
    # Not torch's reductions: they share the work out to the threads that compute, and here, beside
    # an engine, took 16 ms where the processors were busy (torch 2.13).
    if not is_finite(tensor_bytes(tensor), dtype):
        raise CorruptEntryError("the tensor holds NaN or infinity", reason="nonfinite")
    rows, width = tensor.shape
    return Header(
        identifier=identifier,
        namespace=namespace,
        modality=modality,
        shape=Shape(rows, width, dtype),
        checksum=checksum(tensor_bytes(tensor)),
        placeholder=None if placeholder is None else dict(placeholder),
    )


def encode(header: Header, tensor: torch.Tensor) -> tuple[bytes, memoryview]:
    """One entry as two pieces, header and tensor; the tensor is not copied."""
    return encode_header(header), tensor_bytes(tensor)


def to_tensor(header: Header, data: bytearray | memoryview) -> torch.Tensor:
    """Bytes of a verified entry as a tensor that shares their memory.

    Args:
        header: From verify or parse_header.
        data: The tensor's bytes, writable, ``header.shape.nbytes`` long.

    Returns:
        CPU tensor, shape (rows, width), dtype as stored, not pinned.
    """
    import torch

    dtype = getattr(torch, header.shape.dtype)
    flat = torch.frombuffer(data, dtype=dtype)
    return flat.view(header.shape.rows, header.shape.width)
