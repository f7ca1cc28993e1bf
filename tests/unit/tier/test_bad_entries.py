# SPDX-License-Identifier: Apache-2.0
"""Corrupted, foreign and truncated files: never pinned, set aside, counted; and the audit."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from s3ec import codec
from s3ec.counters import Counters
from s3ec.tier import Tier, entries, inspection, pins
from s3ec.tier.files import Folders
from tests.on_disk import audit_of, evict, usage_of
from tests.unit.tier.cases import (
    NAMESPACE,
    OTHER_NAMESPACE,
    Clock,
    MakeTier,
    entry,
    file_of,
    files_below,
    key_at,
    key_of,
    pinned,
    served,
)

KEY = key_at(0)


def forged_size() -> bytes:
    """A true header of 10 GB with nothing behind it."""
    header = codec.parse_header(entry(KEY))
    return codec.encode_header(replace(header, shape=codec.Shape(10**6, 4000, "bfloat16")))


BAD = {
    "empty": (b"", "length"),
    "cut in the length": (entry(KEY)[:5], "length"),
    "cut in the header": (entry(KEY)[:100], "length"),
    "cut in the tensor": (entry(KEY)[:-1], "length"),
    "too long": (entry(KEY) + b"\0", "length"),
    "zeros": (bytes(len(entry(KEY))), "header"),
    "html": (b"<html><body>Sign in</body></html>" * 10, "header"),
    "huge header": (struct.pack("<Q", 1 << 40) + b"{}", "header"),
    "forged size": (forged_size(), "length"),
    "another image's": (entry(key_at(1)), "identifier"),
    "another model's": (entry(KEY, namespace=OTHER_NAMESPACE), "namespace"),
    "another version's": (entry(KEY).replace(b'"s3ec":"1"', b'"s3ec":"2"'), "version"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_entry_is_not_pinned_but_set_aside_and_counted(
    tier: Tier, root: Path, counters: Counters, name: str
) -> None:
    blob, reason = BAD[name]
    tier.writer.publish(KEY, [blob])
    (complaint,) = audit_of(tier)
    assert str(file_of(root, KEY)) in complaint
    assert tier.entries.pin(KEY) is None
    assert not tier.entries.contains(KEY)
    assert counters.get("tier.quarantined") == 1
    aside = root / "v1" / "quarantine" / f"{NAMESPACE}--{KEY.digest.hex()}-{reason}"
    assert aside.read_bytes() == blob
    assert usage_of(tier).pinned_nbytes == 0
    assert usage_of(tier).quarantined_nbytes == len(blob)
    assert tier.entries.pin(KEY) is None
    assert counters.get("tier.quarantined") == 1
    tier.writer.publish(KEY, [entry(KEY)])
    assert served(tier, KEY) == entry(KEY)


def test_flipped_bit_is_for_the_reader_who_quarantines_it(
    tier: Tier, root: Path, counters: Counters
) -> None:
    blob = bytearray(entry(KEY))
    blob[-1] ^= 1
    tier.writer.publish(KEY, [bytes(blob)])
    (complaint,) = audit_of(tier)
    assert "checksum" in complaint
    pin = pinned(tier, KEY)
    tier.entries.unpin(pin)
    tier.entries.quarantine(KEY, "checksum")
    tier.entries.quarantine(KEY, "checksum")
    assert counters.get("tier.quarantined") == 1
    assert tier.entries.pin(KEY) is None


@pytest.mark.parametrize("kind", ["symlink", "dangling", "pipe", "folder", "socket"])
def test_what_is_not_a_file_is_set_aside_and_not_followed_or_waited_for(
    make_tier: MakeTier, root: Path, tmp_path: Path, counters: Counters, kind: str
) -> None:
    tier = make_tier()
    path = file_of(root, KEY)
    path.parent.mkdir(mode=0o700, parents=True)
    outside = tmp_path / "outside"
    if kind in ("symlink", "dangling"):
        path.symlink_to(outside)
        if kind == "symlink":
            outside.write_bytes(entry(KEY))
    elif kind == "pipe":
        os.mkfifo(path, 0o600)
    elif kind == "folder":
        path.mkdir(mode=0o700)
    else:
        command = f"import os, socket; os.chdir({str(path.parent)!r}); "
        command += f"socket.socket(socket.AF_UNIX).bind({path.name!r})"
        subprocess.run([sys.executable, "-c", command], check=True)
        assert hasattr(socket, "AF_UNIX")
    assert not tier.entries.contains(KEY)
    if kind != "folder":  # an empty folder could be an adapter's
        assert str(path) in "".join(audit_of(tier))
    assert tier.entries.pin(KEY) is None
    assert counters.get("tier.quarantined") == 1
    assert not os.path.lexists(path)
    tier.writer.publish(KEY, [entry(KEY)])
    assert tier.entries.pin(KEY) is not None
    assert not outside.exists() or outside.read_bytes() == entry(KEY)


def test_better_entry_published_meanwhile_is_not_set_aside(
    tier: Tier, monkeypatch: pytest.MonkeyPatch, counters: Counters
) -> None:
    tier.writer.publish(KEY, [entry(key_at(1))])
    open_entry = pins.open_entry

    def publish_first(path: str) -> int:
        tier.writer.publish(KEY, [entry(KEY)])
        return open_entry(path)

    monkeypatch.setattr(pins, "open_entry", publish_first)
    assert tier.entries.pin(KEY) is None
    monkeypatch.undo()
    assert counters.get("tier.quarantined") == 0
    assert served(tier, KEY) == entry(KEY)


def test_quarantine_keeps_the_newest(tier: Tier, root: Path, clock: Clock) -> None:
    kept = entries.KEPT_FILES
    keys = [key_at(number) for number in range(kept + 8)]
    for key in keys:
        tier.writer.publish(key, [bytes(100)])
    for key in reversed(keys):  # the newest by quarantine, not by use
        clock.now_s += 1
        tier.entries.pin(key)
    expected = {f"{NAMESPACE}--{key.digest.hex()}-header" for key in keys[:kept]}
    assert files_below(root / "v1" / "quarantine") == expected


def test_quarantine_is_bounded_in_bytes_but_keeps_the_last(
    tier: Tier, root: Path, clock: Clock
) -> None:
    for number in range(3):
        key = key_at(number)
        tier.writer.publish(key, [b""])
        os.truncate(file_of(root, key), entries.KEPT_BYTES // 2 + 1)
        clock.now_s += 1
        tier.entries.quarantine(key, "size")
        assert len(files_below(root / "v1" / "quarantine")) == 1


def test_reason_cannot_leave_the_folder(tier: Tier, root: Path) -> None:
    tier.writer.publish(KEY, [entry(KEY)])
    tier.entries.quarantine(KEY, "../../../etc/Passwd\n")
    (name,) = files_below(root / "v1" / "quarantine")
    assert name == f"{NAMESPACE}--{KEY.digest.hex()}-etc-passwd"


def test_entry_that_cannot_be_set_aside_is_evicted(
    tier: Tier, monkeypatch: pytest.MonkeyPatch, counters: Counters
) -> None:
    def refuse(source: str, target: str) -> None:
        raise OSError("no")

    monkeypatch.setattr(os, "rename", refuse)
    tier.writer.publish(KEY, [entry(KEY)])
    tier.entries.quarantine(KEY, "checksum")
    assert not tier.entries.contains(KEY)
    assert counters.get("tier.quarantined") == 1
    assert counters.get("tier.errors") == 1


# check()


def test_check_is_empty_for_a_tier_in_use(make_tier: MakeTier) -> None:
    one, two = make_tier(), make_tier(namespace=OTHER_NAMESPACE)
    for number in range(9):
        key = key_at(number)
        one.writer.publish(key, [entry(key)])
        two.writer.publish(key, [entry(key, namespace=OTHER_NAMESPACE)])
        one.entries.pin(key)
    evict(one, key_at(0))
    one.entries.quarantine(key_at(1), "checksum")
    assert audit_of(one) == audit_of(two) == []


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


def test_check_finds_an_entry_that_eviction_counts_twice(tier: Tier, root: Path) -> None:
    one, two = key_of("a" * 64), key_of("b" * 64)
    tier.writer.publish(one, [entry(one)])
    file_of(root, two).parent.mkdir(mode=0o700)
    os.link(file_of(root, one), file_of(root, two))
    size = len(entry(one))
    assert f"eviction counts {2 * size} bytes, but there are {size}" in audit_of(tier)
    file_of(root, two).unlink()


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
    open_entry = pins.open_entry

    def vanish_first(path: str) -> int:
        evict(tier, KEY)
        return open_entry(path)

    monkeypatch.setattr("s3ec.tier.inspection.open_entry", vanish_first)
    assert audit_of(tier) == []


def test_check_bears_entries_that_come_and_go_between_its_walks(
    tier: Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = key_of("a" * 64), key_of("b" * 64)
    tier.writer.publish(one, [entry(one)])
    plain_bytes = inspection.plain_bytes

    def busy(folders: Folders, *, skip: set[str]) -> int:
        monkeypatch.setattr("s3ec.tier.inspection.plain_bytes", plain_bytes)
        tier.writer.publish(two, [entry(two)])
        found = plain_bytes(folders, skip=skip)
        evict(tier, one)  # as large, so that both counts around the walk agree
        return found

    monkeypatch.setattr("s3ec.tier.inspection.plain_bytes", busy)
    assert audit_of(tier) == []


def test_check_bears_a_writer_that_begins_between_its_walks(
    tier: Tier, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier.writer.publish(KEY, [entry(KEY)])
    plain_bytes = inspection.plain_bytes

    def busy(folders: Folders, *, skip: set[str]) -> int:
        file_of(root, KEY).with_name(f".tmp-{os.getpid()}-{'0' * 16}").write_bytes(b"half")
        return plain_bytes(folders, skip=skip)

    monkeypatch.setattr("s3ec.tier.inspection.plain_bytes", busy)
    assert audit_of(tier) == []
    for temp in root.rglob(".tmp-*"):
        temp.unlink()
