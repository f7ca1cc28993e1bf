# SPDX-License-Identifier: Apache-2.0
"""Which models have pictures whose form depends on their prompt."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from s3ec.connector import forms


class BaseMultiModalProcessor:
    def _cached_apply_hf_processor(self) -> None: ...

    def _get_mm_hashes(self) -> None: ...


class Plain(BaseMultiModalProcessor):
    pass


class Unknown(Plain):
    def _cached_apply_hf_processor(self) -> None: ...


class BelowUnknown(Unknown):
    def _get_mm_hashes(self) -> None: ...


class NamedByVllm(Plain):
    """As vLLM 0.33 has them."""

    def _cached_apply_hf_processor(self) -> None: ...

    def _get_mm_hashes(self) -> None: ...


def named(name: str, base: type = BaseMultiModalProcessor, **members: Any) -> type:
    return type(name, (base,), members)


def hook(self: object) -> None: ...


NO_CONFIG = SimpleNamespace()


def unshared(processor: Any, config: Any = NO_CONFIG) -> tuple[str, ...]:
    found = forms.form_of(processor, config)
    return () if found is None else found[1].modalities


def test_most_models_have_one_form() -> None:
    assert unshared(Plain) == ()
    assert unshared(named("Qwen3VL", _get_mm_hashes=hook)) == ()


@pytest.mark.parametrize(
    "name",
    [
        "UnlimitedOCRMultiModalProcessor",
        "H2OVLMultiModalProcessor",
        "DeepseekVL2MultiModalProcessor",
    ],
)
def test_a_model_of_the_table_is_found_by_its_processor(name: str) -> None:
    processor = named(name, _cached_apply_hf_processor=hook)
    assert unshared(processor) == ("image",)
    assert unshared(named("OutOfTree", processor)) == ("image",)
    assert unshared(named(name, _cached_apply_hf_processor=hook, _get_mm_hashes=hook)) == ()


def test_nothing_is_shared_of_an_unknown_processor_that_goes_around_the_cache() -> None:
    assert {"image", "audio", "video"} <= set(unshared(Unknown))
    assert unshared(BelowUnknown) == unshared(Unknown)
    assert unshared(NamedByVllm) == ()
    assert unshared(lambda info, dummy_inputs: None) == unshared(Unknown)


def test_those_that_go_around_the_cache_for_another_reason_have_one_form() -> None:
    for name in forms.ONE_FORM:
        assert unshared(named(name, _cached_apply_hf_processor=hook)) == ()


@pytest.mark.parametrize(
    ("args", "expected"),
    [({"min_num_patches": 4}, ("image",)), ({}, ()), (None, ())],
)
def test_a_shared_budget_leaves_no_form(args: Any, expected: tuple[str, ...]) -> None:
    processor = named("NanoNemotronVLMultiModalProcessor")
    config = SimpleNamespace(vision_config=SimpleNamespace(args=args))
    assert unshared(processor, config) == expected
    assert unshared(processor) == ()


def test_the_real_processors_are_found() -> None:
    vllm = pytest.importorskip("vllm.model_executor.models.unlimited_ocr")
    assert unshared(vllm.UnlimitedOCRMultiModalProcessor) == ("image",)
    assert unshared(vllm.DeepseekOCRMultiModalProcessor) == ()


def test_what_is_neither_loaded_nor_saved_is_said_at_the_start(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = forms.Form("may", modalities=("image", "audio"))
    monkeypatch.setattr(forms, "form_of_model", lambda _: ("SomeProcessor", form))
    assert forms.unshared_modalities(None) == ("image", "audio")
    (record,) = caplog.records
    assert "SomeProcessor may, under" in record.getMessage()
    assert "each image or audio is encoded, and neither loaded nor saved" in record.getMessage()
