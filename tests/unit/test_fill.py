# SPDX-License-Identifier: Apache-2.0
"""Copies to a replica: their pace."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from s3ec.counters import Counters
from s3ec.errors import TOO_LARGE, AccessError, S3ECError, UnavailableError
from s3ec.fill import Filler
from s3ec.identity import Key, Layout
from s3ec.runtime import LoopThread
from s3ec.store.endpoint import Endpoint
from s3ec.store.places import Place
from s3ec.testing.fault_store import Fault, FaultStore, Script
from s3ec.testing.memory_store import MemoryStore
from tests.support.waiting import DEADLINE_S
from tests.unit.tier.cases import key_at

LAYOUT = Layout("gemma-0123456789abcdef")
NBYTES = 600


def full(message: str) -> S3ECError:
    return AccessError(message, code=TOO_LARGE, is_general=False)


@pytest.mark.parametrize("error", [None, full, UnavailableError])
def test_copies_keep_the_pace_whether_the_replica_takes_them_or_not(
    tmp_path: Path, error: Callable[[str], S3ECError] | None
) -> None:
    faults = [] if error is None else [Fault("put_if_absent", error=error)]
    counters, loop = Counters(), LoopThread("s3ec-test", disk_threads=1)
    place = Place("near", FaultStore(MemoryStore(), Script(faults)), Endpoint(16), counters)
    path = tmp_path / "entry"
    path.write_bytes(bytes(NBYTES))
    keys = list(map(key_at, range(3)))
    pauses_s: list[float] = []

    async def pause(seconds: float) -> None:
        pauses_s.append(seconds)

    with path.open("rb") as file:
        entry = SimpleNamespace(fd=file.fileno(), nbytes=NBYTES)

        def open_entry(_: Key) -> Any:
            return entry

        filler = Filler(
            *(place, MemoryStore(), LAYOUT, loop, counters, open_entry),
            bytes_per_minute=60 * NBYTES,
            pause=pause,
        )

        async def fill() -> None:
            for each in keys:
                place.lag(LAYOUT.object(each))
                filler.offer(each)
            await asyncio.gather(*filter(None, [filler._task]))

        loop.run(fill(), DEADLINE_S)
        loop.stop(DEADLINE_S)
    assert pauses_s == [1.0, 1.0, 1.0]
    assert counters.get("place.near.filled" if error is None else "place.near.unfilled") == 3
