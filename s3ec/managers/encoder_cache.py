# SPDX-License-Identifier: Apache-2.0
"""vLLM's encoder-cache manager (0.32 and newer) with another choice of victims.

``--ec-manager-config '{"encoder_cache_manager_cls": "s3ec.TieredEncoderCacheManager"}'`` turns one
on, with any connector or none. vLLM's own bookkeeping is kept: slots, holders, freed entries.
"""

from __future__ import annotations

import logging
from typing import Any

from vllm.v1.core import encoder_cache_manager as vllm_managers

from s3ec.errors import ConfigError
from s3ec.managers.restore import Owner, owner_of
from s3ec.managers.victims import LeastRecent, LeastWorth

log = logging.getLogger(__name__)

if not hasattr(vllm_managers.EncoderCacheManager, "create_manager"):
    raise ConfigError(
        "encoder_cache_manager_cls: this vLLM cannot replace its encoder-cache manager; use 0.32 "
        "or newer, or leave --ec-manager-config out",
        field="encoder_cache_manager_cls",
    )

# Without measurements, entries are compared by their rows.
_UNKNOWN_ROW_S = 1e-4


class _Manager(vllm_managers.EncoderCacheManager):  # type: ignore[misc]
    """The part that both managers share: how vLLM creates them."""

    @classmethod
    def create_manager(cls, *, cache_size: int, vllm_config: Any) -> Any:
        """Create the manager of one scheduler.

        Args:
            cache_size: Rows of embeddings that the device holds.
            vllm_config: vLLM's VllmConfig.

        Returns:
            The manager; vLLM's own for encoder-decoder models, which share nothing between
            requests.

        Raises:
            ConfigError: ``manager_config`` is not empty.
        """
        config = vllm_config.ec_manager_config.manager_config
        if config:
            raise ConfigError(
                f"manager_config: {cls.__name__} has no settings, and there is "
                f"{', '.join(map(repr, config))}; leave `manager_config` out",
                field="manager_config",
            )
        if vllm_config.model_config.is_encoder_decoder:
            log.warning(
                "%s is not used: an encoder-decoder model shares no embeddings between requests",
                cls.__name__,
            )
            return vllm_managers.EncoderDecoderCacheManager(cache_size=cache_size)
        manager = cls(cache_size)
        manager.follow(owner_of(vllm_config))
        log.info("%s for %d rows on the device", cls.__name__, cache_size)
        return manager

    def follow(self, owner: Owner | None) -> None:
        """Work with this connector of the engine; None if the engine has none of ours."""
        if owner is not None:
            owner.follow_device(self.cached)

    def can_allocate(
        self,
        request: Any,
        input_id: int,
        encoder_compute_budget: int,
        num_embeds_to_schedule: int,
    ) -> bool:
        """As vLLM's; spares the items that the request needs next, see ``victims``."""
        features, spared = request.mm_features, set()
        if input_id + 1 < len(features):
            rows = num_embeds_to_schedule + request.get_num_encoder_embeds(input_id)
            if rows > self.num_free_slots:  # else nothing must be evicted
                spared = {feature.identifier for feature in features[input_id + 1 :]}
        self.freeable.spared = spared
        return bool(
            super().can_allocate(request, input_id, encoder_compute_budget, num_embeds_to_schedule)
        )


class LRUEncoderCacheManager(_Manager):
    """Evicts the embedding that was accessed longest ago.

    vLLM's own manager evicts the embedding that was released longest ago. The two differ if
    requests hold embeddings for a long time.
    """

    def __init__(self, cache_size: int) -> None:
        """Start an empty cache of ``cache_size`` rows."""
        super().__init__(cache_size)
        self.freeable = LeastRecent()

    def check_and_update_cache(self, request: Any, input_id: int) -> bool:
        """As vLLM's; a hit is an access."""
        if not super().check_and_update_cache(request, input_id):
            return False
        self.freeable.accessed(request.mm_features[input_id].identifier)
        return True

    def allocate(self, request: Any, input_id: int) -> None:
        """As vLLM's; an allocation is an access."""
        super().allocate(request, input_id)
        self.freeable.accessed(request.mm_features[input_id].identifier)


class TieredEncoderCacheManager(_Manager):
    """Evicts the embedding with the lowest worth: rarely requested, large, and fast to restore.

    The connector estimates the time to restore an embedding: from whether this node's disk or the
    bucket holds it, and from how long loads, fetches and encodes took. Without the connector every
    embedding counts as encoded again. See ``LeastWorth``.
    """

    def __init__(self, cache_size: int) -> None:
        """Start an empty cache of ``cache_size`` rows."""
        super().__init__(cache_size)
        self._owner: Owner | None = None
        self.freeable = LeastWorth(self._restore_s)

    def follow(self, owner: Owner | None) -> None:
        """As the base's; this connector estimates the time to restore an embedding."""
        super().follow(owner)
        self._owner = owner

    def _restore_s(self, identifier: str, modality: str, rows: int) -> float:
        costs = None if self._owner is None else self._owner.restore_costs
        if costs is not None:
            try:
                return costs.restore_s(identifier, modality, rows)
            except Exception:  # our fault in vLLM's scheduler would kill the engine
                self._owner = None
                log.exception("the connector is asked no more what embeddings cost")
        return _UNKNOWN_ROW_S * rows

    def check_and_update_cache(self, request: Any, input_id: int) -> bool:
        """As vLLM's; a hit of a request that did not hold it is an access."""
        identifier = request.mm_features[input_id].identifier
        holders = self.cached.get(identifier)
        if holders is None:
            return False
        is_access = request.request_id not in holders
        if not super().check_and_update_cache(request, input_id):
            return False
        if is_access:
            self.freeable.hit(identifier)
        return True

    def allocate(self, request: Any, input_id: int) -> None:
        """As vLLM's; an allocation is an access."""
        super().allocate(request, input_id)
        feature = request.mm_features[input_id]
        self.freeable.allocated(
            feature.identifier, feature.modality, self.num_embeds_by_hash[feature.identifier]
        )
