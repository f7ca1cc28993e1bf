# SPDX-License-Identifier: Apache-2.0
"""The delaying relay passes everything on; how late is looked at only from below."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from s3ec.dev.rigs.relay import Relay

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
