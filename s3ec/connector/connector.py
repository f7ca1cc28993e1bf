# SPDX-License-Identifier: Apache-2.0
"""S3ECConnector: a shell that routes vLLM's hooks to a scheduler half or a worker half.

vLLM creates one instance per role and process. Signatures follow vLLM 0.26 to 0.33; a release
does not call hooks that it does not have.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, TypeVar, cast

from vllm.distributed.ec_transfer.ec_connector.base import (
    ECConnectorBase,
    ECConnectorMetadata,
    ECConnectorRole,
)

from s3ec import runtime
from s3ec.connector.messages import StepPlan, WorkerReport
from s3ec.connector.parts import Parts
from s3ec.connector.worker import WorkerHalf, load_without_a_half
from s3ec.errors import ConfigError
from s3ec.runtime import PASS_THROUGH

try:  # vLLM 0.28 and newer
    from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorWorkerMetadata
except ImportError:  # pragma: no cover
    ECConnectorWorkerMetadata = object

log = logging.getLogger(__name__)
F = TypeVar("F", bound=Callable[..., Any])
_FAILED = "%s failed; the request is served without the cache"


def guarded(default: Any = None, *, fallback: Callable[..., Any] | None = None) -> Callable[[F], F]:
    """Decorate a hook so that none of our exceptions leaves it: vLLM would end the engine.

    A fault is logged with its traceback, and counted if the object's ``parts`` have a node. The
    hook then returns the same as for a miss. BaseException counts too: Rust's panics and
    cancellations are no subclasses of Exception. Exceptions of signal handlers pass.

    In a forked child of the process that made the node, the hook is not called at all.

    Args:
        default: The result after a fault; the caller must not change it.
        fallback: Makes the result instead, from the hook's arguments. Children call it too, so it
            touches neither the node nor a lock. If it fails, ``default`` is the result.
    """

    def wrap(hook: F) -> F:
        def answer(node: Any, *args: Any, **kwargs: Any) -> Any:
            if fallback is None:
                return default
            try:
                return fallback(*args, **kwargs)
            except PASS_THROUGH:
                raise
            except BaseException:
                _count(node)
                log.exception(_FAILED, fallback.__name__)
                return default

        @functools.wraps(hook)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            node = getattr(getattr(self, "parts", None), "node", None)
            # No call and no os.getpid(): this runs in every hook of a scheduling pass.
            if node is not None and node.process != runtime.process_number:
                return answer(None, self, *args, **kwargs)
            try:
                return hook(self, *args, **kwargs)
            except PASS_THROUGH:
                raise
            except BaseException:
                _count(node)
                log.exception(_FAILED, hook.__name__)
                return answer(node, self, *args, **kwargs)

        return cast("F", call)

    return wrap


def _count(node: Any) -> None:
    if node is not None:
        node.counters.add("internal_errors")


def fatal(hook: F) -> F:
    """Decorate a hook that must raise if it fails: an Exception, which vLLM reports as its own.

    ``except Exception`` misses Rust's panics and cancellations, which end a process silently.
    """

    @functools.wraps(hook)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return hook(*args, **kwargs)
        except (Exception, *PASS_THROUGH):
            raise
        except BaseException as exc:
            raise RuntimeError(f"{hook.__name__} failed: {exc!r}") from exc

    return cast("F", call)


class S3ECMetadata(ECConnectorMetadata):
    """One step's orders on their way to the workers."""

    def __init__(self, plan: StepPlan) -> None:
        self.plan = plan


class S3ECWorkerMetadata(ECConnectorWorkerMetadata):
    """The workers' reports on their way to the scheduler; always truthy, or vLLM drops it."""

    def __init__(self, report: WorkerReport) -> None:
        self.report = report

    @guarded()
    def aggregate(self, other: Any) -> S3ECWorkerMetadata:
        """Merge another rank's report."""
        return S3ECWorkerMetadata(WorkerReport().merge(self.report).merge(other.report))


def _decode_tokens(scheduler_output: Any) -> int:
    """Count a step's tokens as if each of its requests only decoded: one token, and drafts."""
    drafts = scheduler_output.scheduled_spec_decode_tokens.values()
    return len(scheduler_output.num_scheduled_tokens) + sum(map(len, drafts))


class S3ECConnector(ECConnectorBase):
    """vLLM's encoder cache in an S3 bucket, with a disk tier on this node.

    Attributes:
        parts: The half that the hooks route to, and its node.
    """

    def __init__(
        self, vllm_config: Any, role: ECConnectorRole, *, parts: Parts | None = None
    ) -> None:
        """Read the settings and make one half; without one the engine serves all the same.

        Args:
            vllm_config: vLLM's VllmConfig.
            role: Selects the half.
            parts: Existing parts; None, as vLLM calls it, makes them.

        Raises:
            ConfigError: The settings or vLLM's configuration cannot work; names what to change.
        """
        super().__init__(vllm_config=vllm_config, role=role)
        # Requests that cannot be encoded, if there is no scheduler half or it has failed.
        self._unavailable: set[str] = set()
        self.parts = parts or Parts(vllm_config)
        is_scheduler = role is ECConnectorRole.SCHEDULER
        try:
            if parts is None:
                self.parts.start(scheduler=is_scheduler)
        except (ConfigError, *PASS_THROUGH):
            raise
        except BaseException:
            # After any other failure, images can still be encoded without us.
            lost = "this worker reads by itself what is granted, and saves nothing"
            lost = "this engine runs without the cache" if is_scheduler else lost
            log.exception("s3ec could not start; %s", lost)
            self.shutdown()
        scheduler = self.parts.scheduler
        self._waits = None if scheduler is None else scheduler.waits

    # -- scheduler side ----------------------------------------------------------------------

    def _can_encode(self, request: Any) -> bool:
        """Return True if the request can be encoded without us: all its features have pixels."""
        features = self.parts.features
        return features is None or not any(map(features.needs_embedding, request.mm_features))

    def _without_us(self, request: Any, *_: Any, **__: Any) -> bool:
        """As _can_encode; fail a request that cannot be encoded, or it would wait for ever."""
        if self._can_encode(request):
            return True
        self._unavailable.add(request.request_id)
        return False

    def ensure_cache_available(
        self, request: Any, num_computed_tokens: int, *_: Any, **__: Any
    ) -> bool:
        """Return True if the request can be scheduled; False while its embeddings are fetched.

        vLLM asks for each waiting request in each pass, so the cached decision comes first: a few
        reads of memory, without a guard. In a forked child no pass is open.
        """
        waits = self._waits
        if waits is not None and waits.repeats(request.request_id, num_computed_tokens):
            return False
        return self._ensure(request, num_computed_tokens)

    @guarded(default=True, fallback=_without_us)
    def _ensure(self, request: Any, num_computed_tokens: int) -> bool:
        scheduler = self.parts.scheduler
        if scheduler is not None:
            return scheduler.ensure_cache_available(request, num_computed_tokens)
        # All inputs of a decoding request are in the KV cache: do not read its features.
        return num_computed_tokens >= request.num_prompt_tokens or self._without_us(request)

    @guarded(default=False)
    def has_cache_item(self, identifier: str) -> bool:
        """Return True if this embedding is verified and held open on this node."""
        scheduler = self.parts.scheduler
        return scheduler is not None and scheduler.has_cache_item(identifier)

    @guarded()
    def update_state_after_alloc(self, request: Any, index: int) -> None:
        """Note that the item got room in the device's encoder cache."""
        scheduler = self.parts.scheduler
        if scheduler is not None:
            scheduler.update_state_after_alloc(request, index)

    def _no_orders(self, _: Any = None) -> ECConnectorMetadata:
        return S3ECMetadata(StepPlan(weights=self.parts.weights))

    @guarded(fallback=_no_orders)
    def build_connector_meta(self, scheduler_output: Any) -> ECConnectorMetadata:
        """Return the step's orders for the workers."""
        scheduler = self.parts.scheduler
        if scheduler is None:
            return self._no_orders()
        plan = scheduler.build_connector_meta(
            scheduler_output.free_encoder_mm_hashes,
            scheduled_tokens=scheduler_output.total_num_scheduled_tokens,
            decode_tokens=_decode_tokens(scheduler_output),
            requests=len(scheduler_output.num_scheduled_tokens),
        )
        plan.weights = self.parts.weights
        self._count_lookups(scheduler_output)
        return S3ECMetadata(plan)

    @guarded()
    def _count_lookups(self, scheduler_output: Any) -> None:
        scheduler = self.parts.scheduler
        if scheduler is not None:
            scheduler.lookups.end_pass(scheduler_output)

    @guarded()
    def update_connector_output(self, connector_output: Any) -> None:
        """Process the workers' report."""
        scheduler = self.parts.scheduler
        metadata = getattr(connector_output, "ec_connector_worker_meta", None)
        if scheduler is not None and isinstance(metadata, S3ECWorkerMetadata):
            scheduler.update_connector_output(metadata.report)
            if metadata.report.levels and self.parts.metrics is not None:
                self.parts.metrics.on_report(metadata.report.levels)

    def _take_unavailable(self) -> set[str]:
        """Return the unavailable requests that no half has returned."""
        taken, self._unavailable = self._unavailable, set()
        return taken

    @guarded(fallback=_take_unavailable)
    def take_unavailable_requests(self) -> set[str]:
        """Return requests without pixels whose embedding is not available; vLLM fails them."""
        scheduler = self.parts.scheduler
        taken = set() if scheduler is None else scheduler.take_unavailable_requests()
        return taken | self._take_unavailable()

    @guarded(default=(False, None))
    def request_finished(self, request: Any) -> tuple[bool, dict[str, Any] | None]:
        """End a request; the release of its blocks is never delayed.

        Returns:
            False, and for an encoder instance its items by identifier, for the
            ``ec_transfer_params`` of the request to the language instance.
        """
        scheduler, features = self.parts.scheduler, self.parts.features
        self._unavailable.discard(request.request_id)
        if scheduler is None:
            return False, None
        unstored = scheduler.request_finished(request)
        if unstored is None or features is None:
            return False, None
        return False, features.items_of(request.mm_features, unstored) or None

    @guarded()
    def get_ec_connector_stats(self) -> Any:
        """Return the counts since the last call; the workers' counts come with their reports."""
        metrics = self.parts.metrics
        fresh = None if metrics is None else metrics.news()
        if not fresh:
            return None
        from s3ec.connector.stats import S3ECStats

        return S3ECStats(data=fresh)

    @classmethod
    @guarded()
    def build_ec_connector_stats(cls, data: dict[str, Any] | None = None) -> Any:
        """Return empty stats for vLLM's own log line: ours says the same (metrics.py)."""
        from s3ec.connector.stats import S3ECStats

        return S3ECStats()

    @classmethod
    @guarded()
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> Any:
        """Return the counters on /metrics."""
        from s3ec.connector.stats import S3ECPromMetrics

        return S3ECPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # -- worker side -------------------------------------------------------------------------

    def bind_connector_metadata(self, connector_metadata: ECConnectorMetadata) -> None:
        """Take the step's orders; the first ones carry the namespace's weights."""
        super().bind_connector_metadata(connector_metadata)
        plan = self._plan()
        if plan is not None and plan.weights and plan.weights != self.parts.weights:
            self._agree_on_weights(plan.weights)

    @guarded()
    def _agree_on_weights(self, weights: str) -> None:
        self.parts.agree_on_weights(weights)

    def _plan(self) -> StepPlan | None:
        metadata = self._connector_metadata
        return metadata.plan if isinstance(metadata, S3ECMetadata) else None

    def _own_worker(self) -> WorkerHalf | None:
        """Return the worker half; None in a forked child of the process that made it."""
        node = self.parts.node
        is_foreign = node is not None and node.process != runtime.process_number
        return None if is_foreign else self.parts.worker

    @fatal
    def start_load_caches(self, encoder_cache: dict[str, Any], **kwargs: Any) -> None:
        """Put the granted embeddings into the encoder cache.

        Raises:
            RuntimeError: One of them cannot be read from its file or from the bucket; the engine
                cannot continue without it. A worker without its half asks no bucket.
        """
        plan, worker = self._plan(), self._own_worker()
        if plan is None:
            return
        if worker is not None:
            worker.start_load_caches(encoder_cache, plan)
        elif self.parts.worker is None:
            load_without_a_half(encoder_cache, plan)
        elif plan.loads:
            raise RuntimeError("s3ec loads nothing in a process that was forked from its worker")

    @guarded()
    def finish_load_caches(self, encoder_cache: dict[str, Any], **kwargs: Any) -> None:
        """Note that the encoder ran (vLLM after 0.33); loads ended with start_load_caches."""
        self._encoder_ended()

    @guarded(fallback=lambda _: [])
    def externally_loaded_hashes(self) -> list[str]:
        """Return what this step loads: a producer need not save it (vLLM after 0.33)."""
        plan = self._plan()
        return [] if plan is None else [load.identifier for load in plan.loads]

    @guarded()
    def start_save_caches(self, encoder_cache: dict[str, Any], **kwargs: Any) -> None:
        """Store embeddings on the device that are missing in the corpus (vLLM 0.30 and newer)."""
        plan, worker = self._plan(), self.parts.worker
        if worker is not None and plan is not None:
            worker.start_save_caches(encoder_cache, plan)

    @guarded()
    def save_caches(self, encoder_cache: dict[str, Any], mm_hash: str, **kwargs: Any) -> None:
        """Copy a fresh encoder output and queue it for tier and bucket."""
        plan, worker = self._plan(), self.parts.worker
        if worker is not None and plan is not None:
            worker.save_caches(encoder_cache, mm_hash, plan)

    @guarded(default=(None, None))
    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Note that the encoder ran, if it had to. There are never finished transfers."""
        self._encoder_ended()
        return None, None

    def _encoder_ended(self) -> None:
        worker = self._own_worker()
        if worker is not None:
            worker.encoder_ended()

    @guarded()
    def build_connector_worker_meta(self) -> Any:
        """Return this worker's report since the last one; None if nothing happened."""
        worker = self.parts.worker
        if worker is None and self.parts.has_other_weights:
            return S3ECWorkerMetadata(WorkerReport(has_other_weights=True))
        report = None if worker is None else worker.report()
        return None if report is None else S3ECWorkerMetadata(report)

    # -- weights -----------------------------------------------------------------------------

    @guarded()
    def weights_may_have_changed(self, what: str, *, was_reset: bool) -> None:
        """Stop, unless configured otherwise: the namespace holds for the weights of the start.

        A reset alone does not mean new weights if a fingerprint names them: a change of weights
        also calls into the workers. It stops the cache if the model's name stands for them.

        Called between two scheduling passes; not a hook of vLLM's, see live_weights.

        Args:
            what: What happened to the engine, for the log.
            was_reset: True if vLLM's encoder cache is empty now.
        """
        scheduler, node = self.parts.scheduler, self.parts.node
        if scheduler is None or node is None:
            return
        if was_reset:
            scheduler.device_was_reset()
        settings = node.settings
        if settings.live_weights == "ignore" or (was_reset and settings.weights == "fingerprint"):
            return
        if scheduler.stop():
            node.counters.add("stopped_by_weights")
            log.error(
                "%s, so its weights may not be those of namespace %s any more: nothing is loaded "
                "or saved from here on. Start the engine again to use the cache, or set "
                "`live_weights` = ignore if its encoder never changes",
                what,
                node.namespace.name,
            )

    @guarded()
    def prefix_is_replayed(self, tokens: int) -> None:
        """Note how many last tokens of a prefix hit vLLM computes again; see live_weights."""
        if self.parts.scheduler is not None:
            self.parts.scheduler.replay_tokens = tokens

    # -- both --------------------------------------------------------------------------------

    @guarded()
    def shutdown(self) -> None:
        """Drain saves within a deadline and end our threads. Safe to call twice."""
        self.parts.end()
