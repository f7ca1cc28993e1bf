# SPDX-License-Identifier: Apache-2.0
"""Checks of this node's cache folder: writable, private, links, space, kind of file system."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from s3ec.doctor.check import CheckContext, Outcome, fail, ok, warn
from s3ec.errors import TierError
from s3ec.tier.files import Folders, free_bytes, is_full, make_folder, require_own_folder
from s3ec.tier.mounts import file_system, require_local
from s3ec.tier.scan import scan_tier

_MEMORY = ("tmpfs", "ramfs")
_USEFUL_BYTES = 64 * 2**20  # below this a tier would hold a handful of images


def cache_folder(context: CheckContext) -> Outcome:
    """Check whether the tier can keep files there, safe from other users, and the kind of disk."""
    root = context.settings.cache_dir
    try:
        require_local(root)
        with at_folder(root) as folder:
            require_own_folder(folder, given=True)
            if (folder / "v1").exists():
                require_own_folder(folder / "v1")
            with probe_file(folder) as path:
                no_links = _link(path)
    except TierError as exc:
        found, _, mend = str(exc).partition("; ")
        return fail(found, mend)
    except OSError as exc:
        return fail(f"{root}: {exc.strerror}", _mend_folder(exc))
    if no_links:
        return warn(
            f"{root} is writable, but has no hard links: {no_links}",
            "saves go to the bucket from memory, and are not kept here: set `cache_dir` to a file "
            "system with hard links (ext4, xfs, tmpfs)",
        )
    return _by_file_system(root)


def _link(path: Path) -> str:
    """Why the spool cannot hold a hard link of a file; empty if it can."""
    link = path.with_name(f"{path.name}-link")
    try:
        os.link(path, link)
    except OSError as exc:
        return str(exc.strerror)
    link.unlink()
    return ""


def _mend_folder(exc: OSError) -> str:
    if exc.errno == errno.EROFS:
        return "mounted read-only: mount a writable volume, or set `cache_dir` to another folder"
    if is_full(exc):
        return "free some space or inodes there, or set `cache_dir` to another disk"
    if exc.errno in (errno.EACCES, errno.EPERM):
        return f"give it to uid {os.geteuid()} (chown, chmod 700), or set `cache_dir` elsewhere"
    return "set `cache_dir` to a folder on a local disk"


def _by_file_system(root: Path) -> Outcome:
    kind = file_system(root)
    if kind == "overlay":
        return warn(
            f"{root} is writable, but lies in the container's own layer (overlay): slow to "
            "write, gone with the container",
            "mount a volume (emptyDir, hostPath, local disk) and set `cache_dir` to it",
        )
    memory = ", which is memory: count `cache_bytes` to the pod's" if kind in _MEMORY else ""
    return ok(f"{root} is writable and private, on {kind}{memory}")


def cache_space(context: CheckContext) -> Outcome:
    """Check whether the disk has room for `cache_bytes` and `min_free_bytes`."""
    settings = context.settings
    try:
        used = scan_tier(Folders(settings.cache_dir)).total_bytes
        free = free_bytes(_existing(settings.cache_dir))
    except OSError as exc:
        return fail(f"{settings.cache_dir}: {exc.strerror}", _mend_folder(exc))
    room = free + used - int(settings.min_free_bytes)
    budget = int(settings.cache_bytes)
    found = f"{_gib(free)} free, {_gib(used)} in use by the tier"
    if room < min(_USEFUL_BYTES, budget):
        return fail(
            f"{found}: nothing left beside min_free_bytes ({_gib(int(settings.min_free_bytes))})",
            "free some space, set `cache_dir` to another disk, or lower `min_free_bytes`",
        )
    if room < budget:
        return warn(
            f"{found}: less than cache_bytes ({_gib(budget)}) and min_free_bytes "
            f"({_gib(int(settings.min_free_bytes))}) ask for",
            f"set `cache_bytes` to {_gib(room)} or less, or use a larger disk",
        )
    return ok(f"{found}; cache_bytes ({_gib(budget)}) fits")


def _gib(nbytes: int) -> str:
    if abs(nbytes) >= 2**30:
        return f"{nbytes / 2**30:.1f}GiB"
    return f"{nbytes / 2**20:.0f}MiB"


def _existing(path: Path) -> Path:
    """The path itself, or the nearest existing folder above it."""
    while not path.exists():
        path = path.parent
    return path


@contextmanager
def at_folder(root: Path) -> Iterator[Path]:
    """Provide the cache folder, made as the tier makes it; remove it again if it was absent."""
    made: list[Path] = []
    try:
        for folder in (*reversed(root.parents), root):
            if not folder.exists():
                make_folder(folder)
                made.append(folder)
        yield root.resolve()
    finally:
        for folder in reversed(made):
            # Not empty: a tier uses it by now.
            with contextlib.suppress(OSError):
                folder.rmdir()


@contextmanager
def probe_file(folder: Path) -> Iterator[Path]:
    path = folder / f".s3ec-probe-{secrets.token_hex(8)}"
    try:
        path.write_bytes(bytes(4096))
        yield path
    finally:
        path.unlink(missing_ok=True)
