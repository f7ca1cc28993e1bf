# SPDX-License-Identifier: Apache-2.0
"""Counts where the encoder inputs of requests were found: on the device, on this node, elsewhere.

vLLM asks its connector only for what the device lacks. What the device had shows in the step: a
request goes past an input that nobody was asked for. So both are counted where the step is known,
from memory and without a look at vLLM's encoder-cache manager.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from s3ec.connector.vllm_config import PASSED_THROUGH
from s3ec.counters import Counters

# What an input that the device lacked adds to the counters. The tiers are asked one after the
# other, so a tier's misses are the next one's hits and misses together.
FROM_NODE = {"hits": 1, "lookups.device.miss": 1, "lookups.node.hit": 1}
FROM_BUCKET = {
    "hits": 1,
    "lookups.device.miss": 1,
    "lookups.node.miss": 1,
    "lookups.bucket.hit": 1,
}
FROM_NOWHERE = {
    "misses": 1,
    "lookups.device.miss": 1,
    "lookups.node.miss": 1,
    "lookups.bucket.miss": 1,
}


@dataclass(slots=True)
class _Inputs:
    """The encoder inputs of one request.

    Attributes:
        positions: Of all of them, in the prompt; None of what is no embedding of ours.
        left: Numbers of those that no step has needed yet, in the order of the prompt.
    """

    positions: list[Any]
    left: list[int]


class DeviceLookups:
    """Says which inputs the device held already when a step needed them. The scheduler's thread.

    A request's input is

    ========  =========  ====================================================================
    state     goes to    when
    ========  =========  ====================================================================
    left      passed     it was allocated: the device lacked it, and the half has counted it
    left      passed     the KV cache holds its tokens: nobody needs it
    left      hit        a step needs a row of it, and it was not allocated
    passed    left       its request was preempted, and begins again; so does a hit
    ========  =========  ====================================================================
    """

    def __init__(self, counters: Counters) -> None:
        """Start with no request.

        Args:
            counters: Where hits are counted.
        """
        self._counters = counters
        self._prefilling: dict[str, _Inputs] = {}  # have something left
        self._prefilled: dict[str, _Inputs] = {}  # might be preempted
        self._allocated: dict[str, set[int]] = {}  # in this pass

    def allocated(self, request_id: str, index: int) -> None:
        """The device lacked this input of a request that is being scheduled."""
        allocated = self._allocated.get(request_id)
        if allocated is None:
            allocated = self._allocated[request_id] = set()
        allocated.add(index)

    def end_pass(self, output: Any) -> None:
        """A pass has ended.

        Args:
            output: vLLM's SchedulerOutput.
        """
        scheduled = output.num_scheduled_tokens
        for one in output.scheduled_new_reqs:
            if one.mm_features:
                positions = [
                    None if feature.modality == PASSED_THROUGH else feature.mm_position
                    for feature in one.mm_features
                ]
                name = one.req_id
                self._prefilled.pop(name, None)
                inputs = _Inputs(positions, list(range(len(positions))))
                self._prefilling[name] = inputs
                self._pass(name, inputs, one.num_computed_tokens, scheduled.get(name, 0))
        cached = output.scheduled_cached_reqs
        for name in cached.resumed_req_ids:
            inputs_again = self._prefilling.get(name) or self._prefilled.pop(name, None)
            if inputs_again is not None:
                inputs_again.left = list(range(len(inputs_again.positions)))
                self._prefilling[name] = inputs_again
        if self._prefilling:
            for name, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
                going_on = self._prefilling.get(name)
                if going_on is not None:
                    self._pass(name, going_on, computed, scheduled.get(name, 0))
        self._allocated.clear()

    def _pass(self, name: str, inputs: _Inputs, computed: int, tokens: int) -> None:
        """A step computes so many tokens of a request, after so many."""
        allocated: Collection[int] = self._allocated.get(name, ())
        end = computed + tokens
        left: list[int] = []
        hits = 0
        for number, index in enumerate(inputs.left):
            position = inputs.positions[index]
            if position is None or index in allocated:
                continue
            if position.offset >= end:
                # A drafter looks ahead, so one of these may be allocated already.
                left += (one for one in inputs.left[number:] if one not in allocated)
                break
            if position.offset + position.length <= computed:
                continue
            if has_rows(position, computed, end):
                hits += 1
            else:
                left.append(index)
        inputs.left = left
        if hits:
            self._counters.add("lookups.device.hit", hits)
        if not left:
            del self._prefilling[name]
            self._prefilled[name] = inputs

    def end_request(self, request_id: str) -> None:
        """The request has ended."""
        self._prefilling.pop(request_id, None)
        self._prefilled.pop(request_id, None)

    @property
    def requests(self) -> Iterable[str]:
        """Whose inputs are remembered."""
        return [*self._prefilling, *self._prefilled]


def has_rows(position: Any, begin: int, end: int) -> bool:
    """Whether any row of an input belongs to a token in this range: some tokens have none."""
    if getattr(position, "is_embed", None) is None:
        return True
    low = max(begin - position.offset, 0)
    high = min(end - position.offset, position.length)
    first, last = position.get_embeds_indices_in_range(low, high)
    return bool(first < last)
