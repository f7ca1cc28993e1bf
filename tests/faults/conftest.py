# SPDX-License-Identifier: Apache-2.0
"""What the tests of bad days share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from s3ec.dev.rigs.proxy import FaultProxy
from s3ec.testing.server import LocalS3
from tests.faults.herd import Herd, herding
from tests.faults.site import Site
from tests.support.waiting import DEADLINE_S


@pytest.fixture(autouse=True)
def announced_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test of this process waits for a fuller batch of announcements; children do.

    All wait for a disk that is slow.
    """
    try:
        monkeypatch.setattr("s3ec.connector.uploads.PAUSE_S", 0.05)
        monkeypatch.setattr("s3ec.connector.loads.PATIENCE_S", DEADLINE_S)
    except ImportError:
        return  # no torch here


@pytest.fixture
def signed(local_s3: LocalS3, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process has the credentials of the session's server."""
    for name, value in local_s3.env().items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def site(local_s3: LocalS3, s3_bucket: str, tmp_path: Path) -> Iterator[Site]:
    with FaultProxy(local_s3.endpoint_url) as proxy:
        yield Site(proxy, s3_bucket, local_s3, tmp_path / "cache")


@pytest.fixture
def stocked(site: Site, signed: None) -> Site:
    """A bucket with the modality's record, and credentials for it."""
    site.stock()
    return site


@pytest.fixture(scope="session")
def herd_of_session(local_s3: LocalS3) -> Iterator[Herd]:
    """Its parent imports torch, which takes seconds."""
    with herding(local_s3.env()) as herd:
        yield herd


@pytest.fixture
def herd(herd_of_session: Herd) -> Iterator[Herd]:
    """Processes to fork; those that a test left alive are killed after it."""
    yield herd_of_session
    herd_of_session.kill_all()
