# SPDX-License-Identifier: Apache-2.0
"""Keeps clients of ``vllm serve`` from choosing the identifiers of their pictures.

``vllm serve --middleware s3ec.middleware.StripClientIds``. Otherwise a client may give a picture
any ``uuid``, even the 64 hex digits of another picture's hash, and no part behind the API can tell.

vLLM 0.32 takes an identifier from two places of a request. One is ``uuid`` of a content part, in
all that ``renderers/chat_utils.py`` and ``entrypoints/pooling/scoring/utils.py`` parse and in
``content_parts``. The other is ``features.mm_hashes`` of ``/inference/v1/generate``. The render
endpoint of another server made those, so they can only be refused. ``multi_modal_uuids`` is in no
protocol of vLLM's server, and is removed anyway. Standard library only: the API server imports
this.
"""

from __future__ import annotations

import json
from typing import Any

from s3ec.middleware.bodies import (
    App,
    Receive,
    Received,
    Replay,
    Room,
    Scope,
    Send,
    TwiceSeen,
    answer,
    compact_json,
    has_key,
    hashed_keys,
    header,
    is_json,
    limit_bytes,
    read,
    whole,
    with_length,
)

_UUID, _UUIDS, _HASHES = "uuid", "multi_modal_uuids", "mm_hashes"
# A body without any of these has no such key. Another spelling needs an escape, or UTF-16 or
# UTF-32, which contain zeros.
_NAMES = (b"uuid", _HASHES.encode(), b"\\u", b"\0")
# Below these keys vLLM searches for no picture: schemas, and arguments of templates and tools.
_FOREIGN = frozenset({
    "tools", "functions", "tool_choice", "arguments", "response_format", "structured_outputs",
    "schema", "chat_template_kwargs", "metadata", "vllm_xargs", "mm_processor_kwargs",
    "media_io_kwargs", "kv_transfer_params", "ec_transfer_params",
})  # fmt: skip


class BodyError(ValueError):
    """A request is refused; the text is for the client."""


def rewrite(body: bytes, *, must_be_json: bool = True) -> bytes:
    """Remove the identifiers that a client chose from a request's body.

    Args:
        body: The whole body.
        must_be_json: True if the server will read it as JSON.

    Returns:
        The same object if there was none, else JSON without them.

    Raises:
        BodyError: It has hashes, which are not allowed, or is unreadable JSON.
    """
    if not any(name in body for name in _NAMES):
        return body
    seen = TwiceSeen()
    try:
        # As Starlette does, which finds out the encoding too.
        content = json.loads(body, object_pairs_hook=seen.pairs)
        has_chosen, has_hashes = _strip(content)
        # Of a repeated name another parser could take the other value.
        changed = has_chosen or seen.found
        fresh = compact_json(content) if changed else body
    except (ValueError, RecursionError) as exc:
        if must_be_json:
            raise BodyError("the body is no JSON that can be read") from exc
        return body
    if has_hashes:
        raise BodyError(f"`{_HASHES}` may not be given to this server")
    return fresh


def _strip(content: Any) -> tuple[bool, bool]:
    """Remove identifiers in place, at any depth, without recursion.

    Returns:
        True if there was one, and True if there are hashes of another server.
    """
    has_chosen = has_hashes = False
    waiting = [content]
    while waiting:
        value = waiting.pop()
        if isinstance(value, list):
            waiting += value
            continue
        if not isinstance(value, dict):
            continue
        for name in (_UUID, _UUIDS):
            # A client that fills in every field sends null.
            if value.pop(name, None) is not None:
                has_chosen = True
        has_hashes = has_hashes or bool(value.get(_HASHES))
        foreign = _FOREIGN | {"input"} if value is not content and _is_call(value) else _FOREIGN
        waiting += [inner for name, inner in value.items() if name not in foreign]
    return has_chosen, has_hashes


def _is_call(value: dict[str, Any]) -> bool:
    """True if this is a model's call of a tool, whose input is the tool's own.

    The responses API has another ``input``: that of the request itself, a list.
    """
    return value.get("type") == "tool_use" and isinstance(value.get("input"), dict)


class StripClientIds:
    """ASGI middleware that removes the identifiers that clients chose from requests.

    vLLM then names a picture by its content. If a part had an identifier and no picture, it now has
    neither, and vLLM refuses it. Responses, also streamed ones, are not changed. A client without
    vLLM's API key gets 401 before the body is read. While the bodies of all clients together take
    more than 1 GiB, the response is 503.
    """

    def __init__(self, app: App) -> None:
        """Wrap an application.

        Raises:
            ConfigError: The limit in the environment is no number of bytes.
        """
        self._app = app
        self._limit_bytes = limit_bytes()
        self._room = Room(self._limit_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD", "OPTIONS"):
            await self._app(scope, receive, send)
            return
        kind = header(scope, b"content-type")
        if kind.lower().startswith(b"multipart/"):  # recordings to transcribe; no pictures
            await self._app(scope, receive, send)
            return
        server = getattr(scope.get("app"), "state", None)
        # Not left to vLLM: if its check and ours differed, a body would pass unread.
        if not has_key(scope, hashed_keys(getattr(server, "args", None))):
            await answer(send, 401, "Unauthorized")
            return
        received = Received(self._room)
        try:
            await read(receive, self._limit_bytes, received)
            body = received.body
        finally:
            received.let_go()
        if received.size > self._limit_bytes:
            await answer(send, 413, f"the body is over {self._limit_bytes} bytes")
            return
        if not received.is_whole:
            if not received.has_left:
                await answer(send, 503, "the server holds too many bodies; try again")
            return
        try:
            fresh = rewrite(body, must_be_json=is_json(kind))
        except BodyError as exc:
            await answer(send, 400, str(exc))
            return
        if fresh is not body:
            scope = with_length(scope, len(fresh))
        replay = Replay([whole(fresh)], receive)
        del body, fresh  # or they would stay in memory until the response has ended
        await self._app(scope, replay, send)
