# SPDX-License-Identifier: Apache-2.0
"""Names of deltas: 26 characters that sort by the time at which their writer made them."""

from __future__ import annotations

import secrets
from collections.abc import Callable

# Crockford's: no I, L, O or U. In ASCII's order, so that names sort as their numbers do.
_DIGITS = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_VALUE = {digit: value for value, digit in enumerate(_DIGITS)}
_LENGTH = 26
_TIME_DIGITS = 10
_MAX_MS = 2**48 - 1
_RANDOM_BITS = 80
# How far one name of a millisecond is from the last one. More than one step, so that a process
# and its fork do not make the same names.
_STEP_BITS = 32


def time_ms(name: str) -> int:
    """When its writer made it, by the writer's clock; milliseconds since the epoch.

    Args:
        name: One for which identity.is_ulid holds.
    """
    value = 0
    for digit in name[:_TIME_DIGITS]:
        value = value << 5 | _VALUE[digit]
    return value


def first_ulid(at_ms: int) -> str:
    """The smallest name of a millisecond: those made at that time or later are not below it.

    Args:
        at_ms: Milliseconds since the epoch; what a name cannot hold becomes the nearest it can.
    """
    return _spell(min(max(at_ms, 0), _MAX_MS), 0)


class Ulids:
    """Makes names, each above the one before it also where the clock stands or steps back.

    Not thread-safe. Two makers agree on a name with a chance of 2**-80 per millisecond.
    """

    def __init__(self, *, random_bits: Callable[[int], int] = secrets.randbits) -> None:
        self._random_bits = random_bits
        self._ms = -1
        self._random = 0

    def next(self, now_s: float) -> str:
        """A fresh name.

        Args:
            now_s: Seconds since the epoch.
        """
        ms = min(max(int(now_s * 1000), 0), _MAX_MS)
        if ms <= self._ms:
            self._random += 1 + self._random_bits(_STEP_BITS)
            if self._random < 1 << _RANDOM_BITS:
                return _spell(self._ms, self._random)
            ms = self._ms + 1
        self._ms = ms
        self._random = self._random_bits(_RANDOM_BITS)
        return _spell(ms, self._random)


def _spell(ms: int, random: int) -> str:
    value = ms << _RANDOM_BITS | random
    return "".join(_DIGITS[value >> shift & 31] for shift in range(5 * (_LENGTH - 1), -1, -5))
