# SPDX-License-Identifier: Apache-2.0
"""Threads: the loop, late to start and sure to end; pools; a disk that may hang; tasks at top."""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from s3ec.counters import Counters
from s3ec.runtime import DaemonPool, DiskWatch, LoopThread, call_within, contained
from tests.support.clock import Clock
from tests.support.waiting import DEADLINE_S

REPOSITORY = Path(__file__).parents[2]


Make = Callable[..., LoopThread]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[LoopThread] = []

    def make(name: str, disk_threads: int = 2) -> LoopThread:
        made.append(LoopThread(name, disk_threads=disk_threads))
        return made[-1]

    yield make
    for loop in made:
        loop.stop(DEADLINE_S)


@pytest.fixture
def loop(make: Make) -> LoopThread:
    return make("s3ec-test")


@pytest.fixture
def one_disk(make: Make) -> LoopThread:
    """Its pool has one thread."""
    return make("s3ec-test", 1)


def thread_names() -> set[str]:
    return {thread.name for thread in threading.enumerate()}


async def current_thread() -> threading.Thread:
    return threading.current_thread()


# -- running -----------------------------------------------------------------------------------


def test_many_first_users_start_one_thread(loop: LoopThread) -> None:
    start = threading.Barrier(8)
    seen: list[threading.Thread] = []

    def use() -> None:
        start.wait(DEADLINE_S)
        seen.append(loop.run(current_thread(), DEADLINE_S))

    threads = [threading.Thread(target=use) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert len(seen) == 8
    assert len(set(seen)) == 1


def test_run_that_times_out_cancels_the_coroutine(loop: LoopThread) -> None:
    started, cancelled = threading.Event(), threading.Event()

    async def forever() -> None:
        started.set()
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    for timeout_s in (0.01, 0.1, 1.0, 30.0):  # a busy machine may not get to it at first
        with pytest.raises(TimeoutError):
            loop.run(forever(), timeout_s)
        if started.is_set():
            break
    assert cancelled.wait(DEADLINE_S)


def test_a_result_that_nobody_awaits_any_more_is_undone(loop: LoopThread) -> None:
    begun, go_on, undone = threading.Event(), threading.Event(), threading.Event()
    results: list[tuple[str, str]] = []

    def make_something() -> str:
        begun.set()
        assert go_on.wait(DEADLINE_S)
        return "something"

    def undo(result: str) -> None:
        results.append((result, threading.current_thread().name))
        undone.set()

    async def broken_off() -> None:
        await loop.disk(make_something, undo=undo)

    call = loop.submit(broken_off())
    assert begun.wait(DEADLINE_S)
    call.cancel()
    go_on.set()
    assert undone.wait(DEADLINE_S)
    assert results[0][0] == "something"
    assert "-disk" in results[0][1]


def test_a_call_that_never_began_or_failed_has_nothing_to_undo(loop: LoopThread) -> None:
    begun, go_on = threading.Event(), threading.Event()
    undone: list[object] = []

    def wait() -> None:
        begun.set()
        assert go_on.wait(DEADLINE_S)
        raise KeyError("nothing came of it")

    async def broken_off(*functions: Callable[[], None]) -> None:
        async with asyncio.TaskGroup() as group:
            for function in functions:
                group.create_task(loop.disk(function, undo=undone.append))

    call = loop.submit(broken_off(wait, wait, wait, wait))  # two threads
    assert begun.wait(DEADLINE_S)
    call.cancel()
    go_on.set()

    async def fence() -> None:
        await asyncio.gather(*(loop.disk(int) for _ in range(8)))  # where undo is called

    loop.run(fence(), DEADLINE_S)
    assert undone == []


def test_result_that_came_in_the_moment_of_the_cancellation_is_undone(
    one_disk: LoopThread,
) -> None:
    made, undone = threading.Event(), threading.Event()
    results: list[str] = []

    def undo(result: str) -> None:
        results.append(result)
        undone.set()

    async def broken_off() -> bool:
        async def cancel() -> None:
            await one_disk.disk(int)
            call.cancel()  # which has its result, and has not run since

        cancelling = asyncio.ensure_future(cancel())
        call = asyncio.ensure_future(one_disk.disk(str, "something", undo=undo))
        last = asyncio.ensure_future(one_disk.disk(made.set))
        await asyncio.sleep(0)
        assert made.wait(DEADLINE_S)  # so both outcomes are there before this loop goes on
        await asyncio.wait([cancelling, call, last])
        return call.cancelled()

    assert one_disk.run(broken_off(), DEADLINE_S)
    assert undone.wait(DEADLINE_S)
    assert results == ["something"]


def test_background_call_that_fails_is_logged(
    one_disk: LoopThread, caplog: pytest.LogCaptureFixture
) -> None:
    one_disk.run(asyncio.sleep(0), DEADLINE_S)
    one_disk.disk_soon(int, "no number")

    async def fence() -> None:
        await one_disk.disk(int)

    one_disk.run(fence(), DEADLINE_S)
    assert "invalid literal" in caplog.text


def test_loop_is_of_uvloop_where_it_is_installed_and_of_asyncio_elsewhere(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def kind() -> str:
        return type(asyncio.get_running_loop()).__module__

    installed = importlib.util.find_spec("uvloop") is not None
    found = make("s3ec-any").run(kind(), DEADLINE_S)
    assert found.startswith("uvloop" if installed else "asyncio")
    monkeypatch.setitem(sys.modules, "uvloop", None)
    assert make("s3ec-own").run(kind(), DEADLINE_S).startswith("asyncio")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["asyncio", "uvloop"])
def test_forked_child_has_no_share_in_what_the_loop_waits_for(kind: str) -> None:
    """It would take a socket that it drops out of the parent's selector."""
    if kind == "uvloop":
        pytest.importorskip("uvloop")
    code = textwrap.dedent(f"""
        import asyncio, os, sys
        if {kind!r} == "asyncio":
            sys.modules["uvloop"] = None
        from s3ec.runtime import LoopThread

        def shared():
            links = {{}}
            for fd in os.listdir("/proc/self/fd"):
                try:
                    links[int(fd)] = os.readlink(f"/proc/self/fd/{{fd}}")
                except OSError:
                    pass
            return links

        before = set(shared())

        async def connect(port):
            return await asyncio.open_connection("127.0.0.1", port)

        async def listen():
            server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
            return server, server.sockets[0].getsockname()[1]

        loop = LoopThread("s3ec-test")
        server, port = loop.run(listen(), 120)
        reader, writer = loop.run(connect(port), 120)
        mine = shared()
        child = os.fork()
        if not child:
            left = {{fd: link for fd, link in shared().items() if link == mine.get(fd)}}
            left = [link for fd, link in left.items() if fd not in before]
            bad = [link for link in left if link.startswith("socket") or "eventpoll" in link]
            os._exit(len(bad))
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

        async def talk():
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0)

        loop.run(talk(), 120)
        print("left", status)
        loop.stop(120)
    """)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.stdout == "left 0\n", done.stderr


# -- stopping ----------------------------------------------------------------------------------


def test_stop_cancels_what_runs_and_ends_the_thread(loop: LoopThread) -> None:
    running = threading.Event()
    cleaned = threading.Event()

    async def forever() -> None:
        running.set()
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            await asyncio.sleep(0)  # cleaning up may take turns of the loop
            cleaned.set()

    future = loop.submit(forever())
    assert running.wait(DEADLINE_S)
    assert not loop.closed
    loop.stop(DEADLINE_S)
    assert loop.closed
    assert cleaned.is_set()
    assert future.cancelled()
    assert "s3ec-test" not in thread_names()


def test_stop_also_ends_what_is_started_while_stopping(
    loop: LoopThread, caplog: pytest.LogCaptureFixture
) -> None:
    """A queue starts the next job when one ends, cancelled or not."""
    running = threading.Event()
    ended: list[int] = []
    tasks = []

    async def job(number: int) -> None:
        running.set()
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            ended.append(number)
            if number < 5:
                tasks.append(asyncio.get_running_loop().create_task(job(number + 1)))

    loop.submit(job(0))
    assert running.wait(DEADLINE_S)
    loop.stop(DEADLINE_S)
    assert all(task.done() for task in tasks)
    tasks.clear()
    gc.collect()
    assert "destroyed" not in caplog.text


def test_what_is_submitted_runs_on_though_nobody_holds_it(
    loop: LoopThread, caplog: pytest.LogCaptureFixture
) -> None:
    """A coroutine and the future it awaits hold nothing but each other."""
    running, cleaned = threading.Event(), threading.Event()

    async def forever() -> None:
        running.set()
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            cleaned.set()
            raise

    loop.submit(forever())
    assert running.wait(DEADLINE_S)
    loop.run(asyncio.sleep(0), DEADLINE_S)  # forever() waits by now
    gc.collect()
    loop.stop(DEADLINE_S)
    assert cleaned.is_set()
    assert "destroyed" not in caplog.text


@pytest.mark.slow
def test_use_after_stop_is_an_error_and_leaves_no_coroutine(
    make: Make,
) -> None:
    for use_first in (False, True):
        loop = make(f"s3ec-{use_first}")
        if use_first:
            loop.run(current_thread(), DEADLINE_S)
        loop.stop(DEADLINE_S)
        with pytest.raises(RuntimeError):
            loop.submit(current_thread())
        with pytest.raises(RuntimeError):
            loop.run(current_thread(), DEADLINE_S)
        with pytest.raises(RuntimeError):
            loop.call(print)
        gc.collect()  # "never awaited" would be an error here


def test_stop_gives_up_on_what_ignores_it(
    loop: LoopThread, caplog: pytest.LogCaptureFixture
) -> None:
    running = threading.Event()
    release = threading.Event()

    async def stuck() -> None:
        running.set()
        release.wait(DEADLINE_S)

    loop.submit(stuck())
    assert running.wait(DEADLINE_S)
    loop.stop(0.01)
    assert "did not end within" in caplog.text
    release.set()
    for thread in threading.enumerate():
        if thread.name == "s3ec-test":
            thread.join(DEADLINE_S)


# -- the end of the process --------------------------------------------------------------------


def run_child(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


PRELUDE = """
import asyncio, os, signal, threading
from s3ec.runtime import LoopThread
signal.alarm(240)
loop = LoopThread("s3ec-end")

async def where():
    return os.getpid(), threading.get_native_id()
"""


def test_the_process_ends_though_nobody_stopped_the_loop() -> None:
    run_child(
        PRELUDE
        + """
loop.run(where(), 120)
loop.submit(asyncio.sleep(3600))
"""
    )


def test_the_process_ends_though_calls_hang_in_every_pool() -> None:
    """As in a disk that does not answer, or a server of names."""
    run_child(
        PRELUDE
        + """
hung = threading.Event()

async def hang():
    await asyncio.gather(loop.disk(hung.wait), asyncio.to_thread(hung.wait))

loop.submit(hang())
loop.run(where(), 120)
loop.stop(0.2)
"""
    )


# -- pools -------------------------------------------------------------------------------------


def test_shutdown_does_what_was_asked_or_cancels_it() -> None:
    for cancels in (False, True):
        pool, begun, go_on = DaemonPool(1, "s3ec-test-pool"), threading.Event(), threading.Event()
        pool.submit(lambda begun=begun, go_on=go_on: (begun.set(), go_on.wait(DEADLINE_S)))
        assert begun.wait(DEADLINE_S)
        later = pool.submit(int)
        pool.shutdown(wait=False, cancel_futures=cancels)
        with pytest.raises(RuntimeError, match="has ended"):
            pool.submit(int)
        go_on.set()
        pool.shutdown()
        assert later.cancelled() == cancels


def test_call_that_hangs_is_left_alone() -> None:
    hung = threading.Event()
    with pytest.raises(TimeoutError):
        call_within(0.01, hung.wait)
    hung.set()
    assert call_within(DEADLINE_S, hung.wait)
    with pytest.raises(ZeroDivisionError):
        call_within(DEADLINE_S, lambda: 1 / 0)


# -- whether the disk answers ------------------------------------------------------------------


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def counters() -> Counters:
    return Counters()


@pytest.fixture
def watch(clock: Clock, counters: Counters) -> DiskWatch:
    return DiskWatch(counters, patience_s=5.0, clock=clock)


def test_one_call_that_does_not_come_back_is_a_hang_until_it_does(
    watch: DiskWatch, clock: Clock, counters: Counters, caplog: pytest.LogCaptureFixture
) -> None:
    for times in (1, 2):
        first = watch.begin()
        clock.now_s += 3
        second = watch.begin()
        clock.now_s += 3
        assert watch.hangs
        assert watch.hangs
        assert counters.get("tier.hung") == times
        watch.end(first)
        assert not watch.hangs  # the other one is younger
        watch.end(second)
    warnings = [record for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 2
    assert "cache_dir" in warnings[0].message


def test_asking_bears_calls_that_begin_and_end_meanwhile(watch: DiskWatch) -> None:
    over = threading.Event()

    def work() -> None:
        while not over.is_set():
            watch.run(int)

    workers = [threading.Thread(target=work) for _ in range(3)]
    for worker in workers:
        worker.start()
    try:
        assert not any(watch.hangs for _ in range(20_000))
    finally:
        over.set()
        for worker in workers:
            worker.join()


# -- the top of a task -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [GeneratorExit, KeyboardInterrupt, SystemExit])
async def test_what_ends_a_task_or_the_process_passes(kind: type[BaseException]) -> None:
    counters = Counters()
    with pytest.raises(kind), contained(counters, "a test"):
        raise kind
    assert counters.get("internal_errors") == 0


@pytest.mark.parametrize("kind", [ValueError, BaseException, asyncio.CancelledError])
async def test_faults_are_counted_and_logged_and_so_is_the_cancellation_of_something_else(
    kind: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    counters = Counters()
    with contained(counters, "test of %s", "a fault"):
        raise kind
    assert counters.get("internal_errors") == 1
    (record,) = caplog.records
    assert record.getMessage() == "test of a fault"
    assert record.exc_info is not None
    assert record.exc_info[0] is kind


async def test_a_task_s_own_cancellation_passes() -> None:
    counters = Counters()

    async def top() -> None:
        with contained(counters, "a test"):
            await asyncio.Event().wait()

    task = asyncio.create_task(top())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert counters.get("internal_errors") == 0
