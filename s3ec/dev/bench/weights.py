# SPDX-License-Identifier: Apache-2.0
"""``bench weights``: how long an engine's start waits for the fingerprint of a large checkpoint.

The checkpoint has the names and sizes of Gemma 3 27B in twelve files of 55 GB in all. The language
model's part is holes in sparse files; the encoder's 0.9 GB are written, since they are read.
"""

from __future__ import annotations

import json
import math
import os
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from s3ec.dev.bench.context import Bench, Context, Spec
from s3ec.weights import Checkpoint, fingerprint_of

_ROW = "weights.fingerprint_ms"
ROWS = (Spec(_ROW, "ms", "<= 200"),)
_ROUNDS = 9
_FILES = 12
_LAYERS, _ENCODER_LAYERS = 62, 27
_CHUNK = 2**20

Shape = tuple[int, ...]


def run(context: Context) -> None:
    """Measure, with the files in the page cache and after they were dropped from it."""
    context.say("writing a checkpoint like that of a 27B model")
    folder = context.scratch / "model"
    files = list(_write(folder))
    checkpoint = Checkpoint(str(folder))
    cases: dict[str, list[float]] = {"files in memory": [], "files on disk only": []}
    fingerprint_of(checkpoint)
    for _ in range(context.rounds(_ROUNDS)):
        for case, times in cases.items():
            if case == "files on disk only":
                for file in files:
                    _drop(file)
            started = time.perf_counter()
            fingerprint_of(checkpoint)
            times.append((time.perf_counter() - started) * 1e3)
    context.report_slowest(
        _ROW,
        cases,
        samples=sum(map(len, cases.values())),
        detail={"gigabytes": round(sum(file.stat().st_size for file in files) / 1e9, 1)},
    )


def _tensors() -> Iterator[tuple[str, Shape, bool]]:
    """Name, shape, and whether its bytes count."""
    hidden, inner, width, wide = 5376, 21504, 1152, 4304
    yield "language_model.model.embed_tokens.weight", (262208, hidden), True
    for number in range(_LAYERS):
        layer = f"language_model.model.layers.{number}."
        yield f"{layer}self_attn.q_proj.weight", (4096, hidden), False
        yield f"{layer}self_attn.k_proj.weight", (2048, hidden), False
        yield f"{layer}self_attn.v_proj.weight", (2048, hidden), False
        yield f"{layer}self_attn.o_proj.weight", (hidden, 4096), False
        for name, shape in (("gate", (inner, hidden)), ("up", (inner, hidden))):
            yield f"{layer}mlp.{name}_proj.weight", shape, False
        yield f"{layer}mlp.down_proj.weight", (hidden, inner), False
        for name in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            yield f"{layer}{name}_layernorm.weight", (hidden,), False
    for number in range(_ENCODER_LAYERS):
        layer = f"vision_tower.vision_model.encoder.layers.{number}."
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            yield f"{layer}self_attn.{name}.weight", (width, width), True
            yield f"{layer}self_attn.{name}.bias", (width,), True
        for name, out, into in (("fc1", wide, width), ("fc2", width, wide)):
            yield f"{layer}mlp.{name}.weight", (out, into), True
            yield f"{layer}mlp.{name}.bias", (out,), True
        for name in ("layer_norm1", "layer_norm2"):
            yield f"{layer}{name}.weight", (width,), True
            yield f"{layer}{name}.bias", (width,), True
    yield "multi_modal_projector.mm_input_projection_weight", (width, hidden), True


def _write(folder: Path) -> Iterator[Path]:
    folder.mkdir()
    tensors = list(_tensors())
    each = math.ceil(len(tensors) / _FILES)
    chunk = os.urandom(_CHUNK)
    for number in range(_FILES):
        part = tensors[number * each : (number + 1) * each]
        header: dict[str, Any] = {}
        end = 0
        for name, shape, _ in part:
            start, end = end, end + 2 * math.prod(shape)
            header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
        front = json.dumps(header).encode()
        path = folder / f"model-{number + 1:05}-of-{_FILES:05}.safetensors"
        with path.open("wb") as file:
            file.write(struct.pack("<Q", len(front)) + front)
            for name, _, counts in part:
                start, end = (8 + len(front) + it for it in header[name]["data_offsets"])
                # The table of the vocabulary is sampled like any tensor; holes will do for it.
                if counts and "embed_tokens" not in name:
                    file.seek(start)
                    for at in range(start, end, _CHUNK):
                        file.write(chunk[: end - at])
            file.truncate(8 + len(front) + header[part[-1][0]]["data_offsets"][1])
            file.flush()
            os.fsync(file.fileno())
        yield path


def _drop(file: Path) -> None:
    """Out of the page cache; what is clean goes."""
    with file.open("rb") as stream:
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


BENCH = Bench(ROWS, run)
