# SPDX-License-Identifier: Apache-2.0
"""A base and its files, deltas merged as they come, and the filter before both."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from s3ec.dev.rigs.index_corpus import IndexCorpus, hits
from s3ec.errors import CorruptEntryError
from s3ec.identity import Layout, split_digest
from s3ec.index.bloom import Bloom, build_bloom
from s3ec.index.lookup import UNKNOWN, Base, Overlay, PresenceFilter
from s3ec.index.manifest import BaseFile, BaseManifest, Shard, parse_head
from s3ec.index.rows import Rows, merge
from s3ec.index.segment import Segment, encode_segment
from tests.unit.index import columns
from tests.unit.index.basics import NAMESPACE
from tests.unit.index.columns import Items, as_items, halves_of, items, near, rows_of
from tests.unit.index.manifests import ulid_of

LAYOUT = Layout(NAMESPACE)


def shard_of(first: int, last: int, rows: Rows) -> tuple[Shard, bytes, bytes]:
    segment = b"".join(encode_segment(rows, NAMESPACE))
    bloom = b"".join(build_bloom(rows.digest_hi, rows.digest_lo, NAMESPACE))
    return (
        Shard(first, last, len(rows), BaseFile.of([segment]), BaseFile.of([bloom])),
        segment,
        bloom,
    )


def base_of(rows: Rows, shards: int = 4, *, exact: bool = True) -> Base:
    step = 256 // shards
    made = [
        shard_of(first, first + step - 1, rows.between(first, first + step - 1))
        for first in range(0, 256, step)
    ]
    head = BaseManifest(3, "0" * 16, 0, len(rows), tuple(shard for shard, _, _ in made))
    parts: list[Segment | Bloom] = [
        Segment.parse(segment, NAMESPACE) if exact else Bloom.parse(bloom, NAMESPACE)
        for _, segment, bloom in made
    ]
    return Base(head, parts)


@settings(max_examples=40)
@given(columns.items, st.sampled_from([1, 2, 16]))
def test_an_exact_base_agrees_with_a_dict(items: Items, shards: int) -> None:
    rows = merge([Rows.from_facts(items)], keep_tombstones=False)
    base = base_of(rows, shards)
    said = {split_digest(digest): facts for digest, facts in as_items(rows)}
    assert (base.entries, base.exact) == (len(said), True)
    for half in [*said, *near(rows)]:
        assert base.maybe(*half) is (half in said)
        assert base.find(*half) == said.get(half)


@pytest.mark.parametrize("shards", [1, 16])
def test_filters_never_deny_a_key(shards: int) -> None:
    rows = rows_of(2000)
    base = base_of(rows, shards, exact=False)
    assert (base.entries, base.exact, base.segments()) == (2000, False, [])
    for half in halves_of(rows):
        assert base.maybe(*half)
        assert base.find(*half) is UNKNOWN
    others = halves_of(rows_of(2000, seed=1))
    assert sum(base.maybe(*half) for half in others) < 100
    assert [base.find(*half) is None for half in others] == [
        not base.maybe(*half) for half in others
    ]


@pytest.mark.parametrize("exact", [False, True])
def test_an_empty_base_holds_nothing(exact: bool) -> None:
    base = base_of(Rows.empty(), exact=exact)
    for half in near(rows_of(5)):
        assert not base.maybe(*half)
        assert base.find(*half) is None


# -- what the head does not describe -----------------------------------------------------------

ROWS = rows_of(200)
HALVES = [shard_of(0, 127, ROWS.between(0, 127)), shard_of(128, 255, ROWS.between(128, 255))]
HEAD = BaseManifest(3, "0" * 16, 0, 200, tuple(shard for shard, _, _ in HALVES))
SEGMENTS = [Segment.parse(segment, NAMESPACE, name="a shard") for _, segment, _ in HALVES]
BLOOMS = [Bloom.parse(bloom, NAMESPACE, name="a shard") for _, _, bloom in HALVES]


def reason_of(head: BaseManifest, parts: list[Segment | Bloom]) -> str:
    with pytest.raises(CorruptEntryError) as caught:
        Base(head, parts)
    return caught.value.reason


def test_parts_that_the_head_describes_are_taken() -> None:
    assert Base(HEAD, SEGMENTS).exact
    assert not Base(HEAD, BLOOMS).exact
    assert Base(HEAD, SEGMENTS).segments() == SEGMENTS


def test_parts_of_another_base_are_refused() -> None:
    assert reason_of(HEAD, [SEGMENTS[0]]) == "shape"
    assert reason_of(HEAD, [*SEGMENTS, SEGMENTS[0]]) == "shape"
    assert reason_of(HEAD, [SEGMENTS[0], BLOOMS[1]]) == "shape"
    first, second = HEAD.shards
    fewer = replace(HEAD, shards=(replace(first, entries=first.entries - 1), second))
    assert reason_of(fewer, [*SEGMENTS]) == "size"
    assert reason_of(fewer, [*BLOOMS]) == "size"


def test_digests_of_another_shard_are_refused() -> None:
    swapped = replace(
        HEAD,
        shards=tuple(
            replace(shard, entries=len(segment))
            for shard, segment in zip(HEAD.shards, SEGMENTS[::-1], strict=True)
        ),
    )
    assert reason_of(swapped, SEGMENTS[::-1]) == "order"


def test_tombstones_in_a_base_are_refused() -> None:
    rows = rows_of(200, deleted=True)
    shard, segment, _ = shard_of(0, 255, rows)
    head = replace(HEAD, shards=(shard,))
    assert reason_of(head, [Segment.parse(segment, NAMESPACE)]) == "shape"


# -- files -------------------------------------------------------------------------------------


@pytest.fixture
def corpus(monkeypatch: pytest.MonkeyPatch) -> IndexCorpus:
    """A small one of several shards."""
    monkeypatch.setattr("s3ec.index.manifest.MAX_SHARD_ROWS", 1024)
    return IndexCorpus(20_000, seed=5)


@pytest.mark.parametrize("exact", [False, True])
def test_files_of_a_made_up_corpus_open_as_its_head_says(
    corpus: IndexCorpus, tmp_path: Path, exact: bool
) -> None:
    head = corpus.write(tmp_path, NAMESPACE, version=12)
    assert parse_head((tmp_path / LAYOUT.head(12)).read_bytes()) == head
    assert head.entries == 20_000
    assert len(head.shards) == 32
    name = head.segment_name if exact else head.bloom_name
    paths = [tmp_path / name(LAYOUT, shard) for shard in head.shards]
    blobs = [shard.segment if exact else shard.bloom for shard in head.shards]
    assert [BaseFile.of([path.read_bytes()]) for path in paths] == blobs
    base = Base.open(head, paths, NAMESPACE, exact=exact)
    for path in paths:
        path.unlink()
    for segment in base.segments():
        segment.check()
    some = [(shard, row) for shard in range(32) for row in (0, 7, -1)]
    present = [corpus.rows(shard).digest(row) for shard, row in some]
    misses = corpus.misses(2000)
    assert all(base.maybe(*split_digest(digest)) for digest in present)
    assert sum(base.maybe(*split_digest(digest)) for digest in misses) < (1 if exact else 60)


def test_a_damaged_file_of_a_base_is_named(corpus: IndexCorpus, tmp_path: Path) -> None:
    head = corpus.write(tmp_path, NAMESPACE)
    paths = [tmp_path / head.segment_name(LAYOUT, shard) for shard in head.shards]
    paths[3].write_bytes(paths[3].read_bytes()[:-1])
    with pytest.raises(CorruptEntryError, match=r"^18-1f\.safetensors: "):
        Base.open(head, paths, NAMESPACE, exact=True)


def test_the_same_seed_makes_the_same_corpus(corpus: IndexCorpus) -> None:
    again, other = IndexCorpus(20_000, seed=5), IndexCorpus(20_000, seed=6)
    assert as_items(again.rows(3)) == as_items(corpus.rows(3))
    assert halves_of(other.rows(3)) != halves_of(corpus.rows(3))
    assert again.misses(10) == corpus.misses(10)
    parts = list(corpus.all_rows())
    assert sum(len(part) for part in parts) == 20_000
    assert merge(parts, keep_tombstones=False).is_sorted()


def test_hits_of_a_base_are_in_it_and_come_from_everywhere() -> None:
    base = base_of(rows_of(2000), 16)
    found = hits(base, 500)
    assert len(found) == 500
    assert hits(base, 500) == found != hits(base, 500, seed=1)
    assert all(base.maybe(*split_digest(digest)) for digest in found)
    assert {digest[0] >> 4 for digest in found[:200]} == set(range(16))


# -- deltas ----------------------------------------------------------------------------------------


def rows_in(overlay: Overlay) -> Rows:
    return Rows.empty() if overlay.segment is None else overlay.segment.rows()


@pytest.mark.slow
@given(st.lists(items, max_size=6), st.randoms(use_true_random=False), st.integers(1, 6))
def test_any_order_and_any_parts_give_the_merge_by_rising_ulid(
    parts: list[Items], chance: random.Random, at_a_time: int
) -> None:
    deltas = {ulid_of(n): Rows.from_facts(part).sorted_unique() for n, part in enumerate(parts)}
    names = list(deltas)
    chance.shuffle(names)
    overlay = Overlay()
    for start in range(0, len(names), at_a_time):
        overlay = overlay.plus({name: deltas[name] for name in names[start : start + at_a_time]})
    assert overlay.ulids == deltas.keys()
    expected = merge([deltas[name] for name in sorted(deltas)], keep_tombstones=True)
    found = rows_in(overlay)
    assert all(
        (found.columns()[name] == column).all() for name, column in expected.columns().items()
    )
    assert len(found) == len(expected)


def test_an_empty_overlay_has_no_segment() -> None:
    assert Overlay().segment is None
    assert Overlay().plus({}).segment is None


# -- the filter ------------------------------------------------------------------------------------


def passes(presence: PresenceFilter, hi: int) -> bool:
    return bool(presence.marks[hi & presence.mask])


def test_what_is_in_the_set_and_what_is_added_passes_and_few_others() -> None:
    numbers = np.random.default_rng(0).integers(0, 2**64, 3000, "u8")
    inside, added, others = (part.tolist() for part in np.split(numbers, 3))
    presence = PresenceFilter(np.array(inside, "<u8"), room=len(added))
    for hi in added:
        presence.add(hi)
    assert all(passes(presence, hi) for hi in inside + added)
    assert sum(passes(presence, hi) for hi in others) < len(others) / 4


def test_an_empty_set_lets_nothing_through() -> None:
    presence = PresenceFilter(np.empty(0, "<u8"))
    assert not any(passes(presence, hi) for hi in (0, 1, 2**64 - 1))
