# SPDX-License-Identifier: Apache-2.0
"""What a request is told by its caller, and tells it back, past the Store protocol.

Down goes the caller's deadline, so that nobody begins what cannot end before it. Up comes the news
that an answer has begun, which the end of an operation with a large body tells too late, and of
how much of a listing came with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")
Extend = Callable[[int], None]
"""Grants the time that so many bytes may take."""

_deadline: ContextVar[asyncio.Timeout | None] = ContextVar("s3ec_deadline", default=None)
_on_answer: ContextVar[Callable[[], None] | None] = ContextVar("s3ec_on_answer", default=None)
_on_page: ContextVar[Callable[[int], None] | None] = ContextVar("s3ec_on_page", default=None)


@contextlib.asynccontextmanager
async def within(seconds: float) -> AsyncIterator[asyncio.Timeout]:
    """Give everything inside so much time; tasks begun inside know of it too.

    Yields:
        The deadline, which may be moved.

    Raises:
        TimeoutError: It has passed.
    """
    async with asyncio.timeout(seconds) as deadline:
        with _set(_deadline, deadline):
            yield deadline


def seconds_left() -> float:
    """Until the caller's deadline; infinite where there is none."""
    deadline = _deadline.get()
    when = None if deadline is None else deadline.when()
    return math.inf if when is None else when - asyncio.get_running_loop().time()


def hearing(on_answer: Callable[[], None]) -> AbstractContextManager[None]:
    """Have ``on_answer`` called when the answer to a request made inside begins."""
    return _set(_on_answer, on_answer)


def answer_begun() -> None:
    """For transports: the head of an answer is here, its body may follow."""
    on_answer = _on_answer.get()
    if on_answer is not None:
        on_answer()


def counting(on_page: Callable[[int], None]) -> AbstractContextManager[None]:
    """Have ``on_page`` called with how often a listing can be asked on without a request."""
    return _set(_on_page, on_page)


def page_begun(entries: int, *, is_last: bool = False) -> None:
    """For transports: a page of a listing is here, and so many entries of it will be given.

    Args:
        is_last: Nothing will be asked for behind them.
    """
    answer_begun()
    on_page = _on_page.get()
    if on_page is not None:
        on_page(entries + is_last)


@contextlib.contextmanager
def _set(variable: ContextVar[T], value: T) -> Iterator[None]:
    # Not by a token: a generator may be closed in another context than it was begun in.
    before = variable.get()
    variable.set(value)
    try:
        yield
    finally:
        variable.set(before)
