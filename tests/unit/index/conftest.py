# SPDX-License-Identifier: Apache-2.0
"""A bucket with a clock of its own, and readers that are closed and audited at the end."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from s3ec.counters import Counters
from s3ec.testing.fault_store import Script
from s3ec.testing.memory_store import MemoryStore
from tests.support.clock import Clock
from tests.support.on_disk import audit_of
from tests.unit.index.corpus import Corpus, Reader


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def memory(clock: Clock) -> MemoryStore:
    return MemoryStore(clock=clock)


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def counters() -> Counters:
    return Counters()


@pytest.fixture
def corpus() -> Corpus:
    return Corpus()


@pytest.fixture
async def make_reader(corpus: Corpus, tmp_path: Path) -> AsyncIterator[Callable[..., Reader]]:
    """Make readers of one bucket, by default all on one folder."""
    made: list[Reader] = []

    def make(folder: str = "cache", **options: Any) -> Reader:
        made.append(Reader(corpus, tmp_path / folder, **options))
        return made[-1]

    yield make
    for reader in made:
        await reader.close()
        assert audit_of(reader.tier) == []


@pytest.fixture
def reader(make_reader: Callable[..., Reader]) -> Reader:
    return make_reader()
