# SPDX-License-Identifier: Apache-2.0
"""New entries: whole or not at all, never unverified, private, found again."""

from __future__ import annotations

import errno
import os
import random
import stat
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from s3ec import codec
from s3ec.codec import Header, Shape
from s3ec.counters import Counters
from s3ec.errors import CorruptEntryError, TierError
from s3ec.tier import files
from s3ec.tier.entry_writer import Incoming
from s3ec.tier.open_entry import OpenEntry
from s3ec.tier.tier import Tier
from tests.support.finite import FINITE
from tests.support.on_disk import audit_of, evict, make_room, running_total, usage_of
from tests.unit.tier.cases import (
    DESTINATION,
    NAMESPACE,
    MakeTier,
    entry,
    file_of,
    key_at,
    new_tier,
    opened,
    present,
    publish,
    read,
    served,
    temps_below,
)

KEY = key_at(0)

# A large entry, which comes in parts.
SHAPE = Shape(500, 64, "bfloat16")
DATA = random.Random(0).randbytes(SHAPE.nbytes).translate(FINITE)
HEADER = Header(KEY.identifier, NAMESPACE, "image", SHAPE, codec.checksum(DATA))
BLOB = codec.encode_header(HEADER) + DATA
PART = 20_000


def parts(blob: bytes) -> list[bytes]:
    return [blob[start : start + PART] for start in range(0, len(blob), PART)]


def behind_first(parts: Sequence[bytes]) -> list[tuple[int, bytes]]:
    """Where parts lie that come behind the first one."""
    return [(PART * number, part) for number, part in enumerate(parts, 1)]


def begin(tier: Tier, first: bytes) -> Incoming:
    verifier = codec.Verifier(first, namespace=NAMESPACE, identifier=KEY.identifier)
    return tier.writer.begin(KEY, first, verifier)


def receive(tier: Tier, blob: bytes) -> OpenEntry:
    first, *rest = parts(blob)
    incoming = begin(tier, first)
    for at, part in behind_first(rest):
        incoming.put([(at, memoryview(part))])
    return incoming.commit()


WRITES: dict[str, Callable[[Tier], object]] = {
    "in one go": lambda tier: tier.writer.publish(KEY, [BLOB]),
    "received": lambda tier: tier.writer.receive(KEY, [BLOB], HEADER),
    "in parts": lambda tier: receive(tier, BLOB),
}
"""All ways for an entry to come here."""

each_write = pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)


# -- what all ways have in common ----------------------------------------------------------------


@each_write
def test_what_was_written_is_served_counted_and_lies_under_its_object_name(
    tier: Tier, root: Path, counters: Counters, write: Callable[[Tier], object]
) -> None:
    assert not file_of(root, KEY).parent.exists()
    write(tier)
    assert served(tier, KEY) == BLOB
    assert file_of(root, KEY) == root / "v1" / "objects" / NAMESPACE / KEY.name
    assert running_total(tier) == usage_of(tier).total_bytes == len(BLOB)
    assert temps_below(root) == set()


@each_write
def test_writing_again_replaces_and_what_was_open_stays_readable(
    tier: Tier, write: Callable[[Tier], object]
) -> None:
    publish(tier, 0)
    old = opened(tier, KEY)
    write(tier)
    assert read(old, KEY) == entry(KEY)
    assert served(tier, KEY) == BLOB


@each_write
def test_what_is_larger_than_the_budget_is_refused_at_once_and_evicts_nothing(
    make_tier: MakeTier, root: Path, write: Callable[[Tier], object]
) -> None:
    tier = make_tier(budget_bytes=len(BLOB) - 1)
    publish(tier, 1)
    with pytest.raises(TierError, match="more than the budget"):
        write(tier)
    assert present(tier, 0, 1) == {1}
    assert temps_below(root) == set()


@each_write
def test_a_closed_tier_is_empty_and_takes_nothing(
    root: Path, write: Callable[[Tier], object]
) -> None:
    tier = new_tier(root)
    write(tier)
    for _ in range(2):
        tier.close()
        with pytest.raises(TierError, match="not open"):
            write(tier)
        assert tier.entries.open(KEY) is None
        assert not tier.entries.contains(KEY)
        tier.entries.drop_bad(KEY, "checksum")
    assert file_of(root, KEY).exists()


@each_write
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EROFS])
def test_a_failed_write_raises_and_leaves_the_old_entry_and_no_temp(
    tier: Tier,
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    write: Callable[[Tier], object],
    error: int,
) -> None:
    publish(tier, 0, spool=tier.open_spool(DESTINATION))  # else a full disk would have it evicted

    def fail(fd: int, pieces: object, at: int | None = None) -> None:
        os.write(fd, b"half")
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(files, "write_all", fail)
    with pytest.raises(TierError, match=os.strerror(error)) as caught:
        write(tier)
    assert isinstance(caught.value.__cause__, OSError)
    assert temps_below(root) == set()
    assert file_of(root, KEY).read_bytes() == entry(KEY)


@each_write
def test_an_interrupted_write_leaves_no_temp(
    tier: Tier, root: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Tier], object]
) -> None:
    def interrupt(fd: int, pieces: object, at: int | None = None) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(files, "write_all", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write(tier)
    assert temps_below(root) == set()
    assert not tier.entries.contains(KEY)


@each_write
def test_a_full_quota_evicts_as_much_and_tries_once_more(
    make_tier: MakeTier, monkeypatch: pytest.MonkeyPatch, write: Callable[[Tier], object]
) -> None:
    tier = make_tier()
    tier.writer.publish(key_at(1), [entry(key_at(1), rows=1500)])  # larger than what comes
    publish(tier, 2, 3)
    full = [True]

    def fail_once(writev: Callable[..., int], fd: int, pieces: list[memoryview], *at: int) -> int:
        if full.pop() if full else False:
            writev(fd, [pieces[0][:100]], *at)  # some went through, as on a real disk
            raise OSError(errno.EDQUOT, "quota")
        return writev(fd, pieces, *at)

    monkeypatch.setattr(os, "writev", partial(fail_once, os.writev))
    monkeypatch.setattr(os, "pwritev", partial(fail_once, os.pwritev))
    write(tier)
    assert present(tier, 1, 2, 3) == {2, 3}
    assert served(tier, KEY) == BLOB
    assert audit_of(tier) == []


# -- in one go -----------------------------------------------------------------------------------


def split(blob: bytes) -> dict[str, list[bytes | memoryview]]:
    return {
        "some": [blob[:7], memoryview(blob)[7:200], b"", memoryview(blob)[200:]],
        "wide values": [memoryview(blob).cast("Q")],
        "a thousand": [blob[at : at + 3] for at in range(0, len(blob), 3)],
    }


@pytest.mark.parametrize("pieces", ["some", "wide values", "a thousand"])
def test_pieces_become_one_file(tier: Tier, pieces: str) -> None:
    blob = entry(KEY, rows=64)
    tier.writer.publish(KEY, split(blob)[pieces])
    assert served(tier, KEY) == blob
    assert running_total(tier) == usage_of(tier).entry_bytes == len(blob)


def test_short_writes_are_continued(tier: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.writev
    monkeypatch.setattr(os, "writev", lambda fd, views: write(fd, [bytes(views[0])[:5]]))
    tier.writer.publish(KEY, [entry(KEY)[:8], entry(KEY)[8:]])
    assert served(tier, KEY) == entry(KEY)


def test_a_file_system_that_writes_nothing_is_an_error_not_a_loop(
    tier: Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "writev", lambda fd, views: 0)
    with pytest.raises(TierError, match="wrote nothing"):
        publish(tier, 0)


@pytest.mark.parametrize("umask", [0o000, 0o077, 0o777])
def test_files_and_folders_are_private_whatever_the_umask(
    make_tier: MakeTier, root: Path, umask: int
) -> None:
    before = os.umask(umask)
    try:
        tier = make_tier(root / "deep" / "down")
        publish(tier, 0, 1, 2)
        opened(tier, KEY)
        make_room(tier)
        tier.entries.drop_bad(KEY, "checksum")
    finally:
        os.umask(before)
    found = {path: stat.S_IMODE(path.lstat().st_mode) for path in [root, *root.rglob("*")]}
    assert all(mode == (0o700 if path.is_dir() else 0o600) for path, mode in found.items()), found
    assert audit_of(tier) == []


# -- temporary files -----------------------------------------------------------------------------


def test_temp_is_kept_while_it_is_locked(make_tier: MakeTier, root: Path) -> None:
    tier = make_tier()
    temp = root / "v1" / "incoming" / f".tmp-{'0' * 16}"
    with temp.open("wb") as file:
        temp.chmod(0o600)
        assert files.try_lock(file.fileno())
        make_room(tier)
        assert temp.exists()
    make_room(tier)
    assert not temp.exists()


def test_temp_that_a_neighbour_swept_is_written_again(
    tier: Tier, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_all, calls = files.write_all, []

    def sweep_first(fd: int, pieces: list[bytes]) -> None:
        write_all(fd, pieces)
        if not calls:
            (temp,) = (path for path in root.rglob(".tmp-*"))
            temp.unlink()
        calls.append(fd)

    monkeypatch.setattr(files, "write_all", sweep_first)
    publish(tier, 0)
    assert len(calls) == 2
    assert served(tier, KEY) == entry(KEY)


# -- in parts ------------------------------------------------------------------------------------


def test_an_entry_appears_with_its_last_good_part(tier: Tier) -> None:
    first, *rest = parts(BLOB)
    incoming = begin(tier, first)
    for part in behind_first(rest):
        assert tier.entries.open(KEY) is None
        incoming.put([part])
    assert tier.entries.open(KEY) is None
    held = incoming.commit()
    incoming.discard()
    assert held.nbytes == len(BLOB)
    evict(tier, KEY)  # which an open file survives
    assert read(held, KEY) == BLOB


@settings(max_examples=50, suppress_health_check=list(HealthCheck))
@given(order=st.permutations(range(len(parts(BLOB)) - 1)), together=st.integers(1, 3))
def test_parts_may_come_in_any_order(tier: Tier, order: list[int], together: int) -> None:
    first, *rest = parts(BLOB)
    incoming = begin(tier, first)
    in_order = behind_first(rest)
    coming = [in_order[number] for number in order]
    for at in range(0, len(coming), together):
        incoming.put(coming[at : at + together])
    assert read(incoming.commit(), KEY) == BLOB


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        ("bit", "checksum"),
        ("short", "length"),
        ("cut", "length"),
        ("missing", "length"),
        ("long", "length"),
        ("twice", "length"),
        ("again", "length"),
    ],
)
def test_parts_that_are_not_the_entry_are_refused_in_any_order(
    tier: Tier, root: Path, harm: str, reason: str, order: int
) -> None:
    first, *rest = parts(BLOB)
    placed = behind_first(rest)
    at, part = placed[1]
    placed[1] = {
        "bit": (at, bytes([part[0] ^ 1]) + part[1:]),
        "short": (at, part[:-2]),
        "missing": placed[0],
        "twice": (at - PART, part),
    }.get(harm, (at, part))
    if harm == "cut":
        del placed[1:]
    if harm == "long":
        placed[-1] = (placed[-1][0], placed[-1][1] + b"ab")
    if harm == "again":  # over what was verified, when all are there
        placed.insert(0 if order < 0 else len(placed), (PART, bytes(PART)))
    incoming = begin(tier, first)

    def receive() -> None:
        for one in placed[::order]:
            incoming.put([one])
        incoming.commit()

    with pytest.raises(CorruptEntryError) as caught:
        receive()
    assert caught.value.reason == reason
    incoming.discard()
    assert tier.entries.open(KEY) is None
    assert temps_below(root) == set()


def test_a_discarded_file_goes_when_the_call_under_way_has_ended(
    tier: Tier, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cancelled fetch leaves its call in the disk pool."""
    first, second, *_ = parts(BLOB)
    incoming, write_all = begin(tier, first), files.write_all
    discarding = threading.Thread(target=incoming.discard)

    def discard_meanwhile(fd: int, pieces: list[bytes], at: int) -> None:
        discarding.start()
        assert temps_below(root)
        write_all(fd, pieces, at)

    monkeypatch.setattr(files, "write_all", discard_meanwhile)
    incoming.put([(PART, second)])
    discarding.join()
    assert temps_below(root) == set()
    with pytest.raises(TierError, match="discarded"):
        incoming.put([(PART, second)])
    with pytest.raises(TierError, match="discarded"):
        incoming.commit()
    assert not tier.entries.contains(KEY)


# -- one folder, several tiers -------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", "..", "a/b", "tiny", "Tiny-0123456789abcdef"])
def test_namespace_that_is_none_is_refused(root: Path, name: str) -> None:
    with pytest.raises(ValueError, match="namespace"):
        Tier(root, name, budget_bytes=1, min_free_bytes=0, counters=Counters())
