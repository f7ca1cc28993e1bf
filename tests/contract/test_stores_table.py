# SPDX-License-Identifier: Apache-2.0
"""The table of stores in docs/deployment.md holds lines of ``s3ec doctor``, and is still right."""

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
from s3ec.doctor.compatibility import COLUMNS, row
from s3ec.testing.server import LocalS3, MotoServer, S3Server
from tests.contract.conftest import BUCKET

PAGE = Path(__file__).parents[2] / "docs" / "deployment.md"
Doctor = Callable[..., str]


@pytest.fixture
def doctor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Doctor:
    """What the command prints about a server; vLLM counts as not installed."""
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.setenv("S3EC_CACHE_DIR", str(tmp_path / "cache"))
    # A busy machine is not what these tests are about.
    monkeypatch.setenv("S3EC_CONNECT_TIMEOUT_S", "10")
    monkeypatch.setenv("S3EC_READ_TIMEOUT_S", "20")

    def run(server: S3Server, *args: str, url: str | None = None) -> str:
        where = ("--bucket", BUCKET, "--endpoint-url", url or server.endpoint_url)
        result = CliRunner().invoke(
            app, ["doctor", "--timeout", "100", *where, *args], env=server.env()
        )
        assert result.exit_code == 0, result.output
        return result.stdout

    return run


def told_table() -> list[list[str]]:
    """Cells of the table of stores, the headings first."""
    found = re.search(r"<!-- stores.*?-->\n(.*?)<!-- /stores -->", PAGE.read_text(), re.DOTALL)
    assert found is not None
    rows = [line.removeprefix("| ").removesuffix(" |") for line in found[1].splitlines()]
    headings, rule, *stores = [line.split(" | ") for line in rows]
    assert set("".join(rule)) <= set("|-")
    return [headings, *stores]


def told_fields(server: str) -> dict[str, str]:
    """The line of one store, as ``compatibility`` of --json."""
    for cells in told_table():
        if cells[0] == server:
            return dict(zip(COLUMNS, cells, strict=True))
    raise AssertionError(
        f"docs/deployment.md has no line of {server!r}: run `s3ec doctor` and add it"
    )


def test_table_of_stores_has_the_doctors_columns_and_a_day_for_each_store() -> None:
    headings, *stores = told_table()
    assert headings == list(COLUMNS.values())
    assert stores
    for cells in stores:
        fields = dict(zip(COLUMNS, cells, strict=True))
        assert all(fields.values())
        date.fromisoformat(fields["date"])
        assert re.search(r"\d", fields["server"]), "a version"
        assert fields["conditional_put"] in {"enforced", "ignored", "refused"}


def test_seaweedfs_is_what_the_table_says(
    doctor: Doctor, local_s3: LocalS3, seaweed_bucket: str
) -> None:
    told = json.loads(doctor(local_s3, "--json"))["compatibility"]
    # The version is the server's own word: a newer one wants a new line.
    assert told == told_fields(told["server"]) | {"date": told["date"]}
    date.fromisoformat(told["date"])


def test_moto_is_what_the_table_says_under_the_name_that_it_is_given(
    doctor: Doctor, moto_server: MotoServer, moto_bucket: str
) -> None:
    name = f"moto {version('moto')}"
    told = json.loads(doctor(moto_server, "--json", "--server", name))["compatibility"]
    assert told == told_fields(name) | {"date": told["date"]}


def test_store_that_ignores_the_condition_has_a_line_that_says_so(
    doctor: Doctor, moto_server: MotoServer, moto_bucket: str
) -> None:
    with FaultProxy(moto_server.endpoint_url) as proxy:
        rule = proxy.add(Rule(ForgetCondition(), method="PUT", header="if-none-match"))
        printed = doctor(moto_server, "--server", "careless 1.0", url=proxy.url).splitlines()
        assert rule.fired == 2
    good = told_fields(f"moto {version('moto')}")
    headings, line = printed[-2:]
    assert headings == row(list(COLUMNS.values()))
    cells = line.removeprefix("| ").removesuffix(" |").split(" | ")
    expected = good | {"server": "careless 1.0", "conditional_put": "ignored", "date": cells[1]}
    assert cells == list(expected.values())
