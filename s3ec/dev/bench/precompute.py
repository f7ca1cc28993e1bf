# SPDX-License-Identifier: Apache-2.0
"""``bench precompute``: what a job does over a corpus that is complete."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from s3ec.dev.bench import engines
from s3ec.dev.bench.context import Bench, CannotMeasureError, Context, Spec
from s3ec.dev.rigs.vllm_cpu import ONE_PROCESS, engine_env

if TYPE_CHECKING:
    from s3ec.testing.server import LocalS3

_ENCODES = "precompute.resume_encodes"
_PER_ITEM = "precompute.resume_ms_per_item"
ROWS = (
    Spec(_ENCODES, "1", "<= 0"),
    Spec(_PER_ITEM, "ms", "<= 2"),
)
_ITEMS, _QUICK_ITEMS = 10_000, 200
_ENGINE = {
    "enforce_eager": True,
    "gpu_memory_utilization": 0.3,
    "max_model_len": 4096,
    "max_num_seqs": 8,
}
_BUCKET = "precompute"


def run(context: Context) -> None:
    """Measure.

    Raises:
        CannotMeasureError: There is no server or no vLLM, or a job failed.
    """
    from s3ec.dev.rigs.models import write_gemma3

    items = _QUICK_ITEMS if context.quick else _ITEMS
    with engines.local_server(_BUCKET) as server:
        model = write_gemma3(context.scratch / "model")
        engines.write_patterns(context.scratch / "pictures", items, 0)
        context.say(f"encoding {items:,} pictures")
        first, first_s = _precompute(server, model, context.scratch)
        context.say("once more")
        second, second_s = _precompute(server, model, context.scratch)
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


def _precompute(server: LocalS3, model: Path, scratch: Path) -> tuple[dict[str, Any], float]:
    """Run ``s3ec precompute`` as deployed; its report, and how many seconds it took."""
    settings = {
        "bucket": _BUCKET,
        "endpoint_url": server.endpoint_url,
        "cache_dir": str(scratch / "tier"),
        "min_free_bytes": 0,
    }
    began_s = time.monotonic()
    done = subprocess.run(
        [
            *(sys.executable, "-m", "s3ec", "precompute", str(scratch / "pictures")),
            *("--model", str(model), "--config", json.dumps(settings)),
            *("--engine-args", json.dumps(_ENGINE), "--json"),
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


BENCH = Bench(ROWS, run)
