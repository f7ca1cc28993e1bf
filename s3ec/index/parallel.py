# SPDX-License-Identifier: Apache-2.0
"""Some requests at a time, and the first error of any ends them all."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")

REQUESTS_AT_A_TIME = 16


async def in_parallel(
    items: Iterable[T],
    call: Callable[[T], Awaitable[R]],
    *,
    width: int = REQUESTS_AT_A_TIME,
) -> list[R]:
    """Await ``call`` for every item, at most ``width`` at a time.

    Returns:
        The results in the order of the items.

    Raises:
        BaseException: That of the first call that failed, as it is and in no group; the others
            were cancelled and have ended by then.
    """
    results: dict[int, R] = {}
    turns = iter(enumerate(items))

    async def work() -> None:
        for number, item in turns:
            results[number] = await call(item)

    workers = [asyncio.ensure_future(work()) for _ in range(width)]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
    return [results[number] for number in sorted(results)]
