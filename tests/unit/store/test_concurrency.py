# SPDX-License-Identifier: Apache-2.0
"""Requests side by side: some at a time, ended by the first error."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from s3ec.errors import UnavailableError
from s3ec.store.concurrency import for_each, in_parallel


async def test_results_come_in_the_order_of_the_items() -> None:
    gates = [asyncio.Event() for _ in range(3)]

    async def call(number: int) -> int:
        if number < 2:
            await gates[number + 1].wait()
        gates[number].set()
        return number * number

    assert await in_parallel(range(3), call) == [0, 1, 4]


async def test_no_more_than_the_width_run_at_a_time() -> None:
    running = most = 0

    async def call(_: int) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1

    await in_parallel(range(20), call, width=3)
    assert most == 3


async def test_the_first_error_ends_the_others_and_comes_as_it_is() -> None:
    ended: list[int] = []

    async def call(number: int) -> None:
        try:
            if number == 2:
                raise UnavailableError("the bucket")
            await asyncio.Event().wait()
        finally:
            ended.append(number)

    with pytest.raises(UnavailableError, match="the bucket"):
        await in_parallel(range(9), call, width=4)
    assert sorted(ended) == [0, 1, 2, 3]


async def test_items_that_come_one_by_one_are_begun_in_order_and_no_more_than_fit() -> None:
    taken: list[int] = []
    begun: list[int] = []
    room = asyncio.Event()

    async def items() -> AsyncGenerator[int, None]:
        for number in range(5):
            taken.append(number)
            await asyncio.sleep(0)
            yield number

    async def call(number: int) -> None:
        begun.append(number)
        if len(begun) == 2:
            assert taken == [0, 1]
            room.set()
        await room.wait()

    await for_each(items(), call, width=2)
    assert begun == taken == [0, 1, 2, 3, 4]


async def test_an_error_closes_what_the_items_come_from() -> None:
    closed: list[bool] = []

    async def items() -> AsyncGenerator[int, None]:
        try:
            while True:
                yield 1
        finally:
            closed.append(True)

    async def call(_: int) -> None:
        raise UnavailableError("the bucket")

    with pytest.raises(UnavailableError, match="the bucket"):
        await for_each(items(), call, width=3)
    assert closed == [True]
