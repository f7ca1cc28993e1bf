# SPDX-License-Identifier: Apache-2.0
"""The audit: it finds what is wrong, and bears what others do meanwhile."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from s3ec.tier import inspection
from s3ec.tier.tier import Tier
from tests.support.on_disk import audit_of, evict
from tests.unit.tier.cases import entry, file_of, key_at
from tests.unit.tier.test_entries import forged_size

KEY = key_at(0)


def test_check_finds_wrong_modes(tier: Tier, root: Path) -> None:
    tier.writer.publish(KEY, [entry(KEY)])
    path = file_of(root, KEY)
    path.chmod(0o644)
    path.parent.chmod(0o755)
    root.chmod(0o755)  # the user's own choice
    complaints = audit_of(tier)
    assert len(complaints) == 2
    path.chmod(0o600)
    path.parent.chmod(0o700)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_check_finds_other_owners(tier: Tier, root: Path) -> None:
    tier.writer.publish(KEY, [entry(KEY)])
    path = file_of(root, KEY)
    for target in (path, path.parent):
        os.chown(target, 65534, 65534)
    assert ["belongs to uid 65534" in complaint for complaint in audit_of(tier)] == [True, True]
    for target in (path, path.parent):
        os.chown(target, 0, 0)


def test_check_does_not_read_a_forged_size_into_memory(tier: Tier, root: Path) -> None:
    tier.writer.publish(KEY, [forged_size()])
    os.truncate(file_of(root, KEY), 1 << 33)  # sparse
    (complaint,) = audit_of(tier)
    assert "expected" in complaint
    evict(tier, KEY)


def test_check_bears_entries_that_vanish_meanwhile(
    tier: Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier.writer.publish(KEY, [entry(KEY)])
    open_entry = inspection.open_entry

    def vanish_first(path: str) -> int:
        evict(tier, KEY)
        return open_entry(path)

    monkeypatch.setattr("s3ec.tier.inspection.open_entry", vanish_first)
    assert audit_of(tier) == []
