# SPDX-License-Identifier: Apache-2.0
"""A bucket of any size that exists as numbers only: a server makes its listing up page by page."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import islice
from urllib.parse import parse_qs, urlsplit

from s3ec.identity import OBJECT_SUFFIX
from tests.support.serving import running

_PAGE = 1000
_DIGITS = 64


class Pages:
    """ListObjectsV2 of ``objects/`` and nothing else; a context manager.

    Entry i of n has the hash i * 2**256 / n, so that names rise with i and a page is made from
    where it begins. Each hundredth one is followed by what is none of ours: a 0-byte object of an
    entry's name, a marker of a folder, and a foreign file.

    Attributes:
        asked: Where each page was to start, in order.
        breaks: Every so many pages, one is not given: an error, or the end of the connection.
        broken: How often that was.
    """

    def __init__(self, prefix: str, entries: int, *, folders: int = 256, breaks: int = 0) -> None:
        self.prefix, self.entries = prefix, entries
        self._step = 16**_DIGITS // entries * folders // 256
        self._last_folder = int(self.name(entries - 1)[:2], 16)
        self.breaks, self.broken = breaks, 0
        self.asked: list[str] = []
        self._lock = threading.Lock()
        pages = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                pages.answer(self)

            def log_message(self, format: str, *args: object) -> None:
                """Nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._running = running(self._server)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    @property
    def junk(self) -> int:
        """Objects that are no entries."""
        return 3 * -(-self.entries // 100)

    def __enter__(self) -> Pages:
        self._running.__enter__()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._running.__exit__(None, None, None)

    def name(self, number: int) -> str:
        """Of one entry, below the prefix."""
        digest = f"{number * self._step:064x}"
        return f"{digest[:2]}/{digest}{OBJECT_SUFFIX}"

    def _group(self, number: int) -> list[tuple[str, int]]:
        """One entry with its junk: names and sizes, in order."""
        name = self.name(number)
        if number % 100:
            return [(name, 1000)]
        stem = name[: -len(OBJECT_SUFFIX)]
        twin = f"{stem[:-1]}{'8' if stem[-1] != '8' else '9'}{OBJECT_SUFFIX}"
        return sorted([(name, 1000), (twin, 0), (f"{stem}.txt", 5), (f"{stem}/", 0)])

    def _after(self, after: str, prefix: str) -> Iterator[tuple[str, int]]:
        """What is listed after a name; both whole."""
        start = max(after, prefix)[len(self.prefix) :]
        digits = (start[:2] + start[3:] if start[2:3] == "/" else "")[2:66]
        digits = (re.match(r"[0-9a-f]*", digits) or [""])[0] or f"{start[:2] or '00'}"
        first = max(0, int(digits.ljust(_DIGITS, "0"), 16) // self._step - 1)
        for number in range(first, self.entries):
            for below, nbytes in self._group(number):
                name = self.prefix + below
                if name > after and name.startswith(prefix):
                    yield name, nbytes
                elif name > after and name > prefix:
                    return

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        query = {name: values[0] for name, values in parse_qs(urlsplit(handler.path).query).items()}
        prefix = query.get("prefix", "")
        if "delimiter" in query:
            self._send(handler, 200, self._folders(prefix))
            return
        after = query.get("continuation-token") or query.get("start-after", "")
        with self._lock:
            self.asked.append(after)
            breaks = bool(self.breaks) and len(self.asked) % self.breaks == 0
            self.broken += breaks
        if breaks:
            if self.broken % 2:
                self._send(handler, 503, "<Error><Code>SlowDown</Code></Error>")
            else:
                handler.close_connection = True
            return
        self._send(handler, 200, self._page(prefix, after))

    def _page(self, prefix: str, after: str) -> str:
        found = list(islice(self._after(after, prefix), _PAGE + 1))
        more = len(found) > _PAGE
        listed = "".join(
            f"<Contents><Key>{name}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
            f"<ETag>&quot;0&quot;</ETag><Size>{nbytes}</Size></Contents>"
            for name, nbytes in found[:_PAGE]
        )
        last = found[_PAGE - 1][0] if more else ""
        token = f"<NextContinuationToken>{last}</NextContinuationToken>" if more else ""
        return (
            f"<ListBucketResult><IsTruncated>{str(more).lower()}</IsTruncated>{token}{listed}"
            "</ListBucketResult>"
        )

    def _folders(self, prefix: str) -> str:
        listed = "".join(
            f"<CommonPrefixes><Prefix>{prefix}{number:02x}/</Prefix></CommonPrefixes>"
            for number in range(self._last_folder + 1)
        )
        return f"<ListBucketResult><IsTruncated>false</IsTruncated>{listed}</ListBucketResult>"

    @staticmethod
    def _send(handler: BaseHTTPRequestHandler, status: int, body: str) -> None:
        sent = f'<?xml version="1.0" encoding="UTF-8"?>{body}'.encode()
        handler.send_response(status)
        handler.send_header("Content-Type", "application/xml")
        handler.send_header("Content-Length", str(len(sent)))
        handler.end_headers()
        handler.wfile.write(sent)
