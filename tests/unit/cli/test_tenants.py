# SPDX-License-Identifier: Apache-2.0
"""The commands that take identifiers, on a corpus whose names need a secret."""

from __future__ import annotations

from pathlib import Path

import pytest

from s3ec.identity import Layout, make_key
from s3ec.tenant import Tenant
from tests.unit.cli.conftest import Cli
from tests.unit.cli.corpus import MODEL, Corpus, content_hash, entry_bytes

TENANT = Tenant(b"the secret of acme, long enough")
IDENTIFIERS = ["page 1", content_hash("a"), f"my-lora:{content_hash('a')}"]


@pytest.fixture
def namespace(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> str:
    name = corpus.namespace({**MODEL, "tenant": TENANT.id})
    for identifier in IDENTIFIERS:
        key = make_key(identifier, TENANT)
        assert key is not None
        corpus.put(Layout(name).object(key), entry_bytes(key.stored, name))
    monkeypatch.setenv("ACME", "the secret of acme, long enough")
    monkeypatch.setenv("S3EC_TENANT_KEY", "env:ACME")
    return name


def test_with_the_secret_entries_are_found_read_and_deleted_by_their_identifiers(
    cli: Cli, namespace: str, tmp_path: Path
) -> None:
    for identifier in IDENTIFIERS:
        key = make_key(identifier, TENANT)
        assert key is not None
        assert cli.json("stat", identifier, "--verify")["identifier"] == key.stored
    assert cli.json("get", IDENTIFIERS[2], "-o", str(tmp_path / "entry"))["verified"]
    assert cli.json("rm", *IDENTIFIERS, "--yes")["deleted"] == 3
    cli("stat", IDENTIFIERS[0], code=1)


def test_what_ls_prints_finds_an_entry_without_the_secret(
    cli: Cli, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("S3EC_TENANT_KEY")
    labels = [entry["label"] for entry in cli.json("ls")["entries"]]
    assert all(label.startswith("t-") for label in labels)
    for label in labels:
        # Of an adapter's entry the folder is needed in full, of its hash the beginning is enough.
        cut = len(label) - 40
        assert cli.json("stat", label, "--verify")["identifier"] == label
        assert cli.json("stat", label[:cut])["identifier"] == label
    assert cli.json("rm", *labels, "--yes")["deleted"] == 3
