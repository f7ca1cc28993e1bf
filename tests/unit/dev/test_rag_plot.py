# SPDX-License-Identifier: Apache-2.0
"""The plots of the README."""

from __future__ import annotations

import importlib.util
import io
from pathlib import Path

import pytest
from PIL import Image

from s3ec.dev import rag_plot
from s3ec.dev.bench import rag
from s3ec.dev.bench.rag_page import COLOURS
from s3ec.dev.bench.result import Result, Row
from tests.unit.dev.bench import fakes

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed"
    ),
]


def test_both_plots_are_written_with_the_colours_of_the_page(tmp_path: Path) -> None:
    paths = rag_plot.write(fakes.rag_result(), tmp_path)

    assert [path.name for path in paths] == ["rag-ttft.png", "rag-total.png"]
    for path in paths:
        with Image.open(io.BytesIO(path.read_bytes())) as image:
            colours = {colour for _, colour in image.convert("RGB").getcolors(2**20) or ()}
        for number in (1, 3, 5):
            assert tuple(bytes.fromhex(COLOURS[number][0][1:])) in colours


def test_the_same_result_gives_the_same_bytes(tmp_path: Path) -> None:
    once, again = (
        [path.read_bytes() for path in rag_plot.write(fakes.rag_result(), tmp_path)]
        for _ in range(2)
    )

    assert once == again


def test_a_result_without_legs_is_refused(tmp_path: Path) -> None:
    rows = [Row(spec, None, 0, {"why": "no vLLM"}) for spec in rag.ROWS]

    with pytest.raises(ValueError, match="nothing was measured"):
        rag_plot.write(Result("rag", fakes.MACHINE, rows), tmp_path)
