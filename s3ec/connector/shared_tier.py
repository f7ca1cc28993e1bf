# SPDX-License-Identifier: Apache-2.0
"""Whether the ranks that load see the tier of the scheduler's process: both sides of the question.

A granted file lies in that tier, so a rank that sees another folder cannot load it. Configuration
does not always tell: Ray places ranks by itself, and a pipeline may have its first stage anywhere.
So plans name the folder until every loading rank has reported whether it sees it.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from pathlib import Path

from s3ec.connector.messages import TierId
from s3ec.errors import TierError
from s3ec.tier import Tier

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class SharedTier:
    """What the loading ranks say of the scheduler's tier. One thread: the scheduler's.

    ========  ========  ==================================================================
    state     goes to   when
    ========  ========  ==================================================================
    asked     shared    every rank has reported that it sees the folder
    asked     apart     one rank has reported that it sees another
    ========  ========  ==================================================================

    Attributes:
        asked: The folder that plans are to name; None once the answer is known.
        apart: Ranks that see another folder.
    """

    def __init__(self, count: int, tier: TierId) -> None:
        """Nobody has reported yet.

        Args:
            count: Ranks that load.
            tier: Of the scheduler's process.
        """
        self._count = count
        self._sees: dict[int, bool] = {}
        self.asked: TierId | None = tier

    @property
    def apart(self) -> list[int]:
        return sorted(rank for rank, sees in self._sees.items() if not sees)

    def on_report(self, sees: Mapping[int, bool]) -> bool:
        """Take a report's part about the tier; whether the answer is known by that.

        Args:
            sees: Rank to whether it sees the folder.
        """
        if self.asked is None:
            return False
        self._sees.update(sees)
        if len(self._sees) < self._count and not self.apart:
            return False
        self.asked = None
        return True


def tier_id(tier: Tier) -> TierId:
    """How other processes recognise this one's tier.

    Raises:
        TierError: The tier is closed, or its folder for pins cannot be made.
    """
    return TierId(_host(), str(tier.pins.folder()))


def sees_tier(scheduler_tier: TierId, tier: Tier) -> bool | None:
    """Whether the scheduler's pins lie in our own tier, under the paths that it names.

    Returns:
        None where our own disk does not say: the next plan asks again.
    """
    try:
        own = tier.pins.folder().parent
    except TierError:
        return None
    try:
        return (
            scheduler_tier.host == _host()
            and os.access(scheduler_tier.folder, os.R_OK | os.X_OK)
            and os.path.samefile(Path(scheduler_tier.folder).parent, own)
        )
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return False
    except OSError:
        return None


def _host() -> str:
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return platform.node()
