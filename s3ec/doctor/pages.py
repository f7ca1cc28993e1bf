# SPDX-License-Identifier: Apache-2.0
"""Measures pictures with vLLM's own processor, without weights and without a GPU.

Runs in the process that imports vLLM. Releases differ in how a processor is called; a call that
fails raises, and the caller continues without the result.
"""

from __future__ import annotations

import io
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# A4 at 150 dots per inch, used if the user gives no pictures.
ASSUMED_PAGE = (1240, 1754)
# More pages add no information, and each takes the processor some 50 ms.
MOST_PAGES = 32


def pictures_in(folder: Path) -> list[Path]:
    """Find pictures in and below a folder, by their suffix: evenly chosen, at most MOST_PAGES."""
    from s3ec.corpus.sources import suffixes

    images = {suffix for suffix, modality in suffixes().items() if modality == "image"}
    found = sorted(p for p in folder.rglob("*") if p.suffix.lower() in images and p.is_file())
    step = max(1, len(found) // MOST_PAGES)
    return found[::step][:MOST_PAGES]


def describe_pages(vllm_config: Any, files: Sequence[str]) -> dict[str, Any]:
    """Measure the size of pictures in this model, and the encoder's work for them.

    Args:
        vllm_config: vLLM's VllmConfig.
        files: Pictures; empty for one white page of ASSUMED_PAGE.

    Returns:
        Medians: ``rows``, ``patches`` and ``span`` (patches that attend to each other) of a
        picture, and ``processor_ms``. Further ``pages`` (how many), ``width``, ``itemsize``,
        ``gpus`` of the engine, ``gpu`` (name of the device here, None without one), and
        ``encoder``, which has layers, width, inner and gated of the vision transformer, None if
        its configuration is of an unknown kind.

    Raises:
        Exception: Any error of vLLM, the model's processor or Pillow.
    """
    from PIL import Image
    from vllm.multimodal import MULTIMODAL_REGISTRY

    model = vllm_config.model_config
    processor = MULTIMODAL_REGISTRY.create_processor(model)
    text = processor.dummy_inputs.get_dummy_text({"image": 1})
    blobs = [Path(name).read_bytes() for name in files] or [_blank_page()]
    vision = getattr(model.hf_config, "vision_config", None)
    rows, patches, spans, times = [], [], [], []
    # The first of them warms the processor up.
    for number, blob in enumerate([blobs[0], *blobs]):
        began_s = time.perf_counter()
        image = Image.open(io.BytesIO(blob)).convert("RGB")
        items = processor.info.parse_mm_data({"image": [image]})
        result = processor(text, mm_items=items)
        took_ms = (time.perf_counter() - began_s) * 1e3
        if number == 0:
            continue
        times.append(took_ms)
        rows.append(sum(place.get_num_embeds() for place in result["mm_placeholders"]["image"]))
        count, span = _patches(result["mm_kwargs"]["image"][0].get_data(), vision)
        patches.append(count)
        spans.append(span)
    parallel = vllm_config.parallel_config
    # Qwen3-VL: the output of some layers in addition to that of the last one.
    deepstack = _first(vision, "deepstack_visual_indexes") or ()
    return {
        "pages": len(files),
        "rows": statistics.median(rows),
        "patches": statistics.median(patches),
        "span": statistics.median(spans),
        "processor_ms": statistics.median(times),
        "width": model.get_inputs_embeds_size() * (1 + len(deepstack)),
        "itemsize": model.dtype.itemsize,
        "gpus": parallel.tensor_parallel_size * parallel.pipeline_parallel_size,
        "gpu": _gpu(),
        "encoder": _encoder(vision),
    }


def _blank_page() -> bytes:
    from PIL import Image

    buffer = io.BytesIO()
    Image.new("RGB", ASSUMED_PAGE, "white").save(buffer, "JPEG")
    return buffer.getvalue()


def _first(config: Any, *names: str) -> Any:
    return next((value for name in names if (value := getattr(config, name, None))), None)


def _patches(data: Any, vision: Any) -> tuple[int, int]:
    """Patches of a picture, and how many of them attend to each other.

    Pixels have the shape of tiles (tiles, 3, height, width), of one picture (3, height, width), or
    of patches (patches, values of one). Returns 0 for other shapes.
    """
    size = _first(vision, "patch_size")
    if isinstance(size, (tuple, list)):
        size = size[0]
    pixels = next((value for name, value in data.items() if "pixel_values" in name), None)
    if pixels is None or not size or not hasattr(pixels, "numel"):
        return 0, 0
    a_patch = 3 * size**2
    if pixels.dim() == 2:  # video models take each picture twice
        count = pixels.shape[0]
        return count, count
    count = pixels.numel() // a_patch
    tile = pixels.shape[-1] * pixels.shape[-2] // size**2
    return count, tile if tile > 1 else count


def _encoder(vision: Any) -> dict[str, Any] | None:
    layers = _first(vision, "num_hidden_layers", "depth", "layers", "num_layers")
    width = _first(vision, "embed_dim", "hidden_size", "width")
    inner = _first(vision, "intermediate_size", "mlp_dim")
    ratio = _first(vision, "mlp_ratio")
    if inner is None and ratio and width:
        inner = int(width * ratio)
    if not (layers and width and inner):
        return None
    act = str(_first(vision, "hidden_act", "hidden_activation") or "")
    return {"layers": layers, "width": width, "inner": inner, "gated": act in ("silu", "swiglu")}


def _gpu() -> str | None:
    from vllm.platforms import current_platform

    return str(current_platform.get_device_name()) if current_platform.is_cuda() else None
