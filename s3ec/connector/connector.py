# SPDX-License-Identifier: Apache-2.0
"""S3ECConnector: a shell that routes vLLM's hooks to a scheduler half or a worker half.

vLLM makes one instance per role and process. Signatures follow vLLM 0.24 to 0.33; hooks that
a release lacks are simply never called.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from typing import Any, Literal

from vllm.distributed.ec_transfer.ec_connector.base import (
    ECConnectorBase,
    ECConnectorMetadata,
    ECConnectorRole,
)

from s3ec.config import Loaded, load_settings
from s3ec.connector import compat, live_weights
from s3ec.connector.adapters import AdapterCache, AdapterFiles, AdapterNames, name_in_plan
from s3ec.connector.guard import fatal, guarded
from s3ec.connector.messages import StepPlan, WorkerReport
from s3ec.connector.remote_ranks import Ranks, tier_id
from s3ec.connector.saves import SaveQueue
from s3ec.connector.scheduler import SchedulerHalf
from s3ec.connector.vllm_config import (
    FeatureReader,
    Role,
    Topology,
    encoder_weights,
    identifier_problem,
    live_weights_problem,
    model_problem,
    namespace_of,
    topology_of,
    trust_problem,
)
from s3ec.connector.worker import WorkerHalf
from s3ec.errors import ConfigError, TierError
from s3ec.node import Node
from s3ec.runtime import PASS_THROUGH
from s3ec.store.open import choose_transport

try:  # vLLM 0.28 and newer
    from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorWorkerMetadata
except ImportError:  # pragma: no cover
    ECConnectorWorkerMetadata = object

log = logging.getLogger(__name__)

_SHUTDOWN_TIMEOUT_S = 1.0


class S3ECMetadata(ECConnectorMetadata):
    """One step's orders on their way to the workers."""

    def __init__(self, plan: StepPlan) -> None:
        self.plan = plan


class S3ECWorkerMetadata(ECConnectorWorkerMetadata):
    """The workers' reports on their way to the scheduler; always true, or vLLM drops it."""

    def __init__(self, report: WorkerReport) -> None:
        self.report = report

    @guarded(default=None)
    def aggregate(self, other: Any) -> S3ECWorkerMetadata:
        """Merge another rank's report."""
        return S3ECWorkerMetadata(WorkerReport().merge(self.report).merge(other.report))


class S3ECConnector(ECConnectorBase):
    """vLLM's encoder cache in an S3 bucket, with a disk tier on this node.

    The scheduler half decides which weights the namespace names, since it is made after they were
    loaded; its plans carry that to the workers. A worker half is made earlier: at once where the
    model's files are here by then, else with the first plan.
    """

    # What the namespace says about the encoder's weights; empty before it is known.
    _weights = ""
    _node: Node | None = None

    def __init__(self, vllm_config: Any, role: ECConnectorRole) -> None:
        """Read the settings and build one half; a half that cannot be built leaves a plain engine.

        Raises:
            ConfigError: The settings or vLLM's configuration cannot work; names what to change.
        """
        super().__init__(vllm_config=vllm_config, role=role)
        self._scheduler: SchedulerHalf | AdapterNames | None = None
        self._worker: WorkerHalf | None = None
        self._features: FeatureReader | None = None
        self._counted: dict[str, float] = {}
        self._adapter_files = AdapterFiles()
        transfer = vllm_config.ec_transfer_config
        loaded = load_settings(transfer.ec_connector_extra_config)
        _set_up_logging(loaded.settings.log_level)
        problem = model_problem(vllm_config)
        if problem is not None:
            log.warning("%s", problem)
            return
        problem = identifier_problem(vllm_config)
        if problem is not None:
            raise ConfigError(problem, field="mm_processor_cache_gb")
        problem = trust_problem(vllm_config, loaded.settings)
        if problem is not None:
            raise ConfigError(problem, field="trust_client_ids")
        problem = live_weights_problem(vllm_config, loaded.settings)
        if problem is not None:
            log.warning("%s", problem)
            return
        try:
            self._make_half(role, loaded)
        except TierError as exc:
            raise ConfigError(f"`cache_dir`: {exc}", field="cache_dir") from exc
        except (ConfigError, *PASS_THROUGH):
            raise
        except BaseException:
            # Whatever else it is, images can be encoded without us.
            log.exception("s3ec could not start; this engine runs without the cache")
            self.shutdown()

    def _make_half(self, role: ECConnectorRole, loaded: Loaded) -> None:
        self._settings = loaded.settings
        weights = encoder_weights(self._vllm_config, loaded.settings)
        if role is ECConnectorRole.SCHEDULER:
            if weights.problem is not None:
                log.warning(
                    "the namespace knows the encoder's weights by the model's name only: %s",
                    weights.problem,
                )
            self._scheduler = self._make_scheduler(self._open_node(weights.mark), loaded)
        elif weights.problem is None:
            self._worker = self._make_worker(self._open_node(weights.mark))

    def _open_node(self, weights: str) -> Node:
        self._weights = weights  # first: what fails once is not tried again in every step
        namespace = namespace_of(self._vllm_config, self._settings, weights)
        self._node = Node.shared(self._settings, namespace)
        return self._node

    def _make_scheduler(self, node: Node, loaded: Loaded) -> SchedulerHalf | AdapterNames:
        config: Any = self._vllm_config
        settings = loaded.settings
        log.info(
            "s3ec namespace %s in %s by %s, tier %s; %s",
            node.namespace.name,
            settings.corpus,
            choose_transport(settings).name,
            settings.cache_dir,
            compat.summary(),
        )
        if not settings.trust_client_ids:
            log.warning(
                "identifiers that clients choose are neither looked up nor saved "
                "(`trust_client_ids`); vllm:s3ec_refused_client_ids counts them"
            )
        features = self._features = FeatureReader(config.model_config)
        this = compat.release(compat.vllm_version())
        topology = topology_of(config)
        if topology.problem is not None and self.is_consumer:
            log.warning(
                "nothing will be loaded: ranks may run on other nodes than the scheduler, and %s",
                topology.problem,
            )
        role = Role(
            producer=self.is_producer,
            consumer=self.is_consumer,
            # A drafter looks one token ahead; a few more cost nothing.
            window_tokens=config.scheduler_config.max_num_batched_tokens + 16,
            ranks=topology.ranks,
            steps_in_flight=config.max_concurrent_batches,
            defer_timeout_s=settings.defer_timeout_s,
            asked_every_pass=this is None or this >= (0, 30),
            can_load=topology.problem is None,
            stores_again=compat.installed_hooks()["start_save_caches"],
        )
        if settings.live_weights == "stop":
            live_weights.watch()
        node.follow_the_bucket()
        if self.is_producer:
            node.compact_the_index()
        half = SchedulerHalf(
            role,
            index=node.index,
            local=node.local,
            prefetcher=node.prefetcher,
            store_is_down=lambda: node.breaker.is_open,
            disk_hangs=lambda: node.loop.watch.hangs,
            needs_embedding=features.needs_embedding,
            placeholder_of=features.placeholder,
            counters=node.counters,
            ranks=_ranks_elsewhere(node, role, topology),
            naming=node.naming,
        )
        if not getattr(getattr(config, "lora_config", None), "enable_tower_connector_lora", False):
            return half

        def look(work: Callable[[], None]) -> None:
            node.loop.submit(node.loop.disk_long(work))

        names = AdapterNames(
            half,
            start=look,
            needs_embedding=features.needs_embedding,
            defer_timeout_s=settings.defer_timeout_s,
            counters=node.counters,
        )
        live_weights.watch_adapters()
        return names

    def _make_worker(self, node: Node) -> WorkerHalf:
        saves = None
        if self.is_producer:
            settings = node.settings
            overflow = settings.save_overflow or self._overflow()
            log.info("a full save queue: %s (`save_overflow`)", overflow)
            saves = SaveQueue(node, budget_bytes=int(settings.save_queue_bytes), overflow=overflow)
        return WorkerHalf(
            node,
            saves=saves,
            device=compat.current_device,
            # It never changes, and asking vLLM is a good part of what a save costs beside its copy.
            rank=functools.cache(compat.loading_rank),
            drain_timeout_s=4.0 if self.is_consumer else 30.0,
            finish_later=compat.installed_hooks()["finish_load_caches"],
        )

    def _overflow(self) -> Literal["block", "drop"]:
        """What a full save queue does where nobody said so.

        Somebody waits for the answers of ``ec_both`` and of an encoder that serves requests. A
        job that fills a corpus is to be complete.
        """
        return "drop" if self.is_consumer or compat.serves_requests() else "block"

    # -- scheduler side ----------------------------------------------------------------------

    def ensure_cache_available(
        self, request: Any, num_computed_tokens: int, *_: Any, **__: Any
    ) -> bool:
        """Whether the request can be scheduled; False while its embeddings are on their way."""
        answer = self._ensure(request, num_computed_tokens)
        # After a fault of ours: encode, but never what came without pixels to encode.
        return answer if answer is not None else not self._has_no_pixels(request)

    @guarded(default=None)
    def _ensure(self, request: Any, num_computed_tokens: int) -> bool | None:
        if self._scheduler is None:
            return True
        return self._scheduler.ensure_cache_available(request, num_computed_tokens)

    @guarded(default=False, in_children=True)
    def _has_no_pixels(self, request: Any) -> bool:
        features = self._features
        return features is not None and any(map(features.needs_embedding, request.mm_features))

    @guarded(default=False)
    def has_cache_item(self, identifier: str) -> bool:
        """Whether this embedding is verified and pinned on this node."""
        return self._scheduler is not None and self._scheduler.has_cache_item(identifier)

    @guarded(default=None)
    def update_state_after_alloc(self, request: Any, index: int) -> None:
        """The item was given room in the device's encoder cache."""
        if self._scheduler is not None:
            self._scheduler.update_state_after_alloc(request, index)

    def build_connector_meta(self, scheduler_output: Any) -> ECConnectorMetadata:
        """The step's orders for the workers."""
        plan = self._build_plan(scheduler_output) or StepPlan()
        plan.weights = self._weights
        return S3ECMetadata(plan)

    @guarded(default=None)
    def _build_plan(self, scheduler_output: Any) -> StepPlan | None:
        if self._scheduler is None:
            return None
        return self._scheduler.build_connector_meta(
            scheduler_output.free_encoder_mm_hashes,
            scheduled_tokens=scheduler_output.total_num_scheduled_tokens,
        )

    @guarded(default=None)
    def update_connector_output(self, connector_output: Any) -> None:
        """Take the workers' report."""
        metadata = getattr(connector_output, "ec_connector_worker_meta", None)
        if self._scheduler is not None and isinstance(metadata, S3ECWorkerMetadata):
            self._scheduler.update_connector_output(metadata.report)

    def take_unavailable_requests(self) -> set[str]:
        """Requests without pixels whose embedding cannot be had; vLLM fails them."""
        return self._unavailable() or set()

    @guarded(default=None)
    def _unavailable(self) -> set[str] | None:
        return None if self._scheduler is None else self._scheduler.take_unavailable_requests()

    @guarded(default=(False, None))
    def request_finished(self, request: Any) -> tuple[bool, dict[str, Any] | None]:
        """Forget the request; never delays the release of its blocks."""
        if self._scheduler is not None:
            self._scheduler.request_finished(request)
        return False, None

    @guarded(default=None)
    def get_ec_connector_stats(self) -> Any:
        """Counts since the last call; the workers' come with their reports."""
        if self._scheduler is None or self._node is None:
            return None
        counts = self._node.counters.snapshot()
        if counts == self._counted:
            return None
        from s3ec.connector.stats import S3ECStats

        fresh = {
            name: total - self._counted.get(name, 0)
            for name, total in counts.items()
            if total != self._counted.get(name, 0)
        }
        self._counted = counts
        return S3ECStats(data=fresh)

    @classmethod
    @guarded(default=None)
    def build_ec_connector_stats(cls, data: dict[str, Any] | None = None) -> Any:
        """vLLM's log line, from the data that crossed the processes."""
        from s3ec.connector.stats import S3ECStats

        return S3ECStats(data=dict(data or {}))

    @classmethod
    @guarded(default=None)
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> Any:
        """The counters on /metrics."""
        from s3ec.connector.stats import S3ECPromMetrics

        return S3ECPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # -- worker side -------------------------------------------------------------------------

    def bind_connector_metadata(self, connector_metadata: ECConnectorMetadata) -> None:
        """Take the step's orders; the first ones name the namespace."""
        super().bind_connector_metadata(connector_metadata)
        self._agree_on_weights()

    @guarded(default=None)
    def _agree_on_weights(self) -> None:
        """Read and write where the scheduler does, whatever this process made of the files."""
        plan = self._plan()
        if plan is None or not plan.weights or plan.weights == self._weights:
            return
        if self._weights:
            log.warning(
                "the model's weights are %s for the scheduler and were %s when this worker "
                "started; going on with the scheduler's",
                plan.weights,
                self._weights,
            )
        self._end_halves()
        self._worker = self._make_worker(self._open_node(plan.weights))

    def _plan(self) -> StepPlan | None:
        metadata = self._connector_metadata
        return metadata.plan if isinstance(metadata, S3ECMetadata) else None

    @fatal
    def start_load_caches(self, encoder_cache: dict[str, Any], **kwargs: Any) -> None:
        """Put the granted embeddings into the encoder cache, or begin to (finish_load_caches).

        Raises:
            RuntimeError: One of them can be had neither from its file nor from the bucket; the
                engine cannot go on without it.
        """
        plan, worker = self._plan(), self._own_worker()
        if worker is None and plan is not None and plan.loads:
            raise RuntimeError(
                "this worker's half of s3ec did not start, as its log says, or was made by a "
                "process that was forked then"
            )
        if worker is not None and plan is not None:
            cache = _as_planned(encoder_cache, plan)
            worker.start_load_caches(cache, self._follow(plan) or plan)

    def _own_worker(self) -> WorkerHalf | None:
        """The worker half; None in a forked child of the process that made it."""
        return None if self._node is not None and self._node.is_foreign else self._worker

    @guarded(default=None)
    def _follow(self, plan: StepPlan) -> StepPlan | None:
        return None if self._worker is None else self._worker.follow(plan)

    @fatal
    def finish_load_caches(self, encoder_cache: dict[str, Any], **kwargs: Any) -> None:
        """What start_load_caches began must be in the encoder cache now (vLLM after 0.33).

        Runners call it before the gather and once more when the step ends.

        Raises:
            RuntimeError: As for start_load_caches.
        """
        worker = self._own_worker()
        if worker is not None:
            worker.finish_load_caches(_as_planned(encoder_cache, self._plan()))

    def externally_loaded_hashes(self) -> list[str]:
        """What this step loads: nothing that a producer has to save (vLLM after 0.33)."""
        return self._loaded() or []

    @guarded(default=None)
    def _loaded(self) -> list[str] | None:
        plan = self._plan()
        if plan is None:
            return None
        names = [load.identifier for load in plan.loads]
        return [plan.adapters[one].identifier if one in plan.adapters else one for one in names]

    @guarded(default=None)
    def start_save_caches(self, encoder_cache: dict[str, Any], **kwargs: Any) -> None:
        """Store what the device holds and the corpus lacks (vLLM 0.30 and newer)."""
        plan = self._plan()
        if self._worker is not None and plan is not None:
            self._worker.start_save_caches(_as_planned(encoder_cache, plan), plan)

    @guarded(default=None)
    def save_caches(self, encoder_cache: dict[str, Any], mm_hash: str, **kwargs: Any) -> None:
        """Copy a fresh encoder output and queue it for tier and bucket."""
        plan = self._plan()
        if self._worker is None or plan is None:
            return
        identifier = name_in_plan(mm_hash, plan)
        use = plan.adapters.get(identifier)
        if use is not None and not self._adapter_files.vouch_for(use):
            if self._node is not None:
                self._node.counters.add("save_problem.adapter")
            return
        self._worker.save_caches(_as_planned(encoder_cache, plan), identifier, plan)

    @guarded(default=None)
    def build_connector_worker_meta(self) -> Any:
        """What this worker did since its last report."""
        report = self._worker.report() if self._worker is not None else None
        return S3ECWorkerMetadata(report) if report is not None else None

    # -- weights -----------------------------------------------------------------------------

    @guarded(default=None)
    def weights_may_have_changed(self, what: str, *, was_reset: bool) -> None:
        """Stop, unless told otherwise: what is stored was made by the weights of the start.

        Called between two scheduling passes; not a hook of vLLM's, see live_weights.

        Args:
            what: What happened to the engine, for the log.
            was_reset: vLLM's encoder cache is empty now.
        """
        node = self._node
        if self._scheduler is None or node is None or node.settings.live_weights == "ignore":
            return
        if self._scheduler.stop(was_reset=was_reset):
            node.counters.add("stopped_by_weights")
            log.error(
                "%s, so its weights may not be those of namespace %s any more: nothing is loaded "
                "or saved from here on. Start the engine again to use the cache, or set "
                "`live_weights` = ignore if its encoder never changes",
                what,
                node.namespace.name,
            )

    @guarded(default=None)
    def adapter_loaded(self, lora_request: Any) -> None:
        """The workers are about to load an adapter; not a hook of vLLM's, see live_weights."""
        if isinstance(self._scheduler, AdapterNames):
            self._scheduler.adapter_loaded(lora_request)

    # -- both --------------------------------------------------------------------------------

    @guarded(default=None)
    def shutdown(self) -> None:
        """Drain saves within a deadline and end our threads. Safe to call twice."""
        self._end_halves()

    def _end_halves(self) -> None:
        # All at once: a second call may come from a signal handler, in the middle of this one,
        # and must not take away the node while the worker half drains.
        self._scheduler = None
        worker, self._worker = self._worker, None
        node, self._node = self._node, None
        try:
            if worker is not None:
                worker.finish()
        finally:
            if node is not None:
                node.release(_SHUTDOWN_TIMEOUT_S)


def _as_planned(encoder_cache: Any, plan: StepPlan | None) -> Any:
    """vLLM's encoder cache under the plan's names; itself where those are vLLM's."""
    return (
        AdapterCache(encoder_cache, plan) if plan is not None and plan.adapters else encoder_cache
    )


def _ranks_elsewhere(node: Node, role: Role, topology: Topology) -> Ranks | None:
    """Bookkeeping for ranks that may not see this node's disk; None if there are none."""
    if topology.beside_scheduler or not role.consumer or not role.can_load:
        return None
    return Ranks(
        topology.ranks,
        tier_id(node),
        steps_in_flight=role.steps_in_flight,
        heard_without_tokens=topology.heard_without_tokens,
    )


def _set_up_logging(level: str) -> None:
    """Give the ``s3ec`` loggers a level and, where the application set none up, a handler.

    vLLM configures its own logger only; without a handler our lines would be lost.
    """
    logger = logging.getLogger("s3ec")
    logger.setLevel(level)
    if not logger.hasHandlers():
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(
            logging.Formatter("%(levelname)s %(asctime)s [%(name)s] %(message)s", "%m-%d %H:%M:%S")
        )
        logger.addHandler(handler)
