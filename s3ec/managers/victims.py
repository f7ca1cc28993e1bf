# SPDX-License-Identifier: Apache-2.0
"""The order in which vLLM's encoder cache gives up embeddings that no request holds.

vLLM 0.32's ``EncoderCacheManager`` keeps those in ``freeable``, an ``OrderedDict``: it puts one in
when its last holder leaves, pops it by name when somebody wants it again, and takes
``popitem(last=False)`` for a victim. The queues here answer that one call differently. All other
bookkeeping stays vLLM's.

An entry is *held* (not in the queue), *freeable* (in it), or *gone* (it was the victim). An access
is a hit or an allocation, so it happens only to what is held from then on.

Room is made for one item of a request, and the request may want others next. Those are *spared*:
they go only where nothing else is left. vLLM asks for the items of a request one after the other,
so without that one of them would push out the next, which lies there and would be encoded again.

An exception here would end the engine. So an entry that a queue was not told of, which vLLM 0.32
never has, is kept like any other and goes when nothing else is left.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass

RestoreSeconds = Callable[[str, str, int], float]
"""Identifier, modality and rows to the seconds until the device would have it again."""

# Notes that are out of date are dropped when there are this many for each one that counts.
_MOST_STALE = 3
_FEW = 64
# Victims from one look at an entry that may have become cheap to the next.
_LOOK_EVERY = 2


class LeastRecent(OrderedDict[str, int]):
    """The victim is what was accessed longest ago, also while requests still held it.

    To find it takes a look at each entry that is held and was accessed before it.

    Attributes:
        spared: What goes only where nothing else is left.
    """

    def __init__(self) -> None:
        super().__init__()
        self.spared: Collection[str] = ()
        self._by_access: OrderedDict[str, None] = OrderedDict()  # all entries, held or not

    def accessed(self, mm_hash: str) -> None:
        """A request wants what the device has, or the device gets it."""
        self._by_access[mm_hash] = None
        self._by_access.move_to_end(mm_hash)

    def popitem(self, last: bool = True) -> tuple[str, int]:
        """The victim and its rows; ``last`` is vLLM's and always False."""
        spared, found = self.spared, None
        for mm_hash in self._by_access:
            if mm_hash in self:
                if mm_hash not in spared:
                    found = mm_hash
                    break
                found = found or mm_hash
        if found is None:
            return super().popitem(last=False)
        del self._by_access[found]
        return found, self.pop(found)

    def clear(self) -> None:
        """All entries are gone, those that are held too."""
        super().clear()
        self._by_access.clear()


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

    It is counted in accesses. An entry is new until so many others came, as this share of all.

    Attributes:
        share: Of the entries, 0 to 1.
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
        row_s: What a row of it would cost, when that was last asked.
        asked: When that was, in victims.
        worth: As in the heap; None where it is not there.
    """

    modality: str
    rows: int
    number: int = 0
    row_s: float = 0.0
    asked: int = 0
    worth: float | None = None


class LeastWorth(OrderedDict[str, int]):
    """The victim is what is least worth its rows.

    An entry is worth its frequency times the seconds until the device would have it again, per row.
    So what this node's disk gives back in a millisecond goes before what must come from the bucket,
    and that before what must be encoded; of two that are worth the same the one that was accessed
    longer ago. What is new is kept for a while, see ``Window``. vLLM must hold what it computes
    with, so nothing is refused: one scan of the corpus passes through the window and leaves what
    is asked for again and again. (A cost in the choice: GreedyDual-Size, Cao and Irani, 1997.)

    A freeable entry is first *new*, in the order of release, and later *ranked*, in a heap by its
    worth. It is held in between as often as it is wanted, and is new again after that. All of this
    is done when a victim is needed, so that a hit costs little. What an entry would cost changes
    with time: the disk evicts, an upload ends. So the least of the heap is asked about again before
    it goes, and with every other victim the one that was asked about longest ago.

    Attributes:
        spared: What goes only where nothing else is left.
    """

    # Of the entries: what the frequencies remember, and how soon the window takes a step.
    _PERIOD_PER_ENTRY, _STEP_PER_ENTRY = 40, 6
    _LEAST_PERIOD, _LONGEST_PERIOD, _LEAST_STEP = 1024, 32_768, 64
    # Costs are means that move a little with each sample.
    _SAME = 1.01

    def __init__(self, restore_s: RestoreSeconds) -> None:
        """An empty cache.

        Args:
            restore_s: Asked for each entry that may go; memory only.
        """
        super().__init__()
        self.spared: Collection[str] = ()
        self._restore_s = restore_s
        self._number = 0  # of the last access
        self._victims = 0  # so far
        self._entries: dict[str, _Entry] = {}  # all, held or not
        self._frequencies = Frequencies()
        self._period_ends = self._LEAST_PERIOD
        self._window = Window()
        self._step_began, self._step_ends = 0, self._LEAST_STEP
        self._lost_s = 0.0  # since then
        # Each with the number of the access: what was accessed since is out of date in them.
        self._new: deque[tuple[int, str]] = deque()
        self._most_new = _FEW
        self._heap: list[tuple[float, int, str]] = []
        self._by_look: deque[tuple[int, str]] = deque()

    def hit(self, mm_hash: str) -> None:
        """A request that did not hold it before wants what the device has."""
        entry = self._entries.get(mm_hash)
        if entry is not None:
            self._accessed(mm_hash, entry)

    def allocated(self, mm_hash: str, modality: str, rows: int) -> None:
        """The device gets it: it is loaded or encoded."""
        self._lost_s += self._restore_s(mm_hash, modality, rows)
        entry = self._entries.get(mm_hash)
        if entry is None:
            entry = self._entries[mm_hash] = _Entry(modality, rows)
        self._accessed(mm_hash, entry)

    def _accessed(self, mm_hash: str, entry: _Entry) -> None:
        entry.number = self._number = number = self._number + 1
        entry.worth = None
        self._frequencies.add(mm_hash)
        if number >= self._step_ends:
            self._take_step(number)

    def _take_step(self, number: int) -> None:
        """Once in a while: another window, another period."""
        self._window.climb(self._lost_s / (number - self._step_began))
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
        OrderedDict.__setitem__(self, mm_hash, num_embeds)
        entry = self._entries.get(mm_hash)
        if entry is None:
            return
        new = self._new
        new.append((entry.number, mm_hash))
        if len(new) > self._most_new:
            self._new = new = deque(note for note in new if self._is_new(*note))
            self._most_new = _MOST_STALE * len(new) + _FEW

    def _is_new(self, number: int, mm_hash: str) -> bool:
        """Whether a note of a release is true still."""
        entry = self._entries.get(mm_hash)
        return entry is not None and entry.number == number and mm_hash in self

    def _rank_old(self) -> None:
        """What is new no longer goes into the heap."""
        entries, new = self._entries, self._new
        until = self._number - int(self._window.share * len(entries))
        while new and new[0][0] <= until:
            note = new.popleft()
            number, mm_hash = note
            entry = entries.get(mm_hash)
            if entry is not None and entry.number == number and mm_hash in self:
                self._by_look.append(note)
                self._push(mm_hash, entry, self._ask(mm_hash, entry))

    def _ask(self, mm_hash: str, entry: _Entry) -> float:
        """What a row of it would cost now."""
        rows = entry.rows or 1
        entry.asked = self._victims
        entry.row_s = row_s = self._restore_s(mm_hash, entry.modality, rows) / rows
        return row_s

    def _push(self, mm_hash: str, entry: _Entry, row_s: float) -> None:
        entry.worth = worth = self._frequencies.of(mm_hash) * row_s
        heap = self._heap
        heapq.heappush(heap, (worth, entry.number, mm_hash))
        if len(heap) > _MOST_STALE * len(self) + _FEW:
            self._heap = [one for one in self._heap if self._is_ranked(*one)]
            heapq.heapify(self._heap)

    def _is_ranked(self, worth: float, number: int, mm_hash: str) -> bool:
        """Whether a place in the heap counts: it was not wanted since, nor has another place."""
        entry = self._entries.get(mm_hash)
        return entry is not None and entry.number == number and entry.worth == worth

    def _look_again(self) -> None:
        """Ask about the entry that was asked about longest ago."""
        looked = self._by_look
        while looked:
            note = looked.popleft()
            number, mm_hash = note
            entry = self._entries.get(mm_hash)
            if entry is None or entry.number != number or entry.worth is None:
                continue
            looked.append(note)
            before_s = entry.row_s
            row_s = self._ask(mm_hash, entry)
            if row_s != before_s:
                self._push(mm_hash, entry, row_s)
            return

    def popitem(self, last: bool = True) -> tuple[str, int]:
        """The victim and its rows; ``last`` is vLLM's and always False."""
        self._victims += 1
        self._rank_old()
        if not self._victims % _LOOK_EVERY:
            self._look_again()
        kept: list[tuple[float, int, str]] = []
        victim = self._least_ranked(kept) or self._oldest_new(self.spared)
        if victim is None:
            victim = kept.pop(0)[2] if kept else self._oldest_new(())
        for place in kept:
            heapq.heappush(self._heap, place)
        if victim is None:
            return super().popitem(last=False)
        del self._entries[victim]
        return victim, self.pop(victim)

    def _least_ranked(self, kept: list[tuple[float, int, str]]) -> str | None:
        """The least of the heap; what is spared and comes before it is put aside in ``kept``."""
        while self._heap:
            place = heapq.heappop(self._heap)
            worth, number, mm_hash = place
            entry = self._entries.get(mm_hash)
            if entry is None or entry.number != number or entry.worth != worth:
                continue  # it was wanted since, or has another place
            if mm_hash in self.spared:
                kept.append(place)
                continue
            if entry.asked != self._victims:
                row_s = self._ask(mm_hash, entry)
                if self._frequencies.of(mm_hash) * row_s > self._SAME * worth:
                    self._push(mm_hash, entry, row_s)
                    continue
            return mm_hash
        return None

    def _oldest_new(self, spared: Collection[str]) -> str | None:
        """Of what is new the one that was released first."""
        for number, mm_hash in self._new:
            if mm_hash not in spared and self._is_new(number, mm_hash):
                return mm_hash
        return None

    @property
    def remembered(self) -> int:
        """Notes that are kept, of entries here and of what is out of date."""
        notes = len(self._heap) + len(self._new) + len(self._by_look)
        return notes + len(self._entries) + len(self._frequencies)

    def clear(self) -> None:
        """All entries are gone, those that are held too. How often each was asked for stays."""
        super().clear()
        self._entries.clear()
        self._new.clear()
        self._heap.clear()
        self._by_look.clear()
