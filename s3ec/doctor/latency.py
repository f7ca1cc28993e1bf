# SPDX-License-Identifier: Apache-2.0
"""Measures this store's latency from this machine, at the size of one embedding.

It writes one throw-away object, reads it many times, and deletes it.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

from s3ec.errors import CorruptEntryError, S3ECError
from s3ec.store.base import Store
from s3ec.store.concurrency import in_parallel

READS = 50
AT_ONCE = 16
# Each of the two series of reads ends after so many seconds, however few reads it had.
_LONGEST_S = 20.0
# Two series of reads, one write and one deletion may take as long as so many requests.
MOST_REQUESTS = 12
# The fewest reads that give percentiles.
_FEWEST = 3
# As s3ec fetches: larger objects in ranges, all at once.
_RANGE_BYTES = 4 * 2**20


@dataclass(frozen=True, slots=True)
class StoreLatency:
    """The result of a measurement.

    Attributes:
        nbytes: Of the probe object.
        reads: How many reads were made, one at a time.
        p50_ms, p90_ms, p99_ms: Percentiles of their times.
        node_mb_s: Total throughput with AT_ONCE reads at a time, in MB/s.
        left: Name of the probe object if it could not be deleted, else None.
    """

    nbytes: int
    reads: int
    p50_ms: float
    p90_ms: float
    p99_ms: float
    node_mb_s: float
    left: str | None


async def measure_store(
    store: Store, name: str, nbytes: int, *, reads: int = READS, longest_s: float = _LONGEST_S
) -> StoreLatency:
    """Write, read and delete one object.

    Args:
        store: The store to measure.
        name: Of the object, which must not exist.
        nbytes: Its size.
        reads: Reads one at a time, and as many again AT_ONCE at a time.
        longest_s: Each of the two series ends after so many seconds.

    Raises:
        UnavailableError, AccessError: The store failed or refused.
        ConflictError: The name is taken.
        CorruptEntryError: The read bytes are not those that were written.
    """
    await store.put_if_absent(name, [os.urandom(nbytes)])  # a server may compress regular bytes
    left: str | None = name
    try:

        async def read() -> float:
            start_s = time.perf_counter()
            if await _read(store, name, nbytes) != nbytes:
                raise CorruptEntryError("the probe object came back shorter", reason="length")
            return time.perf_counter() - start_s

        await read()  # opens the connections, which a node does only once
        alone = await _times(read, reads, 1, longest_s)
        began_s = time.perf_counter()
        together = await _times(read, reads, AT_ONCE, longest_s)
        node_mb_s = nbytes * len(together) / (time.perf_counter() - began_s) / 1e6
    finally:
        with suppress(S3ECError):
            await store.delete(name)
            left = None
    ordered, count = sorted(alone), len(alone)
    p50, p90, p99 = (ordered[min(count - 1, int(s * count))] * 1e3 for s in (0.5, 0.9, 0.99))
    return StoreLatency(nbytes, count, p50, p90, p99, node_mb_s, left)


async def _read(store: Store, name: str, nbytes: int) -> int:
    if nbytes <= _RANGE_BYTES:
        body = await store.get(name, max_bytes=nbytes)
        return 0 if body is None else len(body)
    starts = range(0, nbytes, _RANGE_BYTES)
    parts = await asyncio.gather(
        *(store.get_range(name, at, min(_RANGE_BYTES, nbytes - at)) for at in starts)
    )
    return sum(0 if part is None else len(part) for part in parts)


async def _times(
    read: Callable[[], Awaitable[float]], reads: int, at_once: int, longest_s: float
) -> list[float]:
    """Seconds of each of ``reads`` reads, or of those that fit into the time."""
    end_s = time.perf_counter() + longest_s
    times: list[float] = []

    async def one(_: int) -> None:
        if time.perf_counter() < end_s or len(times) < _FEWEST:
            times.append(await read())

    await in_parallel(range(reads), one, width=at_once)
    return times
