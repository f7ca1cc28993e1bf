# SPDX-License-Identifier: Apache-2.0
"""Residents: what a request is granted at once, how it becomes one, and when it is let go of."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import pytest

from s3ec.codec import Header
from s3ec.counters import Counters
from s3ec.errors import TierError
from s3ec.identity import Key
from s3ec.tier import residents
from s3ec.tier.residents import VERIFIED_FOR_S, Residents, allowed_residents
from s3ec.tier.tier import Tier
from tests.support.clock import Clock
from tests.support.file_calls import file_calls_of, open_below
from tests.support.on_disk import ByHand, evict
from tests.support.waiting import eventually
from tests.unit.tier.cases import (
    DESTINATION,
    OTHER_NAMESPACE,
    MakeTier,
    child,
    entry,
    even,
    file_of,
    fill,
    key_at,
    opened,
    publish,
    read,
    use,
)


class Held(Protocol):
    """Residents whose thread works when the test says so."""

    def __call__(
        self,
        tier: Tier,
        *,
        may_grant: Callable[[Header], bool] = ...,
        most: int = ...,
        clock: Callable[[], float] = ...,
    ) -> tuple[Residents, ByHand]: ...


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    """As ``Tier.open_residents`` makes them."""
    monkeypatch.setattr(residents, "Background", ByHand)

    def make(
        tier: Tier,
        *,
        may_grant: Callable[[Header], bool] = lambda header: True,
        most: int = 1000,
        clock: Callable[[], float] | None = None,
    ) -> tuple[Residents, ByHand]:
        # A walk takes no time by it, or a busy machine would need several turns.
        clock = clock or Clock(time.monotonic())
        made = Residents(tier.entries, may_grant=may_grant, most=most, clock=clock)
        return made, ByHand.made[-1]

    yield make
    ByHand.made.clear()


def walked(make: Held, tier: Tier) -> Residents:
    """Those of a new process, after its walk over the folder."""
    here, thread = make(tier)
    here.start()
    thread.turn()
    return here


def granted(here: Residents, *keys: Key) -> set[Key]:
    """Which of these are granted at once now."""
    return {key for key in keys if here.get(key.digest, time.monotonic()) is not None}


def open_files(tier: Tier) -> int:
    return len(open_below(tier.folders.objects))


def flip(path: Path) -> None:
    """Rot in the last value, in the very same file."""
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))


# -- what is granted at once ---------------------------------------------------------------------


def test_what_was_not_verified_lately_is_not_granted_until_it_is_verified_again(
    tier: Tier, make: Held
) -> None:
    here, _ = make(tier)
    key = key_at(0)
    publish(tier, 0)
    held = opened(tier, key)
    here.add(key.digest, held)
    then_s = held.verified_s + VERIFIED_FOR_S
    assert here.get(key.digest, then_s - 1) is held
    assert here.get(key.digest, then_s + 1) is None
    held.verified_s = then_s + 1  # by a worker, which hashes
    assert here.get(key.digest, then_s + 1) is held
    assert here.get(key.digest, then_s + 2 + VERIFIED_FOR_S) is None
    again = opened(tier, key)
    again.verified_s = then_s + 2 + VERIFIED_FOR_S
    here.add(key.digest, again)
    assert here.get(key.digest, again.verified_s) is again


def test_nothing_is_granted_that_may_not_be_as_things_stand(tier: Tier, make: Held) -> None:
    allowed: list[Header] = []
    here, _ = make(tier, may_grant=lambda header: header in allowed)
    publish(tier, 0, 1)
    for number in range(2):
        here.add(key_at(number).digest, opened(tier, key_at(number)))
    assert granted(here, key_at(0), key_at(1)) == set()
    allowed.append(opened(tier, key_at(1)).header)
    assert granted(here, key_at(0), key_at(1)) == {key_at(1)}
    allowed.clear()  # such as a bucket that is silent
    assert granted(here, key_at(0), key_at(1)) == set()


def test_what_hooks_ask_touches_no_file(
    tier: Tier, make: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, thread = make(tier)
    publish(tier, 0, 1, 2)
    for number in range(3):
        here.add(key_at(number).digest, opened(tier, key_at(number)))
    thread.turn()
    held = opened(tier, key_at(0))
    again = opened(tier, key_at(2))
    for number in range(3):
        evict(tier, key_at(number))
    gc.collect()  # what other tests had open is not closed in here
    with monkeypatch.context() as patch:
        calls = file_calls_of(threading.get_ident(), patch)
        closed = [here.get(key_at(number).digest, time.monotonic()) for number in range(2)]
        here.discard(key_at(0).digest)
        here.discard(key_at(1).digest)
        here.release([held])
        here.release(filter(None, closed))
        here.add(key_at(2).digest, again)  # in place of another
        del closed, held
    assert calls == []
    assert open_files(tier) == 5  # none was closed by it
    thread.turn()
    del again
    thread.turn()
    assert open_files(tier) == 0


# -- letting go ----------------------------------------------------------------------------------


def test_an_eviction_of_the_old_file_does_not_let_go_of_the_new_one(tier: Tier, make: Held) -> None:
    here, thread = make(tier)
    key = key_at(0)
    tier.writer.publish(key, [entry(key)])
    here.add(key.digest, opened(tier, key))
    tier.writer.publish(key, [entry(key, seed=1)])
    here.add(key.digest, opened(tier, key))
    for _ in range(2):
        thread.turn()
    held = here.get(key.digest, time.monotonic())
    assert held is not None
    assert read(held, key) == entry(key, seed=1)
    assert open_files(tier) == 1


def test_what_was_found_bad_is_not_granted_again(tier: Tier, make: Held) -> None:
    here, thread = make(tier)
    publish(tier, 0, 1)
    for number in range(2):
        here.add(key_at(number).digest, opened(tier, key_at(number)))
    here.discard(key_at(0).digest)
    here.discard(key_at(5).digest)
    assert granted(here, key_at(0), key_at(1)) == {key_at(1)}
    thread.turn()
    assert open_files(tier) == 1


@pytest.mark.parametrize("spooled", [False, True])
def test_what_another_process_found_bad_is_let_go_of(
    make_tier: MakeTier, make: Held, spooled: bool
) -> None:
    """Also where the spool has the file still."""
    tier, other = make_tier(), make_tier()
    spool = tier.open_spool(DESTINATION) if spooled else None
    publish(tier, 0, spool=spool)
    here, thread = make(tier)
    held = opened(tier, key_at(0))
    here.add(key_at(0).digest, held)
    other.entries.drop_bad(key_at(0), "checksum", inode=held.inode)
    del held
    thread.turn()
    assert granted(here, key_at(0)) == set()
    assert open_files(tier) == 0


def test_a_full_table_lets_go_of_what_was_asked_for_least_lately(tier: Tier, make: Held) -> None:
    here, thread = make(tier, most=16)
    keys = [even(number) for number in range(20)]
    fill(tier, *range(20))
    now_s = time.monotonic()
    for number, key in enumerate(keys):
        here.add(key.digest, opened(tier, key))
        if number in (3, 7):
            assert here.get(key.digest, now_s + 100) is not None
    thread.turn()
    assert len(here) == open_files(tier) == 15
    assert granted(here, *keys) == {keys[3], *keys[6:]}
    assert all(tier.entries.contains(key) for key in keys)


def test_without_descriptors_nothing_is_resident(tier: Tier, make: Held) -> None:
    here, thread = make(tier, most=0)
    publish(tier, 0)
    here.add(key_at(0).digest, opened(tier, key_at(0)))
    here.start()
    thread.turn()
    assert granted(here, key_at(0)) == set()
    assert open_files(tier) == len(here) == 0


def test_close_ends_all(tier: Tier, make: Held) -> None:
    here, thread = make(tier)
    publish(tier, 0, 1, 2)
    here.add(key_at(0).digest, opened(tier, key_at(0)))
    here.release([opened(tier, key_at(1))])
    here.start()
    thread.turn()
    here.release([opened(tier, key_at(1))])
    assert open_files(tier) == 4
    here.close()
    assert open_files(tier) == len(here) == 0
    here.add(key_at(2).digest, opened(tier, key_at(2)))
    here.release([opened(tier, key_at(2))])
    here.start()
    assert granted(here, key_at(0), key_at(1), key_at(2)) == set()
    assert open_files(tier) == 0
    here.close()


def test_close_ends_a_walk_that_is_under_way(tier: Tier, make: Held) -> None:
    publish(tier, *range(6))
    here, thread = make(tier, clock=Clock(time.monotonic(), tick_s=0.5))
    here.start()
    assert thread.turn() == 0.0
    assert open_files(tier) > 0
    here.close()
    assert open_files(tier) == len(here) == 0


def test_they_end_with_their_tier(make_tier: MakeTier) -> None:
    tier = make_tier()
    publish(tier, 0, 1)
    here = tier.open_residents(lambda header: True)
    here.start()
    eventually(lambda: len(here) == 2)  # by a thread
    tier.close()
    assert open_files(tier) == len(here) == 0
    with pytest.raises(TierError, match="not open"):
        tier.open_residents(lambda header: True)


# -- the walk after the start --------------------------------------------------------------------


def test_a_walk_prefers_what_was_used_last(tier: Tier, make: Held, clock: Clock) -> None:
    fill(tier, *range(10))
    for number in (4, 1, 6):
        use(tier, even(number), clock)
    here, thread = make(tier, most=3)
    here.start()
    thread.turn()
    assert granted(here, *map(even, range(10))) == {even(4), even(1), even(6)}


def test_bad_files_are_no_residents_and_are_deleted(
    make_tier: MakeTier, make: Held, root: Path, counters: Counters
) -> None:
    tier = make_tier(check_values=True)
    publish(tier, 0, 1, 5)
    flip(file_of(root, key_at(0)))
    tier.writer.publish(key_at(2), [entry(key_at(2))[:-1]])
    tier.writer.publish(key_at(3), [entry(key_at(1))])
    tier.writer.publish(key_at(4), [entry(key_at(4), namespace=OTHER_NAMESPACE)])
    file_of(root, key_at(5)).unlink()
    os.mkfifo(file_of(root, key_at(5)), 0o600)
    here = walked(make, tier)
    assert granted(here, *map(key_at, range(6))) == {key_at(1)}
    assert open_files(tier) == 1
    assert counters.get("tier.errors") == 0
    assert counters.get("tier.bad_files") == 4
    for number in (0, 2, 3, 4):
        assert not tier.entries.contains(key_at(number))


def test_a_walk_over_a_folder_that_cannot_be_read_is_no_fault(
    plain_user: Path, make_tier: MakeTier, make: Held
) -> None:
    tier = make_tier(plain_user / "cache")
    publish(tier, 0, 1)
    folder = file_of(plain_user / "cache", key_at(0)).parent
    folder.chmod(0)
    here = walked(make, tier)
    folder.chmod(0o700)
    assert granted(here, key_at(0), key_at(1)) == {key_at(1)}


def test_others_are_swept_while_a_walk_takes_its_time(tier: Tier, make: Held) -> None:
    publish(tier, *range(6))
    here, thread = make(tier, clock=Clock(time.monotonic(), tick_s=0.5))
    here.start()
    turns = 1
    assert thread.turn() == 0.0  # it goes on at once
    assert 0 < len(here) < 6
    (gone,) = [key_at(number) for number in range(6) if granted(here, key_at(number))][:1]
    evict(tier, gone)
    while thread.turn() == 0.0:
        assert granted(here, gone) == set()
        turns += 1
    assert turns > 1
    assert granted(here, *map(key_at, range(6))) == {*map(key_at, range(6))} - {gone}


# -- descriptors ---------------------------------------------------------------------------------


def test_they_take_at_most_half_of_the_descriptors(make_tier: MakeTier, root: Path) -> None:
    tier = make_tier()
    publish(tier, *range(60))
    with child("few_files", root, 64) as other:
        assert other.hear() == "64"  # the soft limit, which was 32
        assert other.hear() == "32"
        assert other.hear() == "5"  # and others can be opened
        assert other.hear() == "0"
        other.end()


def test_few_descriptors_are_told_of(
    tier: Tier, make: Held, caplog: pytest.LogCaptureFixture
) -> None:
    make(tier, most=residents.FEW_RESIDENTS)[0].start()
    assert caplog.records == []
    make(tier, most=30)[0].start()
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "only 30 entries" in record.message


def test_no_limit_is_a_limit_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    unlimited = residents.resource.RLIM_INFINITY
    monkeypatch.setattr(residents.resource, "getrlimit", lambda what: (1024, unlimited))
    monkeypatch.setattr(residents.resource, "setrlimit", lambda what, limits: None)
    assert allowed_residents() == residents.MOST_RESIDENTS


def test_a_limit_that_cannot_be_raised_is_taken_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(what: int, limits: tuple[int, int]) -> None:
        raise ValueError("not allowed to raise maximum limit")

    monkeypatch.setattr(residents.resource, "getrlimit", lambda what: (256, 4096))
    monkeypatch.setattr(residents.resource, "setrlimit", refuse)
    assert allowed_residents() == 128
