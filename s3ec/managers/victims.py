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

    @property
    def remembered(self) -> int:
        """Notes that are kept, of entries here and of what is out of date."""
        return len(self._heap) + len(self._accessed)

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

    def add(self, name: str) -> None:
        """One more access."""
        count = self._new.get(name)
        if count is None:
            count = self._old.get(name, 0) >> 1
        if count < self.MOST:
            count += 1
        self._new[name] = count

    def of(self, name: str) -> int:
        """The counter; at least 1, as for a name that was asked for once."""
        count = self._new.get(name)
        return (count if count is not None else self._old.get(name, 0) >> 1) or 1

    def begin_period(self) -> None:
        """All counters are halved, and what was not asked for in the last period is dropped."""
        self._old, self._new = self._new, {}

    def __len__(self) -> int:
        return len(self._new.keys() | self._old.keys())


class Window:
    """How much of the cache is kept because it is new, whatever it is worth.

    A page is often asked for again within a minute, and never after that; another one every hour.
    Which is more common differs from fleet to fleet, and from hour to hour. So the window grows and
    shrinks: by a sixteenth of the cache, on in the direction in which misses got cheaper, and back
    where they got dearer. That is the hill climbing of Einziger, Eytan, Friedman and Manes
    (*Adaptive Software Cache Management*, 2018), with the cost of misses for their number.

    Attributes:
        share: Of the cache, 0 to 1.
    """

    START, LEAST, MOST = 0.1, 0.02, 0.9
    _STEP = 0.0625
    _SETTLES = 0.98
    # Less of a change says nothing: a scan costs the same whatever the window is.
    _LEAST_GAIN = 0.01
    # A change by so much is another workload.
    _RESTARTS = 0.05

    def __init__(self) -> None:
        self.share = self.START
        self._step = self._STEP
        self._before_s = math.nan

    def climb(self, cost_s: float) -> None:
        """Take the next step.

        Args:
            cost_s: What misses have cost since the last step, for each access.
        """
        before_s, self._before_s = self._before_s, cost_s
        if math.isnan(before_s):
            return
        gain = (before_s - cost_s) / before_s if before_s else -cost_s
        if abs(gain) < self._LEAST_GAIN:
            return
        if gain < 0:
            self._step = -self._step
        if abs(gain) >= self._RESTARTS:
            self._step = math.copysign(self._STEP, self._step)
        else:
            self._step *= self._SETTLES
        self.share = min(max(self.share + self._step, self.LEAST), self.MOST)


@dataclass(slots=True)
class _Entry:
    """What is known of an embedding on the device.

    Attributes:
        number: Of its last access.
        row_s: What a row of it would cost, when that was last asked; None before it was, since what
            has just been encoded will soon be on this node.
        worth: As in the heap; None where it is not there.
    """

    modality: str
    rows: int
    number: int = 0
    row_s: float | None = None
    worth: float | None = None


class LeastWorth(OrderedDict[str, int]):
    """The victim is what is least worth its rows.

    An entry is worth its frequency times the seconds until the device would have it again, per row.
    So what this node's disk gives back in a millisecond goes before what must come from the bucket,
    and that before what must be encoded; of two that are worth the same the one that was accessed
    longer ago. What is new is kept for a while, see ``Window``. vLLM must hold what it computes
    with, so nothing is refused: one scan of the corpus passes through the window and leaves what
    is asked for again and again. (A cost in the choice: GreedyDual-Size, Cao and Irani, 1997.)

    Of the entries that are freeable, those in the window are in no heap. When an entry leaves
    the window, or is released outside of it, it goes into the heap. What it would cost changes with
    time: the disk evicts, an upload ends. So the least of the heap is asked about again before it
    goes, and at each eviction also the one that was asked about longest ago.
    """

    # Of the entries: what the frequencies remember, and how soon the window takes a step.
    _PERIOD_PER_ENTRY, _STEP_PER_ENTRY = 40, 6
    _LEAST_PERIOD, _LONGEST_PERIOD, _LEAST_STEP = 1024, 32_768, 64
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
        self._number = 0  # of the last access
        self._entries: dict[str, _Entry] = {}  # all, held or not
        self._frequencies = Frequencies()
        self._period_ends = self._LEAST_PERIOD
        self._window = Window()
        self._window_rows = Window.START * cache_rows
        self._step_began, self._step_ends = 0, self._LEAST_STEP
        self._lost_s = 0.0  # since then
        self._new: OrderedDict[str, int] = OrderedDict()  # in the window, the oldest first: rows
        self._new_rows = 0
        self._heap: list[tuple[float, int, str]] = []
        self._by_look: OrderedDict[str, None] = OrderedDict()  # in the heap

    def hit(self, mm_hash: str) -> None:
        """A request that did not hold it before wants what the device has."""
        self._number = number = self._number + 1
        self._frequencies.add(mm_hash)
        entry = self._entries[mm_hash]
        entry.number = number
        if mm_hash in self._new:
            self._new.move_to_end(mm_hash)
        else:
            if entry.worth is not None:
                entry.worth = None
                del self._by_look[mm_hash]
            self._enter(mm_hash, entry.rows)
        if number >= self._step_ends:
            self._take_step(number)

    def allocated(self, mm_hash: str, modality: str, rows: int) -> None:
        """The device gets it: it is loaded or encoded."""
        self._lost_s += self._restore_s(mm_hash, modality, rows)
        if mm_hash not in self._entries:
            self._entries[mm_hash] = _Entry(modality, rows)
        self.hit(mm_hash)

    def _enter(self, mm_hash: str, rows: int) -> None:
        """It is the newest of the window; the oldest ones have to leave."""
        self._new[mm_hash] = rows
        self._new_rows += rows
        while self._new_rows > self._window_rows and len(self._new) > 1:
            oldest, rows = self._new.popitem(last=False)
            self._new_rows -= rows
            if oldest in self:
                self._push(oldest)

    def _take_step(self, number: int) -> None:
        """Once in a while: another window, another period."""
        self._window.climb(self._lost_s / (number - self._step_began))
        self._window_rows = self._window.share * self._cache_rows
        self._lost_s = 0.0
        count = len(self._entries)
        self._step_began = number
        self._step_ends = number + max(self._LEAST_STEP, self._STEP_PER_ENTRY * count)
        if number >= self._period_ends:
            self._frequencies.begin_period()
            period = max(self._LEAST_PERIOD, self._PERIOD_PER_ENTRY * count)
            self._period_ends = number + min(period, self._LONGEST_PERIOD)

    def __setitem__(self, mm_hash: str, num_embeds: int) -> None:
        """The last holder has left."""
        super().__setitem__(mm_hash, num_embeds)
        if mm_hash not in self._new:
            self._push(mm_hash)

    def _push(self, mm_hash: str) -> None:
        """Into the heap, where it may have been before with another worth."""
        entry = self._entries[mm_hash]
        if entry.row_s is None:
            self._look(mm_hash, entry)
        entry.worth = worth = self._frequencies.of(mm_hash) * (entry.row_s or 0.0)
        heapq.heappush(self._heap, (worth, entry.number, mm_hash))
        self._by_look[mm_hash] = None
        if len(self._heap) > _MOST_STALE * len(self._by_look) + _FEW:
            self._drop_stale()

    def _look(self, mm_hash: str, entry: _Entry) -> float:
        """Ask what it would cost now; the answer is for one row."""
        rows = entry.rows
        entry.row_s = row_s = self._restore_s(mm_hash, entry.modality, rows) / (rows or 1)
        return row_s

    def _drop_stale(self) -> None:
        self._heap = [one for one in self._heap if self._counts(one)]
        heapq.heapify(self._heap)

    def _counts(self, one: tuple[float, int, str]) -> bool:
        """Whether it was not held again, and is not in the heap once more, since it was pushed."""
        worth, number, mm_hash = one
        entry = self._entries.get(mm_hash)
        return entry is not None and entry.number == number and entry.worth == worth

    def popitem(self, last: bool = True) -> tuple[str, int]:
        """The victim and its rows; ``last`` is vLLM's and always False."""
        if self._by_look:
            oldest = next(iter(self._by_look))
            self._by_look.move_to_end(oldest)
            entry = self._entries[oldest]
            before_s = entry.row_s
            if self._look(oldest, entry) != before_s:
                self._push(oldest)
        while self._heap:
            one = heapq.heappop(self._heap)
            if not self._counts(one):
                continue
            worth, _, mm_hash = one
            entry = self._entries[mm_hash]
            now = self._frequencies.of(mm_hash) * self._look(mm_hash, entry)
            if now > self._SAME * worth:
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

    @property
    def remembered(self) -> int:
        """Notes that are kept, of entries here and of what is out of date."""
        return len(self._heap) + len(self._entries) + len(self._frequencies)

    def clear(self) -> None:
        """All entries are gone, those that are held too. How often each was asked for stays."""
        super().clear()
        self._entries.clear()
        self._new.clear()
        self._new_rows = 0
        self._heap.clear()
        self._by_look.clear()
