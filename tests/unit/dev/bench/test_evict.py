# SPDX-License-Identifier: Apache-2.0
"""A tier that two processes turn over: nothing granted is lost, and the bench would notice."""

from __future__ import annotations

import multiprocessing
import threading
from pathlib import Path
from typing import Any

import pytest

from s3ec.dev.bench import evict
from s3ec.tier import evictor
from tests.support.on_disk import audit_of, found_in

_churn = evict.churn


def patient_churn(*args: Any) -> None:
    """Whoever evicts for seconds is busy, and not stopped."""
    evictor.TURN_WAIT_S = evictor.TOTAL_LOCK_TIMEOUT_S = 60.0
    _churn(*args)


@pytest.mark.slow  # four processes
@pytest.mark.parametrize("entries", [300, 12])
def test_nothing_granted_is_lost_or_wrong_and_no_publish_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entries: int
) -> None:
    monkeypatch.setattr(evict, "churn", patient_churn)
    found = evict.turn_over(tmp_path / "tier", entries, 3.0, print)
    assert found[evict.LOADS] > 0
    assert [found[row] for row in (evict.LOST, evict.WRONG, evict.REFUSED)] == [0, 0, 0]
    assert audit_of(found_in(tmp_path / "tier")) == []


def test_a_file_that_is_gone_is_lost_and_one_of_another_entry_is_wrong() -> None:
    files = {1: evict.values_at(1), 2: None, 3: evict.values_at(1), 4: evict.values_at(4)[:-1]}
    ours, theirs = multiprocessing.Pipe()
    reader = threading.Thread(target=evict.read, args=(theirs, files.get))
    reader.start()
    ours.send({number: number for number in files})
    assert ours.recv() == {evict.LOADS: 4, evict.LOST: 1, evict.WRONG: 2}
    ours.close()
    reader.join()
