# SPDX-License-Identifier: Apache-2.0
"""The table of stores in docs/deployment.md is what ``s3ec doctor`` says of those that run here."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from datetime import date
from importlib.metadata import version
from pathlib import Path

import pytest
from typer.testing import CliRunner

from s3ec.cli.app import app
from s3ec.dev.rigs.proxy import FaultProxy, Rule
from s3ec.dev.rigs.proxy_faults import ForgetCondition
from s3ec.testing.server import LocalS3, MotoServer, S3Server
from tests.contract.conftest import BUCKET

PAGE = Path(__file__).parents[2] / "docs" / "deployment.md"
# Heading -> check, and its words for what the column says.
COLUMNS = {
    "conditional PUT": ("conditional_put", {"is refused": "enforced", "overwrites": "ignored"}),
    "listing v2": ("listing", {"page by page": "paged"}),
    "ranges": ("ranges", {"what it should be": "right"}),
}
Checks = dict[str, dict[str, str]]
Doctor = Callable[..., Checks]


@pytest.fixture
def doctor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Doctor:
    """The checks of a server; vLLM counts as not installed."""
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.setenv("S3EC_CACHE_DIR", str(tmp_path / "cache"))

    def run(server: S3Server, url: str | None = None) -> Checks:
        where = ("--bucket", BUCKET, "--endpoint-url", url or server.endpoint_url)
        result = CliRunner().invoke(app, ["doctor", "--json", *where], env=server.env())
        assert result.exit_code == 0, result.output
        return {check["name"]: check for check in json.loads(result.stdout)["checks"]}

    return run


def told() -> dict[str, dict[str, str]]:
    """Server -> heading -> cell."""
    found = re.search(r"<!-- stores.*?-->\n(.*?)<!-- /stores -->", PAGE.read_text(), re.DOTALL)
    assert found is not None
    rows = [line.removeprefix("| ").removesuffix(" |") for line in found[1].splitlines()]
    headings, rule, *stores = [line.split(" | ") for line in rows]
    assert set("".join(rule)) <= set("|-")
    assert headings == ["server", "date", *COLUMNS, "failed"]
    return {cells[0]: dict(zip(headings, cells, strict=True)) for cells in stores}


def seen(checks: Checks) -> dict[str, str]:
    """The same cells by what the doctor says, but for the server's name and the day."""
    cells = {}
    for heading, (name, words) in COLUMNS.items():
        found = checks[name]["found"]
        cells[heading] = next(cell for word, cell in words.items() if word in found)
    failed = [name for name, check in checks.items() if check["verdict"] == "fail"]
    return {**cells, "failed": ", ".join(failed) or "nothing"}


def test_the_table_has_a_version_and_a_day_for_each_store() -> None:
    for server, cells in told().items():
        assert re.search(r"\d", server), "a version"
        date.fromisoformat(cells["date"])


def test_seaweedfs_is_what_the_table_says(
    doctor: Doctor, local_s3: LocalS3, seaweed_bucket: str
) -> None:
    checks = doctor(local_s3)
    # The version is the server's own word: a newer one wants a new line.
    server = checks["endpoint"]["found"].rpartition(", ")[2]
    assert told()[server].items() >= seen(checks).items()


def test_moto_is_what_the_table_says(
    doctor: Doctor, moto_server: MotoServer, moto_bucket: str
) -> None:
    cells = told()[f"moto {version('moto')}"]
    assert cells.items() >= seen(doctor(moto_server)).items()
    with FaultProxy(moto_server.endpoint_url) as proxy:
        proxy.add(Rule(ForgetCondition(), method="PUT", header="if-none-match"))
        careless = seen(doctor(moto_server, proxy.url))
    assert careless == {**seen(doctor(moto_server)), "conditional PUT": "ignored"}
