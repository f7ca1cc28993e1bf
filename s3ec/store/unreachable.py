# SPDX-License-Identifier: Apache-2.0
"""A server that does not answer: what is wrong in plain words, and which setting mends it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from s3ec.errors import UnavailableError, causes_of

if TYPE_CHECKING:
    from s3ec.settings import Settings

# What an operating system and HTTP libraries say of a server that cannot be reached at all.
_NOBODY = re.compile(
    r"(connection refused|errno 111|connect call failed)|name or service not known|"
    r"nodename nor servname|name resolution|failed to lookup address|no address associated",
    re.IGNORECASE,
)
_PROXY = "through the proxy"
_QUERY = re.compile(r"(https?://[^\s\"'?]*)\?[^\s\"']*")


def in_plain_words(exc: UnavailableError, settings: Settings) -> UnavailableError | None:
    """The same error in plain words; None if the server answered, or its words will do.

    A library repeats the whole request, and does not say that the connection was refused.
    """
    found = _NOBODY.search(" ".join(str(cause) for cause in causes_of(exc)))
    if exc.status:
        return None
    if _PROXY in str(exc):
        return UnavailableError(f"{exc}; {mend_endpoint(settings, _PROXY)}")
    if found is None:
        text = _QUERY.sub(r"\1", str(exc))
        if text == str(exc):
            return None
        return UnavailableError(f"{text}; {mend_endpoint(settings, '')}")
    reason = "connection refused" if found[1] else "Name or service not known"
    where = settings.endpoint_url or str(settings.corpus)
    return UnavailableError(f"{where}: {reason}; {mend_endpoint(settings, reason)}")


def mend_endpoint(settings: Settings, reason: str) -> str:
    """What to do where nobody answers as S3 does.

    Args:
        reason: The operating system's or a library's words.
    """
    where = settings.endpoint_url or "AWS"
    if _PROXY in reason:
        return "start the proxy, or correct HTTP_PROXY, HTTPS_PROXY, ALL_PROXY or NO_PROXY"
    if "certificate" in reason:
        return "name the authority's PEM file in `ca_bundle`"
    if "SSL" in reason or "WRONG_VERSION" in reason:
        return "does the server speak TLS there? if not, http:// in `endpoint_url` and `allow_http`"
    if "refused" in reason:
        return f"nothing listens at {where}: start the server, or correct `endpoint_url`"
    if "Name" in reason or "resolution" in reason:
        if settings.path_style is False:
            host = urlsplit(where).hostname
            name = f"{settings.bucket}.{host}"
            return f"the host name {name} is unknown: set `addressing_style` = `path`, or the DNS"
        return "the host name is unknown: correct `endpoint_url` or `region`, or the DNS"
    return "correct `endpoint_url`, or open the way (firewall, proxy, VPC endpoint)"
