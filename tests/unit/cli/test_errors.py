# SPDX-License-Identifier: Apache-2.0
"""What a failing command says: exit status, one line on stderr, one object on stdout for JSON."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from s3ec.cli.output import Failure
from s3ec.errors import (
    AccessError,
    AmbiguousError,
    ConfigError,
    ConflictError,
    CorruptEntryError,
    NotFoundError,
    S3ECError,
    TierError,
    UnavailableError,
)
from tests.unit.cli.conftest import Cli
from tests.unit.cli.corpus import MODEL, Corpus, content_hash

ERRORS: list[S3ECError] = [
    NotFoundError("gone"),
    CorruptEntryError("bad", reason="checksum"),
    UnavailableError("slow"),
    AccessError("no"),
    ConflictError("late"),
    TierError("full"),
    S3ECError("odd"),
    ConfigError("wrong"),
    AmbiguousError("which?"),
]


def test_the_page_has_the_kinds_and_exit_statuses_of_the_code() -> None:
    page = (Path(__file__).parents[3] / "docs/commands.md").read_text()
    written = {kind: int(code) for code, kind in re.findall(r"^\| ([12]) \| `(\w+)`", page, re.M)}
    made = {failure.kind: failure.exit_code for failure in map(Failure.of, ERRORS)}
    assert written == made


def test_fix_is_the_end_of_the_message_with_the_choices_below_it() -> None:
    assert Failure.of(ConfigError("no; do a; b", field="x")).document["error"] == {
        "kind": "usage",
        "message": "no; do a; b",
        "field": "x",
        "fix": "b",
    }
    assert Failure.of(AmbiguousError("two; take one:\n  a; b\n  c")).fix == "take one:\n  a; b\n  c"
    assert Failure.of(ConfigError("bad settings:\n  a; do b\n  c")).fix is None
    assert Failure.of(S3ECError("odd")).fix is None


@pytest.mark.parametrize(
    ("command", "kind", "field", "code"),
    [
        ("ls --limit many", "usage", "limit", 2),
        ("ls --no-such-option", "usage", "--no-such-option", 2),
        ("ls --bucket x-y --region=", "usage", "region", 2),
        ("nosuchcommand", "usage", None, 2),
        ("stat", "usage", "identifier", 2),
        ("ls --config {}", "usage", "bucket", 2),
        ("manifest rebuild --bucket x", "usage", "bucket", 2),
        ("get x -o /nowhere/there --url file:///nowhere/here", "access", None, 1),
        ("serve-s3 --bucket B", "usage", None, 2),
        ("doctor --config {}", "usage", "bucket", 2),
        ("bench index --keys many", "usage", "keys", 2),
    ],
)
def test_every_failure_is_one_object_under_json(
    cli: Cli, command: str, kind: str, field: str | None, code: int
) -> None:
    result = cli(*command.split(), "--json", code=code)
    document = json.loads(result.stdout)
    assert set(document) == {"error"}
    assert set(document["error"]) == {"kind", "message", "field", "fix"}
    assert (document["error"]["kind"], document["error"]["field"]) == (kind, field)
    assert document["error"]["message"]
    assert result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    "command",
    [
        f"get {content_hash('a')} -o /dev/null/x",
        "catalog export /dev/null/x.parquet",
        "export /dev/null/x",
        "verify --deep --state /dev/null/x",
        "hydrate --cache-dir /dev/null/x",
        "tier --cache-dir /dev/null/x",
        "precompute . --model m --report /dev/null/x",
        "serve-s3 --port 0 --data /dev/null/x",
    ],
)
def test_a_folder_that_cannot_be_written_ends_every_command_alike(
    cli: Cli, corpus: Corpus, command: str
) -> None:
    corpus.entry(corpus.namespace(MODEL), content_hash("a"))
    error = cli.json(*command.split(), code=1)["error"]
    assert error["kind"] == "disk"
    assert "/dev/null" in error["message"]


def test_a_choice_that_is_none_is_told_without_the_parsers_words(cli: Cli) -> None:
    said = cli("import", "x", "--layout", "foo", code=2).stderr
    assert said.startswith("error: Invalid value for '--layout': 'foo' is not one of 's3ec', ")


def test_without_json_stdout_stays_empty(cli: Cli) -> None:
    for words in (["ls", "--config", "{}"], ["ls", "--bogus"]):
        assert cli(*words, code=2).stdout == ""


def test_json_behind_two_dashes_is_not_ours(cli: Cli) -> None:
    assert cli("doctor", "--config", "{", "--", "--json", code=2).stdout == ""


@pytest.mark.parametrize("command", ["ns", "ls", "stat x", "rm x", "verify"])
def test_refused_connection_is_told_in_the_words_of_the_doctor(
    cli: Cli, corpus: Corpus, command: str
) -> None:
    where = "http://127.0.0.1:1"
    out = cli(*command.split(), "--endpoint-url", where, code=1)
    assert out.stderr == (
        f"error: {where}: connection refused; nothing listens at {where}: start the server, or "
        "correct `endpoint_url`\n"
    )
    error = cli.json(*command.split(), "--endpoint-url", where, code=1)["error"]
    assert error["kind"] == "unavailable"
    assert error["fix"].startswith("nothing listens")


def test_a_proxy_that_refuses_the_connection_is_not_called_the_server(
    cli: Cli, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://user:SECRET@127.0.0.1:1")
    out = cli("ls", "--endpoint-url", "http://127.0.0.1:2", code=1)
    assert (
        "through the proxy http://127.0.0.1:1: [Errno 111] Connection refused; start" in out.stderr
    )
    assert "SECRET" not in out.stderr


def test_not_found_and_ambiguous_say_so(cli: Cli, corpus: Corpus) -> None:
    assert cli.json("ls", code=1)["error"]["fix"] == "check --bucket and --prefix"
    corpus.namespace(MODEL)
    corpus.namespace({**MODEL, "model": "acme/other"})
    error = cli.json("stat", content_hash("a"), code=2)["error"]
    assert (error["kind"], error["field"]) == ("ambiguous", "namespace")
    assert "--model acme/other" in error["fix"]
