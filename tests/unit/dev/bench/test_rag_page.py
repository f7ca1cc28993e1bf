# SPDX-License-Identifier: Apache-2.0
"""The page of ``bench rag``, and whether a browser draws it."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from PIL import Image

from s3ec.dev.bench import rag, rag_page, svg
from s3ec.dev.bench.result import Result, Row
from tests.unit.dev.bench import fakes

_WIDTH, _HEIGHT = 1200, 1700


def test_the_page_needs_no_other_file() -> None:
    page = rag_page.page(fakes.rag_result())

    assert not re.search(r"<script|<link|<img|@import|url\(|(?:src|href)=", page)
    assert "http" not in page
    assert page.count('<svg class="chart"') == 4


def test_names_and_reasons_from_outside_are_escaped() -> None:
    page = rag_page.page(fakes.rag_result())

    assert "&lt;questions&gt;" in page
    assert "nothing can be mounted here: &lt;none&gt;" in page
    assert "<none>" not in page


def test_a_missed_reach_is_said_in_its_tile() -> None:
    assert ": missed" not in rag_page.page(fakes.rag_result())
    assert "must be at most 25%: missed" in rag_page.page(fakes.rag_result(missed=True))


def test_a_run_that_measured_nothing_says_why() -> None:
    rows = [Row(spec, None, 0, {"why": "vLLM is not <here>"}) for spec in rag.ROWS]

    page = rag_page.page(Result("rag", fakes.MACHINE, rows))

    assert "vLLM is not &lt;here&gt;" in page
    assert 'class="chart"' not in page


def test_the_table_has_a_line_for_each_leg() -> None:
    table = rag.table(fakes.rag_result())

    assert table is not None
    assert table.row_count == 5


@pytest.mark.parametrize("values", [[0.001, 0.002], [0.5, 900.0], [3.0], [0.0, 1.0], [1e6]])
def test_ticks_are_few_and_bars_stay_inside(values: list[float]) -> None:
    drawn = svg.bars(
        [svg.Bar(f"bar {value}", 1, value, "label") for value in values], unit="s", about="x"
    )

    ends = [
        float(x) + float(w)
        for x, w in re.findall(r'rect class="s1" x="(\S+)".*?width="(\S+)"', drawn)
    ]
    assert len(ends) == len(values)
    assert all(0 < end < svg.WIDTH for end in ends)
    assert 1 <= drawn.count('class="grid"') <= 12


@pytest.mark.slow
def test_a_browser_draws_the_charts(tmp_path: Path) -> None:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("there is no chromium here")
    page = tmp_path / "rag.html"
    page.write_text(rag_page.page(fakes.rag_result()), encoding="utf-8")
    shot = tmp_path / "rag.png"

    def browse(*what: str) -> str:
        done = subprocess.run(
            [
                browser,
                *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic"),
                *("--no-first-run", "--disable-background-networking", "--disable-sync"),
                *("--disable-component-update", "--hide-scrollbars"),
                f"--user-data-dir={tmp_path / 'profile'}",
                f"--window-size={_WIDTH},{_HEIGHT}",
                *what,
                page.as_uri(),
            ],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert browse("--dump-dom").count('<svg class="chart"') == 4
    browse(f"--screenshot={shot}")
    with Image.open(shot) as image:
        assert image.size == (_WIDTH, _HEIGHT)
        colours = {colour for _, colour in image.convert("RGB").getcolors(2**20) or ()}
    drawn = {number: light for number, (light, _) in rag_page.COLOURS.items()}
    for number in (1, 2, 3, 5):
        assert tuple(bytes.fromhex(drawn[number][1:])) in colours, f"no bar of ({number})"


def test_every_series_has_a_colour_for_light_and_for_dark() -> None:
    page = rag_page.page(fakes.rag_result())

    for number in rag_page.COLOURS:
        assert page.count(f"--s{number}:") == 2
        assert f".s{number} {{ fill: var(--s{number}); }}" in page
