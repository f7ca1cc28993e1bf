# SPDX-License-Identifier: Apache-2.0
"""Disk calls of a loop whose pool has one thread: the outcome that nobody takes, and errors."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from s3ec.runtime import LoopThread
from tests.support.waiting import DEADLINE_S


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    loop = LoopThread("s3ec-test", disk_threads=1)
    yield loop
    loop.stop(DEADLINE_S)


def test_result_that_came_in_the_moment_of_the_cancellation_is_undone(loop: LoopThread) -> None:
    made, undone = threading.Event(), threading.Event()
    results: list[str] = []

    def undo(result: str) -> None:
        results.append(result)
        undone.set()

    async def broken_off() -> bool:
        async def cancel() -> None:
            await loop.disk(int)
            call.cancel()  # which has its result, and has not run since

        cancelling = asyncio.ensure_future(cancel())
        call = asyncio.ensure_future(loop.disk(str, "something", undo=undo))
        last = asyncio.ensure_future(loop.disk(made.set))
        await asyncio.sleep(0)
        assert made.wait(DEADLINE_S)  # so both outcomes are there before this loop goes on
        await asyncio.wait([cancelling, call, last])
        return call.cancelled()

    assert loop.run(broken_off(), DEADLINE_S)
    assert undone.wait(DEADLINE_S)
    assert results == ["something"]


def test_background_call_that_fails_is_logged(
    loop: LoopThread, caplog: pytest.LogCaptureFixture
) -> None:
    loop.run(asyncio.sleep(0), DEADLINE_S)
    loop.disk_soon(int, "no number")

    async def fence() -> None:
        await loop.disk(int)

    loop.run(fence(), DEADLINE_S)
    assert "invalid literal" in caplog.text
