# SPDX-License-Identifier: Apache-2.0
"""What a scheduler half remembers must belong to something that is there."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from s3ec.connector.item_tracker import FAILED, FETCHING, READY, ItemTracker
from s3ec.connector.scheduler import SchedulerHalf

# A sweep comes once a second.
LATE_S = 2.0


def complaints_of(
    half: SchedulerHalf,
    now_s: float,
    *,
    requests: Collection[str],
    device: Collection[str],
    fetching: Collection[str],
) -> list[str]:
    """Every complaint, one line each.

    Args:
        now_s: By the half's clock.
        requests: Those that vLLM has not ended.
        device: What its encoder-cache manager counts.
        fetching: Identifiers that the prefetcher has not answered yet.
    """
    of_requests: dict[str, Collection[str]] = {
        "a failure to tell of": half.unavailable,
        "the inputs of": half.lookups.inputs,
        "the wait of": half.waits.records,
        "the interests of": half.tracker.waiting,
        "a look at": half.tracker.look_again,
    }
    complaints = [
        f"{what} {name}, which has ended"
        for what, names in of_requests.items()
        for name in names
        if name not in requests
    ]
    complaints += [
        f"{identifier} is believed to be on the device"
        for identifier in half.on_device
        if identifier not in device
    ]
    return complaints + _of_items(half.tracker, now_s, fetching)


def _of_items(tracker: ItemTracker, now_s: float, fetching: Collection[str]) -> list[str]:
    complaints = []
    for identifier, item in tracker.items.items():
        if (item.state is READY) != (item.entry is not None):
            complaints.append(f"{identifier} is {item.state.name}, and its entry is {item.entry}")
        if item.state is FAILED and item.is_over(now_s - LATE_S):
            complaints.append(f"{identifier} has failed, and is still remembered")
        asked = identifier in fetching or identifier in tracker.demand
        if item.state is FETCHING and not asked:
            complaints.append(f"{identifier} waits for a fetch that nobody makes")
        complaints += [
            f"{name} does not know that it waits for {identifier}"
            for name in item.waiters
            if identifier not in tracker.waiting.get(name, ())
        ]
    complaints += [
        f"{name} waits for {identifier}, which does not know it"
        for name, waited in tracker.waiting.items()
        for identifier in waited
        if identifier not in tracker.items or name not in tracker.items[identifier].waiters
    ]
    return complaints


def leftovers_of(half: SchedulerHalf, now_s: float) -> list[str]:
    """What is remembered though all requests, steps and leases have ended."""
    kept: dict[str, Collection[Any]] = {
        "rows": half.rows_asked,
        "decisions": half.decisions,
        "allocations": half.allocated,
        "saves": half.save_orders.ordered_s,
        "items": half.tracker.items,
        "steps that load": half.tracker.loading,
        "demand": half.tracker.demand,
    }
    complaints = complaints_of(half, now_s, requests=(), device=(), fetching=())
    return complaints + [f"{what}: {len(of)} are kept" for what, of in kept.items() if of]
