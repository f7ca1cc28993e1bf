# SPDX-License-Identifier: Apache-2.0
"""The plots of README and docs, of made-up data but for that of the code's own tables."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from PIL import Image

from s3ec.dev import plots
from tests.unit.dev.bench import fakes


@pytest.fixture
def matplotlib() -> None:
    pytest.importorskip("matplotlib")


def colours_of(path: Path) -> set[tuple[int, ...]]:
    with Image.open(io.BytesIO(path.read_bytes())) as image:
        return {colour for _, colour in image.convert("RGB").getcolors(2**20) or ()}  # type: ignore[misc]


def rgb(colour: str) -> tuple[int, ...]:
    return tuple(bytes.fromhex(colour[1:]))


def test_plots_of_rag_say_that_their_encoder_is_simulated() -> None:
    machine = {"cpus": 2, "cpu_model": "CPU", "load_1min": 1.2}
    about = {"requests": 16, "object_bytes": 2_752_512, "encoder": "sleeps 1.6 s; the engines run"}
    assert plots.rag_caption(about, machine) == (
        "16 questions, 2.75 MB each embedding; simulated encoder: sleeps 1.6 s for each page\n"
        "2 x CPU, load 1, no GPU"
    )


@pytest.mark.slow
@pytest.mark.usefixtures("matplotlib")
def test_the_plot_of_rag_shows_every_configuration_and_is_the_same_again(tmp_path: Path) -> None:
    result, once, again = tmp_path / "rag.json", tmp_path / "once.png", tmp_path / "again.png"
    result.write_text(json.dumps(fakes.rag_result().to_json()))
    for path in (once, again):
        plots.main(["rag", str(result), str(path)])
    assert once.read_bytes() == again.read_bytes()
    assert {rgb(plots.RAG_COLOURS[number]) for number in (1, 2, 3, 4)} <= colours_of(once)


@pytest.mark.slow
@pytest.mark.usefixtures("matplotlib")
def test_the_plot_of_what_pays_is_an_svg_that_is_the_same_again(tmp_path: Path) -> None:
    once, again = tmp_path / "once.svg", tmp_path / "again.svg"
    for path in (once, again):
        plots.main(["payoff", str(path)])
    assert once.read_bytes() == again.read_bytes()
    assert "</svg>" in once.read_text()
