# SPDX-License-Identifier: Apache-2.0
"""The answer "not yet", kept for requests about which nothing has changed since.

vLLM asks for every waiting request in every scheduling pass. To look at each of its items again
takes some microseconds a picture, so a thousand requests that wait would slow the scheduler down.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

# A READY item of a waiting request is looked at again within this time, or it would be let go of.
LONGEST_KEPT_S = 10.0
# Requests that came at once are not looked at again at once: between half of that and all of it.
_SPREAD = 32


class KeptAnswers:
    """Which requests need not be looked at again. One thread: the scheduler's.

    An answer is

    ==========  ==========  ===============================================================
    state       goes to     when
    ==========  ==========  ===============================================================
    (none)      fresh       a request was deferred, and every item that it waits for is on
                            its way
    fresh       kept        the pass has ended
    kept        in force    a pass has begun, and what many requests depend on is as it was
    in force    kept        the pass has ended
    any         (none)      an item of the request has changed, its time is over, it was
                            let go or has ended, or ``clear``: disk or store changed, or
                            the ranks have answered
    ==========  ==========  ===============================================================

    Attributes:
        in_force: Request id to the computed tokens that the answer is for. Who repeats an answer
            takes it out: it holds once in a pass. Empty between two passes, so that the first
            question of each pass looks at what has changed.
        asked: Requests that vLLM has asked about in this pass. Who answers adds to it, also who
            repeats an answer: a request that is not asked about does not wait for us.
    """

    def __init__(self) -> None:
        self.in_force: dict[str, int] = {}
        self.asked: set[str] = set()
        self._computed: dict[str, int] = {}
        self._fresh: dict[str, int] = {}
        self._until_s: dict[str, float] = {}
        self._next_s = 0.0  # the first of those
        self._of_request: dict[str, Collection[str]] = {}
        self._of_item: dict[str, set[str]] = {}
        self._is_open = False
        self._turn = 0

    @property
    def requests(self) -> Collection[str]:
        """Ids of those that have one, in force or not."""
        return self._until_s.keys()

    @property
    def is_open(self) -> bool:
        """Whether a pass has begun."""
        return self._is_open

    def is_of_earlier(self, request_id: str) -> bool:
        """Whether the request has an answer that was found in an earlier pass."""
        return request_id in self._computed

    def begin_pass(self, now: float) -> None:
        """What was kept is in force, but for what is over."""
        self._is_open = True
        self.expire(now)
        self.in_force = self._computed.copy()

    def end_pass(self) -> None:
        """Nothing is in force, and what was kept in this pass can be from the next one on."""
        self._is_open = False
        self.in_force = {}
        self.asked.clear()
        if self._fresh:
            self._computed.update(self._fresh)
            self._fresh.clear()

    def keep(
        self,
        request_id: str,
        computed_tokens: int,
        items: Collection[str],
        *,
        now: float,
        until_s: float,
    ) -> None:
        """The request was deferred.

        Args:
            request_id: Of the request.
            computed_tokens: Of the request, as vLLM has asked.
            items: Identifiers that the answer depends on.
            now: Monotonic seconds.
            until_s: When it is to be looked at again at the latest.
        """
        self._fresh[request_id] = computed_tokens
        self._turn = (self._turn + 1) % _SPREAD
        until_s = min(until_s, now + LONGEST_KEPT_S * (1 + self._turn / _SPREAD) / 2)
        if not self._until_s or until_s < self._next_s:
            self._next_s = until_s
        self._until_s[request_id] = until_s
        self._of_request[request_id] = items
        for identifier in items:
            requests = self._of_item.get(identifier)
            if requests is None:
                self._of_item[identifier] = {request_id}
            else:
                requests.add(request_id)

    def drop(self, request_id: str) -> None:
        """The request is to be looked at again, if it was not already."""
        if self._until_s.pop(request_id, None) is None:
            return
        self.in_force.pop(request_id, None)
        self._computed.pop(request_id, None)
        self._fresh.pop(request_id, None)
        for identifier in self._of_request.pop(request_id):
            requests = self._of_item.get(identifier)
            if requests is not None:
                requests.discard(request_id)
                if not requests:
                    del self._of_item[identifier]

    def changed(self, identifier: str) -> None:
        """Something about an item has changed: its state, or whether the device holds it."""
        for request_id in list(self._of_item.get(identifier, ())):
            self.drop(request_id)

    def changed_all(self, identifiers: Iterable[str]) -> None:
        """The same of several."""
        if self._of_item:
            for identifier in identifiers:
                self.changed(identifier)

    def clear(self) -> None:
        """Something has changed that concerns all."""
        self.in_force.clear()
        self._computed.clear()
        self._fresh.clear()
        self._until_s.clear()
        self._of_request.clear()
        self._of_item.clear()

    def expire(self, now: float) -> None:
        """Drop those whose time is over."""
        if not self._until_s or now < self._next_s:
            return
        for request_id in [one for one, until_s in self._until_s.items() if until_s <= now]:
            self.drop(request_id)
        self._next_s = min(self._until_s.values(), default=0.0)
