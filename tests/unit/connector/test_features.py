# SPDX-License-Identifier: Apache-2.0
"""Features with and without pixels."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.multimodal.cache.shm import ShmObjectStoreSenderCache
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFieldElem,
    MultiModalKwargsItem,
)

from s3ec.connector.vllm_config import FeatureReader, contradicts, without_pixels

UTILS = "vllm.distributed.ec_transfer.ec_connector.utils"
FIELDS = {"image": {"image_grid_thw"}, "video": {"video_grid_thw", "timestamps"}, "audio": set()}


class Resolver:
    """vLLM's, which builds a processor to answer."""

    asked: list[str] = []  # noqa: RUF012 - emptied by the fixture

    def __init__(self, model_config: Any) -> None:
        self.fields = model_config

    def fields_for(self, modality: str) -> set[str]:
        self.asked.append(modality)
        fields: set[str] = self.fields.get(modality, set())
        return fields


ON_CPU = {"second_per_grid_ts", "image_num_patches"}


def element(value: Any, *, keep_on_cpu: bool) -> MultiModalFieldElem:
    return MultiModalFieldElem(data=value, field=MultiModalBatchedField(keep_on_cpu=keep_on_cpu))


def feature(modality: str = "image", **values: Any) -> Any:
    items = {name: element(each, keep_on_cpu=name in ON_CPU) for name, each in values.items()}
    return SimpleNamespace(modality=modality, data=MultiModalKwargsItem(items))


def in_shared_memory(modality: str = "image") -> Any:
    data = ShmObjectStoreSenderCache.address_as_item(None, 4096, 7, [1, 2])  # type: ignore[arg-type]
    return SimpleNamespace(modality=modality, data=data)


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch) -> FeatureReader:
    module: Any = SimpleNamespace(PlaceholderMetadataResolver=Resolver)
    monkeypatch.setitem(sys.modules, UTILS, module)
    monkeypatch.setattr(Resolver, "asked", [])
    return FeatureReader(FIELDS)


GRID = torch.tensor([[1, 16, 16]])


def test_a_grid_alone_needs_a_stored_embedding(reader: FeatureReader) -> None:
    assert reader.needs_embedding(feature(image_grid_thw=GRID))
    assert reader.needs_embedding(feature("video", video_grid_thw=GRID, timestamps=[0.5]))
    assert reader.needs_embedding(feature("video", video_grid_thw=GRID))


@pytest.mark.parametrize(
    "without_pixels",
    [
        feature("video", video_grid_thw=GRID, second_per_grid_ts=torch.tensor(1.0)),
        feature("vision_chunk", second_per_grid_ts=torch.tensor(1.0)),
        feature("audio", image_num_patches=torch.tensor(3)),  # nothing is declared for audio
        feature(),
        SimpleNamespace(modality="image", data=None),  # a bare hash
        SimpleNamespace(modality="audio", data=None),
    ],
)
def test_what_vllm_leaves_of_an_item_without_its_pixels_needs_one_too(
    reader: FeatureReader, without_pixels: Any
) -> None:
    assert reader.needs_embedding(without_pixels)


@pytest.mark.parametrize(
    "with_pixels",
    [
        feature(image_grid_thw=GRID, pixel_values=torch.zeros(4)),
        feature(pixel_values=torch.zeros(4)),
        feature("audio", input_features=torch.zeros(4)),
        feature("vision_chunk", image_grid_thw=GRID),  # declared for images only
        feature("prompt_embeds"),
        SimpleNamespace(modality="prompt_embeds", data=None),
        in_shared_memory(),
        in_shared_memory("video"),
    ],
)
def test_everything_else_can_be_encoded(reader: FeatureReader, with_pixels: Any) -> None:
    assert not reader.needs_embedding(with_pixels)


def test_placeholders_are_plain_json(reader: FeatureReader) -> None:
    found = reader.placeholder(
        feature("video", video_grid_thw=GRID, timestamps=[0.5, 1.0], pixel_values=torch.zeros(4))
    )
    assert found == {"video_grid_thw": [[1, 16, 16]], "timestamps": [0.5, 1.0]}
    assert json.loads(json.dumps(found)) == found


@pytest.mark.parametrize(
    "without",
    [
        feature(pixel_values=torch.zeros(4)),
        feature("audio", input_features=torch.zeros(4)),
        feature("vision_chunk", image_grid_thw=GRID),
        SimpleNamespace(modality="image", data=None),
    ],
)
def test_a_feature_without_such_fields_has_no_placeholder(
    reader: FeatureReader, without: Any
) -> None:
    assert reader.placeholder(without) == {}


def test_what_lies_in_shared_memory_has_a_placeholder_that_nobody_knows(
    reader: FeatureReader,
) -> None:
    assert reader.placeholder(in_shared_memory()) is None
    assert reader.placeholder(in_shared_memory("audio")) == {}  # none is needed


def test_the_processor_is_built_at_the_start_and_never_again(reader: FeatureReader) -> None:
    assert sorted(Resolver.asked) == ["audio", "image", "video"]
    Resolver.asked.clear()
    reader.needs_embedding(feature(image_grid_thw=GRID))
    reader.placeholder(feature(image_grid_thw=GRID))
    reader.needs_embedding(feature("vision_chunk"))
    assert Resolver.asked == []


@pytest.mark.parametrize("module", [None, SimpleNamespace()])
def test_a_release_that_declares_nothing_knows_no_placeholders(
    monkeypatch: pytest.MonkeyPatch, module: Any
) -> None:
    monkeypatch.setitem(sys.modules, UTILS, module)
    reader = FeatureReader(FIELDS)
    assert not reader.needs_embedding(feature(pixel_values=torch.zeros(4)))
    assert reader.placeholder(feature(image_grid_thw=GRID)) == {}


# -- whether an engine takes requests without pixels -------------------------------------------


def engine(kind: str = "qwen3_vl", *, ec: Any = True, **multimodal: bool) -> Any:
    return SimpleNamespace(
        model_config=SimpleNamespace(
            hf_config=SimpleNamespace(model_type=kind),
            multimodal_config=SimpleNamespace(**multimodal),
        ),
        ec_transfer_config=ec,
    )


TAKEN = {"allow_missing_mm_embeddings": True, "enable_mm_embeds": True}


@pytest.mark.parametrize(
    ("config", "role", "said"),
    [
        (engine(**TAKEN), "ec_consumer", "yes, for image and video"),
        (engine(**TAKEN), "ec_both", "yes, for image and video"),
        (engine(**TAKEN), "ec_producer", "no, since `ec_role` is ec_producer; set it to"),
        (engine(), "ec_consumer", "no, since this vLLM is older than them; use vLLM 0.30"),
        (
            engine(**TAKEN | {"enable_mm_embeds": False}),
            "ec_consumer",
            "no, since vLLM does not take embeddings; add --enable-mm-embeds",
        ),
        # The doctor asks without a connector in the arguments, and names the role itself.
        (
            engine(ec=None, **dict.fromkeys(TAKEN, False)),
            "ec_consumer",
            "yes, for image and video",
        ),
    ],
)
def test_model_release_role_and_flags_decide_whether_pixels_may_be_left_out(
    config: Any, role: str, said: str, reader: FeatureReader
) -> None:
    assert str(without_pixels(config, reader, role)).startswith(said)


@pytest.mark.parametrize(
    ("kind", "fields", "said"),
    [
        ("qwen2_vl", {**FIELDS, "video": {"video_grid_thw"}}, "yes, for image and video"),
        # Its grid does not say when its frames are.
        ("qwen2_5_vl", {**FIELDS, "video": {"video_grid_thw"}}, "yes, for image"),
        ("gemma3", {}, "no, since vLLM declares no sizes for models of type `gemma3`"),
    ],
)
def test_what_a_model_declares_decides_for_which_modalities(
    kind: str, fields: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module: Any = SimpleNamespace(PlaceholderMetadataResolver=Resolver)
    monkeypatch.setitem(sys.modules, UTILS, module)
    assert str(without_pixels(engine(kind, **TAKEN), FeatureReader(fields), "ec_both")) == said


@pytest.mark.parametrize(
    ("stored", "claimed", "expected"),
    [
        ({"image_grid_thw": [1, 16, 16]}, {"image_grid_thw": [[1, 16, 16]]}, False),
        ({"image_grid_thw": [1, 16, 16]}, {"image_grid_thw": [1, 8, 32]}, True),
        ({"image_grid_thw": [1, 16, 16]}, {"image_grid_thw": [1, 16]}, True),
        ({"timestamps": [0.1, 0.30000000000000004]}, {"timestamps": [[0.1, 0.3]]}, False),
        ({"timestamps": [0.1, 0.3]}, {"timestamps": [0.1, 0.5]}, True),
        ({"audio_num_tokens": 25}, {"audio_num_tokens": [25]}, False),
        ({"image_grid_thw": [1, 16, 16]}, {}, False),
        ({}, {"image_grid_thw": [1, 16, 16]}, False),
    ],
)
def test_a_claimed_size_is_compared_with_the_stored_one(
    stored: dict[str, Any], claimed: dict[str, Any], expected: bool
) -> None:
    assert contradicts(stored, claimed) is expected
