# SPDX-License-Identifier: Apache-2.0
"""Requests that carry a uuid and a grid instead of pixels: served from the corpus or refused.

A miss would run the encoder on nothing and end the engine, so such a request ends alone, with
an error. The corpus is in a folder (``url: file://``), which the other modules don't use.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from s3ec import codec
from s3ec.dev.rigs.engine import EngineProcess, ec_config, image, text
from s3ec.dev.rigs.nursery import EngineForkServer
from s3ec.dev.rigs.vllm_cpu import ONE_PROCESS, STEADY
from tests.e2e.rig import (
    FROM_BUCKET,
    HITS,
    LOADS,
    MISSES,
    Gallery,
    eventually,
    moved,
    until_index_is_read,
)

_PICTURES = ("single", "left", "middle")
# 224 pixels are 16 x 16 patches, of which 2 x 2 make one embedding: 64 rows.
_SIDE, _GRID = 224, [1, 16, 16]
_PROMPT = (
    "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>what is this?<|im_end|>\n"
    "<|im_start|>assistant\n"
)
_REFUSED = "vllm:s3ec_unavailable_requests"
# What vLLM itself calls an image that it has not hashed; it means another one after a restart.
_COUNTED = "renderer0-mm-1-image-0"


@dataclass(frozen=True)
class _Rig:
    engine: EngineProcess
    pictures: dict[str, Path]
    stored: list[bytes]

    def without_pixels(self, uuid: str, grid: list[int] = _GRID) -> dict[str, Any]:
        """Ask about a picture by its uuid; only the size of its placeholder is sent."""
        return self.engine.generate(
            _PROMPT, {"image": {"image_grid_thw": [grid]}}, {"image": [uuid]}
        )

    def with_pixels(self, name: str, uuid: str) -> dict[str, Any]:
        """Ask about a picture under a uuid."""
        prompt = [image(self.pictures[name], uuid), text("what is this?")]
        return self.engine.chat([prompt])[0]


@pytest.fixture(scope="module")
def rig(workdir: Path, gallery: Gallery, qwen: Path, nursery: EngineForkServer) -> Iterator[_Rig]:
    """A consumer of a folder that a producer filled with pictures under uuids."""
    pictures = {}
    for name in _PICTURES:
        pictures[name] = workdir / f"square-{name}.png"
        with Image.open(gallery[name]) as picture:
            picture.convert("RGB").resize((_SIDE, _SIDE)).save(pictures[name])
    folder = workdir / "folder corpus"
    folder.mkdir()

    def entries() -> list[Path]:
        return list(folder.rglob("objects/**/*.safetensors"))

    def config(role: str) -> dict[str, Any]:
        place = {"url": folder.as_uri(), "cache_dir": str(workdir / f"qwen-{role}-tier")}
        return ec_config(
            role, {**place, "cache_bytes": "1GiB", "min_free_bytes": 0, "wait": "always"}
        )

    with EngineProcess(
        qwen,
        ec=config("ec_producer"),
        log_path=workdir / "qwen-producer.log",
        media=workdir,
        env=ONE_PROCESS,
        nursery=nursery,
    ) as producer:
        prompts = [[image(pictures[name], f"doc-{name}"), text("?")] for name in _PICTURES]
        prompts.append([image(pictures["left"], _COUNTED), text("?")])
        producer.chat(prompts, max_tokens=1)
        eventually(lambda: len(entries()) >= len(_PICTURES), "all embeddings are stored")
    stored = [path.read_bytes() for path in entries()]
    with EngineProcess(
        qwen,
        ec=config("ec_consumer"),
        log_path=workdir / "qwen-consumer.log",
        media=workdir,
        env=STEADY,
        nursery=nursery,
    ) as engine:
        until_index_is_read(engine, len(stored))
        yield _Rig(engine, pictures, stored)


def test_a_uuid_and_a_grid_give_the_answer_that_the_pixels_give(rig: _Rig) -> None:
    before = rig.engine.counters()
    answers = [rig.without_pixels(f"doc-{name}") for name in _PICTURES]
    loaded = moved(before, rig.engine.counters())
    # Under uuids that nobody stored these are encoded here.
    encoded = [rig.with_pixels(name, f"unknown-{name}") for name in _PICTURES]
    total = moved(before, rig.engine.counters())
    assert [answer["token_ids"] for answer in answers] == [
        answer["token_ids"] for answer in encoded
    ]
    assert len({tuple(answer["token_ids"]) for answer in answers}) == len(_PICTURES)
    assert loaded[HITS] == loaded[LOADS] == loaded[FROM_BUCKET] == len(_PICTURES)
    assert MISSES not in loaded
    assert total[MISSES] == len(_PICTURES)


def test_placeholder_metadata_is_stored_with_the_embedding(rig: _Rig) -> None:
    headers = [codec.parse_header(blob) for blob in rig.stored]
    assert {header.identifier for header in headers} == {f"doc-{name}" for name in _PICTURES}
    assert all(header.placeholder == {"image_grid_thw": _GRID} for header in headers)


@pytest.mark.parametrize(
    ("uuid", "grid"),
    [
        ("not-stored", _GRID),
        ("doc-left", [1, 32, 32]),
        (_COUNTED, _GRID),
    ],
    ids=["not stored", "grid too large", "counter as uuid"],
)
def test_a_request_without_pixels_that_cannot_be_served_ends_alone_with_an_error(
    uuid: str, grid: list[int], rig: _Rig
) -> None:
    before = rig.engine.counters()
    answer = rig.without_pixels(uuid, grid)
    assert answer["finish_reason"] == "error"
    assert answer["token_ids"] == []
    expected = rig.with_pixels("middle", "unknown-middle")
    assert rig.without_pixels("doc-middle")["token_ids"] == expected["token_ids"]
    assert moved(before, rig.engine.counters())[_REFUSED] == 1


def test_an_image_under_a_counter_is_neither_saved_nor_answered_from_another_engines(
    rig: _Rig,
) -> None:
    before = rig.engine.counters()
    answer = rig.with_pixels("middle", _COUNTED)  # the producer saw "left" under this name
    counts = moved(before, rig.engine.counters())
    assert answer["token_ids"] == rig.with_pixels("middle", "unknown-middle")["token_ids"]
    assert HITS not in counts
    assert counts["vllm:s3ec_refused_identifiers"] >= 1
