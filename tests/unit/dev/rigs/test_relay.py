# SPDX-License-Identifier: Apache-2.0
"""The delaying relay passes everything on; how late is looked at only from below."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from s3ec.dev.rigs.relay import Relay, RequestLog

LATENCY_S = 0.05
BIG = bytes(range(256)) * 40_000  # 10 MB, many times what a socket or a pipe holds


@contextmanager
def echo_server() -> Iterator[str]:
    """Answers what came when the client has said all."""

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                said = read_all(connection)
                connection.sendall(said)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(10)


def read_all(connection: socket.socket) -> bytes:
    pieces = []
    while piece := connection.recv(2**16):
        pieces.append(piece)
    return b"".join(pieces)


def say(url: str, text: bytes) -> bytes:
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname, parts.port), timeout=30) as connection:
        connection.sendall(text)
        connection.shutdown(socket.SHUT_WR)
        return read_all(connection)


def test_bytes_arrive_whole_in_both_directions_and_not_early() -> None:
    with echo_server() as server, Relay(server, LATENCY_S) as relay:
        started = time.monotonic()
        assert say(relay.url, b"hello") == b"hello"
        # Not a speed: less would mean that nothing was delayed.
        assert time.monotonic() - started >= LATENCY_S
        assert say(relay.url, BIG) == BIG


def test_connection_carries_no_more_than_its_pace_and_all_of_it() -> None:
    with echo_server() as server, Relay(server, 0.0, stream_bytes_per_s=40e6) as relay:
        started = time.monotonic()
        assert say(relay.url, BIG) == BIG
        # Again only from below: 10 MB at 40 MB/s, less what a late thread may make up for.
        assert time.monotonic() - started >= len(BIG) / 40e6 - 0.02


def test_connections_are_delayed_beside_one_another_and_not_in_a_row() -> None:
    with echo_server() as server, Relay(server, LATENCY_S) as relay:
        answers: list[bytes] = []
        threads = [
            threading.Thread(target=lambda n=n: answers.append(say(relay.url, b"%d" % n)))  # type: ignore[misc]
            for n in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert sorted(answers) == [b"%d" % n for n in range(8)]


def test_server_that_is_gone_ends_the_connection_and_not_the_relay() -> None:
    with echo_server() as server, Relay("http://127.0.0.1:1", LATENCY_S) as nowhere:
        for _ in range(2):
            with contextlib.suppress(OSError):  # or an orderly end, as it comes
                assert say(nowhere.url, b"a") == b""
        with Relay(server, LATENCY_S) as relay:
            assert say(relay.url, b"a") == b"a"


def test_relay_ends_with_its_block() -> None:
    with echo_server() as server, Relay(server, LATENCY_S) as relay:
        parts = urlsplit(relay.url)
    with socket.socket() as probe:
        assert probe.connect_ex((str(parts.hostname), int(parts.port or 0))) != 0


@pytest.mark.parametrize("step", [1, 3, 1000])
def test_log_holds_each_request_however_its_bytes_arrive(tmp_path: Path, step: int) -> None:
    said = (
        b"GET /a HTTP/1.1\r\nHost: x\r\n\r\n"
        b"PUT /b HTTP/1.1\r\nContent-Length: 24\r\n\r\nGET /no HTTP/1.1\r\n\r\n1234"
        b"GET /c HTTP/1.1\r\n\r\n"
    )
    with open(tmp_path / "log", "wb", buffering=0) as file:
        log = RequestLog(file.fileno())
        for start in range(0, len(said), step):
            log.feed(said[start : start + step])
    lines = (tmp_path / "log").read_text().splitlines()
    assert lines == ["GET /a HTTP/1.1", "PUT /b HTTP/1.1", "GET /c HTTP/1.1"]


def test_relay_writes_requests_down(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with echo_server() as server, Relay(server, 0.0, request_log=log) as relay:
        say(relay.url, b"GET /x HTTP/1.1\r\n\r\n")
    assert log.read_text() == "GET /x HTTP/1.1\n"
