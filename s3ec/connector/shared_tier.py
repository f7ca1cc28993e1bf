# SPDX-License-Identifier: Apache-2.0
"""Whether the ranks that load see the tier of the scheduler's process: both sides of the question.

A granted file lies in that tier, so a rank that sees another folder cannot load it. Configuration
does not always tell: Ray places ranks by itself, and a pipeline may have its first stage anywhere.
So plans name the folder until every loading rank has reported whether it sees it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from s3ec.connector.messages import TierId
from s3ec.errors import TierError
from s3ec.tier import Tier
from s3ec.tier.files import boot_id


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

    def __init__(self, count: int, tier: TierId | None) -> None:
        """Nobody has reported yet.

        Args:
            count: Ranks that load.
            tier: Of the scheduler's process; None where all ranks see it for certain.
        """
        self._count = count
        self._sees: dict[int, bool] = {}
        self.asked = tier

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
        TierError: Its folder cannot be looked at.
    """
    folder = str(tier.folders.version)
    try:
        found = os.stat(folder)
    except OSError as exc:
        raise TierError(f"cannot look at {folder}: {exc}") from exc
    return TierId(boot_id(), folder, found.st_dev, found.st_ino)


def sees_tier(scheduler_tier: TierId, tier: Tier) -> bool | None:
    """Whether the scheduler's tier is our own, under the path that it names.

    Returns:
        None where our own disk does not say: the next plan asks again.
    """
    try:
        return tier_id(tier) == scheduler_tier
    except TierError:
        return None
