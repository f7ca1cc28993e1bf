# SPDX-License-Identifier: Apache-2.0
"""Calls that hang are given up; others come through as they are."""

from __future__ import annotations

import asyncio
import threading

import pytest

from s3ec.errors import UnavailableError
from s3ec.runtime import within
from s3ec.store.base import Store
from tests.unit.doctor.conftest import MakePatient


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


def test_hanging_coroutine_is_given_up_and_cleans_up(make_patient: MakePatient) -> None:
    cleaned = threading.Event()
    patient = make_patient(connect_timeout_s=0.01, read_timeout_s=0.01)

    async def hang(store: Store) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cleaned.set()

    with pytest.raises(UnavailableError, match="no answer within"):
        patient.ask_store(hang)
    assert cleaned.wait(60)


def test_questions_to_the_store_share_one(make_patient: MakePatient) -> None:
    patient = make_patient()

    async def itself(store: Store) -> Store:
        return store

    assert patient.ask_store(itself) is patient.ask_store(itself)
