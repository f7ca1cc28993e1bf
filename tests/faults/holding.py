# SPDX-License-Identifier: Apache-2.0
"""Children of living.py that run out of descriptors, or count what they hold."""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tests.faults.saving import NAMESPACE, WIDTH, data_at, identifier_at, key_at, spooled_below

if TYPE_CHECKING:
    from s3ec.connector.saves import SaveQueue
    from s3ec.node import Node
    from s3ec.prefetch import Fetched

ROWS = 256
_DEADLINE_S = 60.0


def say(line: str) -> None:
    os.write(1, f"{os.getpid()} {line}\n".encode())


def _eventually(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + _DEADLINE_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(what)
        time.sleep(0.002)


class _Engine:
    def __init__(self, settings: dict[str, str]) -> None:
        from s3ec.connector.saves import SaveQueue
        from s3ec.node import Node
        from s3ec.settings import Settings

        self.node: Node = Node(Settings.model_validate(settings), NAMESPACE)
        self.queue: SaveQueue = SaveQueue(self.node, budget_bytes=2**22, overflow="drop")
        self.saved: set[str] = set()

    def save(self, *numbers: int) -> None:
        import torch

        from s3ec.connector.plan import Save

        for number in numbers:
            tensor = torch.frombuffer(bytearray(data_at(number, ROWS)), dtype=torch.bfloat16)
            identifier = identifier_at(number)
            if not self.queue.put(identifier, Save("image", {}), tensor.view(ROWS, WIDTH)):
                say(f"bad not taken {number}")

    def fetch(self, *numbers: int) -> dict[int, Fetched]:
        """Fetch and compare; the pins are the caller's."""
        from s3ec.prefetch import Outcome, Want
        from tests.faults.living import object_at

        wanted = {key_at(number).digest: number for number in numbers}
        self.node.prefetcher.submit([Want(key_at(n), "image", ROWS) for n in numbers])
        found: dict[int, Fetched] = {}

        def have_all() -> bool:
            found.update({wanted[f.want.key.digest]: f for f in self.node.prefetcher.drain()})
            return len(found) == len(numbers)

        _eventually(have_all, "fetches")
        for number, one in found.items():
            if one.outcome is Outcome.READY and one.pin is not None:
                with _descriptors(None):
                    if one.pin.path.read_bytes() != b"".join(object_at(number)):
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
    engine = _Engine(settings)
    engine.node.follow_the_bucket()
    _eventually(lambda: engine.node.index.loaded, "index")
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

    _eventually(all_ready, "recovery")
    expected = {identifier_at(n) for n in range(1000, saves)}
    _eventually(lambda: engine.take_stored() == expected, "uploads")
    _eventually(lambda: not spooled_below(Path(settings["cache_dir"])), "announcements")
    engine.complain()
    snapshot = engine.node.counters.snapshot()
    say(f"refused {snapshot.get('tier.errors', 0) + snapshot.get('spool.refused', 0):g}")
    left_over = engine.queue.drain(30)
    engine.node.close(5)
    say(f"left {left_over}")


def _open_files(settings: dict[str, str]) -> dict[str, int]:
    """What this process holds, and what lies in the tier for nobody."""
    gc.collect()
    below = Path(settings["cache_dir"]) / "v1"
    temps = list(os.scandir(below / "incoming"))
    pins = [name for _, _, names in os.walk(below / "pins") for name in names if "lock" not in name]
    return {
        "fds": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "temps": len(temps),
        "pins": len(pins),
    }


def _tasks(node: Node) -> int:
    async def count() -> int:
        return len(asyncio.all_tasks())

    return node.loop.run(count(), _DEADLINE_S)


def leaks(*, settings: dict[str, str], rounds: int, stalled: int) -> None:
    """Want, abort, and end in the middle, again and again; compare what is held in the end.

    Args:
        stalled: The bucket never answers for numbers from here on.
    """
    from functools import partial

    import s3ec.node
    from s3ec.prefetch import Limits, Outcome, Want

    s3ec.node.Limits = partial(Limits, deadline_s=1.0)  # type: ignore[misc,assignment]
    engine = _Engine(settings)
    s3ec.node.Limits = Limits  # type: ignore[misc]
    node = engine.node
    counters = node.counters
    before: dict[str, int] = {}

    def held() -> dict[str, int]:
        return {**_open_files(settings), "tasks": _tasks(node)}

    def end_early(number: int) -> None:
        """One more engine of this process ends while it fetches and saves."""
        other = _Engine(settings)
        other.node.prefetcher.submit([Want(key_at(number), "image", ROWS)])
        other.save(2000 + number)
        _eventually(lambda: node.tier.is_claimed(key_at(number)), "its claim")
        other.queue.drain(0)
        other.node.close(10)
        _eventually(lambda: not node.tier.is_claimed(key_at(number)), "the end of its claim")
        if other.node.counters.get("internal_errors"):
            say(f"bad internal errors {other.node.counters.snapshot()}")

    for round_ in range(rounds):
        wants = [Want(key_at(round_), "image", ROWS)] * 64
        threads = [
            threading.Thread(target=node.prefetcher.submit, args=(wants[i::8],)) for i in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        found = engine.fetch(round_)[round_]
        if found.outcome is not Outcome.READY or found.pin is None:
            say(f"bad outcome {found.outcome.value}")
            return
        node.prefetcher.release([found.pin])
        # A request that is aborted: nobody waits any more, and the fetch ends by its deadline.
        node.prefetcher.submit([Want(key_at(stalled + round_), "image", ROWS)])
        node.prefetcher.forget([key_at(stalled + round_)])
        _eventually(lambda: node.prefetcher.has_news, "its end")
        (late,) = node.prefetcher.drain()
        if late.outcome is not Outcome.UNAVAILABLE or node.tier.is_claimed(late.want.key):
            say(f"bad end {late.outcome.value}")
        end_early(stalled + 100 + round_)
        if round_ == 1:  # connections and threads of the pools are there
            before = held()

    def is_back() -> bool:
        now = held()
        return all(now[name] <= before[name] for name in now)

    try:
        _eventually(is_back, "the same")
    except TimeoutError:
        say(f"bad leak {before} {held()}")
    say(f"unavailable {counters.get('fetch.unavailable'):g}")
    engine.complain()
    left = engine.queue.drain(30)
    node.close(5)
    say(f"left {left}")


def one(*, settings: dict[str, str], number: int) -> None:
    """Save one embedding at the same moment as others do, and say what the bucket made of it."""
    import signal

    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    engine = _Engine(settings)
    say("up")
    signal.sigwait({signal.SIGUSR1})
    engine.save(number)
    left = engine.queue.drain(_DEADLINE_S)
    counters = engine.node.counters
    engine.complain()
    engine.node.close(5)
    say(f"end {counters.get('save.items'):g} {counters.get('save.existed'):g} {left}")


COMMANDS = {function.__name__: function for function in (starved, leaks, one)}
