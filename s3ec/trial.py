# SPDX-License-Identifier: Apache-2.0
"""Decides whether requests to one server go without pixels, by the results of the last ones."""

from __future__ import annotations

import time
from collections.abc import Callable

_FAILURES = 3
_FIRST_REST_S = 60.0
_LONGEST_REST_S = 3600.0


class Trial:
    """A breaker. Not locked; nothing waits.

    States and transitions:

    - open: requests go without pixels. Three such failures in a row begin a rest of a minute.
    - resting: all requests have their pixels.
    - on trial: the rest is over, and one request goes without pixels. If it fails, the next rest
      takes twice as long, up to an hour. If it has no result within a minute, another one is tried.

    Any success opens it, also a late one of a request from before the rest.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failures = 0
        self._rest_s = 0.0
        self._until_s = float("-inf")
        self._tried: object = None

    @property
    def rests(self) -> bool:
        """True if requests have their pixels now."""
        return self._clock() < self._until_s

    def begin(self, request: object) -> None:
        """Note that a request goes without pixels; not during a rest."""
        if self._rest_s:
            self._tried = request
            self._until_s = self._clock() + _FIRST_REST_S

    def succeeded(self) -> None:
        """Note that a request without pixels was answered."""
        self._failures = 0
        self._rest_s = 0.0
        self._until_s = float("-inf")
        self._tried = None

    def failed(self, request: object) -> float:
        """Note that a request had to be repeated with its pixels. Late ones change no rest.

        Returns:
            Seconds of the rest that begins now; 0 if none begins.
        """
        self._failures += 1
        if self._rest_s and self._tried is not request:
            return 0.0
        if not self._rest_s and self._failures < _FAILURES:
            return 0.0
        self._rest_s = min(2 * self._rest_s, _LONGEST_REST_S) or _FIRST_REST_S
        self._until_s = self._clock() + self._rest_s
        self._tried = None
        return self._rest_s
