# SPDX-License-Identifier: Apache-2.0
"""A clock that tests move by hand."""

from __future__ import annotations

START_S = 1_800_000_000.0


class Clock:
    """Answers ``now_s`` when it is called.

    Args:
        now_s: Where it starts.
        tick_s: By how much each look moves it.
    """

    def __init__(self, now_s: float = START_S, *, tick_s: float = 0.0) -> None:
        self.now_s = now_s
        self.tick_s = tick_s

    def __call__(self) -> float:
        self.now_s += self.tick_s
        return self.now_s
