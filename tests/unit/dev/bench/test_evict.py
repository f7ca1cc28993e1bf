# SPDX-License-Identifier: Apache-2.0
"""A tier that two processes turn over: nothing granted is lost, and the bench would notice."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Any

import pytest

from s3ec.dev.bench import evict
from s3ec.tier import Tier
from tests.support.on_disk import audit_of, found_in

pytestmark = pytest.mark.slow  # four processes

SECONDS = 3.0


class Unheld(evict.Pins):
    """Gives out the entry's path, and holds nothing."""

    def grant(self, number: int) -> Any:
        return self._entries.path(evict.key_of(evict.identifier_at(number)))[0]

    def release(self, granted: Any) -> None:
        """Nothing is held."""

    @staticmethod
    def load(granted: Any) -> bytes | None:
        try:
            return Path(granted).read_bytes()
        except FileNotFoundError:
            return None


class Mistaken(evict.Pins):
    """Reads another entry."""

    @staticmethod
    def load(granted: Any) -> bytes | None:
        return evict.entry_at(10**6)


class Refusing(evict.Pins):
    """Nobody else comes to evict."""

    def __init__(self, tier: Tier) -> None:
        super().__init__(tier)
        self._fd = os.open(tier.folders.evict_lock, os.O_RDWR)
        fcntl.flock(self._fd, fcntl.LOCK_EX)


@pytest.mark.parametrize("entries", [300, 12])
def test_nothing_granted_is_lost_or_wrong_and_no_publish_is_refused(
    tmp_path: Path, entries: int
) -> None:
    found = evict.turn_over(tmp_path / "tier", entries, SECONDS, evict.Pins, print)
    assert found[evict.LOADS] > 0
    assert found[evict.TURNOVER] > 0
    assert {row: found.get(row, 0) for row in (evict.LOST, evict.WRONG, evict.REFUSED)} == {
        evict.LOST: 0,
        evict.WRONG: 0,
        evict.REFUSED: 0,
    }
    assert audit_of(found_in(tmp_path / "tier")) == []


@pytest.mark.parametrize(
    ("grants", "row"),
    [(Unheld, evict.LOST), (Mistaken, evict.WRONG), (Refusing, evict.REFUSED)],
)
def test_what_is_lost_wrong_or_refused_is_counted(
    tmp_path: Path, grants: type[evict.Grants], row: str
) -> None:
    assert evict.turn_over(tmp_path / "tier", 12, SECONDS, grants, print)[row] > 0
