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

import math
import random
from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass

RestoreSeconds = Callable[[str, str, int], float]
"""Identifier, modality and rows to the seconds until the device would have it again."""

# So many entries are compared for a victim, some 3 us each: more would hold up a scheduler's step.
_SAMPLE = 32


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
    # Less of a change says nothing: a scan costs the same whatever the window is.
    _LEAST_CHANGE = 0.01

    def __init__(self) -> None:
        self.share = self.START
        self._step = self._STEP
        self._before_s = math.nan

    def climb(self, cost_s: float) -> None:
        """Take the next step, unless nothing has changed.

        Args:
            cost_s: What misses have cost since the last step, for each access.
        """
        change_s, before_s = cost_s - self._before_s, self._before_s
        if abs(change_s) <= self._LEAST_CHANGE * before_s:
            return
        self._before_s = cost_s
        if math.isnan(before_s):  # the first one has nothing to be compared with
            return
        if change_s > 0:
            self._step = -self._step
        self.share = min(max(self.share + self._step, self.LEAST), self.MOST)


@dataclass(slots=True)
class _Entry:
    """What is known of an embedding on the device.

    Attributes:
        number: Of its last access.
    """

    modality: str
    rows: int
    number: int = 0


class LeastWorth(OrderedDict[str, int]):
    """Evicts the entry with the lowest frequency x cost / size (GreedyDual-Size-Frequency).

    An entry is worth its frequency times the seconds until the device would have it again, per row.
    So what this node's disk gives back in a millisecond goes before what must come from the bucket,
    and that before what must be encoded; of two that are worth the same the one that was accessed
    longer ago. What is new is kept for a while, see ``Window``. vLLM must hold what it computes
    with, so nothing is refused: one scan of the corpus passes through the window and leaves what
    is asked for again and again. (A cost in the choice: GreedyDual-Size, Cao and Irani, 1997.)

    Entries are compared when a victim is needed, by what each of them would cost then: that changes
    with time, since the disk evicts and uploads end. Where there are many, a sample is compared.

    Attributes:
        spared: What goes only where nothing else is left.
        frequencies: Of what the device holds, and of what it held lately.
    """

    # Of the entries: what the frequencies remember, and how soon the window takes a step.
    _PERIOD_PER_ENTRY, _STEP_PER_ENTRY = 40, 6
    _LEAST_PERIOD, _LONGEST_PERIOD, _LEAST_STEP = 1024, 32_768, 64

    def __init__(self, restore_s: RestoreSeconds) -> None:
        """An empty cache.

        Args:
            restore_s: Asked for each entry that may go; memory only.
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
        self._lost_s = 0.0  # since then

    def hit(self, mm_hash: str) -> None:
        """A request that did not hold it before wants what the device has."""
        entry = self._entries.get(mm_hash)
        if entry is not None:
            self._accessed(mm_hash, entry)

    def allocated(self, mm_hash: str, modality: str, rows: int) -> None:
        """The device gets it: it is loaded or encoded."""
        self._lost_s += self._restore_s(mm_hash, modality, rows)
        entry = self._entries.setdefault(mm_hash, _Entry(modality, rows))
        self._accessed(mm_hash, entry)

    def _accessed(self, mm_hash: str, entry: _Entry) -> None:
        entry.number = self._number = number = self._number + 1
        self.frequencies.add(mm_hash)
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
            self.frequencies.begin_period()
            period = max(self._LEAST_PERIOD, self._PERIOD_PER_ENTRY * count)
            self._period_ends = number + min(period, self._LONGEST_PERIOD)

    def popitem(self, last: bool = True) -> tuple[str, int]:
        """The victim and its rows; ``last`` is vLLM's and always False."""
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
        """What a row of it is worth now."""
        rows = entry.rows or 1
        row_s = self._restore_s(mm_hash, entry.modality, rows) / rows
        return self.frequencies.of(mm_hash) * row_s

    def clear(self) -> None:
        """All entries are gone, those that are held too. How often each was asked for stays."""
        super().clear()
        self._entries.clear()
