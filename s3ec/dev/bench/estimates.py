# SPDX-License-Identifier: Apache-2.0
"""``bench estimates``: what one encode takes on this GPU, beside the estimate of `s3ec advise`.

Encoders have their published size and random weights, which take as long as trained ones. One A4
page at 150 dots per inch is encoded after another, each alone. What s3ec has learned of it by
vLLM's hooks is compared with what was measured around the encoder.
"""

from __future__ import annotations

import secrets
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from s3ec.dev.bench import engines, measure
from s3ec.dev.bench.context import Bench, CannotMeasureError, Context, Spec
from s3ec.dev.rigs.vllm_cpu import NEW_PICTURES, ONE_PROCESS
from s3ec.doctor.advise import preset_of
from s3ec.payoff import MODELS, Gpu

_PAGE = (1240, 1754)
_MAX_PIXELS = 2_200_000  # so that the page stays as large as it is
_MODELS = ("gemma3-27b", "qwen2.5-vl-7b", "qwen3-vl-8b")
_LEARNED = "estimates.learned_ratio"
# The estimates are known within 40%.
ROWS = (
    *(Spec(f"estimates.{name}_over_estimate", "ratio", "<= 1.4") for name in _MODELS),
    Spec(_LEARNED, "ratio", "<= 1.25"),
)
_ENCODES, _QUICK_ENCODES, _FIRST = 24, 8, 4
_OPTIONS: Mapping[str, Any] = {
    **NEW_PICTURES,
    "mm_processor_cache_gb": 1,
    "max_num_batched_tokens": 4096,
    "max_model_len": 4096,
    "limit_mm_per_prompt": {"image": 1},
    "gpu_memory_utilization": 0.4,
}


def run(context: Context) -> None:
    """Measure all models.

    Raises:
        CannotMeasureError: There is no CUDA device that the estimates know, or no vLLM.
    """
    gpu = _gpu()
    learned: dict[str, float] = {}
    count = _QUICK_ENCODES if context.quick else _ENCODES
    page = _write_page(context.scratch / "page.png")
    for name in _MODELS:
        context.say(f"an engine with the encoder of {MODELS[name].name}")
        times_ms, rows, learned_ms = _encode(context, name, page, count)
        median_ms = statistics.median(times_ms)
        estimate_ms = MODELS[name].encode_ms(gpu, 1)
        learned[name] = learned_ms / median_ms
        context.report(
            f"estimates.{name}_over_estimate",
            median_ms / estimate_ms,
            samples=len(times_ms),
            detail={
                "encode_ms": {
                    "p10": measure.percentile(times_ms, 10),
                    "p50": median_ms,
                    "p90": measure.percentile(times_ms, 90),
                },
                "estimate_ms": estimate_ms,
                "learned_ms": learned_ms,
                "rows": rows,
                "estimated_rows": MODELS[name].rows,
                "gpu": gpu.label,
            },
        )
    context.report(
        _LEARNED,
        measure.furthest_from_one(learned.values()),
        samples=count * len(learned),
        detail={"learned_over_true": learned},
    )


def _gpu() -> Gpu:
    try:
        import torch
    except ImportError as exc:
        raise CannotMeasureError(str(exc)) from exc
    if not torch.cuda.is_available():
        raise CannotMeasureError("there is no CUDA device here")
    name = torch.cuda.get_device_name()
    found = preset_of(name)
    if found is None:
        raise CannotMeasureError(f"{name} is none of those that are estimated")
    return found


def _write_page(path: Path) -> Path:
    """A picture of a page's size; what is on it does not matter to an encoder."""
    import numpy as np
    from PIL import Image

    values = np.random.default_rng(0).integers(0, 256, (*_PAGE[::-1], 3), dtype=np.uint8)
    Image.fromarray(values).save(path, compress_level=1)
    return path


def _encode(context: Context, name: str, page: Path, count: int) -> tuple[list[float], int, float]:
    """Milliseconds of each encode, rows of an embedding, and milliseconds that s3ec believes."""
    from s3ec.dev.rigs.engine import EngineProcess, ec_config
    from s3ec.dev.rigs.models import write_gemma3, write_qwen_vl

    model = context.scratch / name
    if name.startswith("gemma3"):
        write_gemma3(model, name)
    else:
        write_qwen_vl(model, name, max_pixels=_MAX_PIXELS)
    settings = {
        "url": (context.scratch / f"bucket-{name}").as_uri(),
        "cache_dir": str(context.scratch / f"tier of {name}"),
        "min_free_bytes": 0,
        "weights": "name",
    }
    with EngineProcess(
        model,
        ec=ec_config("ec_both", settings, ec_connector_module_path="s3ec.connector"),
        log_path=context.scratch / f"{name}.log",
        media=context.scratch,
        env=ONE_PROCESS,
        options=_OPTIONS,
    ) as engine:
        for number in range(_FIRST + count):
            if number == _FIRST:  # the first ones compile and tune
                engine.encoder()
            engine.chat([engines.prompt(page, secrets.token_hex(32))], max_tokens=1)
        found = engine.encoder()
    ((_kind, row_s),) = found["learned"].items()
    times = found["times"]
    rows = times[0][1]
    return [1e3 * took_s for took_s, _ in times], rows, 1e3 * row_s * rows


BENCH = Bench(ROWS, run)
