# SPDX-License-Identifier: Apache-2.0
"""``s3ec manifest`` against moto."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from s3ec.index.rows import EntryInfo
from tests.unit.index.manifests import delta_bytes, ulid_of

from s3ec.identity import Layout, make_key
from tests.unit.cli.conftest import Cli
from tests.unit.cli.corpus import MODEL, Corpus, content_hash


def announce(corpus: Corpus, namespace: str, number: int, *identifiers: str) -> None:
    """Put entries and a delta that tells of them."""
    rows = []
    for identifier in identifiers:
        blob = corpus.entry(namespace, identifier)
        key = make_key(identifier)
        assert key is not None
        rows.append((key.digest, EntryInfo(len(blob), 4, 8, "bfloat16", 1, 1_700_000_000 + number)))
    layout = Layout(namespace)
    corpus.put(layout.delta(ulid_of(number)), delta_bytes(rows, layout))


@pytest.fixture
def namespace(corpus: Corpus) -> str:
    return corpus.namespace(MODEL)


def test_show_before_and_after_the_first_base(cli: Cli, corpus: Corpus, namespace: str) -> None:
    announce(corpus, namespace, 1, content_hash("a"), content_hash("b"))
    found = cli.json("manifest", "show")
    assert (found["namespace"], found["base"]) == (namespace, None)
    assert (found["deltas"]["waiting_count"], found["deltas"]["merged_count"]) == (1, 0)
    assert "none yet" in cli("manifest", "show").stdout
    cli("manifest", "compact")
    announce(corpus, namespace, 2, content_hash("c"))
    found = cli.json("manifest", "show")
    assert (found["base"]["version"], found["base"]["entry_count"]) == (1, 2)
    assert (found["deltas"]["waiting_count"], found["deltas"]["merged_count"]) == (1, 1)
    assert found["superseded"] == {"object_count": 0, "bytes": 0}
    text = cli("manifest", "show").stdout
    for part in (namespace, "version 1", "1 delta,"):
        assert part in text


def test_compact_merges_what_was_announced(cli: Cli, corpus: Corpus, namespace: str) -> None:
    cli("manifest", "compact")
    for number in range(3):
        announce(corpus, namespace, number, content_hash(str(number)))
    made = cli.json("manifest", "compact")
    names = ("version", "entry_count", "shard_count", "merged", "deleted", "waiting_count")
    assert {name: made[name] for name in names} == {
        "version": 2,
        "entry_count": 3,
        "shard_count": 1,
        "merged": 3,
        "deleted": 0,
        "waiting_count": 0,
    }
    assert cli.json("manifest", "compact")["merged"] == 0
    assert "base 2: 3 entries" in cli("manifest", "compact").stdout


def test_compact_names_what_it_left_out(cli: Cli, corpus: Corpus, namespace: str) -> None:
    cli("manifest", "compact")
    name = Layout(namespace).delta(ulid_of(1))
    corpus.put(name, b"nothing")
    assert name in cli("manifest", "compact", code=1).stderr
    assert list(cli.json("manifest", "compact", code=1)["corrupt"]) == [ulid_of(1)]


def test_verify_tells_what_rebuild_mends(cli: Cli, corpus: Corpus, namespace: str) -> None:
    announce(corpus, namespace, 1, content_hash("a"), content_hash("b"))
    assert cli.json("manifest", "verify")["ok"]
    key = make_key(content_hash("a"))
    assert key is not None
    corpus.client.delete_object(Bucket=corpus.bucket, Key=Layout(namespace).object(key))
    found = cli.json("manifest", "verify", code=1)
    kinds = ("missing_count", "extra_count", "differing_count")
    assert [found[kind] for kind in kinds] == [0, 1, 0]
    digest = key.digest.hex()
    assert found["extra"] == [{"label": None, "object": None, "digest": digest}]
    result = cli("manifest", "verify", code=1)
    assert "manifest rebuild" in result.stderr
    assert f"no object; digest {digest}" in result.stdout
    made = cli.json("manifest", "rebuild")
    assert (made["version"], made["entry_count"]) == (1, 1)
    assert "1 objects" not in cli("manifest", "verify").stderr


@pytest.mark.parametrize("few", [0, 4096])
def test_verify_names_what_stat_finds(
    cli: Cli, corpus: Corpus, namespace: str, monkeypatch: pytest.MonkeyPatch, few: int
) -> None:
    monkeypatch.setattr("s3ec.index.listing.FEW", few)
    monkeypatch.setattr("s3ec.index.rebuild._UNANNOUNCED_S", -600.0)
    announce(corpus, namespace, 1, content_hash("a"), "page 1")
    for identifier in ("page 2", f"adapter:{content_hash('b')}"):
        corpus.entry(namespace, identifier)
    corpus.entry(namespace, "page 1", b"another size")
    found = cli.json("manifest", "verify", code=1)
    expected = {f"x-{content_hash('page 2')}", f"adapter:{content_hash('b')}"}
    assert {row["label"] for row in found["missing"]} == expected
    (differing,) = found["differing"]
    assert differing["label"] == f"x-{content_hash('page 1')}"
    text = cli("manifest", "verify", code=1).stdout
    for row in found["missing"]:
        assert cli.json("stat", row["label"])["object"] == row["object"]
        assert row["label"] in text


@pytest.mark.parametrize("prefix", ["", "a/b", "größe/圖 片"])
def test_any_prefix_will_do(cli: Cli, make_corpus: Callable[..., Corpus], prefix: str) -> None:
    corpus = make_corpus(prefix)
    namespace = corpus.namespace(MODEL)
    announce(corpus, namespace, 1, content_hash("a"), f"adapter:{content_hash('a')}", "größe")
    assert cli.json("manifest", "rebuild")["entry_count"] == 3
    announce(corpus, namespace, 2, "page 2")
    assert cli.json("manifest", "compact")["entry_count"] == 4
    assert cli.json("manifest", "verify")["ok"]


def test_of_several_namespaces_one_must_be_named(cli: Cli, corpus: Corpus) -> None:
    names = [corpus.namespace(MODEL), corpus.namespace({**MODEL, "model": "acme/other"})]
    assert names[0] in cli("manifest", "show", code=2).stderr
    assert cli.json("manifest", "show", "--namespace", names[1])["namespace"] == names[1]


def test_a_damaged_base_is_named_and_a_rebuild_mends_it(
    cli: Cli, corpus: Corpus, namespace: str
) -> None:
    announce(corpus, namespace, 1, content_hash("a"))
    cli("manifest", "compact")
    corpus.put(Layout(namespace).head(2), b"{}")
    assert Layout(namespace).head(2) in cli("manifest", "compact", code=1).stderr
    cli("manifest", "rebuild")
    assert cli.json("manifest", "show")["base"]["version"] == 3
