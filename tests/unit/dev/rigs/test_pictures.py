# SPDX-License-Identifier: Apache-2.0
"""The pictures of the demo and of the tests: real, different, the same every time."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from s3ec.dev.rigs import pictures as pictures_module
from s3ec.dev.rigs.pictures import write_pictures
from s3ec.errors import ConfigError


def test_pictures_are_different_and_open(tmp_path: Path) -> None:
    paths = write_pictures(tmp_path / "new" / "folder", 20)
    assert len(paths) == 20
    pixels = set()
    for path in paths:
        with Image.open(path) as image:
            assert min(image.size) >= 100
            pixels.add(image.convert("RGB").tobytes())
    assert len(pixels) == 20


def test_default_holds_photographs_a_scan_and_pages(tmp_path: Path) -> None:
    names = [path.name for path in write_pictures(tmp_path)]
    assert len(names) == 12
    assert sum(name.startswith("photo-") for name in names) == 7
    assert any(name.endswith("page.png") and name.startswith("photo-") for name in names)
    for kind in ("letter", "table", "bar_chart"):
        assert any(kind in name for name in names)
    assert {Path(name).suffix for name in names} == {".png", ".jpg"}


def test_more_pictures_begin_with_the_same_ones(tmp_path: Path) -> None:
    few = write_pictures(tmp_path / "few", 12)
    many = write_pictures(tmp_path / "many", 25)
    for one, other in zip(few, many, strict=False):
        assert one.name == other.name
        assert one.read_bytes() == other.read_bytes()


@pytest.mark.parametrize("count", [0, 3])
def test_fewer_pictures_than_photographs_are_possible(tmp_path: Path, count: int) -> None:
    assert len(write_pictures(tmp_path, count)) == count


def test_missing_photograph_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures_module, "photo_folder", lambda: tmp_path / "empty")
    with pytest.raises(ConfigError, match=r"astronaut\.png"):
        write_pictures(tmp_path)
