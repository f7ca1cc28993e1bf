# SPDX-License-Identifier: Apache-2.0
"""The made-up bases of ``bench index``, their readers and its child processes."""

from __future__ import annotations

import mmap
import os
import shutil
from collections import Counter, namedtuple
from multiprocessing.connection import Connection
from pathlib import Path
from typing import get_args

import pytest

from s3ec.dev.bench import command
from s3ec.dev.bench.children import Child, anonymous_bytes, anonymous_bytes_of, most_resident_bytes
from s3ec.dev.bench.index_lookups import time_lookups
from s3ec.dev.bench.index_made import LAYOUT, Keys, Made, Mode, keys_of, make, reader
from s3ec.identity import Key

_MIB = 2**20


def test_too_little_scratch_space_is_said_before_any_of_it_is_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage(10**9, 10**9, 0))
    result = command.run_here("index", quick=True, say=lambda _line: None, keys=10**8)
    assert [row.spec.name for row in result.rows] == [
        spec.name for spec in command.load("index").rows
    ]
    assert all(row.value is None and "1e+08 keys need" in row.detail["why"] for row in result.rows)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make(tmp_path_factory.mktemp("index"), 20_000)


@pytest.mark.parametrize("mode", get_args(Mode))
def test_reader_opens_the_files_that_are_here_and_downloads_none(made: Made, mode: Mode) -> None:
    keys = Keys(made.base())
    with reader(made, mode) as node:
        assert all(map(node.index.maybe_contains, keys.hits(500)))
        assert not all(map(node.index.maybe_contains, keys.misses(500)))
        assert node.counters.get("index.downloads") == 0
        assert all(map(node.index.holds, keys.hits(10))) == (mode == "exact")


def test_files_of_a_base_are_named_as_in_the_bucket(made: Made) -> None:
    assert made.names[-1] == LAYOUT.head(1)
    assert all((made.folder / name).is_file() for name in made.names)
    sizes = [(made.folder / name).stat().st_size for name, _ in made.exact_files()]
    assert sizes == [nbytes for _, nbytes in made.exact_files()]


def test_keys_of_two_rounds_are_not_the_same(made: Made) -> None:
    keys = Keys(made.base())
    for fresh in (keys.hits, keys.misses):
        first, second = ({key.digest for key in fresh(100)} for _ in range(2))
        assert len(first & second) < 10


def test_every_key_is_looked_up_once() -> None:
    asked: Counter[bytes] = Counter()

    def contains(key: Key) -> None:
        asked[key.digest] += 1

    keys = keys_of([number.to_bytes(16, "big") for number in range(500)])
    times = time_lookups(contains, keys)
    assert asked == Counter(key.digest for key in keys)
    assert len(times.each) == 250
    assert times.in_a_row > 0


def test_memory_that_is_no_file_is_counted_and_mapped_files_are_not(tmp_path: Path) -> None:
    before = anonymous_bytes()
    mine = bytearray(os.urandom(64 * _MIB))
    with_mine = anonymous_bytes()
    assert with_mine - before >= 60 * _MIB
    assert anonymous_bytes_of(os.getpid()) >= 60 * _MIB
    path = tmp_path / "file"
    path.write_bytes(mine)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
        assert view.find(b"\0" * 64) == -1  # all of it is read
        assert anonymous_bytes() - with_mine < 32 * _MIB
        assert most_resident_bytes() >= 120 * _MIB


def _echo(pipe: Connection, factor: int) -> None:
    while True:
        pipe.send(factor * pipe.recv())


@pytest.mark.slow
def test_child_answers_until_nobody_asks(capfd: pytest.CaptureFixture[str]) -> None:
    with Child(_echo, 3) as child:
        child.tell(2)
        assert child.answer() == 6
        child.tell(None)
        with pytest.raises(RuntimeError, match="ended"):
            child.answer()
    assert "TypeError" in capfd.readouterr().err
