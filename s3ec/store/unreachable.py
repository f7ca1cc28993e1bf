# SPDX-License-Identifier: Apache-2.0
"""Messages for a server that does not answer: the fault in plain words, and the setting to fix.

This is not in the table of errors, since commands import it and must not import the SDK.
"""

from __future__ import annotations

import socket
import ssl
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from s3ec.errors import AccessError, S3ECError, UnavailableError, causes_of

if TYPE_CHECKING:
    from s3ec.settings import Settings

_BY_PROXY = "through the proxy"  # see Way.by


def in_plain_words(exc: UnavailableError, settings: Settings) -> UnavailableError | None:
    """The same error with the server and the fix; None if it answered, or the message suffices."""
    if exc.status:
        return None
    if _BY_PROXY in str(exc):
        return UnavailableError(f"{exc}; {mend_endpoint(settings, exc)}")
    for cause in causes_of(exc):
        if isinstance(cause, ConnectionRefusedError | socket.gaierror):
            where = settings.endpoint_url or str(settings.corpus)
            is_refused = isinstance(cause, ConnectionRefusedError)
            said = "connection refused" if is_refused else cause.strerror
            return UnavailableError(f"{where}: {said}; {mend_endpoint(settings, exc)}")
    return None


def mend_endpoint(settings: Settings, exc: S3ECError) -> str:
    """The fix if no server answers as S3 does."""
    where = settings.endpoint_url or "AWS"
    causes = list(causes_of(exc))
    if _BY_PROXY in str(exc):
        return "start the proxy, or correct HTTP_PROXY, HTTPS_PROXY, ALL_PROXY or NO_PROXY"
    if isinstance(exc, AccessError) and exc.code == "CertificateNotTrusted":
        return "name the authority's PEM file in `ca_bundle`"
    if any(isinstance(cause, ssl.SSLError) for cause in causes):
        return "does the server speak TLS there? if not, http:// in `endpoint_url` and `allow_http`"
    if any(isinstance(cause, ConnectionRefusedError) for cause in causes):
        return f"nothing listens at {where}: start the server, or correct `endpoint_url`"
    if any(isinstance(cause, socket.gaierror) for cause in causes):
        if settings.path_style is False:
            name = f"{settings.bucket}.{urlsplit(where).hostname}"
            return f"the host name {name} is unknown: set `addressing_style` = `path`, or the DNS"
        return "the host name is unknown: correct `endpoint_url` or `region`, or the DNS"
    return "correct `endpoint_url`, or open the way (firewall, proxy, VPC endpoint)"
