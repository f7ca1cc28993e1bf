# SPDX-License-Identifier: Apache-2.0
"""Tensors become entries and come back bit for bit; those that must not spread are refused."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch

from s3ec import codec
from s3ec.codec import Header, Shape
from s3ec.connector import saves
from s3ec.errors import CorruptEntryError

NAMESPACE = "gemma-0123456789abcdef"
IDENTIFIER = "ab" * 32
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def tensor_of(rows: int = 3, width: int = 5, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.arange(rows * width, dtype=torch.float32).reshape(rows, width).sub(7).to(dtype)


def describe(tensor: torch.Tensor) -> Header:
    return saves.describe(
        tensor,
        identifier=IDENTIFIER,
        namespace=NAMESPACE,
        modality="image",
        placeholder={"image_grid_thw": [[1, 16, 16]]},
    )


def entry_of(tensor: torch.Tensor) -> bytes:
    return b"".join(saves.encode(describe(tensor), tensor))


def verify(blob: bytes) -> Header:
    return codec.verify(blob, namespace=NAMESPACE, identifier=IDENTIFIER)


# -- there and back ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (256, 64), (1, 4096)])
def test_an_entry_comes_back_bit_for_bit(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    tensor = torch.randn(shape).to(dtype)
    blob = entry_of(tensor)
    header = verify(blob)
    assert header.identifier == IDENTIFIER
    assert header.namespace == NAMESPACE
    assert header.modality == "image"
    assert header.placeholder == {"image_grid_thw": [[1, 16, 16]]}
    assert header.shape == Shape(*shape, str(dtype).removeprefix("torch."))
    assert header.total_bytes == len(blob)
    assert header.data_start % 64 == 0
    back = safetensors.torch.load(blob)["ec_cache"]
    assert back.dtype is dtype
    assert torch.equal(back.view(torch.uint8), tensor.view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_safetensors_reader_opens_an_entry(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = tensor_of(dtype=dtype)
    path = tmp_path / "entry.safetensors"
    path.write_bytes(entry_of(tensor))
    with safetensors.safe_open(path, "pt") as file:
        assert list(file.keys()) == ["ec_cache"]
        assert torch.equal(file.get_tensor("ec_cache"), tensor)
        metadata = file.metadata()
    assert metadata["identifier"] == IDENTIFIER
    assert metadata["s3ec"] == "1"
    assert json.loads(metadata["placeholder"]) == {"image_grid_thw": [[1, 16, 16]]}
    # As vLLM's own ECExampleConnector does (0.32, ec_connector/example_connector.py).
    assert torch.equal(safetensors.torch.load_file(path)["ec_cache"], tensor)


def test_encoding_does_not_copy_the_tensor() -> None:
    tensor = torch.zeros(2, 4)
    header = describe(tensor)
    _, data = saves.encode(header, tensor)
    tensor[1, 3] = 1.0
    assert bytes(data) == bytes(28) + struct.pack("<f", 1.0)


# -- what is not stored ------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_value_that_is_not_finite_is_found_wherever_it_is(
    dtype: torch.dtype, value: float
) -> None:
    """In every lane of the processor's vectors, at the end of a part, in what is left over."""
    places = [*range(33), 65_535, 65_536, 99_999]
    for place in places:
        tensor = torch.ones(100, 1000, dtype=dtype)
        tensor.view(-1)[place] = value
        with pytest.raises(CorruptEntryError, match="NaN or infinity") as caught:
            describe(tensor)
        assert caught.value.reason == "nonfinite"


@pytest.mark.parametrize("shape", [(), (5,), (1, 2, 3), (0, 5), (5, 0), (0, 0)])
def test_a_tensor_of_another_form_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(CorruptEntryError) as caught:
        entry_of(torch.zeros(shape))
    assert caught.value.reason == "shape"


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.int8, torch.int64, torch.bool, torch.complex64]
)
def test_a_tensor_of_another_dtype_is_refused(dtype: torch.dtype) -> None:
    with pytest.raises(CorruptEntryError) as caught:
        entry_of(torch.zeros(2, 2, dtype=dtype))
    assert caught.value.reason == "dtype"
