# SPDX-License-Identifier: Apache-2.0
"""Processes that write one index at once, some of them stopped, resumed or killed.

Nothing that was confirmed is lost. A process is stopped (SIGSTOP) before it hears of a request that
the server has carried out, or before the server gets it, for as long as others need to do their
worst.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from s3ec.dev.rigs.proxy import Exchange, FaultProxy, Rule
from s3ec.errors import UnavailableError
from s3ec.index import names
from s3ec.index.delete import delete_entries
from s3ec.index.maker import list_snapshots
from s3ec.index.names import SnapshotName
from s3ec.node import Node
from s3ec.prefetch import FetchOutcome
from s3ec.testing.server import LocalS3
from tests.faults.embeddings import LAYOUT, key_at, spooled_below
from tests.faults.herd import Herd
from tests.faults.indexed import (
    Bucket,
    evict,
    fetch,
    noding,
    refresh,
    run_rebuild,
    run_union,
    run_verify,
    serve,
)
from tests.support.waiting import DEADLINE_S, eventually, stop

pytest.importorskip("torch")


@dataclass
class Freeze:
    """Stops a process before it hears what came of its request.

    Attributes:
        reached: Whether the server gets the request before that, or when the process goes on.
    """

    reached: bool = True
    pid: int = 0
    frozen: threading.Event = field(default_factory=threading.Event)
    known: threading.Event = field(default_factory=threading.Event)

    async def apply(self, exchange: Exchange) -> None:
        await exchange.read_body()
        reply = await exchange.forward() if self.reached else None
        assert self.known.wait(DEADLINE_S)
        stop(self.pid)
        self.frozen.set()
        if reply is not None:
            await exchange.send(reply)
            return
        await exchange.released.wait()
        await exchange.send(await exchange.forward())

    def of(self, pid: int) -> None:
        """Whom to stop; wait until it is."""
        self.pid = pid
        self.known.set()
        assert self.frozen.wait(DEADLINE_S)


@dataclass
class Place:
    """One corpus, a node that is never stopped, and processes behind a proxy."""

    bucket: Bucket
    proxy: FaultProxy
    herd: Herd
    folder: Path
    node: Node

    def slow(self, name: str = "slow") -> dict[str, str]:
        """Settings of a process whose requests go through the proxy, on a node of its own."""
        return {
            **self.bucket.settings(self.folder / name),
            "endpoint_url": self.proxy.url,
            "read_timeout_s": "60",
        }

    @contextmanager
    def frozen(
        self, command: str, method: str, target: str, *, reached: bool = True, **arguments: object
    ) -> Iterator[int]:
        """A process that is stopped at a request; it goes on when the block ends."""
        freeze = Freeze(reached)
        rule = self.proxy.add(Rule(freeze, method=method, target=target, times=1))
        pid = self.herd.start(command, **arguments)
        freeze.of(pid)
        assert rule.fired == 1
        yield pid
        with suppress(ProcessLookupError):  # it was killed
            os.kill(pid, signal.SIGCONT)
        self.proxy.release()

    def newest(self) -> SnapshotName:
        found = self.node.loop.run(list_snapshots(self.node.store, LAYOUT), DEADLINE_S)
        return found[0][0]

    def assert_agrees(self, entries: int) -> None:
        """The index says what the bucket holds."""
        found = run_verify(self.node)
        assert found.index_agrees, found
        assert (found.objects, found.entries) == (entries, entries)


@pytest.fixture
def place(
    local_s3: LocalS3, s3_bucket: str, herd: Herd, tmp_path: Path, signed: None
) -> Iterator[Place]:
    bucket = Bucket(local_s3, s3_bucket, "corpus")
    bucket.stock(0)
    with (
        FaultProxy(local_s3.endpoint_url) as proxy,
        noding(bucket.settings(tmp_path / "quick")) as node,
    ):
        run_rebuild(node, ago_s=10)
        yield Place(bucket, proxy, herd, tmp_path, node)
        assert herd.complaints() == []


def told(place: Place, *numbers: int) -> None:
    place.bucket.stock(*numbers)
    place.bucket.announce(*numbers)


def test_requests_beside_writers_gc_and_makers_lose_nothing(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each fifth entry goes. Of the others a node serves all that were confirmed."""
    stop = place.folder / "stop"

    def own(name: str) -> dict[str, str]:
        return place.bucket.settings(place.folder / name)

    firsts = (100, 200)
    goes = [n for first in firsts for n in range(first, first + 60, 5)]
    makers = [
        place.herd.start("squeeze", settings=own(kind), kind=kind, stop=str(stop), goes=goes)
        for kind in ("union", "listing", "gc")
    ]
    for pid in makers:
        place.herd.hear(pid, "up")
    writers = [
        place.herd.start("tell", settings=own(f"w{first}"), first=first, count=60)
        for first in firsts
    ]
    said = place.herd.said
    asked, served = set[int](), set[int]()

    def all_told() -> bool:
        over = {who for who, words in list(said) if words == "done"} >= set(writers)
        starts = [int(words.split()[1]) for _, words in list(said) if words.startswith("told")]
        kept = {n for start in starts for n in range(start, start + 5)} - set(goes)
        try:
            refresh(place.node)
        except UnavailableError:  # a maker has removed the snapshot since it was listed
            return False
        lost = {n for n in kept if not place.node.index.maybe_contains(key_at(n))}
        assert lost == set()
        served.update(serve(place.node, kept - asked))
        asked.update(kept)
        return over

    eventually(all_told)
    assert served == asked
    assert len(asked) == 96
    stop.touch()
    for pid in makers:
        place.herd.hear(pid, "done")
    made = {who for who, words in said if words.startswith("made")}
    assert made >= set(makers[1:])  # a union is due only where no listing was faster
    with noding(own("late")) as late:
        refresh(late)
        assert serve(late, [0, *range(100, 270)]) == asked | {0}
    found = run_verify(place.node)
    assert (found.missing, found.unannounced, found.refused) == (0, 0, {})
    assert found.extra <= len(goes)
    # A listing that begins 15 minutes later knows what is gone, for sure.
    monkeypatch.setattr(names, "MARGIN_S", -60)
    left = {n for n in goes if LAYOUT.object(key_at(n)) in place.bucket.names(LAYOUT.objects)}
    run_rebuild(place.node)
    place.assert_agrees(len(asked | left) + 1)


def test_union_stopped_until_a_listing_is_newer_takes_nothing_away(place: Place) -> None:
    told(place, 1, 2)
    frozen = place.frozen(
        "squeeze", "PUT", "/snapshot/", reached=False, settings=place.slow(), kind="union"
    )
    with frozen as pid:
        place.bucket.stock(3)  # nobody announces it
        listing = run_rebuild(place.node).name
        told(place, 4)
    place.herd.hear(pid, "done")
    assert place.newest() == listing
    refresh(place.node)
    assert serve(place.node, range(6)) == set(range(5))
    place.assert_agrees(5)


def test_listing_stopped_while_others_announce_and_merge_hides_nothing_when_it_lands(
    place: Place,
) -> None:
    """It began before their objects were there, and is the newest in the end."""
    frozen = place.frozen(
        "squeeze", "PUT", "/snapshot/", reached=False, settings=place.slow(), kind="listing"
    )
    with frozen as pid:
        told(place, 1, 2)
        assert run_union(place.node) is not None
        told(place, 3)
        refresh(place.node)
        assert serve(place.node, range(5)) == set(range(4))
    place.herd.hear(pid, "done")
    refresh(place.node)
    assert str(place.newest()) == place.herd.hear(pid, "made").split()[1]
    assert place.node.index.counts().snapshot == place.newest()
    evict(place.node, range(4))
    assert serve(place.node, range(5)) == set(range(4))
    place.assert_agrees(4)


def test_gc_killed_before_its_snapshot_costs_one_request_for_each_entry_and_heals(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    told(place, 1, 2, 3)
    refresh(place.node)
    before = place.newest()
    frozen = place.frozen("squeeze", "POST", "delete", settings=place.slow(), kind="gc", goes=[1])
    with frozen as pid:
        place.herd.kill(pid)
    assert place.newest() == before
    assert run_verify(place.node).extra == 1
    refresh(place.node)
    assert serve(place.node, range(4)) == {0, 2, 3}
    for _ in range(3):
        assert serve(place.node, [1]) == set()
    assert place.node.counters.get("fetch.absent") == 1
    monkeypatch.setattr(names, "MARGIN_S", -60)
    run_rebuild(place.node)
    place.assert_agrees(3)


async def _delete(node: Node, number: int) -> None:
    await delete_entries(node.store, LAYOUT, [key_at(number)])


def test_writer_stopped_between_its_delta_and_its_spool_finds_both_settled(place: Place) -> None:
    with place.frozen("keep", "PUT", "/delta/", settings=place.slow(), numbers=[1, 2, 3]) as pid:
        assert len(spooled_below(place.folder / "slow")) == 3
        assert run_union(place.node) is not None
        run_rebuild(place.node)
    assert place.herd.hear(pid, "left") == "left 0"
    assert spooled_below(place.folder / "slow") == set()
    place.assert_agrees(4)
    refresh(place.node)
    assert serve(place.node, range(5)) == set(range(4))


def test_announcement_that_comes_after_its_entry_was_deleted_costs_one_request_and_heals(
    place: Place,
) -> None:
    with place.frozen(
        "keep", "PUT", "/delta/", reached=False, settings=place.slow(), numbers=[1]
    ) as pid:
        place.node.loop.run(_delete(place.node, 1), DEADLINE_S)
        run_rebuild(place.node)
    assert place.herd.hear(pid, "left") == "left 0"
    assert run_verify(place.node).extra == 1
    refresh(place.node)
    assert place.node.index.maybe_contains(key_at(1))
    assert {one.outcome for one in fetch(place.node, [1]).values()} == {FetchOutcome.ABSENT}
    for _ in range(3):
        assert serve(place.node, [1]) == set()
    assert place.node.counters.get("index.vanished") == 1
    assert place.node.counters.get("fetch.absent") == 1
    # It is a miss, so whoever encodes it stores it again, and all is well.
    again = place.herd.start("keep", settings=place.slow("again"), numbers=[1])
    assert place.herd.hear(again, "left") == "left 0"
    place.assert_agrees(2)
    with noding(place.bucket.settings(place.folder / "late")) as late:
        refresh(late)
        assert serve(late, [1]) == {1}
