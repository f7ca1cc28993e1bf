# SPDX-License-Identifier: Apache-2.0
"""ls: what is chosen, in which order, how many in all; for people and for programs."""

from __future__ import annotations

import json
from typing import Any

import pytest

from s3ec.identity import Layout, digest_of_name, make_key
from tests.unit.cli.conftest import Cli
from tests.unit.cli.corpus import MODEL, Corpus, content_hash, entry_bytes

# By growing size.
HASHES = sorted(content_hash(str(number)) for number in range(5))
LORA = f"adapter:{content_hash('lora')}"


@pytest.fixture
def namespace(corpus: Corpus) -> str:
    """Five entries of the base model, one of an adapter, one under a client's own name."""
    name = corpus.namespace(MODEL)
    for rows, identifier in enumerate(HASHES, start=1):
        corpus.entry(name, identifier, entry_bytes(identifier, name, rows=rows * 1000))
    corpus.entry(name, LORA)
    corpus.entry(name, "page 1")
    return name


def labels(found: dict[str, Any]) -> list[str]:
    return [entry["label"] for entry in found["entries"]]


def test_totals_are_of_all_that_fit_and_not_of_the_page(
    cli: Cli, corpus: Corpus, namespace: str
) -> None:
    everything = cli.json("ls")
    assert everything["entry_count"] == 7
    assert everything["bytes"] == sum(entry["bytes"] for entry in everything["entries"])
    page = cli.json("ls", "--limit", "2")
    assert len(page["entries"]) == 2
    assert page["more"]
    assert (page["entry_count"], page["bytes"]) == (7, everything["bytes"])
    out = cli("ls", "--limit", "2")
    assert len(out.stdout.splitlines()) == 1 + 2
    assert "7 entries, " in out.stderr
    assert "2 shown" in out.stderr
    assert not cli.json("ls", "--limit", "0")["more"]
    assert labels(everything) == sorted(labels(everything))
    assert labels(page) == labels(everything)[:2]


def test_rows_have_label_identifier_digest_and_object(cli: Cli, namespace: str) -> None:
    rows = {row["label"]: row for row in cli.json("ls")["entries"]}
    for identifier in (HASHES[0], LORA):
        key = make_key(identifier)
        assert key is not None
        assert rows[identifier]["identifier"] == identifier
        assert rows[identifier]["digest"] == digest_of_name(key.name).hex()
        assert rows[identifier]["object"] == Layout(namespace).object(key)
    assert rows[f"x-{content_hash('page 1')}"]["identifier"] is None


def test_ndjson_is_one_object_a_line_of_all(cli: Cli, namespace: str) -> None:
    out = cli("ls", "--ndjson")
    rows = {row["label"]: row for row in map(json.loads, out.stdout.splitlines())}
    expected = {row["label"]: row for row in cli.json("ls")["entries"]}
    assert rows.keys() == expected.keys()
    for label, row in rows.items():
        assert {**row, "age_s": 0} == {**expected[label], "age_s": 0}
    assert "7 entries" in out.stderr
    two = cli("ls", "--ndjson", "--limit", "2")
    assert len(two.stdout.splitlines()) == 2
    assert "7 entries" in two.stderr
