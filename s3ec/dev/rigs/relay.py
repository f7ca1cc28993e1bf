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
import multiprocessing
import os
import queue
import socket
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from urllib.parse import urlsplit

from s3ec.testing.server import HOST

_CHUNK_BYTES = 2**20  # the most that a pipe of an ordinary user holds
Pieces = queue.SimpleQueue[tuple[float, bytes]]


@contextlib.contextmanager
def relayed(upstream_url: str, latency_s: float) -> Iterator[str]:
    """Yields the URL of a relay to ``http://HOST:PORT`` that adds this round trip."""
    parts = urlsplit(upstream_url)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    arguments = (theirs, (parts.hostname, parts.port), latency_s)
    process = context.Process(target=_serve, args=arguments, daemon=True)
    process.start()
    theirs.close()  # or the end of the process would not be one of the pipe
    try:
        yield f"http://{HOST}:{ours.recv()}"
    finally:
        process.kill()
        process.join()


def _serve(pipe: Connection, upstream: tuple[str, int], latency_s: float) -> None:
    """A child's whole life: listen, and relay until it is ended."""
    listener = socket.create_server((HOST, 0), backlog=128)
    pipe.send(listener.getsockname()[1])
    while True:
        client, _ = listener.accept()
        try:
            server = socket.create_connection(upstream)
        except OSError:  # the client sees a connection that ends
            client.close()
            continue
        for one in (client, server):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        requests: Pieces = queue.SimpleQueue()
        for target, args in (
            (_take_requests, (client, requests, latency_s)),
            (_pass_requests, (server, requests)),
            (_pass_replies, (server, client)),
        ):
            threading.Thread(target=target, args=args, daemon=True).start()


def _take_requests(client: socket.socket, requests: Pieces, latency_s: float) -> None:
    """Note when each piece is due; an empty one is the end."""
    piece = b"-"
    while piece:
        try:
            piece = client.recv(_CHUNK_BYTES)
        except OSError:
            piece = b""
        requests.put((time.monotonic() + latency_s, piece))


def _pass_requests(server: socket.socket, requests: Pieces) -> None:
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
    with contextlib.suppress(OSError):  # one of the two hung up
        while count := os.splice(server.fileno(), into, _CHUNK_BYTES, flags=os.SPLICE_F_MOVE):
            while count:
                count -= os.splice(out, client.fileno(), count, flags=os.SPLICE_F_MOVE)
    os.close(out)
    os.close(into)
    for one in (server, client):
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)  # which ends the other threads
