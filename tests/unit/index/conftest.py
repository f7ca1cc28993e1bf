# SPDX-License-Identifier: Apache-2.0
"""A bucket with a clock of its own, and readers that are closed at the end."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from s3ec.index import maker
from s3ec.index.names import ServerClock
from tests.unit.index.corpus import Corpus, Reader


@pytest.fixture
def corpus(monkeypatch: pytest.MonkeyPatch) -> Corpus:
    made = Corpus()
    # A maker's clock moves with the server's, however long the machine takes.
    monkeypatch.setattr(maker, "ServerClock", partial(ServerClock, clock=made.clock))
    return made


@pytest.fixture
async def make_reader(corpus: Corpus, tmp_path: Path) -> AsyncIterator[Callable[..., Reader]]:
    """Make readers of one bucket, by default all on one folder."""
    made: list[Reader] = []

    def make(folder: str = "node", **options: Any) -> Reader:
        made.append(Reader(corpus, tmp_path / folder, **options))
        return made[-1]

    yield make
    for reader in made:
        await reader.close()


@pytest.fixture
def reader(make_reader: Callable[..., Reader]) -> Reader:
    return make_reader()
