# SPDX-License-Identifier: Apache-2.0
"""Single requests by the SDK, for what the Store protocol does not have. Maps the SDK's errors.

This is the doctor's only module that imports an SDK. The import takes longer than most checks, so
it is left to the first check that needs it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any
from urllib.parse import urlsplit

from botocore import UNSIGNED
from botocore.awsrequest import AWSResponse
from botocore.config import Config
from botocore.exceptions import ClientError
from botocore.parsers import ResponseParserError

from s3ec.runtime import call_within
from s3ec.settings import Settings
from s3ec.store.s3_client import (
    BoundedSession,
    Way,
    addressing_style,
    client_options,
    new_session,
    quiet_sdk_logs,
    timeouts,
    way_to,
)
from s3ec.store.s3_errors import boundary, reading_answer, unix_s

MOST_PAGES = 50
"""A listing that goes round in circles ends here."""


@dataclass(frozen=True, slots=True)
class ServerProbe:
    """The answer to a request without credentials.

    Attributes:
        url: Where it was sent, scheme and host.
        server: The server's name for itself, or empty.
        virtual_host: Whether the bucket stood in the host name.
        skew_s: The server's clock minus ours, None where it does not say.
        is_s3: Whether the answer looks like S3's.
        region: Of the bucket, or empty where the server does not say.
    """

    url: str
    server: str
    virtual_host: bool
    skew_s: float | None
    is_s3: bool
    region: str = ""


class S3Probe:
    """Sends single requests to one bucket, without retries. They block; one thread at a time.

    Each request may take ``read_timeout_s`` of the settings in all: the SDK has timeouts per phase
    and none over all, so name lookup, credentials and a trickling answer have none. What clients
    take to be made is not counted, since that is this machine's time.

    All methods raise AccessError where they are refused, and UnavailableError where nobody answers.
    """

    def __init__(self, settings: Settings) -> None:
        quiet_sdk_logs()
        self._settings = settings
        self._session = new_session(settings)
        self._clients: dict[str, Any] = {}

    def credentials_method(self) -> str | None:
        """The SDK's name for the source of its credentials, or None. Never their values.

        An AccessError is a source that is unusable: half a key pair, a token that expired.
        """

        def look() -> str | None:
            found = self._session.get_credentials()
            if found is None:
                return None
            found.get_frozen_credentials()  # where they are fetched, if they have to be
            return str(found.method)

        with self._boundary("credentials"):
            return call_within(self._settings.read_timeout_s, look)

    def probe_server(self) -> ServerProbe:
        """Send a request without credentials. Any answer, even a refusal, shows a server is there.

        It has a session of its own, since the SDK looks for credentials before it makes a client.
        """
        session = new_session(self._settings)
        session.set_credentials("nobody", "unused")
        style = addressing_style(self._settings)
        client = self._new_client(session, style, signature_version=UNSIGNED)
        self._clients["unsigned"] = client
        sent: list[str] = []
        client.meta.events.register_first(
            "before-send.s3", lambda request, **_: sent.append(request.url)
        )
        before_s = time.time()
        with self._boundary("GET"):
            try:
                reply = self._ask(client, "list_objects_v2", MaxKeys=1)
            except ClientError as exc:
                reply = exc.response
            except ResponseParserError:
                return self._server_probe(sent[0], {}, 0.0, is_s3=False)
        now_s = (before_s + time.time()) / 2
        headers = reply["ResponseMetadata"].get("HTTPHeaders", {})
        is_s3 = "html" not in headers.get("content-type", "") or "x-amz-request-id" in headers
        return self._server_probe(sent[0], headers, now_s, is_s3=is_s3)

    def _server_probe(
        self, url: str, headers: Mapping[str, str], now_s: float, *, is_s3: bool
    ) -> ServerProbe:
        parts = urlsplit(url)
        virtual = (parts.hostname or "").startswith(f"{self._settings.bucket.lower()}.")
        host = parts.netloc.partition(".")[2] if virtual else parts.netloc
        skew_s = unix_s(headers.get("date", ""))
        return ServerProbe(
            url=f"{parts.scheme}://{host}",
            server=headers.get("server", ""),
            virtual_host=virtual,
            skew_s=None if skew_s is None else skew_s - now_s,
            is_s3=is_s3,
            region=headers.get("x-amz-bucket-region", ""),
        )

    def pages(
        self, prefix: str, *, most: int = MOST_PAGES, style: str | None = None
    ) -> list[list[str]]:
        """List the names that begin with ``prefix``, one to a page.

        Args:
            prefix: Of the names.
            most: So many pages at most.
            style: ``path`` or ``virtual``; None for that of the settings.
        """
        root, pages = self._key(""), list[list[str]]()
        more = {"Prefix": root + prefix}
        while len(pages) < most:
            with self._boundary("list page by page"):
                reply = self._ask(self._client(style), "list_objects_v2", MaxKeys=1, **more)
                with reading_answer():
                    keys = [entry["Key"] for entry in reply.get("Contents", [])]
            pages.append([key.removeprefix(root) for key in keys])
            if "NextContinuationToken" not in reply:
                break
            more["ContinuationToken"] = reply["NextContinuationToken"]
        return pages

    def encryption_of(self, name: str) -> str | None:
        """How the server says that it has encrypted an object; None if it says nothing."""
        with self._boundary("HEAD"):
            reply = self._ask(self._client(), "head_object", Key=self._key(name))
        said: str | None = reply.get("ServerSideEncryption")
        return said

    def close(self) -> None:
        """Close all connections."""
        for client in self._clients.values():
            client.close()
        if "_transport" in vars(self):
            self._transport.close()

    def _boundary(self, what: str) -> AbstractContextManager[None]:
        return boundary(what, lambda: self._settings.region or "", self._by)

    def _by(self) -> str:
        way = vars(self).get("_way")  # not made here: what failed may have been that
        return way.by if way else ""

    @cached_property
    def _way(self) -> Way:
        return way_to(self._settings)

    @cached_property
    def _transport(self) -> BoundedSession:
        return BoundedSession(self._way, self._settings)

    def _ask(self, client: Any, operation: str, **params: Any) -> Any:
        """The SDK's answer to a request about the bucket."""
        with reading_answer():
            return getattr(client, operation)(Bucket=self._settings.bucket, **params)

    def _send(self, request: Any, **_: Any) -> AWSResponse:
        """Send what the SDK has prepared, within the time for one request."""
        return call_within(self._settings.read_timeout_s, partial(self._transport.send, request))

    def _key(self, name: str) -> str:
        return f"{self._settings.prefix}/{name}" if self._settings.prefix else name

    def _client(self, style: str | None = None) -> Any:
        style = style or addressing_style(self._settings)
        if style not in self._clients:
            self._clients[style] = self._new_client(self._session, style)
        return self._clients[style]

    def _new_client(self, session: Any, style: str, **more: Any) -> Any:
        config = Config(
            retries={"total_max_attempts": 1},
            s3={"addressing_style": style},
            **timeouts(self._settings),
            **more,
        )
        client = session.create_client("s3", config=config, **client_options(self._settings))
        client.meta.events.register("before-send.s3", self._send)
        return client
