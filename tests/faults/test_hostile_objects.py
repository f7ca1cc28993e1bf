# SPDX-License-Identifier: Apache-2.0
"""What comes instead of an entry, from the bucket, the way or this node's disk: never served."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from s3ec.dev.rigs.proxy import Exchange, Fault, Rule
from s3ec.dev.rigs.proxy_faults import Cut, Endless, Flip, Replace
from s3ec.prefetch import FetchOutcome
from tests.faults.embeddings import (
    LAYOUT,
    body_at,
    key_at,
)
from tests.faults.engine import Engine, asks_for
from tests.faults.site import Site
from tests.support import damage
from tests.support.on_disk import audit_of, usage_of

ENTRY_BYTES = len(body_at(0))
# Four ranges of one entry; large enough for any header.
LARGE_PART_BYTES = 20_000
DTYPE = "bfloat16"


def flipped(body: bytes, bit: int) -> bytes:
    changed = bytearray(body)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


BODIES: dict[str, Callable[[], Fault]] = {
    "a page": lambda: Replace(b"<html><body>Sign in</body></html>"),
    "nothing": lambda: Replace(b""),
    "another image's object": lambda: Replace(body_at(1000)),
}


def test_body_that_is_something_else_is_a_miss_and_the_object_is_not_asked_for_again(
    stocked: Site, tmp_path: Path
) -> None:
    with Engine.unhedged(stocked, tmp_path / "a") as engine:
        for number, (what, fault) in enumerate(BODIES.items()):
            stocked.stock(number)
            rule = stocked.proxy.add(
                Rule(fault(), method="GET", target=f"{LAYOUT.object(key_at(number))}", times=2)
            )
            assert engine.fetch(number).outcome is FetchOutcome.CORRUPT, what
            assert rule.fired == 2, what
            assert engine.count("bad_objects") == number + 1, what
            assert engine.fetch(number).outcome is FetchOutcome.CORRUPT, what
            assert rule.fired == 2, what
            assert asks_for(stocked, number) == 2, what
        assert len(usage_of(engine.node.tier).entries) == 0


def with_header(body: bytes, data: bytes = b"") -> bytes:
    body += b" " * (-(8 + len(body)) % 64)
    return struct.pack("<Q", len(body)) + body + data


MISFITS = {
    "rows": damage.other_rows,
    "width": damage.other_width,
    "dtype": damage.other_dtype,
    "modality": damage.other_modality,
    "namespace": damage.other_model,
    "version": damage.other_version,
    "nonfinite": damage.not_finite,
}


def test_entry_that_does_not_fit_is_a_miss_and_its_field_is_counted(
    stocked: Site, tmp_path: Path
) -> None:
    unusable = {"namespace", "version", "nonfinite"}
    with Engine.unhedged(stocked, tmp_path / "a") as engine:
        for number, (field, wound) in enumerate(MISFITS.items()):
            stocked.put(number, wound(body_at(number)))
            outcome = engine.fetch(number).outcome
            assert outcome is (
                FetchOutcome.CORRUPT if field in unusable else FetchOutcome.MISMATCH
            ), field
            if field in unusable:
                assert engine.count(f"corrupt.{field}") == 2, field
            else:
                assert engine.count(f"mismatch.{field}") == 1, field
        assert engine.count("bad_objects") == len(unusable)
        assert len(usage_of(engine.node.tier).entries) == 0


def tensors(count: int) -> bytes:
    names = (f'"t{i}":{{"dtype":"BF16","shape":[0],"data_offsets":[0,0]}}' for i in range(count))
    return ("{" + ",".join(names) + "}").encode()


TENSOR = b'"ec_cache":{"data_offsets":[0,0],"dtype":"BF16","shape":[0,1152921504606846976]}'
HOSTILE = {
    "header of 2^40 bytes": struct.pack("<Q", 2**40) + bytes(100),
    "header of 2^64-1 bytes": struct.pack("<Q", 2**64 - 1) + bytes(100),
    "shape [0, 2^60]": with_header(b'{"__metadata__":{},' + TENSOR + b"}"),
    "100,000 names": with_header(tensors(100_000)),
    "300 names": with_header(tensors(300)),
    "duplicate keys": with_header(b'{"__metadata__":{},"__metadata__":{},' + TENSOR + b"}"),
    "an unexpected name": with_header(b'{"__metadata__":{},"weight":{}}'),
    "nested JSON": with_header(b"[" * 16_000),
    "a number of 16,000 digits": with_header(b'{"__metadata__":' + b"9" * 16_000 + b"}"),
    "an escape bomb": with_header(b'{"__metadata__":{"a":"' + b"\\u0000" * 2_600 + b'"}}'),
}


def test_hostile_safetensors_are_refused_and_asked_for_twice(stocked: Site, tmp_path: Path) -> None:
    with Engine.unhedged(stocked, tmp_path / "a") as engine:
        for number, (what, body) in enumerate(HOSTILE.items()):
            stocked.put(number, body)
            outcome = engine.fetch(number).outcome
            if what == "100,000 names":  # larger than any honest entry: refused unread
                assert outcome is FetchOutcome.MISMATCH
                assert engine.count("mismatch.size") == 1
            else:
                assert outcome is FetchOutcome.CORRUPT, what
        assert engine.count("bad_objects") == len(HOSTILE) - 1
        assert engine.count("corrupt.header") == 2 * (len(HOSTILE) - 1)
        for number, what in enumerate(HOSTILE):
            asked = asks_for(stocked, number)
            engine.fetch(number)
            asked_again = asks_for(stocked, number) > asked
            assert asked_again is (what == "100,000 names"), what
        assert len(usage_of(engine.node.tier).entries) == 0


@dataclass(frozen=True, slots=True)
class SaysLess:
    """A range under the head that the server gave it, with a longer body behind."""

    async def apply(self, exchange: Exchange) -> None:
        reply = await exchange.forward()
        reply.body += bytes(300)
        await exchange.send(reply)


@dataclass(frozen=True, slots=True)
class AnotherRange:
    """The beginning of the object, under the head of what was asked for."""

    async def apply(self, exchange: Exchange) -> None:
        reply = await exchange.forward()
        reply.body = body_at(0)[: len(reply.body)]
        await exchange.send(reply)


RANGES: dict[str, Callable[[], Fault]] = {
    "longer than its head says": SaysLess,
    "another range": AnotherRange,
    "a bit flipped": lambda: Flip(7),
    "nothing": lambda: Replace(b""),
    "too little": lambda: Cut(20),
    "a page": lambda: Replace(b"<html><body>Sign in</body></html>"),
    "no length, and no end": Endless,
}


@pytest.mark.parametrize("known", [True, False], ids=["known to the index", "unknown"])
def test_range_that_is_something_else_is_fetched_again_or_a_miss_and_nothing_stays(
    stocked: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    monkeypatch.setattr("s3ec.fetch.PART_BYTES", LARGE_PART_BYTES)
    with Engine.unhedged(stocked, tmp_path / "a") as engine:
        for number, (what, fault) in enumerate(RANGES.items()):
            stocked.put(number, body_at(number))
            if known:
                engine.node.index.add(key_at(number), ENTRY_BYTES)
            rule = stocked.proxy.add(
                Rule(fault(), method="GET", target=key_at(number).name, skip=1, times=1)
            )
            fetched = engine.fetch(number)
            assert rule.fired == 1, what
            assert fetched.outcome is FetchOutcome.READY, what
            assert asks_for(stocked, number) > 4, what  # the ranges of one attempt
        assert len(usage_of(engine.node.tier).entries) == len(RANGES)
        assert audit_of(engine.node.tier) == []


def test_large_object_that_stays_bad_in_one_range_is_a_miss_and_not_asked_for_again(
    stocked: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("s3ec.fetch.PART_BYTES", LARGE_PART_BYTES)
    with Engine.unhedged(stocked, tmp_path / "a") as engine:
        for number in range(2):
            bad = [flipped(body_at(number), 8 * (ENTRY_BYTES - 3)), body_at(number) + bytes(64)]
            stocked.put(number, bad[number])
            engine.node.index.add(key_at(number), ENTRY_BYTES)
            assert engine.fetch(number).outcome is FetchOutcome.CORRUPT
            asked = asks_for(stocked, number)
            assert engine.fetch(number).outcome is FetchOutcome.CORRUPT
            assert asks_for(stocked, number) == asked > 0
        assert engine.count("bad_objects") == 2
        assert len(usage_of(engine.node.tier).entries) == 0
        assert audit_of(engine.node.tier) == []
