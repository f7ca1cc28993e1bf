# SPDX-License-Identifier: Apache-2.0
"""The parts of one connector instance, made from vLLM's configuration and the settings.

These are a node and one of the two halves. This module runs the checks before the start, and
configures each half for this engine. The hooks themselves are in ``connector.py``.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Container
from concurrent.futures import Future
from functools import partial
from typing import Any

from s3ec.config import load_settings, set_up_logging
from s3ec.connector import compat, forms, live_weights
from s3ec.connector.metrics import EngineMetrics
from s3ec.connector.save_orders import SeenKeys
from s3ec.connector.saves import SaveQueue
from s3ec.connector.scheduler import SchedulerHalf
from s3ec.connector.vllm_config import (
    FeatureReader,
    Role,
    checkpoint_of,
    describe_once,
    encoder_weights,
    identifier_problem,
    live_weights_problem,
    loading_ranks,
    model_problem,
    ranks_problem,
    scopes_of,
    trust_problem,
    weights_at,
    without_pixels,
)
from s3ec.connector.waiting import EngineLoad, WaitPolicy
from s3ec.connector.worker import WorkerHalf
from s3ec.encode_costs import EncodeCosts
from s3ec.errors import ConfigError, TierError
from s3ec.identity import Namespace, canonical_json
from s3ec.managers import restore
from s3ec.managers.restore import RestoreCosts
from s3ec.node import Node
from s3ec.runtime import in_thread
from s3ec.settings import Settings
from s3ec.weights import Checkpoint, Weights

log = logging.getLogger(__name__)

_SHUTDOWN_TIMEOUT_S = 1.0
# A worker's early start, before its first plan: what its process read of the model's files before
# they were loaded, and a node for it; None if no node could be made.
_Early = tuple[Weights, Node | None]


class Parts:
    """One half of the connector and the node it works with.

    The scheduler half reads the model's files, since it is made after the weights were loaded; its
    plans carry the namespace's record of them to the workers. A worker reads them as well, while
    the engine starts, and opens a node for them. So the files are in the page cache when the
    scheduler half reads them, and its result shows whether they were replaced meanwhile. The worker
    half is made with the first plan, on the same node if both records agree.

    Attributes:
        node: This process's parts; None before the start, after the end and if nothing started.
        scheduler: The scheduler half; None in a worker, and if ``node`` is None.
        worker: The worker half; None in the scheduler's instance, and if ``node`` is None.
        features: Detects features without pixels; None in a worker, and for a model without media.
            It exists whether or not the half starts, and stays after the end.
        metrics: Metrics of this engine; None if ``scheduler`` is None.
        weights: The namespace's record of the model's files; empty before it is known. Stays after
            the end.
        has_other_weights: True if this worker loaded other weights than the scheduler read.
    """

    def __init__(self, vllm_config: Any) -> None:
        """Make no parts yet."""
        self._vllm_config = vllm_config
        self._settings: Settings | None = None
        self._descriptor: dict[str, Any] = {}
        self._early: Future[_Early] | None = None
        self.node: Node | None = None
        self.scheduler: SchedulerHalf | None = None
        self.worker: WorkerHalf | None = None
        self.features: FeatureReader | None = None
        self.metrics: EngineMetrics | None = None
        self.weights = ""
        self.has_other_weights = False

    @property
    def restore_costs(self) -> RestoreCosts | None:
        """For a manager of the encoder cache; None if there is no scheduler half."""
        return self.scheduler

    def follow_device(self, held: Container[str]) -> None:
        """Give the scheduler half the identifiers that the device holds."""
        if self.scheduler is not None:
            self.scheduler.device = held

    # -- start and end -----------------------------------------------------------------------

    def start(self, *, scheduler: bool) -> None:
        """Read the settings and make one half, or none if there is nothing to do.

        Args:
            scheduler: True for the scheduler half.

        Raises:
            ConfigError: The settings or vLLM's configuration cannot work; names what to change.
            BaseException: Any other failure; ``end`` releases the parts made by then.
        """
        config = self._vllm_config
        # First: even if the half fails to start, no request without pixels may kill the engine.
        # A model without media has no such requests, and no processor to ask.
        if scheduler and config.model_config.multimodal_config is not None:
            try:
                self.features = FeatureReader(config.model_config)
            except Exception:  # a bad setting must still be reported
                log.debug("no look at features", exc_info=True)
        settings = load_settings(config.ec_transfer_config.ec_connector_extra_config).settings
        set_up_logging(settings.log_level)
        if not _is_for_us(config, settings):
            return
        self._settings = settings
        self._descriptor = describe_once(config, settings)
        if not scheduler:
            # Read now: the constructor of a model may write into the configuration.
            work = partial(self._start_beside, checkpoint_of(config), settings)
            self._early = in_thread(work, "s3ec-start")
            return
        weights = encoder_weights(config, settings)
        if weights.problem is not None:
            log.warning(
                "nothing is loaded or saved, since nobody knows which weights these are: %s. If "
                "the model's name stands for them, set `weights` = name",
                weights.problem,
            )
            return
        try:
            self.weights = canonical_json(weights.descriptor)
            self.start_scheduler(self._open_node(settings, self.weights))
        except TierError as exc:
            raise ConfigError(f"`cache_dir`: {exc}", field="cache_dir") from exc

    def _start_beside(self, checkpoint: Checkpoint, settings: Settings) -> _Early:
        """Read the model's files and open a node while the engine starts; on a thread."""
        weights, node = weights_at(checkpoint, settings), None
        if weights.problem is None:
            try:
                node = self._open_node(settings, canonical_json(weights.descriptor))
            except BaseException:
                # The first plan opens a node again, and a lasting failure shows then.
                log.debug("no node beside the start", exc_info=True)
        return weights, node

    def _open_node(self, settings: Settings, weights: str) -> Node:
        namespace = Namespace.from_descriptor({**self._descriptor, **json.loads(weights)})
        return Node.shared(settings, namespace)

    def agree_on_weights(self, weights: str) -> None:
        """Start the worker half in the scheduler half's namespace.

        Args:
            weights: The scheduler's record of the model's files.
        """
        self.weights = weights  # first: a failure is not retried in every step
        early, self._early = self._early, None
        self.end()
        try:
            # An early start that is not ready by now is not used.
            if early is not None and early.done() and early.exception() is None:
                found, told = early.result()[0], json.loads(weights)["weights"]
                self.has_other_weights = found.problem is None and found.fingerprint != told
                if self.has_other_weights:
                    log.error(
                        "the model's weights are %s for the scheduler, and were %s before this "
                        "worker loaded them: it saves nothing",
                        told,
                        found.fingerprint,
                    )
                    return
            if self._settings is not None:
                self.start_worker(self._open_node(self._settings, weights))
        finally:
            if early is not None:  # release its reference; the worker half has its own
                early.add_done_callback(_release)

    def end(self) -> None:
        """Drain saves within a deadline and end our threads. Safe to call twice."""
        # All at once: a second call may come from a signal handler, in the middle of this one,
        # and must not release the node while the worker half drains.
        self.scheduler = None
        early, self._early = self._early, None
        worker, self.worker = self.worker, None
        node, self.node = self.node, None
        metrics, self.metrics = self.metrics, None
        try:
            if worker is not None:
                worker.finish()
            if metrics is not None and node is not None and not node.is_foreign:
                metrics.close()
        finally:
            if node is not None:
                node.release(_SHUTDOWN_TIMEOUT_S)
            if early is not None:
                early.add_done_callback(_release)

    # -- the two halves ----------------------------------------------------------------------

    def start_scheduler(self, node: Node) -> None:
        """Make the scheduler half on a node, and have the node follow the bucket."""
        self.node = node
        config, settings = self._vllm_config, node.settings
        restore.register(config, self)
        log.info(
            "s3ec namespace %s in %s by %s, tier %s; %s",
            node.namespace.name,
            settings.corpus,
            settings.transport,
            settings.cache_dir,
            compat.summary(),
        )
        if not settings.trust_client_ids:
            log.warning(
                "identifiers that clients choose are neither looked up nor saved "
                "(`trust_client_ids`); vllm:s3ec_refused_client_ids counts them"
            )
        features = self.features = self.features or FeatureReader(config.model_config)
        problem = ranks_problem(config)
        role = _role_of(config, settings, can_load=problem is None)
        if role.consumer:
            possible = without_pixels(config, features, config.ec_transfer_config.ec_role)
            log.info("requests without pixels: %s", possible)
        if problem is not None and role.consumer:
            log.warning(
                "nothing will be loaded, since ranks may not see this node's `cache_dir`: %s. Have "
                "all tensor-parallel ranks on one node, with --distributed-executor-backend mp",
                problem,
            )
        live_weights.watch()
        self.metrics = EngineMetrics(node)
        self.metrics.start()
        node.follow_the_bucket()
        if role.producer:
            node.maintain_the_index()
        self.scheduler = SchedulerHalf(
            role,
            index=node.index,
            local=node.local,
            prefetcher=node.prefetcher,
            residents=node.residents,
            store=node.breaker,
            disk=node.loop.watch,
            needs_embedding=features.needs_embedding,
            placeholder_of=features.placeholder,
            counters=node.counters,
            naming=node.naming,
            scopes=scopes_of(config),
            costs=node.encode_costs,
            policy=_policy_of(role, settings, node.encode_costs),
            seen=_seen_of(role, settings),
        )

    def start_worker(self, node: Node) -> None:
        """Make the worker half on a node."""
        self.node = node
        transfer = self._vllm_config.ec_transfer_config
        saves = None
        if transfer.is_ec_producer:
            settings = node.settings
            saves = SaveQueue(
                node,
                budget_bytes=int(settings.save_queue_bytes),
                overflow=settings.save_overflow,
                made_by=compat.made_by(),
            )
            node.keep_levels(saves.levels)
        self.worker = WorkerHalf(
            node,
            saves=saves,
            device=compat.current_device,
            rank=compat.loading_rank,
            drain_timeout_s=4.0 if transfer.is_ec_consumer else 30.0,
        )


def _release(early: Future[_Early]) -> None:
    if early.exception() is None and (node := early.result()[1]) is not None:
        node.release(_SHUTDOWN_TIMEOUT_S)


def _is_for_us(vllm_config: Any, settings: Settings) -> bool:
    """Return True if s3ec can work in this engine; log the reason for False.

    Raises:
        ConfigError: Something must be changed first.
    """
    problem = model_problem(vllm_config)
    if problem is None and (release := compat.release_problem()) is not None:
        problem = f"{release}. s3ec stays inactive"
    if problem is None:
        problem = live_weights_problem(vllm_config, settings)
    if problem is not None:
        log.warning("%s", problem)
        return False
    for field, wrong in (
        ("mm_processor_cache_gb", identifier_problem(vllm_config)),
        ("trust_client_ids", trust_problem(vllm_config, settings)),
    ):
        if wrong is not None:
            raise ConfigError(wrong, field=field)
    return True


def _role_of(vllm_config: Any, settings: Settings, *, can_load: bool) -> Role:
    this = compat.release(compat.vllm_version())
    transfer = vllm_config.ec_transfer_config
    # Then nothing is stored from the device: a hit there is no second encode.
    saves_worth = settings.save == "worth" and transfer.is_ec_consumer
    lora = getattr(vllm_config, "lora_config", None)
    tower_adapters = bool(getattr(lora, "enable_tower_connector_lora", False))
    if tower_adapters:
        log.warning(
            "images of requests with a LoRA adapter are neither loaded nor saved, since adapters "
            "may change the encoder (--enable-tower-connector-lora) and their names say nothing of "
            "their files"
        )
    return Role(
        producer=transfer.is_ec_producer,
        consumer=transfer.is_ec_consumer,
        # A drafter looks one token ahead; a few more cost nothing.
        window_tokens=vllm_config.scheduler_config.max_num_batched_tokens + 16,
        ranks=loading_ranks(vllm_config),
        steps_in_flight=vllm_config.max_concurrent_batches,
        defer_timeout_s=0.0 if settings.wait == "never" else settings.defer_timeout_s,
        asked_every_pass=this is None or this >= (0, 30),
        can_load=can_load,
        stores_again=compat.installed_hooks()["start_save_caches"] and not saves_worth,
        unshared=forms.unshared_modalities(vllm_config.model_config),
        tower_adapters=tower_adapters,
    )


def _policy_of(role: Role, settings: Settings, costs: EncodeCosts) -> WaitPolicy | None:
    """Return the policy that weighs waits; None if every wait is worth it, or none is."""
    if settings.wait != "auto" or not role.consumer or not role.defer_timeout_s:
        return None
    return WaitPolicy(costs, EngineLoad(role.steps_in_flight))


def _seen_of(role: Role, settings: Settings) -> SeenKeys | None:
    """Return the memory of encoded keys; None if everything is stored, or nothing."""
    if settings.save == "always" or not role.producer:
        return None
    if not role.consumer:
        log.warning(
            "everything is stored in spite of `save` = worth: others count on what an "
            "`ec_producer` encodes, be it a job or the encoder of a language instance"
        )
        return None
    return SeenKeys()
