# SPDX-License-Identifier: Apache-2.0
"""The scheduler half: bookkeeping in memory, nothing else.

Every method runs inside vLLM's scheduling pass. None does I/O, waits, or makes a system call,
except build_connector_meta, which may wake the prefetcher's loop once per step. True is
granted only for entries that the prefetcher has verified and pinned on this node.

vLLM objects are used by attribute only, so this module imports neither torch nor vllm and its
tests run without them.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from s3ec.connector.plan import Load, Save, StepPlan, WorkerReport
from s3ec.connector.waits import Waits
from s3ec.counters import Counters
from s3ec.identity import Key, KeyMaker
from s3ec.index.base import Index
from s3ec.prefetch import Fetched, Outcome, Priority, Want
from s3ec.tier import Pin
from s3ec.tier.local import LocalKeys

# A failed fetch is not tried again for the same image within this time: the request that is
# being deferred must go on, and the next one must not wait for the same failure.
RETRY_AFTER_S = 5.0
# A pin that no request asked about for this long is given back; the bytes stay on the tier.
LEASE_S = 30.0
# vLLM hands a request's own embeddings through as a modality of this name; nothing to cache.
_PASSED_THROUGH = "prompt_embeds"
_SWEEP_EVERY_S = 1.0


class PrefetchQueue(Protocol):
    """What this half needs of a Prefetcher."""

    def submit(self, wants: list[Want]) -> None: ...
    @property
    def has_news(self) -> bool: ...
    def drain(self) -> list[Fetched]: ...
    def release(self, pins: Iterable[Pin]) -> None: ...


class _State(enum.Enum):
    FETCHING = enum.auto()
    READY = enum.auto()
    FAILED = enum.auto()
    ABSENT = enum.auto()  # nothing to wait for, and the pixels came with the request


# Looking a member up in its class costs 65 ns in Python 3.11, five times a global.
_FETCHING, _READY, _FAILED, _ABSENT = _State


@dataclass(slots=True)
class _Item:
    """One identifier that is being fetched, pinned, or known to have failed."""

    key: Key
    state: _State
    priority: Priority
    touched_s: float
    rows: int  # of the pinned entry; before that, what was asked for
    pin: Pin | None = None
    loads: int = 0  # steps that were told to load it and have not reported


@dataclass(frozen=True, slots=True)
class Role:
    """What this vLLM instance does.

    Attributes:
        producer: It may store embeddings.
        consumer: It may load them. A producer that is no consumer runs no language model.
        window_tokens: Most tokens that one step can schedule for a request.
        ranks: Workers that load every granted item (tensor parallel size).
        steps_in_flight: Steps that can be scheduled before the first of them has ended.
        defer_timeout_s: Longest deferral of a request in all.
        asked_every_pass: Whether vLLM calls ensure_cache_available for a request in every
            pass that schedules it (0.30 and newer), or only before its first one.
    """

    producer: bool
    consumer: bool
    window_tokens: int
    ranks: int
    steps_in_flight: int
    defer_timeout_s: float
    asked_every_pass: bool = True


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
        needs_embedding: Callable[[Any], bool],
        placeholder_of: Callable[[Any], dict[str, Any]],
        counters: Counters,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Wire the half up.

        Args:
            role: What this instance does.
            index: What the corpus holds.
            local: What this node's disk holds, as far as memory knows.
            prefetcher: Brings and pins entries.
            store_is_down: Whether the breaker is open.
            needs_embedding: Whether a feature came without pixels, so that a miss is fatal.
            placeholder_of: Placeholder metadata of a feature, to be stored with it.
            counters: Where to count.
            clock: Monotonic seconds.
        """
        self._role = role
        self._index = index
        self._local = local
        self._prefetcher = prefetcher
        self._store_is_down = store_is_down
        self._needs_embedding = needs_embedding
        self._placeholder_of = placeholder_of
        self._counters = counters
        self._clock = clock
        self._keys = KeyMaker()
        self._items: dict[str, _Item] = {}
        self._waits = Waits(role.defer_timeout_s, counters, clock)
        self._unavailable: set[str] = set()
        # What the device's encoder cache holds, as vLLM's manager told us.
        self._on_device: set[str] = set()
        # Rows that the request being scheduled has room for. Where vLLM asks once only, what
        # all requests asked for, as long as the item lives.
        self._rows_asked: dict[str, int] = {}
        # This pass only.
        self._decisions: dict[str, bool] = {}
        self._allocated: list[str] = []
        self._demand: dict[str, Want] = {}
        self._plan = StepPlan()
        # Steps whose loads may still be read: identifiers, and the ranks that reported.
        self._loading: dict[int, tuple[list[str], set[int]]] = {}
        self._saving: dict[str, float] = {}
        self._step = 0
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
            return True  # decoding: everything is in the KV cache
        if self._prefetcher.has_news:
            self._take_news()
        window_end = num_computed_tokens + self._role.window_tokens
        if not self._role.asked_every_pass:
            window_end = last.offset + 1  # there will be no second question: wait for all
        now = self._clock()
        pending = []
        for feature in features:
            position = feature.mm_position
            offset = position.offset
            if offset + position.length <= num_computed_tokens:
                continue
            needed_now = offset < window_end
            state = self._look(feature, needed_now, now)
            if state is _READY or not needed_now:
                continue
            if state is _FETCHING:
                pending.append(feature)
            elif state is not _ABSENT and self._needs_embedding(feature):
                return self._give_up(request)
        if pending:
            if not self._waits.is_over(request.request_id):
                return False
            if any(map(self._needs_embedding, pending)):
                return self._give_up(request)
            return True
        self._waits.end(request.request_id)
        return True

    def _look(self, feature: Any, needed_now: bool, now: float) -> _State | None:
        """State of one item, noting the demand if nobody did; None is a miss of another kind."""
        identifier = feature.identifier
        rows = feature.mm_position.get_num_embeds()
        item = self._items.get(identifier)
        if item is None:
            # What the device holds needs no fetch. A feature without pixels is pinned all the
            # same: the device may evict it between this call and the next.
            if identifier in self._on_device and not self._needs_embedding(feature):
                return _ABSENT
            return self._want(feature, rows, needed_now, now)
        # A request whose features disagree asks for the first of them first.
        asked = self._rows_asked.setdefault(identifier, rows)
        if asked != rows and not self._role.asked_every_pass:
            # Two requests disagree and has_cache_item cannot tell which of them asks.
            self._rows_asked[identifier] = -1
        state = item.state
        if state is _READY:
            item.touched_s = now
            if item.rows == rows:
                return _READY
            self._counters.add("mismatch.rows")
            return None
        if state is _FAILED:
            # One that asks for other rows has a chance: those may have been a client's invention.
            if item.rows == rows and now - item.touched_s < RETRY_AFTER_S:
                return _FAILED
            self._drop(identifier)
            return self._want(feature, rows, needed_now, now)
        if needed_now and item.priority is Priority.LOOKAHEAD:
            item.priority = Priority.DEMAND
            self._demand[identifier] = Want(item.key, feature.modality, rows, Priority.DEMAND)
        return _FETCHING

    def _want(self, feature: Any, rows: int, needed_now: bool, now: float) -> _State | None:
        if feature.modality == _PASSED_THROUGH:
            return None
        identifier = feature.identifier
        key = self._keys(identifier)
        if key is None:
            self._counters.add("refused_identifiers")
            return None
        # While the store is down only what this node's disk holds is worth a look. A feature
        # without pixels is always worth one: it has no other chance.
        if (
            not self._local(key)
            and (self._store_is_down() or not self._index.maybe_contains(key))
            and not self._needs_embedding(feature)
        ):
            return _ABSENT
        priority = Priority.DEMAND if needed_now else Priority.LOOKAHEAD
        self._items[identifier] = _Item(key, _FETCHING, priority, now, rows)
        self._rows_asked[identifier] = rows
        self._demand[identifier] = Want(key, feature.modality, rows, priority)
        return _FETCHING

    def _give_up(self, request: Any) -> bool:
        """Fail a request that came without pixels and whose embedding cannot be had.

        Scheduling it would run the encoder on nothing and end the engine.
        """
        if request.request_id not in self._unavailable:
            self._unavailable.add(request.request_id)
            self._counters.add("unavailable_requests")
        return False

    def _take_news(self) -> None:
        now = self._clock()
        unwanted = []
        for fetched in self._prefetcher.drain():
            identifier = fetched.want.key.identifier
            item = self._items.get(identifier)
            if item is None or item.state is _READY:
                if fetched.pin is not None:
                    unwanted.append(fetched.pin)
                continue
            item.touched_s = now
            if fetched.outcome is Outcome.READY and fetched.pin is not None:
                item.state = _READY
                item.pin = fetched.pin
                item.rows = fetched.pin.header.shape.rows
            else:
                item.state = _FAILED
        self._prefetcher.release(unwanted)

    # -- while scheduling a request --------------------------------------------------------

    def has_cache_item(self, identifier: str) -> bool:
        """Whether vLLM may skip the encoder for this item."""
        if not self._role.consumer:
            # A pure producer loads nothing: True means "stored already, do not encode".
            key = self._keys(identifier)
            granted = key is not None and self._index.maybe_contains(key)
        else:
            item = self._items.get(identifier)
            granted = (
                item is not None
                and item.state is _READY
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
        self._waits.end(request.request_id)
        if feature.modality == _PASSED_THROUGH:
            return
        if self._decisions.pop(identifier, False):
            self._counters.add("hits")
            if self._role.consumer:
                self._plan_load(identifier)
            return
        self._counters.add("misses")
        if self._role.producer:
            self._plan_save(feature, identifier)

    def _plan_load(self, identifier: str) -> None:
        item = self._items[identifier]
        if item.pin is None:  # cannot be: granted items are READY, and READY items have a pin
            raise RuntimeError(f"granted item {item.key.digest.hex()} has no pin")
        item.loads += 1
        self._plan.loads.append(Load.of(identifier, item.pin))

    def _plan_save(self, feature: Any, identifier: str) -> None:
        key = self._keys(identifier)
        if key is None:
            self._counters.add("refused_identifiers")
        elif identifier not in self._saving and not self._index.maybe_contains(key):
            self._saving[identifier] = self._clock()
            self._plan.saves[identifier] = Save(feature.modality, self._placeholder_of(feature))

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
        if self._demand:
            wants = list(self._demand.values())
            self._demand.clear()
            self._prefetcher.submit(wants)
        self._step += 1
        self._finish_old_steps()
        self._sweep()
        if not scheduled_tokens:
            return StepPlan(self._step)
        plan, self._plan = self._plan, StepPlan()
        plan.step = self._step
        if plan.loads:
            self._loading[self._step] = ([load.identifier for load in plan.loads], set())
        return plan

    def _drop_loads(self, freed: set[str]) -> None:
        """Take back what an earlier step left to load and the device has given up since.

        The worker frees first: it would load them after that and never free them again.
        """
        for load in self._plan.loads:
            if load.identifier in freed:
                self._items[load.identifier].loads -= 1
        self._plan.loads = [load for load in self._plan.loads if load.identifier not in freed]

    def _finish_old_steps(self) -> None:
        """Unpin what steps loaded that must have ended by now, reported or not.

        Steps end in order, and vLLM schedules at most ``steps_in_flight`` ahead; one more is
        for tensor-parallel ranks behind the one that answers.
        """
        for step in list(self._loading):
            if self._step - step <= self._role.steps_in_flight:
                return
            self._finish_step(step)

    def update_connector_output(self, report: WorkerReport) -> None:
        """Take the workers' report: unpin what was loaded, learn what was stored."""
        for step, ranks in report.loaded.items():
            entry = self._loading.get(step)
            if entry is not None:
                entry[1].update(ranks)
                if len(entry[1]) >= self._role.ranks:
                    self._finish_step(step)
        for identifier in report.published:
            key = self._keys(identifier)
            if key is not None:
                self._local.add(key)
        for identifier in report.stored:
            self._saving.pop(identifier, None)
            key = self._keys(identifier)
            if key is not None:
                self._index.add(key)
        for name, amount in report.counts.items():
            self._counters.add(name, amount)

    def _finish_step(self, step: int) -> None:
        identifiers, _ = self._loading.pop(step)
        pins = []
        for identifier in identifiers:
            item = self._items.get(identifier)
            if item is None:
                continue
            item.loads -= 1
            if item.loads == 0 and identifier in self._on_device:
                pins += self._drop(identifier)
        self._prefetcher.release(pins)

    def _drop(self, identifier: str) -> list[Pin]:
        item = self._items.pop(identifier)
        if not self._role.asked_every_pass:
            self._rows_asked.pop(identifier, None)
        return [item.pin] if item.pin is not None else []

    def _sweep(self) -> None:
        """Give back what nobody asked for lately; at most once a second."""
        now = self._clock()
        if now - self._swept_s < _SWEEP_EVERY_S:
            return
        self._swept_s = now
        if self._prefetcher.has_news:
            self._take_news()
        pins = []
        for identifier, item in list(self._items.items()):
            idle_s = now - item.touched_s
            if (item.state is _READY and item.loads == 0 and idle_s > LEASE_S) or (
                item.state is _FAILED and idle_s > RETRY_AFTER_S
            ):
                pins += self._drop(identifier)
        self._prefetcher.release(pins)
        self._waits.sweep(LEASE_S)
        # A save that was dropped or failed may be tried again at the next encode.
        for identifier, since_s in list(self._saving.items()):
            if now - since_s > LEASE_S:
                del self._saving[identifier]

    # -- the end of a request --------------------------------------------------------------

    def take_unavailable_requests(self) -> set[str]:
        """Requests that vLLM must fail; each is named once."""
        taken, self._unavailable = self._unavailable, set()
        return taken

    def request_finished(self, request: Any) -> None:
        """Forget the request. Its items stay for others until their lease ends."""
        self._waits.forget(request.request_id)
        self._unavailable.discard(request.request_id)
