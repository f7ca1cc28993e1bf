# SPDX-License-Identifier: Apache-2.0
"""Real disks that are small, become read-only, or fail; they need root, or the test is skipped."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_NOBODY = 65534


def run_or_skip(*command: str) -> str:
    """What it says; without the right or the program to do so the test is skipped."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip(f"no {command[0]} command")
    if done.returncode:
        pytest.skip(f"{command[0]}: {done.stderr.strip()}")
    return done.stdout.strip()


@contextmanager
def small_tmpfs(folder: Path, *, size: int, inodes: int) -> Iterator[Path]:
    """A file system of its own at ``folder``."""
    folder.mkdir(mode=0o700)
    options = f"size={size},nr_inodes={inodes},mode=700"
    run_or_skip("mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder))
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Inside, whoever comes by its path finds a read-only file system."""
    # A second mount on top: the first one is busy, since a tier keeps lock files open.
    run_or_skip("mount", "--bind", str(folder), str(folder))
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", str(folder)], check=True)
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextmanager
def as_plain_user(folder: str) -> Iterator[None]:
    """Inside, permissions hold: a root user is nobody, who owns ``folder``."""
    if os.geteuid() != 0:
        yield
        return
    os.chown(folder, _NOBODY, _NOBODY)
    os.setegid(_NOBODY)
    os.seteuid(_NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)
