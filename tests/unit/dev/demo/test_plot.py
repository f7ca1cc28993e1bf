# SPDX-License-Identifier: Apache-2.0
"""Time per picture as bars."""

from __future__ import annotations

import importlib.util
import io
from pathlib import Path

import pytest
from rich.console import Console

from s3ec.dev.demo.plot import bars, write_png
from tests.unit.dev.demo.cases import make_report


def test_bars_are_as_long_as_the_times_say() -> None:
    console = Console(file=io.StringIO(), width=120)
    console.print(bars(make_report()))
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    with_s3ec, without = (line.count("\u2588") for line in lines[:2])
    assert (with_s3ec, without) == (5, 48)  # 0.5 s and 5 s
    assert "p0.png" in lines[0]
    assert lines[1].split()[0] == "without"


def test_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert write_png(make_report(), tmp_path / "report.png")
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_there_is_no_png(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert not write_png(make_report(), tmp_path / "report.png")
    assert not (tmp_path / "report.png").exists()
