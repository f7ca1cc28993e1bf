# SPDX-License-Identifier: Apache-2.0
"""Files cut, grown and changed by somebody else: never served, never uploaded, soon replaced."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.embeddings import ENTRY_BYTES, key_at, spooled_below
from tests.faults.machine import Corpus, Machine
from tests.support.waiting import DEADLINE_S, eventually


def flip(at: int) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        with open(path, "r+b") as file:
            file.seek(at)
            (byte,) = file.read(1)
            file.seek(at)
            file.write(bytes([byte ^ 1]))

    return damage


def grow(path: Path) -> None:
    with open(path, "ab") as file:
        file.write(b"and more")


DAMAGES = {
    "emptied": lambda path: os.truncate(path, 0),
    "cut in the tensor": lambda path: os.truncate(path, ENTRY_BYTES // 2),
    "grown": grow,
    "grown by a hole": lambda path: os.truncate(path, 2**30),
    "flipped in the header": flip(40),
    "flipped in the tensor": flip(ENTRY_BYTES - 1),
}


# One entry for each of them, and one that stays whole.
HURT = range(len(DAMAGES))
WHOLE = len(DAMAGES)
ALL = {*HURT, WHOLE}


def damage(machine: Machine) -> None:
    for number, one in enumerate(DAMAGES.values()):
        one(machine.file(number))


def test_damaged_entry_is_served_from_the_bucket_and_replaced(tmp_path: Path) -> None:
    corpus = Corpus()
    corpus.stock(*ALL)
    with Machine(corpus, tmp_path / "cache") as machine:
        assert machine.serve(*ALL) == ALL
        damage(machine)
        for _ in range(2):
            assert machine.serve(*ALL) == ALL
            machine.assert_in_order()
        assert machine.node.counters.get("tier.bad_files") == len(HURT)


def test_file_damaged_between_grant_and_load_gives_the_right_bytes(tmp_path: Path) -> None:
    corpus = Corpus()
    corpus.stock(*ALL)
    with Machine(corpus, tmp_path / "cache") as machine:
        granted = machine.grant(*ALL)
        damage(machine)
        machine.load(granted)  # the header was read before, and is not read again
        granted.clear()
        assert machine.node.counters.get("load.rescued") <= len(HURT)
        assert machine.serve(*ALL) == ALL
        machine.assert_in_order()


@pytest.mark.parametrize("damage", ["cut in the tensor", "flipped in the tensor"])
def test_damaged_entry_while_the_bucket_is_down_is_a_miss_for_the_scheduler(
    tmp_path: Path, damage: str
) -> None:
    """The worker would notice too, but only the bucket could save the engine then."""
    corpus = Corpus()
    corpus.stock(0, 1)
    with Machine(corpus, tmp_path / "cache") as machine:
        assert machine.serve(0, 1) == {0, 1}
        DAMAGES[damage](machine.file(0))
        corpus.break_reads()
        assert machine.serve(0, 1) == {1}
        assert machine.node.counters.get("load.failed") == 0
        machine.assert_in_order()


def test_damaged_file_in_the_spool_is_not_uploaded_and_the_next_save_is(tmp_path: Path) -> None:
    corpus = Corpus()
    gate = corpus.hold_saves()
    first = WHOLE + 1
    with Machine(corpus, tmp_path / "cache", max_concurrency="1") as machine:
        machine.save(first)
        assert gate.reached.wait(DEADLINE_S)  # the one place is taken: the others are not read yet
        machine.save(*ALL)
        machine.wait_written(first, *ALL)
        damage(machine)  # which are the spool's files too
        gate.release()
        machine.wait_confirmed(first, WHOLE)
        assert not any(map(corpus.has, HURT))
        machine.assert_in_order()
        machine.save(*HURT)
        machine.wait_confirmed(first, *ALL)
        assert machine.serve(*ALL) == ALL
        machine.assert_in_order()


def test_damaged_file_of_a_dead_process_is_deleted_by_the_one_that_adopts_it(
    tmp_path: Path,
) -> None:
    corpus = Corpus()
    gate = corpus.hold_saves()
    with Machine(corpus, tmp_path / "cache") as machine:
        machine.save(*ALL)
        machine.wait_written(*ALL)
    damage(machine)  # which are the spool's files too
    gate.release()
    with Machine(corpus, tmp_path / "cache") as machine:
        machine.wait_confirmed(WHOLE)
        eventually(lambda: not spooled_below(machine.cache_dir))
        # Names in the tier are known by headers. Where one is bad, the next look deletes it.
        assert all(machine.node.tier.entries.open(key_at(number)) is None for number in HURT)
        machine.assert_in_order()
        assert not any(map(corpus.has, HURT))
        machine.save(*HURT)
        machine.wait_confirmed(*ALL)
        machine.assert_in_order()
