# SPDX-License-Identifier: Apache-2.0
"""What is asked of the prefetcher, and what came of it."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Literal

from s3ec.identity import Key
from s3ec.tier import Pin


class Priority(enum.IntEnum):
    """Order of the queue: what a request waits for now comes before what it may need later."""

    DEMAND = 0
    LOOKAHEAD = 1
    FORGOTTEN = 2  # nobody waits for it any more; it may still be of use


class Outcome(enum.Enum):
    """How a fetch ended."""

    READY = "ready"
    ABSENT = "absent"  # neither here nor in the bucket
    MISMATCH = "mismatch"  # there, but not what this request needs
    CORRUPT = "corrupt"  # there, but unusable, twice
    UNAVAILABLE = "unavailable"  # the bucket or the disk did not answer in time


@dataclass(frozen=True, slots=True)
class Want:
    """One embedding that somebody asks for.

    Attributes:
        key: What to bring.
        modality: Selects the width and dtype that the entry must have.
        rows: Rows that the request has room for; other entries are a mismatch.
        priority: Place in the queue; a later want for the same key can only improve it.
    """

    key: Key
    modality: str
    rows: int
    priority: Priority = Priority.DEMAND


@dataclass(frozen=True, slots=True)
class Fetched:
    """The end of one want. Whoever drains it owns the pin and must release it."""

    want: Want
    outcome: Outcome
    pin: Pin | None = None
    source: Literal["tier", "bucket"] | None = None
    seconds: float = 0.0
