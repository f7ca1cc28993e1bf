# SPDX-License-Identifier: Apache-2.0
"""Single requests by the SDK that the Store protocol does not have. Maps the SDK's errors.

This is the doctor's only module that imports an SDK. The import takes longer than most checks, so
the first check that needs it makes it.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from functools import cached_property, partial
from typing import Any
from urllib.parse import urlsplit

from botocore.awsrequest import AWSRequest, AWSResponse
from botocore.config import Config

from s3ec.runtime import call_within
from s3ec.settings import Settings
from s3ec.store.s3_client import (
    BoundedSession,
    Way,
    addressing_style,
    client_options,
    new_session,
    quiet_sdk_logs,
    way_to,
)
from s3ec.store.s3_errors import boundary, reading_answer

MOST_PAGES = 50
"""The most pages of a listing, in case it never ends."""


@dataclass(frozen=True, slots=True)
class ServerProbe:
    """The response to a request without credentials.

    Attributes:
        url: The server's URL, scheme and host.
        server: The server's name for itself, or empty.
        skew_s: The server's clock minus ours; None if it does not say.
        is_s3: True if the response looks like S3's.
        region: Of the bucket; empty if the server does not say.
    """

    url: str
    server: str
    skew_s: float | None
    is_s3: bool
    region: str = ""


class S3Probe:
    """Sends single requests to one bucket, without retries. They block; one thread at a time.

    Each request may take ``read_timeout_s`` of the settings in total: the SDK has only timeouts per
    phase, so name lookup, credentials and a trickling response have none. The time to make a client
    is not counted, since it is this machine's.

    All methods raise AccessError if they are refused, and UnavailableError if no server answers.
    """

    def __init__(self, settings: Settings) -> None:
        quiet_sdk_logs()
        self._settings = settings
        self._session = new_session(settings)

    def credentials_method(self) -> str | None:
        """The SDK's name for the source of its credentials, or None. Never their values.

        An AccessError is a source that is unusable: half a key pair, a token that expired.
        """

        def look() -> str | None:
            found = self._session.get_credentials()
            if found is None:
                return None
            found.get_frozen_credentials()  # fetches them if necessary
            return str(found.method)

        with self._boundary("credentials"):
            return call_within(self._settings.read_timeout_s, look)

    def probe_server(self) -> ServerProbe:
        """Send a request without credentials. Any response, even a refusal, proves a server."""
        way = self._way
        url = f"{way.address.url}/?list-type=2&max-keys=1"
        before_s = time.time()
        with self._boundary("GET"):
            headers = self._send(AWSRequest("GET", url).prepare()).headers
        skew_s = None
        with suppress(
            ValueError, TypeError, IndexError, OverflowError, OSError
        ):  # a server may say anything else
            server_s = parsedate_to_datetime(headers.get("date", "")).timestamp()
            skew_s = server_s - (before_s + time.time()) / 2
        parts = urlsplit(url)
        return ServerProbe(
            url=f"{parts.scheme}://{parts.netloc}",
            server=headers.get("server", ""),
            skew_s=skew_s,
            is_s3="html" not in headers.get("content-type", "") or "x-amz-request-id" in headers,
            region=headers.get("x-amz-bucket-region", ""),
        )

    def pages(self, prefix: str) -> list[list[str]]:
        """List the names that begin with ``prefix``, one per page."""
        root, pages = self._key(""), list[list[str]]()
        more = {"Prefix": root + prefix}
        while len(pages) < MOST_PAGES:
            with self._boundary("list page by page"):
                reply = self._ask(self._client, "list_objects_v2", MaxKeys=1, **more)
                with reading_answer():
                    keys = [entry["Key"] for entry in reply.get("Contents", [])]
            pages.append([key.removeprefix(root) for key in keys])
            if "NextContinuationToken" not in reply:
                break
            more["ContinuationToken"] = reply["NextContinuationToken"]
        return pages

    def encryption_of(self, name: str) -> str | None:
        """The encryption of an object, as the server reports it; None if it reports none."""
        with self._boundary("HEAD"):
            reply = self._ask(self._client, "head_object", Key=self._key(name))
        said: str | None = reply.get("ServerSideEncryption")
        return said

    def close(self) -> None:
        """Close all connections."""
        for name in ("_client", "_transport"):
            if name in vars(self):
                getattr(self, name).close()

    def _boundary(self, what: str) -> AbstractContextManager[None]:
        return boundary(what, lambda: self._settings.region or "", self._by)

    def _by(self) -> str:
        way = vars(self).get("_way")  # not made here, since its making may have failed
        return way.by if way else ""

    @cached_property
    def _way(self) -> Way:
        return way_to(self._settings)

    @cached_property
    def _transport(self) -> BoundedSession:
        return BoundedSession(self._way, self._settings)

    def _ask(self, client: Any, operation: str, **params: Any) -> Any:
        """The SDK's response to a request to the bucket."""
        with reading_answer():
            return getattr(client, operation)(Bucket=self._settings.bucket, **params)

    def _send(self, request: Any, **_: Any) -> AWSResponse:
        """Send a prepared request of the SDK, within the time for one request."""
        return call_within(self._settings.read_timeout_s, partial(self._transport.send, request))

    def _key(self, name: str) -> str:
        return f"{self._settings.prefix}/{name}" if self._settings.prefix else name

    @cached_property
    def _client(self) -> Any:
        style = {"addressing_style": addressing_style(self._settings)}
        config = Config(retries={"total_max_attempts": 1}, s3=style)
        client = self._session.create_client("s3", config=config, **client_options(self._settings))
        client.meta.events.register("before-send.s3", self._send)
        return client
