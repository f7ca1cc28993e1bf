# SPDX-License-Identifier: Apache-2.0
"""The connectors that stand behind the scheduler: s3ec's, watched, and one that only repeats.

``S3EC`` hands every call to s3ec's halves and checks what they promise. ``Repeat`` gives the
answers that another run was given, and brings every granted embedding to the device by itself,
whole and in time: what goes wrong with it as well is vLLM's fault.
"""

from __future__ import annotations

import dataclasses
import math
import shutil
import tempfile
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ECConnectorOutput
from vllm.v1.request import Request

from s3ec.connector import live_weights, loads
from s3ec.connector.messages import StepPlan, WorkerReport
from s3ec.connector.request_waits import NO_PIXELS_WAIT_S
from s3ec.connector.scheduler import SchedulerHalf
from s3ec.connector.vllm_config import PASSED_THROUGH, Role
from s3ec.connector.waiting import EngineLoad, WaitPolicy
from s3ec.connector.worker import WorkerHalf
from s3ec.counters import Counters
from s3ec.dev.rigs.virtual_engine import NoConnector
from s3ec.encode_costs import EncodeCosts
from s3ec.identity import Namespace
from s3ec.node import Node
from s3ec.runtime import DiskWatch
from s3ec.settings import Settings
from s3ec.testing.memory_store import MemoryStore
from s3ec.tier.open_entry import OpenEntry
from tests.fuzz.engine import Engine, Options, Step, has_pixels
from tests.fuzz.outside import (
    BrokenPromiseError,
    EntryFiles,
    Outside,
    PlayedPrefetcher,
    PlayedSaves,
    embedding,
)
from tests.support.clock import Clock
from tests.support.half_audit import complaints_of
from tests.support.waiting import DEADLINE_S
from tests.unit.tier.cases import key_of

NAMESPACE = Namespace.from_descriptor({"model": "fuzz"})
# What a worker counts when a granted file was not there, or not what was granted.
_FAULTS = ("load.failed", "load.rescued", "load.hung", "internal_errors")
# Between two passes of an engine that runs.
_LONGEST_PAUSE_S = 0.1
# In this time a fetch ends for certain where nothing fails.
_AMPLE_S = 2.0
# The disk of a busy machine is not taken for one that hangs, which counts as a fault.
_NEVER_S = 3600.0


@dataclass(frozen=True)
class Bench:
    """What all runs of a process share: nodes for the workers, and entries on the disk.

    Attributes:
        node: The scheduler's, and that of the workers beside it.
        files: Entries that are open.
    """

    node: Node
    files: EntryFiles


@contextmanager
def bench() -> Iterator[Bench]:
    """Make it, and clear it away."""
    folder = Path(tempfile.mkdtemp(prefix="s3ec-fuzz-"))
    (folder / "entries").mkdir()
    live_weights.watch()
    node = _node(folder / "tier")
    try:
        with patch.object(loads, "PATIENCE_S", _NEVER_S):
            yield Bench(node, EntryFiles(folder / "entries", NAMESPACE.name))
    finally:
        node.close(DEADLINE_S)
        shutil.rmtree(folder, ignore_errors=True)


def _node(cache_dir: Path) -> Node:
    settings = {"bucket": "corpus", "cache_dir": cache_dir, "min_free_bytes": 0, "verify": "always"}
    node = Node(Settings.model_validate(settings), NAMESPACE, store=MemoryStore())
    node.loop.watch = DiskWatch(node.counters, patience_s=_NEVER_S)
    node.users = 2  # the scheduler half reads the same counters
    return node


def _is_adapted(identifier: str) -> bool:
    """Whether a LoRA adapter has its part in it: vLLM puts the adapter's name first."""
    return ":" in identifier


def _kind_of(feature: Any) -> tuple[int, str]:
    """Rows and modality, which an entry must share with who is granted it."""
    return feature.mm_position.get_num_embeds(), feature.modality


class Rank:
    """s3ec's real worker half, and what it promises."""

    def __init__(self, half: WorkerHalf, node: Node, outside: Outside) -> None:
        self.half = half
        self._node = node
        self._outside = outside
        self._faults = self._count_faults()

    def _count_faults(self) -> float:
        return sum(self._node.counters.get(name) for name in _FAULTS)

    def begin(self, cache: dict[str, torch.Tensor], plan: StepPlan) -> None:
        self.half.start_save_caches(cache, plan)

    def load(self, cache: dict[str, torch.Tensor], plan: StepPlan) -> None:
        try:
            self.half.start_load_caches(cache, plan)
        except RuntimeError as exc:
            raise BrokenPromiseError(
                "a granted embedding cannot be loaded", str(exc)[:300]
            ) from exc
        if self._count_faults() != self._faults:
            raise BrokenPromiseError("a granted file cannot be loaded")
        for load in plan.loads:
            wanted = embedding(load.identifier, load.shape.rows, self._outside.weights)
            found = cache.get(load.identifier)
            if found is None or not torch.equal(found, wanted):
                raise BrokenPromiseError(
                    "a load leaves another embedding",
                    f"{load.identifier[:12]}, granted {load.shape.rows} rows, "
                    f"there are {None if found is None else len(found)}",
                )

    def save(self, cache: dict[str, torch.Tensor], identifier: str, plan: StepPlan) -> None:
        self.half.save_caches(cache, identifier, plan)

    def report(self) -> WorkerReport | None:
        self.half.encoder_ended()
        return self.half.report()

    def close(self) -> None:
        """End its threads."""
        self.half.finish()


@dataclass
class _Deferral:
    """How long one request was deferred.

    Attributes:
        spent_s: While the engine ran.
        counted_s: Of that, from one pass to the next that asked as well.
        clock_s: By the clock, which jumps.
        asked_s: When it was deferred last; None while it is not deferred.
        asked_in: The pass of that.
        overdue: How often it was deferred although its time was over.
    """

    spent_s: float = 0.0
    counted_s: float = 0.0
    clock_s: float = 0.0
    asked_s: float | None = None
    asked_in: int = 0
    overdue: int = 0


class HeldInputs:
    """What the counts of lookups must be, by what vLLM's encoder-cache manager says.

    An input that a request holds and that nobody was asked for in this life of it (it has a new one
    after a preemption) was found on the device, once a step needs a row of it.
    """

    def __init__(self) -> None:
        self.hits = self.misses = 0
        self._allocated: dict[str, set[int]] = {}  # in this pass
        self._lives: dict[str, tuple[set[int], set[int]]] = {}  # allocated, and found

    def allocated(self, name: str, index: int) -> None:
        self._allocated.setdefault(name, set()).add(index)

    def device_was_reset(self) -> None:
        """Whatever is needed from here on is looked for anew."""
        self._lives.clear()

    def end_pass(
        self,
        output: SchedulerOutput,
        held: Mapping[str, Any],
        features: Mapping[str, Sequence[Any]],
    ) -> None:
        """A pass has ended, and these hold what the device holds."""
        cached = output.scheduled_cached_reqs
        begins = {one.req_id: one.num_computed_tokens for one in output.scheduled_new_reqs}
        for name in [*begins, *cached.resumed_req_ids]:
            self._lives.pop(name, None)
        begins |= zip(cached.req_ids, cached.num_computed_tokens, strict=True)
        for name, indices in self._allocated.items():
            if name in features:
                own = [i for i in indices if features[name][i].modality != PASSED_THROUGH]
                self.misses += len(own)
                self._lives.setdefault(name, (set(), set()))[0].update(own)
        for name, tokens in output.num_scheduled_tokens.items():
            allocated, found = self._lives.setdefault(name, (set(), set()))
            for index in set(held.get(name, ())) - allocated - found:
                feature = features[name][index]
                place = feature.mm_position
                low = max(begins[name] - place.offset, 0)
                high = min(begins[name] + tokens - place.offset, place.length)
                if feature.modality == PASSED_THROUGH or low >= high:
                    continue
                first, last = place.get_embeds_indices_in_range(low, high)
                if first < last:
                    found.add(index)
                    self.hits += 1
        self._allocated.clear()

    def complaint(self, counters: Counters) -> str | None:
        """What is counted and not so, or does not add up."""
        get = counters.get
        tiers = {
            tier: (get(f"lookups.{tier}.hit"), get(f"lookups.{tier}.miss"))
            for tier in ("device", "node", "bucket")
        }
        if tiers["device"] != (self.hits, self.misses):
            return f"{tiers['device']} of the device, and were {self.hits, self.misses}"
        adds_up = (
            tiers["device"][1] == sum(tiers["node"]) == get("hits") + get("misses")
            and tiers["node"][1] == sum(tiers["bucket"])
            and tiers["bucket"][1] == get("misses")
        )
        return None if adds_up else f"{tiers} for {get('hits')} hits and {get('misses')} misses"


class S3EC(NoConnector):
    """s3ec's scheduler half with everything around it played, and every answer noted.

    Attributes:
        is_calm: Nothing fails and no clock jumps, so that everything comes in time.
        device: What vLLM's encoder-cache manager holds.
        held: Likewise, the numbers of the inputs for which a request holds it.
        half: The real one.
        ranks: The workers' side.
        answers: What vLLM was answered, for ``Repeat``.
    """

    def __init__(
        self, options: Options, needs_embedding: Callable[[Any], bool], bench: Bench
    ) -> None:
        """Wire it up.

        Args:
            options: What the engine is.
            needs_embedding: s3ec's own answer whether a feature came without pixels.
            bench: What all runs share.
        """
        self.options = options
        self.clock = Clock()
        self.outside = Outside(self.clock)
        self.prefetcher = PlayedPrefetcher(self.outside, bench.files, self._is_read)
        self.saves = PlayedSaves(self.outside) if options.role != "consumer" else None
        self.counters = Counters()
        role = Role(
            producer=options.role != "consumer",
            consumer=options.loads,
            window_tokens=options.batched_tokens + 16,
            ranks=options.ranks,
            steps_in_flight=options.depth,
            defer_timeout_s=options.defer_timeout_s,
            tower_adapters=True,
        )
        self.half = SchedulerHalf(
            role,
            index=self.outside.index,
            local=self.outside.local,
            prefetcher=self.prefetcher,
            residents=self.prefetcher,
            store=self.outside.store,
            disk=self.outside.disk,
            needs_embedding=needs_embedding,
            placeholder_of=lambda _: {},
            counters=self.counters,
            policy=self._make_policy(),
            clock=self.clock,
        )
        self.ranks = [self._make_rank(bench.node, rank) for rank in range(options.ranks)]
        self.steps: Sequence[Step] = ()  # shared with the engine, which fills it
        self.device: Collection[str] = ()
        self.held: Mapping[str, Collection[int]] = {}
        self.inputs = HeldInputs()
        self.is_calm = False
        self.answers: list[tuple[str, Any]] = []
        self.requests: Mapping[str, Request] = {}  # vLLM's
        self._deferrals: dict[str, _Deferral] = {}
        self._lie_here: set[str] = set()  # of what the request being scheduled needs
        # On the device as this pass began. Of what the pass evicts no hook tells before its end.
        self._held: set[str] = set()
        self._is_stopped = False
        self._passes = 0
        self._granted = ""  # what was granted last, and is not allocated yet
        self._no_cost = ""  # what the manager was told of none

    def follow(self, engine: Engine) -> None:
        """Look at what vLLM has there, to compare with it."""
        self.steps = engine.steps
        self.requests = engine.scheduler.requests
        manager = engine.scheduler.encoder_cache_manager
        self.device, self.held = manager.cached, manager.request_cached_ids

    @property
    def restore_costs(self) -> S3EC:
        return self

    def follow_device(self, held: Container[str]) -> None:
        self.half.device = held

    def restore_s(self, identifier: str, modality: str, rows: int) -> float:
        # The manager contains what is raised here, so the audit tells of it.
        seconds = math.nan
        try:
            seconds = self.half.restore_s(identifier, modality, rows)
        finally:
            if not 0.0 <= seconds < math.inf:
                self._no_cost = f"{identifier[:12]}: {seconds} s"
        self.answers.append(("restore", seconds))
        return seconds

    def _make_policy(self) -> WaitPolicy | None:
        if self.options.encode_row_s is None:
            return None
        return WaitPolicy(EncodeCosts(), EngineLoad(self.options.depth))

    def _make_rank(self, node: Node, rank: int) -> Rank:
        half = WorkerHalf(
            node,
            saves=self.saves,
            device=lambda: torch.device("cpu"),
            rank=lambda: rank,
            drain_timeout_s=1,
        )
        return Rank(half, node, self.outside)

    def _is_read(self, path: str) -> bool:
        return any(
            str(path) == load.path
            for step in self.steps
            if step.result is None
            for load in step.plan.loads
        )

    # -- hooks -------------------------------------------------------------------------------

    def ensure_cache_available(self, request: Request, num_computed_tokens: int) -> bool:
        # As the connector's shell, which repeats an answer without asking the half.
        repeats = self.half.waits.repeats(request.request_id, num_computed_tokens)
        answer = not repeats and self.half.ensure_cache_available(request, num_computed_tokens)
        if repeats and len(self.answers) % 3 == 0:
            self._compare(request, num_computed_tokens)
        self.answers.append(("ensure", answer))
        self._note_deferral(request, answer)
        # One that has waited its time for other things waits no more.
        waited_s = self._deferrals[request.request_id].clock_s
        may_wait = waited_s < self.options.defer_timeout_s - _LONGEST_PAUSE_S
        self._lie_here = {
            feature.identifier
            for feature in request.mm_features
            if may_wait and feature.identifier not in self._held and self._lies_here(feature)
        }
        return answer

    def has_cache_item(self, identifier: str) -> bool:
        answer = self.half.has_cache_item(identifier)
        self.answers.append(("has", answer))
        if answer and self.options.loads:
            self.check_grant(identifier)
        self._granted = identifier if answer else ""
        if not answer and identifier in self._lie_here and self._is_sure_to_wait:
            raise BrokenPromiseError("what lies on this node is encoded", identifier[:12])
        return answer

    def update_state_after_alloc(self, request: Request, index: int) -> None:
        feature = request.mm_features[index]
        if self.options.loads and self._granted == feature.identifier:
            kinds = {one.header.modality for one in self._open_of(feature.identifier)}
            if feature.modality not in kinds:
                detail = f"{feature.identifier[:12]}, {feature.modality}: {kinds}"
                raise BrokenPromiseError("granted what is of another modality", detail)
        self._granted = ""
        self.inputs.allocated(request.request_id, index)
        self.half.update_state_after_alloc(request, index)

    def build_connector_meta(self, output: SchedulerOutput) -> StepPlan:
        plan = self.half.build_connector_meta(
            output.free_encoder_mm_hashes,
            scheduled_tokens=output.total_num_scheduled_tokens,
            decode_tokens=len(output.num_scheduled_tokens),
            requests=len(output.num_scheduled_tokens),
        )
        if any(map(_is_adapted, plan.saves)):
            raise BrokenPromiseError("what an adapter has its part in is saved")
        self._check_lookups(output)
        self._passes += 1
        self._held = set(self.device)
        for load in plan.loads:
            if load.path not in self.prefetcher.live:
                raise BrokenPromiseError("a load of what is not open", load.identifier[:12])
        return plan

    def _check_lookups(self, output: SchedulerOutput) -> None:
        self.half.lookups.end_pass(output)
        features = {name: request.mm_features for name, request in self.requests.items()}
        self.inputs.end_pass(output, self.held, features)
        complaint = self.inputs.complaint(self.counters)
        if complaint is not None:
            raise BrokenPromiseError("lookups are counted wrong", complaint)

    def update_connector_output(self, output: ECConnectorOutput) -> None:
        report = output.ec_connector_worker_meta
        # Engines here take no time, so what encoding costs is part of the seed.
        report.encoded = [
            dataclasses.replace(one, seconds=one.rows * (self.options.encode_row_s or 0.0))
            for one in report.encoded
        ]
        self.half.update_connector_output(report)

    def take_unavailable_requests(self) -> set[str]:
        taken = self.half.take_unavailable_requests()
        self.answers.append(("unavailable", set(taken)))
        for name in taken:
            self.check_failure(name)
        return taken

    def request_finished(self, request: Request) -> tuple[bool, None]:
        self.half.request_finished(request)
        self._deferrals.pop(request.request_id, None)
        return False, None

    def weights_may_have_changed(self, what: str, *, was_reset: bool) -> None:
        """As S3ECConnector with a fingerprint of the weights, which live_weights tells."""
        if was_reset:
            self.inputs.device_was_reset()
            self.half.device_was_reset()
            return
        self._is_stopped = True
        self.half.stop()

    def prefix_is_replayed(self, tokens: int) -> None:
        """Likewise."""
        self.half.replay_tokens = tokens

    # -- promises ----------------------------------------------------------------------------

    def _compare(self, request: Request, num_computed_tokens: int) -> None:
        """Compare a repeated answer with a look at every item; it is repeated once in a pass.

        Only some: a look in each pass would hide what changes between two looks.
        """
        if self.half.ensure_cache_available(request, num_computed_tokens):
            raise BrokenPromiseError("a kept answer is not what a look gives", request.request_id)

    def audit(self) -> None:
        """What the half remembers belongs to something that is there."""
        fetching = {
            *self.prefetcher.open,
            *(one.want.key.identifier for one in self.prefetcher.news),
        }
        complaints = complaints_of(
            self.half, self.clock(), requests=self.requests, device=self.device, fetching=fetching
        )
        if self._no_cost:
            raise BrokenPromiseError("no cost", self._no_cost)
        if complaints:
            raise BrokenPromiseError("the half's audit complains", "; ".join(complaints[:5]))

    def check_rest(self) -> None:
        """After every lease nothing is held open."""
        if self.prefetcher.live:
            raise BrokenPromiseError("entries are left open", str(len(self.prefetcher.live)))

    def close(self) -> None:
        """End threads and remove files."""
        for rank in self.ranks:
            rank.close()
        self.prefetcher.close()

    def check_grant(self, identifier: str) -> None:
        if _is_adapted(identifier):
            raise BrokenPromiseError("what an adapter has its part in is granted", identifier[:12])
        if not self._open_of(identifier):
            raise BrokenPromiseError("granted without an entry", identifier[:12])

    def _open_of(self, identifier: str) -> list[OpenEntry]:
        live = self.prefetcher.live.values()
        return [one for one in live if one.header.identifier == identifier]

    def _lies_here(self, feature: Any) -> bool:
        """Whether this node's disk holds it, and the half can know."""
        identifier = feature.identifier
        if _is_adapted(identifier):
            return False
        held = self.outside.tier.get(identifier)
        fits = held is not None and (held.rows, held.modality) == _kind_of(feature)
        return fits and self.outside.local(key_of(identifier))

    def _misfits(self, feature: Any) -> bool:
        """Whether what is stored or open under this name is, or was here, of another kind."""
        identifier, kind = feature.identifier, _kind_of(feature)
        if _is_adapted(identifier):
            return True
        found = (self.outside.tier.get(identifier), self.outside.bucket.get(identifier))
        kinds = {(one.rows, one.modality) for one in found if one is not None}
        held = {(one.header.shape.rows, one.header.modality) for one in self._open_of(identifier)}
        return identifier in self.prefetcher.misfits or not kinds | held <= {kind}

    @property
    def _is_sure_to_wait(self) -> bool:
        """Whether a request certainly waits for what lies on this node."""
        return (
            self.is_calm
            and self.options.loads
            and self.options.encode_row_s is None
            and self.options.defer_timeout_s >= _AMPLE_S
            and not self._is_stopped
        )

    def check_failure(self, name: str) -> None:
        """A request is failed only where it came without pixels, and not before its time."""
        request = self.requests.get(name)
        if request is None:
            return
        bare = [feature for feature in request.mm_features if not has_pixels(feature)]
        if not bare:
            raise BrokenPromiseError("a request with all its pixels is failed", name)
        fits = not any(map(self._misfits, bare))
        is_asked = self.options.loads and not self._is_stopped
        waited_s = self._deferrals.get(name, _Deferral()).clock_s
        if is_asked and fits and waited_s < NO_PIXELS_WAIT_S - _LONGEST_PAUSE_S:
            raise BrokenPromiseError("a request is failed before its time", f"{name}: {waited_s}")

    def _note_deferral(self, request: Request, answer: bool) -> None:
        """Nobody waits longer than allowed: a request is let go, or named as one that cannot be.

        A turn of a session has a deadline of its own, and a request without pixels its patience.
        An engine that stood still has not deferred anybody, nor has a pass that did not ask.
        """
        now = self.clock()
        wait = self._deferrals.setdefault(request.request_id, _Deferral())
        asked_s, wait.asked_s = wait.asked_s, None if answer else now
        was_asked, wait.asked_in = self._passes <= wait.asked_in + 1, self._passes
        if asked_s is not None:
            wait.clock_s += now - asked_s
        if answer or asked_s is None:
            return
        paused_s = min(now - asked_s, _LONGEST_PAUSE_S)
        wait.spent_s += paused_s
        wait.counted_s += paused_s if was_asked else 0.0
        limit_s = 3 * self.options.defer_timeout_s
        if not all(map(has_pixels, request.mm_features)):
            limit_s += NO_PIXELS_WAIT_S
        if wait.counted_s > limit_s:
            # One that cannot be had is failed by vLLM with the next results.
            wait.overdue += 1
            if wait.overdue > self.options.depth + 2:
                raise BrokenPromiseError("a request waits for ever", request.request_id)


class Repeat(NoConnector):
    """Answers as another connector did, and delivers every grant itself."""

    def __init__(self, answers: list[tuple[str, Any]]) -> None:
        self._answers: Iterator[tuple[str, Any]] = iter(answers)
        self._granted: dict[str, bool] = {}
        self._orders: dict[str, int] = {}

    def _next(self, kind: str) -> Any:
        asked, answer = next(self._answers, ("nothing", None))
        if asked != kind:
            raise BrokenPromiseError("the runs differ", f"{kind} instead of {asked}")
        return answer

    def ensure_cache_available(self, request: Request, num_computed_tokens: int) -> bool:
        return bool(self._next("ensure"))

    @property
    def restore_costs(self) -> Repeat:
        return self

    def restore_s(self, identifier: str, modality: str, rows: int) -> float:
        return float(self._next("restore"))

    def has_cache_item(self, identifier: str) -> bool:
        granted = self._granted[identifier] = bool(self._next("has"))
        return granted

    def update_state_after_alloc(self, request: Request, index: int) -> None:
        feature = request.mm_features[index]
        if self._granted.pop(feature.identifier, False):
            self._orders[feature.identifier] = feature.mm_position.get_num_embeds()

    def build_connector_meta(self, output: SchedulerOutput) -> dict[str, int]:
        for identifier in output.free_encoder_mm_hashes:
            self._orders.pop(identifier, None)
        self._granted.clear()
        if not output.total_num_scheduled_tokens:
            return {}
        orders, self._orders = self._orders, {}
        return orders

    def take_unavailable_requests(self) -> set[str]:
        return set(self._next("unavailable"))


class RepeatRank:
    """The workers' side of ``Repeat``: a perfect load."""

    def __init__(self, weights: Callable[[], int]) -> None:
        self._weights = weights

    def begin(self, cache: dict[str, torch.Tensor], plan: Any) -> None:
        pass

    def load(self, cache: dict[str, torch.Tensor], plan: dict[str, int]) -> None:
        for identifier, rows in plan.items():
            cache[identifier] = embedding(identifier, rows, self._weights())

    def save(self, cache: dict[str, torch.Tensor], identifier: str, plan: Any) -> None:
        pass

    def report(self) -> None:
        return None
