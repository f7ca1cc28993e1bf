# SPDX-License-Identifier: Apache-2.0
"""``vllm serve --middleware s3ec.middleware.SkipPictures``, asked by an unchanged OpenAI client.

Every question is asked twice: as it is, and with an empty ``mm_processor_kwargs``, which changes
nothing for vLLM and which the middleware leaves alone. The answers must be the same to the last
digit.
"""

from __future__ import annotations

import json
import os
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
from PIL import Image, PngImagePlugin

from s3ec import codec
from s3ec.dev.rigs.api_server import ApiServer
from s3ec.dev.rigs.engine import ec_config
from s3ec.dev.rigs.nursery import EngineForkServer
from s3ec.dev.rigs.vllm_cpu import STEADY, engine_env
from s3ec.identity import make_key
from tests.e2e.rig import Gallery, data_url, eventually, tier_of
from tests.e2e.rig import at_once as both
from tests.e2e.vanishing import HEADER, LOG_VARIABLE, ROOTS_VARIABLE
from tests.support.waiting import DEADLINE_S

_NAMES = ("single", "left", "middle", "right", "pair", "shared", "unknown")
_SIDE = 224
_UNTOUCHED: dict[str, Any] = {"mm_processor_kwargs": {}}
# vLLM takes no two greedy choices, and its CPU build no seed of a request.
_SAMPLED: dict[str, Any] = {"temperature": 0.5, "top_p": 1e-6}
_TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def image(url: str, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}, **more}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


QUESTION = text("what is to be seen?")


def said_by(events: Any) -> dict[str, Any]:
    """What an answer says; how many tokens an event has depends on how busy the server is."""
    found: dict[str, Any] = {"words": {}, "logprobs": {}, "ends": {}, "usage": None, "events": []}
    for event in events:
        found["usage"] = event.usage.model_dump() if event.usage else found["usage"]
        found["events"].append((event.object, event.model))
        for choice in event.choices:
            said = getattr(choice, "delta", None) or choice.message
            words, logprobs = found["words"], found["logprobs"]
            words[choice.index] = words.get(choice.index, "") + (said.content or "")
            if choice.logprobs is not None:
                tokens = [token.model_dump() for token in choice.logprobs.content or ()]
                logprobs[choice.index] = logprobs.get(choice.index, []) + tokens
            if choice.finish_reason is not None:
                found["ends"][choice.index] = choice.finish_reason
    found["events"] = sorted(set(found["events"]))
    return found


class Rig:
    """A server that encodes, stores and loads, and a client that knows nothing of it."""

    def __init__(self, server: ApiServer, client: openai.OpenAI, home: Path) -> None:
        self.server = server
        self.home = home
        self._client = client
        self._asked = 0

    def picture(self, name: str) -> Path:
        return self.home / f"{name}.png"

    def outcomes(self) -> dict[str, float]:
        """The counts of the middleware that moved, by their labels."""
        lines = self.server.get("/metrics").splitlines()
        counts = (line for line in lines if line.startswith("vllm:s3ec_skip_pictures_total{"))
        return {line.split('"')[1]: float(line.rpartition(" ")[2]) for line in counts}

    def ask(
        self, *parts: dict[str, Any], body: dict[str, Any] | None = None, **more: Any
    ) -> dict[str, Any]:
        """All that an answer says: words, tokens, logprobs, ends and usage.

        No two requests share a prefix cache.
        """
        self._asked += 1
        options: dict[str, Any] = {
            "model": "tiny",
            "messages": [{"role": "user", "content": list(parts)}],
            "max_tokens": 6,
            "temperature": 0,
            "logprobs": True,
            "top_logprobs": 2,
            "extra_body": {"cache_salt": f"salt {self._asked}", **(body or {})},
            **more,
        }
        if more.get("stream"):
            options["stream_options"] = {"include_usage": True}
        answer = self._client.chat.completions.create(**options)
        return said_by(answer if more.get("stream") else [answer])

    def with_pixels(self, *parts: dict[str, Any], **more: Any) -> dict[str, Any]:
        """The same of a server without the middleware."""
        outcome, answer = self.outcome_of(*parts, body=dict(_UNTOUCHED), **more)
        assert outcome == "untouched.options"
        return answer

    def outcome_of(self, *parts: dict[str, Any], **more: Any) -> tuple[str, dict[str, Any]]:
        """Ask; and what the middleware made of it."""
        before = self.outcomes()
        answer = self.ask(*parts, **more)
        found: list[str] = []

        def is_counted() -> bool:
            after = self.outcomes()
            found[:] = [name for name in after if after[name] > before.get(name, 0)]
            return bool(found)

        eventually(is_counted, "the request is counted")
        (outcome,) = found
        return outcome, answer

    def until_replaced(self, *parts: dict[str, Any], **more: Any) -> dict[str, Any]:
        """Ask until it is asked without pixels: what was encoded reaches the tier soon."""
        answers: list[dict[str, Any]] = []

        def is_replaced() -> bool:
            outcome, answer = self.outcome_of(*parts, **more)
            answers.append(answer)
            return outcome == "replaced"

        eventually(is_replaced, "a request is asked without pixels")
        return answers[-1]

    def put(self, *identifiers: str) -> None:
        """Have some picture's embedding in the tier under other names, and nowhere else."""
        (namespace,) = (self.home / "tier" / "v1" / "objects").iterdir()
        tier = tier_of(self.home / "tier", namespace.name)
        try:
            blob = next(namespace.rglob("*.safetensors")).read_bytes()
            header = codec.parse_header(blob)
            for identifier in identifiers:
                key = make_key(identifier)
                assert key is not None
                front = codec.encode_header(replace(header, identifier=identifier))
                tier.writer.publish(key, [front, blob[header.data_start :]])
        finally:
            tier.close()

    def warm(self, *names: str) -> None:
        """Have these pictures in the tier, and none in the encoder cache."""
        for name in names:
            self.until_replaced(image(data_url(self.picture(name))), QUESTION)
        where = f"{self.server.url}/reset_encoder_cache"
        with urllib.request.urlopen(urllib.request.Request(where, method="POST")):
            pass


@pytest.fixture(scope="module")
def rig(workdir: Path, gallery: Gallery, qwen: Path, nursery: EngineForkServer) -> Iterator[Rig]:
    home = workdir / "skip-pictures"
    home.mkdir()
    for name, path in zip(_NAMES, gallery.corpus.values(), strict=False):
        with Image.open(path) as picture:
            picture.convert("RGB").resize((_SIDE, _SIDE)).save(home / f"{name}.png")
    folder, tier = home / "corpus", home / "tier"
    folder.mkdir()
    settings = {"url": folder.as_uri(), "cache_dir": str(tier), "cache_bytes": "1GiB",
                "min_free_bytes": 0, "wait": "always", "live_weights": "ignore"}  # fmt: skip
    with (
        ApiServer(
            qwen,
            ec=json.dumps(ec_config("ec_both", settings)),
            log_path=home / "server.log",
            env={
                **STEADY,
                "VLLM_SERVER_DEV_MODE": "1",
                ROOTS_VARIABLE: os.pathsep.join((str(folder), str(tier))),
                LOG_VARIABLE: str(home / "seen.jsonl"),
            },
            flags={
                "--served-model-name": "tiny",
                "--enforce-eager": None,
                "--gpu-memory-utilization": "0.3",
                "--max-model-len": 2048,
                "--max-num-seqs": 4,
                "--seed": 0,
                "--max-num-batched-tokens": 128,
                "--enable-prefix-caching": None,
                "--shutdown-timeout": 20,
                "--middleware": "tests.e2e.vanishing.Vanishing",
                "--middleware=s3ec.middleware.SkipPictures": None,
            },
            nursery=nursery,
        ) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield Rig(server, client, home)


# In this order: the last test takes embeddings away.


_THREE = ("left", "middle", "right")
_ASKED: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "one": (("single",), {}),
    "one twice, streamed": (("pair", "pair"), {"stream": True}),
    "three": (_THREE, {}),
    "three, streamed": (_THREE, {"stream": True}),
    "three, two choices": (_THREE, {"n": 2, **_SAMPLED}),
    "three, two choices, streamed": (_THREE, {"n": 2, "stream": True, **_SAMPLED}),
    "three, tools": (_THREE, {"tools": [_TOOL], "tool_choice": "none"}),
}


@pytest.mark.parametrize(("names", "more"), _ASKED.values(), ids=_ASKED)
def test_an_answer_without_pixels_is_the_one_with_them(
    names: tuple[str, ...], more: dict[str, Any], rig: Rig
) -> None:
    rig.warm(*dict.fromkeys(names))
    parts = [image(data_url(rig.picture(name))) for name in names]
    parts[0]["image_url"]["detail"] = "low"
    outcome, answer = rig.outcome_of(*parts, QUESTION, **more)
    assert outcome == "replaced"
    assert answer == rig.with_pixels(*parts, QUESTION, **more)


def test_embeddings_of_replaced_pictures_come_from_the_tier(rig: Rig) -> None:
    rig.warm("single")
    before = rig.server.metrics()["vllm:s3ec_loads_total"]
    outcome, _ = rig.outcome_of(image(data_url(rig.picture("single"))), QUESTION)
    assert outcome == "replaced"
    eventually(lambda: rig.server.metrics()["vllm:s3ec_loads_total"] > before, "it was loaded")


def test_pictures_of_other_formats_and_modes_are_known_too(rig: Rig) -> None:
    with Image.open(rig.picture("single")) as picture:
        picture.convert("L").save(rig.home / "gray.png")
        picture.save(rig.home / "photo.jpg", quality=80)
        picture.save(rig.home / "picture.webp", lossless=True)
    for name in ("gray.png", "photo.jpg", "picture.webp"):
        part = image(data_url(rig.home / name))
        answer = rig.until_replaced(part, QUESTION)
        assert answer == rig.with_pixels(part, QUESTION)


def test_one_unknown_picture_and_all_are_sent_with_their_pixels(rig: Rig) -> None:
    rig.warm("single")
    known, unknown = (image(data_url(rig.picture(name))) for name in ("single", "unknown"))
    outcome, answer = rig.outcome_of(known, unknown, QUESTION)
    assert outcome == "untouched.not_here"
    assert answer == rig.with_pixels(known, unknown, QUESTION)


def test_an_error_is_the_one_that_pixels_give(rig: Rig) -> None:
    rig.warm("single")
    part = image(data_url(rig.picture("single")))
    with pytest.raises(openai.BadRequestError) as without:
        rig.ask(part, QUESTION, max_tokens=100_000)
    with pytest.raises(openai.BadRequestError) as with_pixels:
        rig.ask(part, QUESTION, max_tokens=100_000, body=dict(_UNTOUCHED))
    assert without.value.message == with_pixels.value.message


def test_a_request_whose_embedding_vanished_is_asked_again_with_its_pixels(
    rig: Rig, qwen: Path, nursery: EngineForkServer
) -> None:
    """Of pictures that the engine has never met: it keeps a hold on what it has used for 30 s."""
    rig.warm("single")
    files = [rig.home / "gone 1.png", rig.home / "gone 2.png"]
    with Image.open(rig.picture("single")) as picture:
        for file in files:  # the same picture in other bytes
            more = PngImagePlugin.PngInfo()
            more.add_text("Comment", file.stem)
            picture.save(file, pnginfo=more)
    names = rig.home / "names.json"
    words = [str(path) for path in (qwen, names, *files)]
    with open(rig.home / "names.log", "wb") as log:  # vLLM is imported there
        env = engine_env({**os.environ, **STEADY})
        naming = nursery.fork("tests.e2e.vanishing", words, env=env, log=log.fileno(), fds=())
    naming.wait(DEADLINE_S)
    gone: list[str] = json.loads(names.read_text())
    rig.put(*gone)

    def ask(number: int, stream: bool) -> dict[str, Any]:
        part, header = image(data_url(files[number])), {HEADER.decode(): gone[number]}
        return rig.ask(part, QUESTION, stream=stream, extra_headers=header)

    before = rig.outcomes()
    at_once, streamed = both(lambda: ask(0, False), lambda: ask(1, True))
    eventually(lambda: rig.outcomes().get("repeated", 0) >= before.get("repeated", 0) + 2)
    said: dict[str, list[Any]] = {name: [] for name in gone}
    for line in (rig.home / "seen.jsonl").read_text().splitlines():
        message = json.loads(line)
        said[message.pop("name")].append(message)
    assert said[gone[0]][0]["status"] == 500
    # The role, then an error, though the status was good.
    assert said[gone[1]][0]["status"] == 200
    assert '"role":"assistant"' in said[gone[1]][1]["body"]
    assert "Internal server error" in said[gone[1]][2]["body"]
    url = data_url(rig.picture("single"))
    assert at_once == rig.with_pixels(image(url), QUESTION)
    assert streamed == rig.with_pixels(image(url), QUESTION, stream=True)
