# SPDX-License-Identifier: Apache-2.0
"""A bucket through aioboto3: BotocoreStore without threads, each request in the event loop.

An extra, ``pip install 's3ec[aioboto3]'``: aioboto3 pins an old botocore. It passes the contract
suite. Errors and pages of listings have no bound in size here. aiohttp sends a request once more
when its connection breaks before a reply, so a PUT whose reply was lost can conflict with itself.
Checked with aioboto3 15.5, aiobotocore 2.25 and aiohttp 3.14.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import aioboto3
import aiohttp
from aiobotocore.config import AioConfig
from aiobotocore.httpsession import AIOHTTPSession
from aiobotocore.session import get_session
from botocore.exceptions import HTTPClientError

from s3ec.settings import Settings
from s3ec.store.botocore_s3 import BotocoreStore, RequestSlot, length_and_part
from s3ec.store.concurrency import PIECE_BYTES, Extend, Pieces, Reply
from s3ec.store.credentials import ChainCredentials
from s3ec.store.s3_client import (
    Opened,
    chain_credentials,
    check_and_adapt,
    client_options,
    config_for,
    configured,
    way_to,
)
from s3ec.store.s3_errors import RedirectRefusedError, reading_answer


class Aioboto3Store(BotocoreStore):
    """The bucket of ``settings``; names are relative to its prefix. See base.Store.

    Limits, deadlines and errors are those of BotocoreStore.
    """

    def __init__(self, settings: Settings, *, patient: bool = False) -> None:
        super().__init__(settings, patient=patient)
        self._resources = contextlib.AsyncExitStack()

    async def _connect(self) -> Opened:
        settings = self._settings
        core = configured(get_session(), settings)
        credentials = chain_credentials(settings, patient=self._patient)
        core.get_component("credential_provider").providers.insert(0, _Provider(credentials))
        way = await asyncio.to_thread(way_to, settings)
        config = AioConfig(
            http_session_cls=StrictSession, proxies=way.proxies, **config_for(settings, core)
        )
        client = await self._resources.enter_async_context(
            aioboto3.Session(botocore_session=core).client(
                "s3", config=config, verify=way.roots, **client_options(settings)
            )
        )
        check_and_adapt(client, settings)
        return Opened(client, credentials, way)

    async def _disconnect(self, opened: Opened) -> None:
        await self._resources.aclose()

    async def _call(self, slot: RequestSlot, operation: str, **params: Any) -> Any:
        call = getattr(slot.opened.client, operation)
        with reading_answer(), _as_botocores():
            return await call(**{"Bucket": self._settings.bucket, **params})

    def _reply(self, slot: RequestSlot, response: Any) -> Reply:
        return Aioboto3Reply(response)


class Aioboto3Reply:
    """What get_object of aioboto3 returned."""

    def __init__(self, response: Any) -> None:
        self.nbytes, self.is_part = length_and_part(response)
        self._body = response["Body"]

    async def read(self, max_bytes: int, what: str, extend: Extend) -> bytes:
        with _as_botocores():
            if self.nbytes is not None:
                return bytes(await self._body.read())
            pieces = Pieces(max_bytes, what, extend)  # it comes in chunks
            while piece := await self._body.read(PIECE_BYTES):
                pieces.add(piece)
            return pieces.whole()

    def close(self) -> None:
        self._body.close()


@contextlib.contextmanager
def _as_botocores() -> Iterator[None]:
    """aiobotocore lets some errors of aiohttp out as they are; here they become botocore's."""
    try:
        yield
    except aiohttp.ClientError as exc:
        raise HTTPClientError(error=exc) from exc


class _Provider:
    """What aiobotocore calls a credential provider: the first one that loads something wins."""

    METHOD = ChainCredentials.method
    CANONICAL_NAME = None

    def __init__(self, credentials: ChainCredentials) -> None:
        self._credentials = _AioCredentials(credentials)

    async def load(self) -> _AioCredentials:
        return self._credentials


class _AioCredentials:
    """ChainCredentials where aiobotocore wants credentials."""

    method = ChainCredentials.method

    def __init__(self, credentials: ChainCredentials) -> None:
        self.get_frozen_credentials = credentials.get_frozen_credentials

    async def get_account_id(self) -> None:
        """For endpoints that are made of an account's id; S3 has none."""

    def get_deferred_property(self, name: str) -> Any:
        """As get_account_id, at set-up."""
        return lambda: None


class StrictSession(AIOHTTPSession):  # type: ignore[misc]
    """Checks host names, and follows no redirect: a session token goes nowhere else.

    aiobotocore leaves both to others, and aiohttp does neither. botocore switches the check of the
    certificate's host name off, since its own transport makes that check itself.
    """

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
            trace.freeze()
            session.trace_configs.append(trace)
        return session


async def _refuse(
    session: aiohttp.ClientSession,
    context: SimpleNamespace,
    params: aiohttp.TraceRequestRedirectParams,
) -> None:
    """End a request whose answer leads elsewhere; S3's own 301 has no address to go to."""
    answer: Any = params.response
    if "Location" in answer.headers or "URI" in answer.headers:
        answer.close()
        region = answer.headers.get("x-amz-bucket-region", "")
        raise RedirectRefusedError(answer.status, region)
