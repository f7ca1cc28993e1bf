# SPDX-License-Identifier: Apache-2.0
"""How a request waits for its embeddings: for which of them, for how long, and with what result.

All state is in memory and belongs to the scheduler's thread. ``item_tracker.py`` holds the items;
``waiting.py`` decides whether waiting costs less than encoding.
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
# it cannot be encoded instead, and would fail. This is longer than a fetch that is retried after a
# read timeout of the store (`read_timeout_s`).
NO_PIXELS_WAIT_S = 10.0
# After this many timed-out waits in a row, requests do not wait for this source...
MOST_IN_VAIN = 3
# ...until an item of it arrives in time. A request that does not wait for a named item does not
# retry its fetch, so names are tried again after this long. Then one more timeout is enough.
VAIN_REST_S = 30.0

# A global is found faster than a member of a class.
_DEMAND = Priority.DEMAND


class SourceTrust:
    """Decides whether requests wait for one source; ``waiting.py`` lists the sources.

    A source that answers, but too slowly to wait for, opens no breaker: small requests succeed. So
    a source is

    ========  ========  ======================================================================
    state     goes to   when
    ========  ========  ======================================================================
    trusted   resting   MOST_IN_VAIN waits in a row timed out: only requests without pixels
                        wait for it, while fetches continue
    resting   trusted   an item arrived that would have been in time for the last wait
    resting   on trial  ``rest_s`` have passed since the last timed-out wait
    on trial  trusted   an item arrived in time
    on trial  resting   one more wait timed out
    ========  ========  ======================================================================
    """

    def __init__(self, rest_s: float = math.inf) -> None:
        """Start trusted; a source rests at most ``rest_s``."""
        self._rest_s = rest_s
        self._in_vain = 0
        self._vain_s = 0.0  # when the last timed-out wait ended
        self._waited_s = 0.0  # how long it was

    def in_vain(self, waited_s: float, now: float) -> bool:
        """Note a wait that ended without the embedding; return True if the source now rests."""
        self._in_vain += 1
        self._vain_s = now
        self._waited_s = waited_s
        return self._in_vain >= MOST_IN_VAIN

    def came(self, seconds: float) -> None:
        """Note an item that arrived ``seconds`` after its request; if in time, restore trust."""
        if seconds < self._waited_s:
            self._in_vain = 0

    def rests(self, now: float) -> bool:
        """Return True if requests should not wait for this source."""
        if self._in_vain < MOST_IN_VAIN:
            return False
        if now - self._vain_s < self._rest_s:
            return True
        self._in_vain = MOST_IN_VAIN - 1
        return False


@dataclass(slots=True)
class _Wait:
    """How long one request has waited and may wait.

    Attributes:
        features: Number of the request's features. A streaming session brings more with each turn,
            and each turn may wait as long as a request of its own.
        spent_s: Seconds that its past waits took.
        limit_s: How long the current wait may last.
        since_s: When the current wait began, plus its pauses.
        until_s: When it ends.
        is_over: True if there is no current wait.
        is_undecided: True if the limit must be weighed again.
        kept_tokens: Computed tokens at the last check, if nothing has changed since; -1 if the
            request must be checked again.
        asked_in: Number of the last pass in which vLLM asked about it.
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
    (none)   waiting  items that it needs now are being fetched, and worth the wait
    waiting  waiting  vLLM asks again. The answer is "not yet", without a check of its items,
                      as long as no item has changed, nor the state of store or disk
    waiting  waiting  no replica has an item, and home is asked: the wait is weighed again
    waiting  waited   all items are here, it timed out, they will be encoded, or it fails
    waited   waiting  an item is being fetched again and it has time left, as it has with
                      each turn of a session
    any      (none)   it has ended
    =======  =======  ======================================================================

    The end of a wait is fixed when it begins: by the policy, and by the part of `defer_timeout_s`
    that the request's earlier waits have left.

    vLLM leaves its queue early if an engine is full. Passes in which it did not ask about a
    request do not count, except the last one: vLLM caused that wait, and it must not be taken
    for the time of a fetch.

    A check takes some microseconds per image, and vLLM asks about every waiting request in every
    pass. So "not yet" is repeated without a check: a thousand requests can wait.

    Attributes:
        is_open: True during a pass.
        records: Requests that wait, or have waited. Read-only.
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
        """Start without requests.

        Args:
            role: Says how long a request may wait.
            local: True if this node's disk is believed to hold a key.
            needs_embedding: True if a feature came without pixels.
            times: Learns how long fetches take.
            policy: Weighs each wait against encoding; None if every wait is worth it.
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
        self._pass = 1  # number of the pass; next: its start, and the end of the one before
        self._began_s, self._ended_s = math.inf, clock()

    # -- a pass ------------------------------------------------------------------------------

    def begin_pass(self, now: float) -> None:
        """Begin a pass: vLLM asks about its first request."""
        self.is_open = True
        self._began_s = now

    def end_pass(self, now: float) -> None:
        """End the pass."""
        self.is_open = False
        self._pass += 1
        self._began_s, self._ended_s = math.inf, now

    def repeats(self, request_id: str, computed_tokens: int) -> bool:
        """Return True if the answer is still "not yet", since nothing has changed.

        If False, the caller checks the request's items. It also does so if vLLM asks about a
        request twice in one pass.
        """
        wait = self.records.get(request_id)
        if (
            wait is not None
            and wait.kept_tokens == computed_tokens
            and self._began_s < wait.until_s  # never true while no pass is open
            and request_id not in self._tracker.look_again
        ):
            # Inlined for most requests, asked about in the last pass: a call costs a fifth more.
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
        """Check every request again: a change concerns all of them."""
        for wait in self.records.values():
            wait.kept_tokens = -1

    # -- begin to wait, or go on -------------------------------------------------------------

    def defer(self, request: Any, pending: list[Any], computed_tokens: int) -> bool | None:
        """Defer a request, unless it timed out or its sources are not worth a wait.

        Args:
            pending: Its features that are needed now and have not arrived.
            computed_tokens: The request's computed tokens; -1 to check it in each pass.

        Returns:
            False if it is deferred, True if it continues without these features. None if it timed
            out and cannot continue: one of them came without pixels.
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
            # A FAILED item is fetched again later: check the request in each pass.
            is_kept = is_kept and item.state is FETCHING
        if is_kept:
            self.records[request_id].kept_tokens = computed_tokens
        return False

    def _may_wait(self, request: Any, awaited: list[Any], now: float, *, is_bare: bool) -> bool:
        """Return True if the request should begin or continue to wait for these features."""
        request_id, features = request.request_id, len(request.mm_features)
        # A feature without pixels cannot be encoded instead.
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
                self.end_wait(request_id)  # the wait of an earlier turn
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
        """Return the pending features whose source is worth a wait."""
        resting = [source for source, one in self._trust.items() if one.rests(now)]
        if not resting:
            return pending
        return [one for one in pending if self._source(self._items[one.identifier]) not in resting]

    def _source(self, item: Item) -> Source:
        """Return the item's expected source: one that the bucket lacked is yet to be uploaded."""
        if self._local(item.key):
            return "tier"
        if item.promised or item.failures:
            return "promise"
        return "home" if item.is_far else "bucket"

    def _note_in_vain(self, awaited: list[Any], wait: _Wait, now: float, *, is_bare: bool) -> None:
        """Note a wait that timed out without these features."""
        self._counters.add("defer_timeouts")
        waited_s = wait.spent_s + wait.until_s - wait.since_s
        items = [self._items[feature.identifier] for feature in awaited]
        for source in set(map(self._source, items)):
            # A client may have made up the name of a feature without pixels.
            if is_bare and source == "promise":
                continue
            if self._trust[source].in_vain(waited_s, now):
                self.look_at_all()  # no request waits for this source any more
        for item in items:
            if item.promised and not self._local(item.key) and not is_bare:
                # The true time will not be measured: assume twice the time so far.
                self._note_promise(item, 2 * (now - item.asked_s))

    def _limit_s(self, policy: WaitPolicy, awaited: list[Any], now: float) -> float:
        """Return the longest wait that pays against encoding, in seconds; 0 for no wait."""
        missing = []
        for feature in awaited:
            item = self._items[feature.identifier]
            source = self._source(item)
            if source == "promise" and now - self._promise_noted_s > VAIN_REST_S:
                policy.times.relearn("promise")  # without waits nothing is measured
            missing.append(Missing(item.modality, item.rows, source))
        limit_s = policy.limit_s(missing, now)
        if limit_s <= 0:
            self._counters.add("waits_declined")
        return limit_s

    def _note_promise(self, item: Item, seconds: float) -> None:
        """Note how long a named item took from its first request on."""
        self._times.of("promise", item.rows).add(seconds)
        self._promise_noted_s = self._clock()

    # -- the end of a wait -------------------------------------------------------------------

    def end_wait(self, request_id: str) -> None:
        """End the request's current wait; its time stays counted against the request."""
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
        """End the wait of a request whose items are here or will be encoded.

        Args:
            request_id: The request.
            features: Its features that are needed now or later. The KV cache may hold the others
                that it waited for: a prefix that other requests computed.
        """
        if request_id in self.records:
            self.end_wait(request_id)
        waited = self._tracker.waiting.get(request_id)
        if waited:
            self._tracker.leave(request_id, waited - {one.identifier for one in features})

    def scheduled(self, request_id: str, identifier: str) -> None:
        """End the request's wait, and its interest in one item: it got room for that item."""
        if request_id in self.records:
            self.end_wait(request_id)
        if request_id in self._tracker.waiting:
            self._tracker.leave(request_id, (identifier,))

    def leave_all(self, request_id: str, also: Iterable[str] = ()) -> None:
        """End all waits of the request, also for the items it has just asked for."""
        self.end_wait(request_id)
        waited = self._tracker.waiting.get(request_id, ())
        if waited or also:
            self._tracker.leave(request_id, [*waited, *also])

    def end_request(self, request_id: str) -> None:
        """Drop the state of a request that has ended. Other requests may wait for its items."""
        self.leave_all(request_id)
        self._tracker.look_again.discard(request_id)
        self.records.pop(request_id, None)
        if self._policy is not None:
            self._policy.load.end_request(self._clock())

    # -- what is learned ---------------------------------------------------------------------

    def went_far(self, wants: Iterable[FetchRequest]) -> None:
        """Weigh the waits for these items again: no replica has them, and home is asked."""
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
        """Process finished fetches: learn how long they took, and update their items."""
        now = self._clock()
        for fetched in results:
            item = self._items.get(fetched.want.key.identifier)
            if fetched.source is not None:
                # If fetches queue up, no wait ends in time, however short each fetch is. The pass
                # in which the item arrived does not count: it could not be used sooner.
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
