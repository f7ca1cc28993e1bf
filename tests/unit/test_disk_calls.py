# SPDX-License-Identifier: Apache-2.0
"""Disk calls in a row: made in one go, in one scope, and their outcomes handed back together."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from s3ec import runtime
from s3ec.runtime import LoopThread
from tests.support.waiting import eventually

TIMEOUT_S = 20.0


class Scopes:
    """Counts scopes; a call may ask whether it is in one."""

    def __init__(self) -> None:
        self.begun = self.ended = 0

    @contextmanager
    def __call__(self) -> Iterator[None]:
        self.begun += 1
        try:
            yield
        finally:
            self.ended += 1

    def is_inside(self) -> bool:
        return self.begun == self.ended + 1


@pytest.fixture
def scopes() -> Scopes:
    return Scopes()


@pytest.fixture
def loop(scopes: Scopes) -> Iterator[LoopThread]:
    loop = LoopThread("s3ec-test", disk_threads=1)
    loop.share(scopes)
    yield loop
    loop.stop(TIMEOUT_S)


def test_calls_that_wait_are_made_in_one_scope_which_ends(
    loop: LoopThread, scopes: Scopes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "_SCOPE_S", 60.0)
    go_on = threading.Event()

    async def several() -> list[object]:
        calls = [asyncio.ensure_future(loop.disk(go_on.wait, TIMEOUT_S))]
        calls += [asyncio.ensure_future(loop.disk(scopes.is_inside)) for _ in range(9)]
        await asyncio.sleep(0)  # all of them are queued now
        go_on.set()
        return await asyncio.gather(*calls)

    assert loop.run(several(), TIMEOUT_S) == [True] * 10
    assert scopes.begun == 1


def test_long_row_of_calls_is_cut_into_scopes(
    loop: LoopThread, scopes: Scopes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "_SCOPE_S", -1.0)

    async def several() -> None:
        await asyncio.gather(*(loop.disk(int) for _ in range(5)))

    loop.run(several(), TIMEOUT_S)
    assert scopes.begun == 5


def test_outcomes_that_wait_for_the_loop_wake_it_once(loop: LoopThread) -> None:
    woken: list[object] = []
    made = threading.Event()

    async def several() -> list[int]:
        running = asyncio.get_running_loop()
        wake = running.call_soon_threadsafe

        def count(callback, *args, **more):  # type: ignore[no-untyped-def]
            woken.append(callback)
            return wake(callback, *args, **more)

        await loop.disk(int)
        running.call_soon_threadsafe = count  # type: ignore[method-assign]
        calls = [asyncio.ensure_future(loop.disk(int, str(n))) for n in range(9)]
        calls.append(asyncio.ensure_future(loop.disk(lambda: made.set() or 9)))
        await asyncio.sleep(0)
        assert made.wait(TIMEOUT_S)  # this thread can hear of nothing meanwhile
        return await asyncio.gather(*calls)

    assert loop.run(several(), TIMEOUT_S) == list(range(10))
    # Twice where the last outcome came when the first ones were being handed out.
    assert len(woken) <= 2


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
        assert made.wait(TIMEOUT_S)  # so both outcomes are there before this loop goes on
        await asyncio.wait([cancelling, call, last])
        return call.cancelled()

    assert loop.run(broken_off(), TIMEOUT_S)
    assert undone.wait(TIMEOUT_S)
    assert results == ["something"]


def test_scope_that_fails_is_logged_and_the_calls_go_on(
    loop: LoopThread, caplog: pytest.LogCaptureFixture
) -> None:
    @contextmanager
    def failing() -> Iterator[None]:
        yield
        raise OSError("no such disk")

    async def use() -> int:
        await loop.disk(int)
        return await loop.disk(int, "7")

    loop.share(failing)
    assert loop.run(use(), TIMEOUT_S) == 7
    loop.stop(TIMEOUT_S)
    eventually(lambda: "no such disk" in caplog.text)  # logged after the result


def test_background_call_that_fails_is_logged(
    loop: LoopThread, caplog: pytest.LogCaptureFixture
) -> None:
    loop.run(asyncio.sleep(0), TIMEOUT_S)
    loop.disk_soon(int, "no number")

    async def fence() -> None:
        await loop.disk(int)

    loop.run(fence(), TIMEOUT_S)
    assert "invalid literal" in caplog.text


class Race:
    """Whoever finds that a call waits finds it gone a moment later: another thread took it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
        """Start a thread that is making a call, with another one behind it."""
        self.go_on = threading.Event()
        self.taken = taken = threading.Event()
        begun = threading.Event()

        class Raced(deque[Any]):
            def __bool__(raced) -> bool:  # noqa: N805 - self is the race
                found = len(raced) > 0
                if found and begun.is_set() and not taken.is_set():
                    self.go_on.set()
                    assert taken.wait(TIMEOUT_S)
                return found

        def hold() -> None:
            begun.set()
            assert self.go_on.wait(TIMEOUT_S)

        monkeypatch.setattr(runtime, "deque", Raced)
        monkeypatch.setattr(runtime, "_SCOPE_S", 60.0)  # it takes the next one by itself
        self.loop = LoopThread("s3ec-test", disk_threads=threads)
        self.loop.run(asyncio.sleep(0), TIMEOUT_S)
        self.loop.disk_soon(hold)
        assert begun.wait(TIMEOUT_S)
        self.loop.disk_soon(taken.set)


def test_call_that_a_thread_takes_as_the_loop_stops_does_not_break_the_stop_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    race = Race(monkeypatch, threads=1)
    race.loop.stop(TIMEOUT_S)
    race.go_on.set()
    with pytest.raises(RuntimeError):
        race.loop.call(int)


def test_call_that_another_thread_takes_first_costs_no_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    race = Race(monkeypatch, threads=2)
    assert race.taken.wait(TIMEOUT_S)
    race.go_on.set()
    both = threading.Barrier(2)

    async def at_once() -> None:
        await asyncio.gather(*(race.loop.disk(both.wait, TIMEOUT_S) for _ in range(2)))

    race.loop.run(at_once(), 2 * TIMEOUT_S)
    race.loop.stop(TIMEOUT_S)
