# SPDX-License-Identifier: Apache-2.0
"""What processes do to an index while others do the same: commands of living.py's children."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from s3ec.errors import S3ECError
from s3ec.identity import Layout
from tests.faults.saving import NAMESPACE, key_at

if TYPE_CHECKING:
    from s3ec.index.announce import Announcer
    from s3ec.node import Node

LAYOUT = Layout(NAMESPACE.name)
_TIMEOUT_S = 60.0


def say(line: str) -> None:
    os.write(1, f"{os.getpid()} {line}\n".encode())


def _node(settings: dict[str, str]) -> Node:
    from s3ec.node import Node
    from s3ec.settings import Settings

    return Node(Settings.model_validate(settings), NAMESPACE)


def tell(*, settings: dict[str, str], first: int, count: int) -> None:
    """Store some entries and announce them a few at a time; delete each fifth again."""
    from s3ec.index.announce import Announcer
    from s3ec.index.delete import delete_entries, find_objects

    node = _node(settings)

    async def work() -> None:
        announcer = Announcer(node.store, LAYOUT, node.counters, batch_s=0.01)
        for start in range(first, first + count, 5):
            await _store(node, announcer, range(start, start + 5))
            found = await find_objects(node.store, LAYOUT, [key_at(start)])
            await delete_entries(node.store, LAYOUT, found)
        announcer.close()

    node.loop.run(work(), _TIMEOUT_S)
    node.close(5)
    say("told")


async def _store(node: Node, announcer: Announcer, numbers: range) -> None:
    from tests.faults.indexed import facts_of
    from tests.faults.living import object_at

    for number in numbers:
        await node.store.put_if_absent(LAYOUT.object(key_at(number)), object_at(number))
        announcer.add(key_at(number), facts_of(number, 0), lambda _: None)
    await announcer.flush()


def squeeze(*, settings: dict[str, str], grace_s: float, stop: str = "") -> None:
    """Compact; over and over until a file appears, where one is named."""
    from s3ec.index.base_writer import BuildOptions
    from s3ec.index.compaction import compact

    node = _node(settings)
    say("up")
    while True:
        over = not stop or Path(stop).exists()
        try:
            coroutine = compact(node.store, LAYOUT, BuildOptions(grace_s=grace_s))
            made = node.loop.run(coroutine, _TIMEOUT_S)
            if made is None:
                say("beaten")
            elif made.merged:
                say(f"made {made.head.version} {made.head.run}")
            if made is not None and made.corrupt:
                say(f"bad deltas {dict(made.corrupt)}")
        except S3ECError as exc:
            say(f"gave up: {exc}")
        if over:
            break
        time.sleep(0.01)
    node.close(5)
    say("done")


def keep(*, settings: dict[str, str], numbers: list[int]) -> None:
    """Save some entries as a worker does, and end once the spool is empty."""
    from tests.faults.living import Life

    life = Life(settings, 0)
    for number in numbers:
        life.save(number)
    left = life.queue.drain(_TIMEOUT_S)
    life.complain()
    life.node.close(5)
    say(f"left {left}")


COMMANDS = {function.__name__: function for function in (tell, squeeze, keep)}
