# SPDX-License-Identifier: Apache-2.0
"""The pool of host buffers: what is reused and when, and how much it holds."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from tests.support.waiting import DEADLINE_S

torch = pytest.importorskip("torch")
accelerators = pytest.importorskip("tests.unit.connector.accelerators")
host_pool = pytest.importorskip("s3ec.connector.staging")
HostPool = host_pool.HostPool

KIB = 1024
SMALLEST = 64 * KIB


def allocate(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8)


def in_a_thread(function: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=function)
    thread.start()
    return thread


def test_buffer_given_back_is_taken_again() -> None:
    pool = HostPool(allocate, idle_bytes=2**20)
    first = pool.take(100_000)
    assert first.nbytes == 128 * KIB
    pool.give(first)
    assert pool.take(70_000) is first
    assert pool.take(70_000) is not first


def test_buffer_is_not_reused_before_the_event_behind_its_copy() -> None:
    pool = HostPool(allocate, idle_bytes=2**20)
    first, event = pool.take(1), accelerators.FakeEvent()
    pool.give(first, after=event)
    second = pool.take(1)
    assert second is not first
    event.happened.set()
    assert pool.take(1) is first


def test_take_at_the_limit_waits_for_a_copy_to_end() -> None:
    pool = HostPool(allocate, idle_bytes=SMALLEST, limit_bytes=SMALLEST)
    first, event = pool.take(1), accelerators.FakeEvent()
    pool.give(first, after=event)
    waits = threading.Event()
    event.synchronize = lambda: (waits.set(), event.happened.wait(DEADLINE_S))
    taken: list[torch.Tensor] = []
    thread = in_a_thread(lambda: taken.append(pool.take(1)))
    assert waits.wait(DEADLINE_S)
    assert taken == []
    event.happened.set()
    thread.join(DEADLINE_S)
    assert taken[0] is first
    assert pool.held_bytes == SMALLEST


def test_take_does_not_wait_for_ever_for_takers_that_hang_in_a_disk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host_pool, "PATIENCE_S", 0.01)
    pool = HostPool(allocate, idle_bytes=SMALLEST, limit_bytes=SMALLEST)
    hung = pool.take(1)
    taken: list[object] = []
    thread = in_a_thread(lambda: taken.append(pool.take(1)))
    thread.join(DEADLINE_S)
    waits = thread.is_alive()
    pool.give(hung)
    thread.join(DEADLINE_S)
    assert not waits
    assert taken != [hung]


def test_limit_holds_with_many_takers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_pool, "PATIENCE_S", 60.0)
    sizes = [64 * KIB, 128 * KIB, 256 * KIB]
    pool = HostPool(allocate, idle_bytes=512 * KIB, limit_bytes=512 * KIB)
    most = []

    def work(seed: int) -> None:
        for number in range(200):
            buffer = pool.take(sizes[(seed + number) % 3])
            most.append(pool.held_bytes)
            event = accelerators.FakeEvent()
            event.happened.set()
            pool.give(buffer, after=event if number % 2 else None)

    threads = [in_a_thread(lambda seed=seed: work(seed)) for seed in range(4)]
    for thread in threads:
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
    assert max(most) <= 512 * KIB
    pool.take(512 * KIB)
    assert pool.held_bytes == 512 * KIB  # so nothing else is taken


def test_idle_buffers_of_sizes_not_used_for_long_go_first() -> None:
    pool = HostPool(allocate, idle_bytes=192 * KIB)
    old, new = pool.take(64 * KIB), pool.take(128 * KIB)
    pool.give(old)
    pool.give(new)
    assert pool.held_bytes == 192 * KIB
    another = pool.take(64 * KIB)
    assert another is old
    more = pool.take(64 * KIB)
    pool.give(another)
    pool.give(more)
    assert pool.held_bytes == 128 * KIB  # both small ones; the large one went


def test_failed_allocation_takes_nothing() -> None:
    def refuse(nbytes: int) -> torch.Tensor:
        raise MemoryError

    pool = HostPool(refuse, idle_bytes=0, limit_bytes=SMALLEST)
    for _ in range(3):
        with pytest.raises(MemoryError):
            pool.take(1)
    assert pool.held_bytes == 0


def test_forgotten_buffer_is_never_handed_out_again() -> None:
    pool = HostPool(allocate, idle_bytes=2**20, limit_bytes=SMALLEST)
    mine = pool.take(1)
    pool.leak(mine)
    assert pool.held_bytes == 0
    assert pool.take(1) is not mine


def test_buffer_made_in_inference_mode_can_be_written_outside_of_it() -> None:
    pool = HostPool(allocate, idle_bytes=2**20)
    with torch.inference_mode():
        buffer = pool.take(1)
        values = buffer.values(torch.float16, (3, 4))
    assert buffer.values(torch.float16, (3, 4)) is values
    for one in (buffer.memory, values):
        one.zero_()
        assert not one.is_inference()
