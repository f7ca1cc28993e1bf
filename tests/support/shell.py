# SPDX-License-Identifier: Apache-2.0
"""A shell that the blocks of a page are pasted into."""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

_PATIENCE_S = 600.0


class Shell:
    """One bash that blocks are pasted into; it ends at the first command that fails.

    Commands have the shell's own input, as when a user pastes: what reads it eats the next line.
    """

    def __init__(self, folder: Path, env: dict[str, str]) -> None:
        self._bash = subprocess.Popen(
            ["bash", "--norc", "--noprofile"],
            cwd=folder,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._number = 0
        assert self._bash.stdin is not None
        # As a command in it would see it that has no input of its own.
        self.input = os.readlink(f"/proc/{self._bash.pid}/fd/0")
        self.paste("set -euo pipefail")

    def paste(self, block: str) -> str:
        """Run one block; returns what it printed.

        Raises:
            AssertionError: A command failed; with all that the block printed.
        """
        assert self._bash.stdin is not None
        assert self._bash.stdout is not None
        self._number += 1
        end = f"-- end of block {self._number} --"
        printed = []
        with self._patience():
            self._bash.stdin.write(f"{block}\necho '{end}'\n")
            self._bash.stdin.flush()
            for line in self._bash.stdout:
                if line.strip() == end:
                    return "".join(printed)
                printed.append(line)
        raise AssertionError(f"the shell ended in\n{block}\nwhich printed\n{''.join(printed)}")

    def close(self) -> None:
        """End the shell."""
        with self._patience():
            self._bash.communicate()

    @contextlib.contextmanager
    def _patience(self) -> Iterator[None]:
        """Where a page waits for what never comes, the block that waits fails."""
        timer = threading.Timer(_PATIENCE_S, self._bash.terminate)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
