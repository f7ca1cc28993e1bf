# SPDX-License-Identifier: Apache-2.0
"""The order in which vLLM's encoder cache gives up embeddings that no request holds.

vLLM 0.32's ``EncoderCacheManager`` keeps those in ``freeable``, an ``OrderedDict``: it puts one in
when its last holder leaves, pops it by name when somebody wants it again, and takes
``popitem(last=False)`` for a victim. The queues here answer that one call differently. All other
bookkeeping stays vLLM's.

An entry is *held* (not in the queue), *freeable* (in it), or *gone* (it was the victim). An access
is a hit or an allocation, so it happens only to what is held from then on.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

RestoreSeconds = Callable[[str, str, int], float]
"""Identifier, modality and rows to the seconds until the device would have it again."""

# A heap is made anew when it holds this many entries for each one that counts.
_MOST_STALE = 3
_FEW = 64


class LeastRecent(OrderedDict[str, int]):
    """The victim is what was accessed longest ago, also while requests still held it."""

    def __init__(self) -> None:
        super().__init__()
        self._number = 0
        self._accessed: dict[str, int] = {}  # of all entries, held or not
        self._heap: list[tuple[int, str]] = []

    def accessed(self, mm_hash: str) -> None:
        """A hit or an allocation."""
        self._number += 1
        self._accessed[mm_hash] = self._number

    def __setitem__(self, mm_hash: str, num_embeds: int) -> None:
        """The last holder has left."""
        super().__setitem__(mm_hash, num_embeds)
        heapq.heappush(self._heap, (self._accessed[mm_hash], mm_hash))
        if len(self._heap) > _MOST_STALE * len(self) + _FEW:
            self._heap = [(self._accessed[name], name) for name in self]
            heapq.heapify(self._heap)

    def popitem(self, last: bool = True) -> tuple[str, int]:
        """The victim and its rows; ``last`` is vLLM's and always False."""
        while self:
            number, mm_hash = heapq.heappop(self._heap)
            # Otherwise it was held again since.
            if mm_hash in self and self._accessed[mm_hash] == number:
                del self._accessed[mm_hash]
                return mm_hash, self.pop(mm_hash)
        raise KeyError("no entry is freeable")

    def clear(self) -> None:
        """All entries are gone, those that are held too."""
        super().clear()
        self._accessed.clear()
        self._heap.clear()


class Frequencies:
    """How often each name was asked for lately, up to 15 times; bounded by what it counts.

    The counters of TinyLFU (Einziger, Friedman and Manes, 2017) are halved every so many accesses.
    Here a name's counter is halved when it is first asked for in a new period, and is dropped
    when it was not asked for in a whole one. So no access pays for all names, and the names of two
    periods are all that is kept. They are exact: there are too few of them to need a sketch of
    hashes.
    """

    MOST = 15

    def __init__(self) -> None:
        self._new: dict[str, int] = {}
        self._old: dict[str, int] = {}
        self._accesses = 0

    def add(self, name: str, *, period: int) -> None:
        """One more access; a period is so many."""
        count = self._new.get(name)
        if count is None:
            count = self._old.get(name, 0) >> 1
        if count < self.MOST:
            count += 1
        self._new[name] = count
        self._accesses += 1
        if self._accesses >= period:
            self._accesses = 0
            self._old, self._new = self._new, {}

    def of(self, name: str) -> int:
        """The counter; at least 1, as for a name that was asked for once."""
        count = self._new.get(name)
        return (count if count is not None else self._old.get(name, 0) >> 1) or 1

    def __len__(self) -> int:
        return len(self._new.keys() | self._old.keys())


@dataclass(slots=True)
class _Entry:
    """What is known of an embedding on the device."""

    modality: str
    rows: int
    number: int
    worth: float = math.nan  # as in the heap; NaN where it is not there


class Window:
    """How many rows are kept because they are new, whatever they are worth.

    A page is often asked for again within a minute, and never after that; another one every hour.
    Which is more common differs from fleet to fleet, and from hour to hour. So the window grows and
    shrinks: by a tenth of the cache, on in the direction in which misses got cheaper, and back
    where they got dearer. That is the hill climbing of Einziger, Eytan, Friedman and Manes
    (*Adaptive Software Cache Management*, 2018), with the cost of misses for their number.
    """

    START, LEAST, MOST = 0.2, 0.02, 0.9
    _STEP = 0.1
    _SETTLES = 0.98
    # A change of the cost by so much is another workload.
    _RESTARTS = 0.05
    _ACCESSES_PER_ENTRY = 4
    _LEAST_ACCESSES = 64

    def __init__(self) -> None:
        self.share = self.START
        self._step = self._STEP
        self._accesses = 0
        self._lost_s = 0.0
        self._before_s = math.nan  # per access

    def accessed(self, entries: int, lost_s: float) -> None:
        """One more access.

        Args:
            entries: How many the cache holds.
            lost_s: What it cost; 0 for a hit.
        """
        self._lost_s += lost_s
        self._accesses += 1
        if self._accesses >= max(self._LEAST_ACCESSES, self._ACCESSES_PER_ENTRY * entries):
            now_s = self._lost_s / self._accesses
            self._accesses, self._lost_s = 0, 0.0
            self._climb(now_s)

    def _climb(self, now_s: float) -> None:
        before_s, self._before_s = self._before_s, now_s
        if math.isnan(before_s):
            return
        gain = (before_s - now_s) / before_s if before_s else -now_s
        if gain < 0:
            self._step = -self._step
        if abs(gain) >= self._RESTARTS:
            self._step = math.copysign(self._STEP, self._step)
        else:
            self._step *= self._SETTLES
        self.share = min(max(self.share + self._step, self.LEAST), self.MOST)


class LeastWorth(OrderedDict[str, int]):
    """The victim is what is least worth its rows.

    An entry is worth its frequency times the seconds until the device would have it again, per row.
    So what this node's disk gives back in a millisecond goes before what must come from the bucket,
    and that before what must be encoded; of two that are worth the same the one that was accessed
    longer ago. What is new is kept for a while, see ``Window``. vLLM must hold what it computes
    with, so nothing is refused: one scan of the corpus passes through the window and leaves what
    is asked for again and again. (A cost in the choice: GreedyDual-Size, Cao and Irani, 1997.)

    Of the entries that are freeable, those in the window are in no heap. When an entry leaves
    the window, or is released outside of it, it goes into the heap with its worth of that moment.
    That changes with time: the disk evicts, an upload ends. So the least of the heap is looked at
    again before it goes, and at each eviction the two that were looked at longest ago.
    """

    _LOOKS = 2
    # Of the entries; what the frequencies remember.
    _PERIOD_PER_ENTRY = 40
    _LEAST_PERIOD, _LONGEST_PERIOD = 1024, 32_768
    # Costs are means that move a little with each sample.
    _SAME = 1.01

    def __init__(self, cache_rows: int, restore_s: RestoreSeconds) -> None:
        """An empty cache.

        Args:
            cache_rows: What the device's cache holds.
            restore_s: Asked for each entry that may go; memory only.
        """
        super().__init__()
        self._cache_rows = cache_rows
        self._restore_s = restore_s
        self._number = 0
        self._entries: dict[str, _Entry] = {}  # all, held or not
        self._frequencies = Frequencies()
        self._window = Window()
        self._new: OrderedDict[str, int] = OrderedDict()  # in the window, the oldest first: rows
        self._new_rows = 0
        self._heap: list[tuple[float, int, str]] = []
        self._by_look: OrderedDict[str, None] = OrderedDict()  # in the heap

    def hit(self, mm_hash: str) -> None:
        """A request that did not hold it before wants what the device has."""
        self._accessed(mm_hash, 0.0)

    def allocated(self, mm_hash: str, modality: str, rows: int) -> None:
        """The device gets it: it is loaded or encoded."""
        if mm_hash not in self._entries:
            self._entries[mm_hash] = _Entry(modality, rows, 0)
        self._accessed(mm_hash, self._restore_s(mm_hash, modality, rows))

    def _accessed(self, mm_hash: str, lost_s: float) -> None:
        entry = self._entries[mm_hash]
        self._number += 1
        entry.number = self._number
        count = len(self._entries)
        period = self._PERIOD_PER_ENTRY * count
        self._frequencies.add(
            mm_hash, period=min(max(period, self._LEAST_PERIOD), self._LONGEST_PERIOD)
        )
        self._window.accessed(count, lost_s)
        if mm_hash in self._new:
            self._new.move_to_end(mm_hash)
            return
        if self._by_look.pop(mm_hash, self) is None:
            entry.worth = math.nan
        self._new[mm_hash] = entry.rows
        self._new_rows += entry.rows
        limit = self._window.share * self._cache_rows
        while self._new_rows > limit and len(self._new) > 1:
            oldest, rows = self._new.popitem(last=False)
            self._new_rows -= rows
            if oldest in self:
                self._push(oldest)

    def __setitem__(self, mm_hash: str, num_embeds: int) -> None:
        """The last holder has left."""
        super().__setitem__(mm_hash, num_embeds)
        if mm_hash not in self._new:
            self._push(mm_hash)

    def _worth(self, mm_hash: str, entry: _Entry) -> float:
        seconds = self._restore_s(mm_hash, entry.modality, entry.rows)
        return self._frequencies.of(mm_hash) * seconds / max(entry.rows, 1)

    def _push(self, mm_hash: str) -> None:
        entry = self._entries[mm_hash]
        entry.worth = self._worth(mm_hash, entry)
        heapq.heappush(self._heap, (entry.worth, entry.number, mm_hash))
        self._by_look[mm_hash] = None
        self._by_look.move_to_end(mm_hash)
        if len(self._heap) > _MOST_STALE * len(self._by_look) + _FEW:
            self._heap = [
                (one.worth, one.number, name)
                for name, one in ((name, self._entries[name]) for name in self._by_look)
            ]
            heapq.heapify(self._heap)

    def popitem(self, last: bool = True) -> tuple[str, int]:
        """The victim and its rows; ``last`` is vLLM's and always False."""
        for _ in range(min(self._LOOKS, len(self._by_look))):
            self._push(next(iter(self._by_look)))
        while self._heap:
            worth, number, mm_hash = heapq.heappop(self._heap)
            entry = self._entries.get(mm_hash)
            # Otherwise it is held again, in the window again, or looked at again.
            if entry is None or entry.number != number or entry.worth != worth:
                continue
            if self._worth(mm_hash, entry) > self._SAME * worth:
                self._push(mm_hash)
                continue
            return self._take(mm_hash)
        for mm_hash in self._new:
            if mm_hash in self:
                return self._take(mm_hash)
        raise KeyError("no entry is freeable")

    def _take(self, mm_hash: str) -> tuple[str, int]:
        self._by_look.pop(mm_hash, None)
        self._new_rows -= self._new.pop(mm_hash, 0)
        del self._entries[mm_hash]
        return mm_hash, self.pop(mm_hash)

    def clear(self) -> None:
        """All entries are gone, those that are held too. How often each was asked for stays."""
        super().clear()
        self._entries.clear()
        self._new.clear()
        self._new_rows = 0
        self._heap.clear()
        self._by_look.clear()
