# SPDX-License-Identifier: Apache-2.0
"""How a request waits for its embeddings: for which of them, for how long, and when in vain.

All of it is in memory and belongs to the scheduler's thread. The parts, in this order: how long
each request has waited for one source, and the waits themselves. Which items there are is in
``item_tracker.py``, whether waiting costs less than encoding in ``waiting.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Set
from dataclasses import dataclass
from typing import Any

from s3ec.connector.item_tracker import FETCHING, Item, ItemTracker
from s3ec.connector.kept_answers import KeptAnswers
from s3ec.connector.shared_tier import SharedTier
from s3ec.connector.vllm_config import Role
from s3ec.connector.waiting import Fetching, Lacking, SourceTimes, WaitPolicy
from s3ec.counters import Counters
from s3ec.identity import Key
from s3ec.prefetch import FetchResult, Priority

# A request that came without pixels waits at least this long, whatever `defer_timeout_s` says:
# it cannot be encoded instead, and would fail. Longer than a fetch that is tried again after a
# silence of the store (`read_timeout_s`).
NO_PIXELS_WAIT_S = 10.0
# So many waits in vain, one after the other, and nobody waits for this source...
MOST_IN_VAIN = 3
# ...until something of it comes in time, or this long has passed. Then one more in vain is enough.
VAIN_REST_S = 30.0

# A global is found faster than a member of a class.
_DEMAND = Priority.DEMAND


@dataclass(slots=True)
class _Wait:
    features: int
    limit_s: float  # as of the last question
    spent_s: float = 0.0
    since_s: float | None = None


class DeferralBudget:
    """Adds up the deferrals of each request and says when they have lasted long enough.

    One object counts the waits for one source: the bucket, this node's disk, or an encoder that has
    not uploaded yet what a request names. They are counted apart, so that no trouble with the
    bucket keeps a request from an embedding that is here.

    A source that answers, but too slowly for anybody to wait for, opens no breaker: small requests
    succeed. So a source is

    ========  ========  ======================================================================
    state     goes to   when
    ========  ========  ======================================================================
    trusted   resting   MOST_IN_VAIN waits in a row were in vain: only requests without pixels
                        wait for it, while fetches go on
    resting   trusted   something came from there in time
    resting   on trial  VAIN_REST_S have passed since the last wait in vain
    on trial  trusted   something came from there in time
    on trial  resting   one more wait is in vain
    ========  ========  ======================================================================

    Attributes:
        requests: Ids of requests that have waited. For reading: a look is cheaper than a call.
    """

    def __init__(
        self, defer_timeout_s: float, counters: Counters, clock: Callable[[], float]
    ) -> None:
        self._limit_s = defer_timeout_s
        self._counters = counters
        self._clock = clock
        self._waits: dict[str, _Wait] = {}
        self._in_vain = 0
        self._vain_s = 0.0  # when the last wait in vain ended
        self.requests: Collection[str] = self._waits

    def is_over(self, request_id: str, features: int = 0, *, no_pixels: bool = False) -> bool:
        """Start or continue this request's wait; True once it has waited long enough.

        Args:
            features: How many the request has by now. A streaming session brings more with each
                turn, and each turn may wait as long as a request of its own.
            no_pixels: It has no other chance, so it is given more time, and waits though others
                have waited in vain.
        """
        now = self._clock()
        if not no_pixels and self._rests(now):
            return True
        limit_s = max(self._limit_s, NO_PIXELS_WAIT_S) if no_pixels else self._limit_s
        wait = self._waits.get(request_id)
        if wait is None:
            if limit_s <= 0:
                return True
            wait = self._waits[request_id] = _Wait(features, limit_s)
        elif features > wait.features:
            wait.features = features
            wait.spent_s = 0.0
            wait.since_s = None
        wait.limit_s = limit_s
        if wait.spent_s >= limit_s:
            return True
        if wait.since_s is None:
            wait.since_s = now
        return wait.spent_s + now - wait.since_s >= limit_s

    def ends_s(self, request_id: str) -> float:
        """When the request will have waited long enough, at the soonest; infinity if it does not
        wait at present.
        """
        wait = self._waits.get(request_id)
        if wait is None or wait.since_s is None:
            return math.inf
        return wait.since_s - wait.spent_s + wait.limit_s

    @property
    def has_failed(self) -> bool:
        """Whether so many waits were in vain that nobody should wait for this source."""
        return self._in_vain >= MOST_IN_VAIN

    def _rests(self, now: float) -> bool:
        """Whether nobody should wait for this source."""
        if not self.has_failed:
            return False
        if now - self._vain_s < VAIN_REST_S:
            return True
        self._in_vain = MOST_IN_VAIN - 1
        return False

    def end(self, request_id: str, *, in_vain: bool = False) -> bool:
        """The request need not wait now; what it has waited stays counted against it.

        Args:
            in_vain: What it waited for has not come in time.

        Returns:
            Whether it has waited until now.
        """
        wait = self._waits.get(request_id)
        if wait is None or wait.since_s is None:
            return False
        now = self._clock()
        wait.spent_s += now - wait.since_s
        wait.since_s = None
        if in_vain:
            self._counters.add("defer_timeouts")
            self._in_vain += 1
            self._vain_s = now
        return True

    def resume(self, request_id: str, *, pause_s: float) -> None:
        """vLLM asks about the request again, after so long: that was no wait."""
        wait = self._waits.get(request_id)
        if wait is not None and wait.since_s is not None:
            wait.since_s += pause_s

    def came(self, seconds: float) -> None:
        """Something came from there after so long; who waits for others has a chance."""
        if seconds < self._limit_s:
            self._in_vain = 0

    def end_request(self, request_id: str) -> None:
        """The request has ended."""
        self._waits.pop(request_id, None)


class RequestWaits:
    """Which requests wait, for what, and until when.

    A request is

    =======  =======  ======================================================================
    state    goes to  when
    =======  =======  ======================================================================
    (none)   waiting  what it needs now is on its way, and worth the wait
    waiting  paused   a pass has ended in which vLLM did not ask about it
    paused   waiting  vLLM asks about it again
    waiting  waited   all is here, its time is over, the encoder is to make it, or it fails
    waited   waiting  something is on its way again and it has time left, as it has with each
                      turn of a session
    any      (none)   it has ended
    =======  =======  ======================================================================

    The time of a paused request stands still. There are three sources, each with a budget of its
    own for each request: see DeferralBudget.

    Attributes:
        paused: Requests that are paused, and since when. For reading.
    """

    def __init__(
        self,
        tracker: ItemTracker,
        *,
        role: Role,
        shared_tier: SharedTier | None,
        counters: Counters,
        clock: Callable[[], float],
        local: Callable[[Key], bool],
        needs_embedding: Callable[[Any], bool],
        answers: KeptAnswers,
        times: SourceTimes,
        policy: WaitPolicy | None = None,
    ) -> None:
        """Start with nobody.

        Args:
            tracker: Has the items.
            role: How long a request may wait.
            shared_tier: Whether all ranks see this node's tier; None where they do for certain.
            counters: Where to count.
            clock: Monotonic seconds.
            local: Whether this node's disk is believed to hold a key.
            needs_embedding: Whether a feature came without pixels.
            answers: Where answers are kept while nothing changes.
            times: Learns how long fetches take.
            policy: Weighs each wait against encoding; None where every wait is worth it.
        """
        self._tracker = tracker
        self._items = tracker.items
        self._shared_tier = shared_tier
        self._counters = counters
        self._clock = clock
        self._local = local
        self._needs_embedding = needs_embedding
        self._answers = answers
        self._times = times
        self._policy = policy
        self._bucket_waits = DeferralBudget(role.defer_timeout_s, counters, clock)
        self._tier_waits = DeferralBudget(role.defer_timeout_s, counters, clock)
        self._promise_waits = DeferralBudget(role.defer_timeout_s, counters, clock)
        self._budgets = (self._bucket_waits, self._tier_waits, self._promise_waits)
        self._promise_noted_s = clock()
        self._deferred_s: dict[str, float] = {}  # those that are waiting, and since when
        self._carried_s: dict[str, float] = {}  # what these had waited when they were paused
        self._paused_s: dict[str, float] = {}
        self.paused: Mapping[str, float] = self._paused_s

    def knows(self, request_id: str) -> bool:
        """Whether a request waits for anything or has waited. Most requests never do."""
        return (
            request_id in self._tracker.waiting
            or request_id in self._bucket_waits.requests
            or request_id in self._tier_waits.requests
            or request_id in self._promise_waits.requests
        )

    # -- begin to wait, or go on -------------------------------------------------------------

    def defer(self, request: Any, pending: list[Any]) -> bool | None:
        """Defer a request, unless it has waited long enough or would wait in vain.

        Args:
            pending: Those of its features that are needed now and have not come.

        Returns:
            False where it is deferred, True where it is to go on without them. None where it
            cannot: one came without pixels, and it has waited its time.
        """
        request_id = request.request_id
        is_new = not any(request_id in budget.requests for budget in self._budgets)
        awaited = self._worth_waiting(pending, request)
        if awaited is None:
            return None
        if not awaited:
            self._end_waits(request_id)
        else:
            if request_id not in self._deferred_s:
                self._deferred_s[request_id] = self._clock()
            if is_new:
                self._counters.add("deferred_requests")
        if awaited is not pending:
            kept = {feature.identifier for feature in awaited}
            for feature in pending:
                if feature.identifier not in kept:
                    self._tracker.leave(request_id, feature.identifier)
        noted = self._tracker.waiting.get(request_id, ())
        for feature in awaited:
            identifier = feature.identifier
            if identifier not in noted or self._items[identifier].priority is not _DEMAND:
                self._tracker.expect(request_id, identifier, _DEMAND)
        return not awaited

    def _worth_waiting(self, pending: list[Any], request: Any) -> list[Any] | None:
        """What of the pending features the request should still wait for.

        Returns:
            All, those that lie on this node or may still be uploaded, those on this node, or none.
            None instead of a list where one came without pixels and has waited its time.
        """
        request_id = request.request_id
        turns = len(request.mm_features)
        here: list[Any] = []
        promised: list[Any] = []
        for feature in pending:
            item = self._items[feature.identifier]
            if self._local(item.key):
                here.append(feature)
            elif item.failures:
                promised.append(feature)
        rest = len(pending) - len(here) - len(promised)
        # Not while nobody knows whether all ranks see this node's tier: nothing is granted then.
        can_wait = self._shared_tier is None or self._shared_tier.asked is None
        if can_wait and self._policy is not None and not self._pays(self._policy, request, pending):
            return []
        # First, since most requests wait for the bucket, and to look for pixels takes longer.
        if not rest:
            self._bucket_waits.end(request_id)
        elif can_wait and not self._bucket_waits.is_over(request_id, turns):
            return pending
        if any(map(self._needs_embedding, pending)):
            if not self._bucket_waits.is_over(request_id, turns, no_pixels=True):
                return pending
            # What is not in the bucket says nothing about how fast the bucket is.
            late = any(self._items[one.identifier].state is FETCHING for one in pending)
            self._end_wait(self._bucket_waits, request_id, in_vain=late)
            return None
        if not can_wait:
            return []  # not in vain: nothing was late
        if rest:
            self._end_wait(self._bucket_waits, request_id, in_vain=True)
        if promised:
            if not self._promise_waits.is_over(request_id, turns):
                return promised + here
            if self._end_wait(self._promise_waits, request_id, in_vain=True):
                for feature in promised:
                    self._note_broken(self._items[feature.identifier])
        if here:
            if not self._tier_waits.is_over(request_id, turns):
                return here
            self._end_wait(self._tier_waits, request_id, in_vain=True)
        return []

    def _end_wait(self, source: DeferralBudget, request_id: str, *, in_vain: bool) -> bool:
        ended = source.end(request_id, in_vain=in_vain)
        if in_vain and source.has_failed:
            self._answers.clear()  # the others do not wait for it any more
        return ended

    def keep_answer(self, request: Any, pending: list[Any], computed_tokens: int) -> None:
        """A request was deferred: it need not be looked at again before something changes.

        Nothing is kept for one without pixels that is to ask again for what has FAILED.
        """
        if any(self._items[feature.identifier].state is not FETCHING for feature in pending):
            return
        request_id = request.request_id
        now = self._clock()
        ends_s = min(budget.ends_s(request_id) for budget in self._budgets)
        needed = [
            feature.identifier
            for feature in request.mm_features
            if feature.mm_position.offset + feature.mm_position.length > computed_tokens
        ]
        # A little sooner, since sums are rounded.
        self._answers.keep(request_id, computed_tokens, needed, now=now, until_s=ends_s - 1e-9)

    def _pays(self, policy: WaitPolicy, request: Any, pending: list[Any]) -> bool:
        """Whether waiting costs less than encoding; what has no pixels is always waited for."""
        now = self._clock()
        if any(map(self._needs_embedding, pending)):
            return True
        items = [self._items[feature.identifier] for feature in pending]
        promised = [item for item in items if item.promised and not self._local(item.key)]
        for item in promised:
            if policy.costs.known_s(item.modality, item.rows) is None:
                return True  # others encode it; it is not encoded here to learn the cost
        if promised and now - self._promise_noted_s > VAIN_REST_S:
            policy.times.relearn("promise")  # who does not wait learns nothing
        waited = request.request_id in policy.waiting
        lacking = lambda: [self._lacking(item) for item in items]  # noqa: E731
        turns = len(request.mm_features)
        if policy.waits(request.request_id, lacking, now, features=turns):
            return True
        self._counters.add("waits_declined")
        if waited:
            for item in promised:
                self._note_broken(item)
        return False

    def _note_broken(self, item: Item) -> None:
        """Somebody has waited for it in vain. Nobody will learn how long it takes."""
        self._note_promise(item, 2 * (self._clock() - item.asked_s))

    def _note_promise(self, item: Item, seconds: float) -> None:
        """What was named has taken so long from the first question on."""
        self._times.of("promise", item.rows).add(seconds)
        self._promise_noted_s = self._clock()

    def _lacking(self, item: Item) -> Lacking:
        if self._local(item.key):
            return Lacking(item.modality, item.rows, "tier", item.fetching or Fetching(0))
        if item.promised:  # fetched again and again, so its age is that of the first time
            return Lacking(item.modality, item.rows, "promise", Fetching(0, item.asked_s))
        return Lacking(item.modality, item.rows, "bucket", item.fetching or Fetching(0))

    def end_pass(self, asked: Set[str]) -> None:
        """A pass has ended. Who was not asked about in it does not wait for an embedding.

        vLLM leaves its queue where an engine is full. What a request waits there is not ours, and
        must not be taken for the time that a fetch takes.
        """
        now = self._clock()
        for request_id in self.paused.keys() & asked:
            self.resume(request_id, now)  # its answer was repeated
        left = [request_id for request_id in self._deferred_s if request_id not in asked]
        if left:  # a full engine may pause a thousand: they are counted together
            waited_s = 0.0
            for request_id in left:
                so_far_s = now - self._deferred_s.pop(request_id)
                waited_s += so_far_s
                self._carried_s[request_id] = self._carried_s.get(request_id, 0.0) + so_far_s
                self._paused_s[request_id] = now
            self._counters.add("deferred_seconds", waited_s)

    def resume(self, request_id: str, now: float) -> None:
        """vLLM asks about a paused request again: its wait goes on where it was."""
        pause_s = now - self._paused_s.pop(request_id)
        self._deferred_s[request_id] = now
        for budget in self._budgets:
            budget.resume(request_id, pause_s=pause_s)
        if self._policy is not None:
            self._policy.resume(request_id, pause_s=pause_s)

    def _count_wait(self, request_id: str) -> None:
        """The request does not wait now. However many sources it waited for, it waited once."""
        since_s = self._deferred_s.pop(request_id, None)
        carried_s = self._carried_s.pop(request_id, None) if self._carried_s else None
        if since_s is None and carried_s is None:
            return
        waited_s = 0.0
        if since_s is not None:
            waited_s = self._clock() - since_s
            self._counters.add("deferred_seconds", waited_s)
        waited_s += carried_s or 0.0
        self._counters.observe("wait_time", waited_s)

    def _end_waits(self, request_id: str) -> None:
        self._count_wait(request_id)
        if self._policy is not None:
            self._policy.end(request_id)
        for budget in self._budgets:
            budget.end(request_id)

    # -- the end of a wait -------------------------------------------------------------------

    def let_through(self, request: Any, num_computed_tokens: int) -> None:
        """All that the request needs now is here, or will be encoded.

        The KV cache may hold what it waited for: a prefix that others computed.
        """
        request_id = request.request_id
        self._end_waits(request_id)
        if request_id in self._tracker.waiting:
            for feature in request.mm_features:
                position = feature.mm_position
                if position.offset + position.length <= num_computed_tokens:
                    self._tracker.leave(request_id, feature.identifier)

    def goes_on(self, request_id: str) -> None:
        """The request waits for nothing: what it needs is computed, or the encoder makes it."""
        if request_id in self._deferred_s:
            self._end_waits(request_id)

    def scheduled(self, request_id: str, identifier: str) -> None:
        """The request got room for one item: it need not wait, and has done with this one."""
        self._end_waits(request_id)
        if request_id in self._tracker.waiting:
            self._tracker.leave(request_id, identifier)

    def give_up(self, request_id: str, pending: Iterable[str]) -> None:
        """The request fails: it waits for nothing, not even for what it has just asked for."""
        self._count_wait(request_id)
        for identifier in pending:
            self._tracker.leave(request_id, identifier)
        self._tracker.leave_all(request_id)

    def end_request(self, request_id: str) -> None:
        """The request has ended. What it waited for is for others, or for nobody."""
        now = self._clock()
        self._answers.drop(request_id)
        self._paused_s.pop(request_id, None)
        self._count_wait(request_id)
        for budget in self._budgets:
            budget.end_request(request_id)
        if self._policy is not None:
            self._policy.end_request(request_id, now)
        self._tracker.leave_all(request_id)

    # -- what is learned, and what is kept ---------------------------------------------------

    def arrived(self, results: Iterable[FetchResult]) -> None:
        """The prefetcher has finished these: learn what they took, and move their items on."""
        now = self._clock()
        for fetched in results:
            if fetched.source is not None:
                budget = self._bucket_waits if fetched.source == "bucket" else self._tier_waits
                budget.came(fetched.seconds)
                self._times.of(fetched.source, fetched.want.rows).add(fetched.seconds)
            item = self._items.get(fetched.want.key.identifier)
            had_failed = item is not None and item.failures > 0
            if self._tracker.arrived(fetched, now) and item is not None:
                if had_failed:
                    self._promise_waits.came(0.0)
                if item.promised:
                    self._note_promise(item, now - item.asked_s)

    def audit(self, *, requests: Collection[str]) -> list[str]:
        """As SchedulerHalf.audit."""
        return [
            f"{what}: {name} is kept, and has ended"
            for what, names in self.remembered.items()
            for name in names
            if name not in requests
        ]

    @property
    def remembered(self) -> dict[str, Collection[str]]:
        """All that is kept of requests; an audit at rest expects it to be empty."""
        return {
            "waits": self._bucket_waits.requests,
            "waits for the tier": self._tier_waits.requests,
            "waits for what was named": self._promise_waits.requests,
            "interests": self._tracker.waiting,
            "deferrals": self._deferred_s,
            "paused waits": self.paused,
            "waits before a pause": self._carried_s,
            "answers": self._answers.requests,
        }
