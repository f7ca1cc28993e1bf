# SPDX-License-Identifier: Apache-2.0
"""How long this store takes from this machine, at the size of one embedding.

One throw-away object is written, read many times, and deleted.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

from s3ec.doctor.check import CheckContext
from s3ec.errors import CorruptEntryError, S3ECError
from s3ec.store.base import Store
from s3ec.store.open import probe_name

READS = 50
AT_ONCE = 16
# Reading ends after so many seconds each way, however few reads there were.
_LONGEST_S = 20.0
# Two times of reading, one write and one deletion.
_REQUESTS = 12
# Fewer give no percentiles.
_FEWEST = 3
# As s3ec fetches: larger objects in ranges, all at once.
_RANGE_BYTES = 4 * 2**20


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Times of one kind of read in milliseconds, and how many reads there were."""

    p50_ms: float
    p90_ms: float
    p99_ms: float
    reads: int

    @classmethod
    def of(cls, times_s: list[float]) -> Percentiles:
        """Make them from at least one time."""
        ordered, count = sorted(times_s), len(times_s)
        p50, p90, p99 = (ordered[min(count - 1, int(s * count))] * 1e3 for s in (0.5, 0.9, 0.99))
        return cls(p50, p90, p99, count)


@dataclass(frozen=True, slots=True)
class StoreLatency:
    """What was measured.

    Attributes:
        nbytes: Of the probe object.
        put_ms: It was written once.
        alone: One read at a time.
        together: AT_ONCE reads at a time.
        node_mb_s: Bytes of the latter by their time, in MB/s.
        left: Name of the probe object where it could not be deleted, else None.
    """

    nbytes: int
    put_ms: float
    alone: Percentiles
    together: Percentiles
    node_mb_s: float
    left: str | None


def measure(context: CheckContext, nbytes: int) -> StoreLatency:
    """As measure_store, with the store that the connector would use.

    Raises:
        S3ECError: As measure_store.
    """
    return context.ask_store(
        lambda store: measure_store(store, probe_name(), nbytes), requests=_REQUESTS
    )


async def measure_store(
    store: Store, name: str, nbytes: int, *, reads: int = READS, longest_s: float = _LONGEST_S
) -> StoreLatency:
    """Write, read and delete one object.

    Args:
        store: Where.
        name: Of the object, which must not exist.
        nbytes: Its size.
        reads: One at a time, and as many again AT_ONCE at a time.
        longest_s: Each of the two ends after so long.

    Raises:
        UnavailableError, AccessError: The store did not do its part.
        ConflictError: The name is taken.
        CorruptEntryError: It gave back something else than was written.
    """
    body = os.urandom(nbytes)  # a server may compress what repeats
    began_s = time.perf_counter()
    await store.put_if_absent(name, [body])
    put_ms = (time.perf_counter() - began_s) * 1e3
    left: str | None = name
    try:

        async def read() -> float:
            start_s = time.perf_counter()
            if await _read(store, name, nbytes) != nbytes:
                raise CorruptEntryError("the probe object came back shorter", reason="length")
            return time.perf_counter() - start_s

        await read()  # connections are opened once in a node's life
        alone = await _times(read, reads, 1, longest_s)
        began_s = time.perf_counter()
        together = await _times(read, reads, AT_ONCE, longest_s)
        node_mb_s = nbytes * len(together) / (time.perf_counter() - began_s) / 1e6
    finally:
        with suppress(S3ECError):
            await store.delete(name)
            left = None
    return StoreLatency(
        nbytes, put_ms, Percentiles.of(alone), Percentiles.of(together), node_mb_s, left
    )


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
    """Seconds of each of so many reads, or of those that fit into the time."""
    end_s = time.perf_counter() + longest_s
    times: list[float] = []
    left = iter(range(reads))

    async def lane() -> None:
        for _ in left:
            times.append(await read())
            if time.perf_counter() > end_s and len(times) >= _FEWEST:
                return

    await asyncio.gather(*(lane() for _ in range(at_once)))
    return times
