# SPDX-License-Identifier: Apache-2.0
"""A job on a local Ray with two real engines, one of which is killed.

Nothing is missing, and only what the dead one had is done twice, by the workers' own notes.
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
from pathlib import Path

import pytest

from s3ec.corpus import Corpus
from s3ec.dev.rigs.pictures import write_pictures
from s3ec.dev.rigs.ray_job import run_killing_one, stored
from s3ec.dev.rigs.vllm_cpu import ONE_PROCESS, engine_env
from s3ec.testing.server import LocalS3
from tests.e2e.rig import settings
from tests.support.waiting import DEADLINE_S

PICTURES = 60


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")
def test_killed_worker_costs_only_what_it_had_in_flight(
    tmp_path: Path, gemma: Path, local_s3: LocalS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in local_s3.env().items():
        monkeypatch.setenv(name, value)
    bucket = local_s3.create_bucket("on-ray")
    pictures = tmp_path / "pages"
    write_pictures(pictures, PICTURES)
    (pictures / "broken.png").write_bytes(b"no picture")
    where = settings(local_s3, bucket, tmp_path / "tier")
    with tempfile.TemporaryDirectory() as folder:  # sockets need a short path
        outcome = run_killing_one(
            Path(folder),
            pictures,
            gemma,
            where,
            env=engine_env({**os.environ, **ONE_PROCESS}),
            timeout_s=2 * DEADLINE_S,
        )
    report = outcome.report
    assert report["status"] == "partial"
    assert [each["document"] for each in report["failures"]] == ["broken.png"]
    assert (report["encoded_count"], report["unconfirmed_count"]) == (PICTURES, 0)
    assert outcome.of_killed & outcome.confirmed
    assert len(outcome.encoded) == PICTURES, outcome.account
    assert outcome.beyond_flight == set(), outcome.account
    assert set(outcome.encoded) == stored(where)
    with Corpus.open(where) as corpus:
        assert len(list(corpus.catalog().rows())) == PICTURES
    local_s3.delete_bucket(bucket)
