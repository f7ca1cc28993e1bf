# SPDX-License-Identifier: Apache-2.0
"""Models whose processor makes different pixels of one image if others are in its prompt.

vLLM's identifier of an image does not depend on the prompt, so two forms of it have one identifier,
and vLLM's own caches mix them up. Nothing of such a modality is loaded or saved. ``FORMS`` names
the models, and ``tests/versions/test_forms.py`` fails for a processor of the installed vLLM that is
not in it. From 0.33 on vLLM's identifiers of three of them include the form (``_get_mm_hashes``),
and those need no rule here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

log = logging.getLogger(__name__)

# vLLM's processors override this method where its cache of processed items would be wrong for them.
HOOK = "_cached_apply_hf_processor"
NAMED_BY = "_get_mm_hashes"
_BASE = "BaseMultiModalProcessor"
_MODALITIES = ("image", "video", "audio", "vision_chunk")


@dataclass(frozen=True, slots=True)
class Form:
    """Why the form of an item depends on the prompt.

    Attributes:
        why: What the processor does.
        modalities: The affected modalities.
        applies: True if a model is affected, by its Hugging Face configuration.
    """

    why: str
    modalities: tuple[str, ...] = ("image",)
    applies: Callable[[Any], bool] = lambda config: True


def _has_dynamic_resolution(config: Any) -> bool:
    vision = getattr(config, "vision_config", None)
    return "min_num_patches" in (getattr(vision, "args", None) or {})


# By the class that causes the difference; derived classes are found as well.
FORMS: Mapping[str, Form] = {
    "UnlimitedOCRMultiModalProcessor": Form(
        "cuts one picture into tiles or pads it, and squashes several"
    ),
    "H2OVLMultiModalProcessor": Form("cuts one picture twice, and several once"),
    "DeepseekVL2MultiModalProcessor": Form("cuts up to two pictures into tiles"),
    # The images that are missing in vLLM's cache at that moment share a budget, which is cut from
    # `max_model_len`. The result stays in that cache, and is used for later prompts.
    "NanoNemotronVLMultiModalProcessor": Form(
        "shrinks the pictures of a prompt until they fit together",
        applies=_has_dynamic_resolution,
    ),
}
# These override HOOK too, but an item has one form all the same.
ONE_FORM: Mapping[str, str] = {
    "JinaVLMultiModalProcessor": "turns the order of a pair around",
    "PixtralMultiModalProcessor": "says that the prompt has its tokens already (vLLM 0.27)",
    "VoxtralMultiModalProcessor": "says that the prompt has its tokens already (vLLM 0.27)",
    "VoxtralRealtimeMultiModalProcessor": "has one sound in a prompt",
    "Qwen3ASRRealtimeMultiModalProcessor": "has one sound in a prompt",
    "CohereASRMultiModalProcessor": "adds noise, whatever else is in the prompt",
    "FunASRMultiModalProcessor": "adds noise, whatever else is in the prompt",
}
_UNKNOWN = Form("may give one item several forms, for all s3ec knows", modalities=_MODALITIES)


def form_of(processor: Any, config: Any) -> tuple[str, Form] | None:
    """Find the form of a processor's class, by the classes that it is derived from.

    Args:
        processor: The processor that the model is registered with.
        config: The model's Hugging Face configuration.

    Returns:
        The class that causes the difference, by name, and its form; None if items have one form,
        or if vLLM's identifiers include it.
    """
    if not isinstance(processor, type):  # a function that makes one
        return getattr(processor, "__name__", "?"), _UNKNOWN
    for cls in processor.__mro__:
        if cls.__name__ == _BASE:
            break
        form = FORMS.get(cls.__name__)
        if form is None and HOOK in vars(cls) and cls.__name__ not in ONE_FORM:
            form = _UNKNOWN
        if form is not None:
            is_named = NAMED_BY in vars(cls)
            return None if is_named or not form.applies(config) else (cls.__name__, form)
    return None


def form_of_model(model_config: Any) -> tuple[str, Form] | None:
    """As ``form_of``, for the processor that vLLM uses for a model.

    Args:
        model_config: vLLM's ModelConfig. Imports the model's class, as vLLM does for the scheduler.
    """
    from vllm.multimodal import MULTIMODAL_REGISTRY

    model: Any = MULTIMODAL_REGISTRY._get_model_cls(model_config)
    return form_of(model._processor_factory.processor, getattr(model_config, "hf_config", None))


def unshared_modalities(model_config: Any) -> tuple[str, ...]:
    """Return modalities of which nothing may be loaded or saved; empty for most models.

    A line in the log says which, and why.
    """
    found = form_of_model(model_config)
    if found is None:
        return ()
    name, form = found
    log.warning(
        "vLLM's %s %s, under the same identifiers: each %s is encoded, and neither loaded nor "
        "saved. vLLM 0.33 or newer may name the forms",
        name,
        form.why,
        " or ".join(form.modalities),
    )
    return form.modalities
