# SPDX-License-Identifier: Apache-2.0
"""``bench precompute``: a job beside vLLM's own loop, run again, and asked by a server.

The encoder of the first figure is real: the vision side of Gemma3-27B at half its resolution. The
job and vLLM's loop get other pictures of the same size, in turn, each in a process of its own. The
loop saves by vLLM's ECExampleConnector, so neither of them runs a language model.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from s3ec.dev.bench import engines, measure
from s3ec.dev.bench.context import Bench, CannotMeasureError, Context, Spec
from s3ec.dev.rigs.vllm_cpu import NEW_PICTURES, ONE_PROCESS, engine_env

if TYPE_CHECKING:
    from s3ec.corpus.encoder import Encoded, Picture
    from s3ec.testing.server import LocalS3

_OVERHEAD = "precompute.overhead"
_ENCODES = "precompute.resume_encodes"
_PER_ITEM = "precompute.resume_ms_per_item"
_HITS = "corpus.server_hit_ratio"
ROWS = (
    Spec(_OVERHEAD, "ratio", "<= 0.03"),
    Spec(_ENCODES, "1", "<= 0"),
    Spec(_PER_ITEM, "ms", "<= 2"),
    Spec(_HITS, "ratio", ">= 1"),
)
_ROUNDS = 5
# In each round as many as keep an encoder busy for a while: an encode takes 1 to 25 s on a core.
_FIRST_PICTURES, _MOST_PICTURES = 2, 8
_ROUND_S = 30.0
_ITEMS, _QUICK_ITEMS = 10_000, 200
_ASKED = 12
_SIDE = 448
_ENGINE = {
    "enforce_eager": True,
    "gpu_memory_utilization": 0.3,
    "max_model_len": 4096,
    "max_num_seqs": 8,
}
# Where a processor does not compute with bfloat16, such an encoder takes minutes for a picture.
_LARGE_ENGINE = {**_ENGINE, "dtype": "float32"}
_START_S = 900.0
_BUCKET = "precompute"


def run(context: Context) -> None:
    """Measure."""
    with engines.local_server(_BUCKET) as server:
        _measure_hits(context, server)
        _measure_resume(context, server)
        _measure_overhead(context, server)


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


# -- beside vLLM's own loop ------------------------------------------------------------------------


def _measure_overhead(context: Context, server: LocalS3) -> None:
    """What a job takes beyond its encoder's time, and beyond vLLM's loop."""
    from s3ec.dev.bench.children import Child
    from s3ec.dev.rigs.models import write_gemma3

    context.say("writing an encoder like Gemma3-27B's")
    model = write_gemma3(context.scratch / "model-27b", preset="encoder-27b")
    rounds = context.rounds(_ROUNDS) + 1  # the first one warms up
    env = {**ONE_PROCESS, **engine_env()}
    settings = _settings(server, context.scratch / "tier-27b")
    took: dict[str, list[dict[str, float]]] = {"job": [], "loop": []}
    count = _FIRST_PICTURES
    with (
        mock.patch.dict("os.environ", env),
        Child(_job_child, str(model), settings) as job,
        Child(_loop_child, str(model), str(context.scratch)) as loop,
    ):
        for number in range(rounds):
            context.say(f"encoding, round {number} of {rounds - 1}, {count} pictures each")
            # In turn, and who is first changes: the machine is not the same from one to the next.
            pair = [("job", job), ("loop", loop)]
            answers = {}
            for whose, child in pair if number % 2 else reversed(pair):
                folder = context.scratch / f"pages-{number}-{whose}"
                _write_pictures(folder, count, 2 * _SIDE, seed=2 * number + (whose == "job"))
                child.tell(str(folder))
                answers[whose] = child.answer(_START_S)
            if number:
                for whose, answer in answers.items():
                    took[whose].append(answer)
            elif not context.quick:
                count = _pictures_a_round(answers["job"]["encoder_s"] / count)
    alone = [each["seconds"] / each["encoder_s"] - 1 for each in took["job"]]
    # The loop's own time beside its encoder: two encoders of one model differ by more than that.
    its_own = [each["seconds"] / each["encoder_s"] - 1 for each in took["loop"]]
    beside = [mine - its for mine, its in zip(alone, its_own, strict=True)]
    context.report_slowest(
        _OVERHEAD,
        {"over encoding alone": alone, "over vLLM's own loop": beside},
        samples=len(alone) * count,
        others={"vLLM's own loop over encoding alone": measure.medians({"": its_own})[""]},
        detail={
            "encode_s": measure.medians({"": [each["encoder_s"] / count for each in took["job"]]})[
                ""
            ],
            "confirm_s": measure.medians({"": [each["confirm_s"] for each in took["job"]]})[""],
        },
    )


def _pictures_a_round(encode_s: float) -> int:
    return max(_FIRST_PICTURES, min(_MOST_PICTURES, round(_ROUND_S / encode_s)))


class _Clock:
    """Sums up the time inside of the model's encoder. For an engine in this process."""

    def __init__(self, llm: Any) -> None:
        self.seconds = 0.0
        core = llm.llm_engine.engine_core.engine_core  # VLLM_ENABLE_V1_MULTIPROCESSING=0
        model = core.model_executor.driver_worker.get_model()
        encode = model.embed_multimodal

        def timed(*args: Any, **kwargs: Any) -> Any:
            began_s = time.perf_counter()
            try:
                return encode(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - began_s

        model.embed_multimodal = timed


def _job_child(pipe: Connection, model: str, settings: Mapping[str, Any]) -> None:
    """For each folder a job; all of them with one engine."""
    from s3ec.corpus import Corpus
    from s3ec.corpus.encoder import VllmEncoder
    from s3ec.corpus.precompute import Job
    from s3ec.corpus.sources import open_source

    class Kept(VllmEncoder):
        """An encoder that outlives its jobs, and knows how long it was asked to work."""

        seconds = 0.0
        clock: _Clock | None = None

        def encode(self, pictures: Iterable[Picture]) -> Iterator[Encoded]:
            if self.clock is None:
                self._vllm_config()
                self._start()
                self.clock = _Clock(self._llm)
            self.clock.seconds = 0.0
            began_s = time.perf_counter()
            yield from super().encode(pictures)
            self.seconds = time.perf_counter() - began_s

        def close(self) -> None:
            """Not yet."""

        def end(self) -> None:
            super().close()

    with Corpus.open(settings) as corpus:
        encoder = Kept(model, corpus.settings, engine_args=_LARGE_ENGINE)
        with contextlib.suppress(EOFError):
            while True:
                folder = pipe.recv()
                report = Job(corpus, open_source(folder), encoder).run()
                if report.status != "complete" or encoder.clock is None:
                    raise RuntimeError(f"the job ended so: {report.to_json()}")
                pipe.send(
                    {
                        "seconds": encoder.seconds,
                        "encoder_s": encoder.clock.seconds,
                        "confirm_s": report.seconds - encoder.seconds,
                    }
                )
        encoder.end()


def _loop_child(pipe: Connection, model: str, folder: str) -> None:
    """vLLM's own: one chat call for each folder of pictures."""
    from vllm import LLM, SamplingParams
    from vllm.config import ECTransferConfig

    example = ECTransferConfig(
        ec_connector="ECExampleConnector",
        ec_role="ec_producer",
        ec_connector_extra_config={"shared_storage_path": f"{folder}/example"},
    )
    options: dict[str, Any] = {**NEW_PICTURES, **_LARGE_ENGINE}
    llm = LLM(model=model, allowed_local_media_path=folder, ec_transfer_config=example, **options)
    clock = _Clock(llm)
    with contextlib.suppress(EOFError):
        while True:
            pictures = sorted(Path(pipe.recv()).iterdir())
            parts = [
                {"type": "image_url", "image_url": {"url": path.as_uri()}} for path in pictures
            ]
            messages: Any = [[{"role": "user", "content": [part]}] for part in parts]
            clock.seconds = 0.0
            began_s = time.perf_counter()
            llm.chat(messages, SamplingParams(max_tokens=1), use_tqdm=False)
            pipe.send({"seconds": time.perf_counter() - began_s, "encoder_s": clock.seconds})
    llm.llm_engine.engine_core.shutdown()


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
