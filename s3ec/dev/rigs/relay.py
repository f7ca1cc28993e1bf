# SPDX-License-Identifier: Apache-2.0
"""A TCP relay that makes a server on this machine seem far away, without making it slow.

What a client sends arrives later by the whole latency; replies pass through the kernel
(``splice``), untouched and not delayed. For requests and replies over open connections that is
a network with this round trip and no limit of bandwidth. Connections open at once.

It runs in a process of its own: its threads would otherwise share the interpreter's lock with
the client that is measured.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from urllib.parse import urlsplit

import s3ec
from s3ec.errors import UnavailableError
from s3ec.testing.server import HOST

_CHUNK_BYTES = 2**20  # the most that a pipe of an ordinary user holds


class Relay:
    """The relay as a child process; a context manager. It ends with this process at the latest."""

    def __init__(self, upstream_url: str, latency_s: float) -> None:
        """Prepare it.

        Args:
            upstream_url: ``http://HOST:PORT`` of the server.
            latency_s: Round trip to add.
        """
        parts = urlsplit(upstream_url)
        self._upstream = (parts.hostname or HOST, parts.port or 80)
        self._latency_s = latency_s
        self._process: subprocess.Popen[bytes] | None = None
        self.url = ""

    def __enter__(self) -> Relay:
        host, port = self._upstream
        root = str(Path(s3ec.__file__).parents[1])
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "s3ec.dev.rigs.relay"),
                *(host, str(port), str(self._latency_s)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={"PYTHONPATH": root, "PATH": os.defpath},
        )
        self.url = f"http://{HOST}:{_read_port(self._process)}"
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()


def _read_port(process: subprocess.Popen[bytes]) -> int:
    """The port that the child says it listens on.

    Raises:
        UnavailableError: It ended; its standard error says why.
    """
    line = process.stdout.readline() if process.stdout else b""
    if not line:
        raise UnavailableError("the relay did not start")
    return int(line)


def serve(upstream: tuple[str, int], latency_s: float) -> None:
    """Listen, say the port on stdout, and relay until stdin ends."""
    listener = socket.create_server((HOST, 0), backlog=128)
    sys.stdout.write(f"{listener.getsockname()[1]}\n")
    sys.stdout.flush()
    threading.Thread(target=_accept, args=(listener, upstream, latency_s), daemon=True).start()
    sys.stdin.buffer.read()  # whoever started us is gone


def _accept(listener: socket.socket, upstream: tuple[str, int], latency_s: float) -> None:
    while True:
        client, _ = listener.accept()
        try:
            server = socket.create_connection(upstream)
        except OSError:  # the client sees a connection that ends
            client.close()
            continue
        for one in (client, server):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        requests: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()
        for target, args in (
            (_take_requests, (client, requests, latency_s)),
            (_pass_requests, (server, requests)),
            (_pass_replies, (server, client)),
        ):
            threading.Thread(target=target, args=args, daemon=True).start()


def _take_requests(
    client: socket.socket, requests: queue.SimpleQueue[tuple[float, bytes]], latency_s: float
) -> None:
    """Note when each piece is due; an empty one is the end."""
    piece = b"-"
    while piece:
        try:
            piece = client.recv(_CHUNK_BYTES)
        except OSError:
            piece = b""
        requests.put((time.monotonic() + latency_s, piece))


def _pass_requests(server: socket.socket, requests: queue.SimpleQueue[tuple[float, bytes]]) -> None:
    with contextlib.suppress(OSError):
        while True:
            due_s, piece = requests.get()
            time.sleep(max(0.0, due_s - time.monotonic()))
            if not piece:
                break
            server.sendall(piece)
        server.shutdown(socket.SHUT_WR)


def _pass_replies(server: socket.socket, client: socket.socket) -> None:
    """Move bytes from socket to socket without taking them out of the kernel."""
    out, into = os.pipe()
    with contextlib.suppress(OSError):  # 64 KiB at a time, then
        fcntl.fcntl(into, fcntl.F_SETPIPE_SZ, _CHUNK_BYTES)
    try:
        with contextlib.suppress(OSError):  # one of the two hung up
            while count := os.splice(server.fileno(), into, _CHUNK_BYTES, flags=os.SPLICE_F_MOVE):
                while count:
                    count -= os.splice(out, client.fileno(), count, flags=os.SPLICE_F_MOVE)
    finally:
        os.close(out)
        os.close(into)
        for one in (server, client):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)  # which ends the other threads


if __name__ == "__main__":
    serve((sys.argv[1], int(sys.argv[2])), float(sys.argv[3]))
