# SPDX-License-Identifier: Apache-2.0
"""Keeps clients of ``vllm serve`` from choosing the identifiers of their pictures.

``vllm serve --middleware s3ec.middleware.StripClientIds`` (or ``RefuseClientIds``). A client may
otherwise give a picture any ``uuid``, also the 64 hex digits of another one's hash, and nothing
behind the API can tell.

vLLM 0.32 takes an identifier from two places of a request. One is ``uuid`` of a content part, in
all that ``renderers/chat_utils.py`` and ``entrypoints/pooling/scoring/utils.py`` parse and in
``content_parts``. The other is ``features.mm_hashes`` of ``/inference/v1/generate``. Another
server's render endpoint made those up, so they can only be refused. ``multi_modal_uuids`` is in no
protocol of vLLM's server, and is taken out all the same. Standard library only: the API server
imports this.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from s3ec.errors import ConfigError

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

LIMIT_VARIABLE = "S3EC_MAX_REQUEST_BYTES"
# A few dozen photographs as data URLs. The middleware runs before vLLM asks for an API key.
DEFAULT_LIMIT_BYTES = 128 * 2**20

_UUID, _UUIDS, _HASHES = "uuid", "multi_modal_uuids", "mm_hashes"
# A body without any of these holds no such key. Another spelling needs an escape, or UTF-16
# or UTF-32, which hold zeros.
_NAMES = (b"uuid", _HASHES.encode(), b"\\u", b"\0")
# Below these keys vLLM looks for no picture: schemas, and what templates and tools are given.
_FOREIGN = frozenset({
    "tools", "functions", "tool_choice", "arguments", "response_format", "structured_outputs",
    "schema", "chat_template_kwargs", "metadata", "vllm_xargs", "mm_processor_kwargs",
    "media_io_kwargs", "kv_transfer_params", "ec_transfer_params",
})  # fmt: skip
_JSON_TYPE = re.compile(rb"application/(?:[^;\s]*\+)?json\s*(?:;.*)?", re.IGNORECASE | re.DOTALL)


class BodyError(ValueError):
    """A request that is not let through; the text is for the client."""


def rewrite(body: bytes, *, refuse: bool, must_be_json: bool = True) -> bytes:
    """Take the identifiers that a client chose out of a request's body.

    Args:
        body: The whole of it.
        refuse: Raise where there is one.
        must_be_json: Whether the server will read it as JSON.

    Returns:
        The same object where there was none, else JSON without them.

    Raises:
        BodyError: It holds what may not be there, or is JSON that cannot be read.
    """
    if not any(name in body for name in _NAMES):
        return body
    seen = _Seen()
    try:
        # As Starlette does, which finds out the encoding too.
        content = json.loads(body, object_pairs_hook=seen.pairs)
        found = _strip(content)
        # Of a name that is there twice another parser could take the other one.
        changed = found.chosen or seen.twice
        fresh = json.dumps(content, separators=(",", ":")).encode("ascii") if changed else body
    except (ValueError, RecursionError) as exc:
        if must_be_json:
            raise BodyError("the body is no JSON that can be read") from exc
        return body
    if found.hashes:
        raise BodyError(f"`{_HASHES}` may not be given to this server")
    if found.chosen and refuse:
        raise BodyError(f"`{_UUID}` may not be given to this server")
    return fresh


class _Seen:
    """Notes whether an object holds a name twice."""

    def __init__(self) -> None:
        self.twice = False

    def pairs(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        content = dict(pairs)
        self.twice = self.twice or len(content) < len(pairs)
        return content


class _Found:
    def __init__(self) -> None:
        self.chosen = False
        self.hashes = False


def _strip(content: Any) -> _Found:
    """Remove identifiers in place, wherever they are; no recursion, so any depth."""
    found = _Found()
    waiting = [content]
    while waiting:
        value = waiting.pop()
        if isinstance(value, list):
            waiting += value
            continue
        if not isinstance(value, dict):
            continue
        for name in (_UUID, _UUIDS):
            # Null is what a client sends that fills in every field.
            if value.pop(name, None) is not None:
                found.chosen = True
        found.hashes = found.hashes or bool(value.get(_HASHES))
        foreign = _FOREIGN | {"input"} if value is not content and _is_call(value) else _FOREIGN
        waiting += [inner for name, inner in value.items() if name not in foreign]
    return found


def _is_call(value: dict[str, Any]) -> bool:
    """Whether this is what a model asked of a tool, whose input is the tool's own.

    The responses API has another ``input``: of the request itself, and a list.
    """
    return value.get("type") == "tool_use" and isinstance(value.get("input"), dict)


class StripClientIds:
    """ASGI middleware: requests arrive without the identifiers that clients chose.

    A picture is then known by its content. A part that had an identifier and no picture has
    neither now, and vLLM refuses it. Replies, also streamed ones, are not touched.
    """

    refuse = False

    def __init__(self, app: App) -> None:
        """Wrap an application.

        Raises:
            ConfigError: The limit in the environment is no number of bytes.
        """
        self._app = app
        self._limit_bytes = _limit_bytes()

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD", "OPTIONS"):
            await self._app(scope, receive, send)
            return
        kind = _header(scope, b"content-type")
        if kind.lower().startswith(b"multipart/"):  # recordings to transcribe; no pictures
            await self._app(scope, receive, send)
            return
        body = await _read(receive, self._limit_bytes)
        if isinstance(body, int):
            await _answer(send, 413, f"the body is over {self._limit_bytes} bytes")
            return
        if body is None:  # the client has gone
            return
        try:
            is_json = _JSON_TYPE.fullmatch(kind.strip()) is not None
            fresh = rewrite(body, refuse=self.refuse, must_be_json=is_json)
        except BodyError as exc:
            await _answer(send, 400, str(exc))
            return
        if fresh is not body:
            scope = {**scope, "headers": _with_length(scope["headers"], len(fresh))}
        await self._app(scope, _Replay(fresh, receive), send)


class RefuseClientIds(StripClientIds):
    """ASGI middleware: a request with an identifier that a client chose is answered 400."""

    refuse = True


class _Replay:
    """Gives the body again, and then what the server has to say, such as a disconnect."""

    def __init__(self, body: bytes, receive: Receive) -> None:
        self._body: bytes | None = body
        self._receive = receive

    async def __call__(self) -> Message:
        body, self._body = self._body, None
        if body is None:
            return await self._receive()
        return {"type": "http.request", "body": body, "more_body": False}


async def _read(receive: Receive, limit_bytes: int) -> bytes | int | None:
    """A request's body; a number where it is over the limit, None where the client left."""
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        part = message.get("body", b"")
        size += len(part)
        if size > limit_bytes:
            return size
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


async def _answer(send: Send, status: int, text: str) -> None:
    error = {"message": text, "type": "BadRequestError", "param": None, "code": status}
    body = json.dumps({"error": error}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    if status == 413:  # what is left of the body is not read
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _header(scope: MutableMapping[str, Any], name: bytes) -> bytes:
    found = [value for key, value in scope["headers"] if key.lower() == name]
    # Where there are several no two servers agree which one counts.
    return bytes(found[0]) if len(found) == 1 else b""


def _with_length(headers: list[tuple[bytes, bytes]], length: int) -> list[tuple[bytes, bytes]]:
    dropped = (b"content-length", b"transfer-encoding")
    kept = [(key, value) for key, value in headers if key.lower() not in dropped]
    return [*kept, (b"content-length", b"%d" % length)]


def _limit_bytes() -> int:
    text = os.environ.get(LIMIT_VARIABLE, "")
    if not text:
        return DEFAULT_LIMIT_BYTES
    if not re.fullmatch(r"[1-9][0-9]{0,14}", text, re.ASCII):
        raise ConfigError(
            f"{LIMIT_VARIABLE} must be a number of bytes, such as {DEFAULT_LIMIT_BYTES}"
        )
    return int(text)
