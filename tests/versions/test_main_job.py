# SPDX-License-Identifier: Apache-2.0
"""What s3ec is for, in engines of the vLLM that is installed here, whichever release that is.

`make test-versions` runs these; what `make test` runs in engines (``tests/e2e``) goes further, and
reads counters, which vLLM before 0.31 has none of. Here answers tell: a consumer encodes with other
weights than the producer, so an image that it encoded itself would be answered differently.
"""

from __future__ import annotations

import importlib.metadata
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from s3ec import codec
from s3ec.dev.rigs.engine import EngineProcess, ec_config, image, text
from s3ec.dev.rigs.models import write_gemma3, write_qwen2_vl
from s3ec.dev.rigs.nursery import EngineForkServer
from s3ec.dev.rigs.pictures import write_pictures
from s3ec.dev.rigs.vllm_cpu import ONE_PROCESS, STEADY
from s3ec.testing.server import LocalS3
from tests.e2e.rig import (
    MANY,
    OPTIONS,
    PURPOSES,
    Answer,
    Gallery,
    Scenario,
    ask,
    eventually,
    healthy,
    keys,
    other_vision_tower,
    said,
    scenarios,
    settings,
)
from tests.support.damage import flipped
from tests.support.on_disk import audit_of, found_in


def _release() -> tuple[int, ...]:
    """Major and minor of the vLLM that is installed; empty without one. Imports nothing of it."""
    for name in ("vllm-cpu", "vllm"):
        with suppress(importlib.metadata.PackageNotFoundError):
            return tuple(int(part) for part in importlib.metadata.version(name).split(".")[:2])
    return ()


_RELEASE = _release()
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.skipif(not _RELEASE, reason="vllm is not installed"),
]
_STORED = (
    *("single", "left", "middle", "right", "pair", "shared", "extra"),
    *(f"many-{number}" for number in range(MANY)),
    *(f"together-{number}" for number in range(4)),
    *(f"healthy-{number}" for number in range(4)),
)
_NAMES = [one.name for one in scenarios(Gallery(dict.fromkeys(PURPOSES, Path("/"))))]
# Asked of the restarted consumer: nothing that a prefix of an earlier answer could cover.
_AGAIN = ("single", "right", "extra", "many-0", "many-7")
# Requests that a started consumer has to begin with hits, see _until_hits.
_ROUNDS = 32
# A pure producer's: without a KV cache vLLM 0.27 fails at its start with prefix caching, and 0.31
# never ends a prompt that takes more than one step.
_ALONE = {"enable_prefix_caching": False}
# Longest deferral that s3ec allows, so that a busy machine turns no hit into a miss.
_PATIENT = {"defer_timeout_s": 60}


@dataclass(frozen=True)
class _Job:
    """One corpus and what three engines said about it.

    Attributes:
        plain: Scenario -> answers of an engine without the connector.
        consumer: The same of one that loads, and encodes with other weights.
        restarted: Of another one on its disk tier, while the bucket holds no embedding.
        changed: Of that one, about ``single``, after its weights were changed.
    """

    plain: dict[str, list[Answer]]
    consumer: dict[str, list[Answer]]
    restarted: dict[str, list[Answer]]
    changed: list[Answer]
    log: str
    audit: list[Any]


def _check(gallery: Gallery, number: int) -> Scenario:
    return Scenario(f"check {number}", [healthy(gallery, number)[0]])


def _until_hits(
    engine: EngineProcess, gallery: Gallery, expected: Mapping[str, list[Answer]]
) -> None:
    """Ask until each of four pictures was hit.

    An engine takes requests before it has read the index and its disk. Such a request does not
    wait: its images are encoded.
    """
    in_a_row = missed = 0
    for number in range(_ROUNDS):
        scenario = _check(gallery, number)
        if said(ask(engine, scenario)[0]) == said(expected[scenario.name][0]):
            in_a_row += 1
        else:
            in_a_row = 0
            missed += 1
            time.sleep(0.2 * missed)  # 100 s in all: a busy machine takes its time
        if in_a_row == 4:
            return
    pytest.fail(f"no hits in {_ROUNDS} requests")


@pytest.fixture(scope="module")
def workdir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("versions")


@pytest.fixture(scope="module")
def nursery(workdir: Path) -> Iterator[EngineForkServer]:
    with EngineForkServer(workdir / "nursery.log", STEADY) as here:
        yield here


@pytest.fixture(scope="module")
def gallery(workdir: Path) -> Gallery:
    paths = write_pictures(workdir / "pictures", len(PURPOSES))
    return Gallery(dict(zip(PURPOSES, paths, strict=True)))


@pytest.fixture(scope="module")
def job(
    workdir: Path, gallery: Gallery, nursery: EngineForkServer, local_s3: LocalS3
) -> Iterator[_Job]:
    model = write_gemma3(workdir / "gemma3")
    bucket, client = local_s3.create_bucket("versions"), local_s3.client()
    again = [Scenario(f"again {name}", [gallery.again(name)]) for name in _AGAIN]
    control = Scenario("control", [gallery.solo("control")])
    asked = [*scenarios(gallery), control]

    def engine(
        name: str, role: str | None, tier: str = "", env: Mapping[str, str] = ONE_PROCESS
    ) -> EngineProcess:
        config = settings(local_s3, bucket, workdir / tier, **_PATIENT)
        return EngineProcess(
            model,
            ec=ec_config(role, config) if role else None,
            log_path=workdir / f"{name}.log",
            media=workdir,
            env=local_s3.env() | env,
            options=_ALONE if role == "ec_producer" else OPTIONS,
            nursery=nursery,
        )

    def stored() -> set[str]:
        return {key for key in keys(client, bucket) if "/objects/" in key}

    with engine("plain", None) as one:
        checks = [_check(gallery, number) for number in range(_ROUNDS)]
        plain = {scenario.name: ask(one, scenario) for scenario in [*asked, *again, *checks]}
    with engine("producer", "ec_producer", "producer-tier") as one:
        for name in _STORED:
            one.chat([gallery.solo(name)], max_tokens=1)
        eventually(lambda: len(stored()) == len(_STORED), "the producer's embeddings are stored")
    with other_vision_tower(model):
        # Scheduler and worker half in processes of their own, as deployed. vLLM 0.27 on the CPU
        # loses its block size on the way there.
        env = STEADY if _RELEASE >= (0, 30) else ONE_PROCESS
        with engine("consumer", "ec_consumer", "tier", env) as one:
            _until_hits(one, gallery, plain)
            consumer = {scenario.name: ask(one, scenario) for scenario in asked}
        for key in stored():
            client.delete_object(Bucket=bucket, Key=key)
        with engine("restarted", "ec_consumer", "tier") as one:
            _until_hits(one, gallery, plain)
            restarted = {scenario.name: ask(one, scenario) for scenario in again}
            one.shuffle_vision_tower()
            changed = ask(one, Scenario("changed", [gallery.solo("single")]))
    assert len({key.split("/")[0] for key in keys(client, bucket)}) == 1  # namespaces
    audit = audit_of(found_in(workdir / "tier"))
    logs = "".join(path.read_text(errors="replace") for path in workdir.glob("*.log"))
    yield _Job(plain, consumer, restarted, changed, logs, audit)
    local_s3.delete_bucket(bucket)


@pytest.mark.parametrize("name", [name for name in _NAMES if name != "together"])
def test_a_consumer_answers_from_the_corpus_as_an_engine_without_the_connector(
    name: str, job: _Job
) -> None:
    assert list(map(said, job.consumer[name])) == list(map(said, job.plain[name]))


def test_concurrent_requests_get_the_tokens_they_get_without_the_connector(job: _Job) -> None:
    answers = [answer["token_ids"] for answer in job.consumer["together"]]
    assert answers == [answer["token_ids"] for answer in job.plain["together"]]


def test_an_image_outside_the_corpus_is_encoded_by_the_consumer_itself(job: _Job) -> None:
    assert said(job.consumer["control"][0]) != said(job.plain["control"][0])


@pytest.mark.parametrize("name", _AGAIN)
def test_after_a_restart_this_nodes_disk_answers_without_the_bucket(name: str, job: _Job) -> None:
    (answer,), (expected,) = job.restarted[f"again {name}"], job.plain[f"again {name}"]
    assert said(answer) == said(expected)


def test_nothing_stored_is_used_after_a_change_of_weights(job: _Job) -> None:
    assert said(job.changed[0]) != said(job.plain["single"][0])
    assert job.log.count("nothing is loaded or saved from here on") == 1


def test_the_disk_is_clean_and_no_fault_of_ours_was_contained(job: _Job) -> None:
    assert job.audit == []
    assert "Traceback" not in job.log


# -- identifiers of clients, requests without pixels -----------------------------------------

_PICTURES = ("single", "left", "middle")
# 224 pixels are 16 x 16 patches, of which 2 x 2 make one embedding: 64 rows.
_SIDE, _GRID = 224, [1, 16, 16]
_PROMPT = (
    "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>what is this?<|im_end|>\n"
    "<|im_start|>assistant\n"
)
_needs_no_pixels = pytest.mark.skipif(
    _RELEASE < (0, 30), reason="vLLM takes requests without pixels from 0.30 on"
)


@dataclass(frozen=True)
class _Folder:
    """An engine on a corpus in a folder, in which what was ``left``'s is damaged."""

    engine: EngineProcess
    pictures: dict[str, Path]

    @cached_property
    def expected(self) -> dict[str, list[int]]:
        """Answers about the pictures as this engine itself encodes them: nobody stored these."""
        return {name: self.pixels(name, f"unknown-{name}")["token_ids"] for name in _PICTURES}

    def pixels(self, name: str, uuid: str) -> Answer:
        return self.engine.chat([[image(self.pictures[name], uuid), text("what is this?")]])[0]

    def without_pixels(self, uuid: str) -> Answer:
        data = {"image": {"image_grid_thw": [_GRID]}}
        return self.engine.generate(_PROMPT, data, {"image": [uuid]})


@pytest.fixture(scope="module")
def folder(workdir: Path, gallery: Gallery, nursery: EngineForkServer) -> Iterator[_Folder]:
    model = write_qwen2_vl(workdir / "qwen2-vl")
    pictures = {}
    for name in _PICTURES:
        pictures[name] = workdir / f"square-{name}.png"
        with Image.open(gallery[name]) as picture:
            picture.convert("RGB").resize((_SIDE, _SIDE)).save(pictures[name])
    corpus = workdir / "corpus"
    corpus.mkdir()

    def engine(role: str) -> EngineProcess:
        place = {"url": corpus.as_uri(), "cache_dir": str(workdir / f"qwen-{role}")}
        rest = {"cache_bytes": "1GiB", "min_free_bytes": 0, "wait": "always", **_PATIENT}
        return EngineProcess(
            model,
            ec=ec_config(role, place | rest),
            log_path=workdir / f"qwen-{role}.log",
            media=workdir,
            env=ONE_PROCESS,
            options=_ALONE if role == "ec_producer" else {},
            nursery=nursery,
        )

    def entries() -> list[Path]:
        return list(corpus.rglob("objects/**/*.safetensors"))

    with engine("ec_producer") as one:
        prompts = [[image(pictures[name], f"doc-{name}"), text("?")] for name in _PICTURES]
        one.chat(prompts, max_tokens=1)
        eventually(lambda: len(entries()) == len(_PICTURES), "all embeddings are stored")
    named = {codec.parse_header(path.read_bytes()).identifier: path for path in entries()}
    damaged = named["doc-left"]
    damaged.write_bytes(flipped(damaged.read_bytes()))
    with engine("ec_consumer") as one:
        yield _Folder(one, pictures)


def test_the_pictures_are_told_apart(folder: _Folder) -> None:
    assert len(set(map(tuple, folder.expected.values()))) == len(_PICTURES)


@pytest.mark.parametrize("name", _PICTURES)
def test_a_stored_or_damaged_embedding_gives_the_answer_of_the_encoder(
    name: str, folder: _Folder
) -> None:
    assert folder.pixels(name, f"doc-{name}")["token_ids"] == folder.expected[name]


@_needs_no_pixels
def test_a_uuid_and_a_grid_give_the_answer_that_the_pixels_give(folder: _Folder) -> None:
    for name in ("single", "middle"):
        assert folder.without_pixels(f"doc-{name}")["token_ids"] == folder.expected[name]


@_needs_no_pixels
def test_a_request_without_pixels_that_nothing_can_serve_ends_alone_with_an_error(
    folder: _Folder,
) -> None:
    refused = folder.without_pixels("not-stored")
    assert refused["finish_reason"] == "error"
    assert refused["token_ids"] == []
    assert folder.without_pixels("doc-single")["token_ids"] == folder.expected["single"]
