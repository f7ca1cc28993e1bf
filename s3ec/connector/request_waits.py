# SPDX-License-Identifier: Apache-2.0
"""How a request waits for its embeddings: for which of them, for how long, and when in vain.

All of it is in memory and belongs to the scheduler's thread. Which items there are is in
``item_tracker.py``, whether waiting costs less than encoding in ``waiting.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from s3ec.connector.item_tracker import FETCHING, Item, ItemTracker
from s3ec.connector.vllm_config import Role
from s3ec.connector.waiting import Missing, Source, SourceTimes, WaitPolicy
from s3ec.counters import Counters
from s3ec.identity import Key
from s3ec.prefetch import FetchRequest, FetchResult, Priority

# A request that came without pixels waits at least this long, whatever `defer_timeout_s` says:
# it cannot be encoded instead, and would fail. Longer than a fetch that is tried again after a
# silence of the store (`read_timeout_s`).
NO_PIXELS_WAIT_S = 10.0
# So many waits in vain, one after the other, and nobody waits for this source...
MOST_IN_VAIN = 3
# ...until something of it comes in time. What a request names is not looked for again by who does
# not wait for it, so names are tried again after this long. Then one more in vain is enough.
VAIN_REST_S = 30.0

# A global is found faster than a member of a class.
_DEMAND = Priority.DEMAND


class SourceTrust:
    """Whether requests wait for one source; these are listed in ``waiting.py``.

    A source that answers, but too slowly for anybody to wait for, opens no breaker: small requests
    succeed. So a source is

    ========  ========  ======================================================================
    state     goes to   when
    ========  ========  ======================================================================
    trusted   resting   MOST_IN_VAIN waits in a row were in vain: only requests without pixels
                        wait for it, while fetches go on
    resting   trusted   something came that would have been in time for the last of them
    resting   on trial  ``rest_s`` have passed since the last wait in vain
    on trial  trusted   something came in time
    on trial  resting   one more wait is in vain
    ========  ========  ======================================================================
    """

    def __init__(self, rest_s: float = math.inf) -> None:
        """Trusted at first; it rests at most so long."""
        self._rest_s = rest_s
        self._in_vain = 0
        self._vain_s = 0.0  # when the last wait in vain ended
        self._waited_s = 0.0  # how long it was

    def in_vain(self, waited_s: float, now: float) -> bool:
        """A wait has ended without the embedding, after so long; whether the source rests."""
        self._in_vain += 1
        self._vain_s = now
        self._waited_s = waited_s
        return self._in_vain >= MOST_IN_VAIN

    def came(self, seconds: float) -> None:
        """Something came from there so long after it was asked for: others have a chance."""
        if seconds < self._waited_s:
            self._in_vain = 0

    def rests(self, now: float) -> bool:
        """Whether nobody should wait for this source."""
        if self._in_vain < MOST_IN_VAIN:
            return False
        if now - self._vain_s < self._rest_s:
            return True
        self._in_vain = MOST_IN_VAIN - 1
        return False


@dataclass(slots=True)
class _Wait:
    """What one request has waited and may wait.

    Attributes:
        features: Of the request. A streaming session brings more with each turn, and each turn may
            wait as long as a request of its own.
        spent_s: What its waits have taken that are over.
        limit_s: How long the present wait may last.
        since_s: When it began, later by its pauses.
        until_s: When it ends.
        is_over: There is no present wait.
        is_undecided: Whether to wait on, and how long, is to be weighed anew.
        kept_tokens: Computed tokens that it was looked at with, while nothing has changed since;
            -1 where it is to be looked at again.
        asked_in: Number of the pass in which vLLM asked about it last.
        asked_s: When that pass began.
    """

    features: int
    spent_s: float
    limit_s: float
    since_s: float
    until_s: float = math.inf
    is_over: bool = False
    is_undecided: bool = False
    kept_tokens: int = -1
    asked_in: int = 0
    asked_s: float = 0.0


class RequestWaits:
    """Which requests wait, for what, and until when.

    A request is

    =======  =======  ======================================================================
    state    goes to  when
    =======  =======  ======================================================================
    (none)   waiting  what it needs now is on its way, and worth the wait
    waiting  waiting  vLLM asks again. It is told "not yet" without a look at its items while
                      none of these has changed, and neither store nor disk
    waiting  waiting  no replica has something, and home is asked: it is weighed anew
    waiting  waited   all is here, its time is over, the encoder is to make it, or it fails
    waited   waiting  something is on its way again and it has time left, as it has with each
                      turn of a session
    any      (none)   it has ended
    =======  =======  ======================================================================

    A wait has one end, which is found when it begins: by the policy, and by what `defer_timeout_s`
    leaves of all the waits of a request.

    vLLM leaves its queue early where an engine is full. Passes in which it did not ask about a
    request do not count, but for the last one of them: what a request waits there is not ours, and
    must not be taken for the time that a fetch takes.

    A look takes some microseconds a picture, and vLLM asks about every waiting request in every
    pass. So "not yet" is repeated without a look: a thousand requests can wait.

    Attributes:
        is_open: Whether a pass has begun.
        records: Of requests that wait, or have waited. For reading.
    """

    def __init__(
        self,
        tracker: ItemTracker,
        *,
        role: Role,
        counters: Counters,
        clock: Callable[[], float],
        local: Callable[[Key], bool],
        needs_embedding: Callable[[Any], bool],
        times: SourceTimes,
        policy: WaitPolicy | None = None,
    ) -> None:
        """Start with nobody.

        Args:
            role: How long a request may wait.
            local: Whether this node's disk is believed to hold a key.
            needs_embedding: Whether a feature came without pixels.
            times: Learns how long fetches take.
            policy: Weighs each wait against encoding; None where every wait is worth it.
        """
        self._tracker = tracker
        self._items = tracker.items
        self._counters = counters
        self._clock = clock
        self._local = local
        self._needs_embedding = needs_embedding
        self._times = times
        self._policy = policy
        self._longest_s = role.defer_timeout_s
        self._trust: dict[Source, SourceTrust] = {
            "bucket": SourceTrust(),
            "home": SourceTrust(),
            "tier": SourceTrust(),
            "promise": SourceTrust(VAIN_REST_S),
        }
        self._promise_noted_s = clock()
        self.records: dict[str, _Wait] = {}
        self.is_open = False
        self._pass = 1  # its number, when it began, and when the one before it ended
        self._began_s, self._ended_s = math.inf, clock()

    # -- a pass ------------------------------------------------------------------------------

    def begin_pass(self, now: float) -> None:
        """vLLM asks about the first request of a pass."""
        self.is_open = True
        self._began_s = now

    def end_pass(self, now: float) -> None:
        """A pass has ended."""
        self.is_open = False
        self._pass += 1
        self._began_s, self._ended_s = math.inf, now

    def repeats(self, request_id: str, computed_tokens: int) -> bool:
        """vLLM asks about a request: whether it is told "not yet" since nothing has changed.

        Else it is looked at next, as where it is asked about for the second time in a pass.
        """
        wait = self.records.get(request_id)
        if (
            wait is not None
            and wait.kept_tokens == computed_tokens
            and self._began_s < wait.until_s  # never where no pass is open
            and request_id not in self._tracker.look_again
        ):
            # Most were asked about in the last pass. For them a call would cost a fifth of this.
            if wait.asked_in == self._pass - 1:
                wait.asked_in, wait.asked_s = self._pass, self._began_s
                return True
            if wait.asked_in != self._pass:
                self._note_asked(wait)
                return True
        if self.is_open:
            self._tracker.look_again.discard(request_id)
            if wait is not None:
                wait.kept_tokens = -1
                self._note_asked(wait)
        return False

    def _note_asked(self, wait: _Wait) -> None:
        if wait.asked_in < self._pass - 1:
            pause_s = self._ended_s - wait.asked_s
            wait.since_s += pause_s
            wait.until_s += pause_s
        wait.asked_in, wait.asked_s = self._pass, self._began_s

    def look_at_all(self) -> None:
        """Something has changed that concerns all."""
        for wait in self.records.values():
            wait.kept_tokens = -1

    # -- begin to wait, or go on -------------------------------------------------------------

    def defer(self, request: Any, pending: list[Any], computed_tokens: int) -> bool | None:
        """Defer a request, unless it has waited long enough or would wait in vain.

        Args:
            pending: Those of its features that are needed now and have not come.
            computed_tokens: That it was asked about with; -1 for a look at it in each pass.

        Returns:
            False where it is deferred, True where it is to go on without them. None where it
            cannot: one came without pixels, and it has waited its time.
        """
        request_id = request.request_id
        now = self._clock()
        is_bare = any(map(self._needs_embedding, pending))
        awaited = pending if is_bare else self._trusted(pending, now)
        if awaited and not self._may_wait(request, awaited, now, is_bare=is_bare):
            awaited = []
        if len(awaited) < len(pending):
            kept = {feature.identifier for feature in awaited}
            dropped = [one.identifier for one in pending if one.identifier not in kept]
            self._tracker.leave(request_id, dropped)
        if not awaited:
            self.end_wait(request_id)
            return None if is_bare else True
        noted = self._tracker.waiting.get(request_id, ())
        is_kept = True
        for feature in awaited:
            item = self._items[feature.identifier]
            if feature.identifier not in noted or item.priority is not _DEMAND:
                self._tracker.expect(request_id, feature.identifier, _DEMAND)
            # What has FAILED is asked for again in a while.
            is_kept = is_kept and item.state is FETCHING
        if is_kept:
            self.records[request_id].kept_tokens = computed_tokens
        return False

    def _may_wait(self, request: Any, awaited: list[Any], now: float, *, is_bare: bool) -> bool:
        """Whether the request should wait, or wait on, for these features."""
        request_id, features = request.request_id, len(request.mm_features)
        # What came without pixels has no other chance.
        longest_s = max(self._longest_s, NO_PIXELS_WAIT_S) if is_bare else self._longest_s
        wait = self.records.get(request_id)
        is_new = wait is None or wait.is_over or wait.features < features
        if wait is None or is_new or wait.is_undecided:
            spent_s = wait.spent_s if wait is not None and wait.features == features else 0.0
            waited_s = 0.0 if wait is None or is_new else now - wait.since_s
            if spent_s + waited_s >= longest_s:
                return False
            limit_s = self._longest_s - spent_s
            if self._policy is not None and not is_bare:
                limit_s = min(limit_s, waited_s + self._limit_s(self._policy, awaited, now))
                if limit_s <= waited_s:
                    return False
            if wait is None or is_new:
                self.end_wait(request_id)  # of an earlier turn
                if request_id not in self.records:
                    self._counters.add("deferred_requests")
                wait = _Wait(features, spent_s, limit_s, now, asked_in=self._pass, asked_s=now)
                self.records[request_id] = wait
            wait.limit_s, wait.is_undecided = limit_s, False
        wait.until_s = wait.since_s + (longest_s - wait.spent_s if is_bare else wait.limit_s)
        if now < wait.until_s:
            return True
        self._note_in_vain(awaited, wait, now, is_bare=is_bare)
        self.end_wait(request_id)
        wait.spent_s = max(wait.spent_s, self._longest_s)
        return False

    def _trusted(self, pending: list[Any], now: float) -> list[Any]:
        """Those of the pending features whose source is worth a wait."""
        resting = [source for source, one in self._trust.items() if one.rests(now)]
        if not resting:
            return pending
        return [one for one in pending if self._source(self._items[one.identifier]) not in resting]

    def _source(self, item: Item) -> Source:
        """From where it is awaited: what the bucket did not have is still to be uploaded."""
        if self._local(item.key):
            return "tier"
        if item.promised or item.failures:
            return "promise"
        return "home" if item.is_far else "bucket"

    def _note_in_vain(self, awaited: list[Any], wait: _Wait, now: float, *, is_bare: bool) -> None:
        """A wait has lasted its time, and these have not come."""
        self._counters.add("defer_timeouts")
        waited_s = wait.spent_s + wait.until_s - wait.since_s
        items = [self._items[feature.identifier] for feature in awaited]
        for source in set(map(self._source, items)):
            # What came without pixels may have been invented by a client.
            if is_bare and source == "promise":
                continue
            if self._trust[source].in_vain(waited_s, now):
                self.look_at_all()  # the others do not wait for it any more
        for item in items:
            if item.promised and not self._local(item.key) and not is_bare:
                # Nobody will learn how long it takes.
                self._note_promise(item, 2 * (now - item.asked_s))

    def _limit_s(self, policy: WaitPolicy, awaited: list[Any], now: float) -> float:
        """How long to wait at most by what waiting and encoding cost; 0 for not at all."""
        missing = []
        for feature in awaited:
            item = self._items[feature.identifier]
            source = self._source(item)
            if source == "promise" and now - self._promise_noted_s > VAIN_REST_S:
                policy.times.relearn("promise")  # who does not wait learns nothing
            missing.append(Missing(item.modality, item.rows, source))
        limit_s = policy.limit_s(missing, now)
        if limit_s <= 0:
            self._counters.add("waits_declined")
        return limit_s

    def _note_promise(self, item: Item, seconds: float) -> None:
        """What was named has taken so long from the first question on."""
        self._times.of("promise", item.rows).add(seconds)
        self._promise_noted_s = self._clock()

    # -- the end of a wait -------------------------------------------------------------------

    def end_wait(self, request_id: str) -> None:
        """The request does not wait now; what it has waited stays counted against it."""
        wait = self.records.get(request_id)
        if wait is None or wait.is_over:
            return
        is_paused = wait.asked_in < self._pass - 1
        waited_s = (wait.asked_s if is_paused else self._clock()) - wait.since_s
        wait.is_over, wait.kept_tokens = True, -1
        wait.spent_s += waited_s
        self._counters.add("deferred_seconds", waited_s)
        self._counters.observe("wait_time", waited_s)

    def let_through(self, request_id: str, features: Iterable[Any]) -> None:
        """All that the request needs now is here, or will be encoded.

        Args:
            request_id: Of the request.
            features: What it needs now or later. The KV cache may hold what else it waited for: a
                prefix that others computed.
        """
        if request_id in self.records:
            self.end_wait(request_id)
        waited = self._tracker.waiting.get(request_id)
        if waited:
            self._tracker.leave(request_id, waited - {one.identifier for one in features})

    def scheduled(self, request_id: str, identifier: str) -> None:
        """The request got room for one item: it need not wait, and has done with this one."""
        if request_id in self.records:
            self.end_wait(request_id)
        if request_id in self._tracker.waiting:
            self._tracker.leave(request_id, (identifier,))

    def leave_all(self, request_id: str, also: Iterable[str] = ()) -> None:
        """The request waits for nothing any more, not even for what it has just asked for."""
        self.end_wait(request_id)
        waited = self._tracker.waiting.get(request_id, ())
        if waited or also:
            self._tracker.leave(request_id, [*waited, *also])

    def end_request(self, request_id: str) -> None:
        """The request has ended. What it waited for is for others, or for nobody."""
        self.leave_all(request_id)
        self._tracker.look_again.discard(request_id)
        self.records.pop(request_id, None)
        if self._policy is not None:
            self._policy.load.end_request(self._clock())

    # -- what is learned ---------------------------------------------------------------------

    def went_far(self, wants: Iterable[FetchRequest]) -> None:
        """No replica has given these: who waits for them decides anew, by what home takes."""
        for want in wants:
            item = self._items.get(want.key.identifier)
            if item is None or item.state is not FETCHING or item.is_far:
                continue
            item.is_far = True
            if not item.promised:
                self._times.note_far(is_far=True)
            for request_id in item.waiters & self.records.keys():
                self.records[request_id].is_undecided = True
            self._tracker.look_again |= item.waiters

    def arrived(self, results: Iterable[FetchResult]) -> None:
        """The prefetcher has finished these: learn what they took, and move their items on."""
        now = self._clock()
        for fetched in results:
            item = self._items.get(fetched.want.key.identifier)
            if fetched.source is not None:
                # Where fetches queue up no wait ends in time, however short each of them is. Not
                # counted is the pass in which it came: nobody could have seen it sooner.
                queued_s = 0.0 if item is None else self._ended_s - item.asked_s
                source: Source = fetched.source
                if source == "bucket" and item is not None and item.is_far:
                    source = "home"
                elif source == "bucket":
                    self._times.note_far(is_far=False)
                self._trust[source].came(max(fetched.seconds, queued_s))
                self._times.of(source, fetched.want.rows).add(fetched.seconds)
            had_failed = item is not None and item.failures > 0
            if self._tracker.arrived(fetched, now) and item is not None:
                if had_failed:
                    self._trust["promise"].came(0.0)
                if item.promised:
                    self._note_promise(item, now - item.asked_s)
