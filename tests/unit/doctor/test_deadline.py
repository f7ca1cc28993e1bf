# SPDX-License-Identifier: Apache-2.0
"""Each request has a time of its own; what hangs is given up."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from s3ec.dev.rigs.proxy import FaultProxy
from s3ec.errors import UnavailableError
from s3ec.store.base import Store
from tests.support.waiting import DEADLINE_S
from tests.unit.doctor.conftest import MakePatient


def test_what_hangs_is_given_up_and_a_coroutine_cleans_up(make_patient: MakePatient) -> None:
    begun, cleaned = threading.Event(), threading.Event()

    async def hang(store: Store) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            cleaned.set()

    for timeout_s in (0.01, 0.1, 1.0, 30.0):  # a busy machine may not get to it at first
        patient = make_patient(timeout_s=timeout_s)
        with pytest.raises(UnavailableError, match=f"timed out after {2 * timeout_s:.3g} s"):
            patient.ask_store(hang, requests=2)
        if begun.is_set():
            break
    assert cleaned.wait(DEADLINE_S)


def test_what_this_machine_takes_to_prepare_a_request_is_not_the_servers_time(
    make_patient: MakePatient, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine clients take seconds to be made, and the server is as quick as ever."""
    limits: list[tuple[float, str]] = []

    def measured(limit_s: float, call: Callable[[], Any]) -> Any:
        limits.append((limit_s, getattr(call, "func", call).__name__))
        return call()

    monkeypatch.setattr("s3ec.doctor.s3_probe.call_within", measured)
    patient = make_patient()
    patient.s3.credentials_method()
    patient.s3.probe_server()
    assert limits == [(30, "look"), (30, "send")]
    assert len(proxy.requests) == 1
