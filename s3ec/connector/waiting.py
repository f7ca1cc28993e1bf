# SPDX-License-Identifier: Apache-2.0
"""Decides whether a request waits for its embeddings or encodes them: the likely cheaper one.

All of it is arithmetic on reported measurements. There is no clock, no I/O and no lock; the
scheduler's thread owns all state. Times are seconds.

The rule is that of the ski-rental problem. A wait begins if the fetch is likely to cost less than
encoding does. It ends after about twice the time that the encoder would have taken: a fetch that
has not ended by then may never end. The decision is made once, when a request begins to wait. It
is weighed again only after the wait, or once no replica has the embedding. Then waiting for home
is weighed like any wait.

Encoding costs more than its own time if the engine is busy, since it delays all later requests.
So its time is multiplied by a price, which is 1 in an idle engine.

An embedding that no request waits for is fetched all the same, for later requests.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from s3ec.encode_costs import EncodeCosts

Source = Literal["bucket", "home", "tier", "promise"]
"""Where an embedding comes from.

``bucket`` is asked first: it is a replica if there are any. ``home`` is the bucket behind the
replicas, once none of them has it. ``tier`` is this node's disk. ``promise``: another engine is
still uploading it.
"""

# A wait begins if the fetch is likely to take at most this share of the cost of encoding.
_BEGIN_SHARE = 0.7
# A wait lasts at most this many encode times, or likely fetch times, whichever is longer.
_MOST_ENCODES = 2.0
_MOST_FETCHES = 3.0
# The last of n fetches is likely to take n ** 0.3 times as long as one fetch.
_LAST_POWER = 0.3
# The price of encoding in an engine that is busy with prompts for the share x of its time:
# (1 - x) ** -2. It is 1 if requests come one at a time, however long each keeps it busy.
_PRICE_POWER = 2.0
_BUSIEST = 0.97
_ALONE = 0.02
# Time constant of the engine's load average, and the weight of one more step that only decodes.
_MEMORY_S = 3.0
_STEP_WEIGHT = 0.1
# An estimated cost may be this many times too high.
_FAR_TOO_HIGH = 10.0

# Estimates before the first fetch. The disk has its own: with a bucket's estimate, a new engine
# would encode the images that lie on its own disk.
PRIOR_FETCH_S: dict[Source, float] = {"bucket": 0.05, "home": 0.05, "tier": 0.002, "promise": 0.05}
# The weight of one more fetch in the share of those that continue to home.
_FAR_WEIGHT = 1 / 16
# The weight of one more fetch, and the shortest time that counts: shorter ones count as this.
_FETCH_WEIGHT = 1 / 64
_SHORTEST_FETCH_S = 1e-4


class FetchTimes:
    """Estimates how long fetches of one kind take, from their start.

    Attributes:
        likely_s: The geometric mean, in which the latest count most. About half of the fetches take
            longer, and a few very slow ones move it little.
    """

    def __init__(self, prior_s: float) -> None:
        self.likely_s = prior_s
        self._count = 0

    def add(self, seconds: float) -> None:
        """Add the duration of one fetch."""
        self._count += 1
        weight = max(_FETCH_WEIGHT, 1 / self._count)
        self.likely_s *= math.pow(max(seconds, _SHORTEST_FETCH_S) / self.likely_s, weight)


class SourceTimes:
    """Estimates how long fetches take, by source and size class.

    With replicas, "bucket" is their time. A miss there is reported as soon as home is asked. So it
    costs the replicas' time, and home's only if that wait pays.
    """

    def __init__(self) -> None:
        self._times: dict[tuple[Source, int], FetchTimes] = {}
        self._far_share = 0.0  # of the latest fetches, those that went on to home

    def note_far(self, *, is_far: bool) -> None:
        """Note whether a fetch continued from the replicas to home."""
        self._far_share += _FAR_WEIGHT * (is_far - self._far_share)

    def likely_s(self, source: Source, rows: int, most_s: float) -> float:
        """Estimate how long a fetch delays a request that waits at most ``most_s`` for home."""
        found_s = self.of(source, rows).likely_s
        if source == "bucket" and self._far_share:
            more_s = max(0.0, self.of("home", rows).likely_s - found_s)
            found_s += self._far_share * min(more_s, most_s)
        return found_s

    def of(self, source: Source, rows: int) -> FetchTimes:
        """Return the estimate for this source and about this size."""
        kind = (source, rows.bit_length())
        found = self._times.get(kind)
        if found is None:
            found = self._times[kind] = FetchTimes(PRIOR_FETCH_S[source])
        return found

    def relearn(self, source: Source) -> None:
        """Drop the measurements of this source, to measure it again."""
        self._times = {kind: times for kind, times in self._times.items() if kind[0] != source}


class EngineLoad:
    """Measures from scheduling passes how busy the engine is: then an encode delays others."""

    def __init__(self, steps_in_flight: int) -> None:
        """Start idle.

        Args:
            steps_in_flight: Scheduling passes until the one whose step runs now: 1, or 2 with
                asynchronous scheduling.
        """
        idle = (False, False)  # the step had a prefill; it had tokens
        self._steps = deque([idle] * steps_in_flight, maxlen=steps_in_flight)
        self._last_s = math.inf
        self._ended_s = 0.0
        self._busy_s = 0.0
        self._wall_s = 1e-6
        self._plain_s = 0.0  # duration of a step that only decodes
        self._requests = 0  # of the last pass
        self._others = 0.0  # average number of other requests in a pass

    def end_request(self, now: float) -> None:
        """Note that a request and its step ended; the engine may idle until the next pass."""
        self._ended_s = now

    def end_pass(self, now: float, *, has_prefill: bool, requests: int) -> None:
        """Note the end of a scheduling pass in which ``requests`` requests got tokens."""
        last, self._last_s = self._last_s, now
        if now > last:
            ran_s = (self._ended_s if self._ended_s > last else now) - last
            kept = math.exp((last - now) / _MEMORY_S)
            self._busy_s = self._busy_s * kept + self._exclusive_s(ran_s)
            self._wall_s = self._wall_s * kept + now - last
            self._others += (1 - kept) * (max(0, self._requests - 1) - self._others)
        self._steps.append((has_prefill, requests > 0))
        self._requests = requests

    def _exclusive_s(self, ran_s: float) -> float:
        """Return how much longer the step that has run took than one that only decodes."""
        had_prefill, had_tokens = self._steps[0]
        if had_prefill:
            return max(0.0, ran_s - self._plain_s)
        if had_tokens:
            weight = _STEP_WEIGHT if self._plain_s else 1.0
            self._plain_s += weight * (ran_s - self._plain_s)
        return 0.0

    @property
    def price(self) -> float:
        """Return the cost of a second of encoding, in seconds of all requests; at least 1."""
        if self._others < _ALONE:
            return 1.0
        idle = 1.0 - min(_BUSIEST, self._busy_s / self._wall_s)
        return math.pow(idle, -_PRICE_POWER)


@dataclass(frozen=True, slots=True)
class Missing:
    """One missing item of a request.

    Attributes:
        modality: ``image``, ``video``...
        rows: Rows of its embedding.
        source: Where it comes from.
    """

    modality: str
    rows: int
    source: Source


class WaitPolicy:
    """Decides how long a request may wait for its missing items.

    Attributes:
        costs: Cost of encoding.
        load: Load of the engine.
        times: Duration of fetches.
    """

    def __init__(self, costs: EncodeCosts, load: EngineLoad) -> None:
        self.costs = costs
        self.load = load
        self.times = SourceTimes()

    def limit_s(self, missing: Sequence[Missing], now: float) -> float:
        """Return how many seconds a request may wait from now on; 0 if encoding likely costs less.

        Args:
            missing: The request's missing items, at least one.
            now: Monotonic seconds.
        """
        costs = self.costs
        for one in missing:
            if one.source == "promise" and costs.known_s(one.modality, one.rows) is None:
                return math.inf  # another engine encodes it; do not encode it to learn the cost
        # A list, so that all are explored, not only the first: each kind is explored once.
        if sum([self._explore(one, now) for one in missing if one.source == "bucket"]):
            return 0.0
        encode_s = sum(costs.cost_s(one.modality, one.rows) for one in missing)
        # The last of several fetches ends later than one alone would.
        most_s = _BEGIN_SHARE * self.load.price * encode_s
        likely_s = max(self.times.likely_s(one.source, one.rows, most_s) for one in missing)
        likely_s *= math.pow(len(missing), _LAST_POWER)
        if likely_s > most_s:
            return 0.0
        return max(_MOST_ENCODES * encode_s, _MOST_FETCHES * likely_s)

    def _explore(self, item: Missing, now: float) -> bool:
        """Return True if an item should be encoded to measure its cost, first or again.

        It is not measured again if the wait would pay even with a cost that is far too high.
        """
        cost_s = self.costs.cost_s(item.modality, item.rows)
        in_doubt = cost_s < _FAR_TOO_HIGH * self.times.likely_s(item.source, item.rows, cost_s)
        return self.costs.explore(item.modality, item.rows, now, in_doubt=in_doubt)
