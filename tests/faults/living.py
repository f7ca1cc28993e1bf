# SPDX-License-Identifier: Apache-2.0
"""Processes of one node that fetch and save, to be killed: one is forked per line of JSON read.

This process imports torch and the SDK once, which takes seconds, and starts no thread, so a child
begins within milliseconds. A child's own line is ``PID WORD ...``; what starts with ``PID bad`` is
something that must not happen.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import os
import random
import signal
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from s3ec.errors import TierError
from tests.faults import ending, holding, indexing, leaking
from tests.faults.saving import NAMESPACE, WIDTH, data_at, identifier_at, key_at, spooled_below
from tests.faults.seccomp import refuse_hard_links
from tests.on_disk import evict

if TYPE_CHECKING:
    from s3ec.connector.saves import SaveQueue
    from s3ec.node import Node
    from s3ec.prefetch import FetchResult

# 64 KiB each: large enough to be killed in the middle of one.
ROWS = 256
_FETCH_DEADLINE_S = 60.0
_PR_SET_PDEATHSIG = 1


def say(line: str) -> None:
    os.write(1, f"{os.getpid()} {line}\n".encode())


def object_at(number: int) -> list[bytes]:
    """The pieces of the one object that may ever stand under this number's name."""
    from s3ec import codec

    header = codec.Header(
        identifier=identifier_at(number),
        namespace=NAMESPACE.name,
        modality="image",
        shape=codec.Shape(ROWS, WIDTH, "bfloat16"),
        checksum=codec.checksum(data_at(number, ROWS)),
    )
    return [codec.encode_header(header), data_at(number, ROWS)]


class Life:
    """One child: a node with its save queue, at work on a moving part of the corpus."""

    def __init__(self, settings: dict[str, str], seed: int) -> None:
        from s3ec.connector.saves import SaveQueue
        from s3ec.node import Node
        from s3ec.settings import Settings

        self.chance = random.Random(seed)
        self.node: Node = Node(Settings.model_validate(settings), NAMESPACE)
        self.queue: SaveQueue = SaveQueue(self.node, budget_bytes=2**22, overflow="drop")
        self.held: list[tuple[int, FetchResult]] = []

    def fetch(self, numbers: list[int], *, must: bool) -> None:
        """Fetch, compare every byte, and keep some pins for later."""
        from s3ec.prefetch import FetchOutcome, FetchRequest

        prefetcher = self.node.prefetcher
        wanted = {key_at(number).digest: number for number in numbers}
        prefetcher.submit([FetchRequest(key_at(number), "image", ROWS) for number in numbers])
        deadline = time.monotonic() + _FETCH_DEADLINE_S
        while wanted:
            if time.monotonic() > deadline:
                say(f"bad stuck {sorted(wanted.values())}")
                return
            for one in prefetcher.drain():
                number = wanted.pop(one.want.key.digest)
                if one.outcome is FetchOutcome.READY:
                    self.held.append((number, one))
                    self.compare(number, one)
                elif must or one.outcome is not FetchOutcome.ABSENT:
                    say(f"bad outcome {number} {one.outcome.value}")
            time.sleep(0.001)
        self.chance.shuffle(self.held)
        while len(self.held) > 8:
            number, one = self.held.pop()
            self.compare(number, one)  # eviction has done nothing to it
            assert one.pin is not None
            prefetcher.release([one.pin])

    def compare(self, number: int, one: FetchResult) -> None:
        if one.pin is None or one.pin.path.read_bytes() != b"".join(object_at(number)):
            say(f"bad bytes {number} {one.source}")

    def save(self, number: int) -> None:
        """What a worker does after an encode, which the scheduler orders for what nobody holds."""
        import torch

        from s3ec.connector.messages import Save

        key = key_at(number)
        if self.node.tier.entries.contains(key) or self.node.index.maybe_contains(key):
            return
        tensor = torch.frombuffer(bytearray(data_at(number, ROWS)), dtype=torch.bfloat16)
        self.queue.put(identifier_at(number), Save("image", {}), tensor.view(ROWS, WIDTH))

    def complain(self) -> None:
        if self.node.counters.get("internal_errors"):
            say(f"bad internal errors {self.node.counters.snapshot()}")


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
            life.save(first + life.chance.randrange(12))
        life.fetch(life.chance.sample(range(stock), 4), must=True)
        life.fetch([first + life.chance.randrange(12)], must=False)
        life.complain()
        time.sleep(life.chance.random() * 0.06)  # leave some of the machine to the others


def finish(*, settings: dict[str, str]) -> None:
    """See what everybody left into the bucket."""
    life = Life(settings, 0)
    while spooled_below(Path(settings["cache_dir"])):
        time.sleep(0.01)
    left = life.queue.drain(30)
    life.complain()
    life.node.close(5)
    say(f"left {left}")


def want(*, settings: dict[str, str], numbers: list[int], patience_s: float) -> None:
    """Want some entries, all at once, and say where each came from, or how it ended.

    Args:
        patience_s: How long to wait for another process that fetches the same.
    """
    from functools import partial

    import s3ec.node
    from s3ec.prefetch import FetchOutcome, FetchRequest, Limits

    s3ec.node.Limits = partial(Limits, claim_patience_s=patience_s)  # type: ignore[misc,assignment]
    life = Life(settings, 0)
    loop, prefetcher = life.node.loop, life.node.prefetcher
    loop.run(life.node.records.get("image"), _FETCH_DEADLINE_S)  # the client is ready from here on
    prefetcher.submit([FetchRequest(key_at(number), "image", ROWS) for number in numbers])

    async def turns() -> None:
        for _ in range(20):
            await asyncio.gather(*(loop.disk(int) for _ in range(8)))

    loop.run(turns(), _FETCH_DEADLINE_S)
    say("asked")  # whoever would ask the bucket has done so, or is about to
    by_digest = {key_at(number).digest: number for number in numbers}
    while by_digest:
        for one in prefetcher.drain():
            number = by_digest.pop(one.want.key.digest)
            if one.outcome is FetchOutcome.READY:
                life.compare(number, one)
            say(f"got {number} {one.source or one.outcome.value}")
        time.sleep(0.001)
    life.complain()
    life.node.close(5)
    say("done")


def work(*, settings: dict[str, str], stock: int, first: int, **how: int | bool) -> None:
    """Fetch, save and evict a little; when the spool is empty, end in order.

    Args:
        how: ``umask``, ``uid``, ``linkless``: what is special about this process.
    """
    os.umask(how.get("umask", 0o022))
    if "uid" in how:
        os.setgid(how["uid"])
        os.setuid(how["uid"])
    if how.get("linkless") and not refuse_hard_links():
        say("unable")
        return
    try:
        life = Life(settings, first)
    except TierError as exc:
        say(f"refused {exc}")
        return
    say("up")
    for round_ in range(4):
        numbers = range(first + round_ * 6, first + round_ * 6 + 6)
        for number in numbers:
            life.save(number)
        life.fetch(life.chance.sample(range(stock), 6), must=True)
        for number in life.chance.sample(range(stock), 3):
            evict(life.node.tier, key_at(number))
    say("worked")
    spool = Path(settings["cache_dir"])
    while spooled_below(spool):
        time.sleep(0.01)
    counters = life.node.counters
    say(f"copies {counters.get('tier.pin_copies'):g} {counters.get('tier.spool_copies'):g}")
    life.complain()
    life.queue.drain(30)
    life.node.close(5)
    say("done")


def fork(*, settings: dict[str, str], stock: int, first: int) -> None:
    """Fork a child while loop, connections, saves and pins are at work; both go on."""
    life = Life(settings, first)
    life.fetch(list(range(stock // 2)), must=True)
    for number in range(first, first + 6):
        life.save(number)
    say("saved")
    while len(spooled_below(Path(settings["cache_dir"]))) < 6:
        time.sleep(0.001)
    sockets = open_sockets()
    pid = os.fork()
    if pid == 0:
        try:
            say(f"shared {len(sockets & open_sockets())} of {len(sockets)}")
            own = Life(settings, first)
            own.fetch(list(range(stock // 2, stock)), must=True)
            own.complain()
            say(f"left {own.queue.drain(30)}")
            own.node.close(5)
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
    life.fetch(list(range(stock)), must=True)
    say("went on")
    while spooled_below(Path(settings["cache_dir"])):
        time.sleep(0.01)
    life.complain()
    say(f"left {life.queue.drain(30)}")
    life.node.close(5)
    say("done")


def open_sockets() -> set[str]:
    """Of this process, by their inodes."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            found.add(os.readlink(f"/proc/self/fd/{name}"))
    return {name for name in found if name.startswith("socket:")}


COMMANDS = {
    **{function.__name__: function for function in (live, finish, want, work, fork)},
    **ending.COMMANDS,
    **holding.COMMANDS,
    **indexing.COMMANDS,
    **leaking.COMMANDS,
}


def main() -> None:
    import torch

    import s3ec.connector.saves
    import s3ec.store.aioboto3_s3  # noqa: F401

    torch.set_num_threads(1)
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
