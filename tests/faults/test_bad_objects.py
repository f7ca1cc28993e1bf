# SPDX-License-Identifier: Apache-2.0
"""Objects that are bad in the bucket itself: a miss, quarantined, stored again, found by all."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from s3ec.identity import MAX_REVISION
from s3ec.index.rebuild import rebuild, verify
from s3ec.prefetch import FetchOutcome
from s3ec.settings import Settings
from s3ec.store.open import open_store
from tests.faults.embeddings import LAYOUT, body_at, key_at
from tests.faults.engine import Engine, asks_for
from tests.faults.site import Site
from tests.support.on_disk import audit_of, evict


def flipped(body: bytes, at: int) -> bytes:
    changed = bytearray(body)
    changed[at] ^= 1
    return bytes(changed)


def test_bad_object_is_stored_again_as_a_revision_that_every_node_finds(
    stocked: Site, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bad = flipped(body_at(1), -1)
    stocked.put(1, bad)
    with (
        Engine.at(stocked, tmp_path / "a") as both,
        Engine.at(stocked, tmp_path / "a") as neighbour,
        Engine.at(stocked, tmp_path / "b") as stranger,
    ):
        stocked.proxy.requests.clear()
        assert both.fetch(1).outcome is FetchOutcome.CORRUPT
        assert asks_for(stocked, 1) == ["r0", "r0", "r1"]
        assert both.count("corrupt.checksum") == 2
        assert both.count("quarantined_objects") == 1
        assert caplog.text.count("is bad (checksum)") == 1
        # Nobody on this node asks for the bad object again; a producer would encode its image.
        both.refresh()
        neighbour.refresh()
        for engine in (both, neighbour):
            assert not engine.node.index.holds(key_at(1))
            assert engine.fetch(1).outcome is FetchOutcome.CORRUPT
        assert asks_for(stocked, 1) == ["r0", "r0", "r1", "r1", "r1"]

        both.save_and_wait(1)
        both.announce()
        assert stocked.body(key_at(1).name) == bad
        assert stocked.body(key_at(1).name.replace(".s", ".r1.s")) == body_at(1)
        assert stocked.announced() == {key_at(1).digest}

        stocked.proxy.requests.clear()
        stranger.refresh()
        assert stranger.node.index.maybe_contains(key_at(1))
        assert stranger.fetch(1).outcome is FetchOutcome.READY
        assert asks_for(stocked, 1) == ["r0", "r0", "r1"]
        assert stranger.node.tier.entries.contains(key_at(1))
        neighbour.refresh()
        assert neighbour.node.index.holds(key_at(1))
        assert neighbour.fetch(1).source == "tier"
        evict(neighbour.node.tier, key_at(1))
        assert neighbour.fetch(1).source == "bucket"
        assert asks_for(stocked, 1) == ["r0", "r0", "r1", "r1"]
        for engine in (both, stranger):
            assert audit_of(engine.node.tier) == []


def test_index_made_from_a_listing_has_one_row_for_an_entry_and_its_revision(
    stocked: Site, tmp_path: Path
) -> None:
    for revision in range(2):
        stocked.put(1, body_at(1)[: 100 + revision], revision)
    stocked.put(2, body_at(2))
    settings = Settings.model_validate(stocked.settings())

    async def made() -> tuple[int, bool]:
        store = open_store(settings)
        try:
            head = (await rebuild(store, LAYOUT)).head
            return head.entries, (await verify(store, LAYOUT)).agrees
        finally:
            await store.close()

    assert asyncio.run(made()) == (2, True)
    with Engine.at(stocked, tmp_path / "a") as engine:
        engine.refresh()
        facts = engine.node.index.facts(key_at(1))
        assert facts is not None
        assert facts.nbytes == 101


def test_last_revision_that_is_bad_is_said_once_and_nothing_more_is_stored(
    stocked: Site, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for revision in range(MAX_REVISION + 1):
        stocked.put(1, b"no entry", revision)
    with Engine.at(stocked, tmp_path / "a") as engine:
        stocked.proxy.requests.clear()
        assert engine.fetch(1).outcome is FetchOutcome.CORRUPT
        assert len(asks_for(stocked, 1)) == 2 * (MAX_REVISION + 1)
        assert engine.fetch(1).outcome is FetchOutcome.CORRUPT
        assert len(asks_for(stocked, 1)) == 2 * (MAX_REVISION + 1)
        engine.save_and_wait(1)
        assert engine.count("save_problem.revisions") == 1
        assert len(stocked.objects()) == MAX_REVISION + 1
        assert caplog.text.count("both bad") == 1
        # The engine serves its own encode nevertheless.
        assert engine.fetch(1).source == "tier"


def test_writers_that_meet_at_a_revision_store_it_once(stocked: Site, tmp_path: Path) -> None:
    stocked.put(1, b"no entry")
    with Engine.at(stocked, tmp_path / "a") as one, Engine.at(stocked, tmp_path / "b") as other:
        for engine in (one, other):
            assert engine.fetch(1).outcome is FetchOutcome.CORRUPT
        for engine in (one, other):
            engine.save_and_wait(1)
        assert (one.count("save.items"), other.count("save.existed")) == (1, 1)
        assert len(stocked.objects()) == 2
        other.refresh()
        assert other.node.index.holds(key_at(1))


def test_bad_object_that_an_outsider_mends_is_served_when_the_quarantine_ends(
    stocked: Site, tmp_path: Path
) -> None:
    stocked.put(1, b"no entry")
    with Engine.at(stocked, tmp_path / "a") as engine:
        assert engine.fetch(1).outcome is FetchOutcome.CORRUPT
        stocked.put(1, body_at(1))
        assert engine.fetch(1).outcome is FetchOutcome.CORRUPT
        for note in (tmp_path / "a" / "v1" / "bad-objects").iterdir():
            note.unlink()  # as `s3ec quarantine clear` does
        assert engine.fetch(1).outcome is FetchOutcome.READY


def test_many_bad_objects_at_once_are_blamed_on_the_way_and_not_quarantined(
    stocked: Site, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("s3ec.tier.bad_objects.MANY", 2)
    for number in range(4):
        stocked.put(number, b"no entry")
    with Engine.at(stocked, tmp_path / "a") as engine:
        with caplog.at_level(logging.ERROR):
            for number in range(4):
                assert engine.fetch(number).outcome is FetchOutcome.CORRUPT
        assert engine.count("quarantined_objects") == 2
        assert caplog.text.count("came bad from the bucket within") == 1
