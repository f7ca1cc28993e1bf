# SPDX-License-Identifier: Apache-2.0
"""What may pass where nothing of ours may leave: at the top of a hook, a task, a thread.

A panic of Rust code is a BaseException (PyO3's PanicException), so ``except Exception`` would let
it into the engine, or end a task that nobody looks after.
"""

from __future__ import annotations

import asyncio

SIGNALS = (KeyboardInterrupt, SystemExit)
"""What signal handlers raise, Python's and vLLM's, between any two lines of the main thread."""


def ends_task(exc: BaseException) -> bool:
    """Whether an exception at the top of a task ends it on purpose, and must go on its way.

    A task may also meet the cancellation of something it waits for, which is a fault like others.
    """
    if isinstance(exc, asyncio.CancelledError):
        task = asyncio.current_task()
        return task is None or task.cancelling() > 0
    return isinstance(exc, (GeneratorExit, *SIGNALS))
