# SPDX-License-Identifier: Apache-2.0
"""The middleware as vLLM's API server loads it, in front of vLLM's own routes and protocols."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import AsyncIterator
from typing import Any

import pytest

pytest.importorskip("vllm")
register = pytest.importorskip("vllm.entrypoints.serve.middleware.register")
chat_routes = pytest.importorskip("vllm.entrypoints.openai.chat_completion.api_router")
generate_routes = pytest.importorskip("vllm.entrypoints.scale_out.token_in_token_out.api_router")
httpx = pytest.importorskip("httpx")
fastapi = pytest.importorskip("fastapi")

STOLEN = "ab" * 32
CHAT = "/v1/chat/completions"
POISONED: dict[str, Any] = {
    "model": "m",
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "image_url", "image_url": {"url": "data:,"}, "uuid": STOLEN},
                {"type": "text", "text": "what is in it?"},
            ],
        }
    ],
}


class Handler:
    """In the place of what would ask an engine."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    async def create_chat_completion(self, request: Any, raw_request: Any) -> AsyncIterator[str]:
        self.asked.append(request)
        return self._events()

    async def serve_tokens(self, request: Any, raw_request: Any) -> AsyncIterator[str]:
        self.asked.append(request)
        return self._events()

    async def _events(self) -> AsyncIterator[str]:
        for number in range(3):
            yield f"data: {number}\n\n"


def args_of(*middleware: str) -> Namespace:
    return Namespace(
        allowed_origins=["*"],
        allow_credentials=False,
        allowed_methods=["*"],
        allowed_headers=["*"],
        api_key=["key"],
        enable_request_id_headers=True,
        middleware=list(middleware),
    )


async def post(
    middleware: str | None, path: str, content: Any, *, key: str = "key"
) -> tuple[Any, Handler]:
    app, handler = fastapi.FastAPI(), Handler()
    app.state.openai_serving_chat = app.state.serving_tokens = handler
    app.include_router(chat_routes.router)
    app.include_router(generate_routes.router)
    args = args_of(*([middleware] if middleware else []))
    app.state.args = args  # as vLLM's app_state.py
    register.init_entrypoints_middleware(args, app, ("generate",))
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app),
        base_url="http://test",
        headers={"authorization": f"Bearer {key}"},
    ) as client:
        return await client.post(path, json=content), handler


async def test_without_the_middleware_a_clients_name_reaches_the_server() -> None:
    reply, handler = await post(None, CHAT, POISONED)
    assert reply.status_code == 200
    assert handler.asked[0].messages[0]["content"][0]["uuid"] == STOLEN


async def test_the_server_gets_the_picture_without_the_name_and_streams_its_reply() -> None:
    reply, handler = await post("s3ec.middleware.StripClientIds", CHAT, POISONED)
    assert reply.status_code == 200
    assert reply.text == "data: 0\n\ndata: 1\n\ndata: 2\n\n"
    picture, question = handler.asked[0].messages[0]["content"]
    assert picture["image_url"] == {"url": "data:,"}
    assert "uuid" not in picture
    assert question["text"] == "what is in it?"


@pytest.mark.parametrize("path", [CHAT, "/inference/v1/generate", "/v1/nothing", "/nothing"])
async def test_who_has_no_key_is_answered_as_by_vllm(path: str) -> None:
    alone, _ = await post(None, path, POISONED, key="other")
    both, handler = await post("s3ec.middleware.StripClientIds", path, POISONED, key="other")
    assert both.status_code == alone.status_code == (404 if path == "/nothing" else 401)
    assert handler.asked == []


@pytest.mark.parametrize("middleware", [None, "s3ec.middleware.StripClientIds"])
async def test_hashes_for_generate_are_taken_by_vllm_and_refused_here(
    middleware: str | None,
) -> None:
    features = {
        "mm_hashes": {"image": [STOLEN]},
        "mm_placeholders": {"image": [{"offset": 0, "length": 1}]},
    }
    content = {"token_ids": [1], "features": features, "sampling_params": {}}
    reply, handler = await post(middleware, "/inference/v1/generate", content)
    if middleware is None:
        assert handler.asked[0].features.mm_hashes == {"image": [STOLEN]}
    else:
        assert reply.status_code == 400
        assert handler.asked == []
        assert STOLEN not in json.dumps(reply.json())


# -- pictures that are skipped ---------------------------------------------------------------------

WITHOUT_PIXELS = {"type": "image_embeds", "image_embeds": {"image_grid_thw": [1, 4, 4]},
                  "uuid": STOLEN}  # fmt: skip


def test_the_middleware_that_is_named_last_is_asked_first() -> None:
    """So names are stripped before SkipPictures gives pictures those of their content."""
    app = fastapi.FastAPI()
    names = ("s3ec.middleware.SkipPictures", "s3ec.middleware.StripClientIds")
    register.init_entrypoints_middleware(args_of(*names), app, ("generate",))
    first, second = app.user_middleware[:2]
    assert (first.cls.__name__, second.cls.__name__) == ("StripClientIds", "SkipPictures")


async def test_a_chat_request_may_have_metadata_in_place_of_a_picture() -> None:
    content = {"model": "m", "messages": [{"role": "user", "content": [WITHOUT_PIXELS]}]}
    reply, handler = await post(None, CHAT, content)
    assert reply.status_code == 200
    assert list(handler.asked[0].messages[0]["content"]) == [WITHOUT_PIXELS]


def test_a_request_for_responses_may_not() -> None:
    """So SkipPictures leaves those alone."""
    protocol = pytest.importorskip("vllm.entrypoints.openai.responses.protocol")
    asked = {"role": "user", "content": [WITHOUT_PIXELS]}
    with pytest.raises(ValueError, match=r"image_embeds|input"):
        protocol.ResponsesRequest(model="m", input=[asked])
