# SPDX-License-Identifier: Apache-2.0
"""``s3ec verify`` against moto: what it says, what it mends, and what it leaves alone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from s3ec.identity import Layout, make_key
from tests.unit.cli.conftest import Cli
from tests.unit.cli.corpus import MODEL, Corpus, content_hash, entry_bytes
from tests.unit.cli.test_manifest import announce


@pytest.fixture
def namespace(corpus: Corpus) -> str:
    name = corpus.namespace(MODEL)
    announce(corpus, name, content_hash("a"), content_hash("b"), "page 1", ago_s=3600)
    return name


def object_of(namespace: str, identifier: str) -> str:
    key = make_key(identifier)
    assert key is not None
    return Layout(namespace).object(key)


def damage(corpus: Corpus, namespace: str, identifier: str) -> str:
    body = bytearray(entry_bytes(identifier, namespace))
    body[-1] ^= 1
    name = object_of(namespace, identifier)
    corpus.put(name, bytes(body))
    return name


def test_sound_corpus_is_said_to_agree(cli: Cli, corpus: Corpus, namespace: str) -> None:
    found = cli.json("verify", "--deep")
    assert (found["namespace"], found["ok"], found["missing_count"]) == (namespace, True, 0)
    deep = found["deep"]
    assert (deep["object_count"], deep["corrupt_count"], deep["unread_count"]) == (3, 0, 0)
    assert "deep" not in cli.json("verify")
    shown = cli("verify", "--deep").stdout
    assert re.search(r"deep: objects +3$", shown, re.M)


def test_corrupt_object_is_named_and_only_deleted_with_yes(
    cli: Cli, corpus: Corpus, namespace: str
) -> None:
    name = damage(corpus, namespace, "page 1")
    found = cli.json("verify", "--deep", code=1)
    assert found["deep"]["corrupt"] == [
        {"object": name, "reason": "checksum", "message": found["deep"]["corrupt"][0]["message"]}
    ]
    assert cli.json("verify")["ok"]  # nobody has looked
    for options in ((), ("--dry-run",)):
        result = cli("verify", "--deep", "--repair", *options, code=1)
        assert "corrupt" in result.stdout
        assert "delete 1 corrupt object" in result.stderr or not options
    mended = cli.json("verify", "--deep", "--repair", "--yes")
    assert (mended["ok"], mended["dry_run"]) == (True, False)
    assert mended["repaired"].pop("snapshot_name")
    assert mended["repaired"] == {"deleted": 1, "spared_count": 0, "dropped_row_count": 0}
    found = cli.json("verify", "--deep")
    assert (found["ok"], found["entry_count"], found["object_count"]) == (True, 2, 2)


def test_state_is_kept_and_its_result_mended_without_reading_again(
    cli: Cli, corpus: Corpus, namespace: str, tmp_path: Path
) -> None:
    damage(corpus, namespace, "page 1")
    folder = str(tmp_path / "audit")
    found = cli.json("verify", "--deep", "--state", folder, code=1)
    assert found["deep"]["resumed_count"] == 0
    result = cli("verify", "--deep", "--state", folder, "--repair", "--yes")
    assert re.search(r"^deleted +1$", result.stdout, re.M)
    assert cli.json("verify", "--deep", "--state", folder)["deep"]["object_count"] == 2


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (("--state", "x"), "state"),
        (("--deep", "--yes"), "yes"),
        (("--repair", "-y", "--dry-run"), None),
    ],
)
def test_options_that_mean_nothing_are_refused(
    cli: Cli, corpus: Corpus, namespace: str, options: tuple[str, ...], field: str | None
) -> None:
    assert cli.json("verify", *options, code=2)["error"]["field"] == field
