# SPDX-License-Identifier: Apache-2.0
"""The managers keep the contract of vLLM's own, on random traces of what a scheduler does.

Beside each runs a plain account of who holds what. So whatever order the victims have: slots add
up, nothing that is held goes, and what went is told once.
"""

from __future__ import annotations

import random
import warnings
from collections import Counter, defaultdict
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch warns of its own parts as vLLM imports them
    from vllm.v1.core.encoder_cache_manager import EncoderCacheManager

    from s3ec.managers.encoder_cache import LRUEncoderCacheManager, TieredEncoderCacheManager

PICTURES = 24
ROWS = {f"picture-{number}": 8 * (1 + number % 3) for number in range(PICTURES)}
CACHE_ROWS = 128
EVENTS = 2_000


class Asked:
    """A request as a manager sees it."""

    def __init__(self, name: str, pictures: list[str]) -> None:
        self.request_id = name
        self.mm_features = [
            SimpleNamespace(identifier=picture, modality="image") for picture in pictures
        ]

    def get_num_encoder_embeds(self, input_id: int) -> int:
        return ROWS[self.mm_features[input_id].identifier]


class Trace:
    """A scheduler's calls, in the order of vLLM 0.32's, and what must be true after each."""

    def __init__(self, manager_class: type[Any], seed: int) -> None:
        self.rnd = rnd = random.Random(seed)
        self.manager = manager_class(CACHE_ROWS)
        self.seconds = {picture: rnd.uniform(1e-4, 1.0) for picture in ROWS}
        if isinstance(self.manager, TieredEncoderCacheManager):
            costs = SimpleNamespace(restore_s=lambda picture, *_: self.seconds[picture])
            owner = SimpleNamespace(restore_costs=costs, follow_device=lambda held: None)
            self.manager.follow(owner)
        self.popular = rnd.sample(sorted(ROWS), 6)
        self.requests: dict[str, Asked] = {}
        self.holders: dict[str, set[tuple[str, int]]] = defaultdict(set)
        self.on_device: set[str] = set()  # as the workers hold it, told of what was freed
        self.accessed: dict[str, int] = {}
        self.stat: Counter[str] = Counter()

    def run(self) -> Counter[str]:
        events = [self.arrive] * 3 + [self.schedule] * 6 + [self.free_one] * 3
        events += [self.end] * 3 + [self.preempt, self.change_cost]
        for _ in range(EVENTS):
            event = self.reset if self.rnd.random() < 0.002 else self.rnd.choice(events)
            event()
            self.check()
        return self.stat

    def arrive(self) -> None:
        if len(self.requests) == 8:
            return
        self.stat["requests"] += 1
        count = self.rnd.choice([1, 1, 2, 4])
        among = [sorted(ROWS), self.popular]
        pictures = [self.rnd.choice(self.rnd.choice(among)) for _ in range(count)]
        name = f"request-{self.stat['requests']}"
        self.requests[name] = Asked(name, pictures)

    def any_request(self) -> Asked | None:
        names = list(self.requests)
        return self.requests[self.rnd.choice(names)] if names else None

    def note(self, request: Asked, input_id: int) -> None:
        picture = request.mm_features[input_id].identifier
        self.holders[picture].add((request.request_id, input_id))
        self.stat["accesses"] += 1
        self.accessed[picture] = self.stat["accesses"]

    def schedule(self) -> None:
        """One pass over the items of a request, with the allocations at its end."""
        request = self.any_request()
        if request is None:
            return
        manager = self.manager
        planned: set[str] = set()
        inputs, duplicates, rows = [], [], 0
        for input_id, feature in enumerate(request.mm_features):
            picture = feature.identifier
            if picture in planned:
                duplicates.append(input_id)
                continue
            was_here = picture in manager.cached
            expected = ROWS[picture] if was_here else None
            assert manager.get_cached_num_encoder_embeds(request, input_id) == expected
            assert manager.check_and_update_cache(request, input_id) is was_here
            if was_here:
                self.note(request, input_id)
                continue
            freeable = set(manager.freeable)
            if not manager.can_allocate(request, input_id, CACHE_ROWS - rows, rows):
                self.stat["no room"] += 1
                break
            following = {one.identifier for one in request.mm_features[input_id + 1 :]}
            self.check_victims(freeable - set(manager.cached), freeable, following)
            planned.add(picture)
            rows += ROWS[picture]
            inputs.append(input_id)
        for input_id in inputs:
            manager.allocate(request, input_id)
            self.note(request, input_id)
            self.on_device.add(request.mm_features[input_id].identifier)
        for input_id in duplicates:
            assert manager.check_and_update_cache(request, input_id)
            self.note(request, input_id)
        self.tell_workers()

    def check_victims(self, gone: set[str], freeable: set[str], following: set[str]) -> None:
        """Whether the right ones went; what the request wants next goes last of all."""
        self.stat["evicted"] += len(gone)
        assert not any(self.holders[picture] for picture in gone)
        stayed = freeable - gone
        if type(self.manager) is EncoderCacheManager:
            return
        if gone & following:
            assert stayed <= following
        elif freeable & following and gone:
            self.stat["spared"] += 1
        if isinstance(self.manager, LRUEncoderCacheManager):
            for those in (following, freeable - following):
                youngest = max((self.accessed[one] for one in gone & those), default=0)
                assert all(self.accessed[one] > youngest for one in stayed & those)

    def tell_workers(self) -> None:
        freed = self.manager.get_freed_mm_hashes()
        for picture in freed:
            self.on_device.remove(picture)  # told once, and of nothing that was not there
        assert self.manager.get_freed_mm_hashes() == []
        assert self.on_device == set(self.manager.cached)

    def free_one(self) -> None:
        """The tokens of an item are computed."""
        request = self.any_request()
        held = [] if request is None else sorted(self.manager.get_cached_input_ids(request))
        if request is None or not held:
            return
        input_id = self.rnd.choice(held)
        self.manager.free_encoder_input(request, input_id)
        picture = request.mm_features[input_id].identifier
        self.holders[picture].discard((request.request_id, input_id))

    def preempt(self) -> None:
        request = self.any_request()
        if request is None:
            return
        self.manager.free(request)
        for by in self.holders.values():
            by -= {one for one in by if one[0] == request.request_id}

    def end(self) -> None:
        request = self.any_request()
        if request is not None:
            del self.requests[request.request_id]
            self.manager.free(request)
            for by in self.holders.values():
                by -= {one for one in by if one[0] == request.request_id}

    def reset(self) -> None:
        """As vLLM does when the weights change; no request holds anything after that."""
        self.manager.reset()
        self.holders.clear()
        self.on_device.clear()

    def change_cost(self) -> None:
        """This node's disk evicts it, or gets it."""
        self.seconds[self.rnd.choice(sorted(ROWS))] = self.rnd.uniform(1e-4, 1.0)

    def check(self) -> None:
        manager = self.manager
        held = {picture for picture, by in manager.cached.items() if by}
        assert held == {picture for picture, by in self.holders.items() if by}
        assert set(manager.freeable) == set(manager.cached) - held
        taken = sum(ROWS[picture] for picture in manager.cached)
        assert manager.num_free_slots == CACHE_ROWS - taken >= 0
        assert manager.num_freeable_slots == CACHE_ROWS - sum(ROWS[one] for one in held)


MANAGERS = [EncoderCacheManager, LRUEncoderCacheManager, TieredEncoderCacheManager]


@pytest.mark.parametrize("manager", MANAGERS, ids=["fifo", "lru", "tiered"])
@pytest.mark.parametrize("seed", range(4))
def test_slots_add_up_and_nothing_held_goes_and_what_went_is_told_once(
    manager: type[Any], seed: int
) -> None:
    stat = Trace(manager, seed).run()
    assert stat["evicted"] > 50
    assert stat["no room"]
    if manager is not EncoderCacheManager:
        assert stat["spared"]
