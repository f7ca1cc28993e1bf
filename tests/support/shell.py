# SPDX-License-Identifier: Apache-2.0
"""A shell that the blocks of a page are pasted into."""

from __future__ import annotations

import os
import subprocess
import threading
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
        # Where a page waits for what never comes, the block that waits fails.
        self._patience = threading.Timer(_PATIENCE_S, self._bash.terminate)
        self._patience.daemon = True
        self._patience.start()
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
        self._bash.stdin.write(f"{block}\necho '{end}'\n")
        self._bash.stdin.flush()
        printed = []
        for line in self._bash.stdout:
            if line.strip() == end:
                return "".join(printed)
            printed.append(line)
        raise AssertionError(f"the shell ended in\n{block}\nwhich printed\n{''.join(printed)}")

    def close(self) -> None:
        """End the shell."""
        self._bash.communicate()
        self._patience.cancel()
