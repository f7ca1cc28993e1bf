# SPDX-License-Identifier: Apache-2.0
"""The JSON of commands that look into a corpus has no word that docs/cli.md does not explain."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.cli.conftest import Cli
from tests.unit.cli.corpus import MODEL, Corpus, content_hash, entry_bytes

PAGE = (Path(__file__).parents[3] / "docs/cli.md").read_text()
WORDS = set(re.findall(r"`([a-z0-9_]+)`", "".join(re.findall(r"^\| `.*$", PAGE, re.MULTILINE))))
# Not ours: whatever an engine put there.
FOREIGN = {"descriptor", "placeholder"}
ONE, BAD = content_hash("one"), content_hash("bad")

COMMANDS = [
    ["ns"],
    ["ns", "--count"],
    ["ls"],
    ["ls", "--modality", "image"],
    ["ls", "--made-by", "vllm=*"],
    ["stat", ONE],
    ["stat", ONE, "--verify"],
    ["get", ONE, "-o", "FOLDER"],
]


def pairs(document: Any) -> Iterator[tuple[str, Any]]:
    """All keys and values of a document, those of inner ones included."""
    if isinstance(document, list):
        for inner in document:
            yield from pairs(inner)
    elif isinstance(document, dict):
        for key, value in document.items():
            yield key, value
            if key not in FOREIGN:
                yield from pairs(value)


def check(key: str, value: Any) -> None:
    """One key means what the page says."""
    if key.endswith("_count"):
        assert value is None or type(value) is int, key
    elif key.endswith("_s"):
        assert value is None or type(value) in (int, float), key
    elif key.endswith("_bytes"):
        assert type(value) is int, key
    else:
        assert key in WORDS, key
    if key in ("entries", "namespaces"):
        assert isinstance(value, list), key


@pytest.fixture
def namespace(corpus: Corpus) -> str:
    """A namespace with one sound and one damaged entry."""
    name = corpus.namespace(MODEL)
    corpus.entry(name, ONE)
    corpus.entry(name, BAD, entry_bytes(BAD, name)[:-1] + b"\0")
    return name


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_key_is_explained(
    cli: Cli, namespace: str, tmp_path: Path, command: list[str]
) -> None:
    words = [str(tmp_path) if word == "FOLDER" else word for word in command]
    found = list(pairs(cli.json(*words)))
    assert found
    for key, value in found:
        check(key, value)


def test_every_key_beside_an_error_is_explained(cli: Cli, namespace: str) -> None:
    document = cli.json("stat", BAD, "--verify", code=1)
    error = document.pop("error")
    assert set(error) == {"kind", "message", "field", "fix"}
    for key, value in pairs(document):
        check(key, value)
