# SPDX-License-Identifier: Apache-2.0
"""``s3ec precompute`` fills a bucket, tells what it could not encode, and goes on later."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from s3ec.corpus import Corpus
from s3ec.dev.rigs.nursery import EngineForkServer, Forked
from s3ec.dev.rigs.proxy import FaultProxy, Rule
from s3ec.dev.rigs.proxy_faults import StallUpload
from s3ec.dev.rigs.vllm_cpu import ONE_PROCESS, engine_env
from s3ec.testing.server import LocalS3
from tests.e2e.rig import eventually, keys, settings
from tests.support.pdfs import make_pdf
from tests.support.waiting import DEADLINE_S

# What a small machine needs; the rest is the command's own.
ENGINE = {
    "enforce_eager": True,
    "gpu_memory_utilization": 0.3,
    "max_model_len": 4096,
    "max_num_seqs": 8,
}
MANY, PAGES = 240, 2
# What a job stores of these before the bucket holds it up, and what it keeps of the others: so it
# cannot come to its end before it is stopped or killed, however fast it is.
STORED = 20
CACHE_BYTES = 2**20


@dataclass
class Place:
    """A bucket, a folder of pictures, and how the command is called for them."""

    nursery: EngineForkServer
    server: LocalS3
    bucket: str
    model: Path
    root: Path

    @property
    def folder(self) -> Path:
        return self.root / "pages"

    @property
    def env(self) -> dict[str, str]:
        return engine_env({**os.environ, **self.server.env(), **ONE_PROCESS})

    def arguments(self, **changed: Any) -> list[str]:
        return [
            *("precompute", str(self.folder), "--model", str(self.model)),
            *("--config", json.dumps(self.settings | changed)),
            *("--engine-args", json.dumps(ENGINE)),
        ]

    @property
    def settings(self) -> dict[str, Any]:
        return settings(self.server, self.bucket, self.root / "tier")

    def start(self, *more: str, **changed: Any) -> Forked:
        with open(self.root / "log", "ab") as log:
            arguments = [*self.arguments(**changed), *more]
            return self.nursery.fork("s3ec", arguments, env=self.env, log=log.fileno(), fds=())

    def run(self, **changed: Any) -> dict[str, Any]:
        """What the command reports."""
        report = self.root / "report.json"
        self.start("--report", str(report), **changed).wait(DEADLINE_S)
        assert report.exists(), (self.root / "log").read_text(errors="replace")[-4000:]
        found: dict[str, Any] = json.loads(report.read_text())
        report.unlink()
        return found

    def objects(self) -> set[str]:
        return {key for key in keys(self.server.client(), self.bucket) if "/objects/" in key}

    def deltas(self) -> set[str]:
        found = keys(self.server.client(), self.bucket)
        return {key for key in found if "/manifest/v2/delta/" in key}

    def corpus(self) -> Corpus:
        return Corpus.open(self.settings)


@pytest.fixture
def place(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    nursery: EngineForkServer,
    gemma: Path,
    local_s3: LocalS3,
    monkeypatch: pytest.MonkeyPatch,
) -> Any:
    bucket = local_s3.create_bucket("precomputed")
    for name, value in local_s3.env().items():
        monkeypatch.setenv(name, value)
    made = Place(nursery, local_s3, bucket, gemma, tmp_path)
    made.folder.mkdir()
    yield made
    local_s3.delete_bucket(bucket)


def test_a_job_that_was_stopped_and_then_killed_goes_on_until_no_engine_is_needed(
    place: Place,
) -> None:
    for number in range(MANY):
        colour = (number, 255 - number, 3 * number % 256)
        Image.new("RGB", (48, 48), colour).save(place.folder / f"{number:03}.png")
    report = place.root / "stopped.json"
    with FaultProxy(place.server.endpoint_url) as proxy:
        slow = {"endpoint_url": proxy.url, "cache_bytes": CACHE_BYTES}
        hold_up = Rule(StallUpload(), method="PUT", target="/objects/", skip=STORED)
        proxy.clear(hold_up)
        stopped = place.start("--report", str(report), **slow)
        eventually(lambda: len(place.deltas()) > 0, "the first embeddings are announced")
        os.kill(stopped.pid, signal.SIGINT)
        proxy.clear()
        stopped.wait(DEADLINE_S)
        first = json.loads(report.read_text())
        assert (first["status"], first["stopped"], first["unconfirmed"]) == ("partial", True, [])
        assert 0 < first["encoded_count"] < MANY
        assert len(place.objects()) == first["encoded_count"]

        before = len(place.deltas())
        no_rows = Rule(StallUpload(), method="PUT", target="/catalog/")
        proxy.clear(replace(hold_up, skip=STORED), no_rows)
        killed = place.start(**slow)
        eventually(lambda: len(place.deltas()) > before, "more embeddings are announced")
        os.killpg(killed.pid, signal.SIGKILL)
        killed.wait(DEADLINE_S)
        with place.corpus() as corpus:
            announced = corpus.verify().index.entries
            catalogued = {row.identifier for row in corpus.catalog().rows()}
            assert all(corpus.find(identifier) is not None for identifier in catalogued)
        assert announced > first["encoded_count"] == len(catalogued)

        proxy.clear()
        broken = place.folder / "broken.png"
        broken.write_bytes(b"no picture")
        (place.folder / "report.pdf").write_bytes(make_pdf(PAGES))
        # By the same address: what the killed one left on the disk is for this bucket.
        third = place.run(endpoint_url=proxy.url)
    assert third["status"] == "partial"
    [failure] = third["failures"]
    assert failure["document"] == "broken.png"
    assert "cannot identify image file" in failure["reason"]
    assert third["done_before_count"] == len(catalogued)
    assert third["done_before_count"] + third["catalogued_count"] >= announced
    assert third["encoded_count"] <= MANY + PAGES - announced
    assert len(place.objects()) == MANY + PAGES
    with place.corpus() as corpus:
        assert corpus.verify().agrees
        assert_catalogued(corpus)

    broken.unlink()
    last = place.run()
    assert last["status"] == "complete"
    assert (last["done_before_count"], last["encoded_count"]) == (MANY + PAGES, 0)
    assert last["engine_started"] is False
    assert last["read_bytes"] == 0


def assert_catalogued(corpus: Corpus) -> None:
    """A row for each picture and each page, which says what its entry is."""
    found = list(corpus.catalog().rows())
    rows = {(row.document, row.page): row for row in found}
    assert len(rows) == len(found)
    pages = {("report.pdf", page) for page in range(1, PAGES + 1)}
    assert rows.keys() == pages | {(f"{number:03}.png", None) for number in range(MANY)}
    for name in (*pages, ("000.png", None)):
        row = rows[name]
        entry = corpus.stat(row.identifier)
        assert entry is not None
        assert entry.header is not None
        assert (entry.nbytes, entry.header.shape.rows) == (row.nbytes, row.rows)
