# SPDX-License-Identifier: Apache-2.0
"""What entries were made with, by their headers, and what gc deletes of them."""

from __future__ import annotations

import pytest

from s3ec.corpus.collect import Collection, Rules, collect_garbage, parse_made_by
from s3ec.errors import ConfigError
from s3ec.identity import make_key
from s3ec.testing.fault_store import FaultStore
from s3ec.testing.memory_store import MemoryStore
from tests.support.indexes import LAYOUT
from tests.unit.cli.corpus import content_hash, entry_bytes

NOW_S = 1_700_000_000.0
HOUR_S = 3600.0
BAD = "vllm=0.32.0 transformers=5.19.0 torch=2.13.0+cpu pillow=13.0.0 platform=cpu"
GOOD = BAD.replace("0.32.0", "0.32.1")
FAULTY = parse_made_by("vllm=0.32.0")


def name_of(identifier: str) -> str:
    key = make_key(identifier)
    assert key is not None
    return LAYOUT.objects + key.name


class Calls:
    """No faults; notes what is asked for."""

    def __init__(self) -> None:
        self.made: list[tuple[str, str]] = []

    def next(self, op: str, name: str) -> None:
        self.made.append((op, name))


class World:
    """Entries in a bucket in memory, whose requests are counted."""

    def __init__(self) -> None:
        self.memory = MemoryStore(clock=lambda: NOW_S)
        self.calls = Calls()
        self.store = FaultStore(self.memory, self.calls)
        self.told: list[int | None] = []

    def put(self, seed: str, made_by: str, *, age_s: float = HOUR_S) -> str:
        identifier = content_hash(seed)
        name = name_of(identifier)
        self.memory.bucket.objects[name] = entry_bytes(
            identifier, LAYOUT.namespace, made_by=made_by
        )
        self.memory.bucket.modified_s[name] = NOW_S - age_s
        return identifier

    @property
    def headers_read(self) -> int:
        return sum(
            op == "get_range" and name.startswith(LAYOUT.objects) for op, name in self.calls.made
        )

    async def gc(self, rules: Rules, *, dry_run: bool = False) -> Collection:
        def told(what: str, done: int, total: int | None) -> None:
            if what == "reading headers" and not done:
                assert not self.headers_read  # it is said before
                self.told.append(total)

        self.calls.made.clear()
        return await collect_garbage(
            self.store,
            LAYOUT,
            rules,
            tenant=None,
            dry_run=dry_run,
            report=told,
            clock=lambda: NOW_S,
        )

    @property
    def left(self) -> set[str]:
        names = self.memory.bucket.objects
        return {name for name in names if name.startswith(LAYOUT.objects)}


@pytest.fixture
def world() -> World:
    return World()


# -- which are meant -------------------------------------------------------------------------------


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


async def test_headers_are_read_and_their_number_is_told_first(
    world: World,
) -> None:
    world.put("bad", BAD)
    kept = {name_of(world.put("good", GOOD)), name_of(world.put("unknown", ""))}
    counted = await world.gc(Rules(made_by=FAULTY), dry_run=True)
    assert (counted.objects, counted.left_objects, counted.done) == (1, 2, False)
    assert world.told == [3]
    assert world.headers_read == 3
    done = await world.gc(Rules(made_by=FAULTY))
    assert (done.objects, done.done) == (1, True)
    assert world.left == kept


async def test_an_object_that_is_no_entry_stays(world: World) -> None:
    name = name_of(world.put("broken", BAD))
    world.memory.bucket.objects[name] = b"no entry at all"
    assert (await world.gc(Rules(made_by=FAULTY))).objects == 0
    assert world.left == {name}


async def test_rules_that_are_given_together_narrow_and_spare_requests(world: World) -> None:
    old = world.put("old", BAD, age_s=48 * HOUR_S)
    young = world.put("young", BAD)
    world.put("old and good", GOOD, age_s=48 * HOUR_S)
    done = await world.gc(Rules(older_than_s=24 * HOUR_S, made_by=FAULTY))
    assert done.objects == 1
    assert world.told == [2]
    assert name_of(old) not in world.left
    assert name_of(young) in world.left
    largest = len(world.memory.bucket.objects[name_of(young)])
    assert (await world.gc(Rules(max_bytes=largest, made_by=FAULTY), dry_run=True)).objects == 1


async def test_what_is_stored_again_while_it_is_chosen_stays(world: World) -> None:
    identifier = world.put("bad", BAD)

    def again(what: str, done: int, total: int | None) -> None:
        if what == "reading headers":
            world.put("bad", GOOD, age_s=-10)

    await collect_garbage(
        world.store,
        LAYOUT,
        Rules(made_by=FAULTY),
        tenant=None,
        dry_run=False,
        report=again,
        clock=lambda: NOW_S,
    )
    assert name_of(identifier) in world.left
