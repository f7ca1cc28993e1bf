# SPDX-License-Identifier: Apache-2.0
"""Engines and recordings that several end-to-end modules share; made once per session.

A start takes one core and nearly all of the time, so there are two at once: within this process
(``at_once``), and by a second process for the modules that share nothing with the others
(``tests/conftest.py``).
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from s3ec.dev.rigs.engine import EngineProcess, ec_config
from s3ec.dev.rigs.models import write_gemma3, write_qwen2_vl
from s3ec.dev.rigs.nursery import EngineForkServer
from s3ec.dev.rigs.pictures import write_pictures
from s3ec.dev.rigs.vllm_cpu import ONE_PROCESS, STEADY
from s3ec.testing.server import LocalS3
from tests.e2e.consumers import Exchange, Place, ask_engine, ask_server
from tests.e2e.rig import (
    BOTH,
    HEALTHY_ROUNDS,
    OPTIONS,
    PURPOSES,
    Answer,
    Corpus,
    Gallery,
    Record,
    Scenario,
    ask,
    at_once,
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
def nursery(_vllm_is_here: None, workdir: Path) -> Iterator[EngineForkServer]:
    """Starts engines with what they import imported; others start as deployed."""
    with EngineForkServer(workdir / "nursery.log", STEADY) as here:
        yield here


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
def qwen(workdir: Path) -> Path:
    """A tiny Qwen2-VL, which knows an image's size from its grid alone."""
    return write_qwen2_vl(workdir / "qwen2-vl")


def _answers(
    workdir: Path, gallery: Gallery, gemma: Path, nursery: EngineForkServer
) -> dict[str, list[Answer]]:
    with EngineProcess(
        gemma,
        ec=None,
        log_path=workdir / "reference.log",
        media=workdir,
        env=ONE_PROCESS,
        options=OPTIONS,
        nursery=nursery,
    ) as engine:
        answers = {scenario.name: ask(engine, scenario) for scenario in scenarios(gallery)}
        single = [Scenario(f"solo {name}", [gallery.solo(name)]) for name in PURPOSES]
        single += [Scenario(f"again both-{n}", [gallery.again(f"both-{n}")]) for n in range(BOTH)]
        single += [
            Scenario(f"healthy {n}", [healthy(gallery, n)[0]]) for n in range(HEALTHY_ROUNDS)
        ]
        answers |= {scenario.name: ask(engine, scenario) for scenario in single}
    return answers


def _produced(
    workdir: Path,
    gallery: Gallery,
    gemma: Path,
    server: LocalS3,
    bucket: str,
    nursery: EngineForkServer,
) -> Corpus:
    client = server.client()
    objects: dict[str, str] = {}
    with EngineProcess(
        gemma,
        ec=ec_config("ec_producer", settings(server, bucket, workdir / "producer-tier")),
        log_path=workdir / "producer.log",
        media=workdir,
        env=server.env() | ONE_PROCESS,
        nursery=nursery,
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
    return Corpus(bucket, namespace, objects, sorted(names - set(objects.values())))


@pytest.fixture(scope="session")
def made(
    workdir: Path, gallery: Gallery, gemma: Path, local_s3: LocalS3, nursery: EngineForkServer
) -> Iterator[tuple[dict[str, list[Answer]], Corpus]]:
    """``reference`` and ``corpus``."""
    bucket = local_s3.create_bucket("corpus")
    yield at_once(
        partial(_answers, workdir, gallery, gemma, nursery),
        partial(_produced, workdir, gallery, gemma, local_s3, bucket, nursery),
    )
    local_s3.delete_bucket(bucket)


@pytest.fixture(scope="session")
def reference(made: tuple[dict[str, list[Answer]], Corpus]) -> dict[str, list[Answer]]:
    """The answers of an engine without the connector: scenario name -> answers.

    Beside the scenarios: ``solo PURPOSE`` for each picture, ``again PURPOSE`` for those that
    tests ask twice, and ``healthy N``.
    """
    return made[0]


@pytest.fixture(scope="session")
def corpus(made: tuple[dict[str, list[Answer]], Corpus]) -> Corpus:
    """A bucket that an ``ec_producer`` filled with the gallery's corpus."""
    return made[1]


@pytest.fixture(scope="session")
def consumers(
    workdir: Path,
    gallery: Gallery,
    gemma: Path,
    corpus: Corpus,
    local_s3: LocalS3,
    nursery: EngineForkServer,
) -> tuple[dict[str, Record], Exchange]:
    """What two consumers say whose vision encoder has other weights than the corpus was made by."""
    place = Place(gemma, workdir, gallery, corpus, local_s3, nursery)
    with other_vision_tower(gemma):
        return at_once(partial(ask_engine, place), partial(ask_server, place))
