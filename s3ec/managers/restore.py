# SPDX-License-Identifier: Apache-2.0
"""Where the connector of an engine and the manager of its encoder cache find each other.

The connector can estimate the time to restore an embedding: it knows, in memory, which embeddings
are on this node and in the bucket, and how long fetches and encodes took. The manager knows at each
moment which embeddings the device holds. vLLM creates both for the same ``VllmConfig``, one after
the other, and gives neither a reference to the other. So the connector registers itself here.
"""

from __future__ import annotations

import weakref
from collections.abc import Container
from typing import Protocol


class RestoreCosts(Protocol):
    """Estimates the cost of restoring an embedding."""

    def restore_s(self, identifier: str, modality: str, rows: int) -> float:
        """Estimate the seconds until the device has it again, from measurements. Memory only.

        Args:
            identifier: vLLM's ``mm_hash``.
            modality: Modality of the item.
            rows: Rows of the embedding.
        """


class Owner(Protocol):
    """A connector, which has such costs while it runs."""

    @property
    def restore_costs(self) -> RestoreCosts | None:
        """None before the start and after the end."""

    def follow_device(self, held: Container[str]) -> None:
        """Take the manager's own dict: the embeddings on the device now, under vLLM's names."""


# An owner keeps the configuration alive, so no other configuration can get its id meanwhile.
_owners: weakref.WeakValueDictionary[int, Owner] = weakref.WeakValueDictionary()


def register(vllm_config: object, owner: Owner) -> None:
    """Register the connector of an engine; the last one counts.

    Args:
        vllm_config: The engine's configuration, which the owner must hold.
        owner: Held weakly.
    """
    _owners[id(vllm_config)] = owner


def owner_of(vllm_config: object) -> Owner | None:
    """Return the connector of this engine; None if it has none of ours."""
    return _owners.get(id(vllm_config))
