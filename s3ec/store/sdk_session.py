# SPDX-License-Identifier: Apache-2.0
"""How the SDK's requests travel: bounded in time and size, and ended when nobody waits for them.

botocore calls a blocking transport, which ends by itself only after a silence, and reads an error
or a page of a listing to its end, however far that is. Here a request can be broken off from
another thread, by shutting its socket down, and such answers have a bound. Redirects are not
followed, and certificates checked, by botocore's own transport below. Read with botocore 1.40 and
1.44, urllib3 2.8.
"""

from __future__ import annotations

import codecs
import contextlib
import socket
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from botocore.awsrequest import (
    AWSHTTPConnection,
    AWSHTTPConnectionPool,
    AWSHTTPSConnection,
    AWSHTTPSConnectionPool,
    AWSResponse,
)
from botocore.exceptions import ConnectionClosedError, HTTPClientError
from botocore.httpsession import URLLib3Session
from botocore.response import StreamingBody
from urllib3.exceptions import HTTPError

from s3ec.store.replies import PIECE_BYTES

T = TypeVar("T")

ANSWER_BYTES = 8 * 2**20
"""Longest error or page of a listing: 1000 names of 1 KiB, each byte of which may take five."""

# urllib3 needs it for each connection. A child that is forked while a thread of its parent imports
# it would never find it.
codecs.lookup("idna")

_BODILESS = frozenset({204, 304})
_of_thread = threading.local()


class Exchange:
    """One operation's request and answer, made by one thread at a time, ended by any.

    Attributes:
        credentials: What signs the request, the SDK's tuple.
        is_aborted: Whether nobody waits for it any more.
    """

    def __init__(self) -> None:
        self.credentials: Any = None
        self.is_aborted = False
        self._lock = threading.Lock()
        self._is_running = False
        self._connection: Any = None
        self._socket: socket.socket | None = None

    def run(self, function: Callable[[], T]) -> T:
        """Call it as the exchange of this thread: what it sends can be aborted.

        Raises:
            ConnectionClosedError: The SDK's; it was aborted before it began.
        """
        with self._lock:
            if self.is_aborted:
                raise ConnectionClosedError(endpoint_url="", error="given up")
            self._is_running = True
        _of_thread.exchange = self
        try:
            return function()
        finally:
            _of_thread.exchange = None
            with self._lock:
                self._is_running = False
                self._close_aborted()

    def abort(self) -> None:
        """Have the thread's next wait for the server end at once, in an error."""
        with self._lock:
            self.is_aborted = True
            if self._socket is not None:
                with contextlib.suppress(OSError):  # it is closed already
                    # Not SSLSocket's own, which also takes the TLS away from who reads.
                    socket.socket.shutdown(self._socket, socket.SHUT_RDWR)
            self._close_aborted()

    def _close_aborted(self) -> None:
        """Close the connection once no thread reads from it; under the lock."""
        if self.is_aborted and not self._is_running and self._connection is not None:
            self._connection.close()
            self._connection = self._socket = None

    def uses(self, connection: Any) -> None:
        """A connection works for this exchange from now on."""
        with self._lock:
            self._connection, self._socket = connection, connection.sock
        if self.is_aborted:
            self.abort()

    def is_done_with(self, connection: Any) -> None:
        """It is free for others, and must not be shut down for this one."""
        with self._lock:
            if self._connection is connection:
                self._connection = self._socket = None


class ThreadCredentials:
    """What the SDK's client signs with: the credentials of the exchange that its thread makes."""

    method = "s3ec"

    def get_frozen_credentials(self) -> Any:
        """Access key, secret key and token, the SDK's tuple."""
        return _of_thread.exchange.credentials

    def get_deferred_property(self, name: str) -> Callable[[], None]:
        """What the SDK asks for endpoints that are made of an account's id; S3 has none."""
        return lambda: None


class _Connection:
    """The part that both kinds of connection have in common."""

    sock: Any
    exchange: Exchange | None = None

    def connect(self) -> None:
        super().connect()  # type: ignore[misc]
        # For sending; the answer is waited for with the limit for silence again. A body goes out
        # as long as its deadline lets it, which then shuts the socket down.
        self.sock.settimeout(None)
        self._tell()

    def request(self, *args: Any, **kwargs: Any) -> None:
        self.exchange = getattr(_of_thread, "exchange", None)
        if self.sock is not None:
            self.sock.settimeout(None)
            self._tell()
        super().request(*args, **kwargs)  # type: ignore[misc]

    def _tell(self) -> None:
        exchange = getattr(_of_thread, "exchange", None)
        if exchange is not None:
            exchange.uses(self)


class _HttpConnection(_Connection, AWSHTTPConnection):  # type: ignore[misc]
    pass


class _HttpsConnection(_Connection, AWSHTTPSConnection):  # type: ignore[misc]
    pass


class _Pool:
    """The part that both kinds of pool have in common."""

    def _put_conn(self, conn: Any) -> None:
        if conn is not None and conn.exchange is not None:
            conn.exchange.is_done_with(conn)
            conn.exchange = None
        super()._put_conn(conn)  # type: ignore[misc]


class _HttpPool(_Pool, AWSHTTPConnectionPool):  # type: ignore[misc]
    ConnectionCls = _HttpConnection


class _HttpsPool(_Pool, AWSHTTPSConnectionPool):  # type: ignore[misc]
    ConnectionCls = _HttpsConnection


class _Whole:
    """The body of an answer that was read already."""

    def __init__(self, body: bytes) -> None:
        self._body = body

    def stream(self) -> list[bytes]:
        return [self._body]


class BoundedSession(URLLib3Session):  # type: ignore[misc]
    """botocore's transport, with an end to every request and every answer."""

    def __init__(self, **options: Any) -> None:
        """Make no connection yet.

        Args:
            options: Of botocore's transport.
        """
        super().__init__(**options)
        # Its managers hold this very mapping.
        self._pool_classes_by_scheme.update(http=_HttpPool, https=_HttpsPool)

    def send(self, request: Any, **_: Any) -> AWSResponse:
        """Send a request that botocore has prepared; a handler of its event ``before-send``.

        Raises:
            HTTPClientError: The SDK's: no answer, or one that is too long.
        """
        is_object = request.stream_output
        request.stream_output = True  # or botocore would read all of it
        response = super().send(request)
        announced = response.headers.get("content-length")
        if announced is not None and not (announced.isascii() and announced.isdigit()):
            response.raw.close()
            raise HTTPClientError(error="the length of the answer is not a number")
        if is_object and response.status_code < 300:
            return response
        has_body = request.method != "HEAD" and response.status_code not in _BODILESS
        body = _read_answer(StreamingBody(response.raw, announced if has_body else None))
        return AWSResponse(response.url, response.status_code, response.headers, _Whole(body))


def read_piece(stream: StreamingBody, nbytes: int | None = None) -> bytes:
    """What comes next of a body, all of it without ``nbytes``.

    Raises:
        IncompleteReadError, ResponseStreamingError: The SDK's; it ended early.
        HTTPClientError: The SDK's, for any other fault.
    """
    try:
        piece: bytes = stream.read(nbytes)
    except HTTPError as exc:  # those that botocore knows are its own errors by now
        raise HTTPClientError(error=exc) from exc
    return piece


def _read_answer(stream: StreamingBody) -> bytes:
    parts: list[bytes] = []
    nbytes = 0
    try:
        while part := read_piece(stream, PIECE_BYTES):
            parts.append(part)
            nbytes += len(part)
            if nbytes > ANSWER_BYTES:
                raise HTTPClientError(error=f"answered with more than {ANSWER_BYTES} bytes")
    finally:
        stream.close()
    return b"".join(parts)
