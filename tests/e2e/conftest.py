# SPDX-License-Identifier: Apache-2.0
"""Engines and recordings that several end-to-end modules share; made once per session."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from s3ec.testing.engine import EngineProcess, ec_config
from s3ec.testing.models import write_gemma3
from s3ec.testing.pictures import write_pictures
from s3ec.testing.server import LocalS3
from tests.e2e.rig import (
    BOTH,
    HEALTHY_ROUNDS,
    ONE_PROCESS,
    OPTIONS,
    PURPOSES,
    Answer,
    Corpus,
    Gallery,
    Scenario,
    ask,
    eventually,
    healthy,
    keys,
    other_vision_tower,
    scenarios,
    settings,
)

_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder starts engines."""
    for item in items:
        if _HERE in item.path.parents:
            item.add_marker(pytest.mark.e2e)


@pytest.fixture(scope="session", autouse=True)
def _vllm_is_here() -> None:
    if importlib.util.find_spec("vllm") is None and not os.environ.get("CI"):
        pytest.skip("vllm is not installed")


@pytest.fixture(scope="session")
def workdir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures, model and logs; everything that engines may read from."""
    return tmp_path_factory.mktemp("e2e")


@pytest.fixture(scope="session")
def gallery(workdir: Path) -> Gallery:
    """A different picture for each purpose."""
    paths = write_pictures(workdir / "pictures", len(PURPOSES))
    return Gallery(dict(zip(PURPOSES, paths, strict=True)))


@pytest.fixture(scope="session")
def gemma(workdir: Path) -> Path:
    """A tiny Gemma3; its path is part of every image's identifier."""
    return write_gemma3(workdir / "gemma3")


@pytest.fixture(scope="session")
def reference(workdir: Path, gallery: Gallery, gemma: Path) -> dict[str, list[Answer]]:
    """The answers of an engine without the connector: scenario name -> answers.

    Beside the scenarios: ``solo PURPOSE`` for each picture, ``again PURPOSE`` for those that
    tests ask twice, and ``healthy N``.
    """
    with EngineProcess(
        gemma,
        ec=None,
        log_path=workdir / "reference.log",
        media=workdir,
        env=ONE_PROCESS,
        options=OPTIONS,
    ) as engine:
        answers = {scenario.name: ask(engine, scenario) for scenario in scenarios(gallery)}
        single = [Scenario(f"solo {name}", [gallery.solo(name)]) for name in PURPOSES]
        twice = [*(f"both-{n}" for n in range(BOTH)), "tier-flipped", "tier-cut", "tier-gone"]
        single += [Scenario(f"again {name}", [gallery.again(name)]) for name in twice]
        single += [
            Scenario(f"healthy {n}", [healthy(gallery, n)[0]]) for n in range(HEALTHY_ROUNDS)
        ]
        answers |= {scenario.name: ask(engine, scenario) for scenario in single}
    return answers


@pytest.fixture(scope="session")
def corpus(workdir: Path, gallery: Gallery, gemma: Path, local_s3: LocalS3) -> Iterator[Corpus]:
    """A bucket that an ``ec_producer`` filled with the gallery's corpus."""
    bucket = local_s3.create_bucket("corpus")
    client = local_s3.client()
    objects: dict[str, str] = {}
    with EngineProcess(
        gemma,
        ec=ec_config("ec_producer", settings(local_s3, bucket, workdir / "producer-tier")),
        log_path=workdir / "producer.log",
        media=workdir,
        env=local_s3.env() | ONE_PROCESS,
    ) as engine:
        for purpose in gallery.corpus:
            engine.chat([gallery.solo(purpose)], max_tokens=1)

            def new_objects() -> set[str]:
                there = {key for key in keys(client, bucket) if "/objects/" in key}
                return there - set(objects.values())

            eventually(lambda: bool(new_objects()), f"{purpose} is stored")
            (objects[purpose],) = new_objects()
    names = keys(client, bucket)
    (namespace,) = {name.split("/")[0] for name in names}
    yield Corpus(bucket, namespace, objects, sorted(names - set(objects.values())))
    local_s3.delete_bucket(bucket)


@pytest.fixture(scope="module")
def other_weights(
    gemma: Path, reference: dict[str, list[Answer]], corpus: Corpus
) -> Iterator[Path]:
    """The model's folder, after reference and corpus were made, with another vision encoder."""
    with other_vision_tower(gemma):
        yield gemma
