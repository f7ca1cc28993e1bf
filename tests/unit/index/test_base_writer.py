# SPDX-License-Identifier: Apache-2.0
"""Temporary folders of work that was killed do not pile up."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from s3ec.index.base_writer import temporary_folder

WORKER = """
import sys
from pathlib import Path
from s3ec.index.base_writer import temporary_folder

with temporary_folder(Path(sys.argv[1]), "rows") as folder:
    (folder / "rows" / "1").write_bytes(bytes(1000))
    print(folder, flush=True)
    sys.stdin.read()
"""


def test_folder_of_a_killed_process_is_removed_by_the_next_and_a_live_ones_is_not(
    tmp_path: Path,
) -> None:
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(tmp_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    folders = []
    for worker in workers:
        assert worker.stdout is not None
        folders.append(Path(worker.stdout.readline().strip()))
    workers[0].send_signal(signal.SIGKILL)
    workers[0].communicate()
    assert all((folder / "rows" / "1").exists() for folder in folders)
    with temporary_folder(tmp_path) as mine:
        assert mine.exists()
        assert [folder.exists() for folder in folders] == [False, True]
    workers[1].communicate()
    assert workers[1].returncode == 0
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_a_folder_of_ours_is_left_alone(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "lock").touch()
    place = tmp_path / "place"
    place.mkdir()
    (place / "s3ec-work-link").symlink_to(elsewhere)
    (place / "s3ec-work-file").touch()
    (place / "s3ec-work-new").mkdir()
    (place / "other").mkdir()
    before = sorted(place.iterdir())
    with temporary_folder(place):
        pass
    assert sorted(place.iterdir()) == before
    assert (elsewhere / "lock").exists()
    os.utime(place / "s3ec-work-new", (0, 0))  # made long ago, and never locked
    with temporary_folder(place):
        pass
    assert place / "s3ec-work-new" not in place.iterdir()


def test_a_folder_that_another_process_sweeps_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock, locked = fcntl.flock, []

    def late(fd: Any, how: int) -> None:
        locked.append(fd)
        if len(locked) == 1:
            with temporary_folder(tmp_path):  # another compaction begins
                pass
        flock(fd, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with temporary_folder(tmp_path, "rows") as folder:
        assert (folder / "rows").is_dir()
    assert list(tmp_path.iterdir()) == []
