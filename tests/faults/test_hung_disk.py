# SPDX-License-Identifier: Apache-2.0
"""A disk that does not answer: hooks do not notice, the node goes on without it, and ends in time.

The disk is a real one, frozen by the kernel: who changes something waits, and cannot be killed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from s3ec.connector.scheduler import SchedulerHalf
from s3ec.connector.vllm_config import Role
from s3ec.errors import TierError
from s3ec.node import Node
from s3ec.prefetch import FetchOutcome, FetchRequest
from s3ec.runtime import DiskWatch
from tests.faults.embeddings import ENTRY_BYTES, ROWS, identifier_at, key_at
from tests.faults.machine import Corpus, Machine
from tests.support.disks import FailingDisk, failing_disk
from tests.support.waiting import DEADLINE_S, eventually

loads = pytest.importorskip("s3ec.connector.loads")
scheduling = pytest.importorskip("tests.unit.connector.scheduling")

# Where a disk is to hang, who waits for it does so for no longer. Elsewhere a busy machine may.
_PATIENCE_S = 2.0


class WatchClock:
    """Of the watch: the patience passes in a moment where a disk is to hang."""

    def __init__(self) -> None:
        self._speed, self._seen_s, self._now_s = 1.0, time.monotonic(), 0.0
        self._lock = threading.Lock()

    def __call__(self) -> float:
        with self._lock:
            seen_s = time.monotonic()
            self._now_s += self._speed * (seen_s - self._seen_s)
            self._seen_s = seen_s
            return self._now_s

    @contextmanager
    def hurrying(self) -> Iterator[None]:
        """Inside, the watch loses its patience soon."""
        self()
        self._speed = DEADLINE_S / _PATIENCE_S
        try:
            yield
        finally:
            self()
            self._speed = 1.0


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> WatchClock:
    clock = WatchClock()
    monkeypatch.setattr("s3ec.node.DiskWatch", partial(DiskWatch, clock=clock))
    return clock


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[FailingDisk]:
    with failing_disk(tmp_path) as disk:
        yield disk


def half_of(node: Node) -> SchedulerHalf:
    """A scheduler half that uses all that a node has."""
    return SchedulerHalf(
        Role(
            producer=True,
            consumer=True,
            window_tokens=8192,
            ranks=1,
            steps_in_flight=1,
            defer_timeout_s=60.0,
        ),
        index=node.index,
        local=node.local,
        prefetcher=node.prefetcher,
        residents=node.residents,
        store=node.breaker,
        disk=node.loop.watch,
        needs_embedding=lambda _: False,
        placeholder_of=lambda _: {},
        counters=node.counters,
    )


class Engine:
    """A scheduler's calls, one after the other, in the test's thread."""

    def __init__(self, machine: Machine) -> None:
        self.half = half_of(machine.node)
        self._requests = 0

    def request(self, number: int) -> object:
        self._requests += 1
        feature = scheduling.feature(identifier_at(number), rows=ROWS, raw=True)
        return scheduling.request(f"r{self._requests}", feature)

    def ask(self, request: object) -> bool:
        """One pass: whether the request is scheduled."""
        scheduled = self.half.ensure_cache_available(request, 0)
        if not scheduled:
            self.half.build_connector_meta((), scheduled_tokens=0)
        return scheduled

    def run(self, number: int) -> bool:
        """A request from its arrival to its end; whether its image was not encoded."""
        request = self.request(number)
        eventually(lambda: self.ask(request))
        granted = self.half.has_cache_item(identifier_at(number))
        self.half.update_state_after_alloc(request, 0)
        plan = self.half.build_connector_meta((), scheduled_tokens=10)
        assert [load.identifier for load in plan.loads] == [identifier_at(number)] * granted
        self.half.build_connector_meta([identifier_at(number)], scheduled_tokens=10)
        self.half.request_finished(request)
        return granted


def test_hooks_go_on_while_the_disk_hangs_and_hits_come_back_with_it(
    disk: FailingDisk, clock: WatchClock
) -> None:
    corpus = Corpus()
    corpus.stock(*range(8))
    with Machine(corpus, disk.path / "cache") as machine:
        engine = Engine(machine)
        for number in range(8):
            machine.node.index.add(key_at(number))
        assert all(engine.run(number) for number in range(4))
        hung = machine.node.counters.get("tier.hung")
        with clock.hurrying(), disk.hanging() as hang:
            assert engine.run(3)  # open, and in memory
            # Whoever meets the hanging disk first is deferred until it is known to hang.
            assert not any(engine.run(number) for number in (4, 5, 3))
            assert machine.node.loop.watch.hangs
            assert machine.node.counters.get("tier.hung") == hung + 1
            held = engine.request(6)
            assert engine.ask(held)  # at once
            assert machine.fetch(7).outcome is FetchOutcome.UNAVAILABLE
            hang.end()
            eventually(lambda: not machine.node.loop.watch.hangs)
            machine.node.prefetcher.drain()
        eventually(lambda: engine.run(1) and engine.run(7))
        eventually(lambda: machine.serve(*range(8)) == set(range(8)))


def test_saves_wait_for_a_hanging_disk_and_what_finds_no_room_is_dropped_at_once(
    disk: FailingDisk, clock: WatchClock
) -> None:
    corpus = Corpus()
    with Machine(corpus, disk.path / "cache", cache_bytes=str(16 * ENTRY_BYTES)) as machine:
        with clock.hurrying(), disk.hanging() as hang:
            machine.save(0)  # its writer hangs
            eventually(lambda: machine.node.loop.watch.hangs)
            taken = [number for number in range(1, 8) if machine.offer(number)]
            assert taken == [1, 2, 3]
            assert machine.node.counters.get("save_problem.dropped") == 4
            assert machine.node.counters.get("save.blocked") == 0  # though the queue may block
            assert not corpus.has(0)
            hang.end()
            eventually(lambda: not machine.node.loop.watch.hangs)
        machine.wait_confirmed(*range(4))
        machine.save(*range(4, 9))
        machine.wait_confirmed(*range(9))
        assert machine.serve(*range(9)) == set(range(9))
        machine.assert_in_order()


def test_node_ends_in_time_though_its_disk_hangs(disk: FailingDisk, clock: WatchClock) -> None:
    corpus = Corpus()
    corpus.stock(*range(4))
    machine = Machine(corpus, disk.path / "cache")
    assert machine.serve(*range(4)) == set(range(4))
    granted = machine.grant(0)
    with clock.hurrying(), disk.hanging():
        machine.save(10)
        machine.node.prefetcher.submit([FetchRequest(key_at(1), "image", ROWS)])
        eventually(lambda: machine.node.loop.watch.hangs)
        machine.worker.finish()
        machine.node.close(0.3)
        machine.node.close(0.3)
        assert machine.node.counters.get("save_problem.abandoned") == 1  # it is nowhere yet
    del granted
    with Machine(corpus, disk.path / "cache") as machine:
        assert machine.serve(*range(4)) == set(range(4))


def test_disk_that_hangs_at_the_start_is_refused_in_time(
    disk: FailingDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("s3ec.node._OPEN_TIMEOUT_S", _PATIENCE_S)
    with disk.hanging(), pytest.raises(TierError, match=r"has not answered for .* `cache_dir`"):
        Machine(Corpus(), disk.path / "cache")


@contextmanager
def calls_that_hang(*threads: int | None, calls: str = "preadv,preadv2") -> Iterator[None]:
    """Some threads' reads take a minute: a tracer holds them back, in the kernel."""
    attached = [word for thread in threads for word in ("-p", str(thread))]
    try:
        tracer = subprocess.Popen(
            [*("strace", *attached, "-e", f"trace={calls}"),
             *("-e", f"inject={calls}:delay_enter=60000000")],
            stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
    except FileNotFoundError:
        pytest.skip("no strace command")
    with tracer:
        assert tracer.stderr is not None
        for _ in threads:
            if "attached" not in tracer.stderr.readline():
                tracer.kill()
                pytest.skip("strace may not trace here")
        try:
            yield
        finally:
            tracer.send_signal(signal.SIGKILL)  # which lets its thread go on


def threads_named(begin: str) -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name.startswith(begin)]


def forget_pages(path: Path) -> None:
    """The next read needs the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


@contextmanager
def one_reader(
    disk: FailingDisk, monkeypatch: pytest.MonkeyPatch, *here: int
) -> Iterator[tuple[Machine, threading.Thread]]:
    """A node with these entries on its disk, and its one reader, which has read the first."""
    monkeypatch.setattr("s3ec.connector.loads.MAX_READERS", 1)
    others = threads_named("s3ec-load")  # of other tests
    corpus = Corpus()
    corpus.stock(*range(4))
    with Machine(corpus, disk.path / "cache") as machine:
        for number in here:
            machine.serve(number)
        first = machine.grant(here[0])
        forget_pages(machine.file(here[0]))
        machine.load(first)  # by a reader, since a disk had to answer
        (reader,) = (one for one in threads_named("s3ec-load") if one not in others)
        yield machine, reader


def test_load_that_hangs_is_answered_from_the_bucket_and_the_next_at_once(
    disk: FailingDisk, clock: WatchClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    with one_reader(disk, monkeypatch, 0, 1, 2, 3) as (machine, reader):
        counters = machine.node.counters
        hung, rescued = counters.get("load.hung"), counters.get("load.rescued")
        granted = {number: machine.grant(number)[number] for number in (1, 2, 3)}
        for number in (1, 2):
            forget_pages(machine.file(number))
        with clock.hurrying(), calls_that_hang(reader.native_id):
            monkeypatch.setattr("s3ec.connector.loads.PATIENCE_S", _PATIENCE_S)
            machine.load({1: granted[1]})
            assert counters.get("load.hung") - hung == counters.get("load.rescued") - rescued == 1
            eventually(lambda: machine.node.loop.watch.hangs)  # the read began after the wait
            monkeypatch.setattr("s3ec.connector.loads.PATIENCE_S", 600.0)
            machine.load({2: granted[2], 3: granted[3]})  # the pages of 3 are in memory
            assert counters.get("load.hung") - hung == counters.get("load.rescued") - rescued == 2
        eventually(lambda: not machine.node.loop.watch.hangs)
        assert machine.serve(*range(4)) == set(range(4))
        assert counters.get("load.hung") == hung + 2
        machine.assert_in_order()


def test_load_is_rescued_though_a_look_for_another_entry_hangs(
    disk: FailingDisk, clock: WatchClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    with one_reader(disk, monkeypatch, 0, 1) as (machine, _):
        counters = machine.node.counters
        rescued = counters.get("load.rescued")
        granted = {1: machine.grant(1)[1]}
        forget_pages(machine.file(1))
        # All threads that the node has by now: its loop's, the disk's, the reader.
        threads = [one.native_id for one in threads_named("s3ec")]
        with clock.hurrying(), calls_that_hang(*threads, calls="preadv,preadv2,%file"):
            machine.node.prefetcher.submit([FetchRequest(key_at(3), "image", ROWS)])
            eventually(lambda: machine.node.loop.watch.hangs)
            machine.load(granted)
            assert counters.get("load.rescued") == rescued + 1
        eventually(lambda: machine.node.prefetcher.has_news)
        machine.node.prefetcher.drain()
        assert machine.serve(*range(4)) == set(range(4))
        machine.assert_in_order()
