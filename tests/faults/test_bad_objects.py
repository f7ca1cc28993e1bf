# SPDX-License-Identifier: Apache-2.0
"""Objects that are bad in the bucket itself: a miss that is not asked for, until it is repaired."""

from __future__ import annotations

from pathlib import Path

import pytest

from s3ec.corpus import Corpus
from s3ec.prefetch import FetchOutcome
from s3ec.settings import Settings
from tests.faults.embeddings import LAYOUT, NAMESPACE, body_at, key_at
from tests.faults.engine import Engine, asks_for, warnings_of
from tests.faults.site import Site
from tests.support.on_disk import audit_of, evict
from tests.support.waiting import eventually

NAME = LAYOUT.object(key_at(1))


def flipped(body: bytes, at: int) -> bytes:
    changed = bytearray(body)
    changed[at] ^= 1
    return bytes(changed)


BAD = flipped(body_at(1), -1)


def puts(site: Site) -> int:
    """How often entry 1 was offered to the bucket since the proxy was cleared."""
    sent = [request for request in site.proxy.requests if request.method == "PUT"]
    return sum(NAME in request.target for request in sent)


def repair(site: Site) -> int:
    """``s3ec verify --deep --repair``; how many objects it deleted."""
    site.client.put_object(Bucket=site.bucket, Key=LAYOUT.descriptor, Body=NAMESPACE.to_json())
    with Corpus.open(Settings.model_validate(site.settings())) as corpus:
        return corpus.repair(corpus.verify(NAMESPACE.name, deep=True), NAMESPACE.name).deleted


def test_bad_object_is_asked_for_twice_by_each_process_and_named_once(
    stocked: Site, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stocked.put(1, BAD)
    with (
        Engine.unhedged(stocked, tmp_path / "a") as one,
        Engine.unhedged(stocked, tmp_path / "a") as neighbour,
    ):
        for number, engine in enumerate((one, neighbour), 1):
            for _ in range(3):  # as requests do that name the entry, or have no pixels
                assert engine.fetch(1).outcome is FetchOutcome.CORRUPT
            engine.refresh()
            assert engine.fetch(1).outcome is FetchOutcome.CORRUPT
            assert asks_for(stocked, 1) == 2 * number
            assert engine.count("corrupt.checksum") == 2
            assert engine.count("bad_objects") == 1
            assert len(warnings_of(caplog, NAME)) == number
            assert not engine.node.tier.entries.contains(key_at(1))
        assert audit_of(one.node.tier) == []


def test_save_that_meets_a_known_bad_object_is_given_up(
    stocked: Site, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stocked.put(1, BAD)
    with Engine.unhedged(stocked, tmp_path / "a") as engine:
        assert engine.fetch(1).outcome is FetchOutcome.CORRUPT
        for number in (1, 2):
            eventually(lambda: engine.offer(1), "the save before has ended")
            eventually(lambda n=number: engine.count("save_problem.bad_object") == n)
            engine.announce()  # the spool is empty
            assert puts(stocked) == number
        assert len(warnings_of(caplog, NAME)) == 1
        assert engine.queue.take_stored() == []
        assert (engine.count("save.items"), engine.count("save.existed")) == (0, 0)
        assert not engine.node.index.maybe_contains(key_at(1))
        # The node serves its own encode nevertheless, without a word to the bucket.
        assert engine.fetch(1).source == "tier"
        assert asks_for(stocked, 1) == 2
        engine.save_and_wait(2)  # whose announcement would bring the other's along
        engine.announce()
    assert stocked.announced() == {key_at(2).digest}
    assert stocked.body(key_at(1).name) == BAD


def test_save_that_meets_a_bad_object_unknowingly_is_stored_already(
    stocked: Site, tmp_path: Path
) -> None:
    """What 412 means does not change, and whoever knows better is not misled by the news."""
    stocked.put(1, BAD)
    with (
        Engine.unhedged(stocked, tmp_path / "a") as knowing,
        Engine.unhedged(stocked, tmp_path / "b") as producer,
    ):
        producer.save_and_wait(1)
        producer.announce()
        assert producer.count("save.existed") == 1
        assert stocked.announced() == {key_at(1).digest}
        knowing.refresh()
        assert knowing.node.index.maybe_contains(key_at(1))
        assert knowing.fetch(1).outcome is FetchOutcome.CORRUPT
        producer.node.index.mark_missing(key_at(1))
        producer.save_and_wait(1)
        for _ in range(2):
            knowing.refresh()
            assert not knowing.node.index.maybe_contains(key_at(1))
            assert knowing.fetch(1).outcome is FetchOutcome.CORRUPT
        assert asks_for(stocked, 1) == 2


def test_repaired_entry_is_stored_by_the_next_save_and_found_by_all_but_who_knew_it_bad(
    stocked: Site, tmp_path: Path
) -> None:
    stocked.put(1, BAD)
    stocked.stock(2)
    with (
        Engine.unhedged(stocked, tmp_path / "a") as producer,
        Engine.unhedged(stocked, tmp_path / "b") as reader,
        Engine.unhedged(stocked, tmp_path / "c") as stranger,
    ):
        for engine in (producer, reader):
            assert engine.fetch(1).outcome is FetchOutcome.CORRUPT
        producer.save_and_wait(1)
        assert repair(stocked) == 1
        assert stocked.objects() == {key_at(2).name}
        evict(producer.node.tier, key_at(1))
        for engine in (producer, reader):
            engine.refresh()
            assert not engine.node.index.maybe_contains(key_at(1))
        stocked.proxy.requests.clear()

        producer.save_and_wait(1)
        producer.announce()
        assert (producer.count("save.items"), puts(stocked)) == (1, 1)
        assert stocked.body(key_at(1).name) == body_at(1)
        reader.refresh()
        assert reader.node.index.is_bad(key_at(1))  # for an hour: it cannot tell what is new
        for engine in (producer, stranger):
            engine.refresh()
            assert engine.node.index.maybe_contains(key_at(1))
            evict(engine.node.tier, key_at(1))
            fetched = engine.fetch(1)
            assert (fetched.outcome, fetched.source) == (FetchOutcome.READY, "bucket")
            assert audit_of(engine.node.tier) == []
