# SPDX-License-Identifier: Apache-2.0
"""A bucket that is filled from another one in any order and with holes, while nodes read it.

A replicator promises no order: the manifest may come before the objects that it names, a newer
snapshot before what is older. Whatever is missing is a miss, never an error and never another
entry's bytes, and is a hit once it has come.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from s3ec import modality
from s3ec.index import reader
from s3ec.node import Node
from s3ec.testing.server import LocalS3
from tests.faults.embeddings import LAYOUT, key_at
from tests.faults.indexed import (
    Bucket,
    evict,
    noding,
    refresh,
    run_rebuild,
    run_union,
    run_verify,
    serve,
)

ASKED = range(14)


class Replica:
    """The second bucket, and what is still on its way to it."""

    def __init__(self, home: Bucket, away: Bucket) -> None:
        self.home, self.away = home, away
        self.waiting: dict[str, bytes | None] = {}  # None: a deletion
        self._seen: dict[str, bytes] = {}

    def look(self) -> None:
        """Note what has changed at home; a later change of one name overtakes an earlier one."""
        now = {name: self.home.get(name) for name in self.home.names()}
        for name in self._seen.keys() - now.keys():
            self.waiting[name] = None
        for name, body in now.items():
            if self._seen.get(name) != body:
                self.waiting[name] = body
        self._seen = now

    def deliver(self, *names: str) -> None:
        for name in names:
            body = self.waiting.pop(name)
            if body is None:
                self.away.delete(name)
            else:
                self.away.put(name, body)

    def deliver_where(self, wanted: Callable[[str], bool]) -> None:
        self.deliver(*filter(wanted, sorted(self.waiting)))


@pytest.fixture
def replica(local_s3: LocalS3, s3_bucket: str, signed: None) -> Iterator[Replica]:
    away = local_s3.create_bucket(f"{s3_bucket}-away")
    yield Replica(Bucket(local_s3, s3_bucket, "corpus"), Bucket(local_s3, away, "corpus"))
    local_s3.delete_bucket(away)


def fill(home: Bucket, folder: Path) -> set[int]:
    """0..5 in a snapshot, 6..8 in deltas, 9 announced and deleted; answers what is there."""
    home.stock(*range(6))
    with noding(home.settings(folder / "maker")) as node:
        run_rebuild(node, ago_s=10)
    for number in (6, 7, 8, 9):
        home.stock(number)
        home.announce(number)
    home.delete(LAYOUT.object(key_at(9)))
    return set(range(9))


def patiently(node: Node) -> None:
    """Until what was a 404 is believed again, and all of the manifest has been looked at."""
    refresh(node, 2)
    evict(node, ASKED)


@pytest.fixture
def believing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes that believe a 404 for no time at all, of the modality's record neither."""
    monkeypatch.setattr(modality, "_ABSENT_TTL_S", 0.0)
    monkeypatch.setattr(reader, "NEGATIVE_TTL_S", 0.0)


def is_object(name: str) -> bool:
    return name.startswith(LAYOUT.objects)


@pytest.mark.usefixtures("believing")
def test_shuffled_replication_with_holes_gives_misses_and_then_everything(
    replica: Replica, tmp_path: Path
) -> None:
    there = fill(replica.home, tmp_path)
    replica.look()
    seed = random.randrange(2**32)
    print(f"seed {seed}")  # noqa: T201 - shown when it fails
    chance = random.Random(seed)
    order = sorted(replica.waiting)
    chance.shuffle(order)
    holes = set(chance.sample(order, 5))
    with noding(replica.away.settings(tmp_path / "early")) as early:
        for start in range(0, len(order), 4):
            replica.deliver(*(name for name in order[start : start + 4] if name not in holes))
            refresh(early)
            assert serve(early, ASKED) <= there
        with noding(replica.away.settings(tmp_path / "late")) as late:
            refresh(late, 2)
            assert serve(late, ASKED) <= there
            # At home it goes on: a new snapshot, and what it replaces is gone there.
            replica.home.stock(10)
            replica.home.announce(10)
            with noding(replica.home.settings(tmp_path / "again")) as node:
                assert run_union(node) is not None
                run_rebuild(node)
            replica.look()
            rest = sorted(replica.waiting)
            chance.shuffle(rest)
            for start in range(0, len(rest), 5):
                replica.deliver(*rest[start : start + 5])
                for node in (early, late):
                    refresh(node)
                    assert serve(node, ASKED) <= there | {10}
            assert replica.waiting == {}
            for node in (early, late):
                patiently(node)
                assert serve(node, ASKED) == there | {10}
                found = run_verify(node)
                assert (found.extra, found.missing, found.refused) == (1, 0, {})


def test_manifest_ahead_of_its_objects_is_a_miss_for_the_negative_ttl_and_heals(
    replica: Replica, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = fill(replica.home, tmp_path)
    replica.look()
    replica.deliver_where(lambda name: not is_object(name))
    monkeypatch.setattr(reader, "NEGATIVE_TTL_S", 3600.0)
    with noding(replica.away.settings(tmp_path / "cache")) as node:
        refresh(node)
        for _ in range(3):
            assert serve(node, ASKED) == set()
        asked = len(there | {9})
        assert node.counters.get("index.vanished") == asked
        assert node.counters.get("fetch.absent") == asked  # one request each
        replica.deliver_where(is_object)
        assert serve(node, ASKED) == set()  # it does not ask before the time is up
        replica.home.announce(3)
        replica.look()
        replica.deliver_where(lambda name: True)
        refresh(node)
        assert serve(node, ASKED) == {3}  # what is announced again is asked for at once
    with noding(replica.away.settings(tmp_path / "other")) as node:
        refresh(node)
        assert serve(node, ASKED) == there
