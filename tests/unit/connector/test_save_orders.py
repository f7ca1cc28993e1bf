# SPDX-License-Identifier: Apache-2.0
"""`save` = worth: what is stored, and what is not."""

from __future__ import annotations

import hashlib

import pytest

from s3ec.connector.messages import WorkerReport
from s3ec.connector.save_orders import SaveWorth, SeenKeys
from s3ec.connector.waiting import EngineLoad, WaitPolicy
from s3ec.counters import Counters
from s3ec.encode_costs import EncodeCosts
from tests.unit.connector.scheduling import World, feature, identifier_of, request
from tests.unit.tier.cases import key_of

ROWS = 4  # of the features that ``scheduling`` makes
KIND = ("image", ROWS.bit_length())


def digest(number: int) -> bytes:
    return hashlib.sha256(str(number).encode()).digest()[:16]


# -- the sketch ------------------------------------------------------------------------------


def test_key_is_seen_from_its_second_time_on() -> None:
    seen = SeenKeys()
    assert [seen.add(digest(1)) for _ in range(3)] == [False, True, True]
    assert not seen.add(digest(2))
    assert digest(3) not in seen
    assert not seen.add(digest(3))  # to ask is not to note


def test_the_last_ones_are_known_and_old_ones_are_forgotten() -> None:
    seen = SeenKeys(1024)
    many = 6 * seen.capacity
    early = sum(seen.add(digest(number)) for number in range(many))
    assert early < many / 100  # taken for others
    for number in range(many - seen.capacity, many):
        assert digest(number) in seen
        assert seen.add(digest(number))
    forgotten = [not seen.add(digest(number)) for number in range(seen.capacity // 2)]
    assert sum(forgotten) > 0.98 * len(forgotten)


# -- the decision ----------------------------------------------------------------------------


def twice(worth: SaveWorth, name: str = "a") -> bool:
    key = key_of(identifier_of(name))
    worth.is_worth(key, "image", ROWS)
    return worth.is_worth(key, "image", ROWS)


def fetched(counters: Counters, seconds: float, count: int = 10, *, kind: str = "fetch") -> None:
    names = {"fetch": ("fetch_items.bucket", "fetch_seconds.bucket"),
             "upload": ("save.items", "save.seconds")}[kind]  # fmt: skip
    counters.add_all({names[0]: count, names[1]: count * seconds})


@pytest.mark.parametrize("kind", ["fetch", "upload"])
def test_what_takes_longer_to_bring_than_to_encode_is_not_stored(kind: str) -> None:
    counters = Counters()
    worth = SaveWorth(EncodeCosts({KIND: 0.03 / ROWS}), counters)
    fetched(counters, 0.06, kind=kind)
    assert not twice(worth)
    assert counters.get("save_declined.first") == 1
    assert counters.get("save_declined.cheap") == 1
    fetched(counters, 0.001, count=100, kind=kind)
    assert twice(worth, "b")


def test_where_nothing_is_known_it_is_stored() -> None:
    counters = Counters()
    assert twice(SaveWorth(EncodeCosts(), counters))
    assert twice(SaveWorth(EncodeCosts({KIND: 1e-9}), counters))
    fetched(counters, 0.06)
    assert twice(SaveWorth(EncodeCosts(), counters))


def test_size_and_price_of_a_policy_count() -> None:
    counters = Counters()
    fetched(counters, 5.0)  # of other sizes
    policy = WaitPolicy(EncodeCosts({KIND: 0.03 / ROWS}), EngineLoad(1))
    for _ in range(16):
        policy.times.of("bucket", ROWS).add(0.02)
    assert twice(SaveWorth(policy.costs, counters, policy=policy))
    for _ in range(256):
        policy.times.of("bucket", ROWS).add(0.06)
    assert not twice(SaveWorth(policy.costs, counters, policy=policy))
    now = 0.0
    for _ in range(400):  # others would wait for the encoder
        now += 0.01
        policy.load.end_pass(now, has_prefill=True, requests=20)
    assert twice(SaveWorth(policy.costs, counters, policy=policy))


# -- in the scheduler half -------------------------------------------------------------------


def world() -> World:
    counters = Counters()
    return World(producer=True, worth=SaveWorth(EncodeCosts(), counters))


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
    here.half.update_connector_output(WorkerReport(stored=[identifier_of("a")]))
    assert not encode(here, "b", "b")


def test_save_that_was_dropped_is_ordered_again_at_the_next_encode() -> None:
    here = world()
    encode(here, "1")
    assert encode(here, "2")
    here.clock.now_s += 100
    here.step()
    assert encode(here, "3")
