# SPDX-License-Identifier: Apache-2.0
"""A large object by ranges: some are asked for at a time, and they come in their order."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncGenerator

from s3ec.store.base import Blob, Store


async def parts_in_order(
    store: Store, name: str, starts: range, *, at_a_time: int
) -> AsyncGenerator[Blob | None, None]:
    """Part of an object, range by range.

    To be closed (``contextlib.aclosing``) by who may not come to the end: requests under way are
    cancelled then, and have ended.

    Args:
        starts: Offsets of the ranges in bytes; its step is their length, its stop where the last
            one ends.
        at_a_time: Ranges that are asked for, have come, or are in the caller's hands.

    Yields:
        What ``get_range`` answered, so None where the object is gone. The next range is asked for
        when the caller is done with this one.
    """
    requests = (
        asyncio.ensure_future(store.get_range(name, at, min(starts.step, starts.stop - at)))
        for at in starts
    )
    coming = deque(itertools.islice(requests, at_a_time))
    try:
        while coming:
            yield await coming[0]
            coming.popleft()
            coming.extend(itertools.islice(requests, 1))
    finally:
        for request in coming:
            request.cancel()
        await asyncio.gather(*coming, return_exceptions=True)
