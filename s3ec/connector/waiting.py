# SPDX-License-Identifier: Apache-2.0
"""Whether a request waits for its embeddings or has them encoded: whichever costs less.

Everything here is arithmetic on what it is told. There is no clock, no I/O and no lock; the
scheduler's thread owns it all. Times are seconds.

A decision compares two costs, anew in each scheduling pass:

* to stop now: what is still missing is encoded. That takes the learned encoding cost of each
  missing item, times a price: an encode delays every request that is being worked on.
* to wait until some time T from now: the expected wait, and then the encoding of what is expected
  to be missing still. How long a fetch takes is learned, by source and size, as a distribution.

The request waits while some T is cheaper than to stop now. What it does not wait for is fetched all
the same, for later requests.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, KeysView, Mapping, Sequence
from dataclasses import dataclass

from s3ec.counters import RecentTimes
from s3ec.encode_costs import EncodeCosts

# How many durations are remembered for each kind of fetch.
_SAMPLES = 128
# With fewer nobody can say what is late.
_FEW = 16
# Beyond the third longest, the share that takes longer falls with the age to this power.
_TAIL_POWER = 3.0
# Before anything was fetched.
PRIOR_FETCH_S = 0.05
# Times that are tried for the end of a wait.
_TRIES = 25
# Doubt: how much more a wait may cost, and for which share of the cost to stop.
_DOUBT_COST = 1.2
_DOUBT_SHARE = 0.25
# A wait begins where it costs at most so much of what encoding costs.
_BEGIN_COST = 0.8
# A fetch that hangs looks like one that is about to end. So a wait lasts at most so many times the
# cost to stop; a shorter limit would end most waits just before their end.
_LONGEST_SHARE = 2.0
# A decision to wait holds for this share of the cost to stop: to decide later costs no more.
_HOLD_SHARE = 0.05
# How fast the engine's load is forgotten, and what it counts at most.
_MEMORY_S = 3.0
_BUSIEST = 0.97
_MOST_OTHERS = 500.0
_IDLE_CROWD = 0.02
# The smoothing of what is seen once a pass or once a request.
_PASS_WEIGHT = 0.1
_REQUEST_WEIGHT = 0.05
_LEAST_WEIGHT = 0.005
# So many fetches without an answer say that the store has gone silent; fewer may be bad luck.
_SILENT_FROM = 3
# What is believed of a cost may be so many times too high.
_FAR_TOO_HIGH = 10.0
# In one scheduling pass; 64 of them take less than a millisecond.
MOST_DECISIONS = 64
# A scheduler that runs nothing looks again after about this long (vLLM sleeps 1 ms).
IDLE_PAUSE_S = 0.0012
_LONGEST_PAUSE_S = 1.0


class FetchTimes:
    """How long fetches of one kind take, from their begin: the last 128 of them."""

    def __init__(self) -> None:
        self._times = RecentTimes(_SAMPLES, few=_FEW)
        self.mean_s = PRIOR_FETCH_S

    def add(self, seconds: float) -> None:
        """One fetch has taken so long."""
        if self._times.add(seconds):
            times = self._times.in_order
            self.mean_s = sum(times) / len(times)

    @property
    def is_known(self) -> bool:
        """Whether there was any."""
        return bool(self._times.in_order)

    @property
    def late_s(self) -> float:
        """What one in a hundred takes; 0 before there are enough to tell."""
        times = self._times.in_order
        return times[-max(1, len(times) // 100)] if len(times) >= _FEW else 0.0

    def later_than(self, age_s: float) -> float:
        """Share of the fetches that take longer than this: 0 to 1, never rising with the age."""
        if age_s <= 0:
            return 1.0
        times = self._times.in_order
        count = len(times)
        if not count:
            return math.exp(-age_s / PRIOR_FETCH_S)
        longer = count - bisect_right(times, age_s)
        if longer > 2:
            return longer / count
        # Of the few longest nothing is known but that they were long.
        third = times[max(0, count - 3)]
        share = min(3, count) / count
        if age_s <= third:
            return max(longer / count, share)
        return share * math.pow(third / age_s, _TAIL_POWER)


class SourceTimes:
    """How long fetches take, by where from and by size class.

    A source is ``bucket``, ``tier``, or ``promise`` for what is still being uploaded.
    """

    def __init__(self) -> None:
        self._times: dict[tuple[str, int], FetchTimes] = {}

    def of(self, source: str, rows: int) -> FetchTimes:
        """Those of this source and of about this size."""
        kind = (source, rows.bit_length())
        found = self._times.get(kind)
        if found is None:
            found = self._times[kind] = FetchTimes()
        return found

    def relearn(self, source: str) -> None:
        """How long fetches of this source take is to be learned anew."""
        self._times = {kind: times for kind, times in self._times.items() if kind[0] != source}


class EngineLoad:
    """How busy the engine is, from what the hooks are asked: whom an encode would delay."""

    def __init__(self, steps_in_flight: int) -> None:
        """Start idle.

        Args:
            steps_in_flight: Scheduling passes until the one whose step runs now: 1, or 2 with
                asynchronous scheduling.
        """
        idle = (False, False)  # whether the step had a prefill, and any tokens
        self._steps = deque([idle] * steps_in_flight, maxlen=steps_in_flight)
        self._last_s: float | None = None
        self._ended_s = 0.0
        self._busy_s = 0.0
        self._wall_s = 1e-6
        self._plain_s = 0.0  # a step that only decodes
        self._pause_s = IDLE_PAUSE_S
        self._arrivals = 0.0  # requests a second
        self._delay_s = 0.0  # from arrival to the first question
        self._least_s: float | None = None  # of those: what the front end takes, and its clock
        self._crowd = 0.0
        self._others = 0
        self._asked = self._fresh = self._deferred = 0

    def asked(self, *, delay_s: float | None = None) -> None:
        """A request was asked about; ``delay_s`` since its arrival, if for the first time."""
        self._asked += 1
        if delay_s is not None:
            self._fresh += 1
            least_s = delay_s if self._least_s is None else self._least_s
            # It follows slowly upwards, should the front end become slower.
            least_s = min(delay_s, least_s + _LEAST_WEIGHT * (delay_s - least_s))
            self._least_s = least_s
            self._delay_s += _REQUEST_WEIGHT * (delay_s - least_s - self._delay_s)

    def deferred(self) -> None:
        """One of those asked about waits."""
        self._deferred += 1

    def end_request(self, now: float) -> None:
        """A request has ended, and with it a step; perhaps nothing runs until the next pass."""
        self._ended_s = now

    def end_pass(self, now: float, *, has_prefill: bool, tokens: int, repeated: int = 0) -> None:
        """A scheduling pass has ended; ``repeated`` more requests wait as they did before."""
        last, self._last_s = self._last_s, now
        self._asked += repeated
        self._deferred += repeated
        if last is not None and now > last:
            ran_s = (self._ended_s if self._ended_s > last else now) - last
            self._learn(now - last, ran_s)
            self._fresh = 0
        self._steps.append((has_prefill, tokens > 0))
        self._others = max(0, self._asked - self._deferred)
        self._asked = self._deferred = 0

    def _learn(self, interval_s: float, ran_s: float) -> None:
        """Since the last pass so much time has passed, and a step ran for some of it."""
        kept = math.exp(-interval_s / _MEMORY_S)
        had_prefill, had_tokens = self._steps[0]  # of the step that has run meanwhile
        exclusive_s = 0.0
        if had_prefill:
            exclusive_s = max(0.0, ran_s - self._plain_s)
        elif had_tokens:
            weight = _PASS_WEIGHT if self._plain_s else 1.0
            self._plain_s += weight * (ran_s - self._plain_s)
        self._busy_s = self._busy_s * kept + exclusive_s
        self._wall_s = self._wall_s * kept + interval_s
        if self._steps[-1][1]:
            self._pause_s += _PASS_WEIGHT * (min(ran_s, _LONGEST_PAUSE_S) - self._pause_s)
        self._arrivals += (1 - kept) * (self._fresh / interval_s - self._arrivals)
        self._crowd += (1 - kept) * (max(0, self._asked - 1) - self._crowd)

    @property
    def pause_s(self) -> float:
        """How long until a decision can be changed."""
        return self._pause_s if self._steps[-1][1] else IDLE_PAUSE_S

    @property
    def price(self) -> float:
        """What a second of encoding costs, in seconds of all requests: 1 and more."""
        if self._crowd < _IDLE_CROWD:
            return 1.0
        busy = min(_BUSIEST, self._busy_s / self._wall_s)
        others = min(_MOST_OTHERS, self._others + self._arrivals * self._delay_s)
        # Who waits now, and who comes before the engine has caught up.
        return (1.0 + others) / (1.0 - busy)


@dataclass(frozen=True, slots=True)
class Missing:
    """Items of one request that are being fetched and are alike.

    Attributes:
        count: How many.
        age_s: Since their fetch began. Negative while they stand in the queue: minus the time
            until they are expected to begin.
        times: How long such fetches take.
    """

    count: int
    age_s: float
    times: FetchTimes


def is_waiting_cheaper(
    missing: Sequence[Missing],
    encode_s: float,
    pause_s: float,
    *,
    most: float = 1.0,
) -> bool:
    """Whether to wait until some time costs less than to encode all now.

    Args:
        missing: What the request lacks.
        encode_s: What it costs to encode one of them, price included, less what loading costs.
        pause_s: How long until the decision can be changed.
        most: How many times the cost of encoding a wait may cost.
    """
    count = sum(one.count for one in missing)
    stop_s = encode_s * count
    limit_s = stop_s * most
    if stop_s <= 0:
        return False
    missing_now = [max(one.times.later_than(one.age_s), 1e-6) for one in missing]
    horizon_s = stop_s + 4 * pause_s
    step = max(1.0001, horizon_s / pause_s) ** (1 / (_TRIES - 1))
    end_s, waited_s, not_all = 0.0, 0.0, 1.0
    for number in range(_TRIES):
        next_s = max(pause_s * step**number, end_s + pause_s)
        all_here, left = 1.0, 0.0
        for one, share_now in zip(missing, missing_now, strict=True):
            share = min(1.0, one.times.later_than(one.age_s + next_s) / share_now)
            all_here *= (1.0 - share) ** one.count
            left += one.count * share
        span_s = next_s - end_s
        waited_s += not_all * span_s
        if span_s > 1.5 * pause_s:
            # All may be here in the middle of the span; that is seen at the next pass.
            waited_s -= (not_all - (1.0 - all_here)) * (span_s - pause_s) * 0.5
        if waited_s + encode_s * left < limit_s:
            return True
        if waited_s >= limit_s or next_s > horizon_s:
            return False
        end_s, not_all = next_s, 1.0 - all_here
    return False


class FetchQueue:
    """Which fetches have begun, as far as the scheduler's thread can tell.

    The prefetcher begins them in their order, some at a time, and says when each has ended.
    """

    def __init__(self, places: int) -> None:
        """Start empty.

        Args:
            places: Fetches that run at a time.
        """
        self._places = places
        self._ordered = self._ended = 0
        # Since when something is under way and nothing has come.
        self._silent_since_s = 0.0

    def order(self, now: float) -> int:
        """One more fetch; its number."""
        if self._ordered <= self._ended:
            self._silent_since_s = now
        self._ordered += 1
        return self._ordered

    def end(self, now: float) -> None:
        """One of them has ended."""
        self._ended += 1
        self._silent_since_s = now

    def reset(self) -> None:
        """Nothing is under way: what was counted otherwise was ordered twice and came once."""
        self._ended = self._ordered

    def ahead(self, number: int) -> int:
        """How many must end before this one begins; 0 once it has begun."""
        return max(0, number - self._ended - self._places)

    def until_begin_s(self, ahead: int, mean_s: float) -> float:
        """When a fetch with so many ahead of it is expected to begin."""
        return ahead / self._places * mean_s

    def silent_s(self, now: float) -> float:
        """How long nothing has come though at least three are under way."""
        under_way = self._ordered - self._ended
        return now - self._silent_since_s if under_way >= _SILENT_FROM else 0.0


@dataclass(slots=True)
class Fetching:
    """One item that is on its way.

    Attributes:
        number: Its place in the queue, of ``FetchQueue.order``.
        began_s: When it was seen to have begun.
    """

    number: int
    began_s: float | None = None


@dataclass(frozen=True, slots=True)
class Lacking:
    """One item that a request lacks.

    Attributes:
        modality: ``image``, ``video``...
        rows: Rows of its embedding.
        source: Where it comes from: ``bucket``, ``tier``, or ``promise`` for what is still being
            uploaded.
        fetching: Its place in the queue.
    """

    modality: str
    rows: int
    source: str
    fetching: Fetching


@dataclass(slots=True)
class _Waiting:
    """One request that waits.

    Attributes:
        is_new: Nothing was decided yet: too many came in one pass.
        again_s: When to decide anew.
        began_s: When it began to wait.
        stop_s: The most that it would have cost to stop, since then.
        doubt_s: Since when it is in doubt; None while it is not.
    """

    is_new: bool
    again_s: float
    began_s: float = 0.0
    stop_s: float = 0.0
    doubt_s: float | None = None


class WaitPolicy:
    """Decides for each request and pass whether it waits.

    A request is, with the cost of stopping and the times T of the module's docstring,

    =========  =========  ==================================================================
    state      goes to    when
    =========  =========  ==================================================================
    new        waiting    some T costs at most 80% of what it costs to stop now
    new        declined   none does, the encoding cost of this kind is to be learned first, or
                          the request was declined after it had waited
    waiting    doubtful   no T is cheaper any more
    doubtful   waiting    some T is cheaper again
    doubtful   declined   a quarter of the cost to stop has passed, or to wait costs a fifth more
    waiting    declined   twice the cost to stop has passed since it began; so for doubtful
    any        (unknown)  the request has ended, or waits for nothing any more
    =========  =========  ==================================================================

    Time in which vLLM does not ask about a request, since the engine is full, counts for none of
    these. A streaming session begins anew with each turn that brings more items.

    ``doubtful`` still waits. The expected rest of a long wait is always "a little more", so without
    it a wait would end just before its end.

    Attributes:
        costs: What encoding costs.
        load: How busy the engine is.
        queue: Fetches under way.
        times: How long fetches take.
    """

    def __init__(self, costs: EncodeCosts, load: EngineLoad, queue: FetchQueue) -> None:
        self.costs = costs
        self.load = load
        self.queue = queue
        self.times = SourceTimes()
        self._waiting: dict[str, _Waiting] = {}
        # Who has waited and was told to encode, and how many items it had then. vLLM may ask about
        # them again.
        self._over: dict[str, int] = {}
        self._decisions = 0

    @property
    def waiting(self) -> KeysView[str]:
        """Requests that wait at present."""
        return self._waiting.keys()

    def end_pass(self, now: float, *, has_prefill: bool, tokens: int, repeated: int = 0) -> None:
        """A scheduling pass has ended; ``repeated`` more requests wait as they did before."""
        self._decisions = 0
        self.load.end_pass(now, has_prefill=has_prefill, tokens=tokens, repeated=repeated)

    def due(self, now: float, paused_s: Mapping[str, float]) -> list[str]:
        """Waiting requests about which to decide anew; at most MOST_DECISIONS, who is due longest
        first. Those that vLLM did not ask about in the last pass come last: it may not do so now.
        Of these it has left out for longest those that stand behind the others in its queue.

        Args:
            now: Monotonic seconds.
            paused_s: Requests that vLLM does not ask about, and since when.
        """
        due = [
            (-paused_s.get(name, math.inf), one.again_s, name)
            for name, one in self._waiting.items()
            if one.again_s <= now and one.again_s <= paused_s.get(name, now)
        ]
        return [name for _, _, name in heapq.nsmallest(MOST_DECISIONS, due)]

    def waits(
        self,
        request_id: str,
        lacking: Callable[[], Sequence[Lacking]],
        now: float,
        *,
        features: int = 0,
    ) -> bool:
        """Whether the request should wait for what it lacks.

        Args:
            request_id: Of the request.
            lacking: What it lacks, at least one; only asked where something is to be decided.
            now: Monotonic seconds.
            features: How many items the request has by now.
        """
        if self._over.get(request_id, features) < features:
            del self._over[request_id]
        # A decision takes some microseconds. Who comes later waits for the next pass.
        if self._decisions >= MOST_DECISIONS:
            self._waiting.setdefault(request_id, _Waiting(is_new=True, again_s=now))
            self.load.deferred()
            return True
        self._decisions += 1
        waits = self._decide(request_id, lacking(), now)
        if waits:
            self.load.deferred()
        else:
            waited = self._waiting.pop(request_id, None)
            if waited is not None and not waited.is_new:
                self._over[request_id] = features
        return waits

    def _decide(self, request_id: str, lacking: Sequence[Lacking], now: float) -> bool:
        if request_id in self._over:
            return False
        costs = self.costs
        waiting = self._waiting.get(request_id)
        is_new = waiting is None or waiting.is_new
        price = self.load.price
        # All of them, not the first one only: each kind is explored once.
        idle = price == 1.0
        # Not what others encode so that this engine need not.
        unknown = [one for one in lacking if is_new and one.source != "promise"]
        if sum([self._explore(one, now, idle=idle) for one in unknown]):
            return False
        missing = self._group(lacking, now)
        late_s = max(one.times.late_s for one in missing)
        if late_s and self.queue.silent_s(now) > 2 * late_s:
            return False
        stop_s = price * sum(costs.cost_s(one.modality, one.rows) for one in lacking)
        encode_s = stop_s / len(lacking)
        pause_s = self.load.pause_s
        again_s = now + _HOLD_SHARE * stop_s
        if waiting is None or waiting.is_new:
            if not is_waiting_cheaper(missing, encode_s, pause_s, most=_BEGIN_COST):
                return False
            self._waiting[request_id] = _Waiting(False, again_s, began_s=now, stop_s=stop_s)
            return True
        # What has come makes it cheaper to stop now. Not so what it would have cost at first.
        waiting.stop_s = max(waiting.stop_s, stop_s)
        end_s = waiting.began_s + _LONGEST_SHARE * waiting.stop_s
        if now >= end_s:
            return False
        waiting.again_s = min(again_s, end_s)
        if is_waiting_cheaper(missing, encode_s, pause_s):
            waiting.doubt_s = None
            return True
        if waiting.doubt_s is None:
            waiting.doubt_s = now
        return now - waiting.doubt_s < _DOUBT_SHARE * stop_s and is_waiting_cheaper(
            missing, encode_s, pause_s, most=_DOUBT_COST
        )

    def _explore(self, item: Lacking, now: float, *, idle: bool) -> bool:
        """Whether an item should be encoded so that its cost becomes known, or is learned anew.

        Not anew where to wait would be right though the cost were believed far too high.
        """
        fetch_s = self.times.of(item.source, item.rows).mean_s
        in_doubt = self.costs.cost_s(item.modality, item.rows) < _FAR_TOO_HIGH * fetch_s
        return self.costs.explore(item.modality, item.rows, now, idle=idle and in_doubt)

    def _group(self, lacking: Sequence[Lacking], now: float) -> list[Missing]:
        """Those that are alike, and whether they have begun; each group has the mean age."""
        groups: dict[tuple[int, bool], list[float]] = {}
        times: dict[int, FetchTimes] = {}
        for one in lacking:
            kind = self.times.of(one.source, one.rows)
            times[id(kind)] = kind
            age_s = self._age_s(one.fetching, kind.mean_s, now)
            groups.setdefault((id(kind), age_s >= 0), []).append(age_s)
        return [
            Missing(len(ages), sum(ages) / len(ages), times[kind])
            for (kind, _), ages in groups.items()
        ]

    def _age_s(self, fetching: Fetching, mean_s: float, now: float) -> float:
        ahead = self.queue.ahead(fetching.number)
        if ahead:
            return -self.queue.until_begin_s(ahead, mean_s)
        if fetching.began_s is None:
            fetching.began_s = now
        return now - fetching.began_s

    def resume(self, request_id: str, *, pause_s: float) -> None:
        """vLLM asks about the request again, after so long: that was no wait. Before ``waits``."""
        waiting = self._waiting.get(request_id)
        if waiting is not None:
            waiting.began_s += pause_s
            if waiting.doubt_s is not None:
                waiting.doubt_s += pause_s

    def end(self, request_id: str) -> None:
        """The request waits for nothing any more."""
        self._waiting.pop(request_id, None)

    def end_request(self, request_id: str, now: float) -> None:
        """The request has ended."""
        self.load.end_request(now)
        self.end(request_id)
        self._over.pop(request_id, None)
