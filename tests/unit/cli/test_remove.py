# SPDX-License-Identifier: Apache-2.0
"""``s3ec rm`` and ``s3ec gc`` against moto."""

from __future__ import annotations

import pytest

from s3ec.identity import Layout
from tests.unit.cli.conftest import Cli
from tests.unit.cli.corpus import MODEL, Corpus, content_hash
from tests.unit.cli.test_manifest import announce


@pytest.fixture
def namespace(corpus: Corpus) -> str:
    name = corpus.namespace(MODEL)
    announce(corpus, name, 1, content_hash("a"), content_hash("b"), "page 1", "page 2")
    return name


def labels(cli: Cli) -> set[str]:
    return {entry["id"] for entry in cli.json("ls")["entries"]}


def test_rm_deletes_by_identifier_and_tells_the_index(
    cli: Cli, corpus: Corpus, namespace: str
) -> None:
    cli("manifest", "compact")
    assert cli.json("rm", "page 1", content_hash("a")) == {
        "namespace": namespace,
        "deleted": 2,
        "absent": [],
    }
    assert labels(cli) == {content_hash("b"), f"x-{content_hash('page 2')}"}
    assert cli.json("manifest", "verify")["agrees"]
    assert cli.json("manifest", "compact")["entries"] == 2


def test_rm_takes_no_part_of_a_hash(cli: Cli, corpus: Corpus, namespace: str) -> None:
    found = cli.json("rm", content_hash("a")[:12], code=1)
    assert (found["deleted"], found["absent"]) == (0, [content_hash("a")[:12]])
    assert len(labels(cli)) == 4


def test_rm_deletes_the_rest_where_one_is_absent(cli: Cli, corpus: Corpus, namespace: str) -> None:
    result = cli("rm", "page 1", "no such page", code=1)
    assert "deleted 1 entries" in result.stdout
    assert "not there: no such page" in result.stderr
    assert len(labels(cli)) == 3


def test_rm_by_name_takes_what_ls_prints(cli: Cli, corpus: Corpus, namespace: str) -> None:
    for label in labels(cli):
        cli("rm", "--name", label)
    assert labels(cli) == set()


def test_rm_by_name_refuses_what_is_no_name(cli: Cli, corpus: Corpus, namespace: str) -> None:
    for text in ("page 1", "../x", "x-12", "größe"):
        assert "no name of an entry" in cli("rm", "--name", text, code=2).stderr
    assert len(labels(cli)) == 4


def test_gc_deletes_nothing_without_yes(cli: Cli, corpus: Corpus, namespace: str) -> None:
    found = cli.json("gc", "--older-than", "1min")
    assert (found["entries"], found["deleted"]) == (0, False)
    assert "would delete 0 entries" in cli("gc", "--older-than", "90d").stdout
    assert len(labels(cli)) == 4


def test_gc_with_yes_deletes_what_is_older(
    cli: Cli, corpus: Corpus, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An age of nothing: moto dates objects by whole seconds, so these may be a second old."""
    monkeypatch.setattr("s3ec.cli.remove._UNITS_S", {"min": -60})
    found = cli.json("gc", "--older-than", "1min", "--yes")
    assert (found["entries"], found["deleted"]) == (4, True)
    assert labels(cli) == set()
    assert (
        corpus.client.list_objects_v2(Bucket=corpus.bucket, Prefix=Layout(namespace).deltas)[
            "KeyCount"
        ]
        >= 2
    )
    assert cli.json("manifest", "verify")["agrees"]


@pytest.mark.parametrize("age", ["", "90", "d", "-1d", "0d", "1y", "1e9d"])
def test_gc_refuses_what_is_no_age(cli: Cli, corpus: Corpus, namespace: str, age: str) -> None:
    assert "is no age" in cli("gc", f"--older-than={age}", code=2).stderr
