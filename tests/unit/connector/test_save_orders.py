# SPDX-License-Identifier: Apache-2.0
"""`save` = worth: what is stored, and what is not."""

from __future__ import annotations

import pytest

from s3ec.connector import save_orders
from s3ec.connector.messages import WorkerReport
from s3ec.connector.save_orders import SeenKeys
from tests.unit.connector.scheduling import World, feature, identifier_of, request
from tests.unit.tier.cases import key_of


def test_key_is_seen_from_its_second_time_on() -> None:
    seen = SeenKeys()
    assert [seen.add(key_of("a")) for _ in range(3)] == [False, True, True]
    assert not seen.add(key_of("b"))


def test_the_last_ones_are_known_and_old_ones_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(save_orders, "GENERATION_KEYS", 8)
    keys = [key_of(str(number)) for number in range(40)]
    seen = SeenKeys()
    assert not any(map(seen.add, keys))
    assert all(map(seen.add, keys[-8:]))
    assert not any(map(seen.add, keys[:8]))


# -- in the scheduler half -------------------------------------------------------------------


def world() -> World:
    return World(producer=True, seen=SeenKeys())


def encode(here: World, name: str, text: str = "a") -> bool:
    """One request that encodes it, and ends; whether it is saved."""
    asker = request(name, feature(text))
    assert here.run(asker) == [False]
    saved = bool(here.step().saves)
    here.end(asker)
    here.step(freed=[text])
    return saved


def test_embedding_is_saved_at_the_second_encode_and_not_again() -> None:
    here = world()
    assert [encode(here, str(number)) for number in range(3)] == [False, True, False]
    assert here.counters.get("save_declined") == 1
    here.half.update_connector_output(WorkerReport(stored=[identifier_of("a")]))
    assert not encode(here, "b", "b")


def test_save_that_was_dropped_is_ordered_again_at_the_next_encode() -> None:
    here = world()
    encode(here, "1")
    assert encode(here, "2")
    here.clock.now_s += 100
    here.step()
    assert encode(here, "3")
