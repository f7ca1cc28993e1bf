# SPDX-License-Identifier: Apache-2.0
"""A bucket through aioboto3: BotocoreStore without threads, each request in the event loop.

Optional, ``pip install aioboto3``: aioboto3 pins an old botocore. This store passes the contract
suite. Here errors and pages of listings have no size limit. Checked with aioboto3 15.5,
aiobotocore 2.25 and aiohttp 3.14.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import aioboto3
import aiohttp
from aiobotocore.config import AioConfig
from aiobotocore.credentials import AioCredentials
from aiobotocore.httpsession import AIOHTTPSession
from aiobotocore.session import get_session
from botocore.exceptions import (
    ClientError,
    ConnectionClosedError,
    EndpointConnectionError,
    HTTPClientError,
)

from s3ec.store.botocore_s3 import BotocoreStore, SdkSlot
from s3ec.store.s3_client import (
    Exchange,
    Opened,
    chain_credentials,
    check_and_adapt,
    client_options,
    config_for,
    configured,
    way_to,
)
from s3ec.store.s3_errors import reading_answer

_exchange: ContextVar[Exchange] = ContextVar("s3ec-exchange")


class Aioboto3Store(BotocoreStore):
    """The bucket of ``settings``; names are relative to its prefix. See base.Store.

    Limits, deadlines and errors are those of BotocoreStore.
    """

    async def _connect(self) -> Opened:
        settings = self._settings
        way = await asyncio.to_thread(way_to, settings)
        core = configured(get_session(), settings)
        core._credentials = _Credentials("", "")  # as set_credentials does
        config = AioConfig(
            http_session_cls=StrictSession, proxies=way.proxies, **config_for(settings, core)
        )
        making = aioboto3.Session(botocore_session=core).client(
            "s3", config=config, verify=way.roots, **client_options(settings)
        )
        client = await making.__aenter__()
        check_and_adapt(client, settings)
        return Opened(client, chain_credentials(settings, patient=self._patient), way)

    async def _disconnect(self, opened: Opened) -> None:
        await opened.client.close()

    async def _read(self, stream: Any, most: int | None) -> bytes:
        body = bytearray()
        with contextlib.closing(stream):
            if most is None:
                return bytes(await stream.read())
            while len(body) < most and (piece := await stream.read(most - len(body))):
                body += piece
        return bytes(body)

    async def _run(self, slot: SdkSlot, function: Callable[[], Any]) -> Any:
        """Await what a call of aiobotocore returns."""
        _exchange.set(slot.exchange)
        with reading_answer(), _as_botocores():
            return await function()


@contextlib.contextmanager
def _as_botocores() -> Iterator[None]:
    """Map errors of aiohttp that aiobotocore passes on, and unwrap the error of _refuse."""
    try:
        yield
    except aiohttp.ClientError as exc:
        raise HTTPClientError(error=exc) from exc
    except HTTPClientError as exc:
        if isinstance(refused := exc.kwargs.get("error"), ClientError):
            raise refused from None
        raise


class _Credentials(AioCredentials):  # type: ignore[misc]
    """The credentials of the task's exchange, with which aiobotocore's client signs."""

    async def get_frozen_credentials(self) -> Any:
        return _exchange.get().credentials


class StrictSession(AIOHTTPSession):  # type: ignore[misc]
    """Checks host names, and follows no redirect, so that no other host gets a session token.

    aiobotocore leaves both to aiohttp, which does neither. botocore switches the check of the
    certificate's host name off, since its own transport makes that check itself.

    A request on a connection that was dropped while idle is sent again.
    """

    async def send(self, request: Any) -> Any:
        exchange = _exchange.get()
        while True:
            exchange.is_reused = False
            try:
                return await super().send(request)
            except (ConnectionClosedError, EndpointConnectionError):
                # Each attempt uses up an idle connection, so the last one has a fresh one.
                if not exchange.is_reused:
                    raise
                request.reset_stream()

    def _get_ssl_context(self) -> ssl.SSLContext:
        context: ssl.SSLContext = super()._get_ssl_context()
        context.set_default_verify_paths()  # as BoundedSession
        context.check_hostname = True
        return context

    async def _get_session(self, proxy_url: str | None) -> aiohttp.ClientSession:
        session: aiohttp.ClientSession = await super()._get_session(proxy_url)
        if not session.trace_configs:
            trace = aiohttp.TraceConfig()
            trace.on_request_redirect.append(_refuse)
            trace.on_connection_reuseconn.append(_note_reused)
            trace.freeze()
            session.trace_configs.append(trace)
            session._retry_connection = False  # a retry would resume a body at its end, see send
        return session


async def _note_reused(*_: object) -> None:
    _exchange.get().is_reused = True


async def _refuse(
    session: aiohttp.ClientSession,
    context: SimpleNamespace,
    params: aiohttp.TraceRequestRedirectParams,
) -> None:
    """End a request whose response redirects it; S3's own 301 has no address to follow."""
    answer: Any = params.response
    if "Location" in answer.headers or "URI" in answer.headers:
        answer.close()
        told = {
            "Error": {"Region": answer.headers.get("x-amz-bucket-region")},
            "ResponseMetadata": {"HTTPStatusCode": answer.status},
        }
        raise ClientError(told, "GetObject")
