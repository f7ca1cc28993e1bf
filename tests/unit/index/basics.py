# SPDX-License-Identifier: Apache-2.0
"""A namespace, keys, and waiting, for tests of the index."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable

from s3ec.identity import Key, Layout, make_key
from s3ec.testing.fault_store import Gate

NAMESPACE = "gemma-0123456789abcdef"
LAYOUT = Layout(NAMESPACE)


def key_of(text: object) -> Key:
    key = make_key(hashlib.sha256(str(text).encode()).hexdigest())
    assert key is not None
    return key


async def reached(gate: Gate) -> None:
    """Wait until somebody waits at the gate."""
    assert await asyncio.to_thread(gate.reached.wait, 20)


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what comes about in other tasks and threads."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)
