# SPDX-License-Identifier: Apache-2.0
"""Waiting for what other threads and processes do."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from s3ec.testing.fault_store import Gate

# Only what hangs takes so long, however busy the machine is; some wait for a whole program.
DEADLINE_S = 300.0


def eventually(
    condition: Callable[[], bool],
    what: str = "it did not happen",
    *,
    deadline_s: float = DEADLINE_S,
    pause_s: float = 0.005,
) -> None:
    """Poll until a condition holds; fail, saying what was awaited, after a generous deadline."""
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, f"after {deadline_s:.0f} s: {what}"
        time.sleep(pause_s)


def stop(pid: int) -> None:
    """Stop a process, and return once all of its threads have stopped.

    Each thread runs until it is interrupted, which a busy machine does late: a server that was sent
    SIGSTOP alone may still answer.
    """
    os.kill(pid, signal.SIGSTOP)
    eventually(lambda: _thread_states(pid) == {"T"}, f"process {pid} stops")


def _thread_states(pid: int) -> set[str]:
    states = set()
    for task in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            states.add(task.read_text().rpartition(")")[2].split()[0])
    return states


async def until(condition: Callable[[], object]) -> None:
    """Poll in a coroutine, for what no event of its loop tells of."""
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def reached(gate: Gate) -> None:
    """Return once an operation waits at the gate."""
    assert await asyncio.to_thread(gate.reached.wait, DEADLINE_S)
