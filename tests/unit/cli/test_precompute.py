# SPDX-License-Identifier: Apache-2.0
"""``s3ec precompute`` refuses options that cannot work before anything starts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.unit.cli.conftest import Cli


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
