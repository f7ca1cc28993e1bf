# SPDX-License-Identifier: Apache-2.0
"""What others have named is printed without control characters, whatever prints it."""

from __future__ import annotations

import json
import logging
import unicodedata
from pathlib import Path

import pytest

from s3ec.cli.output import facts, json_text, plain_logs, print_note
from s3ec.identity import Layout
from tests.support.catalogues import row
from tests.support.corpora import IDS, Filled
from tests.support.folders import in_folder, put_over
from tests.unit.cli.conftest import Cli

# A title for the terminal, a colour by one byte, a turn of the writing, a line end.
EVIL = "evil\x1b]0;pwn\x07\x9b31m\u202egnp\u2028\n\r"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A corpus in a folder in which others have named what they could."""
    folder = tmp_path_factory.mktemp("corpus")
    with in_folder(folder) as corpus:
        filled = Filled(corpus)
        names = {"dtype": f"bf{EVIL}", "modality": f"image{EVIL}", "identifier": f"id{EVIL}"}
        told = row(EVIL, uri=EVIL, extra={EVIL: EVIL}, placeholder={EVIL: [1]}, **names)
        corpus.catalog(filled.name).append([told])
        put_over(folder, Layout(filled.name).object(corpus.key_of(IDS[0])), b"x" * 200)  # type: ignore[arg-type]
        put_over(folder, f"{filled.name}/catalog/01JC0000000000000000000000.parquet", b"junk")
        about = json.dumps({"model": EVIL, "dtype": EVIL}).encode()
        put_over(folder, "evil-0123456789abcdef/namespace.json", about)
    return folder, filled.name


@pytest.mark.parametrize(
    "words",
    [
        ["ls"],
        ["ls", "--json"],
        ["ls", "--ndjson"],
        ["ns"],
        ["ns", "--json"],
        ["catalog", "show"],
        ["catalog", "show", "--json"],
        ["catalog", "find", EVIL],
        ["catalog", "find", EVIL, "--json"],
        ["catalog", "find", "--identifier", f"no{EVIL}"],
        ["verify", "--deep"],
        ["verify", "--deep", "--json"],
        ["gc", "--older-than", "0s"],
        ["stat", f"id{EVIL}"],
        ["rm", f"id{EVIL}"],
        ["verify"],
        ["catalog", "export", f"no such folder{EVIL}/x.csv"],
    ],
    ids=lambda words: ascii(" ".join(words)),
)
def test_no_command_prints_control_characters(
    corpus: tuple[Path, str],
    cli: Cli,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    words: list[str],
) -> None:
    folder, namespace = corpus
    monkeypatch.setenv("S3EC_CACHE_DIR", str(tmp_path))
    where = [] if words[0] == "ns" else ["--namespace", namespace]
    result = cli.run(*words, *where, "--url", folder.as_uri())
    assert_printable(result.stdout + result.stderr)
    if "--json" in words:
        json.loads(result.stdout)


def assert_printable(text: str) -> None:
    kinds = {unicodedata.category(character) for character in text.replace("\n", "")}
    assert not kinds & {"Cc", "Cf", "Zl", "Zp"}, ascii(text)


def test_notes_facts_and_logs_pass_the_same_place(capsys: pytest.CaptureFixture[str]) -> None:
    print_note(EVIL)
    facts([(EVIL, EVIL), ("[red]", "[bold]")])
    before = logging.lastResort.formatter if logging.lastResort else None
    plain_logs()
    try:
        assert logging.lastResort is not None
        told = logging.LogRecord("s3ec", logging.WARNING, "", 1, "named %s", (EVIL,), None)
        logging.lastResort.handle(told)
    finally:
        assert logging.lastResort is not None
        logging.lastResort.setFormatter(before)
    said = capsys.readouterr()
    assert_printable(said.out + said.err)
    assert "[red]" in said.out
    assert "named evil" in said.err


def test_json_says_what_it_held() -> None:
    document = {EVIL: ["ä\U0001f600", "\ud800", "\U000e0001"]}
    text = json_text(document)
    assert_printable(text)
    assert json.loads(text) == document
