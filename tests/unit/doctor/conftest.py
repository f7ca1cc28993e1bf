# SPDX-License-Identifier: Apache-2.0
"""Patients on moto, behind a proxy that can make it a worse server."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from s3ec.config import load_settings
from s3ec.dev.rigs.proxy import Exchange, FaultProxy
from s3ec.doctor.check import CheckContext, Outcome, Verdict
from s3ec.testing.server import MotoServer

BUCKET = "doctor"
MakePatient = Callable[..., CheckContext]


def says(outcome: Outcome, verdict: Verdict, *, found: str = "", mend: str = "") -> None:
    """What a check came to, with a part of what it found and of how to mend it."""
    assert outcome.verdict == verdict, outcome
    assert found in outcome.found
    assert mend in outcome.mend


@dataclass(frozen=True)
class WithoutHeader:
    """The request arrives without one header, as at a server that does not know it."""

    name: str

    async def apply(self, exchange: Exchange) -> None:
        headers = {k: v for k, v in exchange.request.headers.items() if k != self.name}
        exchange.request = replace(exchange.request, headers=headers)
        await exchange.send(await exchange.forward())


@dataclass(frozen=True)
class ReplyHeaders:
    """The reply has other headers; None takes one away."""

    headers: Mapping[str, str | None]

    async def apply(self, exchange: Exchange) -> None:
        reply = await exchange.forward()
        for name, value in self.headers.items():
            reply.headers.pop(name, None)
            if value is not None:
                reply.headers[name] = value
        await exchange.send(reply)


@pytest.fixture(scope="session")
def doctor_bucket(moto_server: MotoServer) -> str:
    return moto_server.create_bucket(BUCKET)


@pytest.fixture
def proxy(moto_server: MotoServer) -> Iterator[FaultProxy]:
    """In front of moto; forwards everything until a test adds a rule."""
    with FaultProxy(moto_server.endpoint_url) as proxy:
        yield proxy


@pytest.fixture
def make_patient(
    moto_server: MotoServer,
    proxy: FaultProxy,
    doctor_bucket: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> Iterator[MakePatient]:
    """Makes patients that reach moto through the proxy, each in a folder of its own."""
    patients: list[CheckContext] = []
    for name, value in moto_server.env().items():
        monkeypatch.setenv(name, value)

    def make(
        transfer: Mapping[str, Any] | None = None, *, timeout_s: float = 30, **settings: Any
    ) -> CheckContext:
        defaults = {
            "bucket": doctor_bucket,
            "prefix": tmp_path.name,
            "endpoint_url": proxy.url,
            "cache_dir": str(tmp_path / "cache"),
        }
        loaded = load_settings({**defaults, **settings})
        # Server, proxy and doctor share this process, and perhaps a busy machine.
        patient = CheckContext(loaded, transfer or {}, None, timeout_s=timeout_s)
        patients.append(patient)
        return patient

    yield make
    for patient in patients:
        patient.close(60)


@pytest.fixture
def left_over(moto_server: MotoServer, tmp_path: Path) -> Callable[[], list[str]]:
    """Names that the checks left in their folder of the bucket."""

    def names() -> list[str]:
        page = moto_server.client().list_objects_v2(Bucket=BUCKET, Prefix=f"{tmp_path.name}/")
        return [entry["Key"].partition("/")[2] for entry in page.get("Contents", [])]

    return names
