# SPDX-License-Identifier: Apache-2.0
"""``s3ec precompute``: options that cannot work, and what its exit status says."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from s3ec.corpus import Corpus
from s3ec.settings import Settings
from tests.unit.cli.conftest import Cli
from tests.unit.corpus.test_precompute import FakeEncoder


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--engine", "slurm"], "`engine` 'slurm' is none; it is `local` or `ray`"),
        (["--ray-workers", "4"], "`--ray-workers` is for `--engine ray`"),
        (["--engine", "ray", "--ray-workers", "many"], "write it as `4` or `1-8`"),
        (["--engine", "ray", "--ray-workers", "8-1"], "`ray_workers` 8-1: at least 1"),
        (["--engine", "ray", "--ray-gpus", "-1"], "`ray_gpus` is from 0 to 1024"),
        (["--engine", "ray", "--batch", "0"], "`batch` must be 1 or more"),
        (["--engine", "ray"], "needs ray"),
        (["--dpi", "5"], "`dpi` is from 18 to 1200, not 5"),
        (["--column", "image"], "`column` is for a dataset's folder"),
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


def test_a_row_of_another_source_gives_status_3_and_is_replaced_where_that_is_asked_for(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def encoder(model: str, settings: Settings, **_: Any) -> FakeEncoder:
        return FakeEncoder(Corpus(settings))

    monkeypatch.setattr("s3ec.corpus.precompute.VllmEncoder", encoder)
    monkeypatch.setenv("S3EC_URL", (tmp_path / "corpus").as_uri())
    monkeypatch.setenv("S3EC_CACHE_DIR", str(tmp_path / "tier"))
    for name, data in {"corpus": None, "one": b"one", "two": b"two"}.items():
        (tmp_path / name).mkdir()
        if data is not None:
            (tmp_path / name / "a.png").write_bytes(data)

    def run(name: str, *words: str, code: int) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(
            cli("precompute", str(tmp_path / name), "--model", "m", *words, code=code).stdout
        )
        return found

    run("one", "--json", code=0)
    refused = run("two", "--json", code=3)
    assert (refused["kept_count"], refused["replaced_count"]) == (1, 0)
    told = cli("precompute", str(tmp_path / "two"), "--model", "m", code=3).stderr
    assert "the catalogue has another file under it" in told
    done = run("two", "--json", "--replace", code=0)
    assert (done["kept_count"], done["replaced_count"]) == (0, 1)
