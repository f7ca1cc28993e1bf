# SPDX-License-Identifier: Apache-2.0
"""examples/epd: an encoder, a language instance and the proxy, with a bucket between two tiers.

The language instance's vision encoder has other weights than the encoder's. So its answers tell
whose embeddings it used: those of an engine without the connector come from the encoder's only.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest

from s3ec.dev.rigs.api_server import ApiServer
from s3ec.dev.rigs.engine import START_TIMEOUT_S, EngineProcess, image, text
from s3ec.dev.rigs.nursery import EngineForkServer
from s3ec.dev.rigs.vllm_cpu import ONE_PROCESS, STEADY, engine_env
from s3ec.testing.server import LocalS3, free_port
from tests.e2e.rig import (
    OPTIONS,
    QUESTION,
    Gallery,
    eventually,
    other_vision_tower,
    settings,
)

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "epd"
HITS, MISSES = "vllm:s3ec_hits_total", "vllm:s3ec_misses_total"
FLAGS: dict[str, str | int | None] = {
    "--served-model-name": "epd",
    "--enforce-eager": None,
    "--gpu-memory-utilization": "0.3",
    "--max-model-len": 4096,
    "--max-num-seqs": 8,
    "--seed": 0,
    "--max-num-batched-tokens": OPTIONS["max_num_batched_tokens"],
    "--block-size": OPTIONS["block_size"],
}


@dataclass(frozen=True)
class Pair:
    """Both instances and the proxy before them."""

    encoder: ApiServer
    language: ApiServer
    url: str
    gallery: Gallery

    def counts(self) -> tuple[float, float, float, float]:
        """Hits and misses of the encoder, and of the language instance; a miss is an encode."""
        found = [server.metrics() for server in (self.encoder, self.language)]
        return tuple(each.get(name, 0.0) for each in found for name in (HITS, MISSES))  # type: ignore[return-value]

    def ask(self, *purposes: str, words: str = QUESTION, **more: Any) -> Any:
        """One request through the proxy; a list of chunks where ``stream`` is set."""
        content = [*map(self._picture, purposes), {"type": "text", "text": words}]
        with openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0) as client:
            answer = client.chat.completions.create(
                model="epd",
                messages=[{"role": "user", "content": content}],  # type: ignore[misc,list-item]
                max_tokens=8,
                temperature=0,
                **more,
            )
            return list(answer) if more.get("stream") else answer

    def said(self, *purposes: str, **more: Any) -> str | None:
        answer: str | None = self.ask(*purposes, **more).choices[0].message.content
        return answer

    def _picture(self, purpose: str) -> dict[str, Any]:
        path = self.gallery[purpose]
        kind = {".png": "image/png", ".jpg": "image/jpeg"}[path.suffix]
        data = f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"
        return {"type": "image_url", "image_url": {"url": data}}


def serve(
    role: str,
    workdir: Path,
    model: Path,
    server: LocalS3,
    bucket: str,
    nursery: EngineForkServer,
) -> contextlib.AbstractContextManager[ApiServer]:
    transfer = {
        "ec_connector": "S3ECConnector",
        "ec_role": role,
        "ec_connector_module_path": "s3ec.connector",
        # The first upload of a busy machine may take longer than the 2 s that are the default.
        "ec_connector_extra_config": settings(
            server, bucket, workdir / f"epd-{role}", defer_timeout_s=30
        ),
    }
    return ApiServer(
        model,
        ec=json.dumps(transfer),
        log_path=workdir / f"epd-{role}.log",
        env=server.env() | STEADY,
        flags=FLAGS,
        nursery=nursery,  # as deployed they start in the README's test
    )


@contextlib.contextmanager
def proxying(encoder: str, language: str, log_path: Path) -> Iterator[str]:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    arguments = ["--port", str(port), "--encoder", encoder, "--language", language]
    with (
        open(log_path, "ab") as log,
        subprocess.Popen(
            [sys.executable, str(EXAMPLE / "proxy.py"), *arguments], stdout=log, stderr=log
        ) as process,
    ):
        try:
            eventually(lambda: _answers(f"{url}/health"), "the proxy is ready")
            yield url
        finally:
            process.terminate()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=30) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


FRESH = ("posted", "single", "warm")
THREE = ("left", "middle", "right")
BRIGHTEST = "which of them is the brightest?"


@pytest.fixture(scope="module")
def expected(
    workdir: Path, gallery: Gallery, gemma: Path, nursery: EngineForkServer
) -> dict[str, str]:
    """What an engine without the connector says to one picture each, and to three."""
    prompts = [gallery.solo(purpose) for purpose in (*FRESH, "control")]
    prompts.append([*(image(gallery[purpose]) for purpose in THREE), text(BRIGHTEST)])
    with EngineProcess(
        gemma,
        ec=None,
        log_path=workdir / "epd-reference.log",
        media=workdir,
        env=ONE_PROCESS,
        options=OPTIONS,
        nursery=nursery,
    ) as engine:
        answers = [engine.chat([prompt])[0]["text"] for prompt in prompts]
    return dict(zip((*FRESH, "control", "three"), answers, strict=True))


@pytest.fixture(scope="module")
def pair(
    workdir: Path,
    gallery: Gallery,
    gemma: Path,
    local_s3: LocalS3,
    nursery: EngineForkServer,
    expected: dict[str, str],
) -> Iterator[Pair]:
    bucket = local_s3.create_bucket("epd")
    place = (workdir, gemma, local_s3, bucket, nursery)
    with contextlib.ExitStack() as stack:
        encoder = stack.enter_context(serve("ec_producer", *place))
        with other_vision_tower(gemma):
            language = stack.enter_context(serve("ec_consumer", *place))
        url = stack.enter_context(proxying(encoder.url, language.url, workdir / "epd-proxy.log"))
        yield Pair(encoder, language, url, gallery)
    local_s3.delete_bucket(bucket)


def moved(pair: Pair, before: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(now - then for now, then in zip(pair.counts(), before, strict=True))


def test_fresh_pictures_are_encoded_once_and_by_the_encoder(
    pair: Pair, expected: dict[str, str]
) -> None:
    for purpose in FRESH:
        assert pair.said(purpose) == expected[purpose]
    # Metrics are published beside the answer, not before it.
    count = len(FRESH)
    eventually(lambda: pair.counts() == (0, count, count, 0), "each is encoded once")


def test_a_request_with_several_fresh_pictures_is_streamed(
    pair: Pair, expected: dict[str, str]
) -> None:
    before = pair.counts()
    chunks = pair.ask(*THREE, words=BRIGHTEST, stream=True)
    parts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert len(chunks) > 1
    assert "".join(parts) == expected["three"]
    eventually(lambda: moved(pair, before) == (0, 3, 3, 0), "each is counted")


def test_what_was_asked_before_is_encoded_by_nobody(pair: Pair) -> None:
    before = pair.counts()
    pair.said("shared")
    eventually(lambda: moved(pair, before) == (0, 1, 1, 0), "the first answer is counted")
    before = pair.counts()
    again = pair.said("shared", words="and what else?")
    assert again == pair.said("shared", words="and what else?")
    assert moved(pair, before)[1::2] == (0, 0)


def test_without_an_encoder_the_language_instance_encodes(
    pair: Pair, workdir: Path, expected: dict[str, str]
) -> None:
    nobody = f"http://127.0.0.1:{free_port()}"
    with proxying(nobody, pair.language.url, workdir / "epd-alone.log") as url:
        alone = Pair(pair.encoder, pair.language, url, pair.gallery)
        before = pair.counts()
        said = alone.said("control")
    assert said is not None
    assert said != expected["control"]
    eventually(lambda: moved(pair, before) == (0, 0, 0, 1), "each is counted")


# -- the README ------------------------------------------------------------------------------------


def test_the_readme_works_when_pasted(tmp_path: Path, gemma: Path) -> None:
    readme = (EXAMPLE / "README.md").read_text()
    blocks = re.findall(r"^```bash\n(.*?)^```$", readme, re.DOTALL | re.MULTILINE)
    script = "\n".join(blocks)
    assert script.count("pip install") == 1
    script = re.sub(r"^pip install .*$", ":", script, flags=re.MULTILINE)
    (tmp_path / "build").mkdir()
    script = script.replace("build/epd", str(tmp_path / "build"))
    free: set[str] = set()
    while len(free) < 4:
        free.add(str(free_port()))
    ports = dict(zip(("8000", "8001", "8002", "8333"), free, strict=True))
    # In one go: a free port may contain the digits of another one.
    script = re.sub("|".join(ports), lambda found: ports[found[0]], script)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    env = engine_env(kept) | ONE_PROCESS | {"CACHE": str(tmp_path / "tier"), "CACHE_BYTES": "1GiB"}
    # The first upload of a busy machine may take longer than the defaults allow.
    env |= {"S3EC_DEFER_TIMEOUT_S": "30", "S3EC_READ_TIMEOUT_S": "30"}
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
    env["PYTHONPATH"] = f"{env['PYTHONPATH']}{os.pathsep}{ROOT}"
    script = f"set -euo pipefail\ntrap 'kill $(jobs -p) 2> {tmp_path}/kill.log || :' EXIT\n{script}"
    done = subprocess.run(
        ["bash", "--norc", "--noprofile", "-c", script],
        cwd=ROOT,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=2 * START_TIMEOUT_S,
        check=False,
    )
    logs = "".join(path.read_text()[-2000:] for path in (tmp_path / "build").glob("*.log"))
    printed = f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}\n{logs}"
    assert done.returncode == 0, printed
    (misses,) = re.findall(r"^vllm:s3ec_misses_total\S* (\S+)", done.stdout, re.MULTILINE)
    (hits,) = re.findall(r"^vllm:s3ec_hits_total\S* (\S+)", done.stdout, re.MULTILINE)
    assert (misses, hits) == ("1.0", "1.0"), printed
