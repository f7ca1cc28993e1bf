# SPDX-License-Identifier: Apache-2.0
"""Calls that hang are given up; others come through as they are."""

from __future__ import annotations

import asyncio
import threading

import pytest

from s3ec.doctor.deadline import run_within, within
from s3ec.errors import UnavailableError


def test_result_and_error_come_through() -> None:
    assert within(60, lambda: 7) == 7
    with pytest.raises(KeyError):
        within(60, lambda: {}["x"])


def test_own_timeout_of_a_call_is_not_taken_for_the_deadline() -> None:
    def call() -> None:
        raise TimeoutError("mine")

    with pytest.raises(TimeoutError, match="mine"):
        within(60, call)


def test_hanging_call_is_given_up() -> None:
    gate = threading.Event()
    with pytest.raises(UnavailableError, match="no answer within"):
        within(0.05, gate.wait)
    gate.set()


def test_hanging_coroutine_is_cancelled_and_cleans_up() -> None:
    cleaned = threading.Event()

    async def hang() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cleaned.set()

    with pytest.raises(UnavailableError, match="no answer within"):
        run_within(0.05, hang)
    assert cleaned.is_set()


def test_coroutine_that_blocks_its_loop_is_given_up() -> None:
    gate = threading.Event()

    async def block() -> None:
        gate.wait()

    with pytest.raises(UnavailableError):
        run_within(0.05, block)
    gate.set()
