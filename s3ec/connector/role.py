# SPDX-License-Identifier: Apache-2.0
"""What one vLLM instance does with its encoder cache, as far as scheduling depends on it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Role:
    """What this vLLM instance does.

    Attributes:
        producer: It may store embeddings.
        consumer: It may load them. A producer that is no consumer runs no language model.
        window_tokens: Most tokens that one step can schedule for a request.
        ranks: Workers that load every granted item (tensor parallel size).
        steps_in_flight: Steps that can be scheduled before the first of them has ended.
        defer_timeout_s: Longest deferral of a request in all.
        asked_every_pass: Whether vLLM calls ensure_cache_available for a request in every
            pass that schedules it (0.30 and newer), or only before its first one.
        can_load: Whether the workers can be told to load. Where nothing would tell that all of
            them hold an embedding, nothing is granted.
        stores_again: Workers can store what the device holds already (vLLM's hook
            ``start_save_caches``, 0.30 and newer).
    """

    producer: bool
    consumer: bool
    window_tokens: int
    ranks: int
    steps_in_flight: int
    defer_timeout_s: float
    asked_every_pass: bool = True
    can_load: bool = True
    stores_again: bool = True
