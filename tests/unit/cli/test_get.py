# SPDX-License-Identifier: Apache-2.0
"""get: verified bytes, whole files, no surprises for files that are there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.unit.cli.conftest import Cli
from tests.unit.cli.corpus import MODEL, Corpus, content_hash, entry_bytes

IDENTIFIER = content_hash("a")


@pytest.fixture
def stored(corpus: Corpus) -> bytes:
    """One entry, which the bucket holds."""
    return corpus.entry(corpus.namespace(MODEL), IDENTIFIER)


def test_get_saves_the_bytes_of_the_bucket(cli: Cli, stored: bytes, tmp_path: Path) -> None:
    target = tmp_path / "out.safetensors"
    out = cli("get", IDENTIFIER[:10], "-o", str(target))
    assert target.read_bytes() == stored
    assert out.stdout == ""
    assert "every byte checked" in out.stderr
    assert os.listdir(tmp_path) == [target.name]


def test_get_into_a_folder_takes_the_entrys_name(cli: Cli, stored: bytes, tmp_path: Path) -> None:
    found = cli.json("get", IDENTIFIER, "-o", str(tmp_path))
    assert found["file"] == str(tmp_path / f"{IDENTIFIER}.safetensors")
    assert found["verified"]
    assert Path(found["file"]).read_bytes() == stored


def test_saved_file_follows_the_umask(cli: Cli, stored: bytes, tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        cli("get", IDENTIFIER, "-o", str(tmp_path / "f"))
    finally:
        os.umask(before)
    assert (tmp_path / "f").stat().st_mode & 0o777 == 0o644


def test_get_refuses_an_existing_file_unless_forced(
    cli: Cli, stored: bytes, tmp_path: Path
) -> None:
    target = tmp_path / "out"
    target.write_bytes(b"mine")
    assert "--force" in cli("get", IDENTIFIER, "-o", str(target), code=2).stderr
    assert target.read_bytes() == b"mine"
    cli("get", IDENTIFIER, "-o", str(target), "--force")
    assert target.read_bytes() == stored
    link = tmp_path / "link"
    link.symlink_to("nowhere")
    assert "--force" in cli("get", IDENTIFIER, "-o", str(link), code=2).stderr


def test_get_of_a_corrupt_entry_saves_nothing(cli: Cli, corpus: Corpus, tmp_path: Path) -> None:
    name = corpus.namespace(MODEL)
    blob = bytearray(entry_bytes(IDENTIFIER, name))
    blob[-1] ^= 1
    corpus.entry(name, IDENTIFIER, bytes(blob))
    assert "(checksum)" in cli("get", IDENTIFIER, "-o", str(tmp_path / "f"), code=1).stderr
    assert os.listdir(tmp_path) == []


def test_get_to_a_pipe_writes_the_entry_alone(cli: Cli, stored: bytes) -> None:
    assert cli("get", IDENTIFIER, "-o", "-").stdout_bytes == stored


def test_get_to_stdout_refuses_json(cli: Cli, stored: bytes) -> None:
    assert "pipe" in cli("get", IDENTIFIER, "-o", "-", "--json", code=2).stderr


def test_a_large_entry_comes_by_ranges_and_is_the_same(
    cli: Cli, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if 512 bytes were large."""
    monkeypatch.setattr("s3ec.corpus.entries.PART_BYTES", 100)
    monkeypatch.setattr("s3ec.store.base.PART_BYTES", 100)
    told = []
    monkeypatch.setattr("s3ec.cli.output.Progress.__call__", lambda _, *what: told.append(what))
    blob = corpus.entry(corpus.namespace(MODEL), IDENTIFIER)
    cli("get", IDENTIFIER, "-o", str(tmp_path / "x"))
    assert (tmp_path / "x").read_bytes() == blob
    assert len(told) == -(-len(blob) // 100)
    assert told == sorted(told)  # of ranges that come in any order
    assert told[-1] == ("downloading", len(blob), len(blob))
