# SPDX-License-Identifier: Apache-2.0
"""``s3ec rm``, ``gc`` and ``ns rm`` against moto: shown first, deleted with --yes only."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys

import pytest

from s3ec.dev.rigs.proxy import FaultProxy, Rule
from s3ec.dev.rigs.proxy_faults import s3_error
from s3ec.identity import FORMAT_VERSION, Layout
from s3ec.store.open import KEPT_PROBE
from s3ec.testing.server import MotoServer
from tests.support.catalogues import row
from tests.unit.cli.conftest import Cli, all_shown_on
from tests.unit.cli.corpus import MODEL, OTHER, Corpus, content_hash, entry_bytes
from tests.unit.cli.test_catalog import append
from tests.unit.cli.test_manifest import announce


@pytest.fixture
def namespace(corpus: Corpus) -> str:
    name = corpus.namespace(MODEL)
    announce(corpus, name, content_hash("a"), content_hash("b"), "page 1", "page 2", ago_s=3600)
    return name


def labels(cli: Cli) -> set[str]:
    return {entry["label"] for entry in cli.json("ls")["entries"]}


def test_rm_deletes_by_identifier_and_the_next_listing_leaves_it_out(
    cli: Cli, corpus: Corpus, namespace: str
) -> None:
    cli("manifest", "rebuild")
    found = cli.json("rm", "page 1", content_hash("a"), "--yes")
    assert found == {
        "namespace": namespace,
        "entry_count": 2,
        "bytes": found["bytes"],
        "deleted": 2,
        "absent": [],
        "dropped_row_count": 0,
        "dry_run": False,
    }
    assert found["bytes"] > 0
    assert labels(cli) == {content_hash("b"), f"x-{content_hash('page 2')}"}
    found = cli.json("verify", code=1)
    assert (found["extra_count"], found["missing_count"]) == (2, 0)
    assert cli.json("manifest", "rebuild")["entry_count"] == 2
    assert cli.json("verify")["ok"]


def test_rows_that_are_left_are_named_and_end_it_with_3(
    cli: Cli, corpus: Corpus, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    append(corpus, namespace, [row("a.png", identifier=content_hash("a"))])
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "pyarrow.parquet", None)
        out = cli("rm", content_hash("a"), "--yes", code=3)
        assert "rows of the catalogue remain" in out.stderr
        assert "pip install pyarrow" in out.stderr
        assert cli("gc", "--max-bytes", "0", "--yes", code=3)
    assert cli.json("catalog", "show")["row_count"] == 1


def test_rm_takes_the_rows_of_the_catalogue_along(cli: Cli, corpus: Corpus, namespace: str) -> None:
    rows = [row("a.png", identifier=content_hash("a")), row("b.png", identifier=content_hash("b"))]
    append(corpus, namespace, [*rows, row("again.png", identifier=content_hash("a"))])
    cli("rm", content_hash("a"), "--dry-run")
    assert cli.json("catalog", "show")["row_count"] == 3
    assert cli.json("rm", content_hash("a"), "--yes")["dropped_row_count"] == 2
    assert cli.json("catalog", "show")["row_count"] == 1
    assert cli.json("verify", code=1)["catalog"]["gone_count"] == 0
    cli("manifest", "rebuild")
    assert cli.json("verify")["ok"]


def test_rm_takes_the_beginning_of_one_hash_and_no_other(
    cli: Cli, corpus: Corpus, namespace: str
) -> None:
    out = cli("rm", content_hash("a")[:7], "page 2", "no such page", "--yes", code=1)
    assert "deleted 1 entry" in out.stdout
    hint = "; a hash may be cut to 8 or more hex digits"
    assert f"not there: {content_hash('a')[:7]}{hint}\n" in out.stderr
    assert "not there: no such page\n" in out.stderr
    assert len(labels(cli)) == 3
    twins = ["ab" * 31 + tail for tail in ("00", "01")]
    for identifier in twins:
        corpus.entry(namespace, identifier)
    assert all(twin in cli("rm", "abababab", "--yes", code=2).stderr for twin in twins)
    assert len(labels(cli)) == 5
    found = cli.json("rm", content_hash("a")[:12], f"x-{content_hash('page 1')[:12]}", "--yes")
    assert (found["deleted"], found["absent"]) == (2, [])
    assert not labels(cli) & {content_hash("a"), f"x-{content_hash('page 1')}"}


def test_rm_takes_what_ls_prints_and_says_what_of_it_is_absent(
    cli: Cli, corpus: Corpus, namespace: str
) -> None:
    for label in labels(cli):
        cli("rm", label, "--yes")
    assert labels(cli) == set()
    gone = f"x-{content_hash('page 1')}"
    assert cli.json("rm", gone, "--yes", code=1)["absent"] == [gone]


def test_gc_with_yes_deletes_what_is_older(
    cli: Cli, corpus: Corpus, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An age of nothing: moto dates objects by whole seconds, so these may be a second old."""
    monkeypatch.setattr("s3ec.cli.options._UNITS_S", {"min": -60})
    found = cli.json("gc", "--older-than", "1min", "--yes")
    assert (found["entry_count"], found["deleted"], found["dry_run"]) == (4, 4, False)
    assert labels(cli) == set()
    found = cli.json("verify")
    assert (found["entry_count"], found["ok"]) == (0, True)
    assert found["snapshot_name"]


def test_gc_finds_what_a_release_made(cli: Cli, corpus: Corpus, namespace: str) -> None:
    bad = content_hash("bad")
    corpus.entry(namespace, bad, entry_bytes(bad, namespace, made_by="vllm=0.32.0 platform=cpu"))
    out = cli("gc", "--made-by", "vllm=0.32.0", "--dry-run")
    assert "would delete 1 entry" in out.stdout
    assert bad in labels(cli)
    found = cli.json("gc", "--made-by", "vllm=0.32.0", "--yes")
    assert (found["made_by"], found["deleted"]) == ("vllm=0.32.0", 1)
    assert len(labels(cli)) == 4
    assert cli.json("verify")["ok"]
    assert "made-by" in cli("gc", "--made-by", "0.32.0", "--yes", code=2).stderr


def test_gc_says_what_is_left(cli: Cli, corpus: Corpus, namespace: str) -> None:
    found = cli.json("gc", "--max-bytes", "0")
    assert (found["entry_count"], found["left_count"], found["left_bytes"]) == (4, 0, 0)
    assert (found["max_bytes"], found["older_than_s"]) == (0, None)
    both = cli.json("gc", "--max-bytes", "0", "--older-than", "90d")
    assert (both["entry_count"], both["left_count"], both["deleted"]) == (0, 4, 0)
    assert "the other rules keep them" in cli("gc", "--max-bytes=0", "--older-than=90d").stderr
    assert cli.json("gc", "--max-bytes", "0", "--yes")["deleted"] == 4
    assert labels(cli) == set()
    assert cli.json("verify")["ok"]


@pytest.mark.parametrize(
    ("command", "field", "says"),
    [
        ("gc", "older_than", "nothing says what is to go; give `--older-than`"),
        ("gc --max-bytes much", "max_bytes", "is no size"),
        *(
            (f"gc --older-than={age}", "older_than", "is no age")
            for age in ("", "90", "d", "-1d", "0d", "1y", "1e9d")
        ),
        *((f"ns rm x --idle={age}", "idle", "is no age") for age in ("-1d", "soon", "00")),
    ],
)
def test_rules_that_are_none_are_refused(
    cli: Cli, corpus: Corpus, command: str, field: str, says: str
) -> None:
    corpus.namespace(MODEL)
    error = cli.json(*command.split(), code=2)["error"]
    assert error["field"] == field
    assert says in error["message"]


@pytest.mark.parametrize("options", [(), ("--dry-run",)])
def test_nothing_is_deleted_without_yes(
    cli: Cli,
    corpus: Corpus,
    namespace: str,
    monkeypatch: pytest.MonkeyPatch,
    options: tuple[str, ...],
) -> None:
    monkeypatch.setattr("s3ec.cli.options._UNITS_S", {"min": -60})
    found = cli.json("rm", "page 1", *options)
    assert (found["entry_count"], found["deleted"], found["dry_run"]) == (1, 0, True)
    assert cli.json("gc", "--older-than", "1min", *options)["entry_count"] == 4
    assert cli.json("ns", "rm", namespace, *options)["entry_count"] == 4
    for command in (["rm", "page 1"], ["gc", "--older-than", "1min"], ["ns", "rm", namespace]):
        result = cli(*command, *options)
        assert result.stdout
        assert ("--yes does it" in result.stderr) is not bool(options)
    assert len(labels(cli)) == 4


@pytest.mark.parametrize(
    "command",
    [("rm", "page 1"), ("gc", "--older-than", "1min"), ("ns", "rm", "a-0123456789abcdef")],
)
def test_yes_and_dry_run_are_refused_together(
    cli: Cli, corpus: Corpus, namespace: str, command: tuple[str, ...]
) -> None:
    assert "contradict" in cli(*command, "--yes", "--dry-run", code=2).stderr
    assert len(labels(cli)) == 4


@pytest.mark.parametrize(("answer", "left"), [(b"n\n", 4), (b"y\n", 3), (b"\x04", 4)])
def test_people_at_a_terminal_are_asked(
    cli: Cli, corpus: Corpus, namespace: str, answer: bytes, left: int
) -> None:
    ours, theirs = pty.openpty()
    os.write(ours, answer)  # typed ahead
    command = [sys.executable, "-m", "s3ec", "rm", "page 1"]
    with subprocess.Popen(command, stdin=theirs, stdout=subprocess.PIPE, stderr=theirs) as asked:
        os.close(theirs)
        shown = all_shown_on(ours)
        told, _ = asked.communicate()
    assert asked.returncode == (130 if answer == b"\x04" else 0)
    assert "would delete 1 entry" in told.decode()
    assert "delete 1 entry" in shown
    assert "[y/N]" in shown
    assert len(labels(cli)) == left


def test_each_entry_is_looked_for_once_and_all_are_deleted_with_one_request(
    cli: Cli,
    corpus: Corpus,
    namespace: str,
    moto_server: MotoServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with FaultProxy(moto_server.endpoint_url) as proxy:
        monkeypatch.setenv("S3EC_ENDPOINT_URL", proxy.url)
        cli("rm", "page 1", content_hash("a"), "--yes")
        asked = [f"{request.method} {request.target}" for request in proxy.requests]
        assert labels(cli) == {content_hash("b"), f"x-{content_hash('page 2')}"}
    assert len([line for line in asked if re.match("HEAD .*/objects/", line)]) == 2
    assert len([line for line in asked if re.match(r"POST .*\?delete", line)]) == 1
    assert not [line for line in asked if re.match("DELETE .*/objects/", line)]


def everything(corpus: Corpus) -> list[str]:
    page = corpus.client.list_objects_v2(Bucket=corpus.bucket)
    return [entry["Key"] for entry in page.get("Contents", [])]


@pytest.fixture
def full(cli: Cli, corpus: Corpus, namespace: str) -> str:
    """A namespace with a snapshot, a delta, a record, and objects of somebody else."""
    cli("manifest", "rebuild")
    announce(corpus, namespace, "page 3")
    corpus.put(Layout(namespace).modality("image"), b"{}")
    corpus.put(f"{Layout(namespace).objects}stray.txt", b"x")
    corpus.put(f"{namespace}/notes/readme.txt", b"x")
    return namespace


def test_ns_rm_removes_all_of_one_namespace_and_nothing_else(
    cli: Cli, corpus: Corpus, full: str
) -> None:
    other = corpus.namespace(OTHER)
    announce(corpus, other, "page 1")
    kept = {name for name in everything(corpus) if not name.startswith(f"{full}/")}
    shown = cli("ns", "rm", full).stdout
    assert re.search(r"objects: 5 entries and 1 not of s3ec, .*, stored \d+ \w+ ago$", shown)
    found = cli.json("ns", "rm", full, "--idle", "0", "--yes")
    assert (found["namespace"], found["dry_run"]) == (full, False)
    assert found["entry_count"] == 5
    assert set(everything(corpus)) == kept
    listed = cli("ns").stdout
    assert other in listed
    assert full not in listed
    assert other in cli("ns", "rm", full, code=1).stderr


def test_ns_rm_changes_nothing_where_no_namespace_is(cli: Cli, corpus: Corpus) -> None:
    """A name that was mistyped leaves no trace, and what is not of s3ec stays."""
    name = "acme-vision-0123456789abcdef"
    assert "no namespace" in cli("ns", "rm", name, "--yes", code=1).stderr
    assert everything(corpus) == []
    corpus.put(f"{name}/note.txt", b"x")
    assert "no namespace" in cli("ns", "rm", name, "--yes", code=1).stderr
    assert set(everything(corpus)) == {f"{name}/note.txt"}


def test_ns_rm_refuses_where_something_was_stored_a_moment_ago(
    cli: Cli, corpus: Corpus, full: str
) -> None:
    before = everything(corpus)
    result = cli("ns", "rm", full, "--yes", code=1)
    assert "--idle" in result.stderr
    assert everything(corpus) == before


def test_ns_rm_wants_the_whole_name(cli: Cli, corpus: Corpus, namespace: str) -> None:
    for name in (namespace[:-1], namespace.rpartition("-")[0], "..", ""):
        assert (
            "not a full namespace name"
            in cli("ns", "rm", name, "--idle", "0", "--yes", code=2).stderr
        )
    assert len(labels(cli)) == 4


@pytest.mark.parametrize(
    ("requests", "part"),
    [(0, "objects/"), (1, "manifest/v2/snapshot/"), (1, "modality/")],
)
def test_ns_rm_that_was_broken_off_goes_on_and_the_descriptor_goes_last(
    cli: Cli,
    corpus: Corpus,
    full: str,
    moto_server: MotoServer,
    monkeypatch: pytest.MonkeyPatch,
    requests: int,
    part: str,
) -> None:
    with FaultProxy(moto_server.endpoint_url) as proxy:
        monkeypatch.setenv("S3EC_ENDPOINT_URL", proxy.url)
        proxy.add(
            Rule(s3_error(403, "AccessDenied"), method="POST", target="delete", skip=requests)
        )
        cli("ns", "rm", full, "--idle", "0", "--yes", code=1)
        left = everything(corpus)
        assert Layout(full).descriptor in left
        assert [name for name in left if name.startswith(f"{full}/{part}")]
        proxy.clear()
        cli("ns", "rm", full, "--idle", "0", "--yes")
    assert everything(corpus) == [KEPT_PROBE]


@pytest.mark.parametrize(
    ("command", "consent"),
    [
        (["rm", "page 1"], "--yes"),
        (["gc", "--older-than", "1min"], "--yes"),
        (["gc", "--max-bytes", "0"], "--yes"),
        (["gc", "--made-by", "vllm=*"], "--yes"),
        (["ns", "rm", "NAMESPACE", "--idle", "0"], "--yes"),
        (["verify", "--repair"], "--yes"),
        (["verify", "--deep", "--repair"], "--yes"),
        (["manifest", "rebuild"], ""),
    ],
    ids=str,
)
def test_what_a_newer_release_wrote_stays(
    cli: Cli, corpus: Corpus, namespace: str, command: list[str], consent: str
) -> None:
    """It is not ours to read, and so none of our commands may judge it."""
    for name in ("a", "gone"):
        append(corpus, namespace, [row(f"{name}.png", identifier=content_hash(name))])
    corpus.entry(namespace, "unannounced")
    about = json.dumps({**MODEL, "format": FORMAT_VERSION + 1}).encode()
    corpus.put(Layout(namespace).descriptor, about)
    before = everything(corpus)
    given = [namespace if word == "NAMESPACE" else word for word in command]
    for agreed in ("", "--dry-run", consent) if consent else ("",):
        assert "nothing in it is touched" in cli(*given, *agreed.split(), code=2).stderr
    assert everything(corpus) == before
