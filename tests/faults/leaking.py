# SPDX-License-Identifier: Apache-2.0
"""Child of living.py that counts what it holds after fetches that end in all ways."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tests.faults.holding import ROWS, Holder, eventually, say
from tests.faults.saving import key_at

if TYPE_CHECKING:
    from s3ec.node import Node
    from s3ec.prefetch import FetchResult

_DEADLINE_S = 60.0


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


def _fetch_by_many(engine: Holder, number: int) -> None:
    """Eight threads want one entry eight times each."""
    from s3ec.prefetch import FetchOutcome, FetchRequest

    prefetcher = engine.node.prefetcher
    wants = [FetchRequest(key_at(number), "image", ROWS)] * 8
    threads = [threading.Thread(target=prefetcher.submit, args=(wants,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # Who submits after the first one was answered gets an answer, and a pin, of its own.
    done: list[FetchResult] = []

    def all_answered() -> bool:
        done.extend(prefetcher.drain())
        return bool(done) and not prefetcher._places and not prefetcher.has_news

    engine.node.loop.run(_turn(), _DEADLINE_S)  # behind the last of what was submitted
    eventually(all_answered, "the end of its fetches")
    for one in done:
        if one.outcome is not FetchOutcome.READY or one.pin is None:
            say(f"bad outcome {one.outcome.value}")
            return
        if one.pin.path.read_bytes() != engine.body_at(number):
            say(f"bad bytes {number}")
    prefetcher.release([one.pin for one in done if one.pin])


async def _turn() -> None:
    """One turn of the loop."""


def _abort(node: Node, number: int) -> None:
    """A fetch that nobody waits for any more ends by its deadline."""
    from s3ec.prefetch import FetchOutcome, FetchRequest

    prefetcher, limits = node.prefetcher, node.prefetcher._limits
    prefetcher._limits = replace(limits, deadline_s=1.0)
    prefetcher.submit([FetchRequest(key_at(number), "image", ROWS)])
    prefetcher.demote([key_at(number)])
    eventually(lambda: prefetcher.has_news, "its end")
    prefetcher._limits = limits
    (late,) = prefetcher.drain()
    if late.outcome is not FetchOutcome.UNAVAILABLE or node.tier.claims.is_taken(
        late.want.key.digest
    ):
        say(f"bad end {late.outcome.value}")


def _end_early(node: Node, settings: dict[str, str], number: int) -> None:
    """One more engine of this process ends while it fetches and saves."""
    from s3ec.prefetch import FetchRequest

    other = Holder(settings)
    other.node.prefetcher.submit([FetchRequest(key_at(number), "image", ROWS)])
    other.save(2000 + number)
    eventually(lambda: node.tier.claims.is_taken(key_at(number).digest), "its claim")
    other.queue.drain(0)
    other.node.close(10)
    eventually(lambda: not node.tier.claims.is_taken(key_at(number).digest), "the end of its claim")
    other.complain()


def leaks(*, settings: dict[str, str], rounds: int, stalled: int) -> None:
    """Want, abort, and end in the middle, again and again; compare what is held in the end.

    Args:
        stalled: The bucket never answers for numbers from here on.
    """
    engine = Holder(settings)
    node = engine.node

    def held() -> dict[str, int]:
        return {**_open_files(settings), "tasks": _tasks(node)}

    before: dict[str, int] = {}
    for number in range(rounds):
        _fetch_by_many(engine, number)
        _abort(node, stalled + number)
        _end_early(node, settings, stalled + 100 + number)
        if number == 1:  # connections and threads of the pools are there
            before = held()

    def is_back() -> bool:
        now = held()
        return all(now[name] <= before[name] for name in now)

    try:
        # In time to be heard: the parent waits for a minute.
        eventually(is_back, "the same", deadline_s=30)
    except TimeoutError:
        say(f"bad leak {before} {held()}")
    say(f"unavailable {node.counters.get('fetch.unavailable'):g}")
    engine.complain()
    left = engine.queue.drain(30)
    node.close(5)
    say(f"left {left}")


COMMANDS = {"leaks": leaks}
