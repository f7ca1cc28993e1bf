# SPDX-License-Identifier: Apache-2.0
"""A scheduler half over a real node, asked as vLLM asks it: one picture by each request."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

from s3ec.connector.scheduler import SchedulerHalf
from s3ec.connector.vllm_config import Role
from s3ec.node import Node
from tests.faults.embeddings import ROWS, identifier_at
from tests.support.waiting import eventually


def half_of(
    node: Node, *, defer_timeout_s: float, clock: Callable[[], float] = time.monotonic
) -> SchedulerHalf:
    """A scheduler half that uses all that a node has."""
    return SchedulerHalf(
        Role(
            producer=True,
            consumer=True,
            window_tokens=8192,
            ranks=1,
            steps_in_flight=1,
            defer_timeout_s=defer_timeout_s,
        ),
        index=node.index,
        local=node.local,
        prefetcher=node.prefetcher,
        residents=node.residents,
        store=node.breaker,
        disk=node.loop.watch,
        needs_embedding=lambda _: False,
        placeholder_of=lambda _: {},
        counters=node.counters,
        clock=clock,
    )


class Lookups:
    """A scheduler that is asked for one picture by each of its requests.

    Attributes:
        fetched: How often a number was worth a fetch.
        granted: Those whose embedding was granted in the end.
    """

    def __init__(self, node: Node, clock: Callable[[], float]) -> None:
        self.half = half_of(node, defer_timeout_s=1e9, clock=clock)
        self.fetched: Counter[int] = Counter()
        self.granted: set[int] = set()

    def ask(self, numbers: Iterable[int]) -> None:
        """One request each; those that are worth a fetch wait until it has ended."""
        waiting = [n for n in numbers if not self._ensure(n)]
        self.fetched.update(waiting)
        self._step()
        for number in waiting:
            eventually(lambda number=number: self._asked_again(number))  # type: ignore[misc]
            if self.half.has_cache_item(identifier_at(number)):
                self.granted.add(number)
            self.half.request_finished(SimpleNamespace(request_id=f"r{number}"))
        self._step()

    def _ensure(self, number: int) -> bool:
        position = SimpleNamespace(offset=0, length=ROWS, get_num_embeds=lambda: ROWS)
        feature = SimpleNamespace(
            identifier=identifier_at(number), modality="image", data={}, mm_position=position
        )
        request: Any = SimpleNamespace(
            request_id=f"r{number}", mm_features=[feature], num_prompt_tokens=ROWS
        )
        return self.half.ensure_cache_available(request, 0)

    def _asked_again(self, number: int) -> bool:
        """In a pass of its own, as vLLM asks."""
        goes_on = self._ensure(number)
        if not goes_on:
            self._step()
        return goes_on

    def _step(self) -> None:
        self.half.build_connector_meta((), scheduled_tokens=1)
