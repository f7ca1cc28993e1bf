# SPDX-License-Identifier: Apache-2.0
"""Names of the index's objects: ULIDs by the server's clock, and which of them are trusted."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from s3ec.errors import ConflictError
from s3ec.identity import Layout, is_ulid
from s3ec.store.base import ObjectInfo, Store

MARGIN_S = 900
"""Only the next listing finds the rows of a delta that appears later than this after its naming."""
AHEAD_S = 60.0
"""A name that is so far ahead of its own object's date was not made by the server's clock."""
CLOCK = "clock-"
"""Objects with this name below claim/ were only written for their date."""
NEVER = "0" * 26
"""LISTED of a snapshot that does not descend from a listing, and ULID of no snapshot."""

# Crockford's base 32: no I, L, O or U. In ASCII order, so that names sort as their numbers do.
_DIGITS = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_VALUE = {digit: value for value, digit in enumerate(_DIGITS)}
_MAX_MS = 2**48 - 1
_RANDOM_BITS, _WRITER_BITS = 80, 40
_SNAPSHOT = re.compile(r"([0-7][0-9A-Z]{25})-([0-7][0-9A-Z]{25})")


def deltas_prefix(layout: Layout) -> str:
    """Prefix of all deltas."""
    return f"{layout.manifest}v2/delta/"


def snapshots_prefix(layout: Layout) -> str:
    """Prefix of all snapshots."""
    return f"{layout.manifest}v2/snapshot/"


def claims_prefix(layout: Layout) -> str:
    """Prefix of all claims."""
    return f"{layout.manifest}v2/claim/"


def time_s(ulid: str) -> float:
    """When a name was made; seconds since the epoch.

    Args:
        ulid: One for which identity.is_ulid holds.
    """
    value = 0
    for digit in ulid[:10]:
        value = value << 5 | _VALUE[digit]
    return value / 1000


def first_ulid(at_s: float) -> str:
    """The smallest name of a millisecond: no name made then or later is smaller."""
    return _spell(min(max(int(at_s * 1000), 0), _MAX_MS) << _RANDOM_BITS)


def window_start(ulid: str) -> str:
    """The smallest name of a delta that counts for a snapshot."""
    return first_ulid(time_s(ulid) - MARGIN_S)


def writer_of(ulid: str) -> str:
    """The characters that identify a writer: all its names share them."""
    return ulid[10:18]


def is_ahead(ulid: str, info: ObjectInfo) -> bool:
    """True if a name is later than its own object: no server's clock made it.

    The object's date is the server's. If a server gives no dates, its names are trusted.
    """
    return bool(info.modified_s) and time_s(ulid) > info.modified_s + AHEAD_S


@dataclass(frozen=True, slots=True, order=True)
class SnapshotName:
    """The name of a snapshot. Of two snapshots the one with the greater name is newer.

    Attributes:
        listed: ULID of the listing that it descends from; NEVER for none.
        ulid: ULID of its making; the same for a listing.
    """

    listed: str = NEVER
    ulid: str = NEVER

    def __str__(self) -> str:
        return f"{self.ulid}-{self.listed}"

    @classmethod
    def parse(cls, text: str) -> SnapshotName | None:
        """Parse ``ULID-LISTED``; None for any other text."""
        match = _SNAPSHOT.fullmatch(text)
        if match is None or not (is_ulid(match[1]) and is_ulid(match[2])):
            return None
        return cls(match[2], match[1])


async def list_snapshots(
    store: Store, layout: Layout, *, left_out: Callable[[str], object] = lambda _: None
) -> list[tuple[SnapshotName, ObjectInfo]]:
    """List all snapshots, the newest first. Names ahead of the server's clock are left out.

    Args:
        left_out: Called with these names.

    Raises:
        UnavailableError: The store does not answer now.
        AccessError: It refuses.
    """
    prefix = snapshots_prefix(layout)
    found = []
    async for info in store.list(prefix):
        name = SnapshotName.parse(info.name.removeprefix(prefix))
        if name is not None and is_ahead(max(name.ulid, name.listed), info):
            left_out(info.name)
        elif name is not None:
            found.append((name, info))
    return sorted(found, key=lambda each: each[0], reverse=True)


class Names:
    """Makes ULIDs of one writer. Each is greater than the one before, whatever the clock does.

    Not thread-safe. The first half of a name's random bits is the writer's own, so that readers
    can count writers.
    """

    def __init__(self) -> None:
        """Begin as a new writer."""
        self._writer = secrets.randbits(_WRITER_BITS)
        self._ms = -1
        self._low = 0

    def next(self, now_s: float, *, at_least: str = NEVER) -> str:
        """Make a new name.

        Args:
            now_s: The server's time, seconds since the epoch.
            at_least: The newest name that this writer has accepted; the new one is not older.
        """
        ms = min(max(int(now_s * 1000), round(time_s(at_least) * 1000) + 1, 0), _MAX_MS)
        if ms <= self._ms:
            ms = self._ms
            self._low += 1
        else:
            self._low = secrets.randbits(32)
        if self._low >> (_RANDOM_BITS - _WRITER_BITS):
            ms, self._low = ms + 1, 0
        self._ms = ms
        return _spell(
            ms << _RANDOM_BITS | self._writer << (_RANDOM_BITS - _WRITER_BITS) | self._low
        )


class ServerClock:
    """The server's time: read once, then continued by this machine's monotonic clock.

    A wall clock that is wrong, or that jumps, has no effect.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """Ask nothing yet.

        Args:
            clock: Monotonic seconds.
            wall_clock: Seconds since the epoch; used until the server was asked, or if it gives no
                dates.
        """
        self._clock = clock
        self._wall_clock = wall_clock
        self._ahead_s = wall_clock() - clock()

    def now_s(self) -> float:
        """Seconds since the epoch, by the server's clock as far as it is known."""
        return self._clock() + self._ahead_s

    async def ask(self, store: Store, layout: Layout) -> str:
        """Read the server's time from a small object that makers delete later: a PUT and a HEAD.

        Returns:
            Name of that object.

        Raises:
            AccessError: This identity may not write or read below ``manifest/``.
            UnavailableError: The store does not answer now.
        """
        name = f"{claims_prefix(layout)}{CLOCK}{secrets.token_hex(8)}"
        with suppress(ConflictError):  # from our first attempt, whose reply was lost
            await store.put_if_absent(name, [b"s3ec asked what time it is here\n"])
        info = await store.head(name)
        if info is not None and info.modified_s:
            # The date is from just before the response: a name by this clock is never ahead.
            self._ahead_s = info.modified_s - self._clock()
        return name


def _spell(value: int) -> str:
    return "".join(_DIGITS[value >> shift & 31] for shift in range(125, -1, -5))
