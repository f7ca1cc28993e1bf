# SPDX-License-Identifier: Apache-2.0
"""The scheduler half: bookkeeping in memory, nothing else.

Every method runs inside vLLM's scheduling pass. None does I/O, waits, or makes a system call,
except build_connector_meta, which may wake the prefetcher's loop once per step. True is
granted only for entries that the prefetcher has verified and pinned on this node.

vLLM objects are used by attribute only: this module imports neither torch nor vllm.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from s3ec.connector.items import ABSENT, FAILED, FETCHING, LEASE_S, READY, Item, State
from s3ec.connector.plan import Load, StepPlan, WorkerReport
from s3ec.connector.ranks import Ranks
from s3ec.connector.role import Role
from s3ec.connector.save_orders import SaveOrders
from s3ec.connector.steps import Steps
from s3ec.connector.supply import PrefetchQueue, Supply
from s3ec.connector.waits import Waits
from s3ec.counters import Counters
from s3ec.index.base import Index
from s3ec.naming import CountedKeys, Naming
from s3ec.prefetch import Priority
from s3ec.tier.local import LocalKeys

# vLLM hands a request's own embeddings through as a modality of this name; nothing to cache.
_PASSED_THROUGH = "prompt_embeds"
_SWEEP_EVERY_S = 1.0
# As for the states: a global is found faster than a member of a class.
_DEMAND, _LOOKAHEAD = Priority.DEMAND, Priority.LOOKAHEAD


class SchedulerHalf:
    """Decides what is fetched, granted, loaded and saved. One thread: the scheduler's."""

    def __init__(
        self,
        role: Role,
        *,
        index: Index,
        local: LocalKeys,
        prefetcher: PrefetchQueue,
        store_is_down: Callable[[], bool],
        disk_hangs: Callable[[], bool],
        needs_embedding: Callable[[Any], bool],
        placeholder_of: Callable[[Any], dict[str, Any]],
        counters: Counters,
        ranks: Ranks | None = None,
        naming: Naming | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Wire the half up.

        Args:
            role: What this instance does.
            index: What the corpus holds.
            local: What this node's disk holds, as far as memory knows.
            prefetcher: Brings and pins entries.
            store_is_down: Whether the breaker is open.
            disk_hangs: Whether this node's disk is known not to answer.
            needs_embedding: Whether a feature came without pixels, so that a miss is fatal.
            placeholder_of: Placeholder metadata of a feature, stored with it.
            counters: Where to count.
            ranks: Ranks that may not see this node's pins; None where all do for certain.
            naming: Which identifiers have keys, and which; None for the plain ones.
            clock: Monotonic seconds.
        """
        self._role = role
        self._index = index
        self._local = local
        self._prefetcher = prefetcher
        self._store_is_down = store_is_down
        self._disk_hangs = disk_hangs
        self._hung = False  # as of the request being scheduled
        self._needs_embedding = needs_embedding
        self._counters = counters
        self._ranks = ranks
        self._clock = clock
        self._keys = CountedKeys(naming or Naming(), counters)
        self._waits = Waits(role.defer_timeout_s, counters, clock)
        self._have_waited = self._waits.requests
        self._supply = Supply(
            prefetcher,
            ranks=ranks,
            requests_wait=role.defer_timeout_s > 0,
            counters=counters,
            clock=clock,
            came=self._waits.came,
        )
        self._items = self._supply.items
        self._waiting = self._supply.interest.requests
        self._unavailable: set[str] = set()
        self._on_device: set[str] = set()  # vLLM's encoder cache, as its manager told us
        # Rows that the request being scheduled has room for. Where vLLM asks once only, what
        # all requests asked for, as long as the item lives.
        self._rows_asked: dict[str, int] = {}
        self._decisions: dict[str, bool] = {}  # of this pass
        self._allocated: list[str] = []
        self._plan = StepPlan()
        self._steps = Steps(ranks=role.ranks, in_flight=role.steps_in_flight)
        self._save_orders = SaveOrders(index, placeholder_of, clock)
        self._swept_s = clock()

    # -- before scheduling a request -------------------------------------------------------

    def ensure_cache_available(self, request: Any, num_computed_tokens: int) -> bool:
        """Whether the request can be scheduled now; False defers it for this step."""
        if not self._role.consumer:
            return True
        if self._role.asked_every_pass:
            self._rows_asked.clear()  # vLLM schedules this request before it asks for the next
        features = request.mm_features
        last = features[-1].mm_position
        if last.offset + last.length <= num_computed_tokens:
            # Decoding: everything is in the KV cache.
            if self._waiting and request.request_id in self._waiting:
                self._supply.leave_all(request.request_id)
            return True
        if self._prefetcher.has_news:
            self._supply.take_news()
        window_end = num_computed_tokens + self._role.window_tokens
        if not self._role.asked_every_pass:
            window_end = last.offset + 1  # there will be no second question: wait for all
        now = self._clock()
        self._hung = self._disk_hangs()
        pending = []
        for feature in features:
            position = feature.mm_position
            offset = position.offset
            if offset + position.length <= num_computed_tokens:
                continue
            needed_now = offset < window_end
            state = self._look(feature, needed_now, now)
            if state is READY:
                continue
            if state is FETCHING:
                if needed_now:
                    pending.append(feature)
                else:
                    self._supply.expect(request.request_id, feature.identifier, _LOOKAHEAD)
            elif needed_now and state is not ABSENT and self._needs_embedding(feature):
                return self._give_up(request, pending)
        if pending:
            return self._wait_for(pending, request)
        request_id = request.request_id
        if request_id in self._waiting:
            self._supply.leave_covered(request, num_computed_tokens)
        if request_id in self._have_waited:
            self._waits.end(request_id)
        return True

    def _look(self, feature: Any, needed_now: bool, now: float) -> State | None:
        """State of one item, noting the demand if nobody did; None is a miss of another kind."""
        identifier = feature.identifier
        rows = feature.mm_position.get_num_embeds()
        item = self._items.get(identifier)
        if item is None:
            # What the device holds needs no fetch. A feature without pixels is pinned all the
            # same: the device may evict it between this call and the next.
            if identifier in self._on_device and not self._needs_embedding(feature):
                return ABSENT
            return self._want(feature, rows, needed_now, now)
        # A request whose features disagree asks for the first of them first.
        asked = self._rows_asked.setdefault(identifier, rows)
        if asked != rows and not self._role.asked_every_pass:
            # Two requests disagree and has_cache_item cannot tell which of them asks.
            self._rows_asked[identifier] = -1
        state = item.state
        if self._hung and self._is_out_of_reach(feature, item):
            return ABSENT
        if state is READY:
            item.touched_s = now
            if item.rows == rows:
                return READY
            self._counters.add("mismatch.rows")
            return None
        if state is FAILED:
            # One that asks for other rows has a chance: those may have been a client's invention.
            if item.rows == rows and item.failed_lately(now):
                return FAILED
            self._supply.drop(identifier)
            return self._want(feature, rows, needed_now, now)
        if identifier in self._on_device and not self._needs_embedding(feature):
            return ABSENT  # another request had it encoded while this one waited
        out_of_reach = self._store_is_down() and not self._local(item.key)
        if out_of_reach and not self._needs_embedding(feature):
            return ABSENT  # on its way when the store went down, and of use to a later request
        return FETCHING

    def _is_out_of_reach(self, feature: Any, item: Item) -> bool:
        """Whether an item is to be encoded since the disk hangs, though it may be there."""
        granted_later = item.state is READY and not self._role.asked_every_pass
        if granted_later or self._needs_embedding(feature):
            return False  # a worker will ask the bucket
        self._rows_asked[feature.identifier] = -1  # no grant in this pass
        return True

    def _want(self, feature: Any, rows: int, needed_now: bool, now: float) -> State | None:
        if feature.modality == _PASSED_THROUGH:
            return None
        identifier = feature.identifier
        key = self._keys.asked(identifier)
        if key is None:
            return None
        # While the store is down only what this node's disk holds is worth a look; while the disk
        # hangs nothing, nor is the index, which is mapped from it. A feature without pixels is
        # always worth one: it has no other chance.
        here = self._local(key) and not self._hung
        down = self._hung or self._store_is_down()
        miss = not here and (down or not self._index.maybe_contains(key))
        if miss and not self._needs_embedding(feature):
            return ABSENT
        if not self._role.can_load:
            return None
        priority = _DEMAND if needed_now else _LOOKAHEAD
        self._rows_asked[identifier] = rows
        self._supply.want(key, feature.modality, rows, priority)
        return FETCHING

    def _wait_for(self, pending: list[Any], request: Any) -> bool:
        """Defer the request, unless it has waited long enough or would wait in vain."""
        request_id = request.request_id
        over = self._waits.is_over(request_id)
        if self._ranks is not None and self._ranks.cannot_answer:
            over = True
        no_pixels = over and any(map(self._needs_embedding, pending))
        if no_pixels:
            over = self._waits.is_over(request_id, no_pixels=True)
        if not over:
            noted = self._waiting.get(request_id, ())
            for feature in pending:
                identifier = feature.identifier
                if identifier not in noted or self._items[identifier].priority is not _DEMAND:
                    self._supply.expect(request_id, identifier, _DEMAND)
            return False
        self._waits.end(request_id, in_vain=True)
        if no_pixels:
            return self._give_up(request, pending)
        for feature in pending:
            self._supply.leave(request_id, feature.identifier)
        return True

    def _give_up(self, request: Any, pending: list[Any]) -> bool:
        """Fail a request that came without pixels and whose embedding cannot be had.

        Scheduling it would run the encoder on nothing and end the engine.
        """
        if request.request_id not in self._unavailable:
            self._unavailable.add(request.request_id)
            self._counters.add("unavailable_requests")
        for feature in pending:
            self._supply.leave(request.request_id, feature.identifier)
        self._supply.leave_all(request.request_id)
        return False

    # -- while scheduling a request --------------------------------------------------------

    def has_cache_item(self, identifier: str) -> bool:
        """Whether vLLM may skip the encoder for this item."""
        if not self._role.consumer:
            # A pure producer loads nothing: True means "stored already, do not encode".
            key = self._keys(identifier)
            granted = key is not None and not self._disk_hangs() and self._index.holds(key)
        else:
            item = self._items.get(identifier)
            granted = (
                item is not None
                and item.state is READY
                and item.rows == self._rows_asked.get(identifier)
            )
            # vLLM asks only for what its device cache lacks; it may have been reset.
            self._on_device.discard(identifier)
        self._decisions[identifier] = granted
        return granted

    def update_state_after_alloc(self, request: Any, index: int) -> None:
        """The request will be scheduled: turn the last decision into a load or a save."""
        feature = request.mm_features[index]
        identifier = feature.identifier
        self._allocated.append(identifier)
        request_id = request.request_id
        if request_id in self._have_waited:
            self._waits.end(request_id)
        if feature.modality == _PASSED_THROUGH:
            return
        granted = self._decisions.pop(identifier, False)
        self._counters.add("hits" if granted else "misses")
        if granted and self._role.consumer:
            self._plan_load(identifier)
        elif not granted and self._role.producer:
            self._plan_save(feature, identifier)
        if request_id in self._waiting:
            self._supply.leave(request_id, identifier)

    def _plan_load(self, identifier: str) -> None:
        item = self._items[identifier]
        if item.pin is None:  # cannot be: granted items are READY, and READY items have a pin
            raise RuntimeError(f"granted item {item.key.digest.hex()} has no pin")
        item.loads += 1
        self._plan.loads.append(Load.of(identifier, item.pin))

    def _plan_save(self, feature: Any, identifier: str) -> None:
        key = self._keys.asked(identifier)
        save = None if key is None else self._save_orders.order(key, feature)
        if save is not None:
            self._plan.saves[identifier] = save

    # -- once per step ---------------------------------------------------------------------

    def build_connector_meta(self, freed: Iterable[str], *, scheduled_tokens: int) -> StepPlan:
        """Close the pass: hand the demand over, drop unused grants, return the step's orders.

        Args:
            freed: Identifiers that the device's encoder cache drops in this step.
            scheduled_tokens: Of the whole step. The V1 runner does not call the worker half
                in a step without tokens, so orders wait for the next one.
        """
        freed = set(freed).difference(self._allocated)
        if freed and self._plan.loads:
            self._drop_loads(freed)
        self._on_device.difference_update(freed)
        self._on_device.update(self._allocated)
        self._allocated.clear()
        self._decisions.clear()
        if self._role.asked_every_pass:
            self._rows_asked.clear()
        self._supply.loaded(self._steps.begin(), self._on_device)
        self._sweep()
        self._supply.hand_over()
        orders = None
        if self._ranks is not None:
            orders = self._ranks.take_orders(scheduled_tokens=scheduled_tokens)
        if not scheduled_tokens:
            return StepPlan(self._steps.current, ranks=orders)
        plan, self._plan = self._plan, StepPlan()
        plan.step = self._steps.current
        plan.ranks = orders
        if plan.loads:
            self._steps.load(load.identifier for load in plan.loads)
        return plan

    def _drop_loads(self, freed: set[str]) -> None:
        """Take back what an earlier step left to load and the device has given up since.

        The worker frees first: it would load them after that and never free them again.
        """
        for load in self._plan.loads:
            if load.identifier in freed:
                self._items[load.identifier].loads -= 1
        self._plan.loads = [load for load in self._plan.loads if load.identifier not in freed]

    def update_connector_output(self, report: WorkerReport) -> None:
        """Take the workers' report: unpin what was loaded, learn what was stored."""
        self._supply.loaded(self._steps.reported(report.loaded), self._on_device)
        self._supply.hear(report)
        for identifier in report.published:
            key = self._keys(identifier)
            if key is not None:
                self._local.add(key)
        # Adding looks into the index, which is mapped from the disk. What is not added is found
        # when it was announced.
        hangs = bool(report.stored) and self._disk_hangs()
        for identifier in report.stored:
            self._save_orders.stored(identifier)
            key = self._keys(identifier)
            if key is not None and not hangs:
                self._index.add(key)
        for name, amount in report.counts.items():
            self._counters.add(name, amount)

    def _sweep(self) -> None:
        """Give back what nobody asked for lately; at most once a second."""
        now = self._clock()
        if now - self._swept_s < _SWEEP_EVERY_S:
            return
        self._swept_s = now
        self._supply.sweep(now)
        if not self._role.asked_every_pass:
            for identifier in self._rows_asked.keys() - self._items.keys():
                del self._rows_asked[identifier]
        self._waits.sweep(LEASE_S)
        self._save_orders.sweep(now)

    # -- the end of a request --------------------------------------------------------------

    def take_unavailable_requests(self) -> set[str]:
        """Requests that vLLM must fail; each is named once."""
        taken, self._unavailable = self._unavailable, set()
        return taken

    def request_finished(self, request: Any) -> None:
        """Forget the request. What it waited for is for others, or for nobody."""
        self._waits.forget(request.request_id)
        self._unavailable.discard(request.request_id)
        self._supply.leave_all(request.request_id)
