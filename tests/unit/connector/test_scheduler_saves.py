# SPDX-License-Identifier: Apache-2.0
"""The scheduler half: what workers are told to save."""

from __future__ import annotations

import pytest

from s3ec.connector import save_orders
from s3ec.connector.item_tracker import LEASE_S
from s3ec.connector.messages import Save, WorkerReport
from s3ec.connector.save_orders import SeenKeys
from s3ec.index.reader import BAD_OBJECT_TTL_S
from s3ec.prefetch import FetchOutcome
from tests.unit.connector.scheduling import (
    World,
    bare,
    feature,
    identifier_of,
    request,
)
from tests.unit.tier.cases import key_of


def test_what_is_encoded_and_not_stored_is_saved_with_its_placeholder() -> None:
    world = World(producer=True)
    assert world.run(request("r", feature("a"))) == [False]
    assert world.step().saves == {
        identifier_of("a"): Save("image", {"image_grid_thw": [[1, 2, 2]]})
    }
    assert world.step().saves == {}


def test_what_the_index_holds_is_not_saved_though_it_was_encoded() -> None:
    world = World(producer=True)
    asker = world.defer("a")
    world.finish("a", FetchOutcome.UNAVAILABLE)
    assert world.run(asker) == [False]
    assert world.step().saves == {}


def test_what_was_loaded_is_not_saved() -> None:
    world = World(producer=True)
    world.bring("a")
    assert world.run(request("r", feature("a"))) == [True]
    plan = world.step()
    assert (len(plan.loads), plan.saves) == (1, {})


def test_a_save_under_way_is_not_ordered_twice_and_again_after_a_while() -> None:
    world = World(producer=True)
    asker = request("r", feature("a"))
    world.schedule(asker)
    assert len(world.step().saves) == 1
    world.schedule(asker)
    assert world.step(freed="a").saves == {}
    world.clock.now_s += LEASE_S + 2
    world.step(freed="a")
    world.schedule(asker)  # the first was dropped, or failed
    assert len(world.step().saves) == 1


def test_a_reported_save_is_known_to_the_index_at_once() -> None:
    world = World(producer=True)
    asker = request("r", feature("a"))
    world.schedule(asker)
    world.step()
    world.half.update_connector_output(
        WorkerReport(
            stored=[identifier_of("a"), "\ud800"],
            counts={"save.items": 1},
        )
    )
    assert world.index.maybe_contains(key_of(identifier_of("a")))
    assert world.counters.get("save.items") == 1
    world.step(freed="a")
    assert not world.ask(asker)  # it is worth fetching now
    world.index.mark_missing(key_of(identifier_of("a")), absent=True)
    world.schedule(asker)  # deleted, and encoded again
    assert list(world.step().saves) == [identifier_of("a")]


def test_a_pure_producer_skips_what_the_index_holds_and_saves_the_rest() -> None:
    world = World(producer=True, consumer=False)
    world.stock("a")
    asker = request("r", feature("a"), feature("b", 10))
    assert world.run(asker) == [True, False]
    plan = world.step()
    assert plan.loads == []
    assert list(plan.saves) == [identifier_of("b")]
    assert (world.counters.get("hits"), world.counters.get("misses")) == (1, 1)


def orders_end(world: World) -> None:
    """What was ordered so far was dropped, or failed."""
    world.clock.now_s += LEASE_S + 2
    world.step()


def test_what_the_device_holds_and_the_corpus_lost_is_stored_again() -> None:
    world = World(producer=True, consumer=False)
    assert world.run(request("r", feature("a"))) == [False]
    assert world.step().saves[identifier_of("a")].on_device is False
    again = request("again", feature("a"))  # vLLM's manager holds it, and asks for nothing
    world.ask(again)
    assert world.step().saves == {}  # it is under way
    orders_end(world)
    world.ask(again)
    order = world.step().saves[identifier_of("a")]
    assert order == Save("image", world.placeholders, on_device=True)
    world.ask(again)
    assert world.step().saves == {}  # the worker needs some time
    world.half.update_connector_output(WorkerReport(stored=[identifier_of("a")]))
    world.ask(again)
    assert world.step().saves == {}
    world.index.mark_missing(key_of(identifier_of("a")), absent=True)
    world.ask(again)
    assert list(world.step().saves) == [identifier_of("a")]


def test_what_the_device_holds_is_not_stored_again_while_a_bad_object_has_its_name() -> None:
    """Each try would copy and send the whole embedding, every few seconds, and be given up."""
    world = World(producer=True, consumer=False)
    assert world.run(request("r", feature("a"))) == [False]
    world.step()
    world.index.mark_bad(key_of(identifier_of("a")))
    for _ in range(3):
        orders_end(world)
        world.ask(request("again", feature("a")))
        assert world.step().saves == {}
    world.clock.now_s += BAD_OBJECT_TTL_S
    world.ask(request("later", feature("a")))
    assert list(world.step().saves) == [identifier_of("a")]


def test_a_decoding_request_has_nothing_stored_again() -> None:
    """It is asked about in every step, and each picture would be looked up."""
    world = World(producer=True)
    asker = request("r", feature("a"))
    world.run(asker)
    world.step()
    orders_end(world)
    assert world.ask(asker, asker.num_prompt_tokens)
    assert world.step().saves == {}
    assert world.ask(request("other", feature("a")))
    assert list(world.step().saves) == [identifier_of("a")]


def test_where_vllm_cannot_store_again_nothing_is_ordered() -> None:
    world = World(producer=True, consumer=False, stores_again=False)
    asker = request("r", feature("a"))
    world.run(asker)
    world.step()
    world.ask(asker)
    assert world.step().saves == {}


def test_a_pure_producer_encodes_nothing_that_came_without_pixels() -> None:
    """Else the encoder runs on nothing, and the engine ends."""
    world = World(producer=True, consumer=False)
    world.stock("a")
    stored, unknown = request("stored", bare("a")), request("unknown", bare("b"))
    assert world.ask(stored)
    world.index.mark_missing(
        key_of(identifier_of("a")), absent=True
    )  # between two hooks of one pass
    assert world.schedule(stored) == [True]
    assert not world.ask(unknown)
    assert world.failed() == {"unknown"}
    world.step()
    assert not world.ask(stored)


def test_a_pure_producer_never_skips_a_refused_identifier() -> None:
    world = World(producer=True, consumer=False)
    name = "renderer0-mm-1-image-0"
    asker = request("r", feature(name, raw=True))
    assert not world.half.has_cache_item(name)
    world.half.update_state_after_alloc(asker, 0)
    assert world.step().saves == {}
    assert world.counters.get("refused_identifiers") == 1


# -- `save` = worth -------------------------------------------------------------------------------


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
