# SPDX-License-Identifier: Apache-2.0
"""An audio-language model with random weights, and recordings to ask it about.

As ``s3ec.dev.rigs.models`` for pictures: answers depend on what is heard.
"""

from __future__ import annotations

import math
import random
import wave
from pathlib import Path
from typing import Any

from s3ec.dev.rigs.models import (
    build_once,
    byte_tokenizer,
    rename_weights,
    save_tokenizer,
    save_weights,
    write_json,
)

RATE_HZ = 16_000
# The encoder always gets this much, padded with silence: vLLM takes no other. A row is 40 ms.
CHUNK_S = 30
_FRAMES = CHUNK_S * 100

_SPECIAL = [
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    *("<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>"),
]
_CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for c in m['content'] %}{% if c['type'] == 'audio' %}"
    "<|audio_bos|><|AUDIO|><|audio_eos|>{% elif 'text' in c %}{{ c['text'] }}"
    "{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_qwen2_audio(out: Path) -> Path:
    """Write a tiny Qwen2-Audio-shaped model; return its folder.

    A recording of a second gives 25 rows of 64 values. A folder that already holds it is left as
    it is.
    """
    return build_once(out, {"family": "qwen2-audio"}, lambda: _build(out))


def write_recordings(out: Path, count: int, *, seconds: float = 1.0) -> list[Path]:
    """Write different recordings, WAV files of 16 bits: a few tones each, by its number.

    Args:
        out: Folder, made if missing; files of the same name are replaced.
        count: How many.
        seconds: Length of each, at most ``CHUNK_S``.

    Returns:
        The files, in order.
    """
    out.mkdir(parents=True, exist_ok=True)
    paths = []
    for number in range(count):
        path = out / f"recording-{number}.wav"
        with wave.open(str(path), "wb") as file:
            file.setparams((1, 2, RATE_HZ, 0, "NONE", ""))
            file.writeframes(_tones(number, round(seconds * RATE_HZ)))
        paths.append(path)
    return paths


def _tones(seed: int, samples: int) -> bytes:
    pitch = random.Random(seed)
    pitches_hz = [pitch.uniform(80, 4000) for _ in range(4)]
    steps = [2 * math.pi * each / RATE_HZ for each in pitches_hz]
    values = (round(7000 * sum(math.sin(step * at) for step in steps)) for at in range(samples))
    return b"".join(value.to_bytes(2, "little", signed=True) for value in values)


def _build(out: Path) -> None:
    from transformers import Qwen2AudioForConditionalGeneration

    vocabulary, tokenizer = byte_tokenizer(_SPECIAL)
    save_tokenizer(
        out,
        tokenizer,
        special=_SPECIAL,
        roles={"pad": _SPECIAL[0], "eos": _SPECIAL[2]},
        chat_template=_CHAT,
        settings={},
    )
    config = _config(vocabulary)
    save_weights(out, lambda: Qwen2AudioForConditionalGeneration(config))
    rename_weights(out, "language_model.model.model.", "language_model.model.")
    features = {
        "feature_extractor_type": "WhisperFeatureExtractor",
        "processor_class": "Qwen2AudioProcessor",
        "feature_size": 128,
        "sampling_rate": RATE_HZ,
        "hop_length": 160,
        "chunk_length": CHUNK_S,
        "n_fft": 400,
        "n_samples": CHUNK_S * RATE_HZ,
        "nb_max_frames": _FRAMES,
        "return_attention_mask": True,
    }
    write_json(out / "preprocessor_config.json", features)


def _config(vocabulary: int) -> Any:
    from transformers import Qwen2AudioConfig

    text = {
        "model_type": "qwen2",
        "vocab_size": vocabulary,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 4096,
    }
    audio = {
        "model_type": "qwen2_audio_encoder",
        "num_mel_bins": 128,
        "d_model": 64,
        "encoder_layers": 2,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 128,
        "max_source_positions": _FRAMES // 2,
    }
    return Qwen2AudioConfig(
        audio_config=audio,
        text_config=text,
        audio_token_index=_SPECIAL.index("<|AUDIO|>"),
        tie_word_embeddings=False,
    )
