# SPDX-License-Identifier: Apache-2.0
"""Long work on the index in a process of its own: a fresh interpreter of low priority, no fork."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from s3ec.settings import Settings
from s3ec.store.base import Store


@dataclass(frozen=True, slots=True)
class Job:
    """What to do.

    Attributes:
        kind: ``fetch`` downloads a snapshot and makes its filter; ``union`` and ``listing`` make a
            snapshot, write it to the bucket, and leave it here with its filter.
        namespace: Its name.
        folder: The node's folder of the index.
        snapshot: For ``fetch``: ``ULID-LISTED``.
    """

    kind: Literal["fetch", "union", "listing"]
    namespace: str
    folder: str
    snapshot: str = ""


Jobs: TypeAlias = Callable[[Job], Awaitable[str]]
"""Runs a job; returns the name of the snapshot, or why there is none: empty, nothing to do.

Raises UnavailableError, AccessError, CorruptEntryError, TierError as the work does.
"""


def in_child(settings: Settings) -> Jobs:
    """Runs jobs in a child process, which ends with this one. The loop's thread stays free.

    Args:
        settings: With which the child opens the bucket.
    """
    raise NotImplementedError


def in_process(store: Store) -> Jobs:
    """Runs jobs here, for commands and for tests whose bucket no child can reach."""
    raise NotImplementedError
