# SPDX-License-Identifier: Apache-2.0
"""Each encode is counted with its reason."""

from __future__ import annotations

from typing import Any

import pytest

from s3ec.connector.lookups import REASONS
from s3ec.connector.metrics import LABELLED
from s3ec.connector.waiting import EngineLoad, WaitPolicy
from s3ec.encode_costs import EncodeCosts
from s3ec.prefetch import FetchOutcome
from tests.unit.connector.scheduling import ROWS, World, feature, request


def reasons(here: World) -> dict[str, float]:
    counts = here.counters.snapshot()
    found = {name: counts.get(f"encoded.{name}", 0) for name in REASONS}
    assert sum(found.values()) == counts.get("misses", 0)
    return {name: count for name, count in found.items() if count}


def cheap() -> WaitPolicy:
    """To encode takes 1 ms, so no fetch is worth a wait."""
    policy = WaitPolicy(EncodeCosts({("image", ROWS.bit_length()): 0.001 / ROWS}), EngineLoad(2))
    policy.times.of("bucket", ROWS).add(0.05)
    return policy


def test_every_reason_has_its_meaning() -> None:
    assert tuple(LABELLED["encoded."][3]) == REASONS


@pytest.mark.parametrize("consumer", [True, False])
def test_what_the_index_does_not_know_is_absent(consumer: bool) -> None:
    here = World(producer=True, consumer=consumer)
    assert here.run(request("r", feature("a"))) == [False]
    assert reasons(here) == {"absent": 1}


def test_a_fetch_that_is_not_worth_the_wait_is_declined() -> None:
    here = World(policy=cheap())
    here.stock("a")
    assert here.run(request("r", feature("a"))) == [False]
    assert reasons(here) == {"declined": 1}


def test_a_fetch_that_did_not_come_in_time_is_late() -> None:
    here = World()
    asker = here.defer("a")
    here.clock.now_s += 3.0
    assert here.run(asker) == [False]
    assert reasons(here) == {"late": 1}


@pytest.mark.parametrize(
    ("outcome", "how", "reason"),
    [
        (FetchOutcome.UNAVAILABLE, {}, "failed"),
        (FetchOutcome.ABSENT, {}, "absent"),
        (FetchOutcome.READY, {"holds": ROWS + 1}, "unfit"),
    ],
)
def test_a_fetch_that_brought_nothing_says_why(
    outcome: FetchOutcome, how: dict[str, Any], reason: str
) -> None:
    here = World()
    asker = here.defer("a")
    here.finish("a", outcome, **how)
    assert here.run(asker) == [False]
    assert reasons(here) == {reason: 1}


def test_an_entry_of_other_rows_is_unfit() -> None:
    here = World()
    here.bring("a")
    assert here.run(request("r", feature("a", rows=ROWS + 1))) == [False]
    assert reasons(here) == {"unfit": 1}


def test_a_store_that_is_not_asked_and_a_disk_that_hangs_are_down() -> None:
    here = World()
    here.stock("a", "b")
    here.store.is_open = True
    assert here.run(request("r", feature("a"))) == [False]
    assert here.run(request("s", feature("c"))) == [False]
    assert reasons(here) == {"down": 1, "absent": 1}
    here.step()
    here.store.is_open, here.disk.hangs = False, True
    assert here.run(request("t", feature("b"))) == [False]
    assert reasons(here) == {"down": 2, "absent": 1}


def test_an_identifier_that_is_not_shared_and_an_engine_that_stopped_are_told_apart() -> None:
    here = World()
    assert here.run(request("r", feature("", raw=True))) == [False]
    here.half.stop()
    here.stock("a")
    assert here.run(request("s", feature("a"))) == [False]
    assert reasons(here) == {"unshared": 1, "stopped": 1}
