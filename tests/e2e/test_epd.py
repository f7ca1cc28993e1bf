# SPDX-License-Identifier: Apache-2.0
"""examples/epd: an encoder, a language instance and the proxy, with a bucket between two tiers.

The README's blocks are pasted into one shell. The encoder starts as deployed. The language instance
is forked from the nursery, with the arguments and variables that it was started with, and its
vision encoder has other weights. So its answers tell whose embeddings it used: those of an engine
without the connector come from the encoder's only.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest

from s3ec.dev.rigs.engine import START_TIMEOUT_S, EngineProcess, image, text
from s3ec.dev.rigs.nursery import EngineForkServer, Forked
from s3ec.dev.rigs.vllm_cpu import ONE_PROCESS, engine_env
from s3ec.testing.server import free_port
from tests.e2e.rig import QUESTION, Gallery, data_url, eventually, other_vision_tower
from tests.support.shell import Shell

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "epd"
HITS, MISSES = "vllm:s3ec_hits_total", "vllm:s3ec_misses_total"
# What a user pastes: the shell blocks, in their order. The last one stops everything.
BLOCKS = re.findall(
    r"^```bash\n(.*?)^```$", (EXAMPLE / "README.md").read_text(), re.DOTALL | re.MULTILINE
)
# The language instance notes how it was started, and leaves that to the test.
PYTHON = f"""#!{sys.executable}
import json, os, sys
if "ec_consumer" in " ".join(sys.argv):
    note = os.environ["NOTE"]
    with open(note + ".part", "w") as file:
        json.dump([sys.argv[2:], dict(os.environ)], file)
    os.rename(note + ".part", note)
    os.execvp("sleep", ["sleep", "infinity"])
os.execv({sys.executable!r}, [{sys.executable!r}, *sys.argv[1:]])
"""


@dataclass(frozen=True)
class Pair:
    """Addresses of both instances and of the proxy before them, and what the blocks printed."""

    encoder: str
    language: str
    url: str
    gallery: Gallery
    printed: str

    def counts(self) -> tuple[float, float, float, float]:
        """Hits and misses of the encoder, and of the language instance; a miss is an encode."""
        found = [metrics(url) for url in (self.encoder, self.language)]
        return tuple(each.get(name, 0.0) for each in found for name in (HITS, MISSES))  # type: ignore[return-value]

    def ask(self, *purposes: str, words: str = QUESTION, **more: Any) -> Any:
        """One request through the proxy; a list of chunks where ``stream`` is set."""
        urls = [{"url": data_url(self.gallery[purpose])} for purpose in purposes]
        content: list[Any] = [{"type": "image_url", "image_url": url} for url in urls]
        content.append({"type": "text", "text": words})
        with openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0) as client:
            answer = client.chat.completions.create(
                model="epd",
                messages=[{"role": "user", "content": content}],
                max_tokens=8,
                temperature=0,
                **more,
            )
            return list(answer) if more.get("stream") else answer

    def said(self, *purposes: str, **more: Any) -> str | None:
        answer: str | None = self.ask(*purposes, **more).choices[0].message.content
        return answer


def metrics(url: str) -> dict[str, float]:
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as reply:
        lines = reply.read().decode().splitlines()
    found = re.compile(r"(\S+?)\{.*\} (\S+)")
    return {one[1]: float(one[2]) for line in lines if (one := found.fullmatch(line))}


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
        nursery=nursery,
    ) as engine:
        answers = [engine.chat([prompt])[0]["text"] for prompt in prompts]
    return dict(zip((*FRESH, "control", "three"), answers, strict=True))


def start_language(note: Path, log: Path, pair: Pair, nursery: EngineForkServer) -> Forked:
    """What the README starts as its language instance, once the encoder has read its weights."""
    patiently = partial(eventually, deadline_s=START_TIMEOUT_S)
    patiently(note.exists, "the language instance is started")
    (module, *arguments), env = json.loads(note.read_text())
    env["PYTHONPATH"] = engine_env()["PYTHONPATH"]  # the nursery's
    patiently(lambda: _answers(f"{pair.encoder}/health"), "the encoder is ready")
    with other_vision_tower(Path(env["MODEL"])), open(log, "ab") as output:
        forked = nursery.fork(module, arguments, env=env, log=output.fileno(), fds=())
        patiently(lambda: _answers(f"{pair.language}/health"), "the language instance is ready")
    return forked


@pytest.fixture(scope="module")
def pair(
    tmp_path_factory: pytest.TempPathFactory, gallery: Gallery, nursery: EngineForkServer
) -> Iterator[Pair]:
    """What the README starts, at other ports."""
    build = tmp_path_factory.mktemp("epd")
    free: set[str] = set()
    while len(free) < 4:
        free.add(str(free_port()))
    ports = dict(zip(("8000", "8001", "8002", "8333"), free, strict=True))

    def pasted(block: str) -> str:
        block = re.sub(r"^pip install .*$", ":", block, flags=re.MULTILINE)
        block = block.replace("build/epd", str(build))
        # In one go: a free port may contain the digits of another one.
        return re.sub("|".join(ports), lambda found: ports[found[0]], block)

    python, note = build / "bin" / "python", build / "note.json"
    python.parent.mkdir()
    python.write_text(PYTHON)
    python.chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    env = engine_env(kept) | ONE_PROCESS | {"CACHE": str(build / "tier"), "CACHE_BYTES": "1GiB"}
    # The first upload of a busy machine may take longer than the defaults allow; and embeddings of
    # other weights would be in another namespace.
    env |= {"S3EC_DEFER_TIMEOUT_S": "30", "S3EC_READ_TIMEOUT_S": "30", "S3EC_WEIGHTS": "name"}
    env["PATH"] = f"{python.parent}:{Path(sys.executable).parent}:{env['PATH']}"
    env["PYTHONPATH"] = f"{env['PYTHONPATH']}{os.pathsep}{ROOT}"
    env["NOTE"] = str(note)
    encoder, language, url = (
        f"http://127.0.0.1:{ports[name]}" for name in ("8001", "8002", "8000")
    )
    made = Pair(encoder, language, url, gallery, "")
    shell = Shell(ROOT, env)
    with ThreadPoolExecutor(1) as pool:
        starting = pool.submit(start_language, note, build / "language.log", made, nursery)
        try:
            shell.paste(f"trap 'kill $(jobs -p) 2> {build}/kill.log || :' EXIT")
            printed = "".join(shell.paste(pasted(block)) for block in BLOCKS[:-1])
            yield replace(made, printed=printed)
            shell.paste(pasted(BLOCKS[-1]))
        finally:
            shell.close()
            forked = starting.result()
            forked.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                forked.wait(60)
            with contextlib.suppress(ProcessLookupError):  # its engine, if that is left
                os.killpg(forked.pid, signal.SIGKILL)


def moved(pair: Pair, before: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(now - then for now, then in zip(pair.counts(), before, strict=True))


def test_the_readme_works_when_pasted(pair: Pair) -> None:
    assert "".join(BLOCKS).count("pip install") == 1
    (misses,) = re.findall(r"^vllm:s3ec_misses_total\S* (\S+)", pair.printed, re.MULTILINE)
    (hits,) = re.findall(r"^vllm:s3ec_hits_total\S* (\S+)", pair.printed, re.MULTILINE)
    assert (misses, hits) == ("1.0", "1.0"), pair.printed


def test_fresh_pictures_are_encoded_once_and_by_the_encoder(
    pair: Pair, expected: dict[str, str]
) -> None:
    before = pair.counts()
    for purpose in FRESH:
        assert pair.said(purpose) == expected[purpose]
    # Metrics are published beside the answer, not before it.
    count = len(FRESH)
    eventually(lambda: moved(pair, before) == (0, count, count, 0), "each is encoded once")


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
    with proxying(nobody, pair.language, workdir / "epd-alone.log") as url:
        alone = replace(pair, url=url)
        before = pair.counts()
        said = alone.said("control")
    assert said is not None
    assert said != expected["control"]
    eventually(lambda: moved(pair, before) == (0, 0, 0, 1), "each is counted")
