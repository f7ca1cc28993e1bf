# SPDX-License-Identifier: Apache-2.0
"""What may pass at the top of a task."""

from __future__ import annotations

import asyncio

import pytest

from s3ec.runtime import ends_task


@pytest.mark.parametrize("kind", [GeneratorExit, KeyboardInterrupt, SystemExit])
async def test_what_ends_a_task_or_the_process_passes(kind: type[BaseException]) -> None:
    assert ends_task(kind())


@pytest.mark.parametrize("kind", [ValueError, BaseException, asyncio.CancelledError])
async def test_faults_stay_and_so_does_the_cancellation_of_something_else(
    kind: type[BaseException],
) -> None:
    assert not ends_task(kind())


async def test_a_task_s_own_cancellation_passes() -> None:
    seen: list[bool] = []

    async def top() -> None:
        try:
            await asyncio.Event().wait()
        except BaseException as exc:
            seen.append(ends_task(exc))
            raise

    task = asyncio.create_task(top())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert seen == [True]
