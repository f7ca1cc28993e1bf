# SPDX-License-Identifier: Apache-2.0
"""``bench middleware``: a server with SkipPictures beside one without, and an unchanged client.

Two real API servers with a tiny Qwen2-VL and one tier, which holds the embeddings of all pictures.
A client asks each of them about the same pictures of 2048 pixels square, as data URLs in PNG,
streamed. Both have s3ec's connector, so neither encodes anything. One decodes and preprocesses each
picture all the same. Neither has seen a picture before: the one with the middleware hashes its
bytes, and vLLM's cache of processed pictures is small.

The model has few layers and is run by a processor, so a picture is few tokens here: what it costs
to compute those is the same for both, and says nothing about the middleware.
"""

from __future__ import annotations

import base64
import contextlib
import json
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from s3ec.dev.bench import measure
from s3ec.dev.bench.context import Bench, CannotMeasureError, Context
from s3ec.dev.bench.engines import until
from s3ec.dev.bench.result import Spec
from s3ec.dev.rigs.vllm_cpu import STEADY

if TYPE_CHECKING:
    from openai import OpenAI

    from s3ec.dev.rigs.api_server import ApiServer

_DIFFER, _TTFT = "middleware.answers_differ", "middleware.ttft_ratio"
ROWS = (Spec(_DIFFER, "1", "<= 0"), Spec(_TTFT, "ratio", "<= 0.6"))
_WITH, _WITHOUT = "with the middleware", "without"
_SIDE = 2048
_PICTURES = 24
_TOKENS = 4
_QUESTION = "what is to be seen?"
_COUNT = 'vllm:s3ec_skip_pictures_total{outcome="replaced"}'


@dataclass(frozen=True, slots=True)
class Answer:
    """One streamed answer.

    Attributes:
        ttft_s: From the call to the first word, as the client sees it.
        said: Words, tokens, logprobs and usage.
    """

    ttft_s: float
    said: Any


def run(context: Context) -> None:
    """Compare the two.

    Raises:
        CannotMeasureError: There is no vLLM or no client, or a server is not what it should be.
    """
    from s3ec.dev.bench.hooks import need_vllm

    need_vllm(context)
    count = context.rounds(_PICTURES)
    context.say(f"{count} pictures")
    urls = [_picture(number) for number in range(count)]
    with _servers(context) as servers:
        _warm(context, servers, urls)
        answers = _ask_all(context, servers, urls)
        replaced = _replaced(servers[_WITH].server)
    if replaced < count:
        raise CannotMeasureError(f"{replaced:.0f} of {count} requests went without their picture")
    differ = sum(
        one.said != other.said for one, other in zip(answers[_WITH], answers[_WITHOUT], strict=True)
    )
    context.report(
        _DIFFER,
        differ,
        samples=count,
        detail={"note": "of these answers: words, tokens, logprobs, usage"},
    )
    times_s = {name: [one.ttft_s for one in found] for name, found in answers.items()}
    ratios = measure.ratios(times_s[_WITH], times_s[_WITHOUT])
    context.report(
        _TTFT,
        statistics.median(ratios),
        samples=len(ratios),
        detail={
            "spread": measure.spread(ratios),
            "note": "time to the first word, picture by picture",
            "ttft_ms": {
                name: measure.spread([1000 * one for one in found])
                for name, found in times_s.items()
            },
            "request_mb": statistics.mean(len(url) for url in urls) / 1e6,
        },
    )


# -- servers and clients ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Asked:
    server: ApiServer
    client: OpenAI

    def ask(self, url: str) -> Answer:
        picture = {"type": "image_url", "image_url": {"url": url}}
        content = [picture, {"type": "text", "text": _QUESTION}]
        messages: Any = [{"role": "user", "content": content}]
        begun_s = time.perf_counter()
        stream = self.client.chat.completions.create(
            model="tiny",
            messages=messages,
            max_tokens=_TOKENS,
            temperature=0,
            logprobs=True,
            top_logprobs=2,
            stream=True,
            stream_options={"include_usage": True},
        )
        first_s = None
        words, tokens, usage = "", [], None
        for event in stream:
            usage = event.usage.model_dump() if event.usage else usage
            for choice in event.choices:
                if choice.logprobs is not None:
                    first_s = first_s or time.perf_counter()
                    tokens += [token.model_dump() for token in choice.logprobs.content or ()]
                words += choice.delta.content or ""
        if first_s is None:
            raise CannotMeasureError("an answer without a word")
        return Answer(first_s - begun_s, (words, tokens, usage))


@contextlib.contextmanager
def _servers(context: Context) -> Iterator[Mapping[str, _Asked]]:
    try:
        import openai

        from s3ec.dev.rigs.models import write_qwen2_vl

        model = write_qwen2_vl(context.scratch / "model")
    except ImportError as exc:
        raise CannotMeasureError(str(exc)) from exc
    context.say("starting two servers")
    with contextlib.ExitStack() as stack:
        made = {}
        for name in (_WITH, _WITHOUT):
            server = stack.enter_context(_server(context, model, name))
            base = f"{server.url}/v1"
            client = openai.OpenAI(base_url=base, api_key="none", max_retries=0, timeout=120)
            made[name] = _Asked(server, stack.enter_context(client))
        yield made


def _server(context: Context, model: Path, name: str) -> ApiServer:
    from s3ec.dev.rigs.api_server import ApiServer
    from s3ec.dev.rigs.engine import ec_config

    corpus = context.scratch / "corpus"
    corpus.mkdir(exist_ok=True)
    settings = {
        "url": corpus.as_uri(),
        "cache_dir": str(context.scratch / "tier"),  # of the node, so both have it
        "min_free_bytes": 0,
        "wait": "always",
    }
    flags: dict[str, str | int | None] = {
        "--served-model-name": "tiny",
        "--enforce-eager": None,
        "--gpu-memory-utilization": "0.2",
        "--max-model-len": 2048,
        "--max-num-seqs": 4,
        "--seed": 0,
        "--no-enable-prefix-caching": None,
        "--mm-processor-cache-gb": "0.01",
    }
    if name == _WITH:
        flags["--middleware"] = "s3ec.middleware.SkipPictures"
    return ApiServer(
        model,
        ec=json.dumps(ec_config("ec_both", settings)),
        log_path=context.scratch / f"{name}.log",
        env=STEADY,
        flags=flags,
    )


def _warm(context: Context, servers: Mapping[str, _Asked], urls: Sequence[str]) -> None:
    """Have all embeddings in the tier; the server with the middleware sees none of the pictures."""
    tier = context.scratch / "tier"
    context.say("encoding")
    for url in urls:
        servers[_WITHOUT].ask(url)
    until(
        lambda: len(list(tier.glob("v1/objects/*/*/*.safetensors"))) >= len(urls),
        "all embeddings are in the tier",
    )
    extra = [_picture(-1 - number) for number in range(2)]
    servers[_WITHOUT].ask(extra[0])
    servers[_WITH].ask(extra[1])  # both have answered before they are timed

    def is_replacing() -> bool:
        servers[_WITH].ask(extra[0])
        return _replaced(servers[_WITH].server) > 0

    until(is_replacing, "the middleware replaces a picture")


def _ask_all(
    context: Context, servers: Mapping[str, _Asked], urls: Sequence[str]
) -> Mapping[str, list[Answer]]:
    """Ask both about each picture in turn; who is first changes from one to the next."""
    context.say("asking")
    found: dict[str, list[Answer]] = {name: [] for name in servers}
    with measure.no_collection():
        for number, url in enumerate(urls):
            order = list(servers) if number % 2 else list(servers)[::-1]
            for name in order:
                found[name].append(servers[name].ask(url))
    return found


def _replaced(server: ApiServer) -> float:
    lines = server.get("/metrics").splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(_COUNT))


def _picture(number: int) -> str:
    """A picture of its own as a data URL: some 7 MB, as a photograph's would be."""
    import io

    import numpy as np
    from PIL import Image

    source = np.random.default_rng(number & 0xFFFF)
    coarse = Image.fromarray(source.integers(0, 256, (32, 32, 3), dtype=np.uint8))
    smooth = np.asarray(coarse.resize((_SIDE, _SIDE), Image.Resampling.BICUBIC), dtype=np.int16)
    grain = source.integers(-3, 4, (_SIDE, _SIDE, 3), dtype=np.int16)
    buffer = io.BytesIO()
    Image.fromarray(np.clip(smooth + grain, 0, 255).astype(np.uint8)).save(
        buffer, "PNG", compress_level=1
    )
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


BENCH = Bench(ROWS, run)
