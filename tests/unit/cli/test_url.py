# SPDX-License-Identifier: Apache-2.0
"""Every command that reads a corpus, with one that lies in a folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from s3ec.identity import Layout, Namespace, make_key
from tests.unit.cli.conftest import Cli
from tests.unit.cli.corpus import MODEL, content_hash, entry_bytes


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A corpus of one entry, in a folder with a space in its name; S3EC_URL names it."""
    folder = tmp_path / "a corpus"
    namespace = Namespace.from_descriptor(MODEL)
    layout = Layout(namespace.name)
    key = make_key(content_hash("one"))
    assert key is not None
    for name, body in {
        layout.descriptor: namespace.to_json(),
        layout.object(key): entry_bytes(content_hash("one"), namespace.name),
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(body)
    monkeypatch.setenv("S3EC_URL", folder.as_uri())
    monkeypatch.setenv("S3EC_CACHE_DIR", str(tmp_path / "cache"))
    return folder


def test_doctor_examines_a_folder_and_leaves_nothing(cli: Cli, folder: Path) -> None:
    before = sorted(folder.rglob("*.*"))
    checks = {check["name"]: check for check in cli.json("doctor", "--timeout", "100")["checks"]}
    assert "credentials" not in checks
    for name in ("settings", "bucket", "read", "write", "conditional_put"):
        assert checks[name]["verdict"] == "ok", checks[name]
    assert folder.as_uri() in checks["bucket"]["found"]
    assert [path for path in sorted(folder.rglob("*.*")) if path.is_file()] == [
        path for path in before if path.is_file()
    ]


def test_a_url_and_a_bucket_as_options_end_with_2_and_say_what_to_remove(
    cli: Cli, folder: Path
) -> None:
    result = cli("ls", "--bucket", "embeddings", "--url", folder.as_uri(), code=2)
    assert "`bucket`" in result.stderr
    assert "`url`; remove one" in result.stderr


def test_a_folder_that_is_not_there_ends_with_1_and_says_so(cli: Cli, tmp_path: Path) -> None:
    result = cli("ls", "--url", (tmp_path / "absent").as_uri(), code=1)
    assert "no such folder" in result.stderr


def test_a_cloud_that_lacks_a_setting_ends_with_2_and_names_it(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    for command in ("ls", "doctor"):
        result = cli(command, "--url", "az://container/corpus", code=2)
        assert "AZURE_STORAGE_ACCOUNT_NAME" in result.stderr
