# SPDX-License-Identifier: Apache-2.0
"""Where the connector of an engine and the manager of its encoder cache find each other.

The connector knows what it would take to have an embedding again: it holds in memory what lies on
this node and in the bucket, and what fetches and encodes have taken. The manager knows at each
moment what the device holds. Both are made one after the other for the same ``VllmConfig``, and
neither is told of the other. So the connector leaves its name here.
"""

from __future__ import annotations

import weakref
from collections.abc import Container
from typing import Protocol


class RestoreCosts(Protocol):
    """What bringing an embedding back costs."""

    def restore_s(self, identifier: str, modality: str, rows: int) -> float:
        """Seconds until the device would have it again, by what was measured. Memory only.

        Args:
            identifier: vLLM's ``mm_hash``.
            modality: Of the item.
            rows: Of the embedding.
        """


class Owner(Protocol):
    """What has such costs while it works."""

    @property
    def restore_costs(self) -> RestoreCosts | None:
        """None before the start and after the end."""

    def follow_device(self, held: Container[str]) -> None:
        """Take what the device holds at each moment, under vLLM's names; the manager's own dict."""


# An owner keeps the configuration alive, so no other one can get its number meanwhile.
_owners: weakref.WeakValueDictionary[int, Owner] = weakref.WeakValueDictionary()


def register(vllm_config: object, owner: Owner) -> None:
    """Name the connector of an engine; the last one counts.

    Args:
        vllm_config: The engine's, which the owner must hold.
        owner: Held weakly.
    """
    _owners[id(vllm_config)] = owner


def owner_of(vllm_config: object) -> Owner | None:
    """The connector of this engine; None where it has none of ours."""
    return _owners.get(id(vllm_config))
