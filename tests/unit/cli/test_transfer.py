# SPDX-License-Identifier: Apache-2.0
"""``s3ec export`` and ``import``, with corpora in folders."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from s3ec.corpus import Corpus
from tests.support.corpora import IDS, Filled
from tests.support.folders import in_folder, object_name, objects_of, put_over
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
    assert re.search(r"^copied +4$", said, re.M)
    assert here.name in said
    assert re.search(r"^present +4$", cli("export", str(disk)).stdout, re.M)
    url = (tmp_path / "there").as_uri()
    found = cli.json("import", str(disk), "--url", url)
    assert found == {
        "status": "complete",
        "namespace": here.name,
        "copied": 4,
        "bytes": sum(map(len, objects_of(here.corpus, here.name).values())),
        "present": 0,
        "skipped": 0,
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
    assert re.search(r"^failed +1$", shown.stdout, re.M)
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


def test_a_folder_of_something_else_is_told_so(cli: Cli, here: Filled, tmp_path: Path) -> None:
    pages = tmp_path / "pages"
    pages.mkdir()
    (pages / "p.png").write_bytes(b"png")
    for layout in ("s3ec", "vllm"):
        words = ["import", str(pages), "--layout", layout, "--url", (tmp_path / "here").as_uri()]
        error = cli.json(*words, code=1)["error"]
        assert error["kind"] == "not_found"
        assert f"{pages} holds no " in error["message"]


def test_vllms_layout_by_the_command_line(
    cli: Cli, here: Filled, there: Corpus, tmp_path: Path
) -> None:
    data = bytes(64)
    header = b'{"ec_cache":{"dtype":"BF16","shape":[4,8],"data_offsets":[0,64]}}'
    body = len(header).to_bytes(8, "little") + header + data
    put_over(tmp_path / "ec", f"{IDS[0]}/encoder_cache.safetensors", body)
    put_over(tmp_path / "ec", "page-12/encoder_cache.safetensors", body)
    name = Filled.namespace(Filled(there), OTHER)
    words = ["import", str(tmp_path / "ec"), "--url", (tmp_path / "there").as_uri()]
    found = cli.json(*words, "--layout", "vllm", "-n", name, "--modality", "video")
    assert (found["copied"], found["skipped"], found["namespace"]) == (1, 1, name)
    shown = cli(*words, "--layout", "vllm", "-n", name).stdout
    assert re.search(r"^skipped +1 of no content hash$", shown, re.M)
    found = cli.json(*words, "--modality", "video", code=2)["error"]
    assert found["field"] == "modality"
