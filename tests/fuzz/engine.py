# SPDX-License-Identifier: Apache-2.0
"""One engine core without a model: vLLM's scheduler, a connector behind it, and played runners.

Real are vLLM's ``Scheduler`` and ``AsyncScheduler`` with their encoder-cache and KV-cache managers,
s3ec's scheduler half, and its worker half with the files that it loads. Played is what runs the
model: a runner frees, loads, encodes and gathers in the order of vLLM's V1 or V2 model runner, with
tensors that say which picture they are of. Of the V2 runner those parts are real that need no GPU:
what calls the connector, the encoder cache, and what chooses what to encode and to gather.
"""

from __future__ import annotations

import functools
from collections import Counter, deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, Protocol
from unittest.mock import patch

import numpy as np
import torch
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.multimodal.utils import get_mm_features_in_window
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine.core import EngineCore
from vllm.v1.outputs import (
    EMPTY_MODEL_RUNNER_OUTPUT,
    ECConnectorOutput,
    ModelRunnerOutput,
    make_empty_encoder_model_runner_output,
)
from vllm.v1.request import Request, RequestStatus
from vllm.v1.worker.gpu import ec_connector as v2
from vllm.v1.worker.gpu.mm.encoder_cache import EncoderCache
from vllm.v1.worker.gpu.mm.encoder_runner import EncoderRunner

from s3ec.dev.rigs.virtual_engine import NoConnector, make_scheduler
from s3ec.managers.encoder_cache import LRUEncoderCacheManager, TieredEncoderCacheManager
from tests.fuzz.outside import BrokenPromiseError, embedding

BLOCK = 16  # tokens
MAX_LEN = 2048  # tokens
MAX_LORAS = 2
EOS = 1
# What holds pixels or samples in the items that the workload makes.
PIXELS = frozenset({"pixel_values", "pixel_values_videos", "input_audio_features"})

MANAGERS = {
    "fifo": EncoderCacheManager,
    "lru": LRUEncoderCacheManager,
    "tiered": TieredEncoderCacheManager,
}

init_none_hash(sha256)


@dataclass(frozen=True)
class Options:
    """What one engine is; drawn by the workload.

    Attributes:
        role: As in ``ec_role``; a pure producer runs the encoder only.
        policy: Of vLLM's scheduler.
        is_async: Whether it schedules ahead of the results.
        v2: Whether the runner is V2: it calls the connector in steps without tokens too, and does
            not encode what its cache holds.
        reports: Whether the workers' reports reach the scheduler.
        depth: Steps in flight.
        ranks: Of tensor parallel.
        batched_tokens: Of a step at most.
        blocks: Of the KV cache; few of them make requests preempt each other.
        cache_rows: Of the encoder cache, and of what a step may encode.
        lookahead: Tokens that a drafter looks ahead.
        defer_timeout_s: As the setting.
        encode_row_s: What the workers say a row costs the encoder; None where waits are not weighed
            against it.
        manager: Of the encoder cache; vLLM's own is the first.
        replay_tokens: Of a prefix hit that vLLM computes again, as for DeepSeek-V4.1; 0 for none.
    """

    role: Literal["consumer", "producer", "both"] = "consumer"
    policy: str = "fcfs"
    is_async: bool = False
    v2: bool = False
    reports: bool = True
    depth: int = 1
    ranks: int = 1
    batched_tokens: int = 128
    blocks: int = 80
    cache_rows: int = 256
    lookahead: int = 0
    defer_timeout_s: float = 2.0
    encode_row_s: float | None = None
    manager: Literal["fifo", "lru", "tiered"] = "fifo"
    replay_tokens: int = 0

    @property
    def loads(self) -> bool:
        """Whether embeddings are loaded and used."""
        return self.role != "producer"

    @property
    def saves(self) -> bool:
        """Whether embeddings are stored."""
        return self.role != "consumer"


@dataclass(frozen=True)
class Asked:
    """A request as a client sends it."""

    name: str
    tokens: Sequence[int]
    features: Sequence[MultiModalFeatureSpec]
    max_tokens: int = 3
    priority: int = 0
    lora: LoRARequest | None = None
    named: Sequence[str] = ()


@functools.cache
def vllm_config(model: Path, policy: str, is_async: bool, batched_tokens: int, caches: bool) -> Any:
    """vLLM's configuration of an engine; made once for each kind."""
    return EngineArgs(
        model=str(model),
        max_model_len=MAX_LEN,
        max_num_batched_tokens=batched_tokens,
        max_num_seqs=16,
        block_size=BLOCK,
        scheduling_policy=policy,
        async_scheduling=is_async,
        enable_prefix_caching=caches,
        enable_lora=True,
        enable_tower_connector_lora=True,
        max_loras=MAX_LORAS,
        enforce_eager=True,
    ).create_engine_config()


def has_pixels(feature: MultiModalFeatureSpec) -> bool:
    """Whether an encoder can make something of it."""
    return feature.data is not None and any(name in PIXELS for name in feature.data)


class RankSide(Protocol):
    """The connector as one runner sees it."""

    def begin(self, cache: dict[str, torch.Tensor], plan: Any) -> None:
        """A producer's step begins; it may save what the cache holds."""

    def load(self, cache: dict[str, torch.Tensor], plan: Any) -> None:
        """Bring what the plan grants into the encoder cache."""

    def save(self, cache: dict[str, torch.Tensor], identifier: str, plan: Any) -> None:
        """An embedding was encoded."""

    def report(self) -> Any:
        """What happened since the last report; None for nothing."""


@dataclass
class Step:
    """One scheduled step on its way through the runners and back."""

    output: SchedulerOutput
    features: dict[str, Sequence[MultiModalFeatureSpec]]
    computed: dict[str, int]
    samples: dict[str, bool]
    result: ModelRunnerOutput | None = None

    @property
    def plan(self) -> Any:
        """The connector's orders."""
        return self.output.ec_connector_metadata

    def to_encode(self) -> Iterator[tuple[str, MultiModalFeatureSpec]]:
        """What is scheduled for the encoder, and the names of the requests."""
        for name, indices in self.output.scheduled_encoder_inputs.items():
            for index in indices:
                yield name, self.features[name][index]


@dataclass
class Runner:
    """Plays one rank's V1 model runner.

    Attributes:
        cache: Its encoder cache.
    """

    options: Options
    side: RankSide
    cache: dict[str, torch.Tensor] = field(default_factory=dict)

    def run(self, step: Step, weights: int) -> Any:
        """Execute one step; the connector's report."""
        output = step.output
        for identifier in output.free_encoder_mm_hashes:
            self.cache.pop(identifier, None)
        # A pure producer calls the connector first, the others return early.
        if self.options.loads and not output.total_num_scheduled_tokens:
            return None
        if self.options.saves:
            self.side.begin(self.cache, step.plan)
        if self.options.loads:
            self.side.load(self.cache, step.plan)
        for name, feature in step.to_encode():
            if not has_pixels(feature):
                raise BrokenPromiseError("the encoder runs on nothing", name)
            identifier = feature.identifier
            self.cache[identifier] = _encoded(feature, weights)
            if self.options.saves:
                self.side.save(self.cache, identifier, step.plan)
        if self.options.loads:
            self._gather(step, weights)
        return self.side.report()

    def _gather(self, step: Step, weights: int) -> None:
        for ahead in sorted({0, self.options.lookahead}):
            for name, count in step.output.num_scheduled_tokens.items():
                begin = step.computed[name] + ahead
                for feature, rows in _window(step.features[name], begin, begin + count):
                    found = self.cache.get(feature.identifier)
                    if found is not None:
                        _compare(feature, found[rows], _encoded(feature, weights)[rows])
                    elif feature.mm_position.offset + ahead < begin + count:
                        raise BrokenPromiseError("encoder cache miss", feature.identifier[:12])
                    # Else a drafter goes on without.


class _Hooks(ECConnectorBase):
    """A rank's side of the connector as vLLM's V2 runner calls it."""

    has_cache_item = update_state_after_alloc = build_connector_meta = None  # the scheduler's

    def __init__(self, options: Options, side: RankSide) -> None:
        self._is_producer, self._is_consumer = options.saves, options.loads
        self._side = side

    def start_save_caches(self, encoder_cache: dict[str, torch.Tensor]) -> None:
        self._side.begin(encoder_cache, self._connector_metadata)

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor]) -> None:
        self._side.load(encoder_cache, self._connector_metadata)

    def save_caches(self, encoder_cache: dict[str, torch.Tensor], mm_hash: str) -> None:
        self._side.save(encoder_cache, mm_hash, self._connector_metadata)

    def build_connector_worker_meta(self) -> Any:
        return self._side.report()


class V2Runner:
    """One rank's V2 model runner: its real parts, called as ``GPUModelRunner.execute_model`` does.

    Attributes:
        cache: Its encoder cache.
    """

    def __init__(self, options: Options, side: RankSide) -> None:
        self._options = options
        self._held = EncoderCache()
        self._encoder = EncoderRunner(
            SimpleNamespace(), 1, 1, self._held, torch.float32, torch.device("cpu")
        )
        self._prefill_lens: dict[str, int] = {}
        with patch.object(v2, "get_ec_transfer", lambda: _Hooks(options, side)):
            self._connector = v2.ActiveECConnector(None, self._held.encoder_outputs)

    @property
    def cache(self) -> dict[str, torch.Tensor]:
        return self._held.encoder_outputs

    def run(self, step: Step, weights: int) -> Any:
        """Execute one step; the connector's report."""
        output = step.output
        for name in output.finished_req_ids | (output.preempted_req_ids or set()):
            self._held.remove_request(name)
        for identifier in output.free_encoder_mm_hashes:
            self._held.free_encoder_cache(identifier)
        for new in output.scheduled_new_reqs:
            self._held.add_request(new.req_id, new.mm_features)
            self._prefill_lens[new.req_id] = len(new.prefill_token_ids)
        if not output.total_num_scheduled_tokens:
            done = self._connector.no_forward(output).ec_connector_output
        else:
            with self._connector.maybe_get_output(output) as done:
                self._encode(step, weights)
                if self._options.loads:
                    for ahead in sorted({0, self._options.lookahead}):
                        self._gather(step, weights, ahead)
        return None if done is None else done.ec_connector_worker_meta

    def _encode(self, step: Step, weights: int) -> None:
        features = {feature.identifier: feature for _, feature in step.to_encode()}
        found = self._encoder.prepare_mm_inputs(step.output.scheduled_encoder_inputs)
        for identifier, (_, data) in zip(*found, strict=True):
            if not PIXELS.intersection(data):
                raise BrokenPromiseError("the encoder runs on nothing", identifier[:12])
            self.cache[identifier] = _encoded(features[identifier], weights)

    def _gather(self, step: Step, weights: int, ahead: int) -> None:
        counts = step.output.num_scheduled_tokens
        numbers = np.array(list(counts.values()))
        try:
            found, _ = self._encoder.gather_mm_embeddings(
                list(counts),
                int(numbers.sum()),
                numbers,
                np.concatenate([[0], np.cumsum(numbers)]),
                np.array([self._prefill_lens[name] for name in counts]),
                np.array([step.computed[name] for name in counts]),
                draft_lookahead=ahead,
            )
        except RuntimeError as exc:
            raise BrokenPromiseError("encoder cache miss", str(exc)) from exc
        wanted = [
            (feature, _encoded(feature, weights)[rows])
            for name, count in counts.items()
            for begin in (step.computed[name] + ahead,)
            for feature, rows in _window(step.features[name], begin, begin + count)
            if feature.identifier in self.cache  # else a drafter goes on without
        ]
        for rows, (feature, expected) in zip(found, wanted, strict=True):
            _compare(feature, rows, expected)


def _encoded(feature: MultiModalFeatureSpec, weights: int) -> torch.Tensor:
    return embedding(feature.identifier, feature.mm_position.get_num_embeds(), weights)


def _window(
    features: Sequence[MultiModalFeatureSpec], begin: int, end: int
) -> Iterator[tuple[MultiModalFeatureSpec, slice]]:
    """What some tokens need: the features, and which of their rows."""
    first, last = get_mm_features_in_window(features, start=begin, end=end)
    for feature in features[first:last]:
        place = feature.mm_position
        low = max(begin - place.offset, 0)
        high = min(end - place.offset, place.length)
        low, high = place.get_embeds_indices_in_range(low, high)
        if low < high:
            yield feature, slice(low, high)


def _compare(feature: MultiModalFeatureSpec, found: torch.Tensor, wanted: torch.Tensor) -> None:
    if not torch.equal(found, wanted):
        detail = f"{feature.identifier[:12]}, {feature.mm_position.get_num_embeds()} rows"
        raise BrokenPromiseError("rows of another picture", detail)


class Engine:
    """The scheduler and its runners. Each method is one event, noted so that it can be repeated.

    Attributes:
        scheduler: vLLM's.
        runners: One for each rank.
        steps: In flight, oldest first.
        journal: The events so far.
        alive: Requests that vLLM has not ended.
        stat: What happened, counted.
        weights: Of the model that the runners hold now.
    """

    def __init__(
        self,
        model: Path,
        options: Options,
        connector: NoConnector,
        sides: Sequence[RankSide],
    ) -> None:
        """Build it.

        Args:
            model: Folder of a multimodal model's configuration.
            options: What it is.
            connector: What the scheduler asks.
            sides: Of the connector, one for each rank.
        """
        config = vllm_config(
            model, options.policy, options.is_async, options.batched_tokens, options.loads
        )
        self.options = options
        self.scheduler = make_scheduler(
            config,
            connector,
            is_async=options.is_async,
            blocks=options.blocks,
            block_size=BLOCK,
            cache_rows=options.cache_rows,
            manager=MANAGERS[options.manager],
        )
        # What vLLM reads from flags of other engines, and from the KV cache of other models.
        self.scheduler.prefix_replay_tokens = options.replay_tokens
        self.scheduler.num_prefill_lookahead = options.lookahead
        self.scheduler.use_v2_model_runner = options.v2
        self.scheduler.is_mm_encoder_only = not options.loads
        self.connector = connector
        runner = V2Runner if options.v2 else Runner
        self.runners = [runner(options, side) for side in sides]
        self.steps: deque[Step] = deque()
        self.journal: list[tuple[str, tuple[Any, ...]]] = []
        self.alive: dict[str, Request] = {}
        self.stat: Counter[str] = Counter()
        self.weights = 1
        self._hasher = get_request_block_hasher(BLOCK, sha256)

    # -- events ------------------------------------------------------------------------------

    def add(self, asked: Asked) -> None:
        """A client sends a request."""
        self.journal.append(("add", (asked,)))
        params = {"ec_transfer_params": {name: {"metadata": {}} for name in asked.named}}
        sampling = SamplingParams(
            max_tokens=asked.max_tokens, extra_args=params if asked.named else None
        )
        sampling.update_from_generation_config({}, EOS)
        request = Request(
            request_id=asked.name,
            prompt_token_ids=list(asked.tokens),
            sampling_params=sampling,
            pooling_params=None,
            mm_features=list(asked.features),
            lora_request=asked.lora,
            priority=asked.priority,
            arrival_time=float(len(self.journal)),
            block_hasher=self._hasher if self.options.loads else None,
        )
        self.alive[asked.name] = request
        self.scheduler.add_request(request)
        self.stat["requests"] += 1

    def abort(self, name: str) -> None:
        """Its client has gone."""
        self.journal.append(("abort", (name,)))
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        self._note_ends()

    def reset_prefix_cache(self, *, preempt: bool) -> None:
        """An operator's call; ``preempt`` sends the running requests back to the queue."""
        self.journal.append(("reset_prefix_cache", (preempt,)))
        self.scheduler.reset_prefix_cache(reset_running_requests=preempt)

    def schedule(self) -> Step:
        """One pass of vLLM's scheduler."""
        self.journal.append(("schedule", ()))
        output = self.scheduler.schedule()
        names = output.num_scheduled_tokens
        step = Step(
            output,
            {name: list(self.scheduler.requests[name].mm_features) for name in names},
            {name: _computed(output, name) for name in names},
            {name: not self.scheduler.requests[name].is_prefill_chunk for name in names},
        )
        self.steps.append(step)
        self.stat["steps"] += 1
        self.stat["replays"] += sum(
            getattr(new, "replay_start", 0) > 0 for new in output.scheduled_new_reqs
        )
        return step

    def execute(self, *, eos: Collection[str] = ()) -> None:
        """The runners do the oldest step that waits for them.

        Args:
            eos: Requests whose sampled token ends them.
        """
        self.journal.append(("execute", (tuple(eos),)))
        step = next(step for step in self.steps if step.result is None)
        reports = [runner.run(step, self.weights) for runner in self.runners]
        step.result = self._result(step, eos)
        if self.options.reports:
            merged = None
            for report in reports:
                if report is not None:
                    merged = report if merged is None else merged.merge(report)
            if merged is not None:
                step.result = ModelRunnerOutput.with_ec_conn_output(
                    step.result, ECConnectorOutput(ec_connector_worker_meta=merged)
                )

    def deliver(self) -> None:
        """The scheduler gets the oldest step's result."""
        self.journal.append(("deliver", ()))
        step = self.steps.popleft()
        self.scheduler.update_from_output(step.output, step.result)
        self._note_ends()

    def reset_encoder_cache(self) -> None:
        """An operator's call, with the weights as they are."""
        while self.can_execute:
            self.execute()
        self.journal.append(("reset_encoder_cache", ()))
        self.scheduler.reset_encoder_cache()
        for runner in self.runners:
            runner.cache.clear()
        self.stat["resets of the device"] += 1

    def change_weights(self, *, call_first: bool) -> None:
        """New weights are loaded, and the caches are reset before or after that.

        The runners work in order, so what was scheduled before is executed by the old weights.
        """
        while any(step.result is None for step in self.steps):
            self.execute()
        self.journal.append(("change_weights", (call_first,)))
        if call_first:
            self._load_weights()
        self.scheduler.reset_prefix_cache(reset_running_requests=True)
        self.scheduler.reset_encoder_cache()
        for runner in self.runners:
            runner.cache.clear()
        if not call_first:
            self._load_weights()
        self.stat["changes of weights"] += 1

    def _load_weights(self) -> None:
        """By vLLM's own call into the workers, which are played."""

        def collective_rpc(*_: Any, **__: Any) -> list[None]:
            self.weights += 1
            return []

        core: Any = SimpleNamespace(
            scheduler=self.scheduler,
            model_executor=SimpleNamespace(collective_rpc=collective_rpc),
        )
        EngineCore.collective_rpc(core, "update_weights")

    # -- what a workload asks ----------------------------------------------------------------

    @property
    def can_schedule(self) -> bool:
        """Whether the engine core would schedule now."""
        return len(self.steps) < self.options.depth and bool(self.scheduler.has_requests())

    @property
    def can_execute(self) -> bool:
        """Whether the runners have a step to do."""
        return any(step.result is None for step in self.steps)

    @property
    def can_deliver(self) -> bool:
        """Whether the oldest step was executed."""
        return bool(self.steps) and self.steps[0].result is not None

    def check_rest(self) -> None:
        """While nothing runs the runners hold no more than the manager counts."""
        for runner in self.runners:
            left = set(runner.cache) - set(self.scheduler.encoder_cache_manager.cached)
            if left:
                raise BrokenPromiseError("left in the device's encoder cache", str(len(left)))

    # -- inside ------------------------------------------------------------------------------

    def _result(self, step: Step, eos: Collection[str]) -> ModelRunnerOutput:
        names = list(step.output.num_scheduled_tokens)
        if not names:
            return EMPTY_MODEL_RUNNER_OUTPUT
        if not self.options.loads:
            return make_empty_encoder_model_runner_output(step.output)
        tokens = [[EOS if name in eos else 7] if step.samples[name] else [] for name in names]
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=tokens,
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        )

    def _note_ends(self) -> None:
        for name in self.alive.keys() - self.scheduler.requests.keys():
            request = self.alive.pop(name)
            self.stat[f"ended {request.status.name.removeprefix('FINISHED_').lower()}"] += 1
            self.stat["preemptions"] += request.num_preemptions


def _computed(output: SchedulerOutput, name: str) -> int:
    for new in output.scheduled_new_reqs:
        if new.req_id == name:
            return int(new.num_computed_tokens)
    cached = output.scheduled_cached_reqs
    return int(cached.num_computed_tokens[cached.req_ids.index(name)])
