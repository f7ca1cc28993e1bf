# SPDX-License-Identifier: Apache-2.0
"""The plots of README and docs, of made-up data but for that of the code's own tables."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from PIL import Image

from s3ec.dev import plots
from s3ec.dev.bench import rag
from s3ec.dev.bench.context import Context, Result
from s3ec.dev.bench.rag_rig import Leg
from tests.unit.dev.bench import fakes

ABOUT = {"requests": 16, "object_bytes": 2_752_512, "encoder": "sleeps 1.6 s; the engines run"}


def leg(number: int, latency_ms: int, *first_s: float) -> Leg:
    more = {"seconds": sum(first_s), "references": 10, "allocations": 8}
    return Leg(number, latency_ms, first_s=[*first_s], **more)  # type: ignore[arg-type]


def test_plots_of_rag_say_that_their_encoder_is_simulated() -> None:
    assert plots.rag_caption(ABOUT, fakes.MACHINE) == (
        "16 questions, 2.75 MB each embedding; simulated encoder: sleeps 1.6 s for each page\n"
        "2 x Made-up <CPU>, load 1, no GPU"
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rag.png", "payoff.svg"])
def test_a_plot_is_the_same_again_and_that_of_rag_shows_every_configuration(
    name: str, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    legs = [leg(1, 0, 4, 5, 9), leg(2, 0, 4, 4, 9), leg(3, 80, 0.4, 0.5), leg(4, 0, 0.3, 0.6)]
    context = Context(rag.BENCH, quick=False, scratch=Path(), say=lambda _: None)
    rag.report(context, legs, ABOUT)
    result, once, again = tmp_path / "rag.json", tmp_path / f"once-{name}", tmp_path / name
    result.write_text(json.dumps(Result("rag", fakes.MACHINE, context.rows("")).to_json()))
    for path in (once, again):
        plots.main(["payoff", str(path)] if "svg" in name else ["rag", str(result), str(path)])
    drawn = once.read_bytes()
    assert drawn == again.read_bytes()
    if name == "payoff.svg":
        assert b"</svg>" in drawn
        return
    with Image.open(io.BytesIO(drawn)) as image:
        found = {colour for _, colour in image.convert("RGB").getcolors(2**20) or ()}
    assert {tuple(bytes.fromhex(colour[1:])) for colour in plots.RAG_COLOURS.values()} <= found
