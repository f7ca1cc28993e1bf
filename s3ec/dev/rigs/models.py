# SPDX-License-Identifier: Apache-2.0
"""Vision-language models with random weights, for engines where nothing can be downloaded.

They load in vLLM with the default ``load_format``, their answers depend on the image, so a
wrong embedding changes tokens, and two runs at temperature 0 give the same tokens.

    python -m s3ec.dev.rigs.models gemma3 OUT --preset tiny
    python -m s3ec.dev.rigs.models qwen2-vl OUT
    python -m s3ec.dev.rigs.models qwen3-vl OUT
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer

MARKER = ".s3ec-model"
_MODEL_PACKAGES = ("safetensors", "tokenizers", "torch", "transformers")


@dataclass(frozen=True)
class _Gemma3Shape:
    """What differs between the presets; all widths in values, image_size in pixels."""

    text_width: int
    vision_width: int
    vision_layers: int
    vision_heads: int
    vision_mlp: int
    image_size: int
    image_tokens: int
    text_mlp: int = 256


# tiny: 64 rows of 64 values per image, 8 KiB in bfloat16; an engine starts in about 35 s.
# gemma3-27b: the vision side of Gemma3-27B (27 SigLIP layers) and its embedding, 256 rows of
# 5376 values = 2,752,512 bytes, before a two-layer text model. For a GPU.
# embedding-2.75mb: 256 rows of 2688 values, which in float32 are as many bytes, from a tiny
# encoder. In bfloat16 and as wide as Gemma3-27B's, a prefill would take seconds on a CPU.
GEMMA3_PRESETS = {
    "tiny": _Gemma3Shape(64, 64, 2, 2, 128, image_size=224, image_tokens=64),
    "embedding-2.75mb": _Gemma3Shape(2688, 64, 2, 2, 128, 224, image_tokens=256, text_mlp=16),
    "embedding-67mb": _Gemma3Shape(16384, 64, 2, 2, 128, 448, image_tokens=1024, text_mlp=32),
    "gemma3-27b": _Gemma3Shape(5376, 1152, 27, 16, 4304, image_size=896, image_tokens=256),
}

_GEMMA3_SPECIAL = [
    *("<pad>", "<eos>", "<bos>", "<unk>"),
    *("<start_of_image>", "<end_of_image>", "<image_soft_token>"),
    *("<start_of_turn>", "<end_of_turn>"),
]
# vLLM's prompt updates for Gemma3 look these up in the vocabulary.
_GEMMA3_NEWLINES = ["\n", "\n\n", "\n\n\n", "\n\n\n\n"]
_GEMMA3_CHAT = (
    "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for c in m['content'] %}{% if c['type'] == 'image' %}<start_of_image>"
    "{% else %}{{ c['text'] }}{% endif %}{% endfor %}{% endif %}<end_of_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)

_QWEN_VL_SPECIAL = [
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>"),
    *("<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
]
_QWEN_VL_CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for c in m['content'] %}{% if c['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% elif c['type'] == 'video' %}"
    "<|vision_start|><|video_pad|><|vision_end|>{% elif 'text' in c %}{{ c['text'] }}"
    "{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Of a picture; a larger one is made smaller.
_QWEN_VL_MIN_PIXELS, _QWEN_VL_MAX_PIXELS = 3136, 200_704


def write_gemma3(out: Path, preset: str = "tiny") -> Path:
    """Write a Gemma3-shaped model; return its folder.

    A folder that already holds this model is left as it is, which takes no time.

    Args:
        out: Folder of the model, made if missing.
        preset: One of GEMMA3_PRESETS; those of Gemma3-27B take 0.9 GB of disk.

    Raises:
        KeyError: No such preset.
    """
    shape = GEMMA3_PRESETS[preset]
    recipe = {"family": "gemma3", **asdict(shape)}
    return build_once(out, recipe, lambda: _build_gemma3(out, shape))


def write_qwen2_vl(out: Path) -> Path:
    """Write a tiny Qwen2-VL-shaped model; return its folder.

    The model for requests with a grid and a uuid but no pixels. A picture of 224 pixels
    square gives 64 rows of 64 values. A folder that already holds it is left as it is.
    """
    return write_qwen_vl(out, "qwen2-vl")


def write_qwen_vl(out: Path, family: str) -> Path:
    """Write a tiny model of one of Qwen's vision families; return its folder.

    Of a picture of 224 pixels square, ``qwen2-vl`` and ``qwen2.5-vl`` make 64 rows of 64 values,
    and ``qwen3-vl`` makes 49 rows of 192: the last layer's values and those of two layers before
    it. All take videos too. A folder that already holds the model is left as it is.

    Raises:
        KeyError: No such family.
    """
    chosen = QWEN_VL_FAMILIES[family]
    return build_once(out, {"family": family}, lambda: _build_qwen_vl(out, chosen))


def build_once(out: Path, recipe: dict[str, Any], build: Callable[[], None]) -> Path:
    """Build unless the marker, written last, says that the same recipe was built here."""
    ingredients = {name: version(name) for name in _MODEL_PACKAGES}
    code = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    wanted = json.dumps({"recipe": recipe, "packages": ingredients, "code": code})
    digest = hashlib.sha256(wanted.encode()).hexdigest()
    marker = out / MARKER
    if marker.is_file() and marker.read_text() == digest:
        return out
    out.mkdir(parents=True, exist_ok=True)
    marker.unlink(missing_ok=True)
    from s3ec.dev.rigs.vllm_cpu import install_here

    install_here()
    from transformers.utils import logging

    # Nobody can act on progress bars and advice here.
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        build()
    marker.write_text(digest)
    return out


def _build_gemma3(out: Path, shape: _Gemma3Shape) -> None:
    from transformers import Gemma3ForConditionalGeneration

    special = _GEMMA3_SPECIAL
    vocabulary, tokenizer = byte_tokenizer(special, _GEMMA3_NEWLINES, unknown="<unk>")
    save_tokenizer(
        out,
        tokenizer,
        special=special[4:],
        words=_GEMMA3_NEWLINES,
        roles={"pad": special[0], "eos": special[1], "bos": special[2], "unk": special[3]},
        chat_template=_GEMMA3_CHAT,
        settings={"boi_token": special[4], "eoi_token": special[5], "image_token": special[6]},
    )
    config = _gemma3_config(shape, vocabulary)
    save_weights(out, lambda: Gemma3ForConditionalGeneration(config))
    rename_weights(out, "vision_tower.", "vision_tower.vision_model.")
    _save_gemma3_processor(out, shape)


def _gemma3_config(shape: _Gemma3Shape, vocabulary: int) -> Any:
    from transformers import Gemma3Config

    ids = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
    text = {
        "model_type": "gemma3_text",
        "vocab_size": vocabulary,
        "hidden_size": shape.text_width,
        "intermediate_size": shape.text_mlp,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "query_pre_attn_scalar": 32,
        "max_position_embeddings": 8192,
        "sliding_window": 512,
        **ids,
    }
    vision = {
        "model_type": "siglip_vision_model",
        "hidden_size": shape.vision_width,
        "intermediate_size": shape.vision_mlp,
        "num_hidden_layers": shape.vision_layers,
        "num_attention_heads": shape.vision_heads,
        "image_size": shape.image_size,
        "patch_size": 14,
        "vision_use_head": False,
    }
    return Gemma3Config(
        text_config=text,
        vision_config=vision,
        mm_tokens_per_image=shape.image_tokens,
        boi_token_index=4,
        eoi_token_index=5,
        image_token_index=6,
        **ids,
    )


def rename_weights(folder: Path, old: str, new: str) -> None:
    """Rename weights that begin with ``old``: transformers 5 writes names that vLLM 0.32 lacks."""
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    tensors = {
        name.replace(old, new, 1) if name.startswith(old) else name: tensor.contiguous()
        for name, tensor in load_file(path).items()
    }
    save_file(tensors, path, metadata={"format": "pt"})


def _save_gemma3_processor(out: Path, shape: _Gemma3Shape) -> None:
    processor = {"processor_class": "Gemma3Processor", "image_seq_length": shape.image_tokens}
    image = {
        "image_processor_type": "Gemma3ImageProcessor",
        "do_resize": True,
        "size": {"height": shape.image_size, "width": shape.image_size},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "do_convert_rgb": True,
        "do_pan_and_scan": False,
    }
    write_json(out / "preprocessor_config.json", image | processor)
    write_json(out / "processor_config.json", processor)


@dataclass(frozen=True)
class _QwenVL:
    """One of Qwen's vision families.

    Attributes:
        name: How transformers' classes for it begin.
        vision, text, rope: What its configuration has of its own.
    """

    name: str
    vision: Mapping[str, Any]
    text: Mapping[str, Any]
    rope: Mapping[str, Any]


_QWEN2_VISION = {
    "depth": 2,
    "embed_dim": 64,
    "hidden_size": 64,
    "num_heads": 2,
    "mlp_ratio": 2,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
}
_QWEN2_5_VISION = {
    "depth": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_heads": 2,
    "out_hidden_size": 64,
    "patch_size": 14,
    "window_size": 112,
    "fullatt_block_indexes": [1],
    "tokens_per_second": 2,
}
_QWEN3_VISION = {
    "depth": 3,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_heads": 2,
    "out_hidden_size": 64,
    "patch_size": 16,
    "num_position_embeddings": 256,
    "deepstack_visual_indexes": [0, 1],
}
_SECTIONS: dict[str, Any] = {"mrope_section": [4, 6, 6]}
QWEN_VL_FAMILIES = {
    "qwen2-vl": _QwenVL("Qwen2VL", _QWEN2_VISION, {}, _SECTIONS),
    "qwen2.5-vl": _QwenVL("Qwen2_5_VL", _QWEN2_5_VISION, {}, _SECTIONS),
    "qwen3-vl": _QwenVL(
        "Qwen3VL",
        _QWEN3_VISION,
        {"head_dim": 32},
        {"mrope_section": [6, 5, 5], "mrope_interleaved": True},
    ),
}


def _build_qwen_vl(out: Path, family: _QwenVL) -> None:
    import transformers

    config = getattr(transformers, f"{family.name}Config")(
        text_config=_qwen_vl_text(family),
        vision_config=dict(family.vision),
        **_save_qwen_vl_tokenizer(out),
    )
    model = getattr(transformers, f"{family.name}ForConditionalGeneration")
    save_weights(out, lambda: model(config))
    _save_qwen_vl_processor(out, family)


def _save_qwen_vl_tokenizer(out: Path) -> dict[str, Any]:
    """Write it; what the model's configuration says of its tokens."""
    special = _QWEN_VL_SPECIAL
    _, tokenizer = byte_tokenizer(special)
    save_tokenizer(
        out,
        tokenizer,
        special=special,
        roles={"pad": special[0], "eos": special[2]},
        chat_template=_QWEN_VL_CHAT,
        settings={"image_token": special[6], "video_token": special[7]},
    )
    return {
        "image_token_id": 6,
        "video_token_id": 7,
        "vision_start_token_id": 3,
        "vision_end_token_id": 4,
        "tie_word_embeddings": False,
    }


def _qwen_vl_text(family: _QwenVL) -> dict[str, Any]:
    return {
        "vocab_size": len(_QWEN_VL_SPECIAL) + 256,  # a token per byte
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, **family.rope},
        **family.text,
    }


def _save_qwen_vl_processor(out: Path, family: _QwenVL) -> None:
    shared = {
        "processor_class": f"{family.name}Processor",
        "patch_size": family.vision["patch_size"],
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.48, 0.46, 0.41],
        "image_std": [0.27, 0.26, 0.28],
    }
    image = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "min_pixels": _QWEN_VL_MIN_PIXELS,
        "max_pixels": _QWEN_VL_MAX_PIXELS,
    }
    # Of a whole video. The second says what transformers warns about as long as nobody says it.
    video = {
        # That of Qwen2.5-VL is Qwen2-VL's.
        "video_processor_type": f"{family.name.replace('2_5_', '2')}VideoProcessor",
        "size": {"shortest_edge": _QWEN_VL_MIN_PIXELS, "longest_edge": _QWEN_VL_MAX_PIXELS},
        "cap_pixels_per_frame": False,
    }
    write_json(out / "preprocessor_config.json", image | shared)
    write_json(out / "video_preprocessor_config.json", video | shared)


def byte_tokenizer(
    special: Sequence[str], words: Sequence[str] = (), *, unknown: str | None = None
) -> tuple[int, Tokenizer]:
    """A tokenizer with a token per byte after the special ones; and its vocabulary's size."""
    from tokenizers import Tokenizer, decoders, models
    from tokenizers.pre_tokenizers import ByteLevel

    tokens = [*special, *sorted(ByteLevel.alphabet()), *words]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=unknown))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return len(vocabulary), tokenizer


def save_tokenizer(
    out: Path,
    tokenizer: Tokenizer,
    *,
    special: Sequence[str],
    roles: dict[str, str],
    chat_template: str,
    settings: dict[str, str],
    words: Sequence[str] = (),
) -> None:
    from transformers import PreTrainedTokenizerFast

    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=chat_template,
        **{f"{role}_token": token for role, token in roles.items()},
    )
    fast.add_tokens(list(words))
    fast.add_special_tokens({"additional_special_tokens": list(special)})
    fast.save_pretrained(out)
    path = out / "tokenizer_config.json"
    write_json(
        path,
        json.loads(path.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"} | settings,
    )


def save_weights(out: Path, make: Callable[[], torch.nn.Module]) -> None:
    import torch

    # The caller's own random numbers go on as if nothing had been drawn here.
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model: Any = make().to(torch.bfloat16)
        # The default initialisation answers every image with the same token.
        for name, weight in model.named_parameters():
            if weight.ndim > 1:
                scale = 0.01 if "embed_tokens" in name else 4 * weight[0].numel() ** -0.5
                weight.normal_(0, scale)
            elif "language_model" in name and "layernorm" in name:
                weight.fill_(5)
        model.save_pretrained(out)


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1))


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of ``python -m s3ec.dev.rigs.models``."""
    parser = argparse.ArgumentParser(
        prog="python -m s3ec.dev.rigs.models",
        description="Write a vision-language model with random weights to a folder.",
    )
    parser.add_argument("family", choices=("gemma3", *QWEN_VL_FAMILIES))
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--preset", choices=GEMMA3_PRESETS, default="tiny", help="of gemma3")
    options = parser.parse_args(arguments)
    if options.family == "gemma3":
        out = write_gemma3(options.out, options.preset)
    else:
        out = write_qwen_vl(options.out, options.family)
    sys.stdout.write(f"{out}\n")


if __name__ == "__main__":
    main()
