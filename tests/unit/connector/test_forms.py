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


def most(processor: Any, config: Any = NO_CONFIG) -> dict[str, int]:
    found = forms.form_of(processor, config)
    return {} if found is None else dict.fromkeys(found[1].modalities, found[1].most)


def test_most_models_have_one_form() -> None:
    assert most(Plain) == {}
    assert most(named("Qwen3VL", _get_mm_hashes=hook)) == {}


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("UnlimitedOCRMultiModalProcessor", 1),
        ("H2OVLMultiModalProcessor", 1),
        ("DeepseekVL2MultiModalProcessor", 2),
    ],
)
def test_a_model_of_the_table_is_found_by_its_processor(name: str, count: int) -> None:
    processor = named(name, _cached_apply_hf_processor=hook)
    assert most(processor) == {"image": count}
    assert most(named("OutOfTree", processor)) == {"image": count}
    assert most(named(name, _cached_apply_hf_processor=hook, _get_mm_hashes=hook)) == {}


def test_an_unknown_processor_that_goes_around_the_cache_has_a_form_alone() -> None:
    assert most(Unknown)["image"] == most(Unknown)["audio"] == 1
    assert most(BelowUnknown) == most(Unknown)
    assert most(NamedByVllm) == {}
    assert most(lambda info, dummy_inputs: None) == most(Unknown)


def test_those_that_go_around_the_cache_for_another_reason_have_one_form() -> None:
    for name in forms.ONE_FORM:
        assert most(named(name, _cached_apply_hf_processor=hook)) == {}


@pytest.mark.parametrize(
    ("args", "expected"),
    [({"min_num_patches": 4}, {"image": 0}), ({}, {}), (None, {})],
)
def test_a_shared_budget_leaves_no_form(args: Any, expected: dict[str, int]) -> None:
    processor = named("NanoNemotronVLMultiModalProcessor")
    config = SimpleNamespace(vision_config=SimpleNamespace(args=args))
    assert most(processor, config) == expected
    assert most(processor) == {}


def test_the_real_processors_are_found() -> None:
    vllm = pytest.importorskip("vllm.model_executor.models.unlimited_ocr")
    assert most(vllm.UnlimitedOCRMultiModalProcessor) == {"image": 1}
    assert most(vllm.DeepseekOCRMultiModalProcessor) == {}


@pytest.mark.parametrize(
    ("form", "said"),
    [
        (forms.Form(1, "squashes several"), "saved: each image of a prompt that has more than 1"),
        (forms.Form(0, "shrinks them"), "saved: each image"),
        (
            forms.Form(1, "may", modalities=("image", "audio")),
            "saved: each image or audio of a prompt that has more than 1",
        ),
    ],
)
def test_what_is_neither_loaded_nor_saved_is_said_at_the_start(
    form: forms.Form,
    said: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(forms, "form_of_model", lambda _: ("SomeProcessor", form))
    found = forms.forms_of(None)
    assert found == dict.fromkeys(form.modalities, form)
    (record,) = caplog.records
    assert record.getMessage().endswith(said)
