# SPDX-License-Identifier: Apache-2.0
"""Which calls of the file system one thread makes, and which files are open."""

from __future__ import annotations

import fcntl
import os
import threading
from pathlib import Path
from typing import Any

import pytest

_OF_OS = (
    *("access", "chmod", "close", "fchmod", "fstat", "fsync", "ftruncate", "link", "listdir"),
    *("lstat", "mkdir", "open", "pread", "preadv", "pwrite", "pwritev", "read", "readlink"),
    *("rename", "replace", "rmdir", "scandir", "stat", "statvfs", "unlink", "utime", "writev"),
)


def file_calls_of(thread: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the calls that a thread makes from now on, to the end of the test.

    Args:
        thread: As ``threading.get_ident`` has it.
    """
    calls: list[str] = []

    def note(module: Any, name: str) -> None:
        call = getattr(module, name)

        def noted(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == thread:
                calls.append(f"{name}{args}")
            return call(*args, **kwargs)

        monkeypatch.setattr(module, name, noted)

    for name in _OF_OS:
        note(os, name)
    for name in ("fcntl", "flock"):
        note(fcntl, name)
    return calls


def open_below(folder: Path) -> list[str]:
    """Files in it that this process has open, deleted ones too."""
    files = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    return [file for file in files if file.startswith(str(folder))]
