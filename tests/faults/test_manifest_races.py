# SPDX-License-Identifier: Apache-2.0
"""Processes that write one index at once, some of them stopped and resumed: nothing is lost.

A process is stopped (SIGSTOP) before it hears of a request that the server has carried out, for as
long as others need to do their worst: the graces that would protect it are set to nothing.
"""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from s3ec.index.delete import delete_entries

from s3ec.dev.rigs.proxy import Exchange, FaultProxy, Rule
from s3ec.node import Node
from s3ec.prefetch import FetchOutcome
from s3ec.testing.server import LocalS3
from tests.faults.embeddings import LAYOUT, key_at, spooled_below
from tests.faults.herd import Herd
from tests.faults.indexed import (
    Bucket,
    fetch,
    noding,
    refresh,
    run_compact,
    run_rebuild,
    run_verify,
    serve,
)
from tests.support.waiting import DEADLINE_S, eventually

pytest.importorskip("torch")

# What is superseded is deleted at once, whatever the second that the server's clock stands in.
_NOW_S = -3.0


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
        os.kill(self.pid, signal.SIGSTOP)
        while _state(self.pid) != "T":
            pass
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


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


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
        os.kill(pid, signal.SIGCONT)
        self.proxy.release()

    def runs(self) -> set[tuple[int, str]]:
        found = (LAYOUT.run_of(name) for name in self.bucket.names(LAYOUT.bases))
        return {run for run in found if run is not None}

    def versions(self) -> list[int]:
        found = (LAYOUT.version_of(name) for name in self.bucket.names(LAYOUT.heads))
        return [version for version in found if version is not None]

    def assert_agrees(self, entries: int) -> None:
        """The index says what the bucket holds, and no file of nobody's is left."""
        found = run_verify(self.node)
        assert found.agrees, found
        assert (found.entries, found.objects) == (entries, entries)


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
        run_rebuild(node)
        yield Place(bucket, proxy, herd, tmp_path, node)
        assert herd.complaints() == []


def told(place: Place, *numbers: int) -> None:
    place.bucket.stock(*numbers)
    place.bucket.announce(*numbers)


def test_processes_that_announce_and_compact_at_once_lose_nothing(place: Place) -> None:
    stop = place.folder / "stop"
    settings = place.bucket.settings(place.folder / "own")

    def own(name: str) -> dict[str, str]:
        return {**settings, "cache_dir": str(place.folder / name)}

    # As on nodes of different patience: some delete what is old at once.
    compactors = [
        place.herd.start("squeeze", settings=own(f"c{n}"), grace_s=grace_s, stop=str(stop))
        for n, grace_s in enumerate([_NOW_S, 2.0, 3600.0])
    ]
    writers = [
        place.herd.start("tell", settings=own(f"w{n}"), first=100 * n + 100, count=10)
        for n in range(3)
    ]
    for pid in writers:
        place.herd.hear(pid, "told")
    said, more = place.herd.said, itertools.count(900)

    def have_raced() -> bool:
        """They have not just taken turns; as long as that is so they get more to do."""
        if any(words.startswith(("beaten", "gave up")) for _, words in list(said)):
            return True
        told(place, next(more))
        return False

    eventually(have_raced)
    stop.touch()
    for pid in compactors:
        place.herd.hear(pid, "done")
    winners = [words.split()[1:] for _, words in said if words.startswith("made")]
    assert len({version for version, _ in winners}) == len(winners) >= 2
    left = {0} | {n for w in range(3) for n in range(100 * w + 100, 100 * w + 110) if n % 5}
    left |= set(range(900, next(more)))
    place.assert_agrees(len(left))
    run_compact(place.node, grace_s=_NOW_S)
    refresh(place.node)
    assert serve(place.node, [*range(320), *range(900, max(left) + 2)]) == left


def test_compactor_stopped_before_its_commit_is_beaten_and_cleans_up(place: Place) -> None:
    told(place, 1, 2)
    with place.frozen("squeeze", "PUT", "bloom", settings=place.slow(), grace_s=_NOW_S) as pid:
        assert len(place.runs()) == 2
        told(place, 3)
        assert run_compact(place.node) is not None
    assert place.herd.hear(pid, "beaten")
    place.herd.hear(pid, "done")
    assert place.versions() == [1, 2]
    assert {version for version, _ in place.runs()} == {1, 2}
    place.assert_agrees(4)


def test_compactor_stopped_until_its_version_is_forgotten_leaves_no_older_base_in_use(
    place: Place,
) -> None:
    told(place, 1, 2)
    with place.frozen("squeeze", "PUT", "bloom", settings=place.slow(), grace_s=3600.0) as pid:
        for number in (3, 4, 5):
            told(place, number)
            assert run_compact(place.node, grace_s=_NOW_S) is not None
        assert place.versions() == [4]  # the name of its head is free again
    assert place.herd.hear(pid, "beaten")
    place.herd.hear(pid, "done")
    refresh(place.node)
    assert serve(place.node, range(7)) == set(range(6))
    run_compact(place.node, grace_s=_NOW_S)
    assert place.versions() == [4]
    assert {version for version, _ in place.runs()} == {4}
    place.assert_agrees(6)


def test_compactor_stopped_after_its_look_writes_nothing_that_is_older_than_what_is_there(
    place: Place,
) -> None:
    told(place, 1, 2)
    target = f"prefix=corpus%2F{LAYOUT.manifest.replace('/', '%2F')}"
    with place.frozen("squeeze", "GET", target, settings=place.slow(), grace_s=3600.0) as pid:
        told(place, 3)
        place.node.loop.run(_delete(place.node, 1), DEADLINE_S)
        assert run_compact(place.node, grace_s=_NOW_S) is not None
        assert place.bucket.names(LAYOUT.deltas) == []  # what it has listed is gone
    place.herd.hear(pid, "done")
    assert [words for who, words in place.herd.said if who == pid and "made" in words] == []
    place.assert_agrees(3)


def test_rebuild_of_another_while_a_compactor_is_stopped_at_its_commit_wins(place: Place) -> None:
    """The head reaches the server when the process goes on."""
    told(place, 1, 2)
    frozen = place.frozen(
        "squeeze", "PUT", "/head/", reached=False, settings=place.slow(), grace_s=3600.0
    )
    with frozen as pid:
        place.bucket.stock(3)  # nobody announces it
        run_rebuild(place.node)
    assert place.herd.hear(pid, "beaten")
    place.herd.hear(pid, "done")
    assert place.versions() == [1, 2]
    place.assert_agrees(4)


async def _delete(node: Node, number: int) -> None:
    await delete_entries(node.store, LAYOUT, [key_at(number)])


def test_writer_stopped_between_its_delta_and_its_spool_finds_both_settled(place: Place) -> None:
    with place.frozen("keep", "PUT", "/delta/", settings=place.slow(), numbers=[1, 2, 3]) as pid:
        assert len(spooled_below(place.folder / "slow")) == 3
        assert run_compact(place.node, grace_s=_NOW_S) is not None
        assert run_compact(place.node, grace_s=_NOW_S) is not None
        assert place.bucket.names(LAYOUT.deltas) == []
    assert place.herd.hear(pid, "left") == "left 0"
    assert spooled_below(place.folder / "slow") == set()
    place.assert_agrees(4)
    refresh(place.node)
    assert serve(place.node, range(5)) == set(range(4))


def test_announcement_that_comes_after_its_entry_was_deleted_costs_one_request_and_heals(
    place: Place,
) -> None:
    """Its tombstone is merged by then, so nothing says any more that it is late."""
    with place.frozen(
        "keep", "PUT", "/delta/", reached=False, settings=place.slow(), numbers=[1]
    ) as pid:
        place.node.loop.run(_delete(place.node, 1), DEADLINE_S)
        assert run_compact(place.node, grace_s=_NOW_S) is not None
        assert place.bucket.names(LAYOUT.deltas) == []
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
    refresh(place.node)
    assert serve(place.node, [1]) == {1}
