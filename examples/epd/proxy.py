#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Stands before encoder and language instances: fresh media are encoded by the encoders, once.

    python examples/epd/proxy.py --port 8000 --encoder http://localhost:8001 \
        --language http://localhost:8002

A chat request with pictures, sound or video first goes to an encoder, without its words. The
encoder's answer names what it has encoded. The whole request then goes to a language instance
together with these names, and is answered from there. Everything else goes to a language instance
as it is. Both options may be given several times; instances take turns.

Where no encoder answers in time, the request goes on without names: the language instance encodes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any

from aiohttp import ClientError, ClientSession, ClientTimeout, TCPConnector, web

log = logging.getLogger("epd-proxy")

CHAT = "/v1/chat/completions"
MEDIA = {"image_url", "input_audio", "audio_url", "video_url"}
# What else changes how vLLM names a picture, or whose turn it is.
KEPT = ("model", "mm_processor_kwargs", "media_io_kwargs", "priority")
# These are about one connection and not about the message.
HOP_BY_HOP = {"connection", "content-length", "host", "keep-alive", "transfer-encoding"}
LARGEST_BODY = 256 * 2**20


class Proxy:
    """Hands requests on. One object for all of them."""

    def __init__(self, encoders: list[str], languages: list[str], encoder_timeout_s: float) -> None:
        self._encoders: Iterator[str] = itertools.cycle(encoders)
        self._languages: Iterator[str] = itertools.cycle(languages)
        self._encoder_timeout = ClientTimeout(total=encoder_timeout_s)
        self._client: ClientSession

    async def connections(self, app: web.Application) -> AsyncIterator[None]:
        """Keep them for as long as the server runs."""
        # vLLM closes idle connections after 5 s; ours are let go of before.
        connector = TCPConnector(limit=0, keepalive_timeout=2)
        async with ClientSession(
            connector=connector, timeout=ClientTimeout(total=None), auto_decompress=False
        ) as self._client:
            yield

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Any request of a client."""
        body = await request.read()
        if request.method == "POST" and request.path == CHAT:
            body = await self._with_names(request, body)
        return await self._forward(request, body)

    async def _with_names(self, request: web.Request, body: bytes) -> bytes:
        """A chat request that names what an encoder has just encoded of it."""
        try:
            asked = json.loads(body)
            media = media_of(asked)
        except (ValueError, KeyError, AttributeError, TypeError):
            return body  # whatever it is, the language instance says what is wrong with it
        own = asked.get("ec_transfer_params") or {}
        if not media or not isinstance(own, dict):
            return body
        named = await self._encode(request, asked, media)
        return json.dumps({**asked, "ec_transfer_params": {**named, **own}}).encode()

    async def _encode(
        self, request: web.Request, asked: dict[str, Any], media: list[Any]
    ) -> dict[str, Any]:
        """Have all media of a request encoded; what the encoder calls them, empty if it failed."""
        encoder = next(self._encoders)
        order = {
            **{name: asked[name] for name in KEPT if name in asked},
            "messages": [{"role": "user", "content": media}],
            "max_tokens": 1,
        }
        headers = {"Accept-Encoding": "identity"}
        if "Authorization" in request.headers:
            headers["Authorization"] = request.headers["Authorization"]
        try:
            async with self._client.post(
                f"{encoder}{CHAT}", json=order, headers=headers, timeout=self._encoder_timeout
            ) as reply:
                reply.raise_for_status()
                return dict(json.loads(await reply.read())["ec_transfer_params"] or {})
        except (TimeoutError, ClientError, ValueError, KeyError, TypeError) as exc:
            log.warning("%s did not encode: %r", encoder, exc)
            return {}

    async def _forward(self, request: web.Request, body: bytes) -> web.StreamResponse:
        """To a language instance, and its answer back as it comes."""
        url = f"{next(self._languages)}{request.path_qs}"
        headers = {
            name: value for name, value in request.headers.items() if name.lower() not in HOP_BY_HOP
        }
        try:
            async with self._client.request(
                request.method, url, headers=headers, data=body
            ) as reply:
                kept = {k: v for k, v in reply.headers.items() if k.lower() not in HOP_BY_HOP}
                answer = web.StreamResponse(status=reply.status, headers=kept)
                await answer.prepare(request)
                async for chunk in reply.content.iter_any():
                    await answer.write(chunk)
                await answer.write_eof()
                return answer
        except ClientError as exc:
            raise web.HTTPBadGateway(text=f"{url}: {exc!r}") from exc


def media_of(asked: dict[str, Any]) -> list[Any]:
    """All pictures, sounds and videos of a chat request, in their order."""
    parts = []
    for message in asked["messages"]:
        content = message.get("content")
        parts += content if isinstance(content, list) else []
    return [part for part in parts if isinstance(part, dict) and part.get("type") in MEDIA]


def main() -> int:
    """Serve until SIGINT or SIGTERM."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--encoder", action="append", required=True, metavar="URL")
    parser.add_argument("--language", action="append", required=True, metavar="URL")
    parser.add_argument("--encoder-timeout-s", type=float, default=60.0)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    proxy = Proxy(args.encoder, args.language, args.encoder_timeout_s)
    app = web.Application(client_max_size=LARGEST_BODY)
    app.cleanup_ctx.append(proxy.connections)
    app.router.add_route("*", "/{path:.*}", proxy.handle)
    web.run_app(app, host=args.host, port=args.port, access_log=None)
    return 0


if __name__ == "__main__":
    sys.exit(main())
