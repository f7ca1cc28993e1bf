# SPDX-License-Identifier: Apache-2.0
"""Middleware that removes from chat requests the pictures whose embeddings this node holds.

``vllm serve --middleware s3ec.middleware.SkipPictures``. Clients stay as they are. vLLM neither
decodes nor preprocesses such a picture, and the connector loads the embedding as for any hit.

A request passes unchanged in every case of doubt: an unknown picture, an option that may change
how a picture is processed, a disk that does not answer in time, a fault of ours. If vLLM answers a
replaced request with an error, it is sent again with its pixels, unseen by the client. So the start
of a response is held back until it is certain: its status, or the first event of a stream that has
more than the assistant's role. Errors that pixels would not cure, such as an overload, pass.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from s3ec.counters import Counters
from s3ec.errors import ConfigError
from s3ec.middleware.bodies import (
    App,
    Message,
    Receive,
    Received,
    Replay,
    Room,
    Scope,
    Send,
    has_key,
    hashed_keys,
    header,
    is_json,
    limit_bytes,
    read,
    whole,
    with_length,
)
from s3ec.middleware.chat_pictures import MARK, UntouchedError, parse
from s3ec.middleware.known_pictures import Opener, name_of_picture
from s3ec.runtime import DaemonPool, in_thread
from s3ec.tier.open_entry import OpenEntry
from s3ec.trial import Trial

log = logging.getLogger(__name__)

PATH = "/v1/chat/completions"
# The time to find the pictures of one request: reading JSON, hashing, links and checksums.
_PATIENCE_S = 2.0
_THREADS = 2
# A body up to this size is searched at once; a longer one is left to a thread.
_SMALL_BYTES = 1 << 16
_MOST_AT_ONCE = 32
# Bytes of a response that are held back; a longer response is good.
_MOST_HELD_BYTES = 1 << 20
# vLLM's statuses if it takes no picture without pixels, or could not get its embedding.
_FOR_WANT_OF_PIXELS = frozenset({400, 422, 500})
_CLOSE_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Node:
    """The parts of this node and this server that replacing needs.

    Attributes:
        name_of: Returns vLLM's name for the bytes of a picture; None if it is unknown.
        opener: Opens embeddings.
        api_keys: SHA-256 of the server's API keys; empty if it requires none.
        close: Closes all of it; blocks.
    """

    name_of: Callable[[bytes], str | None]
    opener: Opener
    api_keys: tuple[bytes, ...] = ()
    close: Callable[[], None] = lambda: None


@dataclass(frozen=True, slots=True)
class WithoutPixels:
    """The request that is sent in place of a client's.

    Attributes:
        body: Of the request.
        entries: The open embeddings that it relies on, by identifier.
    """

    body: bytes
    entries: dict[str, OpenEntry]


class SkipPictures:
    """ASGI middleware that replaces pictures by placeholder sizes if the node has their embeddings.

    States: new; starting, after the server's start or its first request; then active, or off for
    good, which the log says once with its reason. While it starts, requests pass unchanged.

    Counters of chat requests: ``skip.replaced``, ``skip.repeated``, ``skip.untouched.REASON``. On
    vLLM's /metrics they are ``vllm:s3ec_skip_pictures_total`` by ``outcome``.
    """

    def __init__(
        self,
        app: App,
        *,
        open_node: Callable[[Any, Counters], Node | str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Wrap an application.

        Args:
            app: vLLM's, or the next middleware.
            open_node: Makes the parts from the application's state, or returns why not; blocks.
                None for those of this machine.
            clock: Monotonic seconds.

        Raises:
            ConfigError: A value in the environment is invalid.
        """
        self.counters = Counters()
        self._app = app
        self._limit_bytes = limit_bytes()
        self._room = Room(self._limit_bytes)
        self._open_node = open_node or _open_node
        self._trial = Trial(clock)
        self._node: Node | None = None
        self._pool: DaemonPool | None = None
        self._looking = 0
        self._late: Future[WithoutPixels] | None = None
        self._complained: set[str] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request, or the server's start and end."""
        if scope["type"] == "lifespan":
            self._start(scope)
            try:
                await self._app(scope, receive, send)
            finally:
                await self._close()
            return
        if not _is_chat(scope):
            await self._app(scope, receive, send)
            return
        self._start(scope)
        received = Received(self._room)
        try:
            await self._handle(scope, received, receive, send)
        finally:
            received.let_go()

    async def _handle(self, scope: Scope, received: Received, receive: Receive, send: Send) -> None:
        try:
            node, pool = self._ready(scope)
            await read(receive, self._limit_bytes, received)
            asked = await self._look(node, pool, received)
            if self._trial.rests:  # it may have begun to rest meanwhile
                self._give_back(asked)
                raise UntouchedError("resting")
        except UntouchedError as exc:
            self._count(f"untouched.{exc.reason}")
            replay = Replay(received.messages, receive)
            received.let_go()
            await self._app(scope, replay, send)
            return
        self._trial.begin(asked)
        try:
            await self._ask(scope, received, asked, receive, send)
        finally:
            self._give_back(asked)

    def _count(self, outcome: str) -> None:
        self.counters.add(f"skip.{outcome}")
        metric = _metric()
        if metric is not None:
            metric.labels(outcome).inc()

    # -- what to ask -------------------------------------------------------------------------------

    def _ready(self, scope: Scope) -> tuple[Node, DaemonPool]:
        """Return the node and the pool, if the body of a request is worth reading.

        Raises:
            UntouchedError: The request passes unchanged.
        """
        if self._node is None or self._pool is None:
            raise UntouchedError("off")
        if not has_key(scope, self._node.api_keys):
            raise UntouchedError("no_key")
        if self._trial.rests:
            raise UntouchedError("resting")
        if self._room.free_bytes <= 0:
            raise UntouchedError("busy")
        return self._node, self._pool

    async def _look(self, node: Node, pool: DaemonPool, received: Received) -> WithoutPixels:
        """Make the request to send in place of a client's; in a thread.

        Raises:
            UntouchedError: The client's request passes unchanged.
        """
        if not received.is_whole:
            raise UntouchedError("too_large" if received.size > self._limit_bytes else "busy")
        if received.size <= _SMALL_BYTES and MARK not in received.body:
            raise UntouchedError("no_pictures")
        hangs = self._late is not None and not self._late.done()
        if self._looking >= _MOST_AT_ONCE or hangs:
            raise UntouchedError("busy")
        try:
            call = pool.submit(_without_pixels, node, received)
        except RuntimeError:  # the server ends
            raise UntouchedError("off") from None
        self._looking += 1
        is_ours = False
        try:
            found = await asyncio.wait_for(asyncio.wrap_future(call), _PATIENCE_S)
            is_ours = True
            return found
        except TimeoutError:
            self._late = call  # until it has ended, no request waits for another call
            raise UntouchedError("slow") from None
        except UntouchedError:
            raise
        except Exception as exc:  # noqa: BLE001 (no fault of ours may cost a client its response)
            self._complain(exc)
            raise UntouchedError("fault") from None
        finally:
            self._looking -= 1
            if not is_ours:
                call.add_done_callback(_let_go)

    def _give_back(self, asked: WithoutPixels) -> None:
        if self._pool is not None:
            with suppress(RuntimeError):  # the server ends, which closes all files
                self._pool.submit(asked.entries.clear)

    def _complain(self, exc: Exception) -> None:
        kind = type(exc).__name__
        if kind not in self._complained:
            self._complained.add(kind)
            log.error("SkipPictures: a request passes as it came", exc_info=exc)

    # -- asking ------------------------------------------------------------------------------------

    async def _ask(
        self, scope: Scope, received: Received, asked: WithoutPixels, receive: Receive, send: Send
    ) -> None:
        """Send the request without pixels, and again with them if that fails."""
        held = HeldBack(send, when_good=lambda: self._note_good(held.status, received))
        replay = Replay([whole(asked.body)], receive)
        try:
            await self._app(with_length(scope, len(asked.body)), replay, held)
        except Exception as exc:
            if held.is_good or replay.is_over:
                raise
            log.debug("without pixels: %r", exc)
            held.status = 500
        if held.is_good:
            self._count("replaced")
        elif not replay.is_over:
            self._count("repeated")
            if held.status >= 500:
                self._note_repeat(asked)
            again = Replay(received.messages, receive)
            received.let_go()
            await self._app({**scope}, again, self._noting(asked, held.status, send))

    def _note_good(self, status: int, received: Received) -> None:
        received.let_go()  # early, since the pictures would take memory until the response ends
        if status < 400:
            self._trial.succeeded()

    def _note_repeat(self, asked: WithoutPixels) -> None:
        if rest_s := self._trial.failed(asked):
            log.warning(
                "requests had to be repeated with their pictures; none is replaced for %.0f s",
                rest_s,
            )

    def _noting(self, asked: WithoutPixels, status: int, send: Send) -> Send:
        """Pass the second response on; if it is good, the missing pixels caused the first error."""

        async def passing(message: Message) -> None:
            is_start = message["type"] == "http.response.start"
            if is_start and status < 500 and message["status"] < 400:
                self._note_repeat(asked)
            await send(message)

        return passing

    # -- start and end -----------------------------------------------------------------------------

    def _start(self, scope: Scope) -> None:
        """Make the parts in a thread of its own, once; returns at once."""
        if self._pool is not None:
            return
        self._pool = DaemonPool(_THREADS, "s3ec-skip")
        state = getattr(scope.get("app"), "state", None)
        try:
            in_thread(lambda: self._open(state), "s3ec-skip-start")
        except RuntimeError as exc:  # there are too many threads
            log.info("SkipPictures is off: %s", exc)

    def _open(self, state: Any) -> None:
        try:
            made = self._open_node(state, self.counters)
        except Exception as exc:  # the top of a thread
            if isinstance(exc, ConfigError):
                made = str(exc)
            else:
                log.exception("SkipPictures")
                made = f"a fault of ours: {exc!r}"
        if isinstance(made, str):
            log.info("SkipPictures is off: %s", made)
            return
        self._node = made
        log.info("SkipPictures replaces pictures that this node holds")

    async def _close(self) -> None:
        node, self._node = self._node, None
        if node is not None:
            with suppress(TimeoutError):
                ended = asyncio.wrap_future(in_thread(node.close, "s3ec-skip-end"))
                await asyncio.wait_for(ended, _CLOSE_TIMEOUT_S)
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)


def _without_pixels(node: Node, received: Received) -> WithoutPixels:
    request = parse(received.body)
    names = [name_of_picture(url, node.name_of) for url in request.urls]
    entries = node.opener.open(names)
    named = [(name, entries[name].header.placeholder or {}) for name in names]
    return WithoutPixels(request.without_pixels(named), entries)


def _let_go(call: Future[WithoutPixels]) -> None:
    """Close the entries that a call has opened for a request that no longer waits for it."""
    if not call.cancelled() and call.exception() is None:
        call.result().entries.clear()


@functools.cache
def _metric() -> Any:
    """The counter on vLLM's /metrics; None without prometheus-client, which comes with vLLM."""
    try:
        from prometheus_client import Counter
    except ImportError:
        return None
    return Counter(
        "vllm:s3ec_skip_pictures", "Chat requests, by what became of their pictures.", ["outcome"]
    )


def _is_chat(scope: Scope) -> bool:
    if scope["type"] != "http" or scope["method"] != "POST":
        return False
    path = str(scope["path"]).removeprefix(scope.get("root_path") or "")
    return path == PATH and is_json(header(scope, b"content-type"))


# -- an answer that may be taken back --------------------------------------------------------------


class HeldBack:
    """Holds a response back, and passes it on once it is certain that it is good.

    States: held, then good, or failed for good. The rest of a failed response is dropped.

    Attributes:
        is_good: True if the client gets it.
        status: Of the response, 0 before it has begun; 500 for a stream that began with an error.
    """

    def __init__(self, send: Send, *, when_good: Callable[[], object] = lambda: None) -> None:
        """Hold nothing yet.

        Args:
            send: The server's own.
            when_good: Called once, before the client gets any of the response.
        """
        self._send = send
        self.is_good = False
        self.status = 0
        self._when_good = when_good
        self._held: list[Message] = []
        self._has_failed = False
        self._events = FirstEvents()

    async def __call__(self, message: Message) -> None:
        """Take the next message of the response."""
        if self.is_good:
            await self._send(message)
            return
        if self._has_failed:
            return
        self._held.append(message)
        good: bool | None = None
        if message["type"] == "http.response.start":
            self.status = message["status"]
            if self.status >= 400:
                good = self.status not in _FOR_WANT_OF_PIXELS
            elif not _is_stream(message):
                good = True
        elif message["type"] == "http.response.body":
            good = self._events.take(message.get("body", b""))
            if good is None and not message.get("more_body", False):
                good = True
        if good is None:
            return
        held, self._held = self._held, []
        if not good:
            self._has_failed = True
            self.status = self.status if self.status >= 400 else 500
            return
        self.is_good = True
        self._when_good()
        for each in held:
            await self._send(each)


def _is_stream(start: Message) -> bool:
    headers = {bytes(key).lower(): bytes(value) for key, value in start.get("headers", ())}
    return headers.get(b"content-type", b"").lower().startswith(b"text/event-stream")


class FirstEvents:
    """Reads the beginning of a stream, until it is certain whether vLLM succeeds or fails.

    vLLM sends the role of every choice before it checks whether its request failed (0.32,
    chat_completion/serving.py), and comments while it waits. An error is an event of its own. The
    first word of any choice is enough: all of them need the same embeddings, which are open.
    """

    def __init__(self) -> None:
        """Start before the first event."""
        self._left = b""
        self._size = 0

    def take(self, data: bytes) -> bool | None:
        """Read further bytes of the stream.

        Returns:
            True if the response is good, False if it is an error, None if that is not certain yet.
        """
        self._size += len(data)
        *events, self._left = (self._left + data).split(b"\n\n")
        for event in events:
            if (good := self._read(event)) is not None:
                return good
        return True if self._size > _MOST_HELD_BYTES else None

    def _read(self, event: bytes) -> bool | None:
        lines = [line for line in event.splitlines() if line and not line.startswith(b":")]
        if not lines:
            return None
        try:
            content = json.loads(lines[0].removeprefix(b"data:"))
            if error := content.get("error"):
                code = error.get("code") if isinstance(error, dict) else None
                return isinstance(code, int) and code not in _FOR_WANT_OF_PIXELS
            says_nothing = content["choices"] and all(map(_is_role, content["choices"]))
        except (ValueError, LookupError, TypeError, AttributeError):
            return True  # it is no error that we know
        return None if says_nothing else True


def _is_role(choice: Any) -> bool:
    delta = choice["delta"]
    return (
        choice.get("finish_reason") is None
        and "role" in delta
        and not any(value for name, value in delta.items() if name != "role")
    )


# -- this machine's parts --------------------------------------------------------------------------


def _open_node(state: Any, counters: Counters) -> Node | str:
    """Read vLLM's configuration, and open the tier that its connector uses.

    Returns:
        The parts, or a text that says why nothing is replaced.
    """
    from s3ec.config import load_settings, set_up_logging
    from s3ec.connector.vllm_config import namespace_of
    from s3ec.identity import naming_of
    from s3ec.middleware import vllm_names
    from s3ec.node import open_tier

    client = getattr(state, "engine_client", None)
    config = getattr(state, "vllm_config", None) or getattr(client, "vllm_config", None)
    if config is None:
        return "the application has no vLLM configuration"
    set_up_logging("INFO")  # so that the reason is seen
    problem = vllm_names.release_problem() or vllm_names.connector_problem(config)
    if problem is not None:
        return problem
    settings = load_settings(config.ec_transfer_config.ec_connector_extra_config).settings
    set_up_logging(settings.log_level)
    problem = vllm_names.problem_of(config, settings)
    if problem is not None:
        return problem
    namespace = namespace_of(config, settings)
    tier = open_tier(settings, namespace.name, counters, check_values=True)
    log.debug("SkipPictures reads namespace %s in %s", namespace.name, settings.cache_dir)
    return Node(
        vllm_names.names_of(config, client).name,
        Opener(tier, naming_of(settings), vllm_names.metadata_fields(config)),
        hashed_keys(getattr(state, "args", None)),
        tier.close,
    )
