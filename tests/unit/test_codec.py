# SPDX-License-Identifier: Apache-2.0
"""Entries: what goes in comes out, and nothing else is believed."""

from __future__ import annotations

import json
import math
import random
import struct
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from s3ec import codec
from s3ec.codec import HEADER_LIMIT, MAX_TENSOR_BYTES, Header, Shape
from s3ec.connector.saves import tensor_bytes
from s3ec.errors import CorruptEntryError
from s3ec.identity import MAX_IDENTIFIER_BYTES, canonical_json, make_key
from s3ec.safetensors_file import seal
from tests.support.finite import FINITE

NAMESPACE = "gemma-0123456789abcdef"
IDENTIFIER = "ab" * 32
SHAPE = Shape(3, 5, "bfloat16")


def entry_of(
    shape: Shape = SHAPE,
    *,
    identifier: str = IDENTIFIER,
    namespace: str = NAMESPACE,
    modality: str = "image",
    placeholder: dict[str, Any] | None = None,
) -> bytes:
    data = random.Random(shape.rows).randbytes(shape.nbytes).translate(FINITE)
    header = Header(
        identifier=identifier,
        namespace=namespace,
        modality=modality,
        shape=shape,
        checksum=codec.checksum(data),
        placeholder={"image_grid_thw": [[1, 16, 16]]} if placeholder is None else placeholder,
    )
    return codec.encode_header(header) + data


MADE_BY = "vllm=0.32.0 torch=2.13.0+cpu platform=NVIDIA-H100"


def verify(blob: bytes | memoryview) -> Header:
    return codec.verify(blob, namespace=NAMESPACE, identifier=IDENTIFIER)


def header_json(blob: bytes) -> dict[str, Any]:
    (length,) = struct.unpack_from("<Q", blob)
    content: dict[str, Any] = json.loads(blob[8 : 8 + length])
    return content


def with_header(content: object, data: bytes = b"") -> bytes:
    """An entry around any JSON, padded as ours are but not sealed."""
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    body += b" " * (-(8 + len(body)) % 64)
    return struct.pack("<Q", len(body)) + body + data


def sealed(content: dict[str, Any], data: bytes = b"") -> bytes:
    """As a forger would do it who knows the format."""
    metadata = content["__metadata__"]
    tensors = {name: value for name, value in content.items() if name != "__metadata__"}
    metadata["header_xxh3"] = seal(metadata, tensors)
    return with_header(canonical_json(content).encode(), data)


def reason_of(blob: bytes | memoryview) -> str:
    with pytest.raises(CorruptEntryError) as caught:
        verify(blob)
    return caught.value.reason


# -- there and back ----------------------------------------------------------------------------


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.text(alphabet=st.characters(categories=["Cs"]), max_size=2),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@given(st.dictionaries(st.text(max_size=8), json_values, max_size=4))
def test_a_placeholder_comes_back_or_is_not_written(placeholder: dict[str, Any]) -> None:
    try:
        blob = entry_of(placeholder=placeholder)
    except CorruptEntryError:
        return
    assert canonical_json(verify(blob).placeholder) == canonical_json(placeholder)


@pytest.mark.parametrize(
    "placeholder",
    [{"a": math.nan}, {"a": math.inf}, {"a": 10**400}, {"a": b"x"}, {"a": object()},
     {1: 2, "1": 2, None: 3}, {"a": "x" * HEADER_LIMIT}],
    ids=["nan", "inf", "huge", "bytes", "object", "mixed keys", "long"],
)  # fmt: skip
def test_a_placeholder_that_is_not_plain_json_is_refused(placeholder: dict[Any, Any]) -> None:
    with pytest.raises(CorruptEntryError) as caught:
        entry_of(placeholder=placeholder)
    assert caught.value.reason == "header"


@given(st.text(max_size=300), st.text(max_size=40), st.text(max_size=40))
def test_any_text_comes_back(identifier: str, namespace: str, modality: str) -> None:
    blob = entry_of(identifier=identifier, namespace=namespace, modality=modality)
    header = codec.verify(blob, namespace=namespace, identifier=identifier)
    assert header.modality == modality


@pytest.mark.parametrize("character", ["x", "\u00e9", "\u20ac", "\U0001f600", '"', "\\"])
def test_the_longest_identifiers_fit_the_header(character: str) -> None:
    identifier = character * (MAX_IDENTIFIER_BYTES // len(character.encode()))
    assert make_key(identifier) is not None
    blob = entry_of(identifier=identifier)
    assert codec.parse_header(blob[: 8 + HEADER_LIMIT]).identifier == identifier


def test_an_identifier_that_json_makes_too_long_is_refused_when_written() -> None:
    with pytest.raises(CorruptEntryError, match="limit") as caught:
        entry_of(identifier="\x01" * MAX_IDENTIFIER_BYTES)
    assert caught.value.reason == "header"


# -- damage ------------------------------------------------------------------------------------


def test_every_flipped_bit_is_noticed() -> None:
    blob = entry_of(Shape(2, 3, "bfloat16"))
    missed = []
    for bit in range(len(blob) * 8):
        damaged = bytearray(blob)
        damaged[bit // 8] ^= 1 << bit % 8
        try:
            verify(bytes(damaged))
        except CorruptEntryError:
            continue
        missed.append(bit)
    assert missed == []


def test_every_truncation_and_appendix_is_noticed() -> None:
    blob = entry_of(Shape(2, 3, "bfloat16"))
    for length in range(len(blob)):
        reason_of(blob[:length])
    for extra in (b"\0", b" ", bytes(64), blob):
        assert reason_of(blob + extra) == "length"


def test_zeros_of_the_right_length_are_noticed() -> None:
    """What a file system leaves after a power cut."""
    blob = entry_of()
    data_start = verify(blob).data_start
    assert reason_of(bytes(len(blob))) == "header"
    assert reason_of(blob[:data_start] + bytes(len(blob) - data_start)) == "checksum"


# -- forgery -----------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [0, HEADER_LIMIT + 1, 2**40 - 8, 2**63, 2**64 - 8])
def test_an_impossible_header_length_is_refused_without_allocating(length: int) -> None:
    blob = struct.pack("<Q", length) + bytes(2 * HEADER_LIMIT)
    tracemalloc.start()
    try:
        assert reason_of(blob) == "header"
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def change(path: str, value: object) -> Callable[[dict[str, Any]], None]:
    def apply(content: dict[str, Any]) -> None:
        inner = content
        *folders, last = path.split("/")
        for folder in folders:
            inner = inner[folder]
        if value is None:
            del inner[last]
        else:
            inner[last] = value

    return apply


@pytest.mark.parametrize(
    ("forge", "reason"),
    [
        (change("ec_cache/shape", [0, 2**60]), "header"),
        (change("ec_cache/shape", [0, 15]), "shape"),
        (change("ec_cache/shape", [-3, -5]), "shape"),
        (change("ec_cache/shape", [3.0, 5]), "shape"),
        (change("ec_cache/shape", [True, 15]), "shape"),
        (change("ec_cache/shape", ["3", "5"]), "shape"),
        (change("ec_cache/shape", [3, 5, 1]), "shape"),
        (change("ec_cache/shape", [999_999_999_999, 5]), "size"),
        (change("ec_cache/shape", 15), "shape"),
        (change("ec_cache/shape", None), "shape"),
        (change("ec_cache/data_offsets", [0, 31]), "shape"),
        (change("ec_cache/data_offsets", [1, 31]), "shape"),
        (change("ec_cache/data_offsets", [False, 30]), "shape"),
        (change("ec_cache/data_offsets", [0, 30.0]), "shape"),
        (change("ec_cache/more", 1), "shape"),
        (change("ec_cache", []), "shape"),
        (change("more", {"dtype": "BF16", "shape": [3, 5], "data_offsets": [0, 30]}), "header"),
        (change("ec_cache/dtype", "F64"), "dtype"),
        (change("ec_cache/dtype", ["BF16"]), "dtype"),
        (change("ec_cache/dtype", None), "shape"),
        (change("__metadata__/s3ec", "2"), "version"),
        (change("__metadata__/s3ec", None), "header"),
        (change("__metadata__/s3ec", "1" * 9000), "version"),
        (change("__metadata__/xxh3", None), "checksum"),
        (change("__metadata__/xxh3", "00" * 16), "checksum"),
        (change("__metadata__/xxh3", "zz" * 16), "checksum"),
        (change("__metadata__/identifier", "cd" * 32), "identifier"),
        (change("__metadata__/identifier", None), "identifier"),
        (change("__metadata__/identifier", IDENTIFIER.upper()), "identifier"),
        (change("__metadata__/namespace", "gemma-fedcba9876543210"), "namespace"),
        (change("__metadata__/namespace", None), "namespace"),
        (change("__metadata__/placeholder", "[1]"), "header"),
        (change("__metadata__/placeholder", "{"), "header"),
        (change("__metadata__/placeholder", "[" * 5000), "header"),
        (change("__metadata__/placeholder", '{"a": NaN}'), "header"),
        (change("__metadata__/placeholder", '{"a": 1e999}'), "header"),
        (change("__metadata__/placeholder", '{"a": 1, "a": 2}'), "header"),
        (change("__metadata__/placeholder", '{"a": ' + "9" * 5000 + "}"), "header"),
    ],
)
def test_a_sealed_lie_is_refused(forge: Callable[[dict[str, Any]], None], reason: str) -> None:
    blob = entry_of()
    content = header_json(blob)
    forge(content)
    assert reason_of(sealed(content, blob[verify(blob).data_start :])) == reason


@pytest.mark.parametrize(
    "forge",
    [
        change("__metadata__/modality", "video"),
        change("__metadata__/modality", None),
        change("__metadata__/placeholder", '{"image_grid_thw":[[1,16,18]]}'),
        change("__metadata__/placeholder", None),
        change("__metadata__/more", "x"),
        change("__metadata__/header_xxh3", None),
    ],
)
def test_a_change_that_is_compared_with_nothing_breaks_the_seal(
    forge: Callable[[dict[str, Any]], None],
) -> None:
    blob = entry_of()
    content = header_json(blob)
    forge(content)
    assert reason_of(with_header(content, blob[verify(blob).data_start :])) == "header"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b'"ec_cache"',
        b"NaN",
        b"{" * 8000,
        b"[" * 16000,
        b'{"a":' * 2700,
        b'{"__metadata__":{},"ec_cache":{},"ec_cache":{}}',
        b'{"__metadata__":{},"__metadata__":{},"ec_cache":{}}',
        b'{"__metadata__":{"s3ec":"1","s3ec":"1"},"ec_cache":{}}',
        b'{"__metadata__":{},"ec_cache":{},"other":{}}',
        b'{"__metadata__":{},"other":{}}',
        b'{"ec_cache":{}}',
        b'{"__metadata__":[],"ec_cache":{}}',
        b'{"__metadata__":{"s3ec":1},"ec_cache":{}}',
        b'{"__metadata__":{"s3ec":"1"},"ec_cache":NaN}',
        b'{"__metadata__":{"s3ec":"1"},"ec_cache":-Infinity}',
        b'{"__metadata__":{"s3ec":"1"},"ec_cache":1e999}',
        b'{"__metadata__":{"s3ec":"1"},"ec_cache":' + b"9" * 5000 + b"}",
        b'{"__metadata__":{"s3ec":"1"},"ec_cache":' + b"[" * 400 + b"]" * 400 + b"}",
        b'{"__metadata__":{"s3ec":"1"},"ec_cache":' + b"[" * 990 + b"]" * 990 + b"}",
        b'{"__metadata__":{"s3ec":"1"},"ec_cache":null}',
        b'{"__metadata__":{"s3ec":"\xff"},"ec_cache":null}',
        b'{"__metadata__":{"s3ec":"1"},"ec_cache":null}\0',
        b'{"__metadata__":{"s3ec":"1"},"ec_cache":null}{}',
        b"<html><body>503 Service Unavailable</body></html>",
    ],
)
def test_a_header_that_is_not_ours_is_refused(body: bytes) -> None:
    assert reason_of(with_header(body)) in ("header", "version")


@pytest.mark.parametrize("indent", [None, 1])
def test_a_sealed_header_in_another_spelling_is_refused(indent: int | None) -> None:
    blob = entry_of()
    spelled = json.dumps(header_json(blob), indent=indent).encode()
    assert reason_of(with_header(spelled, blob[verify(blob).data_start :])) == "header"


def test_a_tensor_that_begins_beside_a_cache_line_is_refused() -> None:
    blob = entry_of()
    (length,) = struct.unpack_from("<Q", blob)
    shifted = struct.pack("<Q", length + 1) + blob[8 : 8 + length] + b" " + blob[8 + length :]
    assert reason_of(shifted) == "header"


def feed_in_two(front: bytes, rest: bytes) -> None:
    codec.Verifier(front, namespace=NAMESPACE, identifier=IDENTIFIER).feed(rest)


@pytest.mark.parametrize("bad", [float("nan"), -float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(("dtype", "cut"), [("bfloat16", 2), ("float16", None), ("float32", 0)])
def test_an_entry_with_a_value_that_is_no_number_is_refused_whole_and_in_parts(
    bad: float, dtype: str, cut: int | None
) -> None:
    shape = Shape(8, 16, dtype)
    value = struct.pack("<e", bad) if cut is None else struct.pack("<f", bad)[cut:]
    good = bytes(shape.nbytes - len(value))
    for data in (value + good, good + value):
        header = Header(IDENTIFIER, NAMESPACE, "image", shape, codec.checksum(data))
        blob = codec.encode_header(header) + data
        assert reason_of(blob) == "nonfinite"
        front = blob[: len(blob) - len(data) + 64]
        with pytest.raises(CorruptEntryError) as caught:
            feed_in_two(front, blob[len(front) :])
        assert caught.value.reason == "nonfinite"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_largest_numbers_are_finite(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    info = torch.finfo(getattr(torch, dtype))
    values = [[info.max, info.min, info.tiny, 0.0, -0.0]]
    tensor = torch.tensor(values, dtype=getattr(torch, dtype))
    assert codec.is_finite(tensor_bytes(tensor), dtype)


def test_a_forged_huge_tensor_allocates_nothing() -> None:
    blob = entry_of()
    content = header_json(blob)
    rows = MAX_TENSOR_BYTES // 2
    content["__metadata__"] |= {"rows": str(rows), "width": "1"}
    content["ec_cache"] |= {"shape": [rows, 1], "data_offsets": [0, rows * 2]}
    forged = sealed(content)
    tracemalloc.start()
    try:
        assert reason_of(forged) == "length"
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.slow
@given(st.sampled_from(["__metadata__", "ec_cache"]), st.data())
@settings(max_examples=300)
def test_any_sealed_mutation_is_corrupt_or_harmless(part: str, data: st.DataObject) -> None:
    """A forger may say what nobody compares, but nothing may crash the reader."""
    blob = entry_of()
    content = header_json(blob)
    name = data.draw(st.sampled_from(sorted(content[part])) | st.text(max_size=4))
    content[part][name] = data.draw(st.text(max_size=20) if part == "__metadata__" else json_values)
    try:
        forged = sealed(content, blob[verify(blob).data_start :])
    except (ValueError, TypeError):
        return
    try:
        header = verify(forged)
    except CorruptEntryError:
        return
    assert header.shape == verify(blob).shape
    assert header.checksum == verify(blob).checksum


# -- the rest ----------------------------------------------------------------------------------


def test_errors_never_repeat_long_foreign_text() -> None:
    content = header_json(entry_of())
    content["__metadata__"]["namespace"] = "n" * 5000
    with pytest.raises(CorruptEntryError) as caught:
        verify(sealed(content))
    assert len(str(caught.value)) < 300


# -- what made it ----------------------------------------------------------------------------------


def made(by: str) -> bytes:
    data = bytes(SHAPE.nbytes)
    header = Header(IDENTIFIER, NAMESPACE, "image", SHAPE, codec.checksum(data), None, made_by=by)
    return codec.encode_header(header) + data


def test_a_header_says_what_made_the_entry() -> None:
    assert verify(made(MADE_BY)).made_by == MADE_BY
    assert verify(made("")).made_by == ""


@pytest.mark.parametrize(
    "by",
    [
        *("vllm", "vllm=", "=1", "vllm=0.32.0  torch=1", " vllm=1", "vllm=" + "1" * 600),
        *("vllm=0.32.0\n", "vllm=0\u20112", "vllm=\x1b[31m", "V=1"),
    ],
)
def test_a_maker_that_nobody_should_say_is_neither_written_nor_read(by: str) -> None:
    with pytest.raises(CorruptEntryError) as caught:
        made(by)
    assert caught.value.reason == "header"


@pytest.mark.parametrize("value", ["", "\x1b]0;x"])
def test_a_forged_maker_is_refused(value: str) -> None:
    blob = made(MADE_BY)
    content = header_json(blob)
    content["__metadata__"]["made_by"] = value
    assert reason_of(sealed(content, bytes(SHAPE.nbytes))) == "header"
