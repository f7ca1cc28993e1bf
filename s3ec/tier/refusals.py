# SPDX-License-Identifier: Apache-2.0
"""What the disk refused: counted each time, logged once per kind."""

from __future__ import annotations

import logging
from pathlib import Path

from s3ec.counters import Counters
from s3ec.errors import TierError

_log = logging.getLogger(__name__)


class Refusals:
    """One tier's; the same one may come at each request, and would fill the log."""

    def __init__(self, root: Path, counters: Counters) -> None:
        self._root = root
        self._counters = counters
        self._warned: set[tuple[str, int | None]] = set()

    def note(self, what: str, exc: OSError | TierError) -> None:
        """Count a refusal.

        Args:
            what: The operation, as a verb.
        """
        self._counters.add("tier.errors")
        kind = (what, getattr(exc, "errno", None))
        level = logging.DEBUG if kind in self._warned else logging.WARNING
        self._warned.add(kind)
        _log.log(level, "cache %s: cannot %s: %s", self._root, what, exc)
