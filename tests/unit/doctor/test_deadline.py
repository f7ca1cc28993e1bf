# SPDX-License-Identifier: Apache-2.0
"""Calls that hang are given up; others come through as they are."""

from __future__ import annotations

import asyncio
import threading

import pytest

from s3ec.errors import UnavailableError
from s3ec.store.base import Store
from tests.unit.doctor.conftest import MakePatient


def test_results_and_errors_of_a_call_come_through(make_patient: MakePatient) -> None:
    patient = make_patient()
    assert patient.ask(lambda: 7) == 7
    with pytest.raises(KeyError):
        patient.ask(lambda: {}["x"])

    def call() -> None:
        raise TimeoutError("mine")  # not taken for the deadline

    with pytest.raises(TimeoutError, match="mine"):
        patient.ask(call)


def test_what_hangs_is_given_up_and_a_coroutine_cleans_up(make_patient: MakePatient) -> None:
    cleaned, never = threading.Event(), threading.Event()
    patient = make_patient(connect_timeout_s=0.01, read_timeout_s=0.01)

    async def hang(store: Store) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cleaned.set()

    with pytest.raises(UnavailableError, match="no answer within"):
        patient.ask_store(hang)
    with pytest.raises(UnavailableError, match="no answer within"):
        patient.ask(never.wait)
    never.set()
    assert cleaned.wait(60)


def test_questions_to_the_store_share_one(make_patient: MakePatient) -> None:
    patient = make_patient()

    async def itself(store: Store) -> Store:
        return store

    assert patient.ask_store(itself) is patient.ask_store(itself)
