# SPDX-License-Identifier: Apache-2.0
"""Entries: bad files are never opened, but deleted and counted; and what is believed here."""

from __future__ import annotations

import errno
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from s3ec import codec
from s3ec.counters import Counters
from s3ec.tier import entries
from s3ec.tier.entries import LocalKeys
from s3ec.tier.tier import Tier
from tests.support.file_calls import open_below
from tests.support.on_disk import audit_of, usage_of
from tests.unit.tier.cases import (
    OTHER_NAMESPACE,
    MakeTier,
    entry,
    file_of,
    key_at,
    refusing,
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
def test_bad_entry_is_not_opened_but_deleted_and_counted(
    tier: Tier, root: Path, counters: Counters, name: str
) -> None:
    blob, _ = BAD[name]
    tier.writer.publish(KEY, [blob])
    (complaint,) = audit_of(tier)
    assert str(file_of(root, KEY)) in complaint
    assert tier.entries.open(KEY) is None
    assert not tier.entries.contains(KEY)
    assert counters.get("tier.bad_files") == 1
    assert open_below(root / "v1" / "objects") == []
    assert usage_of(tier).total_bytes == 0
    assert tier.entries.open(KEY) is None
    assert counters.get("tier.bad_files") == 1
    tier.writer.publish(KEY, [entry(KEY)])
    assert served(tier, KEY) == entry(KEY)


def test_flipped_bit_is_for_the_reader_who_deletes_it(
    tier: Tier, root: Path, counters: Counters
) -> None:
    blob = bytearray(entry(KEY))
    blob[-1] ^= 1
    tier.writer.publish(KEY, [bytes(blob)])
    (complaint,) = audit_of(tier)
    assert "checksum" in complaint
    assert tier.entries.open(KEY) is not None
    tier.entries.drop_bad(KEY, "checksum")
    tier.entries.drop_bad(KEY, "checksum")
    assert counters.get("tier.bad_files") == 1
    assert tier.entries.open(KEY) is None


@pytest.mark.parametrize("kind", ["symlink", "dangling", "pipe", "folder", "socket"])
def test_what_is_not_a_file_is_deleted_and_not_followed_or_waited_for(
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
    assert tier.entries.open(KEY) is None
    assert counters.get("tier.bad_files") == 1
    assert not os.path.lexists(path)
    tier.writer.publish(KEY, [entry(KEY)])
    assert tier.entries.open(KEY) is not None
    assert not outside.exists() or outside.read_bytes() == entry(KEY)


def test_better_entry_published_meanwhile_is_not_deleted(
    tier: Tier, monkeypatch: pytest.MonkeyPatch, counters: Counters
) -> None:
    tier.writer.publish(KEY, [entry(key_at(1))])
    open_entry = entries.open_entry

    def publish_meanwhile(path: str) -> int:
        fd = open_entry(path)
        tier.writer.publish(KEY, [entry(KEY)])
        return fd

    monkeypatch.setattr(entries, "open_entry", publish_meanwhile)
    assert tier.entries.open(KEY) is None
    monkeypatch.undo()
    assert counters.get("tier.bad_files") == 0
    assert served(tier, KEY) == entry(KEY)


def test_bad_entry_that_cannot_be_deleted_is_counted_and_tried_again(
    tier: Tier, monkeypatch: pytest.MonkeyPatch, counters: Counters
) -> None:
    tier.writer.publish(KEY, [entry(key_at(1))])
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", refusing(errno.EIO, "no"))
        tier.entries.drop_bad(KEY, "checksum")
    assert tier.entries.contains(KEY)
    assert (counters.get("tier.errors"), counters.get("tier.bad_files")) == (1, 0)
    assert tier.entries.open(KEY) is None  # by its header
    assert not tier.entries.contains(KEY)
    assert (counters.get("tier.errors"), counters.get("tier.bad_files")) == (1, 1)


def test_names_added_and_dropped_during_a_scan_are_kept_that_way(tier: Tier) -> None:
    """A scan takes seconds, and entries come and go meanwhile."""
    local, added, dropped = LocalKeys(), key_at(1), key_at(2)

    def scan() -> Iterator[str]:
        yield dropped.name
        local.add(added)
        local.discard(dropped)
        yield key_at(3).name

    local.replace(scan())
    assert local(added)
    assert not local(dropped)
    assert local(key_at(3))
