# SPDX-License-Identifier: Apache-2.0
"""Processes of one node at work, to be killed: one is forked per line of JSON that comes in.

This process imports torch and the SDK once, which takes seconds, and starts no thread, so a child
begins within milliseconds. A child's own line is ``PID WORD ...``. What starts with ``PID bad`` is
something that must not happen: an assertion failed, or an error of ours was counted.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import logging
import os
import random
import re
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import s3ec.node
import s3ec.runtime
from s3ec.errors import S3ECError
from s3ec.index import maker
from s3ec.index.delete import delete_chosen
from s3ec.index.deltas import Announcer
from s3ec.index.local import NodeFolder
from s3ec.node import Node
from s3ec.prefetch import FetchOutcome, FetchRequest, FetchResult, Limits, Priority
from tests.faults.embeddings import (
    LAYOUT,
    NAMESPACE,
    ROWS,
    body_at,
    identifier_at,
    key_at,
)
from tests.faults.engine import Engine
from tests.faults.indexed import unions_at_once
from tests.support.indexes import all_announced
from tests.support.waiting import DEADLINE_S, eventually

_PR_SET_PDEATHSIG = 1
_PACKAGE = os.path.dirname(s3ec.node.__file__)
# The name of a thread that is not the first of its pool.
_LATER_OF_POOL = re.compile(r"_[1-9]\d*$")


def say(line: str) -> None:
    os.write(1, f"{os.getpid()} {line}\n".encode())


def wait_until_saved(engine: Engine) -> None:
    """Until all of them came into the spool, or past a disk that refuses into the bucket."""
    eventually(lambda: engine.queue.levels()["level.save_queue_entries"] == 0, "saves")


class Life(Engine):
    """A child's engine, at work on a moving part of the corpus, with some files kept open."""

    def __init__(self, settings: dict[str, str], seed: int = 0) -> None:
        super().__init__(settings, saves=True, overflow="drop")
        self.chance = random.Random(seed)
        self.held: list[tuple[int, FetchResult]] = []

    def use(self, *numbers: int, may_miss: bool = False) -> None:
        """Fetch, and keep some open for later."""
        for number, one in self.grant(*numbers).items():
            if one.outcome is FetchOutcome.READY:
                self.held.append((number, one))
            else:
                allowed = {FetchOutcome.ABSENT} if may_miss else set()
                assert one.outcome in allowed, number
        self.chance.shuffle(self.held)
        while len(self.held) > 8:
            number, one = self.held.pop()
            self.compare(number, one)

    def save_unless_known(self, number: int) -> None:
        """What a worker does after an encode, which the scheduler orders for what nobody holds."""
        key = key_at(number)
        if not (self.node.tier.entries.contains(key) or self.node.index.maybe_contains(key)):
            self.offer(number)

    def finish(self) -> None:
        """See all that is spooled into the bucket, and end."""
        self.announce()
        say(f"left {self.close(DEADLINE_S)}")


# -- at work, to be killed or to end in order ------------------------------------------------------


def live(*, settings: dict[str, str], seed: int, stock: int, first: int) -> None:
    """Fetch and save at random until killed.

    Args:
        stock: Numbers below it are in the bucket from the start.
        first: Begins the part of the corpus that this child and its neighbours save.
    """
    life = Life(settings, seed)
    life.node.follow_the_bucket()
    say("up")
    while True:
        for _ in range(life.chance.randrange(6)):
            life.save_unless_known(first + life.chance.randrange(12))
        life.use(*life.chance.sample(range(stock), 4))
        life.use(first + life.chance.randrange(12), may_miss=True)
        assert not life.count("internal_errors")
        time.sleep(life.chance.random() * 0.06)  # leave some of the machine to the others


def finish(*, settings: dict[str, str]) -> None:
    """See what everybody left into the bucket."""
    Life(settings).finish()


def save(
    *, settings: dict[str, str], overflow: Literal["block", "drop"], count: int, finish: bool
) -> None:
    """Save what the tier does not hold; then wait to be killed, or see it into the bucket.

    One that drops may not be let save all, where the disk is slower than it is.
    """
    engine = Engine(settings, saves=True, overflow=overflow)
    for number in range(count):
        if not engine.node.tier.entries.contains(key_at(number)) and engine.offer(number):
            say(f"put {number}")
    say("all")
    while not finish:
        time.sleep(1)
    engine.announce()
    say(f"left {engine.close(DEADLINE_S)}")


def keep(*, settings: dict[str, str], numbers: list[int]) -> None:
    """Save some entries as a worker does, and end once the spool is empty."""
    life = Life(settings)
    for number in numbers:
        life.save_unless_known(number)
    say(f"left {life.close(DEADLINE_S)}")


def one(*, settings: dict[str, str], number: int) -> None:
    """Save one embedding at the same moment as others do, and say what the bucket made of it."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    engine = Life(settings)
    say("up")
    signal.sigwait({signal.SIGUSR1})
    engine.save(number)
    left = engine.close(DEADLINE_S)
    say(f"end {engine.count('save.items'):g} {engine.count('save.existed'):g} {left}")


def want(*, settings: dict[str, str], numbers: list[int], patience_s: float) -> None:
    """Want some entries, all at once, and say where each came from, or how it ended.

    Args:
        patience_s: How long to wait for another process that fetches the same.
    """
    with limits(claim_patience_s=patience_s, deadline_s=DEADLINE_S):
        life = Life(settings)
    loop, prefetcher = life.node.loop, life.node.prefetcher
    loop.run(life.node.records.get("image"), DEADLINE_S)  # the client is ready from here on
    prefetcher.submit([FetchRequest(key_at(number), "image", ROWS) for number in numbers])

    async def turns() -> None:
        for _ in range(20):
            await asyncio.gather(*(loop.disk(int) for _ in range(8)))

    loop.run(turns(), DEADLINE_S)
    say("asked")  # whoever would ask the bucket has done so, or is about to
    by_digest = {key_at(number).digest: number for number in numbers}
    while by_digest:
        for one in prefetcher.drain():
            number = by_digest.pop(one.want.key.digest)
            life.compare(number, one)
            say(f"got {number} {one.source or one.outcome.value}")
        time.sleep(0.001)
    life.close()
    say("done")


@contextmanager
def limits(**changes: float) -> Iterator[None]:
    """Nodes that are made inside have other bounds."""
    s3ec.node.Limits = partial(Limits, **changes)  # type: ignore[misc,assignment]
    try:
        yield
    finally:
        s3ec.node.Limits = Limits  # type: ignore[misc]


def fork(*, settings: dict[str, str], stock: int, first: int) -> None:
    """Fork a child while loop, connections, saves and open files are at work; both go on."""
    life = Life(settings, first)
    life.use(*range(stock // 2))
    for number in range(first, first + 6):
        life.save_unless_known(number)
    say("saved")
    wait_until_saved(life)
    pid = os.fork()
    if pid == 0:
        try:
            own = Life(settings, first)
            own.use(*range(stock // 2, stock))
            say(f"left {own.close(DEADLINE_S)}")
            life.node.close(5)  # is its parent's, and stays as it is
            del life, own
            gc.collect()
            say("child done")
        except BaseException as exc:  # noqa: BLE001 - the top of a process
            say(f"bad child {exc!r}")
            traceback.print_exc()
        sys.exit()
    if os.waitpid(pid, 0)[1]:
        say("bad end of the child")
    life.use(*range(stock))
    say("went on")
    life.finish()
    say("done")


# -- told to end while they save -------------------------------------------------------------------


class _Heard(logging.Handler):
    """Says what is logged as a warning or worse."""

    def emit(self, record: logging.LogRecord) -> None:
        say(f"log {record.getMessage()}")


def terminated(*, settings: dict[str, str], count: int, how: str, timeout_s: float) -> None:
    """Save until SIGTERM comes, end in order, and say what is left.

    Args:
        how: ``raises``: the handler raises SystemExit, as vLLM's does; ``ends``: it ends the
            engine itself.
        timeout_s: What the bucket gets to confirm the rest.
    """
    logging.getLogger("s3ec").addHandler(_Heard(logging.WARNING))
    engine = Engine(settings, shared=True)

    def handle(*_: object) -> None:
        if how == "ends":
            engine.close(timeout_s, close_s=5)
        raise SystemExit(0)

    signal.signal(signal.SIGTERM, handle)
    try:
        engine.save(*range(count))
        wait_until_saved(engine)
        say("saved")
        while True:
            time.sleep(0.001)
    except SystemExit:
        left = engine.close(timeout_s, close_s=5)
        engine.close(timeout_s, close_s=5)
    say(f"counted {engine.count('spool.left'):g}")
    say(f"left {left}")


class Interrupt:
    """Raises SIGUSR1 at the nth line of s3ec that this thread runs in the block.

    Attributes:
        line: Which one; empty where there were fewer.
    """

    def __init__(self, nth: int) -> None:
        self._left = nth
        self.line = ""

    def __enter__(self) -> Interrupt:
        sys.settrace(self._trace)
        return self

    def __exit__(self, *exc_info: object) -> None:
        sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, arg: object) -> Any:
        if not frame.f_code.co_filename.startswith(_PACKAGE):
            return None
        if event == "line":
            self._left -= 1
            if self._left == 0:
                self.line = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
                signal.raise_signal(signal.SIGUSR1)
        return self._trace


def interrupted(*, settings: dict[str, str], every: int) -> None:
    """End an engine from a signal handler, at one line after another of what its thread runs.

    Args:
        every: Only each so many lines is a place, since each takes an engine.
    """

    def save(engine: Engine) -> None:
        engine.offer(1)

    def use(engine: Engine) -> None:
        """Take the locks that a hook may hold: of the shared nodes, the counters and the loop."""
        other = Node.shared(engine.node.settings, engine.node.namespace)
        other.counters.add("trap")
        other.loop.disk_soon(int)
        other.release(0.5)

    def drain(engine: Engine) -> None:
        say(f"again {engine.close(0.05, close_s=0.5)}")

    for what in (save, use, drain):
        places, nth = 0, 1
        while _end_at(nth, settings, what):
            places, nth = places + 1, nth + every
        say(f"at {what.__name__} {places}")
    # The one place where a thread stays for long: put waits for room.
    main = threading.main_thread().ident
    assert main is not None
    timer = threading.Timer(0.1, signal.pthread_kill, (main, signal.SIGUSR1))

    def wait(engine: Engine) -> None:
        timer.start()
        say(f"taken {engine.offer(1)}")

    # In a folder of its own: what the others left would be adopted, and fill it before.
    small = {"cache_dir": settings["cache_dir"] + "-small", "cache_bytes": str(5 * ROWS * 256)}
    _end_at(0, {**settings, **small}, wait)
    say("done")


def _end_at(nth: int, settings: dict[str, str], what: Any) -> bool:
    """Whether there was such a line; the end was asked for twice then."""
    engine = Engine(settings, shared=True, saves=True)
    engine.save(0)
    wait_until_saved(engine)
    ended: list[int] = []

    def handle(*_: object) -> None:
        ended.append(engine.close(0.05, close_s=0.5))

    signal.signal(signal.SIGUSR1, handle)
    with Interrupt(nth) as place:
        what(engine)
    for left in [*ended, engine.close(0.05, close_s=0.5)]:
        assert left >= 1, place.line
    assert engine.count("spool.left") >= 1, place.line
    assert engine.count("internal_errors") == 0, place.line
    return bool(place.line)


# -- out of descriptors, and what is held afterwards -----------------------------------------------


class Starving(Life):
    """What it compares does not count."""

    def compare(self, number: int, one: FetchResult) -> None:
        with descriptors(None):
            super().compare(number, one)


@contextmanager
def descriptors(left: int | None) -> Iterator[None]:
    """Inside, so many more than are open can be opened; None: as many as one likes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    filler: list[int] = []
    limit = hard
    if left is not None:
        fds = {int(name) for name in os.listdir("/proc/self/fd")}
        # The limit is on the number; gaps below the highest one are filled.
        highest = max(fds)
        filler = [os.open(os.devnull, os.O_RDONLY) for _ in range(highest + 1 - len(fds))]
        limit = max(highest, *filler, 0) + 1 + left
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in filler:
            os.close(fd)


def starved(*, settings: dict[str, str], stock: int) -> None:
    """Fetch and save with 0, 1, 2... descriptors to spare, and with enough in between."""
    engine = Starving(settings)
    engine.follow()
    missed = served = number = 0
    saves = 1000
    for left in (0, 1, 2, 3, 5, 8):
        with descriptors(left):
            for _ in range(2):
                engine.save(saves, saves + 1)
                saves += 2
                outcomes = engine.outcomes(*range(number, number + 8))
                served += outcomes.count(FetchOutcome.READY)
                missed += len(outcomes) - outcomes.count(FetchOutcome.READY)
                number = (number + 8) % stock
    say(f"missed {missed}")
    say(f"served {served}")
    eventually(lambda: {*engine.outcomes(*range(stock))} == {FetchOutcome.READY}, "recovery")
    expected, stored = {identifier_at(n) for n in range(1000, saves)}, set[str]()

    def all_stored() -> bool:
        stored.update(engine.queue.take_stored())
        return stored == expected

    eventually(all_stored, "uploads")
    engine.announce()
    say(f"refused {engine.count('tier.errors') + engine.count('spool.refused'):g}")
    say(f"left {engine.close(DEADLINE_S)}")


def leaks(*, settings: dict[str, str], rounds: int, stalled: int) -> None:
    """Want, abort, and end in the middle, again and again; compare what is held in the end.

    Args:
        stalled: The bucket never answers for numbers from here on.
    """
    engine = Life(settings)
    before: dict[str, int] = {}
    unavailable = 0.0
    for number in range(rounds):
        _fetch_by_many(engine, number)
        unavailable += _abort(engine.node, settings, stalled + number)
        _end_early(engine.node, settings, stalled + 100 + number)
        if number == 1:  # connections and threads of the pools are there
            before = _held(engine)

    def is_back() -> bool:
        now = _held(engine)
        return all(now[name] <= before[name] for name in now)

    # In time to be heard: the parent waits for longer.
    eventually(is_back, f"what is held is as before: {before}", deadline_s=DEADLINE_S / 2)
    say(f"unavailable {unavailable:g}")
    say(f"left {engine.close(DEADLINE_S)}")


def _held(engine: Engine) -> dict[str, int]:
    """What this process holds, and what lies in the tier for nobody."""
    gc.collect()
    below = engine.cache_dir / "v1"
    return {
        # Residents are open on purpose, and end with the node.
        "fds": len(os.listdir("/proc/self/fd")) - len(engine.node.residents),
        # A pool counts once: it gets more threads where more was to be done at once.
        "threads": sum(not _LATER_OF_POOL.search(one.name) for one in threading.enumerate()),
        "temps": len(os.listdir(below / "incoming")),
        "tasks": _tasks(engine.node),
    }


def _tasks(node: Node) -> int:
    async def count() -> int:
        return len(asyncio.all_tasks())

    return node.loop.run(count(), DEADLINE_S)


def _fetch_by_many(engine: Engine, number: int) -> None:
    """Eight threads want one entry eight times each."""
    prefetcher, idle = engine.node.prefetcher, _tasks(engine.node)
    wants = [FetchRequest(key_at(number), "image", ROWS)] * 8
    threads = [threading.Thread(target=prefetcher.submit, args=(wants,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # Who submits after the first one was answered gets an answer of its own.
    done: list[FetchResult] = []

    def all_answered() -> bool:
        if _tasks(engine.node) > idle:  # asked in the loop, behind all that was submitted
            return False
        done.extend(prefetcher.drain())
        return bool(done)

    eventually(all_answered, "the end of its fetches")
    for one in done:
        assert one.outcome is FetchOutcome.READY
        engine.compare(number, one)


def _abort(node: Node, settings: dict[str, str], number: int) -> float:
    """A fetch that nobody waits for any more ends by its deadline."""
    with limits(deadline_s=5.0):  # of which the client's start takes some
        other = Engine(settings)
    prefetcher = other.node.prefetcher
    prefetcher.submit([FetchRequest(key_at(number), "image", ROWS)])
    prefetcher.submit([FetchRequest(key_at(number), "image", ROWS, Priority.FORGOTTEN)])
    eventually(lambda: prefetcher.has_news, "its end")
    (late,) = prefetcher.drain()
    assert late.outcome is FetchOutcome.UNAVAILABLE
    digest = late.want.key.digest
    eventually(lambda: not node.tier.claims.is_taken(digest), "the end of its claim")
    other.close()
    return other.count("fetch.unavailable")


def _end_early(node: Node, settings: dict[str, str], number: int) -> None:
    """One more engine of this process ends while it fetches and saves."""
    other, digest = Engine(settings), key_at(number).digest
    other.node.prefetcher.submit([FetchRequest(key_at(number), "image", ROWS)])
    other.save(2000 + number)
    eventually(lambda: node.tier.claims.is_taken(digest), "its claim")
    other.close(0)
    eventually(lambda: not node.tier.claims.is_taken(digest), "the end of its claim")


# -- writers of an index ---------------------------------------------------------------------------


def tell(*, settings: dict[str, str], first: int, count: int) -> None:
    """Store some entries and announce them a few at a time; say which are confirmed."""
    node = Engine(settings).node

    async def work() -> None:
        announcer = Announcer(node.store, LAYOUT, node.counters, pause_s=0.01)
        for start in range(first, first + count, 5):
            for number in range(start, start + 5):
                body = body_at(number)
                await node.store.put_if_absent(LAYOUT.object(key_at(number)), [body])
                announcer.add(key_at(number), len(body), lambda _: None)
            await all_announced(announcer)
            say(f"told {start}")
        announcer.close()

    node.loop.run(work(), DEADLINE_S)
    node.close(5)
    say("done")


def squeeze(
    *,
    settings: dict[str, str],
    kind: Literal["union", "listing", "gc"],
    stop: str = "",
    goes: list[int] | None = None,
) -> None:
    """Make a snapshot; over and over until a file appears, where one is named.

    Args:
        goes: Numbers that ``gc`` deletes.
    """
    node = Engine(settings).node
    folder = NodeFolder.of(node.tier.folders, NAMESPACE.name)
    names = {LAYOUT.object(key_at(number)) for number in goes or ()}
    say("up")
    while True:
        over = not stop or Path(stop).exists()
        with unions_at_once():
            work = {
                "union": lambda: maker.make_union(node.store, LAYOUT, folder),
                "listing": lambda: maker.rebuild(node.store, LAYOUT),
                "gc": lambda: delete_chosen(
                    node.store, LAYOUT, lambda infos: [i for i in infos if i.name in names]
                ),
            }[kind]
            try:
                made = node.loop.run(work(), DEADLINE_S)
                say(f"made {made.name}" if made is not None else "nothing")
            except S3ECError as exc:
                say(f"gave up: {exc}")
        if over:
            break
        time.sleep(0.01)
    node.close(5)
    say("done")


_AT_WORK = (live, finish, save, keep, one, want, fork)
_ENDING = (terminated, interrupted, starved, leaks)
COMMANDS = {function.__name__: function for function in (*_AT_WORK, *_ENDING, tell, squeeze)}


def main() -> None:
    import torch

    import s3ec.connector.loads
    import s3ec.connector.saves
    import s3ec.store.s3

    torch.set_num_threads(1)
    # A slow disk is not a hung one.
    s3ec.runtime.PATIENCE_S = s3ec.connector.loads.PATIENCE_S = DEADLINE_S
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps at once
    say("ready")
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            # Nobody ends a child whose test was broken off.
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            status = 1
            try:
                COMMANDS[order.pop("command")](**order)
                status = 0
            except SystemExit:
                return  # in order, as no other ends
            except BaseException as exc:  # noqa: BLE001 - the top of a process
                say(f"bad end {exc!r}")
                traceback.print_exc()
            os._exit(status)
        say(f"forked {pid}")


if __name__ == "__main__":
    main()
