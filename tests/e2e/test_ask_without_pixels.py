# SPDX-License-Identifier: Apache-2.0
"""``s3ec.client`` and real API servers: the same answers without pixels, for three families.

Each server encodes, stores and loads (``ec_both``). It is asked with pixels first, then about
pictures that are large enough to drop all of those from the encoder cache, then without pixels.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import openai
import pytest
from PIL import Image

from s3ec import Corpus
from s3ec.client import AsyncPictures, Pictures
from s3ec.corpus.catalog_file import CatalogRow, export_table, to_table
from s3ec.dev.rigs.api_server import ApiServer
from s3ec.dev.rigs.engine import ec_config
from s3ec.dev.rigs.models import QWEN_VL_FAMILIES, write_qwen_vl
from s3ec.dev.rigs.nursery import EngineForkServer
from s3ec.dev.rigs.vllm_cpu import STEADY
from tests.e2e.rig import Gallery, data_url, eventually

_NAMES = ("single", "left", "middle")
# Catalogued under identifiers that the bucket does not have.
_GONE = ("shared", "extra", "posted")
_FILM, _FRAMES = "film", ("left", "middle", "right", "pair")
# Large enough, and so many, that nothing else is left in the encoder cache.
_FILLERS = tuple(f"many-{number}" for number in range(8))
_SIDE, _FILLER_SIDE, _FRAME_SIDE = 224, 448, 112
_FLAGS: dict[str, str | int | None] = {
    "--served-model-name": "tiny",
    "--enforce-eager": None,
    "--gpu-memory-utilization": "0.3",
    "--max-model-len": 4096,
    "--max-num-seqs": 8,
    "--seed": 0,
    "--max-num-batched-tokens": 128,
    # Or a second question about a picture would be answered without its embedding.
    "--no-enable-prefix-caching": None,
}
_LOADS = "vllm:s3ec_loads_total"
_REFUSED = "vllm:s3ec_unavailable_requests_total"
# What vLLM itself calls an image that it has not hashed; it means another one after a restart.
_COUNTED = "renderer0-mm-1-image-0"

Part = dict[str, Any]


@dataclass
class Asked:
    """A server of one family, and what it answered with pixels.

    Attributes:
        pictures: Knows the corpus.
        catalogue: File that it knows it from.
        with_pixels: Name of a prompt -> the answer.
    """

    server: ApiServer
    client: openai.OpenAI
    pictures: Pictures
    catalogue: Path
    with_pixels: dict[str, Any] = field(default_factory=dict)

    def ask(self, *parts: Part) -> Any:
        """The answer to a question about them."""
        return said(self.pictures.chat(self.client, **request(*parts)))

    def loads(self) -> float:
        """How many embeddings came through the connector so far."""
        return self.server.metrics().get(_LOADS, 0.0)


def request(*parts: Part) -> dict[str, Any]:
    """For ``create``: the parts and a question, at temperature 0."""
    content = [*parts, {"type": "text", "text": "what is this?"}]
    return {
        "model": "tiny",
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 8,
        "temperature": 0,
        "logprobs": True,
        "extra_body": {"return_token_ids": True},
    }


def said(reply: Any) -> tuple[Any, ...]:
    """What must be equal: tokens, their log probabilities, the end."""
    (choice,) = reply.choices
    logprobs = [token.logprob for token in choice.logprobs.content]
    return choice.token_ids, logprobs, choice.finish_reason


def _resized(path: Path, side: int, kind: str = "PNG") -> bytes:
    content = io.BytesIO()
    with Image.open(path) as picture:
        picture.convert("RGB").resize((side, side)).save(content, kind)
    return content.getvalue()


@dataclass(frozen=True)
class Files:
    """The same for all families: name -> file, and a film as vLLM takes frames in a data URL."""

    paths: dict[str, Path]
    fillers: list[bytes]
    film: bytes

    def film_part(self) -> Part:
        """With its frames."""
        url = f"data:video/jpeg;base64,{self.film.decode()}"
        return {"type": "video_url", "video_url": {"url": url}, "uuid": _uuid(self.film)}


def _uuid(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


@pytest.fixture(scope="module")
def files(workdir: Path, gallery: Gallery) -> Files:
    paths = {name: workdir / f"asked-{name}.png" for name in (*_NAMES, *_GONE)}
    for name, path in paths.items():
        path.write_bytes(_resized(gallery[name], _SIDE))
    frames = [base64.b64encode(_resized(gallery[name], _FRAME_SIDE, "JPEG")) for name in _FRAMES]
    fillers = [_resized(gallery[name], _FILLER_SIDE) for name in _FILLERS]
    return Files(paths, fillers, b",".join(frames))


def _server(family: str, folder: Path, nursery: EngineForkServer) -> ApiServer:
    settings = {
        "url": (folder / "corpus").as_uri(),
        "cache_dir": str(folder / "tier"),
        "cache_bytes": "1GiB",
        "min_free_bytes": 0,
        "wait": "always",
    }
    (folder / "corpus").mkdir(parents=True)
    return ApiServer(
        write_qwen_vl(folder / "model", family),
        ec=json.dumps(ec_config("ec_both", settings)),
        log_path=folder / "server.log",
        env=STEADY,
        flags=_FLAGS,
        nursery=nursery,
    )


@pytest.fixture(scope="module")
def all_asked(workdir: Path, files: Files, nursery: EngineForkServer) -> Iterator[dict[str, Asked]]:
    """A server for each family; they start at once."""
    folders = {family: workdir / "asked" / family for family in QWEN_VL_FAMILIES}
    servers = {family: _server(family, folder, nursery) for family, folder in folders.items()}
    with ExitStack() as stack, ThreadPoolExecutor(len(servers)) as pool:
        asked = {}
        started = pool.map(stack.enter_context, servers.values())
        for family, server in zip(servers, started, strict=True):
            corpus = stack.enter_context(Corpus.open(url=(folders[family] / "corpus").as_uri()))
            client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
            export = folders[family] / "catalogue.parquet"
            pictures = Pictures(export, modalities=("image", "video"))
            stack.callback(pictures.close)
            asked[family] = Asked(server, stack.enter_context(client), pictures, export)
            export_table(to_table([]), export)
            _fill(asked[family], corpus, files)
        yield asked


def _fill(asked: Asked, corpus: Corpus, files: Files) -> None:
    """Ask with pixels; catalogue what was stored of that, and what was not."""
    contents = {name: path.read_bytes() for name, path in files.paths.items()}
    with_pixels = {name: asked.pictures.parts("?", data=contents[name]) for name in _NAMES}
    prompts = _prompts(with_pixels) | {_FILM: [files.film_part()]}
    asked.with_pixels = {name: asked.ask(*parts) for name, parts in prompts.items()}
    assert len({str(answer) for answer in asked.with_pixels.values()}) == len(prompts)
    for filler in files.fillers:
        asked.ask(*asked.pictures.parts("?", data=filler))
    stored = {name: contents[name] for name in _NAMES} | {_FILM: files.film}

    def are_stored() -> bool:
        labels = {entry.label for entry in corpus.list()}
        return len(labels) >= len(stored) + len(files.fillers)

    eventually(are_stored, "all embeddings are stored")
    rows = {name: _row(corpus, name, content) for name, content in stored.items()}
    for name in _NAMES:
        rows[name] = replace(rows[name], uri=files.paths[name].as_uri())
    for name in _GONE:
        digest = hashlib.sha256(contents[name]).hexdigest()
        rows[name] = replace(
            rows[_NAMES[0]],
            document=name,
            uri=files.paths[name].as_uri(),
            sha256=digest,
            identifier=_uuid(contents[name]),
        )
    export_table(to_table(list(rows.values())), asked.catalogue)
    asked.pictures.refresh()


def _row(corpus: Corpus, document: str, content: bytes) -> CatalogRow:
    entry = corpus.stat(_uuid(content))
    assert entry is not None
    assert entry.header is not None
    shape = entry.header.shape
    return CatalogRow(
        document=document,
        page=None,
        uri="file:///nowhere",
        sha256=hashlib.sha256(content).hexdigest(),
        identifier=entry.header.identifier,
        modality=entry.header.modality,
        rows=shape.rows,
        width=shape.width,
        dtype=shape.dtype,
        placeholder=entry.header.placeholder,
        nbytes=entry.nbytes,
        stored_s=1.8e9,
        extra={},
    )


def _prompts(parts: dict[str, list[Part]]) -> dict[str, list[Part]]:
    """Each picture alone, all in one prompt, one of them twice."""
    several = [part for name in _NAMES for part in parts[name]]
    return {**parts, "several": several, "twice": parts["left"] * 2}


@pytest.fixture(params=QWEN_VL_FAMILIES)
def asked(request: pytest.FixtureRequest, all_asked: dict[str, Asked]) -> Asked:
    """Each family in turn."""
    return all_asked[request.param]


def test_answers_without_pixels_are_those_with_pixels(asked: Asked) -> None:
    parts = {name: asked.pictures.parts(name) for name in _NAMES}
    assert {part["type"] for (part,) in parts.values()} == {"image_embeds"}
    before = asked.loads()
    for name, prompt in _prompts(parts).items():
        assert asked.ask(*prompt) == asked.with_pixels[name], name
    eventually(lambda: asked.loads() - before == len(_NAMES), "each was loaded once")


@pytest.mark.parametrize(
    "family",
    [
        "qwen2-vl",
        pytest.param(
            "qwen2.5-vl",
            marks=pytest.mark.xfail(
                reason="vLLM 0.32 places its frames by seconds that such a request cannot carry"
            ),
        ),
        "qwen3-vl",
    ],
)
def test_a_video_without_frames_is_answered_as_with_them(
    family: str, all_asked: dict[str, Asked]
) -> None:
    asked = all_asked[family]
    (part,) = asked.pictures.parts(_FILM)
    assert part["type"] == "video_embeds"
    assert asked.ask(part) == asked.with_pixels[_FILM]


def test_an_embedding_that_is_gone_is_asked_for_with_its_pixels(
    all_asked: dict[str, Asked], files: Files
) -> None:
    """In three ways at once, since the server looks for each of them for 10 s."""
    asked = all_asked["qwen2-vl"]
    urls = [data_url(files.paths[name]) for name in _GONE]
    plain, streamed, awaited = (asked.pictures.parts(name) for name in _GONE)
    # Without a uuid they are encoded under their hashes.
    expected = [asked.ask({"type": "image_url", "image_url": {"url": url}}) for url in urls]

    def stream() -> Any:
        chunks = asked.pictures.chat(asked.client, **request(*streamed), stream=True)
        return [
            token
            for chunk in chunks
            for one in chunk.choices
            for token in getattr(one, "token_ids", None) or ()
        ]

    async def chat() -> Any:
        async with (
            AsyncPictures(asked.catalogue) as pictures,
            openai.AsyncOpenAI(base_url=asked.client.base_url, api_key="none") as client,
        ):
            return said(await pictures.chat(client, **request(*awaited)))

    with ThreadPoolExecutor(3) as pool:
        first, second = pool.submit(asked.ask, *plain), pool.submit(stream)
        third = pool.submit(lambda: asyncio.run(chat()))
        answers = [first.result(), second.result(), third.result()]
    # In one batch the last digits of log probabilities are others.
    answers = [answers[0][0], answers[1], answers[2][0]]
    assert answers == [tokens for tokens, *_ in expected]


@pytest.mark.parametrize(
    ("named", "grid"), [("left", [1, 32, 32]), (_COUNTED, [1, 16, 16])], ids=["grid", "counter"]
)
def test_a_request_without_pixels_that_cannot_be_served_ends_alone_with_an_error(
    named: str, grid: list[int], all_asked: dict[str, Asked]
) -> None:
    """One claims another size than the entry has, one names a picture by a counter of vLLM's."""
    asked = all_asked["qwen2-vl"]
    before = asked.server.metrics()[_REFUSED]
    uuid = asked.pictures.parts(named)[0]["uuid"] if named in _NAMES else named
    part = {"type": "image_embeds", "image_embeds": {"image_grid_thw": grid}, "uuid": uuid}
    with pytest.raises(openai.InternalServerError):
        asked.client.with_options(max_retries=0).chat.completions.create(**request(part))
    assert asked.ask(*asked.pictures.parts("middle")) == asked.with_pixels["middle"]
    eventually(lambda: asked.server.metrics()[_REFUSED] == before + 1, "it is counted")


def test_a_picture_under_a_counter_is_encoded_and_its_name_refused(
    all_asked: dict[str, Asked], files: Files
) -> None:
    asked = all_asked["qwen2-vl"]
    refused = "vllm:s3ec_refused_identifiers_total"
    before = asked.server.metrics()[refused]
    url = {"url": data_url(files.paths["left"])}
    said_of_it = asked.ask({"type": "image_url", "image_url": url, "uuid": _COUNTED})
    assert said_of_it == asked.with_pixels["left"]
    eventually(lambda: asked.server.metrics()[refused] > before, "it is counted")
