# SPDX-License-Identifier: Apache-2.0
"""Which entries ``gc`` takes: by age, until the rest fits, by what made them."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from s3ec.corpus.catalog import CatalogWriter, list_parts, read_table
from s3ec.corpus.collect import (
    Collection,
    Rules,
    choose,
    collect,
    collect_garbage,
    parse_made_by,
)
from s3ec.errors import AccessError, ConfigError, UnavailableError
from s3ec.identity import make_key
from s3ec.index import listing
from s3ec.index.local import NodeFolder
from s3ec.store.base import ObjectInfo, Store, Wrapper
from s3ec.testing.fault_store import Fault, FaultStore, Script
from s3ec.testing.memory_store import MemoryStore
from tests.support.indexes import LAYOUT, put_delta, view
from tests.unit.cli.corpus import content_hash, entry_bytes
from tests.unit.corpus.test_audit import rows_for

IDS = [content_hash(f"page {number}") for number in range(8)]
LORA = [f"my-lora:{content_hash(f'page {number}')}" for number in range(2)]
NOW_S = 1_000_000.0
HOUR_S = 3600.0


def name_of(identifier: str) -> str:
    key = make_key(identifier)
    assert key is not None
    return key.name


def put(memory: MemoryStore, identifier: str, age_s: float, body: bytes = bytes(100)) -> None:
    name = LAYOUT.objects + name_of(identifier)
    memory.bucket.objects[name] = body
    memory.bucket.modified_s[name] = NOW_S - age_s


@pytest.fixture
def memory() -> MemoryStore:
    """Eight entries, the first of which is the youngest, of 1 to 8 hours; two of an adapter."""
    store = MemoryStore(clock=lambda: NOW_S)
    for number, identifier in enumerate(IDS):
        put(store, identifier, (number + 1) * HOUR_S)
    for identifier in LORA:
        put(store, identifier, 10 * HOUR_S)
    return store


def left(memory: MemoryStore) -> set[str]:
    return {
        name.removeprefix(LAYOUT.objects)
        for name in memory.bucket.objects
        if name.startswith(LAYOUT.objects)
    }


def names_of(*identifiers: str) -> set[str]:
    return set(map(name_of, identifiers))


async def run(memory: Store, rules: Rules) -> Collection:
    choice = await choose(memory, LAYOUT, rules, NOW_S)
    done = await collect(memory, choice)
    assert (done.objects, done.nbytes, done.left_objects, done.left_bytes) == (
        choice.objects,
        choice.nbytes,
        choice.left_objects,
        choice.left_bytes,
    )
    return done


async def gc(store: Store, rules: Rules, *, ours_s: float = NOW_S, **how: Any) -> Collection:
    """As the command does it; ``ours_s`` is what our clock says."""
    given = {"tenant": None, "dry_run": False, **how}
    return await collect_garbage(store, LAYOUT, rules, **given, clock=lambda: ours_s)


async def fill_catalogue(memory: MemoryStore) -> None:
    memory.bucket.objects[LAYOUT.descriptor] = b'{"model": "tiny"}'
    await CatalogWriter(memory, LAYOUT).append(rows_for(IDS))


async def test_what_is_larger_than_the_limit_goes_from_the_oldest_on(memory: MemoryStore) -> None:
    done = await run(memory, Rules(max_bytes=650))
    assert (done.objects, done.left_bytes) == (4, 600)
    assert left(memory) == names_of(*IDS[:6])
    assert (await run(memory, Rules(max_bytes=650))).objects == 0


async def test_rules_that_are_given_together_narrow(memory: MemoryStore) -> None:
    done = await run(memory, Rules(older_than_s=7.5 * HOUR_S, max_bytes=100))
    assert (done.objects, done.left_bytes) == (3, 700)
    assert left(memory) == names_of(*IDS[:7])


async def test_what_is_stored_while_it_is_chosen_stays(memory: MemoryStore) -> None:
    choice = await choose(memory, LAYOUT, Rules(max_bytes=100), NOW_S)
    put(memory, "new", -1.0)
    await collect(memory, choice)
    assert left(memory) == names_of(IDS[0], "new")


async def test_with_a_size_what_is_stored_since_the_look_began_stays(memory: MemoryStore) -> None:
    """It may be in the listing that counts already; the newest is not what is to go."""
    put(memory, "new", -1.0)
    await run(memory, Rules(max_bytes=0))
    assert left(memory) == names_of("new")


async def test_object_without_a_time_stays(memory: MemoryStore) -> None:
    memory.bucket.modified_s[LAYOUT.objects + name_of(IDS[7])] = 0.0
    await run(memory, Rules(older_than_s=0.0))
    assert left(memory) == names_of(IDS[7])


async def test_a_choice_is_the_same_however_the_store_lists(
    memory: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many of one second: what goes must be the same in the listing that counts and the next."""
    for number in range(50):
        put(memory, f"same {number}", 9 * HOUR_S)
    choice = await choose(memory, LAYOUT, Rules(max_bytes=3000), NOW_S)
    monkeypatch.setattr(listing, "FEW", 0)
    done = await collect(memory, choice)
    assert (done.objects, done.left_bytes) == (30, 3000)


# -- what goes with them -----------------------------------------------------------------------


async def test_rows_of_the_catalogue_go_with_their_entries(memory: MemoryStore) -> None:
    await fill_catalogue(memory)
    rules = Rules(older_than_s=5.5 * HOUR_S)
    tried = await gc(memory, rules, dry_run=True)
    assert (tried.objects, tried.done, len(await read_table(memory, LAYOUT))) == (5, False, 8)
    done = await gc(memory, rules)
    assert (done.objects, done.done, done.dropped_rows, done.problem) == (5, True, 3, "")
    table = await read_table(memory, LAYOUT)
    assert table.column("identifier").to_pylist() == IDS[:5]


async def test_parts_that_jobs_left_are_folded(memory: MemoryStore) -> None:
    memory.bucket.objects[LAYOUT.descriptor] = b'{"model": "tiny"}'
    for one in rows_for(IDS):
        await CatalogWriter(memory, LAYOUT).append([one])
    rules = Rules(older_than_s=1000 * HOUR_S)
    done = await gc(memory, rules)
    assert (done.objects, done.problem) == (0, "")
    assert len(await list_parts(memory, LAYOUT)) == 1
    assert len(await read_table(memory, LAYOUT)) == len(IDS)


@pytest.mark.parametrize("ahead_s", [-1000 * HOUR_S, 0.0, 1000 * HOUR_S])
@pytest.mark.parametrize("max_bytes", [None, 0])
async def test_ages_are_by_the_servers_clock_and_not_by_ours(
    memory: MemoryStore, ahead_s: float, max_bytes: int | None
) -> None:
    rules = Rules(older_than_s=5.5 * HOUR_S, max_bytes=max_bytes)
    done = await gc(memory, rules, ours_s=NOW_S + ahead_s)
    assert done.objects == 5
    assert left(memory) == names_of(*IDS[:5])


async def test_row_of_an_entry_that_came_back_meanwhile_stays(memory: MemoryStore) -> None:
    await fill_catalogue(memory)

    class Filling(Wrapper):
        """A job encodes one again, and catalogues it, when all are deleted."""

        async def list(
            self, prefix: str, *, start_after: str = ""
        ) -> AsyncGenerator[ObjectInfo, None]:
            if prefix == LAYOUT.catalog and name_of(IDS[6]) not in left(memory):
                put(memory, IDS[6], 0.0)
                await CatalogWriter(memory, LAYOUT).append([rows_for(IDS)[6]])
            async for info in super().list(prefix, start_after=start_after):
                yield info

    rules = Rules(older_than_s=5.5 * HOUR_S)
    done = await gc(Filling(memory), rules)
    assert (done.objects, done.dropped_rows, done.problem) == (5, 2, "")
    table = await read_table(memory, LAYOUT)
    assert table.column("identifier").to_pylist() == [*IDS[:5], IDS[6]]


async def test_catalogue_that_cannot_be_had_is_said_when_the_entries_are_gone(
    memory: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listing, "PAUSE_S", 0.0)
    store = FaultStore(memory, Script([Fault("list", LAYOUT.catalog, error=UnavailableError)]))
    rules = Rules(older_than_s=5.5 * HOUR_S)
    done = await gc(store, rules)
    assert done.objects == 5
    assert done.problem


async def test_entry_that_a_producer_stored_again_is_deleted_only_as_what_was_listed(
    memory: MemoryStore,
) -> None:
    """It went by other means and came back young, between the two listings."""
    choice = await choose(memory, LAYOUT, Rules(older_than_s=5.5 * HOUR_S), NOW_S)
    put(memory, IDS[6], 0.0)
    await collect(memory, choice)
    assert left(memory) == names_of(*IDS[:5], IDS[6])


async def test_what_is_left_becomes_the_index(memory: MemoryStore, tmp_path: Path) -> None:
    keys = [key for key in map(make_key, IDS) if key is not None]
    put_delta(memory, LAYOUT, keys, at_s=NOW_S - HOUR_S)
    node = NodeFolder(tmp_path / "index")
    node.make()
    choice = await choose(memory, LAYOUT, Rules(older_than_s=5.5 * HOUR_S), NOW_S)
    await collect(memory, choice, node=node)
    assert set(await view(memory)) == {key.digest for key in keys[:5]}
    told = {digest for digest, _ in node.read_missing(0, 0)[2]}
    gone = [*keys[5:], *(key for key in map(make_key, LORA) if key is not None)]
    assert told == {key.digest for key in gone}


async def test_a_deletion_that_is_refused_leaves_the_index_as_it_was(memory: MemoryStore) -> None:
    keys = [key for key in map(make_key, IDS) if key is not None]
    put_delta(memory, LAYOUT, keys, at_s=NOW_S - HOUR_S)
    store = FaultStore(memory, Script([Fault("delete_many", error=AccessError)]))
    choice = await choose(store, LAYOUT, Rules(older_than_s=5.5 * HOUR_S), NOW_S)
    with pytest.raises(AccessError):
        await collect(store, choice)
    assert set(await view(memory)) == {key.digest for key in keys}
    assert len(left(memory)) == 10


# -- what made them ----------------------------------------------------------------------------

BAD = "vllm=0.32.0 transformers=5.19.0 torch=2.13.0+cpu pillow=13.0.0 platform=cpu"
GOOD = BAD.replace("0.32.0", "0.32.1")
FAULTY = Rules(made_by=parse_made_by("vllm=0.32.0"))


class Made:
    """Entries in a bucket of their own, and what is told and asked of them."""

    def __init__(self) -> None:
        self.memory = MemoryStore(clock=lambda: NOW_S)
        self.store = FaultStore(self.memory)
        self.told: list[tuple[int | None, int]] = []

    def put(self, seed: str, made_by: str, *, age_s: float = HOUR_S) -> str:
        """The name of its object."""
        identifier = content_hash(seed)
        put(
            self.memory,
            identifier,
            age_s,
            entry_bytes(identifier, LAYOUT.namespace, made_by=made_by),
        )
        return name_of(identifier)

    async def gc(self, rules: Rules, **how: Any) -> Collection:
        self.store.log.clear()
        return await gc(self.store, rules, report=self.report, **how)

    def report(self, what: str, done: int, total: int | None) -> None:
        if what == "reading headers" and not done:
            self.told.append((total, self.headers_read))

    @property
    def headers_read(self) -> int:
        return sum(op == "get_range" and LAYOUT.objects in name for op, name in self.store.log)


@pytest.fixture
def made() -> Made:
    return Made()


@pytest.mark.parametrize(
    ("words", "fits"),
    [
        ("vllm=0.32.0", True),
        ("vllm=0.32.1", False),
        ("vllm=0.32.*", True),
        ("vllm=0.3", False),
        ("torch=2.13.0", False),
        ("torch=2.13.0*", True),
        ("vllm=0.32.0 platform=cpu", True),
        ("vllm=0.32.0,platform=NVIDIA*", False),
        (" vllm=0.32.0 , torch=*  ", True),
        ("cuda=*", False),
    ],
)
def test_words_fit_by_name_and_pattern(words: str, fits: bool) -> None:
    rules = Rules(made_by=parse_made_by(words))
    assert (rules.fits(BAD), rules.fits("")) == (fits, False)


@pytest.mark.parametrize("words", ["", " ", "0.32.0", "vllm", "vllm=", "=1", "v=é", "V=1"])
def test_what_is_no_list_of_names_and_versions_is_refused(words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_made_by(words)
    assert caught.value.field == "made_by"


async def test_headers_are_read_and_their_number_is_told_first(made: Made) -> None:
    made.put("bad", BAD)
    kept = {made.put("good", GOOD), made.put("unknown", "")}
    counted = await made.gc(FAULTY, dry_run=True)
    assert (counted.objects, counted.left_objects, counted.done) == (1, 2, False)
    assert (made.told, made.headers_read) == ([(3, 0)], 3)
    done = await made.gc(FAULTY)
    assert (done.objects, done.done) == (1, True)
    assert left(made.memory) == kept


async def test_an_object_that_is_no_entry_stays(memory: MemoryStore) -> None:
    assert (await gc(memory, FAULTY)).objects == 0
    assert left(memory) == names_of(*IDS, *LORA)


async def test_what_made_them_narrows_other_rules_and_spares_requests(made: Made) -> None:
    made.put("old", BAD, age_s=48 * HOUR_S)
    young = made.put("young", BAD)
    good = made.put("old and good", GOOD, age_s=48 * HOUR_S)
    done = await made.gc(replace(FAULTY, older_than_s=24 * HOUR_S))
    assert (done.objects, made.told) == (1, [(2, 0)])
    assert left(made.memory) == {young, good}
    largest = len(made.memory.bucket.objects[LAYOUT.objects + young])
    assert (await made.gc(replace(FAULTY, max_bytes=largest), dry_run=True)).objects == 1


async def test_what_is_stored_again_while_headers_are_read_stays(made: Made) -> None:
    name = made.put("bad", BAD)

    def again(what: str, done: int, total: int | None) -> None:
        if what == "reading headers":
            made.put("bad", GOOD, age_s=-10)

    await gc(made.store, FAULTY, report=again)
    assert left(made.memory) == {name}
