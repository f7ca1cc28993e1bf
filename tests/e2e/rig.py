# SPDX-License-Identifier: Apache-2.0
"""What the end-to-end tests share: pictures by purpose, prompts in a fixed order, records."""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from s3ec.counters import Counters
from s3ec.dev.rigs.engine import EngineProcess, image, text
from s3ec.store.open import KEPT_PROBE
from s3ec.testing.server import S3Server
from s3ec.tier.tier import Tier
from tests.support import waiting

Prompt = list[dict[str, Any]]
Answer = dict[str, Any]
# Engines answer more slowly than threads do.
eventually = partial(waiting.eventually, pause_s=0.05)
First = TypeVar("First")
Second = TypeVar("Second")

# An encoder cache of two pictures (64 embeddings each) and prompts cut into chunks; blocks small
# enough that a picture's tokens can be answered from the prefix cache.
OPTIONS: dict[str, Any] = {
    "max_num_batched_tokens": 128,
    "block_size": 32,
    "enable_prefix_caching": True,
}
QUESTION = "what is to be seen in it, and where?"
MANY = 8  # pictures in one prompt: four times what the encoder cache holds
BOTH = 6
HEALTHY_ROUNDS = 60

HITS = "vllm:s3ec_hits"
MISSES = "vllm:s3ec_misses"
LOADS = "vllm:s3ec_loads"
SAVES = "vllm:s3ec_saves"
FROM_BUCKET = "vllm:s3ec_fetches{source=bucket}"
FROM_TIER = "vllm:s3ec_fetches{source=tier}"
INDEXED = "vllm:s3ec_index_entries"

_CORPUS = (
    *("single", "left", "middle", "right", "pair", "shared", "extra", "posted"),
    *(f"many-{number}" for number in range(MANY)),
    *(f"together-{number}" for number in range(4)),
    *(f"healthy-{number}" for number in range(4)),
    "stalled",
    *(f"flight-{number}" for number in range(6)),
    *("flipped", "other-model", "other-rows", "web-page"),
    *("other-object", "bucket-gone", "warm"),
)
_NOT_IN_CORPUS = ("control", "down", "resting", "empty", *(f"both-{n}" for n in range(BOTH)))
PURPOSES = _CORPUS + _NOT_IN_CORPUS


@dataclass(frozen=True)
class Gallery:
    """One picture for each purpose; no two are the same."""

    paths: Mapping[str, Path]

    def __getitem__(self, purpose: str) -> Path:
        return self.paths[purpose]

    @property
    def corpus(self) -> dict[str, Path]:
        """The pictures that the producer encodes."""
        return {purpose: self.paths[purpose] for purpose in _CORPUS}

    def solo(self, purpose: str) -> Prompt:
        """One picture and a question."""
        return [image(self[purpose]), text(QUESTION)]

    def again(self, purpose: str, word: str = "again") -> Prompt:
        """Another prompt with the same picture; no prefix of it is that of solo()."""
        return [text(f"{word}: "), image(self[purpose]), text(QUESTION)]


def data_url(picture: Path) -> str:
    """A picture file as a client sends it."""
    kind = picture.suffix[1:].replace("jpg", "jpeg")
    return f"data:image/{kind};base64,{base64.b64encode(picture.read_bytes()).decode()}"


@dataclass(frozen=True)
class Scenario:
    """Some prompts, asked one after another or, if ``together``, at once."""

    name: str
    prompts: Sequence[Prompt]
    together: bool = False


def scenarios(gallery: Gallery) -> list[Scenario]:
    """What consumer and reference are asked, in this order: later ones rely on earlier ones."""
    many = [image(gallery[f"many-{number}"]) for number in range(MANY)]
    three = [image(gallery[name]) for name in ("left", "middle", "right")]
    pair = image(gallery["pair"])
    return [
        Scenario("single", [gallery.solo("single")]),
        Scenario("several", [[*three, text("which of them is the brightest?")]]),
        Scenario("twice in a prompt", [[pair, text(" and "), pair, text("are they equal?")]]),
        Scenario("first request", [gallery.solo("shared")]),
        Scenario("more than the cache holds", [[*many, text("what do they have in common?")]]),
        Scenario("other request", [gallery.again("shared")]),
        Scenario("reload", [[text("once more: "), *many, text("how do they differ?")]]),
        Scenario("repeat", [gallery.solo("single")]),
        Scenario(
            "extended", [[*gallery.solo("single"), image(gallery["extra"]), text("and here?")]]
        ),
        Scenario(
            "together",
            [gallery.again(f"together-{number % 4}", str(number)) for number in range(6)],
            together=True,
        ),
    ]


def healthy(gallery: Gallery, number: int) -> tuple[Prompt, str]:
    """One prompt of a series about pictures that no test damages, and its picture's purpose.

    Three others lie between two questions about the same picture, so the encoder cache has
    dropped it, and the number in front keeps the prefix cache out.
    """
    purpose = f"healthy-{number % 4}"
    return gallery.again(purpose, f"check {number}"), purpose


@dataclass(frozen=True)
class Record:
    """What an engine answered, and by how much each of its counters moved meanwhile."""

    answers: list[Answer]
    moved: dict[str, float] = field(default_factory=dict)

    def __getitem__(self, counter: str) -> float:
        return self.moved.get(counter, 0.0)


def ask(engine: EngineProcess, scenario: Scenario) -> list[Answer]:
    """The answers to one scenario, with the log probability of every token."""
    if scenario.together:
        return engine.chat(scenario.prompts, logprobs=2)
    return [engine.chat([prompt], logprobs=2)[0] for prompt in scenario.prompts]


def record(engine: EngineProcess, scenario: Scenario) -> Record:
    """Ask, and note what the counters did."""
    before = engine.counters()
    answers = ask(engine, scenario)
    return Record(answers, moved(before, engine.counters()))


def until_index_is_read(engine: EngineProcess, entries: int = 1) -> None:
    """Wait until a fresh engine knows so many entries: what it is asked before, it encodes."""

    def is_read() -> bool:
        engine.chat([[text("is the index here?")]], max_tokens=1)  # gauges move with steps
        return engine.counters().get(INDEXED, 0) >= entries

    eventually(is_read, "the engine has read the index")


def moved(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """The counters that rose, with by how much."""
    return {
        name: value - before.get(name, 0.0)
        for name, value in after.items()
        if value != before.get(name, 0.0)
    }


def said(answer: Answer) -> tuple[Any, ...]:
    """What must be equal with and without the connector: tokens, log probabilities, the end."""
    return answer["token_ids"], answer["logprobs"], answer["finish_reason"]


def at_once(first: Callable[[], First], second: Callable[[], Second]) -> tuple[First, Second]:
    """Both results; each works with an engine of its own, whose start takes one core."""
    with ThreadPoolExecutor(2) as pool:
        futures = pool.submit(first), pool.submit(second)
        return futures[0].result(), futures[1].result()


def settings(server: S3Server, bucket: str, cache_dir: Path, **more: Any) -> dict[str, Any]:
    """The connector's settings for a server on this machine."""
    return {
        "bucket": bucket,
        "endpoint_url": server.endpoint_url,
        "transport": "obstore",
        "cache_dir": str(cache_dir),
        "cache_bytes": "1GiB",
        "min_free_bytes": 0,
        # Or who encodes with other weights (other_vision_tower) would read another namespace.
        "weights": "name",
        # The tiny models encode faster than a fetch ends: with `auto` nothing would be loaded.
        "wait": "always",
        # A busy machine is not what these tests are about.
        "connect_timeout_s": 10.0,
        "read_timeout_s": 60.0,
        "defer_timeout_s": 60.0,
        **more,
    }


def tier_of(cache_dir: Path, namespace: str) -> Tier:
    """The disk tier that engines used, opened: what the dead left is swept."""
    return Tier(cache_dir, namespace, budget_bytes=2**30, min_free_bytes=0, counters=Counters())


@dataclass(frozen=True)
class Corpus:
    """What the producer put into the bucket.

    Attributes:
        bucket: Bucket on the server of the session.
        namespace: The only namespace in it.
        objects: Purpose of a picture -> key of its object.
        others: Keys of all other objects (the namespace's descriptor, records).
    """

    bucket: str
    namespace: str
    objects: dict[str, str]
    others: list[str]


def keys(client: Any, bucket: str, prefix: str = "") -> set[str]:
    """All keys of a bucket but the probe that any process leaves there."""
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
    found = {entry["Key"] for page in pages for entry in page.get("Contents", [])}
    return {key for key in found if not key.endswith(KEPT_PROBE)}


def body(client: Any, bucket: str, key: str) -> bytes:
    """One object's content."""
    content: bytes = client.get_object(Bucket=bucket, Key=key)["Body"].read()
    return content


@contextmanager
def other_vision_tower(model: Path, part: str = "vision_tower.") -> Iterator[None]:
    """While this is open the folder holds another vision encoder under the same names.

    The values of every vision tensor are shuffled. vLLM names an image by the model's path and
    the image's bytes, so where the model is known by its name (``weights: name``) a corpus made
    before still answers, and whoever encodes gives itself away by other answers.

    Args:
        part: What the names of the tensors begin with.
    """
    weights = model / "model.safetensors"
    original = weights.read_bytes()
    try:
        _replace(weights, _shuffled(original, part))
        yield
    finally:
        _replace(weights, original)


def other_projector(model: Path) -> AbstractContextManager[None]:
    """The same of the projector alone, as after it was trained once more."""
    return other_vision_tower(model, "multi_modal_projector.")


def _replace(path: Path, content: bytes) -> None:
    # Never in place: an engine may have the old file mapped.
    new = path.with_suffix(".new")
    new.write_bytes(content)
    new.replace(path)


def _shuffled(content: bytes, part: str) -> bytes:
    blob = bytearray(content)
    (length,) = struct.unpack_from("<Q", blob)
    start = 8 + length
    random = np.random.default_rng(0)
    tensors = 0
    for name, entry in json.loads(bytes(blob[8:start])).items():
        if name.startswith(part):
            first, end = entry["data_offsets"]
            values = np.frombuffer(blob, np.uint16, (end - first) // 2, start + first)
            random.shuffle(values)
            tensors += 1
    assert tensors, f"the model has no tensors of {part}"
    return bytes(blob)
