# SPDX-License-Identifier: Apache-2.0
"""The client's examples in docs/without-pixels.md run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from s3ec.corpus.catalog_file import export_table, to_table
from tests.unit.client.conftest import WITHOUT, Server, row_of

PAGE = Path(__file__).parents[3] / "docs/without-pixels.md"


def test_the_examples_ask_without_pixels(
    server: Server,
    files: list[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPENAI_BASE_URL", server.url)
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    export_table(to_table([row_of(files[0], document="report.pdf", page=12)]), "catalog.parquet")
    section = PAGE.read_text().partition("## Ask without the picture")[2].partition("\n## ")[0]
    blocks = re.findall(r"^```python\n(.*?)^```", section, re.M | re.S)
    assert len(blocks) == 2
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    names["client"].close()
    assert server.kinds == [WITHOUT] * 2
    assert capsys.readouterr().out == "yes\nyes\n"
