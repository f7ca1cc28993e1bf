# SPDX-License-Identifier: Apache-2.0
"""What may pass at the top of a task."""

from __future__ import annotations

import asyncio

import pytest

from s3ec.counters import Counters
from s3ec.runtime import contained


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
