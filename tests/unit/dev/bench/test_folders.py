# SPDX-License-Identifier: Apache-2.0
"""Scratch in memory is given back, also that of a benchmark that was killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from s3ec.dev.bench import folders


@pytest.fixture
def tmpfs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder that is taken for the tmpfs."""
    monkeypatch.setattr(folders, "TMPFS", tmp_path)
    monkeypatch.setattr(folders, "is_tmpfs", lambda _path: True)
    return tmp_path


def test_folder_is_empty_and_gone_afterwards(tmpfs: Path) -> None:
    with folders.memory_folder(tmpfs / "otherwise") as (folder, on_tmpfs):
        assert on_tmpfs
        assert folder.parent == tmpfs
        assert list(folder.iterdir()) == []
        (folder / "file").touch()
    assert not folder.exists()


def test_left_over_of_a_killed_one_is_deleted_and_one_in_use_is_not(tmpfs: Path) -> None:
    left = tmpfs / "s3ec-bench-left"
    left.mkdir()
    (left / "file").touch()
    foreign = tmpfs / "other"
    foreign.mkdir()
    with (
        folders.memory_folder(tmpfs / "otherwise") as (first, _),
        folders.memory_folder(tmpfs / "otherwise") as (second, _),
    ):
        assert first != second
        assert first.is_dir()
        assert not left.exists()
        assert foreign.is_dir()


def test_without_tmpfs_the_other_folder_is_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(folders, "is_tmpfs", lambda _path: False)
    with folders.memory_folder(tmp_path / "otherwise") as made:
        assert made == (tmp_path / "otherwise", False)
        assert made[0].is_dir()
