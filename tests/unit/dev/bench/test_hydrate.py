# SPDX-License-Identifier: Apache-2.0
"""What each round of ``bench hydrate`` begins with."""

from __future__ import annotations

from pathlib import Path

from s3ec.dev.bench import hydrate


def test_a_round_finds_an_empty_folder_and_no_file_was_deleted(tmp_path: Path) -> None:
    folder = tmp_path / "copies"
    found: list[list[Path]] = []

    def fill() -> None:
        found.append(list(folder.iterdir()))
        (folder / "ab").mkdir()
        (folder / "ab" / "entry").write_bytes(b"bytes")

    for _ in range(3):
        hydrate._sample(folder, fill)
    assert found == [[], [], []]
    assert (folder / "ab" / "entry").read_bytes() == b"bytes"
    used = [path for path in tmp_path.glob("*/ab/entry") if folder not in path.parents]
    assert [path.stat().st_size for path in used] == [0, 0]
