# SPDX-License-Identifier: Apache-2.0
"""What a manager of the encoder cache is told: how soon the device would have something again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from s3ec.connector.messages import EncodeTime, WorkerReport
from s3ec.managers import restore
from tests.unit.connector.scheduling import ROWS, World, feature, identifier_of, request

ENCODE_S, BUCKET_S, TIER_S = 0.4, 0.06, 0.002


def learned(**more: Any) -> World:
    """A half that has seen an encode, a download and a hit of the disk."""
    world = World(**more)
    for _ in range(2):  # the first one holds compilation
        world.half.update_connector_output(
            WorkerReport(encoded=[EncodeTime("image", 1, ROWS, ENCODE_S)])
        )
    for name, source, seconds in (("download", "bucket", BUCKET_S), ("kept", "tier", TIER_S)):
        world.stock(name)
        asker = world.deferred(request(name, feature(name)))
        world.finish(name, source=source, seconds=seconds)
        assert world.ask(asker)
    return world


def restore_s(world: World, name: str) -> float:
    return world.half.restore_s(identifier_of(name), "image", ROWS)


def test_it_costs_what_was_measured_where_it_is() -> None:
    world = learned()
    world.stock("stored", "local")
    world.put_here("local")
    assert restore_s(world, "nowhere") == pytest.approx(ENCODE_S)
    assert restore_s(world, "stored") == pytest.approx(BUCKET_S)
    assert restore_s(world, "local") == pytest.approx(TIER_S)


def test_what_is_slower_than_the_encoder_costs_an_encode() -> None:
    world = learned()
    world.half.update_connector_output(
        WorkerReport(counts={"load.items": 1, "load.seconds": 100 * ENCODE_S})
    )
    world.put_here("local")
    world.clock.now_s += 2
    world.step()
    assert restore_s(world, "local") == pytest.approx(ENCODE_S)


@pytest.mark.parametrize(
    ("kind", "reachable"), [("store", {"local"}), ("disk", set()), ("stopped", set())]
)
def test_what_is_out_of_reach_costs_an_encode(kind: str, reachable: set[str]) -> None:
    world = learned()
    world.stock("stored")
    world.put_here("local")
    world.store.is_open = kind == "store"
    world.disk.hangs = kind == "disk"
    if kind == "stopped":
        world.half.stop()
    cheap = {name for name in ("stored", "local") if restore_s(world, name) < ENCODE_S}
    assert cheap == reachable


def test_a_pure_producer_loads_nothing() -> None:
    world = World(producer=True, consumer=False)
    world.put_here("local")
    assert restore_s(world, "local") == restore_s(world, "nowhere")


def test_an_owner_is_found_by_its_configuration_as_long_as_it_lives() -> None:
    class Owner:
        restore_costs = None

    config, other = SimpleNamespace(), SimpleNamespace()
    owner = Owner()
    restore.register(config, owner)
    assert restore.owner_of(config) is owner
    assert restore.owner_of(other) is None
    del owner
    assert restore.owner_of(config) is None
