# SPDX-License-Identifier: Apache-2.0
"""The managers keep the contract of vLLM's own, on random traces of what a scheduler does.

Beside each runs a plain account of who holds what. So whatever order the victims have: slots add
up, nothing that is held goes, and what went is told once.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

pytest.importorskip("vllm")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch warns of its own parts as vLLM imports them
    from vllm.v1.core.encoder_cache_manager import EncoderCacheManager

    from s3ec.managers import LRUEncoderCacheManager, TieredEncoderCacheManager

PICTURES = 8
ROWS = {number: 8 * (1 + number % 3) for number in range(PICTURES)}
CACHE_ROWS = 64
BUDGET = CACHE_ROWS


def feature(number: int) -> Any:
    return SimpleNamespace(identifier=f"picture-{number}", modality="image", rows=ROWS[number])


class Asked:
    """A request as a manager sees it."""

    def __init__(self, name: str, numbers: list[int]) -> None:
        self.request_id = name
        self.mm_features = [feature(number) for number in numbers]

    def get_num_encoder_embeds(self, input_id: int) -> int:
        return int(self.mm_features[input_id].rows)


class Contract(RuleBasedStateMachine):
    """A scheduler's calls, in vLLM 0.32's order, and what must be true after each."""

    manager_class: type[Any] = EncoderCacheManager

    @initialize(seconds=st.lists(st.floats(1e-4, 1.0), min_size=PICTURES, max_size=PICTURES))
    def start(self, seconds: list[float]) -> None:
        self.manager = self.manager_class(CACHE_ROWS)
        self.seconds = {f"picture-{number}": value for number, value in enumerate(seconds)}
        if isinstance(self.manager, TieredEncoderCacheManager):
            costs = SimpleNamespace(restore_s=lambda name, *_: self.seconds[name])
            self.manager.follow(SimpleNamespace(restore_costs=costs))
        self.requests: dict[str, Asked] = {}
        self.names = 0
        self.holders: dict[str, set[tuple[str, int]]] = defaultdict(set)
        self.on_device: dict[str, int] = {}  # as the workers hold it, told of what was freed
        self.accessed: dict[str, int] = {}
        self.accesses = 0

    @rule(numbers=st.lists(st.integers(0, PICTURES - 1), min_size=1, max_size=4))
    def arrive(self, numbers: list[int]) -> None:
        self.names += 1
        self.requests[f"r{self.names}"] = Asked(f"r{self.names}", numbers)

    def note(self, request: Asked, input_id: int) -> None:
        name = request.mm_features[input_id].identifier
        self.holders[name].add((request.request_id, input_id))
        self.accesses += 1
        self.accessed[name] = self.accesses

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def schedule(self, data: st.DataObject) -> None:
        """One pass over the items of a request, allocations at its end."""
        request = self.requests[data.draw(st.sampled_from(sorted(self.requests)))]
        planned: dict[str, int] = {}
        inputs, duplicates, rows = [], [], 0
        for input_id, one in enumerate(request.mm_features):
            if one.identifier in planned:
                duplicates.append(input_id)
                continue
            cached = self.manager.get_cached_num_encoder_embeds(request, input_id)
            assert cached in (None, one.rows)
            was_here = one.identifier in self.manager.cached
            assert self.manager.check_and_update_cache(request, input_id) is was_here
            if was_here:
                self.note(request, input_id)
                continue
            held = {name for name, by in self.holders.items() if by}
            freeable = set(self.manager.cached) - held
            if not self.manager.can_allocate(request, input_id, BUDGET - rows, rows):
                break
            gone = freeable - set(self.manager.cached)
            self.check_victims(gone, freeable)
            planned[one.identifier] = one.rows
            rows += one.rows
            inputs.append(input_id)
        for input_id in inputs:
            self.manager.allocate(request, input_id)
            name = request.mm_features[input_id].identifier
            self.note(request, input_id)
            self.on_device[name] = request.mm_features[input_id].rows
        for input_id in duplicates:
            assert self.manager.check_and_update_cache(request, input_id)
            self.note(request, input_id)
        self.tell_workers()

    def check_victims(self, gone: set[str], freeable: set[str]) -> None:
        """Whether the right ones went, where that can be said."""
        for name in gone:
            assert not self.holders[name]
        if self.manager_class is LRUEncoderCacheManager and gone:
            stayed = freeable - gone
            oldest = max(self.accessed[name] for name in gone)
            assert all(self.accessed[name] > oldest for name in stayed)

    def tell_workers(self) -> None:
        freed = self.manager.get_freed_mm_hashes()
        assert len(freed) == len(set(freed))
        for name in freed:
            del self.on_device[name]  # told once, and of nothing that never was there
        assert self.manager.get_freed_mm_hashes() == []
        assert set(self.on_device) == set(self.manager.cached)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def free_one(self, data: st.DataObject) -> None:
        request = self.requests[data.draw(st.sampled_from(sorted(self.requests)))]
        held = sorted(self.manager.get_cached_input_ids(request))
        assume(held)
        input_id = data.draw(st.sampled_from(held))
        self.manager.free_encoder_input(request, input_id)
        self.holders[request.mm_features[input_id].identifier].discard(
            (request.request_id, input_id)
        )

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), ends=st.booleans())
    def free(self, data: st.DataObject, ends: bool) -> None:
        """It ends, or is preempted and comes back."""
        name = data.draw(st.sampled_from(sorted(self.requests)))
        self.manager.free(self.requests[name])
        for by in self.holders.values():
            by -= {one for one in by if one[0] == name}
        if ends:
            del self.requests[name]

    @rule()
    def reset(self) -> None:
        """As vLLM does when the weights change; no request holds anything after that."""
        self.manager.reset()
        self.holders.clear()
        self.on_device.clear()

    @rule(number=st.integers(0, PICTURES - 1), seconds=st.floats(1e-4, 1.0))
    def change_cost(self, number: int, seconds: float) -> None:
        """The node's disk evicts it, or gets it."""
        self.seconds[f"picture-{number}"] = seconds

    @invariant()
    def slots_add_up(self) -> None:
        manager = getattr(self, "manager", None)
        if manager is None:
            return
        taken = sum(manager.num_embeds_by_hash[name] for name in manager.cached)
        held = sum(
            manager.num_embeds_by_hash[name] for name in manager.cached if manager.cached[name]
        )
        assert manager.num_free_slots == CACHE_ROWS - taken >= 0
        assert manager.num_freeable_slots == CACHE_ROWS - held
        assert set(manager.freeable) == {name for name, by in manager.cached.items() if not by}
        wanted = {name for name, by in self.holders.items() if by}
        assert {name for name, by in manager.cached.items() if by} == wanted


class LRUContract(Contract):
    manager_class = LRUEncoderCacheManager


class TieredContract(Contract):
    manager_class = TieredEncoderCacheManager


TestVLLM = Contract.TestCase
TestLRU = LRUContract.TestCase
TestTiered = TieredContract.TestCase
TestVLLM.settings = TestLRU.settings = TestTiered.settings = settings(
    max_examples=60, stateful_step_count=60, deadline=None
)
