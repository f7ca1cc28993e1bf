# SPDX-License-Identifier: Apache-2.0
"""``bench precompute``: a job that is run again, and a server whose clients ask what it encoded."""

from __future__ import annotations

import base64
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from s3ec.dev.bench import engines
from s3ec.dev.bench.context import Bench, CannotMeasureError, Context, Spec
from s3ec.dev.rigs.vllm_cpu import ONE_PROCESS, engine_env

if TYPE_CHECKING:
    from s3ec.testing.server import LocalS3

_ENCODES = "precompute.resume_encodes"
_PER_ITEM = "precompute.resume_ms_per_item"
_HITS = "corpus.server_hit_ratio"
ROWS = (
    Spec(_ENCODES, "1", "<= 0"),
    Spec(_PER_ITEM, "ms", "<= 2"),
    Spec(_HITS, "ratio", ">= 1"),
)
_ITEMS, _QUICK_ITEMS = 10_000, 200
_ASKED = 12
_ENGINE = {
    "enforce_eager": True,
    "gpu_memory_utilization": 0.3,
    "max_model_len": 4096,
    "max_num_seqs": 8,
}
_BUCKET = "precompute"


def run(context: Context) -> None:
    """Measure."""
    with engines.local_server(_BUCKET) as server:
        _measure_hits(context, server)
        _measure_resume(context, server)


def _settings(server: LocalS3, cache_dir: Path, **more: Any) -> dict[str, Any]:
    return {
        "bucket": _BUCKET,
        "endpoint_url": server.endpoint_url,
        "cache_dir": str(cache_dir),
        "min_free_bytes": 0,
        **more,
    }


def _write_pictures(folder: Path, count: int, side: int, *, seed: int) -> list[Path]:
    """Different pictures of noise, which no decoder is fast with."""
    from PIL import Image

    folder.mkdir(parents=True)
    paths = []
    for number in range(count):
        noise = random.Random(f"{seed}-{number}").randbytes(side * side * 3)
        path = folder / f"{seed:03}-{number:05}.png"
        Image.frombytes("RGB", (side, side), noise).save(path)
        paths.append(path)
    return paths


# -- the command, twice ----------------------------------------------------------------------------


def _command(
    server: LocalS3, model: Path, folder: Path, settings: Mapping[str, Any], *more: str
) -> tuple[dict[str, Any], float]:
    """Run ``s3ec precompute`` as deployed; its report, and how long it took."""
    began_s = time.monotonic()
    done = subprocess.run(
        [
            *(sys.executable, "-m", "s3ec", "precompute", str(folder), "--model", str(model)),
            *("--config", json.dumps(settings), "--engine-args", json.dumps(_ENGINE)),
            *("--json", *more),
        ],
        env=engine_env({**os.environ, **server.env(), **ONE_PROCESS}),
        capture_output=True,
        text=True,
        check=False,
    )
    seconds = time.monotonic() - began_s
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [""]
        raise CannotMeasureError(f"the job ended with {done.returncode}: {lines[-1][:500]}")
    report: dict[str, Any] = json.loads(done.stdout)
    return report, seconds


def _measure_resume(context: Context, server: LocalS3) -> None:
    """What a job does over a corpus that is complete."""
    from s3ec.dev.rigs.models import write_gemma3

    items = _QUICK_ITEMS if context.quick else _ITEMS
    model = write_gemma3(context.scratch / "model-many")
    folder = context.scratch / "many"
    _write_pictures(folder, items, 32, seed=0)
    settings = _settings(server, context.scratch / "tier-many")
    context.say(f"encoding {items:,} pictures")
    first, first_s = _command(server, model, folder, settings)
    context.say("once more")
    second, second_s = _command(server, model, folder, settings)
    if second["done_before_count"] != items:
        raise CannotMeasureError(f"the second run found {second['done_before_count']:,} of {items}")
    detail = {
        "items": items,
        "first_s": first_s,
        "first_encoded": first["encoded_count"],
        "job_s": second["seconds"],
        "engine_started": second["engine_started"],
        "note": "the whole command, with Python and vLLM's configuration",
    }
    context.report(_ENCODES, second["encoded_count"], samples=items, detail=detail)
    per_item_ms = second_s / items * 1e3
    if context.quick:
        context.cannot(
            _PER_ITEM, "so few items would be all Python and vLLM's configuration", ms=per_item_ms
        )
    else:
        context.report(_PER_ITEM, per_item_ms, samples=items, detail=detail)


# -- asked by a server -----------------------------------------------------------------------------


def _measure_hits(context: Context, server: LocalS3) -> None:
    """Hits of ``vllm serve`` whose clients send the files that a job has encoded."""
    from s3ec.dev.rigs.api_server import ApiServer
    from s3ec.dev.rigs.models import write_gemma3
    from s3ec.dev.rigs.pictures import write_pictures

    model = write_gemma3(context.scratch / "model-served")
    folder = context.scratch / "served"
    pictures = write_pictures(folder, _ASKED)
    settings = _settings(server, context.scratch / "tier-served", weights="name")
    for identifier in ("content", "sha256"):
        context.say(f"encoding for a server: {identifier}")
        _command(server, model, folder, settings, "--identifier", identifier)
    context.say("starting vllm serve")
    own = {
        **settings,
        "cache_dir": str(context.scratch / "tier of the server"),
        "wait": "always",
        "defer_timeout_s": 60.0,
        "index_refresh_s": 0.5,
    }
    transfer = {
        "ec_connector": "S3ECConnector",
        "ec_connector_module_path": "s3ec.connector",
        "ec_role": "ec_consumer",
        "ec_connector_extra_config": own,
    }
    with ApiServer(
        model,
        ec=json.dumps(transfer),
        log_path=context.scratch / "server.log",
        env=server.env() | ONE_PROCESS,
        flags={
            "--served-model-name": "tiny",
            "--enforce-eager": None,
            "--gpu-memory-utilization": "0.3",
            "--max-model-len": 4096,
            "--max-num-seqs": 8,
        },
    ) as api:
        cases = {
            "content": _hit_ratio(api, pictures, with_uuid=False),
            "uuid sha256": _hit_ratio(api, pictures, with_uuid=True),
        }
    context.report(_HITS, min(cases.values()), samples=2 * len(pictures), detail={"cases": cases})


def _hit_ratio(api: Any, pictures: list[Path], *, with_uuid: bool) -> float:
    """Loads by the pictures that a client of OpenAI's has posted as data URLs."""
    import openai

    name = "vllm:s3ec_loads_total"
    before = api.metrics().get(name, 0.0)
    with openai.OpenAI(base_url=f"{api.url}/v1", api_key="none", max_retries=0) as client:
        for path in pictures:
            part = _posted(path, with_uuid=with_uuid)
            client.chat.completions.create(
                model="tiny",
                messages=[{"role": "user", "content": [part, {"type": "text", "text": "what?"}]}],
                max_tokens=2,
            )
    # Metrics are published beside the answer, not before it.
    end_s = time.monotonic() + 10.0
    while (loads := api.metrics().get(name, 0.0) - before) < len(pictures):
        if time.monotonic() > end_s:
            break
        time.sleep(0.2)
    return float(loads) / len(pictures)


def _posted(path: Path, *, with_uuid: bool) -> Any:
    import hashlib

    data = path.read_bytes()
    kind = {".png": "image/png", ".jpg": "image/jpeg"}[path.suffix]
    url = f"data:{kind};base64,{base64.b64encode(data).decode()}"
    part: dict[str, Any] = {"type": "image_url", "image_url": {"url": url}}
    return part | {"uuid": f"sha256:{hashlib.sha256(data).hexdigest()}"} if with_uuid else part


BENCH = Bench(ROWS, run)
