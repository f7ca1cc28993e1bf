# SPDX-License-Identifier: Apache-2.0
"""The order in which vLLM's encoder cache evicts embeddings that no request holds.

vLLM 0.32's ``EncoderCacheManager`` keeps those in ``freeable``, an ``OrderedDict``: it adds one
when its last holder leaves, pops it by name when a request needs it again, and takes
``popitem(last=False)`` for a victim. The queues here override that one call. All other
bookkeeping stays vLLM's.

An entry is *held* (not in the queue), *freeable* (in it), or *gone* (it was the victim). An access
is a hit or an allocation, so the accessed entry is held from then on.

Room is made for one item of a request, and the request may need others next. Those are *spared*:
they are evicted only if nothing else is left. vLLM asks for the items of a request one after the
other, so otherwise one item could evict the next, which would then be encoded again.

An exception here would kill the engine. So an entry that a queue does not know, which vLLM 0.32
never has, is kept like any other and is evicted when nothing else is left.
"""

from __future__ import annotations

import math
import random
from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass

RestoreSeconds = Callable[[str, str, int], float]
"""Maps identifier, modality and rows to the seconds until the device would have it again."""

# Entries that are compared for a victim, about 3 us each: more would delay the scheduler's step.
_SAMPLE = 32


class LeastRecent(OrderedDict[str, int]):
    """Evicts the entry accessed longest ago; accesses while requests hold an entry count too.

    The search passes each held entry that was accessed before the victim.

    Attributes:
        spared: Entries that are evicted only if nothing else is left.
    """

    def __init__(self) -> None:
        super().__init__()
        self.spared: Collection[str] = ()
        self._by_access: OrderedDict[str, None] = OrderedDict()  # all entries, held or not

    def accessed(self, mm_hash: str) -> None:
        """Note an access: a request hits an entry on the device, or the device allocates it."""
        self._by_access[mm_hash] = None
        self._by_access.move_to_end(mm_hash)

    def popitem(self, last: bool = True) -> tuple[str, int]:
        """Remove the victim, and return it with its rows; ``last`` is vLLM's and always False."""
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
        """Drop all entries, held ones too."""
        super().clear()
        self._by_access.clear()


class Frequencies:
    """Counts the recent accesses of each name, up to 15; bounded by the names of two periods.

    The counters of TinyLFU (Einziger, Friedman and Manes, 2017) are halved every so many accesses.
    Here a name's counter is halved at its first access in a new period, and dropped if a whole
    period had none. So no access pays for all names, and only the names of two periods are kept.
    The counters are exact: there are too few of them to need a sketch of hashes.
    """

    MOST = 15

    def __init__(self) -> None:
        self._new: dict[str, int] = {}
        self._old: dict[str, int] = {}

    def add(self, name: str) -> None:
        """Count one more access."""
        count = self._new.get(name)
        if count is None:
            count = self._old.get(name, 0) >> 1
        if count < self.MOST:
            count += 1
        self._new[name] = count

    def of(self, name: str) -> int:
        """Return the counter; at least 1, as for a name with one access."""
        count = self._new.get(name)
        return (count if count is not None else self._old.get(name, 0) >> 1) or 1

    def begin_period(self) -> None:
        """Halve all counters, and drop names without access in the last period."""
        self._old, self._new = self._new, {}

    def __len__(self) -> int:
        return len(self._new.keys() | self._old.keys())


class Window:
    """Decides how much of the cache is kept because it is new, whatever its worth.

    One page is requested again within a minute, and never after that; another one every hour.
    Which is more common differs from fleet to fleet, and from hour to hour. So the window grows or
    shrinks by a sixteenth of the cache: in the same direction as before if misses got cheaper, else
    back. That is the hill climbing of Einziger, Eytan, Friedman and Manes (*Adaptive Software Cache
    Management*, 2018), with the cost of misses in place of their number.

    The window is counted in accesses: an entry is new for the next ``share`` x entries accesses.

    Attributes:
        share: Share of the entries, 0 to 1.
    """

    START, LEAST, MOST = 0.1, 0.02, 0.9
    _STEP = 0.0625
    # A smaller change means nothing: a scan costs the same whatever the window is.
    _LEAST_CHANGE = 0.01

    def __init__(self) -> None:
        self.share = self.START
        self._step = self._STEP
        self._before_s = math.nan

    def climb(self, cost_s: float) -> None:
        """Take the next step, unless nothing has changed.

        Args:
            cost_s: Cost of the misses since the last step, per access.
        """
        change_s, before_s = cost_s - self._before_s, self._before_s
        if abs(change_s) <= self._LEAST_CHANGE * before_s:
            return
        self._before_s = cost_s
        if math.isnan(before_s):  # the first cost has nothing to compare with
            return
        if change_s > 0:
            self._step = -self._step
        self.share = min(max(self.share + self._step, self.LEAST), self.MOST)


@dataclass(slots=True)
class _Entry:
    """An embedding on the device.

    Attributes:
        number: Number of its last access.
    """

    modality: str
    rows: int
    number: int = 0


class LeastWorth(OrderedDict[str, int]):
    """Evicts the entry with the lowest frequency x cost / size (GreedyDual-Size-Frequency).

    The worth of an entry is its frequency times the seconds to restore it, per row. So an entry
    that this node's disk restores in a millisecond goes before one that must come from the bucket,
    and that one before one that must be encoded. Of two with the same worth, the one accessed
    longer ago goes. A new entry is kept for a while, see ``Window``. vLLM must hold what it
    computes with, so no entry is refused: one scan of the corpus passes through the window and
    leaves the often requested entries. (Costs come from GreedyDual-Size, Cao and Irani, 1997.)

    Entries are compared when a victim is needed, by their cost at that time: it changes, since the
    disk evicts and uploads end. If there are many, a sample is compared.

    Attributes:
        spared: Entries that are evicted only if nothing else is left.
        frequencies: Accesses of the entries on the device, and of recently evicted ones.
    """

    # Accesses per entry: the length of a period of frequencies, and of a step of the window.
    _PERIOD_PER_ENTRY, _STEP_PER_ENTRY = 40, 6
    _LEAST_PERIOD, _LONGEST_PERIOD, _LEAST_STEP = 1024, 32_768, 64

    def __init__(self, restore_s: RestoreSeconds) -> None:
        """Start an empty cache.

        Args:
            restore_s: Called for each candidate and each allocated entry; memory only.
        """
        super().__init__()
        self.spared: Collection[str] = ()
        self._restore_s = restore_s
        self._random = random.Random(0)
        self._number = 0  # of the last access
        self._entries: dict[str, _Entry] = {}  # all, held or not
        self.frequencies = Frequencies()
        self._period_ends = self._LEAST_PERIOD
        self._window = Window()
        self._step_began, self._step_ends = 0, self._LEAST_STEP
        self._lost_s = 0.0  # cost of the misses since then

    def hit(self, mm_hash: str) -> None:
        """Note a hit of a request that did not hold the entry before."""
        entry = self._entries.get(mm_hash)
        if entry is not None:
            self._accessed(mm_hash, entry)

    def allocated(self, mm_hash: str, modality: str, rows: int) -> None:
        """Note that the device allocates the entry, to load or encode it."""
        self._lost_s += self._restore_s(mm_hash, modality, rows)
        entry = self._entries.setdefault(mm_hash, _Entry(modality, rows))
        self._accessed(mm_hash, entry)

    def _accessed(self, mm_hash: str, entry: _Entry) -> None:
        entry.number = self._number = number = self._number + 1
        self.frequencies.add(mm_hash)
        if number >= self._step_ends:
            self._take_step(number)

    def _take_step(self, number: int) -> None:
        """Adapt the window, and begin a new period if the old one is over."""
        self._window.climb(self._lost_s / (number - self._step_began))
        self._lost_s = 0.0
        count = len(self._entries)
        self._step_began = number
        self._step_ends = number + max(self._LEAST_STEP, self._STEP_PER_ENTRY * count)
        if number >= self._period_ends:
            self.frequencies.begin_period()
            period = max(self._LEAST_PERIOD, self._PERIOD_PER_ENTRY * count)
            self._period_ends = number + min(period, self._LONGEST_PERIOD)

    def popitem(self, last: bool = True) -> tuple[str, int]:
        """Remove the victim, and return it with its rows; ``last`` is vLLM's and always False."""
        spared = self.spared
        names = [name for name in self if name not in spared] if spared else []
        names = names or list(self)
        if len(names) > _SAMPLE:
            names = self._random.choices(names, k=_SAMPLE)
        known = [(name, self._entries[name]) for name in names if name in self._entries]
        if not known:
            return super().popitem(last=False)
        new_from = self._number - int(self._window.share * len(self._entries))
        old = [one for one in known if one[1].number <= new_from]
        if old:
            victim, _ = min(old, key=lambda one: (self._worth(*one), one[1].number))
        else:
            victim, _ = min(known, key=lambda one: one[1].number)
        del self._entries[victim]
        return victim, self.pop(victim)

    def _worth(self, mm_hash: str, entry: _Entry) -> float:
        """Return the current worth of a row of the entry."""
        rows = entry.rows or 1
        row_s = self._restore_s(mm_hash, entry.modality, rows) / rows
        return self.frequencies.of(mm_hash) * row_s

    def clear(self) -> None:
        """Drop all entries, held ones too. The frequencies stay."""
        super().clear()
        self._entries.clear()
