# SPDX-License-Identifier: Apache-2.0
"""What can go wrong between a client and a bucket, one small class per fault of the proxy."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from s3ec.dev.rigs.proxy import Exchange, Reply, head


@dataclass(frozen=True, slots=True)
class Answer:
    """A reply of the proxy's own; the upstream is not asked."""

    status: int
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)

    async def apply(self, exchange: Exchange) -> None:
        await exchange.read_body()
        await exchange.send(Reply(self.status, dict(self.headers), self.body))


def s3_error(status: int, code: str, *, headers: Mapping[str, str] | None = None) -> Answer:
    """The answer of an S3 server that refuses: status and an XML body with the code."""
    body = (
        '<?xml version="1.0" encoding="UTF-8"?>'
        f"<Error><Code>{code}</Code><Message>told to say so</Message></Error>"
    )
    kind = {"content-type": "application/xml"}
    return Answer(status, body.encode(), {**kind, **(headers or {})})


def html_page(status: int = 200) -> Answer:
    """The page of something that is not S3: a portal, a load balancer."""
    page = b"<html><body><p>It works!</p></body></html>"
    return Answer(status, page, {"content-type": "text/html"})


@dataclass(frozen=True, slots=True)
class Delay:
    """The upstream's reply, later."""

    delay_s: float

    async def apply(self, exchange: Exchange) -> None:
        await asyncio.sleep(self.delay_s)
        await exchange.send(await exchange.forward())


@dataclass(frozen=True, slots=True)
class Cut:
    """The whole head, ``upto`` bytes of the body, then the end of the connection.

    Attributes:
        reset: End with RST instead of FIN.
        chunked: Send the body as one unfinished chunk, without announcing its length.
    """

    upto: int
    reset: bool = False
    chunked: bool = False

    async def apply(self, exchange: Exchange) -> None:
        reply = await exchange.forward()
        if self.chunked:
            await _send_chunk(exchange, reply, self.upto)
        else:
            await exchange.send(reply, upto=self.upto)
        if self.reset:
            exchange.reset()
        else:
            exchange.close()


@dataclass(frozen=True, slots=True)
class Chunked:
    """The upstream's reply, whole, but without its length."""

    async def apply(self, exchange: Exchange) -> None:
        reply = await exchange.forward()
        await _send_chunk(exchange, reply, len(reply.body))
        await exchange.send_raw(b"\r\n0\r\n\r\n")


async def _send_chunk(exchange: Exchange, reply: Reply, upto: int) -> None:
    """The head, and the first bytes of the only chunk."""
    await exchange.send_raw(_chunked_head(reply))
    await exchange.send_raw(f"{len(reply.body):x}\r\n".encode() + reply.body[:upto])


def _chunked_head(reply: Reply) -> bytes:
    """The head without the body's length."""
    headers = {k: v for k, v in reply.headers.items() if k != "content-length"}
    return head(f"HTTP/1.1 {reply.status} Proxied", headers | {"transfer-encoding": "chunked"})


@dataclass(frozen=True, slots=True)
class Flip:
    """One bit of the body is wrong; length and headers are right."""

    at: int

    async def apply(self, exchange: Exchange) -> None:
        reply = await exchange.forward()
        body = bytearray(reply.body)
        body[self.at] ^= 1
        reply.body = bytes(body)
        await exchange.send(reply)


@dataclass(frozen=True, slots=True)
class Replace:
    """The upstream's head with another body and its length."""

    body: bytes

    async def apply(self, exchange: Exchange) -> None:
        reply = await exchange.forward()
        reply.body = self.body
        await exchange.send(reply)


@dataclass(frozen=True, slots=True)
class Stall:
    """Silence until the proxy releases it, after ``upto`` bytes of the body; None: no head."""

    upto: int | None = None

    async def apply(self, exchange: Exchange) -> None:
        reply = await exchange.forward()
        if self.upto is not None:
            await exchange.send(reply, upto=self.upto)
        await exchange.released.wait()
        exchange.close()


@dataclass(frozen=True, slots=True)
class StallUpload:
    """The request's body is never read."""

    async def apply(self, exchange: Exchange) -> None:
        await exchange.released.wait()
        exchange.close()


@dataclass(frozen=True, slots=True)
class Trickle:
    """The body in small pieces with a pause after each, so that no read ever times out."""

    piece_bytes: int
    pause_s: float

    async def apply(self, exchange: Exchange) -> None:
        reply = await exchange.forward()
        await exchange.send(reply, upto=0)
        for start in range(0, len(reply.body), self.piece_bytes):
            await exchange.send_raw(reply.body[start : start + self.piece_bytes])
            await asyncio.sleep(self.pause_s)


@dataclass(frozen=True, slots=True)
class LoseReply:
    """The upstream did what was asked, but nobody hears of it."""

    async def apply(self, exchange: Exchange) -> None:
        await exchange.forward()
        exchange.close()


@dataclass(frozen=True, slots=True)
class Reset:
    """The connection breaks before the upstream is asked."""

    async def apply(self, exchange: Exchange) -> None:
        await exchange.read_body()
        exchange.reset()


@dataclass(frozen=True, slots=True)
class Announce:
    """The upstream's reply under a forged Content-Length."""

    nbytes: int

    async def apply(self, exchange: Exchange) -> None:
        await exchange.send(await exchange.forward(), length=self.nbytes)


@dataclass(frozen=True, slots=True)
class Endless:
    """The upstream's head without its length, and a body that goes on until nobody listens."""

    piece: bytes = bytes(65536)

    async def apply(self, exchange: Exchange) -> None:
        await exchange.send_raw(_chunked_head(await exchange.forward()))
        while True:  # until the client's end of the connection is closed
            await exchange.send_raw(f"{len(self.piece):x}\r\n".encode() + self.piece + b"\r\n")


@dataclass(frozen=True, slots=True)
class ForgetCondition:
    """The upstream never hears of ``If-None-Match``, as behind a server that does not know it.

    Only in front of one that checks no signatures, since clients sign the header.
    """

    async def apply(self, exchange: Exchange) -> None:
        asked = exchange.request
        headers = {k: v for k, v in asked.headers.items() if k != "if-none-match"}
        exchange.request = replace(asked, headers=headers)
        await exchange.send(await exchange.forward())
