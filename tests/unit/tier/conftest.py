# SPDX-License-Identifier: Apache-2.0
"""Tiers for tests: closed at the end, and audited where nothing was broken on purpose."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import pytest

from s3ec.counters import Counters
from s3ec.tier import evictor
from s3ec.tier.tier import Tier
from tests.support.clock import Clock
from tests.support.disks import as_plain_user, read_only, small_tmpfs
from tests.support.on_disk import Asleep, audit_of
from tests.unit.tier.cases import NAMESPACE, disk_clock


@pytest.fixture(autouse=True)
def quiet(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """No background eviction in this process, so that tests can tell what is evicted when.

    Children have theirs, and so have the tests that take the fixture ``background``.
    """
    if "background" not in request.fixturenames:
        monkeypatch.setattr(evictor, "Background", Asleep)


@pytest.fixture
def background() -> None:
    """The eviction thread runs in this test."""


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever holds a lock for seconds is busy, and not stopped."""
    for name in ("TURN_WAIT_S", "TOTAL_LOCK_TIMEOUT_S"):
        monkeypatch.setattr(evictor, name, 60.0)


@pytest.fixture
def clock() -> Clock:
    return disk_clock()


@pytest.fixture
def counters() -> Counters:
    return Counters()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def make_tier(root: Path, counters: Counters, clock: Clock) -> Iterator[Callable[..., Tier]]:
    """Make and open tiers, by default all on one folder."""
    made: list[Tier] = []

    def make(
        folder: Path = root,
        *,
        namespace: str = NAMESPACE,
        budget_bytes: int = 1 << 30,
        min_free_bytes: int = 0,
        evicts: bool = True,
        check_values: bool = False,
    ) -> Tier:
        tier = Tier(
            folder,
            namespace,
            budget_bytes=budget_bytes,
            min_free_bytes=min_free_bytes,
            counters=counters,
            clock=clock,
            evicts=evicts,
            check_values=check_values,
        )
        made.append(tier)
        return tier

    yield make
    for tier in made:
        tier.close()


@pytest.fixture
def tier(make_tier: Callable[..., Tier]) -> Iterator[Tier]:
    """One that must be in order at the end."""
    tier = make_tier()
    yield tier
    assert audit_of(tier) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 1 MiB and 64 files of its own."""
    with small_tmpfs(tmp_path / "disk", size=2**20, inodes=64) as folder:
        yield folder


@pytest.fixture
def large_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 8 MiB of its own."""
    with small_tmpfs(tmp_path / "disk", size=2**23, inodes=0) as folder:
        yield folder


@pytest.fixture
def frozen(small_disk: Path) -> Callable[[], AbstractContextManager[None]]:
    """While entered, the small disk is read-only for whoever comes by its path."""
    return partial(read_only, small_disk)


@pytest.fixture
def plain_user(make_tier: Callable[..., Tier]) -> Iterator[Path]:
    """Permissions that hold: a root user becomes nobody. Gives a folder of that user.

    After make_tier, whose own folder belongs to root.
    """
    with tempfile.TemporaryDirectory() as folder, as_plain_user(folder):
        yield Path(folder)
