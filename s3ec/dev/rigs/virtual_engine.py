# SPDX-License-Identifier: Apache-2.0
"""vLLM's own scheduler and s3ec's scheduler half, with a clock that only they move.

The model, its encoder and the fetches are played: each takes a stated time and none of it passes.
So a minute of a busy engine takes a second, and the same seed gives the same figures on every
machine. The engine's loop is vLLM 0.32's (``v1/engine/core.py``): asynchronous scheduling with two
steps in flight, and a millisecond of sleep where nothing could be scheduled.

What a step takes: 8 ms, 0.05 ms a token of a prompt, 0.1 ms a request that decodes, the encoding
cost of each picture that is encoded, and 0.5 ms for one that is loaded. A picture has 256 rows.
Durations of fetches are lognormal; sixteen run at a time.
"""

from __future__ import annotations

import functools
import hashlib
import heapq
import math
import random
import time
from collections import deque
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    PlaceholderRange,
)
from vllm.sampling_params import SamplingParams
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ECConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from s3ec.codec import Header, Shape
from s3ec.connector.messages import EncodeTime, StepPlan, WorkerReport
from s3ec.connector.scheduler import SchedulerHalf
from s3ec.connector.vllm_config import Role
from s3ec.connector.waiting import EngineLoad, WaitPolicy
from s3ec.counters import Counters
from s3ec.dev.rigs.virtual_tier import NoResidents, VirtualEntry
from s3ec.encode_costs import EncodeCosts
from s3ec.identity import Key, make_key
from s3ec.managers import restore
from s3ec.managers.restore import RestoreCosts
from s3ec.prefetch import FetchOutcome, FetchRequest, FetchResult, Priority
from s3ec.tier.entries import LocalKeys

ROWS = 256
_PLACEHOLDERS = ROWS + 2
_TEXT = 100
_OUTPUT = 16
_BATCHED_TOKENS = 8192
_MAX_SEQS = 128
_BLOCK = 16
_IN_FLIGHT = 2
_PLACES = 16
_POLL_S = 0.0012
_STEP_S, _PREFILL_S, _DECODE_S, _LOAD_S = 0.008, 5e-5, 1e-4, 5e-4
_SIGMA = 0.7


@dataclass(frozen=True)
class Point:
    """One case of the grid.

    Attributes:
        encode_s: What encoding a picture takes.
        fetch_s: Median of what fetching one takes.
        load: Requests a second, as a share of what the engine can do without a connector; 0 for
            one request at a time.
        pictures: Of a request; all differ.
        hits: Share of the pictures that the bucket holds.
        near_s: Median of what a replica takes that is asked before the bucket; None without one.
        lag: Share of what the bucket holds that this replica lacks.
    """

    encode_s: float
    fetch_s: float
    load: float
    pictures: int = 1
    hits: float = 1.0
    near_s: float | None = None
    lag: float = 0.0


@dataclass(frozen=True)
class Outcome:
    """What one run came to: seconds to the first token, and requests a second."""

    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    requests_per_s: float
    encoded: int
    loaded: int
    learned_encode_s: float


class PlayedFetches:
    """The prefetcher as the scheduler half sees it; ``advance`` lets time pass."""

    def __init__(
        self, seed: int, median_s: float, near_s: float | None = None, lag: float = 0.0
    ) -> None:
        """As a point says."""
        self._seed = seed
        self._median_s = median_s
        self._near_s = near_s
        self._lag = lag
        self._queue: list[tuple[Priority, int, str]] = []
        self._known: dict[str, tuple[FetchRequest, Priority, list[float]]] = {}
        self._under_way: set[str] = set()
        self._answers: list[tuple[float, int, str]] = []  # of which place; the next one of each
        self._done: list[FetchResult] = []
        self._far: list[FetchRequest] = []
        self._turn = 0
        self._now_s = 0.0

    def submit(self, wants: list[FetchRequest]) -> None:
        """Queue some, or move them forward."""
        for want in wants:
            name = want.key.identifier
            seconds = self._known[name][2] if name in self._known else self._draw(name)
            self._push(want, want.priority, seconds)
        self._start()

    def _draw(self, name: str) -> list[float]:
        """How long each place takes that is asked for it, one after the other.

        The same in every run of a seed, whatever else is fetched and when.
        """
        source = random.Random(f"{self._seed} {name}")
        home_s = self._median_s * math.exp(_SIGMA * source.gauss(0.0, 1.0))
        if self._near_s is None:
            return [home_s]
        near_s = self._near_s * math.exp(_SIGMA * source.gauss(0.0, 1.0))
        return [near_s, home_s] if source.random() < self._lag else [near_s]

    def _push(self, want: FetchRequest, priority: Priority, seconds: list[float]) -> None:
        self._turn += 1
        self._known[want.key.identifier] = (want, priority, seconds)
        heapq.heappush(self._queue, (priority, self._turn, want.key.identifier))

    def _start(self) -> None:
        while self._queue and len(self._under_way) < _PLACES:
            priority, _, name = heapq.heappop(self._queue)
            known = self._known.get(name)
            if known is None or known[1] is not priority or name in self._under_way:
                continue
            self._under_way.add(name)
            heapq.heappush(self._answers, (self._now_s + known[2][0], 0, name))

    def advance(self, now_s: float) -> None:
        """End what has ended by now."""
        while self._answers and self._answers[0][0] <= now_s:
            self._now_s, place, name = heapq.heappop(self._answers)
            want, _, times = self._known[name]
            if place + 1 < len(times):
                self._far.append(want)
                heapq.heappush(self._answers, (self._now_s + times[place + 1], place + 1, name))
                continue
            del self._known[name]
            self._under_way.remove(name)
            shape = Shape(want.rows, 64, "bfloat16")
            header = Header(name, "virtual", want.modality, shape, "0" * 32)
            entry = VirtualEntry(f"/virtual/{name}", header)
            self._done.append(FetchResult(want, FetchOutcome.READY, entry, "bucket", sum(times)))
            self._start()
        self._now_s = now_s
        self._start()

    @property
    def has_news(self) -> bool:
        """Whether anything has ended, or gone on from the replica to the bucket."""
        return bool(self._done or self._far)

    def drain(self) -> list[FetchResult]:
        """What has ended since the last call."""
        done, self._done = self._done, []
        return done

    def drain_far(self) -> list[FetchRequest]:
        """What has gone on since the last call."""
        far, self._far = self._far, []
        return far


class PlayedIndex:
    """Knows which pictures the bucket holds."""

    def __init__(self) -> None:
        self.stored: set[bytes] = set()

    def maybe_contains(self, key: Key) -> bool:
        """Whether the bucket holds it."""
        return key.digest in self.stored

    def is_bad(self, key: Key) -> bool:
        """Nothing is."""
        return False

    def add(self, key: Key) -> None:
        """Now it does."""
        self.stored.add(key.digest)

    def mark_missing(self, key: Key) -> None:
        """Now it does not."""
        self.stored.discard(key.digest)


def played_half(
    index: PlayedIndex,
    fetches: PlayedFetches,
    *,
    policy: WaitPolicy | None,
    steps_in_flight: int,
    defer_timeout_s: float,
    clock: Callable[[], float] = time.monotonic,
) -> SchedulerHalf:
    """A consumer's scheduler half whose index and fetches are played."""
    role = Role(
        producer=False,
        consumer=True,
        window_tokens=_BATCHED_TOKENS + 16,
        ranks=1,
        steps_in_flight=steps_in_flight,
        defer_timeout_s=defer_timeout_s,
    )
    played: dict[str, Any] = {
        "index": index,
        "local": LocalKeys(),
        "prefetcher": fetches,
        "residents": NoResidents(),
        "store": SimpleNamespace(is_open=False),
        "disk": SimpleNamespace(hangs=False),
    }
    return SchedulerHalf(
        role,
        **played,
        needs_embedding=lambda _: False,
        placeholder_of=lambda _: None,
        counters=Counters(),
        policy=policy,
        clock=clock,
    )


class NoConnector:
    """What vLLM's scheduler calls on its connector; this one does nothing at all.

    Attributes:
        restore_costs: For a manager of the encoder cache.
    """

    restore_costs: RestoreCosts | None = None

    def follow_device(self, held: Container[str]) -> None:
        """What the device holds at each moment."""

    def ensure_cache_available(self, request: Request, num_computed_tokens: int) -> bool:
        return True

    def has_cache_item(self, identifier: str) -> bool:
        return False

    def update_state_after_alloc(self, request: Request, index: int) -> None:
        pass

    def update_state_after_free(self, request: Request, index: int) -> None:
        pass

    def build_connector_meta(self, output: SchedulerOutput) -> Any:
        return None

    def update_connector_output(self, output: ECConnectorOutput) -> None:
        pass

    def take_unavailable_requests(self) -> set[str]:
        return set()

    def request_finished(self, request: Request) -> tuple[bool, None]:
        return False, None

    def get_ec_connector_stats(self) -> None:
        return None

    def has_pending_push_work(self) -> bool:
        return False


class _Hooks(NoConnector):
    """Hands the hooks to a scheduler half."""

    def __init__(self, half: SchedulerHalf) -> None:
        self._half = half

    def ensure_cache_available(self, request: Request, num_computed_tokens: int) -> bool:
        return self._half.ensure_cache_available(request, num_computed_tokens)

    def has_cache_item(self, identifier: str) -> bool:
        return self._half.has_cache_item(identifier)

    def update_state_after_alloc(self, request: Request, index: int) -> None:
        self._half.update_state_after_alloc(request, index)

    def take_unavailable_requests(self) -> set[str]:
        return self._half.take_unavailable_requests()

    def build_connector_meta(self, output: SchedulerOutput) -> StepPlan:
        return self._half.build_connector_meta(
            output.free_encoder_mm_hashes,
            scheduled_tokens=output.total_num_scheduled_tokens,
            decode_tokens=len(output.num_scheduled_tokens),
            requests=len(output.num_scheduled_tokens),
        )

    def update_connector_output(self, output: ECConnectorOutput) -> None:
        report = output.ec_connector_worker_meta
        if isinstance(report, WorkerReport):
            self._half.update_connector_output(report)

    def request_finished(self, request: Request) -> tuple[bool, None]:
        self._half.request_finished(request)
        return False, None


@functools.cache
def _configuration(model: Path) -> Any:
    return EngineArgs(
        model=str(model),
        max_model_len=_BATCHED_TOKENS,
        max_num_batched_tokens=_BATCHED_TOKENS,
        max_num_seqs=_MAX_SEQS,
        block_size=_BLOCK,
        async_scheduling=True,
        enable_prefix_caching=False,
        enforce_eager=True,
    ).create_engine_config()


def make_scheduler(
    config: Any,
    connector: NoConnector | None,
    *,
    is_async: bool,
    blocks: int,
    block_size: int,
    cache_rows: int,
    manager: type[Any] = EncoderCacheManager,
) -> Scheduler:
    """vLLM's scheduler of an engine without a model.

    Args:
        config: vLLM's configuration.
        connector: What it asks; None for nothing.
        is_async: Whether steps overlap. vLLM's configuration says no on a CPU, whatever is asked.
        blocks: Of the KV cache.
        block_size: Tokens of a block.
        cache_rows: Of the encoder cache, and of what a step may encode.
        manager: Of the encoder cache.
    """
    config.cache_config.num_gpu_blocks = blocks
    spec = FullAttentionSpec(
        block_size=block_size, num_kv_heads=1, head_size=1, dtype=torch.float32
    )
    scheduler = (AsyncScheduler if is_async else Scheduler)(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
        ),
        structured_output_manager=StructuredOutputManager(config),
        block_size=block_size,
    )
    # What vLLM sizes by the model.
    if connector is not None:
        restore.register(config, connector)
    scheduler.encoder_cache_manager = manager.create_manager(
        cache_size=cache_rows, vllm_config=config
    )
    scheduler.max_num_encoder_input_tokens = cache_rows
    scheduler.ec_connector = connector
    return scheduler


@dataclass
class _Step:
    output: Any
    ends_s: float
    samples: list[bool]
    report: WorkerReport


@dataclass
class VirtualEngine:
    """One engine, from its first request to its last.

    Attributes:
        model: Folder of a multimodal model's configuration.
        point: What is simulated.
        wait: ``none`` without a connector, else as the setting.
        seed: Of arrivals, hits and durations; the same for all ``wait``.
    """

    model: Path
    point: Point
    wait: str
    seed: int = 1
    now_s: float = 0.0
    policy: WaitPolicy | None = None
    _first_s: dict[str, float] = field(default_factory=dict)
    _arrived_s: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._fetches = PlayedFetches(
            self.seed, self.point.fetch_s, self.point.near_s, self.point.lag
        )
        self._index = PlayedIndex()
        if self.wait == "auto":
            self.policy = WaitPolicy(EncodeCosts(), EngineLoad(_IN_FLIGHT))
        half = played_half(
            self._index,
            self._fetches,
            policy=self.policy,
            steps_in_flight=_IN_FLIGHT,
            defer_timeout_s=2.0,
            clock=lambda: self.now_s,
        )
        hooks = NoConnector() if self.wait == "none" else _Hooks(half)
        self._scheduler = make_scheduler(
            _configuration(self.model),
            hooks,
            is_async=True,
            blocks=_MAX_SEQS * _BATCHED_TOKENS // _BLOCK,
            block_size=_BLOCK,
            cache_rows=_BATCHED_TOKENS,
        )
        self._encoded = self._loaded = 0
        self._gpu_free_s = 0.0

    def run(self, count: int, *, rate: float, warm_up: int = 0) -> Outcome:
        """Send requests, and let the last one end.

        Args:
            count: How many.
            rate: Requests a second, at random times; 0 for one after the other, and infinity for
                all at once.
            warm_up: So many of them, the first ones, are not measured.
        """
        source = random.Random(f"requests {self.seed}")
        requests = [self._request(number, source) for number in range(count)]
        arrivals = []
        at = 0.0
        for _ in requests:
            at += source.expovariate(1.0) / rate if 0 < rate < math.inf else 0.0
            arrivals.append(at)
        waiting = deque(zip(arrivals, requests, strict=True))
        steps: deque[_Step] = deque()
        while waiting or steps or self._scheduler.has_requests():
            idle = not steps and not self._scheduler.has_requests()
            if idle and waiting:
                self.now_s = max(self.now_s, waiting[0][0])
            while waiting and waiting[0][0] <= self.now_s and (idle or rate):
                self._add(waiting.popleft()[1])
                idle = False
            self._turn(steps)
        # The first ones teach the policy what encoding costs.
        measured = [str(number) for number in range(warm_up, count)]
        times = sorted(self._first_s[name] - self._arrived_s[name] for name in measured)
        seconds = self.now_s - self._arrived_s[measured[0]]
        return Outcome(
            sum(times) / len(times),
            times[len(times) // 2],
            times[int(len(times) * 0.99)],
            len(measured) / seconds,
            self._encoded,
            self._loaded,
            0.0 if self.policy is None else self.policy.costs.cost_s("image", ROWS),
        )

    def _request(self, number: int, source: random.Random) -> Request:
        pictures = self.point.pictures
        features = []
        for index in range(pictures):
            name = hashlib.sha256(f"{self.seed} {number} {index}".encode()).hexdigest()
            key = make_key(name)
            if source.random() < self.point.hits and key is not None:
                self._index.add(key)
            place = PlaceholderRange(offset=_TEXT // 2 + index * _PLACEHOLDERS, length=ROWS)
            features.append(
                MultiModalFeatureSpec(
                    data=_pixels(), modality="image", identifier=name, mm_position=place
                )
            )
        sampling = SamplingParams(max_tokens=_OUTPUT, ignore_eos=True)
        return Request(
            request_id=str(number),
            prompt_token_ids=[7] * (_TEXT + pictures * _PLACEHOLDERS),
            sampling_params=sampling,
            pooling_params=None,
            mm_features=features,
            arrival_time=0.0,
        )

    def _add(self, request: Request) -> None:
        request.arrival_time = self._arrived_s[request.request_id] = self.now_s
        self._scheduler.add_request(request)

    def _turn(self, steps: deque[_Step]) -> None:
        """One turn of the engine's loop."""
        ran = False
        has_requests = self._scheduler.has_requests()
        if has_requests:
            step = self._schedule()
            steps.append(step)
            ran = step.output.total_num_scheduled_tokens > 0
            if len(steps) < _IN_FLIGHT:
                if not ran:
                    self.now_s += _POLL_S
                return
        if steps:
            self._deliver(steps.popleft())
        if not ran and has_requests:
            self.now_s += _POLL_S

    def _schedule(self) -> _Step:
        self._fetches.advance(self.now_s)
        output = self._scheduler.schedule()
        names = output.num_scheduled_tokens
        samples = [not self._scheduler.requests[name].is_prefill_chunk for name in names]
        plan: StepPlan = output.ec_connector_metadata or StepPlan()
        encodes = sum(map(len, output.scheduled_encoder_inputs.values()))
        self._encoded += encodes
        self._loaded += len(plan.loads)
        report = WorkerReport(loaded={plan.step: {0}} if plan.loads else {})
        ends_s = max(self.now_s, self._gpu_free_s)
        if output.total_num_scheduled_tokens:
            decodes = sum(count == 1 for count in names.values())
            encode_s = encodes * self.point.encode_s
            ends_s += _STEP_S + encode_s + _LOAD_S * len(plan.loads) + _DECODE_S * decodes
            ends_s += _PREFILL_S * (output.total_num_scheduled_tokens - decodes)
            self._gpu_free_s = ends_s
            if encodes:
                report.encoded.append(EncodeTime("image", encodes, encodes * ROWS, encode_s))
        return _Step(output, ends_s, samples, report)

    def _deliver(self, step: _Step) -> None:
        self.now_s = max(self.now_s, step.ends_s)
        names = list(step.output.num_scheduled_tokens)
        if not names:
            result = EMPTY_MODEL_RUNNER_OUTPUT
        else:
            result = ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: index for index, name in enumerate(names)},
                sampled_token_ids=[[7] if one else [] for one in step.samples],
                logprobs=None,
                prompt_logprobs_dict={},
                pooler_output=[],
            )
            for name, samples in zip(names, step.samples, strict=True):
                if samples:
                    self._first_s.setdefault(name, self.now_s)
        result = ModelRunnerOutput.with_ec_conn_output(
            result, ECConnectorOutput(ec_connector_worker_meta=step.report)
        )
        self._scheduler.update_from_output(step.output, result)


@functools.cache
def _pixels() -> MultiModalKwargsItem:
    element = MultiModalFieldElem(data=torch.zeros(1), field=MultiModalBatchedField())
    return MultiModalKwargsItem({"pixel_values": element})


def capacity(model: Path, point: Point, count: int = 200) -> float:
    """Requests a second that the engine can do without a connector."""
    return VirtualEngine(model, point, "none").run(count, rate=math.inf).requests_per_s


def simulate(
    model: Path, point: Point, wait: str, *, count: int, rate: float, seed: int
) -> Outcome:
    """One run; ``rate`` of ``capacity`` times the point's load."""
    return VirtualEngine(model, point, wait, seed).run(count, rate=rate, warm_up=count // 10)
