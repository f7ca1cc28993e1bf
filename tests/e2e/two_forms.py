# SPDX-License-Identifier: Apache-2.0
"""One engine of Unlimited-OCR's real processor, with s3ec on a folder; prints what it did as JSON.

``python -m tests.e2e.two_forms FOLDER``. The encoder is a toy, the mean colours of fields, so that
an embedding shows which form of its picture it was made of.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from s3ec.dev.rigs import vllm_cpu
from s3ec.dev.rigs.models import byte_tokenizer, save_tokenizer, write_json

# Alone the first one is padded, and the second one is cut into tiles: it has other rows then.
SIZES = ((300, 600), (900, 1200))
ENCODER_CACHE_ROWS = 4096
_OTHERS = ENCODER_CACHE_ROWS // 273 + 1


def write_model(out: Path) -> Path:
    out.mkdir()
    size, tokenizer = byte_tokenizer(["<s>", "</s>", "<pad>", "<image>"])
    roles = {"bos": "<s>", "eos": "</s>", "pad": "<pad>"}
    save_tokenizer(out, tokenizer, special=["<image>"], roles=roles, chat_template="", settings={})
    text = dict(
        **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim"), 0),
        **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "num_hidden_layers"), 2),
        **dict.fromkeys(("num_experts_per_tok", "first_k_dense_replace"), 2),
        **dict.fromkeys(("moe_intermediate_size", "v_head_dim"), 32),
        hidden_size=64,
        intermediate_size=128,
        kv_lora_rank=None,
        max_position_embeddings=8192,
        n_routed_experts=4,
        n_shared_experts=1,
        vocab_size=size,
        architectures=["DeepseekV2ForCausalLM"],
    )
    config = {
        "model_type": "unlimited-ocr",
        "architectures": ["ToyOCR"],
        "tile_tag": "2D",
        "language_config": text,
        "vision_config": {"image_size": 1024},
        "projector_config": {"n_embed": 64, "input_dim": 2048, "projector_type": "linear"},
    }
    write_json(out / "config.json", config)
    return out


def register_model() -> None:
    import torch
    from vllm import ModelRegistry
    from vllm.model_executor.models import deepseek_ocr, unlimited_ocr
    from vllm.multimodal import MULTIMODAL_REGISTRY

    @MULTIMODAL_REGISTRY.register_processor(
        unlimited_ocr.UnlimitedOCRMultiModalProcessor,
        info=unlimited_ocr.UnlimitedOCRProcessingInfo,
        dummy_inputs=deepseek_ocr.DeepseekOCRDummyInputsBuilder,
    )
    class ToyOCR(unlimited_ocr.UnlimitedOCRForCausalLM):  # type: ignore[misc]
        def _fields(self, images: Any, side: int) -> Any:
            colours = torch.nn.functional.adaptive_avg_pool2d(images.float(), side)
            return colours.flatten(2).mT @ torch.arange(192.0).view(3, 64).sin()

        def _encode_global_features(self, image: Any) -> Any:
            rows = self._fields(image, 16).view(16, 16, 64)
            return torch.cat([rows, torch.zeros(16, 1, 64)], 1).view(-1, 64)

        def _encode_local_features(self, patches: Any, shape: Any) -> Any:
            if not len(patches):
                return None
            return self._assemble_patch_grid(self._fields(patches, 10), shape)

    for name in ("build_sam_vit_b", "DeepCLIPVisionTransformer", "MlpProjector"):
        setattr(deepseek_ocr, name, lambda *_, **__: torch.nn.Identity())
    ModelRegistry.register_model("ToyOCR", ToyOCR)


class Engine:
    def __init__(self, folder: Path) -> None:
        from vllm import LLM

        settings = {
            "url": (folder / "corpus").as_uri(),
            "cache_dir": str(folder / "tier"),
            "min_free_bytes": 0,
            "wait": "always",
            "defer_timeout_s": 60,
        }
        self.objects = folder / "corpus"
        self.objects.mkdir()
        self._llm = LLM(
            str(write_model(folder / "model")),
            dtype="float32",
            load_format="dummy",
            max_model_len=ENCODER_CACHE_ROWS,
            max_num_batched_tokens=ENCODER_CACHE_ROWS,
            max_num_seqs=2,
            enforce_eager=True,
            block_size=32,
            enable_prefix_caching=False,
            gpu_memory_utilization=0.2,
            ec_transfer_config={
                "ec_connector": "S3ECConnector",
                "ec_role": "ec_both",
                "ec_connector_module_path": "s3ec.connector",
                "ec_connector_extra_config": settings,
            },
        )
        self._core = self._llm.llm_engine.engine_core.engine_core
        self._turn = 0

    def ask(self, *pictures: Any) -> dict[str, Any]:
        """Prompt with these; what came of it."""
        from vllm import SamplingParams

        get = self._core.scheduler.ec_connector.parts.node.counters.get
        before = get("hits"), get("misses")
        prompt = {
            "prompt": "<image>" * len(pictures) + "read",
            "multi_modal_data": {"image": list(pictures)},
        }
        self._llm.generate(prompt, SamplingParams(max_tokens=1), use_tqdm=False)
        runner = self._core.model_executor.driver_worker.worker.model_runner
        cache = getattr(runner.encoder_cache, "encoder_outputs", runner.encoder_cache)  # V2, V1
        held = list(cache.values())[-len(pictures) :]
        return {
            "hits": get("hits") - before[0],
            "encoded": get("misses") - before[1],
            "rows": [len(tensor) for tensor in held],
            "sums": [round(tensor.double().abs().sum().item()) for tensor in held],
        }

    def stored(self, count: int) -> int:
        """Wait until so many entries are stored; how many there are."""
        deadline_s = time.monotonic() + 30
        while True:
            found = len(list(self.objects.rglob("objects/**/*.safetensors")))
            if found >= count or time.monotonic() > deadline_s:
                return found
            time.sleep(0.1)

    def push_out(self) -> None:
        """Have the device give up what it holds: ask for as many others as it has room for."""
        self._turn += 1
        for number in range(_OTHERS):
            self.ask(picture((64, 64), number + 40 * (self._turn % 2)))

    def close(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()


def picture(size: tuple[int, int], number: int) -> Any:
    import numpy as np
    from PIL import Image

    width, height = size
    values = np.linspace(0, 90 + number, width * height * 3).reshape(height, width, 3)
    return Image.fromarray(values.astype("uint8"))


def main(folder: Path) -> None:
    vllm_cpu.install_here()
    register_model()
    engine = Engine(folder)
    result: dict[str, Any] = {}
    for turn in (1, 2):
        engine.push_out()
        engine.stored(turn * _OTHERS)
    for size in SIZES:
        first, second, third = (picture(size, 100 + 10 * number) for number in range(3))
        before = engine.stored(0)
        steps = result["x".join(map(str, size))] = {}
        steps["two"] = engine.ask(first, second)
        steps["alone"] = engine.ask(third)
        steps["stored"] = engine.stored(before + 1) - before
        engine.push_out()
        before = engine.stored(0)
        steps["two again"] = engine.ask(first, second)
        engine.push_out()
        steps["alone again"] = engine.ask(third)
        engine.push_out()
        steps["third among others"] = engine.ask(second, third)
        engine.push_out()
        steps["first alone"] = engine.ask(first)
        steps["stored later"] = engine.stored(0) - before
    engine.close()
    sys.stdout.write(f"RESULT {json.dumps(result)}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    sys.stdout.flush()
    os._exit(0)
