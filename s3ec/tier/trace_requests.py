# SPDX-License-Identifier: Apache-2.0
"""How a command asks the engines of a node for a trace, and how it gets what they record.

In the node's folder lie then::

    CACHE_DIR/v1/traces/request.json     who records, until when, and the secret of the hashes
    CACHE_DIR/v1/traces/.tmp-PID-RANDOM  what an engine has recorded so far
    CACHE_DIR/v1/traces/RANDOM.jsonl     the same, complete

One command at a time, which holds the folder's lock. Each engine looks for the request once a
second, in the background. The command removes all of it, the secret first of all, so nobody can
tell afterwards which identifier has which hash. What a killed command leaves, an engine removes.
"""

from __future__ import annotations

import json
import math
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from s3ec.errors import CorruptEntryError
from s3ec.tier.files import (
    Folders,
    TempFile,
    is_stale_temp,
    is_temp_name,
    read_small,
    require_own_folders,
    try_lock,
)

LONGEST_S = 86400.0
"""No trace takes longer."""
# A request that ended so long ago is nobody's any more.
_UNCOLLECTED_S = 600.0
_LARGEST_REQUEST_BYTES = 4096
_DONE = ".jsonl"


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """What a command asks all engines of the node for.

    Attributes:
        name: Random; tells two requests apart.
        secret: Of the hashes, in hexadecimal digits.
        began_s: Seconds since the epoch, as all times in traces count from here.
        until_s: Likewise. Engines end by themselves then.
        with_names: Say beside the hashes what the objects are called.
    """

    name: str
    secret: str
    began_s: float
    until_s: float
    with_names: bool = False

    @classmethod
    def new(cls, now_s: float, seconds: float, *, with_names: bool = False) -> TraceRequest:
        """Ask for so many seconds from now on."""
        name, secret = secrets.token_hex(8), secrets.token_hex(32)
        return cls(name, secret, now_s, now_s + seconds, with_names)

    def is_on(self, now_s: float) -> bool:
        """Whether engines should record now."""
        return now_s < self.until_s <= now_s + 2 * LONGEST_S

    def is_forgotten(self, now_s: float) -> bool:
        """Whether its command must have died."""
        return now_s > self.until_s + _UNCOLLECTED_S


class TraceFolder:
    """The folder, from both sides. Blocking; checked at each use, as all folders of the tier."""

    def __init__(self, folders: Folders) -> None:
        """Nothing is touched."""
        self._folders = folders
        self._path = str(folders.traces)
        self._parents = (*folders.above, self._path)
        self._request = f"{self._path}/request.json"

    # -- for engines -------------------------------------------------------------------------

    def request(self) -> TraceRequest | None:
        """What is asked for; None where there is nothing, or nothing that can be read.

        Raises:
            OSError, TierError: The disk refused.
        """
        try:
            os.lstat(self._request)  # nearly always all there is to do
            require_own_folders(self._parents)
            return _parse(read_small(self._request, max_bytes=_LARGEST_REQUEST_BYTES))
        except (FileNotFoundError, CorruptEntryError):
            return None

    def begin(self) -> TempFile:
        """A file to record into. Raises as ``request``."""
        require_own_folders(self._parents)
        return TempFile(self._path)

    def finish(self, file: TempFile) -> None:
        """The file is complete. Raises as ``request``; the file stays as it is then."""
        self._folders.place(file, f"{self._path}/{secrets.token_hex(8)}{_DONE}", self._parents)

    # -- for the command ---------------------------------------------------------------------

    @contextmanager
    def locked(self) -> Iterator[bool]:
        """Keep other commands out while the block runs; False where one is at work.

        Raises:
            OSError, TierError: The folder cannot be had.
        """
        self._folders.make()
        require_own_folders(self._parents)
        fd = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            yield try_lock(fd)
        finally:
            os.close(fd)

    def ask(self, request: TraceRequest) -> None:
        """Have all engines record. Raises as ``request``."""
        self.clear()
        self._folders.write_small(self._request, json.dumps(asdict(request)).encode())

    def withdraw(self) -> None:
        """Have them end, and let nobody have the secret any more. Raises as ``request``."""
        require_own_folders(self._parents)
        with suppress(FileNotFoundError):
            os.unlink(self._request)

    def recorded(self) -> list[Path]:
        """All files that engines have made, complete or not. Raises as ``request``."""
        require_own_folders(self._parents)
        names = sorted(os.listdir(self._path))
        return [Path(self._path, one) for one in names if one.endswith(_DONE) or is_temp_name(one)]

    def is_being_written(self) -> bool:
        """Whether an engine still records. Raises as ``request``."""
        paths = [str(path) for path in self.recorded() if is_temp_name(path.name)]
        # However old it is: an idle engine writes nothing for long.
        return not all(is_stale_temp(path, now_s=0.0) for path in paths)

    def clear(self) -> None:
        """Remove the request and all that was recorded. Raises as ``request``."""
        self.withdraw()
        for path in self.recorded():
            with suppress(FileNotFoundError):
                path.unlink()


def _parse(content: bytes) -> TraceRequest | None:
    try:
        document: Any = json.loads(content)
        secret = bytes.fromhex(document["secret"])
        began_s, until_s = float(document["began_s"]), float(document["until_s"])
        name = document["name"]
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError):
        return None
    if (
        not isinstance(name, str)
        or len(secret) != 32
        or not all(map(math.isfinite, (began_s, until_s)))
    ):
        return None
    with_names = document.get("with_names") is True
    return TraceRequest(name, document["secret"], began_s, until_s, with_names)
