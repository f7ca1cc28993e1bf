# SPDX-License-Identifier: Apache-2.0
"""Engines on one folder with different weights: no embedding of one is loaded by another."""

from __future__ import annotations

import itertools
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest

from s3ec import codec
from s3ec.dev.rigs.engine import EngineProcess, ec_config
from s3ec.dev.rigs.models import write_gemma3
from s3ec.dev.rigs.nursery import EngineForkServer
from s3ec.dev.rigs.vllm_cpu import ONE_PROCESS
from s3ec.testing.server import LocalS3
from tests.e2e.rig import (
    HITS,
    MISSES,
    OPTIONS,
    Gallery,
    Scenario,
    body,
    eventually,
    keys,
    other_projector,
    record,
    said,
    settings,
)

PURPOSE = "single"


class Fleet:
    """Engines that share a bucket, a disk tier and the path of their model."""

    def __init__(
        self, workdir: Path, gallery: Gallery, s3: LocalS3, nursery: EngineForkServer
    ) -> None:
        self.model = write_gemma3(workdir / "weights-gemma3")
        self.bucket = s3.create_bucket("weights")
        self.client = s3.client()
        self._workdir, self.gallery, self._s3, self._nursery = workdir, gallery, s3, nursery
        self._tier = Path(tempfile.mkdtemp(prefix="weights-tier-", dir=workdir))

    def engine(self, log: str, *, plain: bool = False, **options: Any) -> EngineProcess:
        """One engine; a plain one has no connector."""
        chosen = settings(self._s3, self.bucket, self._tier, weights="fingerprint")
        return EngineProcess(
            self.model,
            ec=None if plain else ec_config("ec_both", chosen),
            log_path=self._workdir / f"weights-{log}.log",
            media=self._workdir,
            env=self._s3.env() | ONE_PROCESS,
            options=OPTIONS | options,
            nursery=self._nursery,
        )

    def encodes(
        self, log: str, asked: Scenario, *, saves: int, **options: Any
    ) -> tuple[bool, list[tuple[Any, ...]]]:
        """Whether one engine finds nothing of the picture, and what it answers.

        It stores the picture as the n-th entry.
        """
        with self.engine(log, **options) as engine:
            told = record(engine, asked)
            eventually(lambda: len(self.entries()) == saves, f"{saves} entries are stored")
        return (told[HITS], told[MISSES]) == (0, 1), list(map(said, told.answers))

    def hits(self, log: str) -> bool:
        """Whether another engine loads the picture, once it has read the index."""
        numbers = itertools.count()
        with self.engine(log) as engine:

            def is_hit() -> bool:
                word = f"try {next(numbers)}"  # so that no prefix is cached
                told = record(engine, Scenario(log, [self.gallery.again(PURPOSE, word)]))
                for other in ("left", "right"):  # the device holds two pictures
                    engine.chat([self.gallery.again(other, word)])
                return told[HITS] == 1

            eventually(is_hit, "the entry is hit", pause_s=0.5)
        return True

    def entries(self) -> set[str]:
        return {key for key in keys(self.client, self.bucket) if "/objects/" in key}

    def weights(self) -> dict[str, str]:
        """Namespace -> what its descriptor says about the weights."""
        names = {key.split("/")[0] for key in keys(self.client, self.bucket)}
        return {
            name: json.loads(body(self.client, self.bucket, f"{name}/namespace.json"))["weights"]
            for name in names
        }


@pytest.fixture
def fleet(workdir: Path, gallery: Gallery, local_s3: LocalS3, nursery: EngineForkServer) -> Any:
    made = Fleet(workdir, gallery, local_s3, nursery)
    yield made
    local_s3.delete_bucket(made.bucket)


def test_weights_that_differ_share_nothing_and_weights_that_are_the_same_do(fleet: Fleet) -> None:
    """Also where one projector was replaced: it is a thousandth of the encoder's values."""
    asked = Scenario("weights", [fleet.gallery.solo(PURPOSE)])
    _, before = fleet.encodes("before", asked, saves=1)
    dummy, _ = fleet.encodes("dummy", asked, saves=2, load_format="dummy")
    with other_projector(fleet.model):
        with fleet.engine("reference", plain=True) as engine:
            reference = record(engine, asked)
        projector, after = fleet.encodes("projector", asked, saves=3)
    assert dummy
    assert projector
    assert after == list(map(said, reference.answers))
    assert after != before
    bodies = [body(fleet.client, fleet.bucket, key) for key in fleet.entries()]
    assert len({codec.parse_header(blob).checksum for blob in bodies}) == 3

    assert fleet.hits("again")
    marks = sorted(fleet.weights().values())
    assert [mark.split(":")[0] for mark in marks] == ["dummy", "sha256", "sha256"]
