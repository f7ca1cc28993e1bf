# SPDX-License-Identifier: Apache-2.0
"""``bench ray``: a job on a local Ray with two real engines, one of which is killed in the middle.

What was encoded is what the workers note at the connector's hook, and what is there is what a
listing of the bucket shows. In flight is what the dead worker had and the index did not tell of:
its announcements go out every 2 s, and what it had not announced nobody knows of. That may be
encoded once more, and nothing else.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import tempfile
from pathlib import Path
from unittest import mock

from s3ec.dev.bench.context import Bench, CannotMeasureError, Context
from s3ec.dev.bench.result import Spec

_MISSING, _TWICE, _BEYOND = "ray.missing", "ray.encoded_twice", "ray.encoded_twice_beyond_flight"
ROWS = (
    Spec(_MISSING, "items", "== 0"),
    Spec(_TWICE, "items"),  # bounded by what was in flight: the row below
    Spec(_BEYOND, "items", "== 0"),
)
_PICTURES, _PICTURES_QUICK = 120, 60
_TIMEOUT_S = 900.0


def run(context: Context) -> None:
    """Measure.

    Raises:
        CannotMeasureError: There is no server, no vLLM or no Ray, or the job did not end.
    """
    from s3ec.dev.bench.hooks import need_vllm

    need_vllm(context)
    if importlib.util.find_spec("ray") is None:
        raise CannotMeasureError("no Ray: pip install 's3ec[ray]'")
    from s3ec.dev.rigs.models import write_gemma3
    from s3ec.dev.rigs.pictures import write_pictures
    from s3ec.dev.rigs.ray_job import run_killing_one, stored
    from s3ec.dev.rigs.vllm_cpu import ONE_PROCESS, engine_env
    from s3ec.errors import ConfigError
    from s3ec.testing.server import LocalS3

    count = _PICTURES_QUICK if context.quick else _PICTURES
    pictures = context.scratch / "pages"
    write_pictures(pictures, count)
    with contextlib.ExitStack() as stack:
        try:
            server = stack.enter_context(LocalS3())
        except ConfigError as exc:
            raise CannotMeasureError(str(exc)) from exc
        stack.enter_context(mock.patch.dict("os.environ", server.env()))
        # Sockets need a short path.
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        settings = {
            "bucket": server.create_bucket("bench"),
            "endpoint_url": server.endpoint_url,
            "cache_dir": str(context.scratch / "tier"),
            "min_free_bytes": 0,
        }
        context.say(f"{count} pictures, two engines on a local Ray, one of them killed")
        try:
            outcome = run_killing_one(
                Path(folder),
                pictures,
                write_gemma3(context.scratch / "model"),
                settings,
                env=engine_env({**os.environ, **ONE_PROCESS}),
                timeout_s=_TIMEOUT_S,
            )
        except RuntimeError as exc:
            raise CannotMeasureError(str(exc)) from exc
        there = stored(settings)
    detail = {
        "encoded": sum(outcome.encoded.values()),
        "by_the_killed": len(outcome.of_killed),
        "of_these_announced": len(outcome.confirmed & outcome.of_killed),
        "s_from_the_kill_to_the_end": round(outcome.seconds, 1),
        "status": outcome.report["status"],
    }
    context.report(_MISSING, count - len(there), samples=count, detail=detail)
    context.report(_TWICE, len(outcome.twice), samples=count)
    context.report(_BEYOND, len(outcome.beyond_flight), samples=count)


BENCH = Bench(ROWS, run)
