# SPDX-License-Identifier: Apache-2.0
"""``s3ec manifest`` against moto."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from s3ec.identity import Layout, make_key
from s3ec.index import maker
from s3ec.index.names import Names, SnapshotName, snapshots_prefix
from tests.support.indexes import delta_bytes, delta_name
from tests.unit.cli.conftest import Cli
from tests.unit.cli.corpus import MODEL, Corpus, content_hash


def announce(corpus: Corpus, namespace: str, *identifiers: str, ago_s: float = 0.0) -> None:
    """Put entries and a delta that tells of them, as of so long ago."""
    sizes = {}
    for identifier in identifiers:
        key = make_key(identifier)
        assert key is not None
        sizes[key.digest] = len(corpus.entry(namespace, identifier))
    layout = Layout(namespace)
    corpus.put(delta_name(layout, ago_s=ago_s), delta_bytes(sizes, layout))


@pytest.fixture
def namespace(corpus: Corpus) -> str:
    return corpus.namespace(MODEL)


def test_verify_tells_what_rebuild_mends(cli: Cli, corpus: Corpus, namespace: str) -> None:
    announce(corpus, namespace, content_hash("a"), content_hash("b"), ago_s=3600)
    before = cli.json("verify")
    assert (before["ok"], before["snapshot_name"]) == (True, None)
    key = make_key(content_hash("a"))
    assert key is not None
    corpus.client.delete_object(Bucket=corpus.bucket, Key=Layout(namespace).object(key))
    found = cli.json("verify", code=1)
    names = ("entry_count", "object_count", "extra_count", "missing_count")
    assert [found[name] for name in names] == [2, 1, 1, 0]
    result = cli("verify", code=1)
    assert "manifest rebuild" in result.stderr
    assert "1 entries of the index have no object" in result.stdout
    assert cli.json("manifest", "rebuild")["entry_count"] == 1
    assert "1 objects" not in cli("verify").stderr


def test_verify_counts_what_nobody_announced(
    cli: Cli, corpus: Corpus, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    announce(corpus, namespace, content_hash("a"))
    for identifier in ("page 2", f"adapter:{content_hash('b')}"):
        corpus.entry(namespace, identifier)
    assert cli.json("verify")["unannounced_count"] == 2  # in a moment they may be
    monkeypatch.setattr(maker, "YOUNG_S", -600.0)
    found = cli.json("verify", code=1)
    assert (found["missing_count"], found["extra_count"]) == (2, 0)
    assert "2 objects are not in the index" in cli("verify", code=1).stdout


@pytest.mark.parametrize("prefix", ["", "a/b", "größe/圖 片"])
def test_any_prefix_will_do(cli: Cli, make_corpus: Callable[..., Corpus], prefix: str) -> None:
    corpus = make_corpus(prefix)
    namespace = corpus.namespace(MODEL)
    announce(corpus, namespace, content_hash("a"), f"adapter:{content_hash('a')}", "größe")
    assert cli.json("manifest", "rebuild")["entry_count"] == 3
    announce(corpus, namespace, "page 2")
    found = cli.json("verify")
    assert (found["ok"], found["entry_count"]) == (True, 4)


@pytest.mark.parametrize("kind", ["snapshot", "delta"])
def test_a_damaged_file_is_named_and_a_rebuild_goes_on_without_it(
    cli: Cli, corpus: Corpus, namespace: str, kind: str
) -> None:
    announce(corpus, namespace, content_hash("a"), ago_s=100)
    layout, ulid = Layout(namespace), Names().next(time.time() - 100)
    snapshot = f"{snapshots_prefix(layout)}{SnapshotName(ulid, ulid)}"
    name = snapshot if kind == "snapshot" else delta_name(layout)
    corpus.put(name, b"{}")
    found = cli.json("verify", code=1)
    assert (list(found["refused"]), found["entry_count"]) == ([name], 1)
    assert name in cli("verify", code=1).stderr
    announce(corpus, namespace, content_hash("b"))
    assert cli.json("manifest", "rebuild")["entry_count"] == 2
    assert cli.json("verify", code=int(kind == "delta"))["extra_count"] == 0
