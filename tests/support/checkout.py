# SPDX-License-Identifier: Apache-2.0
"""Copies of this checkout, and archives that are built from one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
# All that a wheel is built from.
WHEEL = ("s3ec", "pyproject.toml", "README.md", "LICENSE")


def copy_checkout(to: Path, *names: str) -> None:
    """Copy files and folders of the checkout into a folder, without what running it left there."""
    ignored = shutil.ignore_patterns("__pycache__", ".terraform*", "*.tfstate*")
    for name in names:
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, to / name, ignore=ignored, copy_function=shutil.copy)
        else:
            shutil.copy(ROOT / name, to / name)


def build(folder: Path, *options: str, umask: int = -1, **variables: str) -> list[Path]:
    """Build a copy of the checkout as `make dist` does; return the archives."""
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", *options],
        cwd=folder,
        env={**os.environ, **variables},
        umask=umask,
        check=True,
        capture_output=True,
    )
    return sorted((folder / "dist").iterdir())
