# SPDX-License-Identifier: Apache-2.0
"""A server that ignores If-None-Match: said, and right all the same."""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from s3ec.cli.app import app
from s3ec.dev.rigs.proxy import FaultProxy, Rule
from s3ec.dev.rigs.proxy_faults import ForgetCondition, s3_error
from s3ec.prefetch import FetchOutcome
from s3ec.settings import Settings
from s3ec.store.open import open_store, probe_conditional_put
from s3ec.testing.server import MotoServer
from tests.faults.embeddings import LAYOUT, body_at, key_at
from tests.faults.engine import Engine
from tests.faults.site import Site
from tests.support.waiting import eventually

_numbers = itertools.count()


@pytest.fixture
def careless(
    moto_server: MotoServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Site]:
    """moto, which checks no signatures, behind a proxy that drops the condition."""
    for name, value in moto_server.env().items():
        monkeypatch.setenv(name, value)
    bucket = moto_server.create_bucket(f"careless-{next(_numbers)}")
    with FaultProxy(moto_server.endpoint_url) as proxy:
        site = Site(proxy, bucket, moto_server, tmp_path / "cache")
        site.stock()
        proxy.add(Rule(ForgetCondition(), method="PUT"))
        yield site
    moto_server.delete_bucket(bucket)


def test_server_without_conditions_is_named_and_serves_right_bytes(
    careless: Site,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = Settings.model_validate(careless.settings())

    async def probe() -> bool | None:
        store = open_store(settings)
        try:
            return await probe_conditional_put(store)
        finally:
            await store.close()

    assert asyncio.run(probe()) is False
    with Engine.at(careless, tmp_path / "a") as one, Engine.at(careless, tmp_path / "b") as other:
        one.save_and_wait(1)
        other.save_and_wait(1)
        one.save_and_wait(2)
        one.announce()
        assert caplog.text.count("the server does not honour If-None-Match") == 2  # a process each
        assert (one.count("save.items"), other.count("save.existed")) == (2, 1)
        other.refresh()
        assert other.node.index.maybe_contains(key_at(2))
        assert other.fetch(2).outcome is FetchOutcome.READY
        assert careless.body(key_at(1).name) == body_at(1)

    for name, value in careless.settings().items():
        monkeypatch.setenv(f"S3EC_{name.upper()}", value)
    # Two makers at once work for nothing, and do no harm.
    result = CliRunner().invoke(app, ["manifest", "rebuild", "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["entry_count"] == 2
    assert CliRunner().invoke(app, ["verify"]).exit_code == 0
    monkeypatch.setitem(sys.modules, "vllm", None)  # whose start is not what this is about
    report = CliRunner().invoke(app, ["doctor", "--json"]).stdout
    checks = {check["name"]: check for check in json.loads(report)["checks"]}
    assert checks["conditional_put"]["verdict"] == "warn"
    assert "overwrites" in checks["conditional_put"]["found"]


@pytest.mark.parametrize(
    ("status", "code"),
    [(501, "NotImplemented"), (400, "NotImplemented"), (400, "InvalidArgument")],
)
def test_server_that_refuses_conditions_gets_every_entry_and_the_doctor_says_so(
    careless: Site,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    status: int,
    code: str,
) -> None:
    careless.proxy.clear(Rule(s3_error(status, code), method="PUT", header="if-none-match"))
    with Engine.at(careless, tmp_path / "a") as one, Engine.at(careless, tmp_path / "b") as other:
        one.save_and_wait(1)
        other.save_and_wait(1)
        one.save_and_wait(2)
        assert caplog.text.count("the server does not honour If-None-Match") == 2  # a process each
        assert (one.count("save.items"), other.count("save.existed")) == (2, 1)
        assert careless.body(key_at(1).name) == body_at(1)
        assert careless.body(key_at(2).name) == body_at(2)
    for name, value in careless.settings().items():
        monkeypatch.setenv(f"S3EC_{name.upper()}", value)
    assert CliRunner().invoke(app, ["manifest", "rebuild"]).exit_code == 0
    assert CliRunner().invoke(app, ["verify"]).exit_code == 0
    monkeypatch.setitem(sys.modules, "vllm", None)  # whose start is not what this is about
    report = CliRunner().invoke(app, ["doctor", "--json"]).stdout
    checks = {check["name"]: check for check in json.loads(report)["checks"]}
    assert checks["conditional_put"]["verdict"] == "warn"
    assert "does not honour `If-None-Match: *`" in checks["conditional_put"]["found"]


def test_record_of_an_earlier_producer_is_not_overwritten(careless: Site, tmp_path: Path) -> None:
    name = LAYOUT.modality("image")
    earlier = b'{"dtype":"bfloat16","width":64}'
    careless.client.put_object(Bucket=careless.bucket, Key=name, Body=earlier)
    with Engine.at(careless, tmp_path / "a") as one:
        one.save(1)
        eventually(lambda: one.count("save_problem.record") == 1)
        assert one.count("save.items") == 0
    left = careless.client.get_object(Bucket=careless.bucket, Key=name)["Body"].read()
    assert left == earlier
