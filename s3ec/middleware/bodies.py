# SPDX-License-Identifier: Apache-2.0
"""Bodies of requests, as an ASGI middleware reads, changes and passes them on.

Our middleware runs before vLLM's, which checks the API key. So it checks the key itself before it
reads a body. Standard library only: the API server imports this.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import sys
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
# A few dozen photographs as data URLs.
DEFAULT_LIMIT_BYTES = 128 * 2**20
# The bytes of all clients together, if no single body may be larger.
_ROOM_BYTES = 2**30
# Paths for which vLLM requires a key: those of 0.26, unless the server's own can be read.
_GUARDED = ("/v1",)
_GUARD = "vllm.entrypoints.serve.middleware.authenticate"

_JSON_TYPE = re.compile(rb"application/(?:[^;\s]*\+)?json\s*(?:;.*)?", re.IGNORECASE | re.DOTALL)


class Room:
    """The bytes of bodies that a middleware may hold for all its clients; for one event loop.

    Attributes:
        free_bytes: Below 0 by no more than one message of each request that is read.
    """

    def __init__(self, limit_bytes: int) -> None:
        """Make a room of which all is free.

        Args:
            limit_bytes: The largest body that is read. One of them always fits.
        """
        self.free_bytes = max(_ROOM_BYTES, limit_bytes)


@dataclass(slots=True)
class Received:
    """The part of a request's body that has been read; ``let_go`` releases it.

    Attributes:
        room: Its bytes are taken from this room.
        messages: The server's messages, in order.
        size: Bytes of body in them.
        is_whole: True if the body has ended. If not, it is over the limit, the client left, or the
            room is full.
        has_left: True if the client left.
    """

    room: Room
    messages: list[Message] = field(default_factory=list)
    size: int = 0
    is_whole: bool = False
    has_left: bool = False

    @property
    def body(self) -> bytes:
        """The bytes that have been read."""
        return b"".join(message.get("body", b"") for message in self.messages)

    def take(self, message: Message) -> None:
        """Keep one more message."""
        nbytes = len(message.get("body", b""))
        self.messages.append(message)
        self.size += nbytes
        self.room.free_bytes -= nbytes

    def let_go(self) -> None:
        """Release all messages. Idempotent."""
        self.room.free_bytes += sum(len(message.get("body", b"")) for message in self.messages)
        self.messages.clear()


async def read(receive: Receive, limit_bytes: int, received: Received) -> None:
    """Read a body up to its end, the limit, the client's disconnect, or until the room is full.

    Args:
        received: Gets the messages. Its owner releases it, also after a cancellation.
    """
    while received.size <= limit_bytes and not received.is_whole and received.room.free_bytes > 0:
        message = await receive()
        received.take(message)
        if message["type"] != "http.request":
            received.has_left = True
            break
        received.is_whole = not message.get("more_body", False) and received.size <= limit_bytes


def whole(body: bytes) -> Message:
    """Make the single message of a request with this body."""
    return {"type": "http.request", "body": body, "more_body": False}


class Replay:
    """Returns messages again, and then the server's next ones, such as a disconnect.

    Attributes:
        is_over: True if the client has left.
    """

    def __init__(self, messages: Iterable[Message], receive: Receive) -> None:
        """Start with the first message."""
        self._left = list(messages)[::-1]
        self._receive = receive
        self.is_over = False

    async def __call__(self) -> Message:
        message = self._left.pop() if self._left else await self._receive()
        self.is_over = self.is_over or message["type"] == "http.disconnect"
        return message


class TwiceSeen:
    """Notes if an object has a name twice: another parser could take the other value."""

    def __init__(self) -> None:
        self.found = False

    def pairs(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        """For ``json.loads``, as its ``object_pairs_hook``."""
        content = dict(pairs)
        self.found = self.found or len(content) < len(pairs)
        return content


def compact_json(content: Any) -> bytes:
    """JSON without spaces, in ASCII, which can hold any string."""
    return json.dumps(content, separators=(",", ":")).encode("ascii")


async def answer(send: Send, status: int, text: str) -> None:
    """Answer a request with an error, as vLLM spells its own."""
    error = {"message": text, "type": "BadRequestError", "param": None, "code": status}
    body = json.dumps({"error": error}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    if status in (401, 413, 503):  # the rest of the body is not read
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def header(scope: Scope, name: bytes) -> bytes:
    """A header's value; empty if there is none.

    It is also empty if there are several: servers differ on which one counts.
    """
    found = [value for key, value in scope["headers"] if key.lower() == name]
    return bytes(found[0]) if len(found) == 1 else b""


def hashed_keys(args: Any) -> tuple[bytes, ...]:
    """SHA-256 of each API key that vLLM's server accepts; empty if it requires none.

    Args:
        args: The server's command line.
    """
    given = getattr(args, "api_key", None) or [os.environ.get("VLLM_API_KEY")]
    keys = [given] if isinstance(given, str) else given
    return tuple(hashlib.sha256(key.encode()).digest() for key in keys if key)


def has_key(scope: Scope, hashed: tuple[bytes, ...]) -> bool:
    """True if vLLM will accept a request's key (0.32, authenticate.py)."""
    guarded = getattr(sys.modules.get(_GUARD), "GUARDED_PREFIX", _GUARDED)
    path = str(scope["path"]).removeprefix(scope.get("root_path") or "")
    if not hashed or not path.startswith(guarded):
        return True
    scheme, _, key = header(scope, b"authorization").partition(b" ")
    given = hashlib.sha256(key).digest()
    # Compare with all of them, so that the time reveals nothing.
    found = [secrets.compare_digest(given, each) for each in hashed]
    return scheme.lower() == b"bearer" and any(found)


def is_json(content_type: bytes) -> bool:
    """True if a server will read a body of this type as JSON."""
    return _JSON_TYPE.fullmatch(content_type.strip()) is not None


def with_length(scope: Scope, length: int) -> Scope:
    """The scope of the same request with a body of another length."""
    dropped = (b"content-length", b"transfer-encoding")
    kept = [(key, value) for key, value in scope["headers"] if key.lower() not in dropped]
    return {**scope, "headers": [*kept, (b"content-length", b"%d" % length)]}


def limit_bytes() -> int:
    """The largest body that is read, from the environment.

    Raises:
        ConfigError: The variable is not a number of bytes.
    """
    text = os.environ.get(LIMIT_VARIABLE, "")
    if not text:
        return DEFAULT_LIMIT_BYTES
    if not re.fullmatch(r"[1-9][0-9]{0,14}", text, re.ASCII):
        raise ConfigError(
            f"{LIMIT_VARIABLE} must be a number of bytes, such as {DEFAULT_LIMIT_BYTES}"
        )
    return int(text)
