# SPDX-License-Identifier: Apache-2.0
"""An HTTP proxy on 127.0.0.1 that misbehaves on request, for tests of a store's transport.

It speaks HTTP/1.1 in front of one upstream and forwards the Host header as it came: SigV4
signs it, and a server checks the signature against the Host it receives, so a client that was
configured with the proxy's URL stays valid. Whole requests and replies are held in memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import ssl
import struct
import threading
from collections.abc import Coroutine, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import urlsplit

_READ_LIMIT = 2**20
# Hop-by-hop headers end at the proxy; SigV4 of the AWS SDKs signs none of them.
_HOP_BY_HOP = frozenset({"connection", "expect", "keep-alive", "transfer-encoding"})


@dataclass(frozen=True, slots=True)
class Request:
    """One request as the proxy saw it; ``target`` is the raw path with its query."""

    method: str
    target: str
    headers: Mapping[str, str]


@dataclass(slots=True)
class Reply:
    """One reply; header names are lower case, the body is decoded from chunks."""

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""


class Exchange:
    """What a fault may do with one request: ask the upstream, answer, break off."""

    def __init__(
        self,
        request: Request,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        upstream: tuple[str, int],
        released: asyncio.Event,
    ) -> None:
        self.request = request
        self.released = released
        self._reader = reader
        self._writer = writer
        self._upstream = upstream
        self._body: bytes | None = None

    @property
    def client(self) -> tuple[str, int]:
        """Address and port of the client's end of the connection."""
        address, port, *_ = self._writer.get_extra_info("peername")
        return address, port

    async def read_body(self) -> bytes:
        """The request's body; read on the first call, which is when the client may send it."""
        if self._body is None:
            if self.request.headers.get("expect", "").lower() == "100-continue":
                self._writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self._body = await _read_body(self._reader, self.request.headers)
        return self._body

    async def forward(self) -> Reply:
        """Ask the upstream, on a connection of its own."""
        body = await self.read_body()
        reader, writer = await asyncio.open_connection(*self._upstream, limit=_READ_LIMIT)
        try:
            headers = {k: v for k, v in self.request.headers.items() if k not in _HOP_BY_HOP}
            if body or self.request.method in ("PUT", "POST"):
                headers["content-length"] = str(len(body))
            start = f"{self.request.method} {self.request.target} HTTP/1.1"
            writer.write(head(start, {**headers, "connection": "close"}) + body)
            await writer.drain()
            start, reply_headers = await _read_head(reader)
            status = int(start.split(" ", 2)[1])
            bodiless = self.request.method == "HEAD" or status in (204, 304)
            reply_body = b"" if bodiless else await _read_body(reader, reply_headers, to_end=True)
        finally:
            writer.close()
        kept = {k: v for k, v in reply_headers.items() if k not in _HOP_BY_HOP}
        return Reply(status, kept, reply_body)

    async def send(self, reply: Reply, *, length: int | None = None, upto: int = -1) -> None:
        """Answer the client.

        Args:
            length: Content-Length to announce, where it should not be the true one.
            upto: Bytes of the body to send; all where negative.
        """
        headers = dict(reply.headers)
        if length is not None:
            headers["content-length"] = str(length)
        elif self.request.method != "HEAD" and reply.status != 204:
            headers["content-length"] = str(len(reply.body))
        body = b"" if self.request.method == "HEAD" else reply.body
        await self.send_raw(head(f"HTTP/1.1 {reply.status} Proxied", headers))
        await self.send_raw(body if upto < 0 else body[:upto])

    async def send_raw(self, data: bytes) -> None:
        """Send bytes as they are."""
        self._writer.write(data)
        await self._writer.drain()

    def close(self) -> None:
        """End the connection in order (FIN)."""
        self._writer.close()

    def reset(self) -> None:
        """Break the connection (RST)."""
        sock = self._writer.get_extra_info("socket")
        # Linger of zero seconds: close() sends RST and throws away what was not sent yet.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.transport.abort()


class Fault(Protocol):
    """What happens to a request that a rule matched."""

    async def apply(self, exchange: Exchange) -> None:
        """Answer the exchange, or do not."""
        ...


@dataclass(slots=True)
class Rule:
    """Which requests a fault befalls.

    Attributes:
        fault: What happens to them.
        method: Regular expression that the whole method matches.
        target: Regular expression searched in the raw path and query.
        header: Only requests that carry this header (lower case); any if empty.
        skip: Matching requests let through first.
        times: How often it fires at most; None for ever.
        fired: How often it fired.
    """

    fault: Fault
    method: str = ".*"
    target: str = ""
    header: str = ""
    skip: int = 0
    times: int | None = None
    fired: int = 0

    def take(self, request: Request) -> bool:
        """Whether this rule befalls the request now; counts."""
        if self.times is not None and self.fired >= self.times:
            return False
        if not re.fullmatch(self.method, request.method):
            return False
        if not re.search(self.target, request.target):
            return False
        if self.header and self.header not in request.headers:
            return False
        if self.skip > 0:
            self.skip -= 1
            return False
        self.fired += 1
        return True


class FaultProxy:
    """The proxy, in a thread of its own, so that a blocked test loop cannot block it.

    Args:
        upstream_url: Server to forward to, such as ``http://127.0.0.1:8333``.
        tls: Serve HTTPS with this context; the upstream is asked by HTTP either way.

    Attributes:
        requests: Everything that was asked, in order.
    """

    def __init__(self, upstream_url: str, *, tls: ssl.SSLContext | None = None) -> None:
        parts = urlsplit(upstream_url)
        self._upstream = (parts.hostname or "127.0.0.1", parts.port or 80)
        self._tls = tls
        self._rules: list[Rule] = []
        self._loop = asyncio.new_event_loop()
        self._released = asyncio.Event()
        self._server: asyncio.Server | None = None
        self._connections: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="fault-proxy", daemon=True
        )
        self.port = 0
        self.requests: list[Request] = []

    @property
    def url(self) -> str:
        """Where clients reach the proxy."""
        return f"{'https' if self._tls else 'http'}://127.0.0.1:{self.port}"

    def __enter__(self) -> FaultProxy:
        self._thread.start()
        self._call(self._listen())
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._call(self._hang_up())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def add(self, rule: Rule) -> Rule:
        """Put a rule before the others; the first that matches befalls a request."""
        self._rules.insert(0, rule)
        return rule

    def remove(self, rule: Rule) -> None:
        """Forget one rule, and let stalled exchanges end."""
        self._rules = [other for other in self._rules if other is not rule]
        self.release()

    def clear(self, *rules: Rule) -> None:
        """Have these rules alone, forget the requests, and let stalled exchanges end."""
        self._rules = list(rules)  # at once: what is stalled comes again as soon as it has ended
        self.requests.clear()
        self.release()

    def release(self) -> None:
        """Let stalled exchanges end: their connections are closed."""
        self._call(self._release())

    @contextlib.contextmanager
    def refusing(self) -> Iterator[None]:
        """Refuse connections on this port inside the block, and drop the open ones."""
        self._call(self._hang_up())
        with socket.socket() as held:  # it does not listen; nobody else gets the port meanwhile
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.bind(("127.0.0.1", self.port))
            try:
                yield
            finally:
                self._call(self._listen())

    def _call(self, coroutine: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout=30)

    async def _release(self) -> None:
        self._released.set()
        self._released = asyncio.Event()

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(
            self._serve, "127.0.0.1", self.port, ssl=self._tls, limit=_READ_LIMIT
        )
        self.port = self._server.sockets[0].getsockname()[1]

    async def _hang_up(self) -> None:
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()
            self._server = None
        tasks = dict(self._connections)
        for task, writer in tasks.items():
            task.cancel()
            writer.transport.abort()
        await asyncio.gather(*tasks, return_exceptions=True)
        # One more turn: transports tell their protocols about the abort by call_soon.
        await asyncio.sleep(0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is None:  # a callback of asyncio's server always runs in a task
            return
        self._connections[task] = writer
        try:
            while await self._serve_one(reader, writer):
                pass
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # the client went away, or the proxy is being stopped
        finally:
            del self._connections[task]
            writer.close()

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        start, headers = await _read_head(reader)
        method, target, _ = start.split(" ", 2)
        request = Request(method, target, headers)
        self.requests.append(request)
        exchange = Exchange(request, reader, writer, self._upstream, self._released)
        rule = next((rule for rule in self._rules if rule.take(request)), None)
        if rule is None:
            await exchange.send(await exchange.forward())
        else:
            await rule.fault.apply(exchange)
        return not writer.is_closing()


def head(start: str, headers: Mapping[str, str]) -> bytes:
    """The front of a message, with its empty line."""
    lines = [start, *(f"{name}: {value}" for name, value in headers.items()), "", ""]
    return "\r\n".join(lines).encode("latin-1")


async def _read_head(reader: asyncio.StreamReader) -> tuple[str, dict[str, str]]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    start, *lines = head[:-4].split("\r\n")
    pairs = (line.split(":", 1) for line in lines)
    return start, {name.lower(): value.strip() for name, value in pairs}


async def _read_body(
    reader: asyncio.StreamReader, headers: Mapping[str, str], *, to_end: bool = False
) -> bytes:
    if headers.get("transfer-encoding", "").lower() == "chunked":
        chunks = []
        while nbytes := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
            chunks.append((await reader.readexactly(nbytes + 2))[:-2])
        await reader.readuntil(b"\r\n")
        return b"".join(chunks)
    if "content-length" in headers:
        return await reader.readexactly(int(headers["content-length"]))
    return await reader.read() if to_end else b""
