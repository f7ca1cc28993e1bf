# SPDX-License-Identifier: Apache-2.0
"""Follows requests past their encoder inputs, and counts where those were found.

vLLM asks its connector only for inputs that are missing on the device. An input that the device
had shows in the step: a request advances past it without asking the connector. So both are counted
once the step is known, from memory and without reading vLLM's encoder-cache manager.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from s3ec.connector.vllm_config import PASSED_THROUGH
from s3ec.counters import Counters

# Increments for an input that the device lacked. The tiers are asked one after the other, so a
# tier's misses are the sum of the next one's hits and misses.
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
REASONS = ("absent", "declined", "late", "failed", "unfit", "down", "unshared", "stopped")
"""Why an input was encoded; ``metrics.py`` says what each means."""
ENCODED = {reason: {**FROM_NOWHERE, f"encoded.{reason}": 1} for reason in REASONS}


@dataclass(slots=True)
class _Inputs:
    """The encoder inputs of one request.

    Attributes:
        features: vLLM's own list, which grows with each turn of a session.
        computed: Computed tokens of the request, at the last check.
        behind: Number of inputs, from the first one on, that lie within those tokens.
        end: Tokens that are computed when the last step has ended.
        passed: Positions of the other inputs that steps needed: their embeddings were on the device
            or were allocated.
    """

    features: Sequence[Any]
    computed: int = 0
    behind: int = 0
    end: int = 0
    passed: set[int] = field(default_factory=set)

    def look(self, computed: int) -> int:
        """Return the first input with tokens left. Each call resumes where the last one ended."""
        if computed < self.computed:
            self.behind = 0
        self.computed = computed
        while self.behind < len(self.features) and is_behind(self.features[self.behind], computed):
            self.behind += 1
        return self.behind


class DeviceLookups:
    """Counts the inputs that the device held when a step needed them. Scheduler's thread only.

    A request's input is

    ========  =========  ====================================================================
    state     goes to    when
    ========  =========  ====================================================================
    left      passed     it was allocated: the device lacked it, and the half has counted it
    left      behind     the KV cache holds its tokens: it is not needed
    left      passed     a step needs a row of it, and it was not allocated: a hit
    passed    behind     the KV cache holds its tokens
    any       left       its request was preempted or rewound, and begins again; the
                         device was reset
    ========  =========  ====================================================================

    vLLM keeps an input that a running request has passed on the device until it is behind.

    Attributes:
        inputs: By request. Read-only.
    """

    def __init__(self, counters: Counters) -> None:
        """Start with no request.

        Args:
            counters: Counts the hits.
        """
        self._counters = counters
        self.inputs: dict[str, _Inputs] = {}
        self._prefilling: dict[str, _Inputs] = {}  # requests with inputs that are not behind
        self._allocated: dict[str, set[int]] = {}  # in this pass

    def allocated(self, request_id: str, index: int) -> None:
        """Note that the device lacked this input of a request that is being scheduled."""
        self._allocated.setdefault(request_id, set()).add(index)

    def ahead(self, request: Any, computed: int) -> Sequence[Any]:
        """Return the features to look up.

        The result omits the first features that are in the KV cache, of which a session has
        thousands, and those that the device keeps for this request until they are behind.
        """
        features = request.mm_features
        inputs = self.inputs.get(request.request_id)
        if inputs is None:
            if not is_behind(features[0], computed):
                return features  # type: ignore[no-any-return]
            inputs = self.inputs[request.request_id] = _Inputs(features)
        # A request that is rewound, since its KV cache is not available, lost its embeddings.
        is_same = computed >= inputs.end
        first = inputs.look(computed)
        left = features[first:]
        passed = inputs.passed
        # So did a preempted one.
        if not passed or not is_same or request.status.name != "RUNNING":
            return left  # type: ignore[no-any-return]
        return [one for place, one in enumerate(left, first) if place not in passed]

    def device_was_reset(self) -> None:
        """Drop what requests have passed: the device holds nothing any more."""
        for inputs in self.inputs.values():
            inputs.passed.clear()

    def end_pass(self, output: Any) -> None:
        """Count the device's hits of a pass that has ended.

        Args:
            output: vLLM's SchedulerOutput.
        """
        scheduled = output.num_scheduled_tokens
        for one in output.scheduled_new_reqs:
            if one.mm_features:
                name = one.req_id
                inputs = self._begin(name, one.mm_features)
                self._pass(name, inputs, one.num_computed_tokens, scheduled.get(name, 0))
        cached = output.scheduled_cached_reqs
        for name in cached.resumed_req_ids:
            if name in self.inputs:
                self._begin(name, self.inputs[name].features)
        if self._prefilling:
            for name, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
                going_on = self._prefilling.get(name)
                if going_on is not None:
                    self._pass(name, going_on, computed, scheduled.get(name, 0))
        self._allocated.clear()

    def _begin(self, name: str, features: Sequence[Any]) -> _Inputs:
        """Start a request: no step has needed any of its inputs."""
        inputs = self._prefilling[name] = self.inputs.setdefault(name, _Inputs(features))
        inputs.features, inputs.end = features, 0
        inputs.passed.clear()
        return inputs

    def _pass(self, name: str, inputs: _Inputs, computed: int, tokens: int) -> None:
        """Count the hits of a step that computes ``tokens`` tokens after the ``computed`` ones."""
        if computed < inputs.end:
            inputs.passed.clear()
        behind = inputs.look(computed)
        end = inputs.end = computed + tokens
        passed = inputs.passed
        passed -= {place for place in passed if place < behind}
        passed.update(self._allocated.get(name, ()))
        features = inputs.features
        hits = 0
        is_left = False
        for place in range(behind, len(features)):
            feature = features[place]
            is_left = is_left or not is_behind(feature, end)
            if feature.mm_position.offset >= end:
                break
            if place in passed or is_behind(feature, computed):
                continue
            if feature.modality == PASSED_THROUGH:
                passed.add(place)
            elif has_rows(feature.mm_position, computed, end):
                passed.add(place)
                hits += 1
        if hits:
            self._counters.add("lookups.device.hit", hits)
        if not is_left:
            del self._prefilling[name]

    def end_request(self, request_id: str) -> None:
        """Drop the state of a request that has ended."""
        self.inputs.pop(request_id, None)
        self._prefilling.pop(request_id, None)


def is_behind(feature: Any, computed: int) -> bool:
    """Return True if all tokens of an input are among the first ``computed`` of its request."""
    position = feature.mm_position
    return bool(position.offset + position.length <= computed)


def has_rows(position: Any, begin: int, end: int) -> bool:
    """Return True if a token in [begin, end) has a row of the input: some tokens have none."""
    if getattr(position, "is_embed", None) is None:
        return True
    low = max(begin - position.offset, 0)
    high = min(end - position.offset, position.length)
    first, last = position.get_embeds_indices_in_range(low, high)
    return bool(first < last)
