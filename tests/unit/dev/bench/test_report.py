# SPDX-License-Identifier: Apache-2.0
"""The HTML report and its plots: complete in one file, and safe to open."""

from __future__ import annotations

import base64
import re
import sys
from html.parser import HTMLParser
from typing import Any

import pytest

from s3ec.dev.bench import plot, registry
from s3ec.dev.bench.hooks import plot as hooks_plot
from s3ec.dev.bench.report import html
from s3ec.dev.bench.result import Result, Row, Spec
from s3ec.errors import ConfigError
from tests.unit.dev.bench import fakes

VOID = {"meta", "img", "br", "hr"}


class Page(HTMLParser):
    """Collects tags and checks that they are closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def matplotlib() -> Any:
    return pytest.importorskip("matplotlib")


def page(*, plots: dict[str, bytes] | None = None, speed: float = 2.0) -> tuple[str, Page]:
    text = html([fakes.result(speed=speed)], plots or {})
    return text, Page(text)


def test_report_refers_to_nothing_outside_itself() -> None:
    text, parsed = page(plots={"fake": b"\x89PNG not really"})
    assert not re.search(r"https?://|//\w|@import|url\(", text)
    tags = {tag for tag, _ in parsed.tags}
    assert not tags & {"script", "link", "iframe", "object", "embed", "base"}
    references = [
        value
        for _, attrs in parsed.tags
        for name, value in attrs.items()
        if name in ("src", "href", "srcset", "action", "data")
    ]
    assert len(references) == 1
    assert str(references[0]).startswith("data:image/png;base64,")


def test_plot_is_embedded_whole() -> None:
    _, parsed = page(plots={"fake": b"\x89PNG bytes"})
    (source,) = (attrs["src"] for tag, attrs in parsed.tags if tag == "img")
    assert base64.b64decode(str(source).partition(",")[2]) == b"\x89PNG bytes"


def test_report_shows_values_cases_reasons_and_machine() -> None:
    _, parsed = page(speed=9.0)
    for expected in (
        "fake.speed_us",
        "NO",
        "hit <b>",
        "1.5 to 2.5; the slowest case: hit",
        "strace is not installed",
        "1,234",
        "Made-up <CPU>",
        "16.0 GiB",
        "3 rows, 1 not reached, 1 not measurable here",
    ):
        assert expected in parsed.text


def test_text_of_results_is_escaped() -> None:
    text, _ = page()
    assert "<b>" not in text
    assert "<CPU>" not in text


def size_of(png: bytes) -> tuple[int, int]:
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    return int.from_bytes(png[16:20], "big"), int.from_bytes(png[20:24], "big")


def test_any_result_can_be_drawn(matplotlib: Any) -> None:
    width, height = size_of(plot.png(None, fakes.result()))
    assert width > 500
    assert height > 200


def test_result_without_any_value_can_be_drawn(matplotlib: Any) -> None:
    empty = Result("fake", fakes.MACHINE, [Row(fakes.ROWS[0], None, 0, {"why": "no"})])
    assert size_of(plot.png(None, empty))
    assert size_of(plot.png(registry.load("hooks"), empty))


def test_hooks_have_a_plot_of_their_own(matplotlib: Any) -> None:
    bench = registry.load("hooks")
    assert bench.plot is hooks_plot
    spec = next(spec for spec in bench.rows if spec.name.endswith("_p50_us"))
    cases = {"hit": 0.5, "ECExampleConnector, hit": 11.0}
    row = Row(Spec(spec.name, "us", spec.reach), 0.5, 9, {"cases": cases})
    assert size_of(plot.png(bench, Result("hooks", fakes.MACHINE, [row])))


def test_missing_matplotlib_is_said_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"matplotlib.*pip install 's3ec\[dev\]'"):
        plot.png(None, fakes.result())
