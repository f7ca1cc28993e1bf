# SPDX-License-Identifier: Apache-2.0
"""Filters: never a no for a key that is there, and few a yes for one that is not."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from s3ec.errors import CorruptEntryError
from s3ec.index import bloom
from s3ec.index.bloom import BLOCK_BITS, PROBES, Bloom, blocks_for, build_bloom
from s3ec.index.rows import Array
from tests.unit.index import columns
from tests.unit.index.basics import NAMESPACE
from tests.unit.index.columns import OTHER, TOP, forged, halves_of, near, rows_of

RATE = 0.01


def file_of(hi: Array, lo: Array) -> bytes:
    return b"".join(build_bloom(hi, lo, NAMESPACE))


def of_count(count: int) -> bytes:
    rows = rows_of(count)
    return file_of(rows.digest_hi, rows.digest_lo)


def expected_rate(entries: int, blocks: int) -> float:
    """Rate at which keys that were not put in are said to be there.

    The number of keys in a block is Poisson distributed around ``entries / blocks``.
    """
    mean = entries / blocks
    spread = 12 * math.sqrt(mean) + 12
    counts = np.arange(max(0, int(mean - spread)), int(mean + spread) + 1)
    logs = counts * math.log(mean) - mean if mean else np.where(counts, -np.inf, 0.0)
    weights = np.exp(logs - np.array([math.lgamma(count + 1) for count in counts.tolist()]))
    unset = (1 - 1 / BLOCK_BITS) ** (PROBES * counts)
    return float((weights * (1 - unset) ** PROBES).sum())


def random_halves(count: int, seed: int, first: int = 0, last: int = 255) -> tuple[Array, Array]:
    random = np.random.default_rng(seed)
    hi = random.integers(first << 56, (last + 1 << 56) - 1, count, "<u8", endpoint=True)
    return hi, random.integers(0, TOP, count, "<u8", endpoint=True)


def reason_of(blob: bytes) -> str:
    with pytest.raises(CorruptEntryError, match=r"^00-ff\.bloom: ") as caught:
        Bloom.parse(blob, NAMESPACE, name="00-ff.bloom").check()
    return caught.value.reason


def rate(filtered: Bloom, hi: Array, lo: Array) -> float:
    said = [filtered.maybe(*half) for half in zip(hi.tolist(), lo.tolist(), strict=True)]
    return sum(said) / len(said)


@given(st.lists(columns.digests, max_size=200))
def test_every_key_that_was_put_in_is_maybe_there(digests: list[bytes]) -> None:
    halves = [struct.unpack(">QQ", digest) for digest in digests]
    hi, lo = (np.array([half[side] for half in halves], "<u8") for side in (0, 1))
    filtered = Bloom.parse(file_of(hi, lo), NAMESPACE)
    assert all(filtered.maybe(*half) for half in halves)
    assert len(filtered) == len(digests)


def test_an_empty_filter_says_no() -> None:
    filtered = Bloom.parse(of_count(0), NAMESPACE)
    assert not any(filtered.maybe(*half) for half in near(rows_of(50)))


@pytest.mark.parametrize(("first", "last"), [(0, 255), (0xA0, 0xA1)])
def test_the_measured_rate_is_at_most_one_in_a_hundred(first: int, last: int) -> None:
    """Also for a shard, whose digests begin alike."""
    filtered = Bloom.parse(file_of(*random_halves(60_000, 1, first, last)), NAMESPACE)
    tries = 60_000
    measured = rate(filtered, *random_halves(tries, 2, first, last))
    expected = expected_rate(filtered.entries, filtered.blocks)
    assert abs(measured - expected) < 5 * (expected / tries) ** 0.5


def test_memory_per_key() -> None:
    for entries in (10**5, 10**7, 10**9):
        assert blocks_for(entries) * 64 <= 1.3 * entries
        assert 0.9 * RATE < expected_rate(entries, blocks_for(entries)) < RATE


def test_small_filters_keep_the_rate() -> None:
    for entries in range(1, 60):
        assert expected_rate(entries, blocks_for(entries)) <= RATE


def test_a_filter_without_end_is_not_built() -> None:
    with pytest.raises(CorruptEntryError, match="too large"):
        blocks_for(10**12)


def test_keys_are_placed_as_documented() -> None:
    rows = rows_of(500)
    bits = safetensors.numpy.load(file_of(rows.digest_hi, rows.digest_lo))["bloom"]
    blocks = blocks_for(500)
    expected = np.zeros((blocks, 64), "u1")
    for hi, lo in halves_of(rows):
        block = ((hi & 0xFFFFFFFF) * blocks) >> 32
        for probe in range(PROBES):
            bit = lo >> 9 * probe & 511
            expected[block, bit // 8] |= 1 << bit % 8
    assert np.array_equal(bits, expected)


def test_building_in_parts_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = of_count(1000)
    monkeypatch.setattr(bloom, "BUILD_KEYS", 7)
    assert of_count(1000) == whole


def test_an_opened_filter_outlives_its_name(tmp_path: Path) -> None:
    rows = rows_of(1000)
    path = tmp_path / "00-ff.bloom.safetensors"
    path.write_bytes(of_count(1000))
    filtered = Bloom.open(path, NAMESPACE)
    path.unlink()
    filtered.check()
    assert all(filtered.maybe(*half) for half in halves_of(rows))


# -- hostile files -----------------------------------------------------------------------------


def test_every_flipped_byte_is_noticed() -> None:
    blob = bytearray(of_count(300))
    for at in range(len(blob)):
        bit = 1 << at % 8
        blob[at] ^= bit
        reason_of(bytes(blob))
        blob[at] ^= bit


def meta(**changes: str) -> Callable[[dict[str, Any]], object]:
    return lambda content: content["__metadata__"].update(changes)


def tensor(shape: list[int], nbytes: int) -> Callable[[dict[str, Any]], object]:
    return lambda content: content["bloom"].update(shape=shape, data_offsets=[0, nbytes])


BLOCKS = blocks_for(300)
LIES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "another format": (meta(s3ec="bloom-2"), "version"),
    "a segment": (meta(s3ec="index-1"), "version"),
    "another namespace": (meta(namespace=OTHER), "namespace"),
    "no probes": (meta(probes="0"), "shape"),
    "more probes": (meta(probes="6"), "shape"),
    "probes in words": (meta(probes="six"), "shape"),
    "minus one key": (meta(entries="-1"), "size"),
    "2**60 keys": (meta(entries=str(2**60)), "size"),
    "2**60 blocks": (tensor([2**60, 64], 2**66), "header"),
    "2**32 blocks": (tensor([2**32, 64], 2**38), "length"),
    "no blocks": (tensor([0, 64], 0), "length"),
    "flat": (tensor([BLOCKS * 64], BLOCKS * 64), "shape"),
    "other blocks": (tensor([2 * BLOCKS, 32], BLOCKS * 64), "shape"),
    "another column": (lambda c: c.update(boom=c.pop("bloom")), "shape"),
}


@pytest.mark.parametrize(("change", "reason"), LIES.values(), ids=LIES)
def test_a_header_that_lies_is_refused_though_sealed(
    change: Callable[[dict[str, Any]], object], reason: str
) -> None:
    assert reason_of(forged(of_count(300), change)) == reason


def test_a_filter_without_blocks_is_refused() -> None:
    blob = of_count(300)
    (length,) = struct.unpack_from("<Q", blob)
    empty = forged(blob[: 8 + length], tensor([0, 64], 0))
    assert reason_of(empty) == "shape"
