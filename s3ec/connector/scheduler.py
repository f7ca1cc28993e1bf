# SPDX-License-Identifier: Apache-2.0
"""The scheduler half: bookkeeping in memory, nothing else.

Every method runs inside vLLM's scheduling pass. None does I/O, waits, or makes a system call,
except build_connector_meta, which may wake the prefetcher's loop once per step. has_cache_item
is True only for entries of this node that are verified and held open, or, in a pure producer,
for entries that are stored already.

vLLM objects are used by attribute only: this module imports neither torch nor vllm.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable
from typing import Any

from s3ec.connector.item_tracker import (
    ABSENT,
    FAILED,
    FETCHING,
    READY,
    Item,
    ItemTracker,
    State,
)
from s3ec.connector.lookups import (
    ENCODED,
    FROM_BUCKET,
    FROM_NODE,
    DeviceLookups,
    has_rows,
)
from s3ec.connector.messages import Encode, Load, Save, StepPlan, WorkerReport
from s3ec.connector.request_waits import RequestWaits
from s3ec.connector.save_orders import SaveOrders, SeenKeys
from s3ec.connector.vllm_config import PASSED_THROUGH, Role, contradicts
from s3ec.connector.waiting import Source, SourceTimes, WaitPolicy
from s3ec.counters import Counters
from s3ec.encode_costs import EncodeCosts
from s3ec.identity import Key, KeyCache, KeyPolicy, ModalityScopes, without_key
from s3ec.index.reader import ManifestIndex
from s3ec.prefetch import Prefetcher, Priority
from s3ec.runtime import DiskWatch
from s3ec.store.places import Health
from s3ec.tier.entries import LocalKeys
from s3ec.tier.residents import Residents

log = logging.getLogger(__name__)

_SWEEP_EVERY_S = 1.0
# As for the states: a global is found faster than a member of a class.
_DEMAND, _LOOKAHEAD = Priority.DEMAND, Priority.LOOKAHEAD


def named_by(request: Any) -> Collection[str]:
    """Identifiers that a request names in ``ec_transfer_params``.

    An encoder instance returns such parameters, keyed by identifier, and a proxy passes them on
    with the request for the language instance. They are untrusted input and may be anything.
    """
    params = getattr(request, "ec_transfer_params", None)
    return params if isinstance(params, dict) else ()


class SchedulerHalf:
    """Decides which embeddings are fetched, granted, loaded and saved. Scheduler's thread only.

    Attributes:
        tracker: The state of each embedding. Read-only.
        waits: The requests that wait, and for what. Read-only.
        lookups: Counts the inputs that the device held when a step needed them.
        on_device: Identifiers that vLLM's encoder cache holds, or will hold once the last step was
            executed, as reported by its manager. Read-only.
        device: Identifiers that it holds right now, if our own manager is used. vLLM's manager
            reports only at the end of a pass: an entry that an earlier request of the pass evicted
            still seems to be there.
        rows_asked, decisions, allocated, unavailable, save_orders: Other state. Read-only.
        replay_tokens: Number of last tokens of a prefix hit that are computed again (bounded
            replay, DeepSeek-V4.1).
    """

    def __init__(
        self,
        role: Role,
        *,
        index: ManifestIndex,
        local: LocalKeys,
        prefetcher: Prefetcher,
        residents: Residents,
        store: Health,
        disk: DiskWatch,
        needs_embedding: Callable[[Any], bool],
        placeholder_of: Callable[[Any], dict[str, Any] | None],
        counters: Counters,
        naming: KeyPolicy | None = None,
        scopes: ModalityScopes | None = None,
        costs: EncodeCosts | None = None,
        policy: WaitPolicy | None = None,
        seen: SeenKeys | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Wire the half up.

        Args:
            local: Keys on this node's disk, as far as memory knows.
            residents: Entries of this node that can be granted at once.
            needs_embedding: True if a feature came without pixels, so that a miss is fatal.
            placeholder_of: Placeholder metadata of a feature; None if it is not available.
            naming: Maps identifiers to keys; None for the default policy.
            scopes: Marks the names of a modality; None for no marks.
            costs: Encode costs; None if the policy brings them, or if nothing is known yet.
            policy: Weighs each wait against encoding; None if every wait is worth it.
            seen: Keys that were encoded recently; None if everything is stored.
            clock: Monotonic seconds.
        """
        self._role = role
        self._policy = policy
        self._costs = policy.costs if policy is not None else costs or EncodeCosts()
        self._fetch_times = SourceTimes() if policy is None else policy.times
        self._load_s = 0.0  # mean load time of an item, from this node's memory to the device
        self._index = index
        self._local = local
        self._prefetcher = prefetcher
        self._residents = residents
        self._store = store
        self._disk = disk
        self._needs_embedding = needs_embedding
        self._placeholder_of = placeholder_of
        self._counters = counters
        self._clock = clock
        self._keys = KeyCache(naming or KeyPolicy(), counters)
        self._scopes = scopes or ModalityScopes()
        self._renames = bool(self._scopes or role.unshared) or role.tower_adapters
        # State of the store and of the disk at the start of this pass. All waits depend on it.
        self._down = self._hung = False
        self.tracker = ItemTracker(prefetcher, residents, role=role, clock=clock, local=local)
        self.waits = RequestWaits(
            self.tracker,
            role=role,
            counters=counters,
            clock=clock,
            local=local,
            needs_embedding=needs_embedding,
            times=self._fetch_times,
            policy=policy,
        )
        self._items = self.tracker.items
        self.lookups = DeviceLookups(counters)
        self.unavailable: set[str] = set()
        self.on_device: set[str] = set()
        self.device: Container[str] | None = None
        self.replay_tokens = 0
        # Rows that the request being scheduled has room for. If vLLM asks only once, the rows
        # that all requests asked for, as long as the item lives.
        self.rows_asked: dict[str, int] = {}
        self._bare: set[str] = set()  # this request's items without pixels, while the disk hangs
        self._named: Collection[str] = ()  # by the request being scheduled
        self.decisions: dict[str, bool] = {}  # of this pass
        # Items of this pass that a pure producer got without pixels and that the index holds.
        self._stored: set[str] = set()
        self._stores_again = role.producer and role.stores_again
        self.allocated: list[str] = []
        # The device evicted these in this pass: they were there, and vLLM asks for them.
        self._evicted: set[str] = set()
        self._plan = StepPlan()
        self.save_orders = SaveOrders(index, placeholder_of, counters, clock, seen)
        self._swept_s = clock()
        self._stopped = False

    def stop(self) -> bool:
        """Grant, load and save nothing more. Return False if the half was stopped before.

        Items that an earlier pass granted are still loaded. Open entries are released as they age.
        """
        self._plan.saves.clear()
        self.waits.look_at_all()
        stopped, self._stopped = self._stopped, True
        return not stopped

    def device_was_reset(self) -> None:
        """Note that vLLM emptied its encoder cache, here and in the workers, between two passes."""
        plan = self._plan
        self._drop_orders({*plan.saves, *plan.encodes, *(load.identifier for load in plan.loads)})
        self.on_device.clear()
        self.lookups.device_was_reset()
        self.waits.look_at_all()

    # -- before scheduling a request -------------------------------------------------------

    def ensure_cache_available(self, request: Any, num_computed_tokens: int) -> bool:
        """Return True if the request can be scheduled now; False defers it for this step."""
        if not self.waits.is_open:
            self._begin_pass()
        request_id = request.request_id
        if self.waits.repeats(request_id, num_computed_tokens):
            return False
        # vLLM reports the whole prefix hit, and goes back only after that (0.32 and newer,
        # v1/core/sched/scheduler.py, `_mark_prefix_replay`). A running request has gone back.
        start = num_computed_tokens
        if self.replay_tokens and not request.num_computed_tokens:
            start = max(start - self.replay_tokens, 0)
        if start >= request.num_prompt_tokens:  # everything is in the KV cache
            self.waits.leave_all(request_id)
            return True
        needed = self.lookups.ahead(request, start) if start else request.mm_features
        if self._stopped:
            self.waits.leave_all(request_id)
            return self._can_be_encoded(request, needed, start)
        if self._renames:
            self._name(request, needed)
        if self._stores_again and self.on_device:
            self._store_again(needed)
        if not self._role.consumer:
            return self._can_be_encoded(request, needed, start)
        if self._role.asked_every_pass:
            self.rows_asked.clear()  # vLLM schedules this request before it asks for the next
        self._named = named_by(request)
        window_end = num_computed_tokens + self._role.window_tokens
        if not self._role.asked_every_pass:
            # vLLM asks only once: wait for all.
            window_end = request.num_prompt_tokens
        now = self._clock()
        if self._bare:
            self._bare.clear()
        pending = []
        for feature in needed:
            position = feature.mm_position
            offset = position.offset
            end = offset + position.length
            if end <= start:
                continue
            needed_now = offset < window_end
            if offset < start or end > window_end:
                # vLLM may need no row of a partial range: some placeholder tokens have none.
                if not has_rows(position, start, end):
                    continue
                needed_now = needed_now and has_rows(position, start, window_end)
            state = self._look(feature, needed_now, now)
            if state is READY:
                continue
            if state is FETCHING:
                if needed_now:
                    pending.append(feature)
                else:
                    self.tracker.expect(request.request_id, feature.identifier, _LOOKAHEAD)
            elif needed_now and state is not ABSENT and self._needs_embedding(feature):
                return self._give_up(request, pending)
        if pending:
            goes_on = self.waits.defer(request, pending, -1 if self._hung else num_computed_tokens)
            return self._give_up(request, pending) if goes_on is None else goes_on
        self.waits.let_through(request_id, needed)
        return True

    def _name(self, request: Any, features: Iterable[Any]) -> None:
        """Map some of a request's features to the names they are stored under, or to a keyless one.

        vLLM names an adapter's image ``adapter:hash``, whatever the adapter's files hold (0.32,
        v1/engine/input_processor.py), so nothing is stored under that name.
        """
        self._keys.forget_names()  # before the loop only: later, a feature would lose its new name
        lora = getattr(request, "lora_request", None) if self._role.tower_adapters else None
        adapted = None if lora is None else f"{lora.lora_name}:"
        for feature in features:
            identifier = feature.identifier
            name = self._scopes.name(identifier, feature.modality)
            is_adapted = adapted is not None and identifier.startswith(adapted)
            if is_adapted or feature.modality in self._role.unshared:
                name = without_key(identifier)
            self._keys.rename(identifier, name)

    def _begin_pass(self) -> None:
        """Process what has changed since the last pass."""
        self._take_news()
        down, hung = self._store.is_open, self._disk.hangs
        if (down, hung) != (self._down, self._hung):
            self._down, self._hung = down, hung
            self.waits.look_at_all()
        self.waits.begin_pass(self._clock())

    def _take_news(self) -> None:
        """Process the fetches that the prefetcher has finished."""
        if self._prefetcher.has_news:
            self.waits.went_far(self._prefetcher.drain_far())
            self.waits.arrived(self._prefetcher.drain())

    def _can_be_encoded(self, request: Any, features: Iterable[Any], start: int) -> bool:
        """Return True if the encoder can make all that the request needs: nothing is loaded.

        Args:
            request: The request; it fails if a needed feature has no pixels and is not stored.
            features: Some of the request's features.
            start: The first token of the request that may be computed.
        """
        for feature in features:
            position = feature.mm_position
            end = position.offset + position.length
            if end <= start or not has_rows(position, start, end):
                continue
            if self._needs_embedding(feature):
                key = self._keys(feature.identifier)
                if self._stopped or key is None or not self._is_stored(key):
                    return self._give_up(request, [])
                self._stored.add(feature.identifier)
        return True

    def _is_stored(self, key: Key) -> bool:
        """Return True if the index may hold the key; False, without waiting, if the disk hangs."""
        return not self._disk.hangs and self._index.maybe_contains(key)

    def _store_again(self, features: Iterable[Any]) -> None:
        """Order a save of these features that the device holds and the corpus does not.

        vLLM asks only for items missing on its device. So a deleted object, or one whose save was
        dropped, would stay missing for as long as the device holds the embedding.
        """
        for feature in features:
            identifier = feature.identifier
            if identifier not in self.on_device or identifier in self.save_orders.ordered_s:
                continue
            if feature.modality == PASSED_THROUGH:  # the client's own embedding, not ours
                continue
            key = self._keys(identifier)
            if key is not None and not self._disk.hangs:
                self._save(identifier, self.save_orders.again(key, feature))

    def _is_held(self, identifier: str) -> bool:
        """Return True if the device holds the item, as far as is known."""
        return identifier in self.on_device and (self.device is None or identifier in self.device)

    def _look(self, feature: Any, needed_now: bool, now: float) -> State | None:
        """Return an item's state, and order its fetch if it is new. None is any other miss."""
        identifier = feature.identifier
        rows = feature.mm_position.get_num_embeds()
        item = self._items.get(identifier)
        if self._renames and item is not None and item.key != self._keys(identifier):
            self.rows_asked[identifier] = 0  # the item is of an earlier use of this identifier
            return None
        if item is None:
            # An item on the device needs no fetch. A feature without pixels is fetched all the
            # same: the device may evict it between this call and the next.
            if self._is_held(identifier) and not self._needs_embedding(feature):
                return ABSENT
            return self._want(feature, rows, needed_now, now)
        # If a request's features disagree on the rows, the first one counts. A client may also name
        # an image and a video alike: the item is not granted to the other, whatever its rows.
        fitting = rows if item.modality == feature.modality else 0
        asked = self.rows_asked.setdefault(identifier, fitting)
        if asked != fitting and not self._role.asked_every_pass:
            # Two requests disagree and has_cache_item cannot tell which of them asks.
            self.rows_asked[identifier] = 0
        state = item.state
        if self._hung:
            if self._needs_embedding(feature):
                self._bare.add(identifier)  # a worker will fetch it from the bucket
            elif self._role.asked_every_pass or state is not READY:
                return ABSENT
        if state is READY:
            item.touched_s = now
            return self._look_at_ready(feature, item, rows)
        if state is FAILED:
            return self._look_at_failed(feature, item, rows, needed_now, now)
        came = not item.was_local and self._local(item.key)
        awaited = identifier in self._named or self._needs_embedding(feature)
        if item.failures and not came and not awaited:
            return FAILED  # another request retries it again and again
        if self._is_held(identifier) and not self._needs_embedding(feature):
            return ABSENT  # another request had it encoded while this one waited
        out_of_reach = self._down and not self._local(item.key)
        if out_of_reach and not self._needs_embedding(feature):
            return ABSENT  # the store went down during the fetch; a later request may use it
        return FETCHING

    def _look_at_ready(self, feature: Any, item: Item, rows: int) -> State | None:
        if item.rows != rows or item.modality != feature.modality:
            self._counters.add("mismatch.rows" if item.rows != rows else "mismatch.modality")
            return None
        if item.entry is None or not self._needs_embedding(feature):
            return READY
        # vLLM would place the rows as this feature claims, and its prefix cache would serve the
        # result to all requests with this identifier.
        stored = item.entry.header.placeholder or {}
        if not contradicts(stored, self._placeholder_of(feature) or {}):
            return READY
        self._counters.add("mismatch.placeholder")
        return None

    def _look_at_failed(
        self, feature: Any, item: Item, rows: int, needed_now: bool, now: float
    ) -> State | None:
        if self._is_held(feature.identifier) and not self._needs_embedding(feature):
            return ABSENT  # it was encoded after its fetch had failed
        came = not item.was_local and self._local(item.key)
        named = feature.identifier in self._named and item.was_absent
        modality = feature.modality
        fits = item.fits(rows, modality)
        if named or self._needs_embedding(feature):
            misfit = not item.may_come
            if misfit and fits:
                return FAILED
            if not self._is_worthwhile(feature, item.key):
                return ABSENT
            if misfit or came or item.is_due(now):
                self.rows_asked[feature.identifier] = rows
                self.tracker.fetch(item.key, modality, rows, _DEMAND, promised=named)
            return FETCHING
        # A request for other rows is fetched again: a client may have made up the earlier ones.
        # So is an entry that has reached this node's disk since.
        if fits and item.failed_lately(now) and not came:
            return FAILED
        if not self._is_worthwhile(feature, item.key):
            return ABSENT
        self.rows_asked[feature.identifier] = rows
        priority = _DEMAND if needed_now else _LOOKAHEAD
        self.tracker.fetch(item.key, modality, rows, priority, anew=True)
        return FETCHING

    def _want(self, feature: Any, rows: int, needed_now: bool, now: float) -> State | None:
        if feature.modality == PASSED_THROUGH:
            return None
        identifier = feature.identifier
        key = self._keys.asked(identifier)
        if key is None:
            return None
        if self._role.can_load and not self._hung and not self._down:
            entry = self._residents.get(key.digest, now)
            if entry is not None:
                item = self.tracker.grant(key, entry, now)
                self.rows_asked[identifier] = rows if item.modality == feature.modality else 0
                return self._look_at_ready(feature, item, rows)
        if not self._is_worthwhile(feature, key):
            return ABSENT
        if not self._role.can_load:
            return None
        priority = _DEMAND if needed_now else _LOOKAHEAD
        self.rows_asked[identifier] = rows
        promised = identifier in self._named and not self._index.maybe_contains(key)
        self.tracker.fetch(key, feature.modality, rows, priority, promised=promised)
        return FETCHING

    def _is_worthwhile(self, feature: Any, key: Key) -> bool:
        """Return True if a fetch may bring the item.

        While the store is down, only entries on this node's disk are worth a fetch. While the disk
        hangs none is, and the index, which is mapped from it, is not read. An item that the request
        names is worth a fetch even if not in the index: another instance has just encoded it. A
        feature without pixels always is, since it cannot be encoded.
        """
        if self._hung:
            return self._needs_embedding(feature)
        if self._local(key):
            return True
        if not self._down and (
            feature.identifier in self._named or self._index.maybe_contains(key)
        ):
            return True
        return self._needs_embedding(feature)

    def _give_up(self, request: Any, pending: list[Any]) -> bool:
        """Fail a request that came without pixels and whose embedding is not available.

        Scheduling it would run the encoder without input, which kills the engine.
        """
        if request.request_id not in self.unavailable:
            self.unavailable.add(request.request_id)
            self._counters.add("unavailable_requests")
        self.waits.leave_all(request.request_id, [feature.identifier for feature in pending])
        return False

    # -- while scheduling a request --------------------------------------------------------

    def has_cache_item(self, identifier: str) -> bool:
        """Return True if vLLM may skip the encoder for this item."""
        if self._stopped:
            granted = False
        elif not self._role.consumer:
            # A pure producer loads nothing: True means "stored already, do not encode".
            key = self._keys(identifier)
            granted = identifier in self._stored or (key is not None and self._is_stored(key))
        else:
            item = self._items.get(identifier)
            granted = (
                item is not None
                and item.state is READY
                and item.rows == self.rows_asked.get(identifier)
                # While the disk hangs, only items without pixels are loaded, from the bucket.
                and (not self._hung or identifier in self._bare or not self._role.asked_every_pass)
            )
            # vLLM asks only for items that are missing in its device cache.
            if identifier in self.on_device:
                self.on_device.discard(identifier)
                self._evicted.add(identifier)
        self.decisions[identifier] = granted
        return granted

    def update_state_after_alloc(self, request: Any, index: int) -> None:
        """Turn the last decision into a load or a save: the request will be scheduled."""
        feature = request.mm_features[index]
        identifier = feature.identifier
        self.allocated.append(identifier)
        request_id = request.request_id
        self.waits.scheduled(request_id, identifier)
        if feature.modality == PASSED_THROUGH:
            return
        if self._renames and not self._role.asked_every_pass:
            self._name(request, (feature,))  # other requests may have replaced the names since
        granted = self.decisions.pop(identifier, False)
        self.lookups.allocated(request_id, index)
        rows = feature.mm_position.get_num_embeds()
        if granted:
            self._granted(identifier, feature.modality, rows)
            return
        self._counters.add_all(ENCODED[self._why_encoded(request_id, identifier)])
        self._plan.encodes[identifier] = Encode(feature.modality, rows)
        if self._role.producer and not self._stopped:
            key = self._keys.asked(identifier)
            if key is not None:
                self._save(identifier, self.save_orders.order(key, feature))

    def _why_encoded(self, request_id: str, identifier: str) -> str:
        """Return the reason why an input that is not granted is encoded: a key of ENCODED."""
        role = self._role
        if self._stopped or (role.consumer and not role.can_load):
            return "stopped"
        key = self._keys(identifier)
        if key is None:
            return "unshared"
        if self._hung:
            return "down"
        item = self._items.get(identifier)
        if item is None:
            is_down = self._down and role.consumer and self._index.maybe_contains(key)
            return "down" if is_down else "absent"
        if item.state is FETCHING:
            if item.promised:
                return "absent"
            if self._down and not self._local(key):
                return "down"
            return "late" if request_id in self.waits.records else "declined"
        if item.state is FAILED and item.may_come:
            return "absent" if item.was_absent else "failed"
        return "unfit"

    def _granted(self, identifier: str, modality: str, rows: int) -> None:
        """Order the load of an item that need not be encoded, if this instance loads."""
        saved_s = self._costs.known_s(modality, rows)
        if saved_s is not None:
            self._counters.add("encode.saved_seconds", saved_s)
        if not self._role.consumer:
            self._counters.add_all(FROM_BUCKET)
            return
        item = self._items[identifier]
        if item.entry is None:  # cannot be: granted items are READY, and READY items have one
            raise RuntimeError(f"granted item {item.key.digest.hex()} has no entry")
        self._counters.add_all(FROM_BUCKET if item.downloaded else FROM_NODE)
        item.downloaded = False
        self._plan.loads.append(Load.of(identifier, item.entry, item.key.renamed))

    def _save(self, identifier: str, save: Save | None) -> None:
        """Add a save order to the plan; None adds nothing."""
        if save is not None:
            self._plan.saves[identifier] = save

    def restore_s(self, identifier: str, modality: str, rows: int) -> float:
        """Estimate the seconds to restore an item on the device, from measurements in memory.

        That is the time to load it from this node's disk, to fetch and load it, or to encode it;
        never more than to encode it. A disk without measurements counts as fast.
        """
        encode_s = self._costs.cost_s(modality, rows)
        key = self._keys(identifier)
        can_load = self._role.consumer and self._role.can_load and not self._stopped
        if key is None or not can_load or self._disk.hangs:
            return encode_s
        source: Source
        if self._local(key):
            source = "tier"
        elif not self._store.is_open and self._index.maybe_contains(key):
            source = "bucket"
        else:
            return encode_s
        fetch_s = self._fetch_times.likely_s(source, rows, encode_s)
        return min(encode_s, fetch_s + self._load_s)

    # -- once per step ---------------------------------------------------------------------

    def build_connector_meta(
        self,
        freed: Iterable[str],
        *,
        scheduled_tokens: int,
        decode_tokens: int = 0,
        requests: int = 0,
    ) -> StepPlan:
        """Close the pass: submit the demand, drop unused grants, return the step's orders.

        Args:
            freed: Identifiers that the device's encoder cache freed since the last step, once for
                each time.
            scheduled_tokens: Tokens of the whole step. The V1 runner does not call the worker half
                in a step without tokens, so orders wait for the next one.
            decode_tokens: Tokens that the step would have if all its requests decoded; fewer than
                scheduled_tokens if some are prefilled. Only a policy uses this and the next one.
            requests: Number of requests that got tokens.
        """
        self.waits.end_pass(self._clock())
        if self._policy is not None:
            self._policy.load.end_pass(
                self._clock(), has_prefill=scheduled_tokens > decode_tokens, requests=requests
            )
        gone = self._gone(freed)
        if gone:
            self._drop_orders(gone)
        self.tracker.changed((*gone, *self.allocated))
        self.on_device.update(self.allocated)
        self.on_device.difference_update(gone)
        self.allocated.clear()
        self._evicted.clear()
        self.decisions.clear()
        self._stored.clear()
        if self._role.asked_every_pass:
            self.rows_asked.clear()
        now = self._clock()
        is_late = now - self._swept_s >= _SWEEP_EVERY_S
        if is_late:
            self._take_news()
            self._sweep(now)
        plan = StepPlan()
        if scheduled_tokens:
            plan, self._plan = self._plan, plan
        # Items that later steps load must stay.
        can_sweep = is_late and not self._plan.loads
        loads = [load.identifier for load in plan.loads]
        plan.step = self.tracker.next_step(loads, now, sweep=can_sweep)
        return plan

    def _gone(self, freed: Iterable[str]) -> set[str]:
        """Return the freed identifiers that the device does not hold at the end of this pass.

        An embedding may be freed and allocated again in one pass; vLLM before 0.32 lists it
        all the same. It may also be allocated and then freed: its request was preempted.
        """
        times = Counter(freed)
        return {
            identifier
            for identifier, count in times.items()
            if count - (identifier in self._evicted) >= self.allocated.count(identifier)
        }

    def _drop_orders(self, freed: set[str]) -> None:
        """Drop load and save orders of identifiers that the device has freed since.

        The worker frees first: it would load them after that and never free them again.
        """
        for identifier in freed & self._plan.saves.keys():
            del self._plan.saves[identifier]
            self.save_orders.release(identifier)
        for identifier in freed:
            self._plan.encodes.pop(identifier, None)
        self._plan.loads = [load for load in self._plan.loads if load.identifier not in freed]

    def update_connector_output(self, report: WorkerReport) -> None:
        """Process the workers' report: release loaded entries, add stored keys to the index."""
        self.tracker.loaded(report.loaded)
        if report.has_other_weights and self.stop():
            self._counters.add("stopped_by_weights")
            log.error(
                "the model's weights were replaced while this engine started: nothing is loaded or "
                "saved from here on. Start it again"
            )
        # Adding a key reads the index, which is mapped from the disk. A key that is not added is
        # found once it was announced.
        hangs = bool(report.stored) and self._disk.hangs
        for identifier in report.stored:
            self.save_orders.release(identifier)
            key = self._keys(identifier)
            if key is not None and not hangs:
                self._index.add(key)
        for name, amount in report.counts.items():
            self._counters.add(name, amount)
        for one in report.encoded:
            self._costs.add(one.modality, one.rows, one.seconds, items=one.items)

    def _sweep(self, now: float) -> None:
        """Drop expired state; at most once a second."""
        self._swept_s = now
        if not self._role.asked_every_pass:
            for identifier in self.rows_asked.keys() - self._items.keys():
                del self.rows_asked[identifier]
        loads = self._counters.get("load.items")
        if loads:
            self._load_s = self._counters.get("load.seconds") / loads
        self.save_orders.sweep(now)

    # -- the end of a request --------------------------------------------------------------

    def take_unavailable_requests(self) -> set[str]:
        """Return the requests that vLLM must fail; each is returned once."""
        taken, self.unavailable = self.unavailable, set()
        return taken

    def request_finished(self, request: Any) -> list[int] | None:
        """Drop the state of a request that has ended.

        Returns:
            For a pure producer, the positions of the features that it does not store, such as
            those without a key. None for other roles.
        """
        self.unavailable.discard(request.request_id)
        self.lookups.end_request(request.request_id)
        self.waits.end_request(request.request_id)
        if self._role.consumer:
            return None
        return [
            place
            for place, feature in enumerate(request.mm_features)
            if self._stopped
            or feature.modality == PASSED_THROUGH
            or self._keys(feature.identifier) is None
        ]
