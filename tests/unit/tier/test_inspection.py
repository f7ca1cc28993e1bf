# SPDX-License-Identifier: Apache-2.0
"""The audit: it finds what is wrong, and bears what others do meanwhile."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from s3ec.tier import Tier, inspection
from tests.support.on_disk import audit_of, evict
from tests.unit.tier.cases import OTHER_NAMESPACE, MakeTier, entry, file_of, key_at, key_of
from tests.unit.tier.test_entries import forged_size

KEY = key_at(0)


def test_check_is_empty_for_a_tier_in_use(make_tier: MakeTier) -> None:
    one, two = make_tier(), make_tier(namespace=OTHER_NAMESPACE)
    held = []
    for number in range(9):
        key = key_at(number)
        one.writer.publish(key, [entry(key)])
        two.writer.publish(key, [entry(key, namespace=OTHER_NAMESPACE)])
        held.append(one.entries.open(key))
    evict(one, key_at(0))
    one.entries.drop_bad(key_at(1), "checksum")
    assert audit_of(one) == audit_of(two) == []
    assert len(held) == 9


def test_check_finds_an_entry_under_another_entrys_name(tier: Tier, root: Path) -> None:
    one, two = key_of("a" * 64), key_of("b" * 64)
    tier.writer.publish(one, [entry(one)])
    file_of(root, two).parent.mkdir(mode=0o700)
    file_of(root, two).touch(mode=0o600)
    file_of(root, two).write_bytes(entry(one))
    (complaint,) = audit_of(tier)
    assert "another identifier" in complaint
    file_of(root, two).unlink()


def test_check_finds_an_entry_in_another_namespaces_folder(tier: Tier, root: Path) -> None:
    tier.writer.publish(KEY, [entry(KEY)])
    path = file_of(root, KEY, OTHER_NAMESPACE)
    for folder in reversed(path.parents[: len(KEY.name.split("/"))]):
        folder.mkdir(mode=0o700)
    path.write_bytes(entry(KEY))
    path.chmod(0o600)
    (complaint,) = audit_of(tier)
    assert "written for namespace" in complaint
    path.unlink()


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
