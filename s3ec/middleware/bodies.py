# SPDX-License-Identifier: Apache-2.0
"""Bodies of requests, as an ASGI middleware reads, changes and hands them on.

Standard library only: the API server imports this.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from s3ec.errors import ConfigError

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

LIMIT_VARIABLE = "S3EC_MAX_REQUEST_BYTES"
# A few dozen photographs as data URLs. The middleware runs before vLLM asks for an API key.
DEFAULT_LIMIT_BYTES = 128 * 2**20

_JSON_TYPE = re.compile(rb"application/(?:[^;\s]*\+)?json\s*(?:;.*)?", re.IGNORECASE | re.DOTALL)


@dataclass(slots=True)
class Received:
    """What came of a request's body.

    Attributes:
        messages: In their order, as the server gave them.
        size: Bytes of body in them.
        is_whole: Whether the body has ended. If not, it is over the limit, or the client left.
    """

    messages: list[Message] = field(default_factory=list)
    size: int = 0
    is_whole: bool = False

    @property
    def body(self) -> bytes:
        """All that came."""
        return b"".join(message.get("body", b"") for message in self.messages)


async def read(receive: Receive, limit_bytes: int) -> Received:
    """Read a request's body, up to its end, the limit, or the client's disconnect."""
    received = Received()
    while received.size <= limit_bytes and not received.is_whole:
        message = await receive()
        received.messages.append(message)
        if message["type"] != "http.request":
            break
        received.size += len(message.get("body", b""))
        received.is_whole = not message.get("more_body", False) and received.size <= limit_bytes
    return received


def whole(body: bytes) -> Message:
    """The one message of a request with this body."""
    return {"type": "http.request", "body": body, "more_body": False}


class Replay:
    """Gives messages again, and then what the server has to say, such as a disconnect.

    Attributes:
        is_over: Whether the client has left.
    """

    def __init__(self, messages: Iterable[Message], receive: Receive) -> None:
        """Nothing is given yet."""
        self._left = list(messages)[::-1]
        self._receive = receive
        self.is_over = False

    async def __call__(self) -> Message:
        message = self._left.pop() if self._left else await self._receive()
        self.is_over = self.is_over or message["type"] == "http.disconnect"
        return message


class TwiceSeen:
    """Notes whether an object holds a name twice: another parser could take the other value."""

    def __init__(self) -> None:
        self.found = False

    def pairs(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        """For ``json.loads``, as its ``object_pairs_hook``."""
        content = dict(pairs)
        self.found = self.found or len(content) < len(pairs)
        return content


def compact_json(content: Any) -> bytes:
    """JSON without spaces, in ASCII: whatever strings hold can be written so."""
    return json.dumps(content, separators=(",", ":")).encode("ascii")


async def answer(send: Send, status: int, text: str) -> None:
    """Answer a request with an error, as vLLM spells its own."""
    error = {"message": text, "type": "BadRequestError", "param": None, "code": status}
    body = json.dumps({"error": error}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    if status == 413:  # what is left of the body is not read
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def header(scope: Scope, name: bytes) -> bytes:
    """A header's value; empty where there is none.

    Also where there are several: no two servers agree which one counts.
    """
    found = [value for key, value in scope["headers"] if key.lower() == name]
    return bytes(found[0]) if len(found) == 1 else b""


def is_json(content_type: bytes) -> bool:
    """Whether a server will read a body of this type as JSON."""
    return _JSON_TYPE.fullmatch(content_type.strip()) is not None


def with_length(scope: Scope, length: int) -> Scope:
    """The scope of the same request with another body."""
    dropped = (b"content-length", b"transfer-encoding")
    kept = [(key, value) for key, value in scope["headers"] if key.lower() not in dropped]
    return {**scope, "headers": [*kept, (b"content-length", b"%d" % length)]}


def limit_bytes() -> int:
    """The largest body that is read, from the environment.

    Raises:
        ConfigError: That is no number of bytes.
    """
    text = os.environ.get(LIMIT_VARIABLE, "")
    if not text:
        return DEFAULT_LIMIT_BYTES
    if not re.fullmatch(r"[1-9][0-9]{0,14}", text, re.ASCII):
        raise ConfigError(
            f"{LIMIT_VARIABLE} must be a number of bytes, such as {DEFAULT_LIMIT_BYTES}"
        )
    return int(text)
