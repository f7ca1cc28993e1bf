# SPDX-License-Identifier: Apache-2.0
"""Starts, hears and kills the processes of children.py."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.support.waiting import eventually

_REPOSITORY = Path(__file__).parents[2]


class Herd:
    """Children of one parent; each is a process of its own on the same node.

    Attributes:
        said: All that they said, as (pid, words).
    """

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.said: list[tuple[int, str]] = []
        self._living: list[int] = []
        self._reader = threading.Thread(target=self._read, name="herd", daemon=True)
        self._reader.start()
        self._hear("ready", process.pid)

    @property
    def parent(self) -> int:
        """Who forks them."""
        return self._process.pid

    def start(self, command: str, **arguments: object) -> int:
        """Fork a child; it has not done anything yet."""
        assert self._process.stdin is not None
        before = len(self.said)
        self._process.stdin.write(json.dumps({"command": command, **arguments}) + "\n")
        self._process.stdin.flush()
        pid = int(self._hear("forked", self._process.pid, before).split()[1])
        self._living.append(pid)
        return pid

    def hear(self, pid: int, word: str) -> str:
        """Wait until this child has said something that starts so."""
        return self._hear(word, pid)

    def kill(self, *pids: int) -> None:
        """SIGKILL, and wait until they are gone, not even zombies."""
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        for pid in pids:
            self.wait(pid)

    def wait(self, pid: int) -> None:
        """Wait for its end."""
        eventually(lambda: not Path(f"/proc/{pid}").exists())
        self._living.remove(pid)

    def kill_all(self) -> None:
        """End what still lives, and forget what was said."""
        for pid in list(self._living):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            self.wait(pid)
        self.said.clear()

    def complaints(self) -> list[str]:
        """What they said that must not happen."""
        return [words for _, words in list(self.said) if words.startswith("bad")]

    def close(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        with self._process:
            pass
        self._reader.join()

    def _hear(self, word: str, pid: int, start: int = 0) -> str:
        found: list[str] = []

        def heard() -> bool:
            assert self._process.poll() is None, "the herd's parent ended"
            said = [words for who, words in self.said[start:] if who == pid]
            found[:] = [words for words in said if words.startswith(word)]
            assert found or not any(words.startswith("bad end") for words in said), "it ended badly"
            return bool(found)

        try:
            eventually(heard)
        except AssertionError as exc:
            raise AssertionError(f"{exc}: {word} of {self.said[-20:]}") from exc
        return found[0]

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            pid, _, words = line.strip().partition(" ")
            self.said.append((int(pid), words))


@contextmanager
def herding(env: Mapping[str, str]) -> Iterator[Herd]:
    """The parent process; it and all its children are gone afterwards."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.faults.children"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **env, "PYTHONPATH": str(_REPOSITORY)},
        start_new_session=True,
    )
    herd = Herd(process)
    try:
        yield herd
    finally:
        herd.close()
