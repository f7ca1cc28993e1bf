# SPDX-License-Identifier: Apache-2.0
"""Single requests by the SDK, for what the Store protocol does not have. Maps the SDK's errors.

This is the doctor's only module that imports an SDK. The import takes longer than most checks, so
it is left to the first check that needs it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from urllib.parse import urlsplit

from botocore import UNSIGNED
from botocore.config import Config
from botocore.exceptions import ClientError
from botocore.parsers import ResponseParserError

from s3ec.settings import Settings
from s3ec.store.s3_client import (
    BoundedSession,
    Way,
    addressing_style,
    client_options,
    encryption,
    new_session,
    quiet_sdk_logs,
    timeouts,
    way_to,
)
from s3ec.store.s3_errors import boundary, reading_answer, unix_s

# A CRC32 that no body of ours has.
_WRONG_CRC = "AAAAAA=="
# Pages of one key that are followed; a listing that goes round in circles ends here.
_MOST_PAGES = 50


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
    """Sends single requests to one bucket, without retries. They block; any thread may call."""

    BODY = b"s3ec doctor"
    """The content of every object that is written."""

    def __init__(self, settings: Settings) -> None:
        quiet_sdk_logs()
        self._settings = settings
        # Sessions and the making of clients are for one thread at a time; clients are for all.
        self._lock = threading.RLock()
        self._session: Any = None
        self._clients: dict[tuple[str, str], Any] = {}

    def credentials_method(self) -> str | None:
        """The SDK's name for the source of its credentials, or None. Never their values.

        Raises:
            AccessError: A source is there but unusable: unknown profile, half a key pair, a
                token that cannot be exchanged.
            UnavailableError: A source did not answer.
        """
        with self._boundary("credentials"), self._lock:
            found = self._signing_session().get_credentials()
            if found is None:
                return None
            found.get_frozen_credentials()  # where they are fetched, if they have to be
            return str(found.method)

    def probe_server(self) -> ServerProbe:
        """Send a request without credentials. Any answer, even a refusal, shows a server is there.

        Raises:
            UnavailableError: Nobody is.
        """
        sent: list[str] = []
        client = self._unsigned_client()
        client.meta.events.register("before-send.s3", lambda request, **_: sent.append(request.url))
        before_s = time.time()
        with self._boundary("GET"):
            try:
                reply = self._ask(client.list_objects_v2, MaxKeys=1)
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

    def list_one(self, *, style: str) -> None:
        """List one key with ``path`` or ``virtual`` style.

        Raises:
            AccessError: Refused, also where the style leads to another bucket.
            UnavailableError: That host name leads nowhere.
        """
        with self._boundary(f"list in {style} style"):
            self._ask(self._client(style=style).list_objects_v2, Prefix=self._key(""), MaxKeys=1)

    def pages(self, prefix: str) -> list[list[str]]:
        """List the names that begin with ``prefix``, one to a page, 50 pages at most.

        Raises:
            AccessError: Refused.
            UnavailableError: Not answered.
        """
        root, pages = self._key(""), list[list[str]]()
        more: dict[str, str] = {}
        while len(pages) < _MOST_PAGES:
            with self._boundary("list page by page"):
                reply = self._ask(
                    self._client().list_objects_v2, Prefix=root + prefix, MaxKeys=1, **more
                )
                with reading_answer():
                    keys = [entry["Key"] for entry in reply.get("Contents", [])]
            pages.append([key.removeprefix(root) for key in keys])
            if "NextContinuationToken" not in reply:
                break
            more = {"ContinuationToken": reply["NextContinuationToken"]}
        return pages

    def put(self, name: str, *, sse: str | None = None, wrong_crc: bool = False) -> str | None:
        """Write a small object, with the CRC that the SDK adds where supported.

        Args:
            sse: Encryption to ask for; None for that of the settings, ``none`` for none.
            wrong_crc: Send a CRC that does not fit; a server that checks refuses it.

        Returns:
            Encryption that the server says it used, or None.

        Raises:
            AccessError: Refused.
            UnavailableError: Not answered, or not implemented (501).
        """
        headers = encryption(self._settings, sse)
        if wrong_crc:
            headers["ChecksumCRC32"] = _WRONG_CRC
        else:
            headers["ChecksumAlgorithm"] = "CRC32"
        with self._boundary("PUT"):
            reply = self._ask(
                self._client().put_object, Key=self._key(name), Body=self.BODY, **headers
            )
        used: str | None = reply.get("ServerSideEncryption")
        return used

    def put_bare(self, name: str) -> None:
        """Write a small object without a CRC, for servers that refuse one.

        Raises:
            AccessError: Refused.
            UnavailableError: Not answered.
        """
        with self._boundary("PUT"):
            put_object = self._client(checksums="when_required").put_object
            self._ask(put_object, Key=self._key(name), Body=self.BODY)

    def stored_crc(self, name: str) -> str | None:
        """The CRC that the server returns with an object, None if it kept none.

        Raises:
            AccessError: Refused.
            UnavailableError: Not answered.
        """
        with self._boundary("GET"):
            reply = self._ask(
                self._client().get_object, Key=self._key(name), ChecksumMode="ENABLED"
            )
            reply["Body"].read()
        crc: str | None = reply.get("ChecksumCRC32")
        return crc

    def delete(self, name: str) -> None:
        """Remove an object.

        Raises:
            AccessError: Refused.
            UnavailableError: Not answered.
        """
        with self._boundary("DELETE"):
            self._ask(self._client().delete_object, Key=self._key(name))

    def _boundary(self, what: str) -> AbstractContextManager[None]:
        return boundary(what, lambda: self._settings.region or "", self._by)

    def _by(self) -> str:
        way = vars(self).get("_way")  # not made here: what failed may have been that
        return way.by if way else ""

    # Without the lock: who looks for credentials may hold it for long.
    @cached_property
    def _way(self) -> Way:
        return way_to(self._settings)

    @cached_property
    def _transport(self) -> BoundedSession:
        return BoundedSession(self._way, self._settings)

    def _ask(self, call: Callable[..., Any], **params: Any) -> Any:
        """The SDK's answer to a request about the bucket."""
        with reading_answer():
            return call(Bucket=self._settings.bucket, **params)

    def _key(self, name: str) -> str:
        return f"{self._settings.prefix}/{name}" if self._settings.prefix else name

    def _signing_session(self) -> Any:
        if self._session is None:
            self._session = new_session(self._settings)
        return self._session

    def _client(self, *, style: str | None = None, checksums: str = "when_supported") -> Any:
        kind = (style or addressing_style(self._settings), checksums)
        with self._lock:
            if kind not in self._clients:
                self._clients[kind] = self._new_client(self._signing_session(), *kind)
            return self._clients[kind]

    def _unsigned_client(self) -> Any:
        """Make a client that does not look for credentials, which may take long.

        It has a session of its own, since the other session is busy while it looks for them.
        """
        session = new_session(self._settings)
        session.set_credentials("nobody", "unused")
        client = self._new_client(
            session, addressing_style(self._settings), signature_version=UNSIGNED
        )
        with self._lock:
            self._clients["unsigned", ""] = client
        return client

    def _new_client(
        self, session: Any, style: str, checksums: str = "when_supported", **more: Any
    ) -> Any:
        config = self._config(
            s3={"addressing_style": style},
            request_checksum_calculation=checksums,
            response_checksum_validation=checksums,
            **more,
        )
        client = session.create_client("s3", config=config, **client_options(self._settings))
        client.meta.events.register("before-send.s3", self._transport.send)
        return client

    def close(self) -> None:
        """Close all connections."""
        # Without the lock: who looks for credentials may hold it for long.
        for client in list(self._clients.values()):
            client.close()
        if self._clients:
            self._transport.close()

    def _config(self, **more: Any) -> Config:
        return Config(retries={"total_max_attempts": 1}, **timeouts(self._settings), **more)
