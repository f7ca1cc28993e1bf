# SPDX-License-Identifier: Apache-2.0
"""How a base is made, and what came of it: for compactions and rebuilds."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from s3ec.errors import TierError
from s3ec.index.head import Head

GRACE_S = 3600.0
"""A reader that is slower than this finds files gone, and lists again."""


@dataclass(frozen=True, slots=True)
class Making:
    """How a base is made.

    Attributes:
        bloom_fpr: False positive rate of its filters.
        grace_s: How long what it supersedes is kept, by the server's clock.
        folder: Where a folder for temporary files may be made; None for the system's place. At
            most 42 bytes for each entry of the deltas, and for each object that is listed.
        clock: Seconds since the epoch.
    """

    bloom_fpr: float = 0.01
    grace_s: float = GRACE_S
    folder: Path | None = None
    clock: Callable[[], float] = time.time


@dataclass(frozen=True, slots=True)
class Made:
    """What a compaction or a rebuild did.

    Attributes:
        head: The base that readers use now.
        merged: Deltas that went into it; 0 where a compaction had nothing to do.
        removed: Old objects deleted.
        corrupt: Deltas that are unusable and were left where they are: ULID to what is wrong.
    """

    head: Head
    merged: int
    removed: int
    corrupt: Mapping[str, str] = field(default_factory=dict)


@contextmanager
def temporary_folder(parent: Path | None, *names: str) -> Iterator[Path]:
    """A folder for one piece of work.

    Args:
        parent: Where; None for the system's place.
        names: Of folders to make in it.

    Raises:
        TierError: It cannot be made.
    """
    with ExitStack() as stack:
        try:
            # A thread of a cancelled piece of work may still be writing there.
            made = tempfile.TemporaryDirectory(
                prefix="s3ec-", dir=parent, ignore_cleanup_errors=True
            )
            folder = Path(stack.enter_context(made))
            for name in names:
                (folder / name).mkdir()
        except OSError as exc:
            raise TierError(f"cannot make a folder for temporary files: {exc}") from exc
        yield folder
