# SPDX-License-Identifier: Apache-2.0
"""``s3ec precompute``: options that cannot work, and what its exit status says."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from s3ec.corpus import Corpus
from s3ec.corpus.encoder import Encoded, EncoderError, Picture
from s3ec.settings import Settings
from tests.unit.cli.conftest import Cli
from tests.unit.corpus.test_precompute import FakeEncoder


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--engine", "slurm"], "'slurm' is not one of 'local'"),
        (["--ray-workers", "4"], "`--ray-workers` is for `--engine ray`"),
        (["--engine", "ray", "--ray-workers", "many"], "write it as `4` or `1-8`"),
        (["--engine", "ray", "--ray-workers", "8-1"], "`ray_workers` 8-1: at least 1"),
        (["--engine", "ray", "--batch", "0"], "`batch` must be 1 or more"),
        (["--engine", "ray"], "needs ray"),
        (["--dpi", "5"], "`dpi` is from 18 to 1200, not 5"),
    ],
)
def test_options_that_cannot_work_are_refused(
    options: list[str], says: str, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setenv("S3EC_BUCKET", "embeddings")
    monkeypatch.setenv("S3EC_CACHE_DIR", str(tmp_path / "tier"))
    refused = cli("precompute", str(tmp_path), "--model", "m", *options, code=2)
    assert says in " ".join(refused.stderr.split())


@pytest.fixture
def opened() -> Iterator[Callable[[Settings], Corpus]]:
    """Opens corpora for encoders, which do not close them."""
    with ExitStack() as stack:
        yield lambda settings: stack.enter_context(Corpus(settings))


@pytest.fixture
def folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opened: Callable[[Settings], Corpus]
) -> Path:
    """Of pictures, beside a corpus, for an encoder that writes as vLLM does."""

    def encoder(model: str, settings: Settings, **_: Any) -> FakeEncoder:
        def write(count: int) -> None:
            sys.stdout.write("a logger's line\n")
            os.write(2, b"a process's line\n")

        return FakeEncoder(opened(settings), before_each=write)

    monkeypatch.setattr("s3ec.corpus.precompute.VllmEncoder", encoder)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("S3EC_URL", (tmp_path / "corpus").as_uri())
    monkeypatch.setenv("S3EC_CACHE_DIR", str(tmp_path / "tier"))
    (tmp_path / "corpus").mkdir()
    made = tmp_path / "pages"
    made.mkdir()
    return made


def test_last_lines_name_what_failed_what_was_replaced_and_the_log(
    cli: Cli, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (folder / "a.png").write_bytes(b"one")
    (folder / "b.png").write_bytes(b"broken")
    command = "precompute", str(folder), "--model", "m"
    shown = cli(*command, code=3)
    first, last = shown.stdout.splitlines()[-2:]
    assert first == "not encoded: b.png: cannot identify image file"
    log = Path(last.removeprefix("vLLM's output: "))
    assert sorted(log.read_text().splitlines()) == ["a logger's line", "a process's line"]
    assert "line" not in shown.stderr + "".join(capfd.readouterr())
    (folder / "a.png").write_bytes(b"other")
    (folder / "b.png").unlink()
    assert cli(*command).stdout.splitlines()[-2] == "replaced: a.png: its file has changed"
    assert cli.json(*command)["log"] is None  # it had nothing to say


def test_the_cause_is_quoted_where_the_engine_only_names_its_log(
    cli: Cli,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    opened: Callable[[Settings], Corpus],
) -> None:
    cause = "ValueError: Free memory on device is less than desired"

    class Broken(FakeEncoder):
        def encode(self, pictures: Iterable[Picture]) -> Iterator[Encoded]:
            next(iter(pictures))
            os.write(2, f"(Worker pid=1) ERROR 11-27 [executor.py:953] {cause}\n".encode())
            os.write(2, b"RuntimeError: initialization failed\n")
            raise EncoderError("vLLM did not start: See root cause above.")
            yield

    monkeypatch.setattr(
        "s3ec.corpus.precompute.VllmEncoder", lambda _, settings, **__: Broken(opened(settings))
    )
    (folder / "a.png").write_bytes(b"one")
    last = cli("precompute", str(folder), "--model", "m", code=1).stdout.splitlines()[-1]
    assert last == f"the first error there: {cause}"


def test_verbose_shows_what_vllm_writes_and_keeps_no_log(
    cli: Cli, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (folder / "a.png").write_bytes(b"one")
    shown = cli("precompute", str(folder), "--model", "m", "-v")
    assert sorted(capfd.readouterr().err.splitlines()) == ["a logger's line", "a process's line"]
    assert "vLLM's output" not in shown.stdout
    assert not list(folder.parent.glob("*.log"))


def test_what_is_left_out_gives_status_3(cli: Cli, folder: Path) -> None:
    (folder / "a.png").write_bytes(b"one")
    (folder / "notes.txt").touch()
    found = json.loads(cli("precompute", str(folder), "--model", "m", "--json", code=3).stdout)
    assert [each["document"] for each in found["failures"]] == ["notes.txt"]
