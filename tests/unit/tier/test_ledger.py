# SPDX-License-Identifier: Apache-2.0
"""The ledger: what was verified is believed by the processes of this boot, and by nobody else."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from s3ec.counters import Counters
from s3ec.tier import Tier, ledger
from s3ec.tier.files import DiskErrors
from s3ec.tier.ledger import Ledger, Verified
from tests.unit.tier.cases import (
    NAMESPACE,
    OTHER_NAMESPACE,
    even,
    fill,
    opened,
)


@pytest.fixture
def make_ledger(tier: Tier, counters: Counters) -> Callable[..., Ledger]:
    """As a process makes one at its start."""

    def make(namespace: str = NAMESPACE) -> Ledger:
        return Ledger(tier.folders, namespace, DiskErrors(tier.folders.root, counters))

    return make


def held(tier: Tier, number: int, *, seconds: float) -> tuple[bytes, Verified]:
    """An entry that was verified at that time."""
    if not tier.entries.contains(even(number)):
        fill(tier, number)
    return even(number).digest, Verified(opened(tier, even(number)).inode, seconds)


def test_what_one_process_notes_the_next_one_reads(
    tier: Tier, make_ledger: Callable[..., Ledger], counters: Counters
) -> None:
    assert make_ledger().read() == {}
    noted = [held(tier, number, seconds=100.5 + number) for number in range(5)]
    make_ledger().append(noted[:3])
    make_ledger().append(noted[3:])
    assert make_ledger().read() == dict(noted)
    assert counters.get("tier.errors") == 0


def test_namespaces_share_the_file_and_not_what_they_know(
    tier: Tier, make_ledger: Callable[..., Ledger]
) -> None:
    one, two = held(tier, 0, seconds=5.0), held(tier, 1, seconds=6.0)
    make_ledger().append([one])
    make_ledger(OTHER_NAMESPACE).append([two])
    assert make_ledger().read() == dict([one])
    assert make_ledger(OTHER_NAMESPACE).read() == dict([two])


def test_another_boot_believes_nothing(
    tier: Tier, make_ledger: Callable[..., Ledger], monkeypatch: pytest.MonkeyPatch
) -> None:
    noted = held(tier, 0, seconds=5.0)
    make_ledger().append([noted])
    with monkeypatch.context() as patch:
        patch.setattr(ledger, "boot_id", lambda: "another")
        assert make_ledger().read() == {}
    assert make_ledger().read() == dict([noted])


@pytest.mark.parametrize("at", range(0, ledger.RECORD_BYTES, 5))
def test_a_damaged_record_is_lost_alone(
    tier: Tier, make_ledger: Callable[..., Ledger], counters: Counters, at: int
) -> None:
    noted = [held(tier, number, seconds=5.0) for number in range(3)]
    make_ledger().append(noted)
    path = tier.folders.ledger
    blob = bytearray(path.read_bytes())
    blob[ledger.RECORD_BYTES + at] ^= 1
    path.write_bytes(blob)
    assert make_ledger().read() == dict([noted[0], noted[2]])
    assert counters.get("tier.errors") == 0


def test_a_large_one_is_begun_anew(
    tier: Tier, make_ledger: Callable[..., Ledger], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger, "LARGEST_BYTES", 10 * ledger.RECORD_BYTES)
    noted = held(tier, 0, seconds=5.0)
    for _ in range(55):
        make_ledger().append([noted])
    assert tier.folders.ledger.stat().st_size == 5 * ledger.RECORD_BYTES
    assert make_ledger().read() == dict([noted])


@pytest.mark.parametrize("kind", ["folder", "symlink", "pipe"])
def test_what_cannot_be_read_or_written_is_counted_and_not_waited_for(
    tier: Tier, make_ledger: Callable[..., Ledger], counters: Counters, tmp_path: Path, kind: str
) -> None:
    path, outside = tier.folders.ledger, tmp_path / "outside"
    path.unlink(missing_ok=True)
    if kind == "folder":
        path.mkdir(mode=0o700)
    elif kind == "symlink":
        path.symlink_to(outside)
    else:
        os.mkfifo(path, 0o600)
    assert make_ledger().read() == {}
    make_ledger().append([held(tier, 0, seconds=5.0)])
    assert counters.get("tier.errors") >= 1
    assert not outside.exists()
    if kind == "folder":
        path.rmdir()
    else:
        path.unlink()


def test_it_is_private_and_made_again_with_its_folder(
    tier: Tier, root: Path, make_ledger: Callable[..., Ledger], counters: Counters
) -> None:
    noted = held(tier, 0, seconds=5.0)
    make_ledger().append([noted])
    assert tier.folders.ledger.stat().st_mode & 0o777 == 0o600
    shutil.rmtree(root)
    assert make_ledger().read() == {}
    make_ledger().append([noted])
    assert make_ledger().read() == dict([noted])
    assert counters.get("tier.errors") == 0


def test_many_may_note_at_once(tier: Tier, make_ledger: Callable[..., Ledger]) -> None:
    noted = [held(tier, number, seconds=float(number)) for number in range(64)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: make_ledger().append([noted[number]]), range(64)))
    assert make_ledger().read() == dict(noted)
