# SPDX-License-Identifier: Apache-2.0
"""Processes of a benchmark's own, which do what they are told over a pipe."""

from __future__ import annotations

import contextlib
import multiprocessing
import re
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

_TIMEOUT_S = 180.0


class Child:
    """One process that runs ``work(pipe, *args)``; ends with the ``with`` block at the latest."""

    def __init__(self, work: Callable[..., None], *args: Any) -> None:
        """Start it.

        Args:
            work: A function of a module. Its end of the pipe raises EOFError when nobody wants
                anything of it any more; what it raises itself goes to stderr.
            args: Picklable.
        """
        # Not forked: threads of the SDK and of torch do not survive that.
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=work, args=(theirs, *args), daemon=True)
        self._process.start()
        theirs.close()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid or 0

    def tell(self, order: Any) -> None:
        """Send something; ``answer`` tells what came of it."""
        self._pipe.send(order)

    @property
    def has_answer(self) -> bool:
        """Whether ``answer`` would return at once."""
        return self._pipe.poll(0)

    def answer(self, timeout_s: float = _TIMEOUT_S) -> Any:
        """What it sent next.

        Raises:
            RuntimeError: The process ended, most likely of what it says on stderr, or hangs.
        """
        try:
            if not self._pipe.poll(timeout_s):
                raise RuntimeError(f"a process said nothing for {timeout_s:.0f} s")
            return self._pipe.recv()
        except EOFError as exc:
            raise RuntimeError("a process ended; it says why on stderr") from exc

    def close(self) -> None:
        """End the process."""
        self._pipe.close()  # which it takes for the end
        self._process.join(20)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def wait_for_end(pipe: Connection) -> None:
    """In a child: return when nobody wants anything of it any more."""
    with contextlib.suppress(EOFError, OSError):
        pipe.recv()


def anonymous_bytes() -> int:
    """Memory of this process that is no copy of a file, in use or swapped out.

    Mapped files are not in it, read or not: they are the page cache's. Exact, some 0.1 ms.

    Raises:
        OSError: This kernel does not tell.
    """
    return _kilobytes("/proc/self/smaps_rollup", "Anonymous", "Swap") * 1024


def anonymous_bytes_of(pid: int) -> int:
    """The same of another process of this user; some 20 us, and up to a MiB off.

    Raises:
        OSError: It ended, or this kernel does not tell.
    """
    return _kilobytes(f"/proc/{pid}/status", "RssAnon", "VmSwap") * 1024


def most_resident_bytes() -> int:
    """The most memory that this process had, mapped files included.

    Not getrusage's, which goes on from that of the process that started this one.
    """
    return _kilobytes("/proc/self/status", "VmHWM") * 1024


def _kilobytes(path: str, *fields: str) -> int:
    text = Path(path).read_text(encoding="ascii", errors="replace")
    found = re.findall(rf"^(?:{'|'.join(fields)}):\s+(\d+) kB$", text, re.MULTILINE)
    return sum(map(int, found))
