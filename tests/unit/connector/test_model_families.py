# SPDX-License-Identifier: Apache-2.0
"""Requests without pixels are recognised, and pixels too, for every model family of vLLM."""

from __future__ import annotations

import importlib
import inspect
import warnings
from collections import defaultdict
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import BatchFeature
from vllm.model_executor.models.registry import _MULTIMODAL_MODELS
from vllm.multimodal.inputs import MultiModalFieldElem, MultiModalKwargsItem
from vllm.multimodal.parse import MultiModalDataParser
from vllm.multimodal.processing import BaseMultiModalProcessor

from s3ec.connector import vllm_config
from s3ec.connector.vllm_config import MODALITIES, FeatureReader

pytestmark = pytest.mark.slow  # imports every model of vLLM
# A CPU has no kernels for these, or what they need is not installed with vLLM.
NOT_HERE = {"kanana_v", "vllm.models.dots3_note"}


class Whatever:
    """In the place of a model's configuration: every question has an answer, every number is 2."""

    def __getattr__(self, name: str) -> Whatever:
        return self

    def __call__(self, *args: object, **kwargs: object) -> Whatever:
        return self

    def __index__(self) -> int:
        return 2

    __int__ = __index__

    def __iter__(self) -> Iterator[object]:
        return iter(())

    def _number(self, other: object) -> int:
        return 2

    __mul__ = __rmul__ = __pow__ = __floordiv__ = _number

    def __rfloordiv__(self, other: Any) -> Any:
        return other // 2


def descendants(cls: type) -> Iterator[type]:
    for each in cls.__subclasses__():
        yield each
        yield from descendants(each)


@pytest.fixture(scope="module")
def families() -> list[str]:
    """Modules of all multimodal models, imported."""
    names = sorted({module for module, _ in _MULTIMODAL_MODELS.values()})
    missing = set()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch and transformers, as they are imported
        for name in names:
            here = name if name.startswith("vllm.") else f"vllm.model_executor.models.{name}"
            try:
                importlib.import_module(here)
            except ImportError:
                missing.add(name)
    assert missing == NOT_HERE
    return names


@pytest.fixture(scope="module")
def declared(families: list[str]) -> dict[type, dict[str, set[str]]]:
    """Parser class to modality to placeholder metadata fields."""
    parsers: set[Any] = set(descendants(MultiModalDataParser))
    return {
        parser: {
            modality: parser.placeholder_metadata_fields(modality)
            for modality in parser.embedding_fields
        }
        for parser in parsers
        if parser.embedding_fields
    }


def fields_of(processor: Any) -> dict[str, dict[str, Any]]:
    """Modality to the fields of one item, as the model's processor declares them."""
    bare = object.__new__(processor)
    bare.info = Whatever()
    fields: defaultdict[str, dict[str, Any]] = defaultdict(dict)
    for key, config in bare._get_mm_fields_config(BatchFeature({}), {}).items():
        fields[config.modality][key] = config.field
    return fields


def reader_for(monkeypatch: pytest.MonkeyPatch, fields: dict[str, set[str]]) -> FeatureReader:
    import vllm.distributed.ec_transfer.ec_connector.utils as utils

    resolver = SimpleNamespace(fields_for=lambda modality: fields.get(modality, set()))
    monkeypatch.setattr(utils, "PlaceholderMetadataResolver", lambda _: resolver)
    return FeatureReader(None)


def item(modality: str, fields: dict[str, Any]) -> Any:
    data = {key: MultiModalFieldElem(torch.zeros(1), field) for key, field in fields.items()}
    return SimpleNamespace(modality=modality, data=MultiModalKwargsItem(data))


def test_what_a_model_declares_is_asked_for(declared: dict[type, dict[str, set[str]]]) -> None:
    assert len(declared) >= 12
    assert {modality for fields in declared.values() for modality in fields} <= set(MODALITIES)


def test_every_family_s_items_are_told_apart_with_and_without_pixels(
    monkeypatch: pytest.MonkeyPatch,
    families: list[str],
    declared: dict[type, dict[str, set[str]]],
) -> None:
    """As vLLM's render endpoint strips them: declared fields, and all that stay on the CPU."""
    processors: set[Any] = set(descendants(BaseMultiModalProcessor))
    checked = 0
    # A model's parser is not to be had without its configuration, so all are tried with each.
    for metadata in [{}, *declared.values()]:
        reader = reader_for(monkeypatch, metadata)
        for processor in processors:
            if inspect.isabstract(processor):
                continue
            for modality, fields in fields_of(processor).items():
                wanted = metadata.get(modality, set())
                stripped = {
                    key: field
                    for key, field in fields.items()
                    if field.keep_on_cpu or key in wanted
                }
                if not set(fields) > set(stripped):
                    continue  # declared by another family's parser
                where = f"{processor.__name__}, {modality}, {sorted(fields)}"
                assert not reader.needs_embedding(item(modality, fields)), where
                assert reader.needs_embedding(item(modality, stripped)), where
                assert reader.needs_embedding(SimpleNamespace(modality=modality, data=None)), where
                checked += 1
    assert checked > 1000
    assert vllm_config.PASSED_THROUGH not in MODALITIES


def test_no_family_keeps_all_that_its_encoder_needs_on_the_cpu(families: list[str]) -> None:
    """One that did would have its pixels taken for metadata."""
    for processor in set(descendants(BaseMultiModalProcessor)):
        if not inspect.isabstract(processor):
            for modality, fields in fields_of(processor).items():
                kept = [key for key, field in fields.items() if field.keep_on_cpu]
                assert len(kept) < len(fields), (processor.__name__, modality)
