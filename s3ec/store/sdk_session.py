# SPDX-License-Identifier: Apache-2.0
"""How the SDK's requests travel: to the host that was asked for, and to no other.

Three things that aiobotocore leaves to others, and aiohttp does not do: botocore switches the check
of the certificate's host name off, since its own transport makes that check itself; a redirect is
followed with the session token among its headers; and an error or a page of a listing is read to
its end, however far that is. Checked with aiobotocore 2.25, aiohttp 3.14.
"""

from __future__ import annotations

import ssl
from types import SimpleNamespace
from typing import Any

import aiohttp
from aiobotocore.httpsession import AIOHTTPSession

from s3ec.store.sdk_errors import RedirectRefusedError

# A page of a listing: 1000 names of 1 KiB, each byte of which may take five in XML.
_ANSWER_BYTES = 8 * 2**20


class _BoundedResponse(aiohttp.ClientResponse):
    """Whose body is refused where it is too long for an answer; objects are read in pieces."""

    async def read(self) -> bytes:
        if self._body is None:
            parts, nbytes = [], 0
            async for part in self.content.iter_any():
                parts.append(part)
                nbytes += len(part)
                if nbytes > _ANSWER_BYTES:
                    self.close()
                    raise aiohttp.ClientPayloadError(
                        f"answered with more than {_ANSWER_BYTES} bytes"
                    )
            self._body = b"".join(parts)
        return self._body


class StrictSession(AIOHTTPSession):  # type: ignore[misc]
    """Checks host names, bounds answers, follows no redirect: a signature holds nowhere else."""

    def _get_ssl_context(self) -> ssl.SSLContext:
        context: ssl.SSLContext = super()._get_ssl_context()
        context.check_hostname = True
        return context

    async def _get_session(self, proxy_url: str | None) -> aiohttp.ClientSession:
        session: aiohttp.ClientSession = await super()._get_session(proxy_url)
        if not session.trace_configs:
            trace = aiohttp.TraceConfig()
            trace.on_request_redirect.append(_refuse)
            trace.freeze()
            session.trace_configs.append(trace)
            session._response_class = _BoundedResponse
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
        raise RedirectRefusedError(f"{answer.status}")
