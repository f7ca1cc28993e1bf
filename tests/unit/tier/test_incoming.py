# SPDX-License-Identifier: Apache-2.0
"""Entries that come in parts: seen whole or not at all, and never unverified."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from s3ec import codec
from s3ec.codec import Header, Shape
from s3ec.errors import CorruptEntryError, TierError
from s3ec.tier import Incoming, Tier
from tests.finite import FINITE
from tests.on_disk import evict, running_total
from tests.unit.tier.cases import NAMESPACE, entry, file_of, key_at, read, temps_below

KEY = key_at(0)
SHAPE = Shape(500, 64, "bfloat16")
DATA = os.urandom(SHAPE.nbytes).translate(FINITE)
HEADER = Header(KEY.identifier, NAMESPACE, "image", SHAPE, codec.checksum(DATA))
BLOB = codec.encode_header(HEADER) + DATA
PART = 20_000


def parts(blob: bytes) -> list[bytes]:
    return [blob[start : start + PART] for start in range(0, len(blob), PART)]


def begin(tier: Tier, first: bytes) -> Incoming:
    verifier = codec.Verifier(first, namespace=NAMESPACE, identifier=KEY.identifier)
    return tier.writer.begin(KEY, first, verifier)


def test_an_entry_appears_with_its_last_good_part(tier: Tier, root: Path) -> None:
    first, *rest = parts(BLOB)
    incoming = begin(tier, first)
    assert incoming.nbytes == len(BLOB)
    for part in rest:
        assert tier.entries.pin(KEY) is None
        incoming.append(memoryview(part))
    assert tier.entries.pin(KEY) is None
    pin = incoming.commit()
    incoming.discard()
    assert pin.nbytes == len(BLOB)
    evict(tier, KEY)  # which a pin survives
    assert pin.path.read_bytes() == BLOB
    assert temps_below(root) == set()
    assert running_total(tier) == len(BLOB)


@pytest.mark.parametrize(
    ("blob", "reason"),
    [
        (BLOB[:-1], "length"),
        (BLOB[:-2] + bytes(2), "checksum"),
        (BLOB + b"x", "length"),
        (BLOB[: PART + 5], "length"),
    ],
)
def test_a_bad_entry_never_appears(tier: Tier, root: Path, blob: bytes, reason: str) -> None:
    first, *rest = parts(blob)
    incoming = begin(tier, first)

    def receive() -> None:
        for part in rest:
            incoming.append(part)
        incoming.commit()

    with pytest.raises(CorruptEntryError) as caught:
        receive()
    assert caught.value.reason == reason
    incoming.discard()
    assert tier.entries.pin(KEY) is None
    assert temps_below(root) == set()


def test_a_foreign_entry_is_refused_at_its_first_part() -> None:
    with pytest.raises(CorruptEntryError, match="another identifier"):
        codec.Verifier(BLOB[:PART], namespace=NAMESPACE, identifier=key_at(1).identifier)
    with pytest.raises(CorruptEntryError, match="namespace"):
        codec.Verifier(BLOB[:PART], namespace="other-0", identifier=KEY.identifier)


def test_a_present_entry_is_replaced_and_its_pin_stays_good(tier: Tier) -> None:
    small = entry(KEY)
    tier.writer.publish(KEY, [small])
    pin = tier.entries.pin(KEY)
    assert pin is not None
    first, *rest = parts(BLOB)
    incoming = begin(tier, first)
    for part in rest:
        incoming.append(part)
    incoming.commit()
    assert read(pin, KEY) == small


def test_a_folder_that_is_missing_is_made(tier: Tier, root: Path) -> None:
    assert not file_of(root, KEY).parent.exists()
    incoming = begin(tier, BLOB)
    incoming.commit()
    assert tier.entries.contains(KEY)


def test_a_folder_that_vanishes_is_an_error_and_leaves_nothing(tier: Tier, root: Path) -> None:
    first, *rest = parts(BLOB)
    incoming = begin(tier, first)
    shutil.rmtree(root / "v1" / "incoming")
    for part in rest:
        incoming.append(part)
    with pytest.raises(TierError):
        incoming.commit()
    assert tier.entries.pin(KEY) is None


def test_a_full_disk_makes_room_once_and_goes_on(
    tier: Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier.writer.publish(key_at(1), [entry(key_at(1))])
    first, *rest = parts(BLOB)
    incoming = begin(tier, first)
    writev = os.writev
    full = [True]

    def quota(fd: int, pieces: list[memoryview]) -> int:
        if full.pop() if full else False:
            # Half of it went through, as on a real disk.
            os.write(fd, pieces[0][:100])
            raise OSError(errno.EDQUOT, "quota")
        return writev(fd, pieces)

    monkeypatch.setattr(os, "writev", quota)
    for part in rest:
        incoming.append(part)
    incoming.commit()
    assert not tier.entries.contains(key_at(1))
    pin = tier.entries.pin(KEY)
    assert pin is not None
    assert pin.path.read_bytes() == BLOB


def test_a_disk_that_stays_full_is_an_error(
    tier: Tier, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    incoming = begin(tier, parts(BLOB)[0])

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patch:
        patch.setattr(os, "writev", full)
        with pytest.raises(TierError, match="full"):
            incoming.append(parts(BLOB)[1])
        with pytest.raises(TierError, match="full"):
            begin(tier, BLOB)
    incoming.discard()
    assert temps_below(root) == set()


def test_what_does_not_fit_the_budget_is_refused_at_once(
    make_tier: Callable[..., Tier], root: Path
) -> None:
    tier = make_tier(budget_bytes=len(BLOB) - 1)
    with pytest.raises(TierError, match="budget"):
        begin(tier, parts(BLOB)[0])
    assert temps_below(root) == set()


def test_a_closed_tier_begins_nothing(tier: Tier) -> None:
    tier.close()
    with pytest.raises(TierError, match="not open"):
        begin(tier, BLOB)
