# SPDX-License-Identifier: Apache-2.0
"""Replays who asked for which embedding against managers of the encoder cache.

The managers are the real ones. Played are the requests, which hold what they ask for until some
later ones have come, and what is behind the device: a node tier that keeps the embeddings used
last, and, where there is one, a bucket that keeps all.
"""

from __future__ import annotations

import heapq
import random
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.core.encoder_cache_manager import EncoderCacheManager

from s3ec.managers import LRUEncoderCacheManager, TieredEncoderCacheManager

FIFO, LRU, TIERED, OPTIMUM = "fifo", "lru", "tiered", "optimum"
POLICIES = (FIFO, LRU, TIERED, OPTIMUM)
_NEVER = 1 << 62


@dataclass(frozen=True, slots=True)
class Item:
    """One embedding: its name, and its rows."""

    identifier: str
    rows: int
    modality: str = "image"


@dataclass(frozen=True, slots=True)
class Costs:
    """What it takes to have an embedding of 256 rows on the device.

    Attributes:
        encode_s: By the encoder.
        node_s: From this node's disk.
        bucket_s: From the bucket; None where there is none.
    """

    encode_s: float
    node_s: float
    bucket_s: float | None = None


_COSTS_ROWS = 256


@dataclass(slots=True)
class Outcome:
    """What one replay came to.

    Attributes:
        device, node, bucket, encoded: Where the items were found.
        seconds: Encoding and loading, together.
        calls: Of the manager's methods.
        manager_ns: Spent in those, the clock's own time taken off.
    """

    device: int = 0
    node: int = 0
    bucket: int = 0
    encoded: int = 0
    seconds: float = 0.0
    calls: int = 0
    manager_ns: float = 0.0

    @property
    def accesses(self) -> int:
        """All of them."""
        return self.device + self.misses

    @property
    def misses(self) -> int:
        """Of the device."""
        return self.node + self.bucket + self.encoded

    @property
    def call_us(self) -> float:
        """Mean time of one call."""
        return self.manager_ns / max(self.calls, 1) / 1e3


class Below:
    """What is behind the device, and what a manager is told of it."""

    def __init__(self, node_rows: int, costs: Costs) -> None:
        """An empty node tier of so many rows; the bucket, where there is one, has everything."""
        self._node_rows = node_rows
        self._costs = costs
        self._node: OrderedDict[str, int] = OrderedDict()
        self._rows = 0
        self.restore_costs = self

    def restore_s(self, identifier: str, modality: str, rows: int) -> float:
        """As the connector has it."""
        costs, scale = self._costs, rows / _COSTS_ROWS
        if identifier in self._node:
            return min(costs.node_s, costs.encode_s) * scale
        if costs.bucket_s is not None:
            return min(costs.bucket_s, costs.encode_s) * scale
        return costs.encode_s * scale

    def follow_device(self, held: object) -> None:
        """Of no use here."""

    def fetch(self, item: Item, outcome: Outcome) -> None:
        """The device lacks it: where it comes from, and the node keeps it as the one used last."""
        outcome.seconds += self.restore_s(item.identifier, item.modality, item.rows)
        if item.identifier in self._node:
            outcome.node += 1
            self._node.move_to_end(item.identifier)
            return
        if self._costs.bucket_s is not None and self._costs.bucket_s < self._costs.encode_s:
            outcome.bucket += 1
        else:
            outcome.encoded += 1
        self._node[item.identifier] = item.rows
        self._rows += item.rows
        while self._rows > self._node_rows and len(self._node) > 1:
            self._rows -= self._node.popitem(last=False)[1]


class FurthestNext(OrderedDict[str, int]):
    """The victim is what is asked for again last of all (Belady, 1966).

    With items of one size no order has fewer misses. With several it is only close to that.
    """

    def __init__(self) -> None:
        super().__init__()
        self.next_use: dict[str, int] = {}
        self._heap: list[tuple[int, str]] = []

    def __setitem__(self, mm_hash: str, num_embeds: int) -> None:
        super().__setitem__(mm_hash, num_embeds)
        heapq.heappush(self._heap, (-self.next_use[mm_hash], mm_hash))

    def popitem(self, last: bool = True) -> tuple[str, int]:
        while True:
            negative, mm_hash = heapq.heappop(self._heap)
            if mm_hash in self and -negative == self.next_use[mm_hash]:
                return mm_hash, self.pop(mm_hash)


class _Optimum(EncoderCacheManager):  # type: ignore[misc]
    def __init__(self, cache_size: int) -> None:
        super().__init__(cache_size)
        self.freeable = FurthestNext()


_CLASSES: dict[str, type[Any]] = {
    FIFO: EncoderCacheManager,
    LRU: LRUEncoderCacheManager,
    TIERED: TieredEncoderCacheManager,
    OPTIMUM: _Optimum,
}


@dataclass(slots=True)
class _Request:
    """A request as a manager sees it."""

    request_id: str
    mm_features: Sequence[Item]

    def get_num_encoder_embeds(self, input_id: int) -> int:
        return self.mm_features[input_id].rows


def make_manager(policy: str, cache_rows: int, below: object) -> Any:
    """A manager whose engine has this behind it.

    Args:
        policy: One of POLICIES.
        cache_rows: Of the device.
        below: Has ``restore_costs``.
    """
    manager = _CLASSES[policy](cache_rows)
    if policy == TIERED:
        manager.follow(below)
    return manager


@dataclass
class Replay:
    """Requests in their order, against one manager.

    Attributes:
        requests: Their items.
        cache_rows: Of the device.
        node_rows: Of the node's tier.
        costs: What bringing an embedding takes.
        at_once: How many later requests come, in the mean, before one ends.
        seed: Of how long each lasts.
    """

    requests: Sequence[Sequence[Item]]
    cache_rows: int
    node_rows: int
    costs: Costs
    at_once: int = 8
    seed: int = 0
    _next_uses: list[list[int]] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        largest = max((item.rows for items in self.requests for item in items), default=0)
        if largest > self.cache_rows:
            raise ValueError(
                f"an embedding of {largest} rows does not fit into a cache of {self.cache_rows}"
            )

    def run(self, policy: str) -> Outcome:
        """Ask for all of it, one request after the other."""
        below = Below(self.node_rows, self.costs)
        manager = make_manager(policy, self.cache_rows, below)
        call = _Timed(manager)
        outcome = Outcome()
        lasts = random.Random(self.seed)
        alive: list[tuple[int, int, _Request]] = []  # by their ends
        next_use = manager.freeable.next_use if policy == OPTIMUM else None
        for number, items in enumerate(self.requests):
            while alive and alive[0][0] <= number:
                call("free", heapq.heappop(alive)[2])
            request = _Request(str(number), items)
            for input_id, item in enumerate(items):
                if next_use is not None:
                    next_use[item.identifier] = self._uses(number)[input_id]
                if call("check_and_update_cache", request, input_id):
                    outcome.device += 1
                    continue
                while not call("can_allocate", request, input_id, self.cache_rows, 0):
                    # As vLLM: the request goes on once others, or its own first items, are done.
                    call("free", heapq.heappop(alive)[2] if alive else request)
                below.fetch(item, outcome)
                call("allocate", request, input_id)
            call("get_freed_mm_hashes")
            ends = number + 1 + int(lasts.expovariate(1 / self.at_once)) if self.at_once else 0
            heapq.heappush(alive, (ends, number, request))
        outcome.calls, outcome.manager_ns = call.count, call.spent_ns()
        return outcome

    def _uses(self, number: int) -> list[int]:
        """When each item of a request is asked for again; _NEVER where it is not."""
        if not self._next_uses:
            seen: dict[str, int] = {}
            for place in range(len(self.requests) - 1, -1, -1):
                names = [item.identifier for item in self.requests[place]]
                self._next_uses.append([seen.get(name, _NEVER) for name in names])
                seen |= dict.fromkeys(names, place)
            self._next_uses.reverse()
        return self._next_uses[number]


class _Timed:
    """Hands calls to a manager, and adds up what they take."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._ns = 0
        self.count = 0

    def spent_ns(self) -> float:
        """In the manager; what the clock takes is measured, and taken off."""
        clock = time.perf_counter_ns
        empty = 0
        for _ in range(20_000):
            began = clock()
            empty += clock() - began
        return max(0.0, self._ns - self.count * empty / 20_000)

    def __call__(self, method: str, *args: Any) -> Any:
        """Call one of the manager's methods."""
        call = getattr(self._manager, method)
        began = time.perf_counter_ns()
        answer = call(*args)
        self._ns += time.perf_counter_ns() - began
        self.count += 1
        return answer


def zipf_requests(
    exponent: float, items: int, accesses: int, *, seed: int, scan: bool, rows: int = _COSTS_ROWS
) -> list[list[Item]]:
    """One item a request, by Zipf's law; with ``scan`` each item once more, in the middle."""
    source = random.Random(seed)
    corpus = [Item(f"picture-{number}", rows) for number in range(items)]
    weights = [1 / rank**exponent for rank in range(1, items + 1)]
    drawn = [[item] for item in source.choices(corpus, weights=weights, k=accesses)]
    if not scan:
        return drawn
    order = [[item] for item in source.sample(corpus, items)]
    return [*drawn[: accesses // 2], *order, *drawn[accesses // 2 :]]


def distinct_rows(requests: Iterable[Sequence[Item]]) -> int:
    """Rows of all items, each counted once."""
    return sum({item.identifier: item.rows for items in requests for item in items}.values())
