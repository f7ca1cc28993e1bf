# SPDX-License-Identifier: Apache-2.0
"""Children of living.py that run out of descriptors, or save what others save as well."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tests.faults.saving import NAMESPACE, WIDTH, data_at, identifier_at, key_at, spooled_below

if TYPE_CHECKING:
    from s3ec.connector.saves import SaveQueue
    from s3ec.node import Node
    from s3ec.prefetch import FetchResult

ROWS = 256
_DEADLINE_S = 60.0


def say(line: str) -> None:
    os.write(1, f"{os.getpid()} {line}\n".encode())


def eventually(
    condition: Callable[[], bool], what: str, *, deadline_s: float = _DEADLINE_S
) -> None:
    deadline = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(what)
        time.sleep(0.002)


class Holder:
    def __init__(self, settings: dict[str, str]) -> None:
        from s3ec.connector.saves import SaveQueue
        from s3ec.node import Node
        from s3ec.settings import Settings

        # Here: an import needs descriptors, of which there may be none later.
        from tests.faults.living import object_at

        self.body_at = lambda number: b"".join(object_at(number))
        self.node: Node = Node(Settings.model_validate(settings), NAMESPACE)
        self.queue: SaveQueue = SaveQueue(self.node, budget_bytes=2**22, overflow="drop")
        self.saved: set[str] = set()

    def save(self, *numbers: int) -> None:
        import torch

        from s3ec.connector.messages import Save

        for number in numbers:
            tensor = torch.frombuffer(bytearray(data_at(number, ROWS)), dtype=torch.bfloat16)
            identifier = identifier_at(number)
            if not self.queue.put(identifier, Save("image", {}), tensor.view(ROWS, WIDTH)):
                say(f"bad not taken {number}")

    def fetch(self, *numbers: int) -> dict[int, FetchResult]:
        """Fetch and compare; the pins are the caller's."""
        from s3ec.prefetch import FetchOutcome, FetchRequest

        wanted = {key_at(number).digest: number for number in numbers}
        self.node.prefetcher.submit([FetchRequest(key_at(n), "image", ROWS) for n in numbers])
        found: dict[int, FetchResult] = {}

        def have_all() -> bool:
            found.update({wanted[f.want.key.digest]: f for f in self.node.prefetcher.drain()})
            return len(found) == len(numbers)

        eventually(have_all, "fetches")
        for number, one in found.items():
            if one.outcome is FetchOutcome.READY and one.pin is not None:
                with _descriptors(None):
                    if one.pin.path.read_bytes() != self.body_at(number):
                        say(f"bad bytes {number}")
        return found

    def take_stored(self) -> set[str]:
        self.saved.update(self.queue.take_report()[1])
        return self.saved

    def complain(self) -> None:
        if self.node.counters.get("internal_errors"):
            say(f"bad internal errors {self.node.counters.snapshot()}")


@contextmanager
def _descriptors(left: int | None) -> Iterator[None]:
    """Inside, so many more than are open can be opened; None: as many as one likes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    fd = -1
    if left is None:
        limit = hard
    else:
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
        if left is not None:
            for fd in filler:
                os.close(fd)


def starved(*, settings: dict[str, str], stock: int) -> None:
    """Fetch and save with 0, 1, 2... descriptors to spare, and with enough in between."""
    engine = Holder(settings)
    engine.node.follow_the_bucket()
    eventually(lambda: engine.node.index.loaded, "index")
    missed = served = 0
    number = 0
    saves = 1000
    for left in (0, 1, 2, 3, 5, 8):
        with _descriptors(left):
            for _ in range(2):
                engine.save(saves, saves + 1)
                saves += 2
                found = engine.fetch(*range(number, number + 8))
                ready = [one for one in found.values() if one.pin is not None]
                served += len(ready)
                missed += len(found) - len(ready)
                engine.node.prefetcher.release([one.pin for one in ready if one.pin])
                number = (number + 8) % stock
        engine.complain()
    say(f"missed {missed}")
    say(f"served {served}")

    def all_ready() -> bool:
        found = engine.fetch(*range(stock))
        ready = [one.pin for one in found.values() if one.pin is not None]
        engine.node.prefetcher.release(ready)
        return len(ready) == stock

    eventually(all_ready, "recovery")
    expected = {identifier_at(n) for n in range(1000, saves)}
    eventually(lambda: engine.take_stored() == expected, "uploads")
    eventually(lambda: not spooled_below(Path(settings["cache_dir"])), "announcements")
    engine.complain()
    snapshot = engine.node.counters.snapshot()
    say(f"refused {snapshot.get('tier.errors', 0) + snapshot.get('spool.refused', 0):g}")
    left_over = engine.queue.drain(30)
    engine.node.close(5)
    say(f"left {left_over}")


def one(*, settings: dict[str, str], number: int) -> None:
    """Save one embedding at the same moment as others do, and say what the bucket made of it."""
    import signal

    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    engine = Holder(settings)
    say("up")
    signal.sigwait({signal.SIGUSR1})
    engine.save(number)
    left = engine.queue.drain(_DEADLINE_S)
    counters = engine.node.counters
    engine.complain()
    engine.node.close(5)
    say(f"end {counters.get('save.items'):g} {counters.get('save.existed'):g} {left}")


COMMANDS = {function.__name__: function for function in (starved, one)}
