# SPDX-License-Identifier: Apache-2.0
"""Settings on the command line: where they may come from, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from s3ec.settings import Settings
from tests.unit.cli.conftest import Cli

EXTRA = {"bucket": "embeddings", "cache_bytes": "1GiB"}
TRANSFER = {
    "ec_connector": "S3ECConnector",
    "ec_role": "ec_both",
    "ec_connector_extra_config": EXTRA,
}


def test_show_names_value_and_origin_of_every_setting(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("S3EC_REGION", "eu-north-1")
    monkeypatch.setenv("S3EC_BUCKET", "from-env")
    monkeypatch.setenv("S3EC_PREFIX", "team")
    config = json.dumps({"cache_bytes": "2GiB", "prefix": "json"})
    found = cli.json("config", "show", "--config", config, "--bucket", "mine")["settings"]
    assert set(found) == set(Settings.model_fields)
    assert found["bucket"] == {"value": "mine", "origin": "--bucket"}
    assert found["prefix"] == {"value": "json", "origin": "--config"}
    assert found["cache_bytes"] == {"value": 2 * 2**30, "origin": "--config"}
    assert found["region"] == {"value": "eu-north-1", "origin": "env S3EC_REGION"}
    assert found["transport"] == {"value": "obstore", "origin": "default"}
    text = cli("config", "show", "--bucket", "mine").stdout
    assert "env S3EC_PREFIX" in text
    assert "50.0GiB" in text


@pytest.mark.parametrize("document", [EXTRA, TRANSFER])
@pytest.mark.parametrize("form", ["text", "file", "@file"])
def test_config_is_taken_as_text_or_file_in_both_shapes(
    cli: Cli, tmp_path: Path, document: dict[str, object], form: str
) -> None:
    text = json.dumps(document)
    (tmp_path / "ec.json").write_text(text)
    value = {
        "text": text,
        "file": str(tmp_path / "ec.json"),
        "@file": f"@{tmp_path / 'ec.json'}",
    }[form]
    found = cli.json("config", "show", "--config", value)["settings"]
    assert found["bucket"] == {"value": "embeddings", "origin": "--config"}
    assert found["cache_bytes"]["value"] == 2**30


@pytest.mark.parametrize(
    ("config", "part"),
    [
        ('{"bucket": ', "not JSON"),
        ("[1]", "must be a JSON object"),
        ("/nowhere/ec.json", "neither"),
        ('{"bucket": "b1b", "cache_byte": 1}', "did you mean `cache_bytes`"),
        ('{"ec_connector": "S3ECConnector"}', "`bucket` is required"),
        ('{"ec_connector_extra_config": 7}', "must be a JSON object"),
        ("{}", "`bucket` is required"),
        ('{"cache_bytes": ' + "9" * 5000 + "}", "a number is too long"),
        ("[" * 100_000, "nested too deep"),
    ],
    ids=lambda text: text[:40],
)
def test_bad_config_is_one_line_and_exit_code_2(cli: Cli, config: str, part: str) -> None:
    out = cli("ls", "--config", config, code=2)
    assert out.stdout == ""
    assert out.stderr.startswith("error: ")
    assert out.stderr.count("\n") == 1
    assert part in out.stderr


@pytest.mark.parametrize("name", ["aws_secret_access_key", "secret_key", "aws_session_token"])
@pytest.mark.parametrize("whole", [True, False])
def test_credentials_in_config_are_refused_and_not_repeated(
    cli: Cli, name: str, whole: bool
) -> None:
    extra = {"bucket": "embeddings", name: "hush-hush"}
    document = {"ec_connector": "S3ECConnector", "ec_connector_extra_config": extra}
    out = cli("config", "show", "--config", json.dumps(document if whole else extra), code=2)
    assert name in out.stderr
    assert "hush-hush" not in out.output
    broken = cli("config", "show", "--config", f'{{"{name}": "hush-hush",', code=2)
    assert "hush-hush" not in broken.output


def test_show_without_a_bucket_shows_all_and_marks_it(cli: Cli) -> None:
    found = cli.json("config", "show", "--region", "eu-north-1")["settings"]
    assert set(found) == set(Settings.model_fields)
    assert found["bucket"] == {"value": None, "origin": "missing"}
    assert found["region"] == {"value": "eu-north-1", "origin": "--region"}
    out = cli("config", "show")
    assert "missing" in next(line for line in out.stdout.splitlines() if "bucket " in line)
    assert "S3EC_BUCKET" in out.stderr
    assert cli("config", "show", "--bucket", "embeddings").stderr == ""


def test_every_bucket_option_names_a_setting_and_wins(cli: Cli, tmp_path: Path) -> None:
    bundle = tmp_path / "ca.pem"
    bundle.touch()
    options = {
        "bucket": "embeddings",
        "endpoint_url": "http://10.0.0.1:9000",
        "ca_bundle": str(bundle),
    }
    words = [w for name, value in options.items() for w in (f"--{name.replace('_', '-')}", value)]
    found = cli.json("config", "show", *words, "--allow-http")["settings"]
    for name, value in {**options, "allow_http": True}.items():
        assert found[name] == {"value": value, "origin": f"--{name.replace('_', '-')}"}


def test_plain_http_names_the_option_and_the_variable(cli: Cli) -> None:
    elsewhere = ["--bucket", "bbb", "--endpoint-url", "http://10.0.0.1:9"]
    error = cli.json("ls", *elsewhere, code=2)["error"]
    assert error["field"] == "allow_http"
    assert "--allow-http" in error["fix"]
    assert "S3EC_ALLOW_HTTP" in error["fix"]


def test_size_that_is_none_gets_an_example(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("S3EC_CACHE_BYTES", "lots")
    error = cli("ls", "--bucket", "bbb", code=2).stderr
    assert "S3EC_CACHE_BYTES" in error
    assert "`50GiB`" in error


@pytest.mark.parametrize("name", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"])
def test_the_sdks_endpoint_is_shown_where_it_decides(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv(name, "http://127.0.0.1:2")
    found = cli.json("config", "show", "s3://one")["settings"]["endpoint_url"]
    assert found == {"value": "http://127.0.0.1:2", "origin": f"env {name}"}
    given = ["--endpoint-url", "http://127.0.0.1:3"]
    found = cli.json("config", "show", "s3://one", *given)["settings"]["endpoint_url"]
    assert found == {"value": "http://127.0.0.1:3", "origin": "--endpoint-url"}
    assert cli.json("config", "show", "file:///x")["settings"]["endpoint_url"]["value"] is None
