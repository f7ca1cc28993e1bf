# SPDX-License-Identifier: Apache-2.0
"""Deleting entries: objects go, a thousand a request, and readers find out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from s3ec.errors import AccessError, ConflictError, UnavailableError
from s3ec.identity import Layout
from s3ec.index import delete as module
from s3ec.index.delete import delete_chosen, delete_entries, remove_namespace, survey
from s3ec.index.names import snapshots_prefix
from s3ec.index.snapshot import Segment
from s3ec.store.base import ObjectInfo
from s3ec.testing.fault_store import Fault, FaultStore, Script
from tests.unit.index.corpus import LAYOUT, NAMESPACE, Corpus, Reader, key_of, keys_of

MakeReader = Callable[..., Reader]


async def test_deleted_entries_are_gone_for_the_node_and_cost_others_one_404(
    corpus: Corpus, make_reader: MakeReader
) -> None:
    corpus.save("a", "b")
    corpus.snapshot("a", "b")
    here, there = make_reader("here"), make_reader("there")
    await here.refresh()
    await there.refresh()
    await delete_entries(corpus.store, LAYOUT, keys_of("a", "absent"), node=here.folder)
    assert LAYOUT.object(key_of("a")) not in corpus.objects
    await here.refresh()
    await there.refresh()
    assert here.holds("a", "b") == ["b"]
    assert there.holds("a", "b") == ["a", "b"]
    there.index.mark_missing(key_of("a"), absent=True)
    assert there.holds("a", "b") == ["b"]


@pytest.mark.parametrize("partial", [True, False])
@pytest.mark.parametrize("error", [UnavailableError, AccessError])
async def test_what_cannot_be_deleted_is_an_error_and_is_not_told(
    corpus: Corpus, make_reader: MakeReader, error: type[Exception], partial: bool
) -> None:
    corpus.save("a", "b")
    corpus.snapshot("a", "b")
    reader = make_reader()
    await reader.refresh()
    name = key_of("a").name if partial else ""
    script = Script([Fault(op="delete_many", name=name, error=error, partial=partial)])
    with pytest.raises(error):
        await delete_entries(
            FaultStore(corpus.store, script), LAYOUT, keys_of("a", "b"), node=reader.folder
        )
    await reader.refresh()
    assert reader.holds("a", "b") == (["a"] if partial else ["a", "b"])


def odd(infos: Sequence[ObjectInfo]) -> list[ObjectInfo]:
    chosen = {LAYOUT.object(key) for key in keys_of(*range(1, 100, 2))}
    return [info for info in infos if info.name in chosen]


async def test_what_a_gc_leaves_becomes_a_snapshot(corpus: Corpus, make_reader: MakeReader) -> None:
    corpus.save(*range(100))
    corpus.snapshot(*range(100), "gone", ulid=corpus.ulid(ago_s=10_000))
    deleted: list[object] = []
    made = await delete_chosen(corpus.store, LAYOUT, odd, deleted=deleted.extend)
    assert made.rows == 50
    assert len(deleted) == 50
    reader = make_reader()
    await reader.refresh()
    assert reader.holds(*range(100), "gone") == list(range(0, 100, 2))


async def test_what_is_stored_again_while_a_gc_runs_is_found(
    corpus: Corpus, make_reader: MakeReader
) -> None:
    corpus.save(*range(4))

    def again(_: object) -> None:
        corpus.save(1)
        corpus.delta(1)

    await delete_chosen(corpus.store, LAYOUT, odd, deleted=again)
    reader = make_reader()
    await reader.refresh()
    assert reader.holds(*range(4)) == [0, 1, 2]


@pytest.mark.parametrize("op", ["delete_many", "list", "put_if_absent"])
async def test_a_gc_that_fails_writes_no_snapshot(
    corpus: Corpus, op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("s3ec.index.listing.PAUSE_S", 0.0)
    corpus.save(*range(10))
    script = Script([Fault(op=op, name="objects|snapshot", error=UnavailableError)])
    with pytest.raises(UnavailableError):
        await delete_chosen(FaultStore(corpus.store, script), LAYOUT, odd)
    assert corpus.index_names("snapshot") == []


async def test_many_objects_are_chosen_round_by_round(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "DELETE_AT_A_TIME", 3)
    monkeypatch.setattr("s3ec.index.listing.BATCH", 10)
    corpus.save(*range(100))
    made = await delete_chosen(corpus.store, LAYOUT, odd)
    assert made.rows == 50
    body = corpus.objects[snapshots_prefix(LAYOUT) + str(made.name)]
    assert len(Segment.parse(body, NAMESPACE)) == 50


async def test_a_namespace_goes_with_all_that_is_in_it(corpus: Corpus) -> None:
    other = Layout("gemma-fedcba9876543210")
    corpus.put(other.descriptor, b"{}")
    corpus.put(LAYOUT.descriptor, b"{}")
    corpus.put(LAYOUT.modality("image"), b"{}")
    corpus.save(*range(20))
    corpus.delta("a")
    corpus.snapshot("a")
    corpus.clock.now_s += 3600
    counted = await survey(corpus.store, LAYOUT)
    assert (counted.entries, counted.objects, counted.others) == (20, 24, 0)
    removed = await remove_namespace(corpus.store, LAYOUT, 600)
    assert removed.entries == 20
    assert list(corpus.objects) == [other.descriptor]


async def test_a_namespace_in_use_stays(corpus: Corpus) -> None:
    corpus.put(LAYOUT.descriptor, b"{}")
    corpus.save("a")
    corpus.clock.now_s += 10
    with pytest.raises(ConflictError, match="was stored"):
        await remove_namespace(corpus.store, LAYOUT, 600)
    assert LAYOUT.object(key_of("a")) in corpus.objects
