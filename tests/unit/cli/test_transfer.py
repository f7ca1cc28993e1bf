# SPDX-License-Identifier: Apache-2.0
"""``s3ec export``, ``import`` and ``cp``, with corpora in folders."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from s3ec.corpus import Corpus
from tests.support.corpora import IDS, Filled
from tests.support.folders import files_of, in_folder, object_name, objects_of, put_over
from tests.unit.cli.conftest import Cli
from tests.unit.cli.corpus import OTHER, content_hash


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Filled]:
    """A corpus that S3EC_URL names."""
    monkeypatch.setenv("S3EC_URL", (tmp_path / "here").as_uri())
    monkeypatch.setenv("S3EC_CACHE_DIR", str(tmp_path / "cache"))
    with in_folder(tmp_path / "here") as corpus:
        yield Filled(corpus)


@pytest.fixture
def there(tmp_path: Path) -> Iterator[Corpus]:
    with in_folder(tmp_path / "there") as corpus:
        yield corpus


def test_export_and_import_say_what_they_did(
    cli: Cli, here: Filled, there: Corpus, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    said = cli("export", str(disk)).stdout
    assert "copied 4 entries, 1" in said
    assert f"from {here.name} to {disk}" in said
    assert "4 were there" in cli("export", str(disk)).stdout
    url = (tmp_path / "there").as_uri()
    found = cli.json("import", str(disk), "--url", url)
    assert found == {
        "status": "complete",
        "namespace": here.name,
        "to_namespace": here.name,
        "copied": 4,
        "bytes": sum(map(len, objects_of(here.corpus, here.name).values())),
        "by_server": 0,
        "present": 0,
        "skipped": 0,
        "announced": 4,
        "catalogued": 0,
        "failed": 0,
        "failures": [],
    }
    assert objects_of(there, here.name) == objects_of(here.corpus, here.name)


def test_exit_status_tells_a_part_from_nothing(cli: Cli, here: Filled, tmp_path: Path) -> None:
    disk = str(tmp_path / "disk")
    absent = tmp_path / "absent.txt"
    absent.write_text(f"{content_hash('nothing')}\n")
    assert cli.json("export", disk, "--ids", str(absent), code=1)["status"] == "failed"
    put_over(tmp_path / "here", object_name(here.name, IDS[1]), b"not an entry")
    assert cli.json("export", disk, code=3)["status"] == "partial"
    shown = cli("export", disk, code=3)
    assert "1 failed" in shown.stdout
    assert f"failed: {IDS[1]}: corrupt entry" in shown.stderr


def test_a_list_may_come_from_stdin_or_a_file_of_windows(
    cli: Cli, here: Filled, tmp_path: Path
) -> None:
    listed = tmp_path / "listed.txt"
    listed.write_bytes(f"{IDS[0]}\r\n\r\n{IDS[3]}\r\n".encode())
    assert cli.json("export", str(tmp_path / "disk"), "--ids", str(listed))["copied"] == 2


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (["--ids", "NOTHING"], "ids"),
        (["--ids", "EMPTY"], "ids"),
        (["--rate-limit", "fast"], "rate_limit"),
        (["--rate-limit", "0"], "rate_limit"),
        (["--adapter", "\ud800"], "adapter"),
    ],
)
def test_bad_options_are_named(
    cli: Cli, here: Filled, tmp_path: Path, words: list[str], field: str
) -> None:
    (tmp_path / "empty.txt").write_text("\n\n")
    places = {"NOTHING": str(tmp_path / "nothing.txt"), "EMPTY": str(tmp_path / "empty.txt")}
    given = [places.get(word, word) for word in words]
    found = cli.json("export", str(tmp_path / "disk"), *given, code=2)["error"]
    assert (found["kind"], found["field"]) == ("usage", field)
    assert found["fix"]
    assert not (tmp_path / "disk").exists()


def test_vllms_layout_by_the_command_line(
    cli: Cli, here: Filled, there: Corpus, tmp_path: Path
) -> None:
    ec = str(tmp_path / "ec")
    said = cli("export", ec, "--layout", "vllm").stdout
    assert "2 skipped: no content hash" in said
    name = Filled.namespace(Filled(there), OTHER)
    url = ["--url", (tmp_path / "there").as_uri()]
    found = cli.json("import", ec, *url, "--layout", "vllm", "-n", name, "--modality", "video")
    assert (found["copied"], found["to_namespace"]) == (2, name)
    for words in (["--to-namespace", name], ["--same-encoder"]):
        found = cli.json("import", ec, *url, "--layout", "vllm", *words, code=2)["error"]
        assert found["field"] == "to_namespace"
    found = cli.json("import", ec, *url, "--modality", "video", code=2)["error"]
    assert found["field"] == "modality"


def test_cp_between_places_and_namespaces(
    cli: Cli, here: Filled, there: Corpus, tmp_path: Path
) -> None:
    src, dst = (tmp_path / "here").as_uri(), (tmp_path / "there").as_uri()
    assert f"from {here.name} to {dst}/{here.name}" in cli("cp", src, dst).stdout
    assert objects_of(there, here.name) == objects_of(here.corpus, here.name)
    other = here.namespace(OTHER)
    words = ["cp", src, src, "-n", here.name, "--to-namespace", other]
    found = cli.json(*words, code=2)["error"]
    assert (found["field"], "--same-encoder" in found["message"]) == ("same_encoder", True)
    assert cli.json(*words, "--same-encoder")["copied"] == 4
    assert here.corpus.verify(other).index.objects == 4


def test_cp_refuses_what_is_no_place(cli: Cli, here: Filled, tmp_path: Path) -> None:
    src = (tmp_path / "here").as_uri()
    assert "same place" in cli("cp", src, src, code=2).stderr
    assert "s3://BUCKET/PREFIX" in cli("cp", src, "elsewhere", code=2).stderr
    assert "no such folder" in cli("cp", src, f"{src}-not", code=1).stderr
    found = cli.json("cp", src, f"{src}-not", "--bucket", "embeddings", code=2)["error"]
    assert (found["field"], found["fix"]) == ("bucket", "leave it out")
    assert "--to-config" in cli("cp", src, f"{src}-not", "--to-config", "{", code=2).stderr


def test_settings_of_one_server_do_not_reach_a_folder(
    cli: Cli, here: Filled, there: Corpus, tmp_path: Path
) -> None:
    """--endpoint-url is of the buckets among the two."""
    dst = (tmp_path / "there").as_uri()
    words = ["--endpoint-url", "http://127.0.0.1:1", "--region", "us-east-1"]
    cli("cp", (tmp_path / "here").as_uri(), dst, *words)
    assert len(files_of(tmp_path / "there")) > 4
