# SPDX-License-Identifier: Apache-2.0
"""Which namespace a command is for: the options, the variable, the newest; and completion."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from s3ec.config import load_settings
from s3ec.corpus import Corpus as Opened
from s3ec.identity import Layout
from tests.unit.cli.conftest import Cli
from tests.unit.cli.corpus import MODEL, OTHER, Corpus, content_hash

FOREIGN = {"model": "other/reader-2b", "dtype": "bfloat16"}


@pytest.fixture
def three(corpus: Corpus) -> tuple[str, str, str]:
    """Two namespaces of one model and one of another, each with one entry."""
    names = corpus.namespace(MODEL), corpus.namespace(OTHER), corpus.namespace(FOREIGN)
    for name in names:
        corpus.entry(name, content_hash(name))
    return names


def modified_at(corpus: Corpus, name: str) -> datetime:
    """When the server says that a namespace was made."""
    head = corpus.client.head_object(Bucket=corpus.bucket, Key=Layout(name).descriptor)
    return head["LastModified"]  # type: ignore[no-any-return]


def make_newer(corpus: Corpus, descriptor: dict[str, Any], than: str) -> str:
    """Write a descriptor until the server's clock, which shows seconds, has gone on."""
    while True:
        name = corpus.namespace(descriptor)
        if modified_at(corpus, name) > modified_at(corpus, than):
            return name


COMMANDS: list[list[str]] = [
    ["ls"],
    ["stat", content_hash("one")],
    ["get", content_hash("one"), "-o", "-"],
    ["rm", content_hash("one")],
    ["gc", "--older-than", "90d"],
    ["manifest", "rebuild"],
    ["verify"],
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_takes_the_same_options_and_the_variable(
    cli: Cli, corpus: Corpus, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    for option in (["-n", "nobody"], ["--namespace", "nobody"], ["--model", "nobody"]):
        corpus.namespace(MODEL)
        assert "nobody" in cli(*command, *option, code=1).stderr
    monkeypatch.setenv("S3EC_NAMESPACE", "nobody")
    assert "S3EC_NAMESPACE `nobody`" in cli(*command, code=1).stderr


def test_name_its_beginning_and_the_variable_choose(
    cli: Cli, three: tuple[str, str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, second, foreign = three
    assert cli.json("ls", "-n", second)["namespace"] == second
    assert cli.json("ls", "--namespace", second[:-3])["namespace"] == second
    monkeypatch.setenv("S3EC_NAMESPACE", second)
    assert cli.json("ls")["namespace"] == second
    assert cli.json("ls", "-n", foreign)["namespace"] == foreign
    assert cli.json("ls", "--model", "reader")["namespace"] == foreign


@pytest.mark.parametrize("choice", ["namespace", "model"])
def test_an_empty_choice_is_no_choice_of_the_only_one(
    cli: Cli, corpus: Corpus, choice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus.namespace(MODEL)
    error = cli.json("gc", "--max-bytes", "0", f"--{choice}=", "--yes", code=2)["error"]
    assert (error["kind"], error["field"]) == ("usage", choice)
    monkeypatch.setenv("S3EC_NAMESPACE", "")
    cli("ls")


@pytest.mark.parametrize("model", ["other/reader-2b", "OTHER/Reader", "reader", "other-reader-2b"])
def test_model_is_chosen_by_a_part_of_its_name_or_by_its_slug(
    cli: Cli, three: tuple[str, str, str], model: str
) -> None:
    assert cli.json("ls", "--model", model)["namespace"] == three[2]


def test_model_that_is_named_in_full_is_not_ambiguous(cli: Cli, corpus: Corpus) -> None:
    base = corpus.namespace(MODEL)
    corpus.namespace({**MODEL, "model": "acme/vision-9b-it"})
    assert cli.json("ls", "--model", "acme/vision-9b")["namespace"] == base
    cli("ls", "--model", "acme/vision", code=2)


def test_newest_of_one_model_is_taken_and_named(cli: Cli, corpus: Corpus) -> None:
    older = corpus.namespace(OTHER)
    newer = make_newer(corpus, MODEL, older)
    out = cli("ls", "--json")
    assert newer in out.stdout
    assert f"taking {newer}, the newest of 2 namespaces of acme/vision-9b" in out.stderr
    corpus.namespace(FOREIGN)
    assert cli.json("ls", "--model", "vision-9b")["namespace"] == newer
    assert cli.json("ls", "-n", "acme")["namespace"] == newer
    newest = make_newer(corpus, OTHER, newer)
    assert cli.json("ls", "-n", "acme")["namespace"] == newest


def test_several_models_end_with_2_and_options_that_work_when_pasted(
    cli: Cli, three: tuple[str, str, str]
) -> None:
    lines = cli("ls", code=2).stderr.splitlines()
    assert "3 namespaces fit" in lines[0]
    options = [line.strip().split(" ") for line in lines[1:]]
    assert options == [
        ["--model", "acme/vision-9b"],
        ["--model", "other/reader-2b"],
        *(["--namespace", name] for name in sorted(three)),
    ]
    for option in options:
        cli("ls", *option)


def test_model_of_a_namespace_without_descriptor_is_in_its_name(cli: Cli, corpus: Corpus) -> None:
    name = corpus.namespace(MODEL)
    corpus.namespace(FOREIGN)
    corpus.entry(name, content_hash("a"))
    corpus.client.delete_object(Bucket=corpus.bucket, Key=Layout(name).descriptor)
    assert cli.json("ls", "--model", "acme-vision-9b")["namespace"] == name


def test_model_name_with_a_line_break_forges_no_choice_and_no_note(
    cli: Cli, corpus: Corpus
) -> None:
    forged = {**MODEL, "model": "evil\x1b[2J\n  --namespace forged"}
    older = corpus.namespace(forged)
    newer = make_newer(corpus, {**forged, "dtype": "float16"}, older)
    notes: list[str] = []
    with Opened(load_settings({}).settings, note=notes.append) as opened:
        assert opened.choose() == newer
    assert [note.isprintable() for note in notes] == [True]
    other = corpus.namespace(FOREIGN)
    lines = cli("ls", code=2).stderr.splitlines()
    options = [line.strip().split(" ") for line in lines[1:]]
    slug = older.rpartition("-")[0]
    assert options == [
        ["--model", slug],
        ["--model", "other/reader-2b"],
        *(["--namespace", name] for name in sorted([older, newer, other])),
    ]
    for option in options:
        cli("ls", *option)


def test_what_bash_is_given_completes_in_bash(tmp_path: Path) -> None:
    script = tmp_path / "s3ec"
    script.write_text(f"#!{sys.executable}\nfrom s3ec.cli import main\nmain()\n")
    script.chmod(0o700)
    typed = [["mani"], ["manifest", "re"], ["ls", "--nd"]]
    lines = ['eval "$(s3ec --show-completion bash)"']
    for words in typed:
        lines += [
            f"COMP_WORDS=(s3ec {' '.join(words)}) COMP_CWORD={len(words)} COMPREPLY=()",
            '_s3ec_completion s3ec; echo "${COMPREPLY[*]}"',
        ]
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    out = subprocess.run(
        ["bash", "-c", "\n".join(lines)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert out.stdout.splitlines() == ["manifest", "rebuild", "--ndjson"]
