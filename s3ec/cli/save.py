# SPDX-License-Identifier: Apache-2.0
"""Save downloaded bytes as a file that is whole or not there."""

from __future__ import annotations

import os
from pathlib import Path

from s3ec.errors import ConfigError, TierError
from s3ec.store.base import Blob
from s3ec.tier.files import NO_LINK, TempFile


class SaveError(TierError):
    """The file could not be written here."""


def check_target(output: str, default_name: str, *, force: bool) -> Path:
    """Where to save, found out before anything is downloaded.

    Args:
        output: As given; a folder gets ``default_name`` inside it. ``-`` is not looked at.

    Raises:
        ConfigError: There is a file already and ``force`` is not set.
    """
    path = Path(output).expanduser()
    if output == "-":
        return path
    if path.is_dir():
        path /= default_name
    if not force and path.exists():
        raise ConfigError(f"{path} exists; --force replaces it")
    return path


def save(path: Path, blob: Blob, *, force: bool) -> None:
    """Write a file by way of a temporary one beside it.

    Raises:
        ConfigError: Somebody made the file meanwhile and ``force`` is not set.
        SaveError: The folder is absent, read-only or full.
    """
    try:
        with TempFile(str(path.parent), private=False) as file:
            file.append([blob])
            file.close(synced=True)
            _publish(Path(file.path), path, force=force)
    except FileExistsError as exc:
        raise ConfigError(f"{path} exists; --force replaces it") from exc
    except OSError as exc:
        raise SaveError(f"cannot write {path}: {exc.strerror}") from exc


def _publish(temporary: Path, path: Path, *, force: bool) -> None:
    if not force:
        try:
            os.link(temporary, path)  # unlike a rename, this refuses an existing name
            return
        except OSError as exc:
            if exc.errno not in NO_LINK:
                raise
        if path.exists():
            raise FileExistsError
    os.replace(temporary, path)
