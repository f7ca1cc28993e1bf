# SPDX-License-Identifier: Apache-2.0
"""What a listing takes for entries, and what a reader without a base makes of listings."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator

import pytest

from s3ec.errors import AccessError, UnavailableError
from s3ec.identity import Key, Layout, make_key
from s3ec.index import listing
from s3ec.index.listing import list_digests
from s3ec.store.base import ObjectInfo, UnorderedListingError
from s3ec.testing.fault_store import Fault, Gate
from s3ec.testing.memory_store import MemoryStore
from tests.support.waiting import reached
from tests.unit.index.basics import LAYOUT, key_of
from tests.unit.index.corpus import Corpus, Reader

OTHER = Layout("gemma-fedcba9876543210")
NEXT_LISTING_S = 601.0


async def store(memory: MemoryStore, *keys: Key, layout: Layout = LAYOUT) -> None:
    for key in keys:
        await memory.put_if_absent(layout.object(key), [b"entry"])


async def test_every_kind_of_entry_of_the_namespace_is_found(memory: MemoryStore) -> None:
    content = hashlib.sha256(b"x").hexdigest()
    names = (content, f"lora:{content}", f"L:{content}", "picture.png")
    keys = [key for key in map(make_key, names) if key]
    await store(memory, *keys)
    await store(memory, key_of(1), layout=OTHER)
    await memory.put_if_absent(LAYOUT.descriptor, [b"{}"])
    await memory.put_if_absent(LAYOUT.modality("image"), [b"{}"])
    found: set[bytes] = set()
    await list_digests(memory, LAYOUT, found)
    assert found == {key.digest for key in keys}
    assert len(found) == 4


async def test_junk_is_not_taken_for_entries(corpus: Corpus, reader: Reader) -> None:
    name = hashlib.sha256(b"x").hexdigest()
    junk = {
        "": b"x",  # a directory marker
        "ab/": b"",
        "readme.txt": b"x",
        f"{name}.safetensors": b"x",
        f"zz/{name}.safetensors": b"x",
        f"{name[:2]}/{name}.safetensors.part": b"x",
        f"{name[:2]}/{name}.r1.safetensors": b"x",
        f"{name[:2]}/{name}.safetensors": b"",  # an upload that wrote nothing
        f"{name[:2]}/{name[:-1]}\u0661.safetensors": b"x",
        f"{name[:2]}/\u00e9.safetensors": b"x",
    }
    for each, body in junk.items():
        corpus.put(LAYOUT.objects + each, body)
    corpus.store("a")
    found: set[bytes] = set()
    await list_digests(corpus.memory, LAYOUT, found)
    assert found == {key_of("a").digest}
    await reader.refresh()


class Frail:
    """Breaks off after each few names.

    Attributes:
        asked: Where each listing was to start.
    """

    def __init__(self, names: list[str]) -> None:
        self.names = names
        self.asked: list[str] = []

    async def list(self, prefix: str, *, start_after: str = "") -> AsyncIterator[ObjectInfo]:
        self.asked.append(start_after)
        left = [name for name in self.names if name > start_after]
        for name in left[:3]:
            yield ObjectInfo(name, 1)
        if len(left) > 3:
            raise UnavailableError("cut off")


async def test_a_listing_that_breaks_off_over_and_over_goes_on_where_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(listing, "PAUSE_S", 0.0)
    keys = sorted((key_of(number) for number in range(20)), key=lambda key: key.name)
    names = [LAYOUT.object(key) for key in keys]
    frail = Frail(names)
    found: set[bytes] = set()
    await list_digests(frail, LAYOUT, found)  # type: ignore[arg-type]
    assert found == {key.digest for key in keys}
    assert frail.asked == ["", *names[2:18:3]]


async def test_a_listing_in_no_order_does_not_go_on_where_it_broke_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where the names that came happened to ascend: smaller ones would be left out."""

    class Unordered(Frail):
        async def list(self, prefix: str, *, start_after: str = "") -> AsyncIterator[ObjectInfo]:
            self.asked.append(start_after)
            if len(self.asked) == 1:
                raise UnorderedListingError("cut off before the first")
            for name in self.names[:2]:
                yield ObjectInfo(name, 1)
            raise UnorderedListingError("cut off")

    monkeypatch.setattr(listing, "PAUSE_S", 0.0)
    store = Unordered(sorted(LAYOUT.object(key_of(number)) for number in range(3)))
    with pytest.raises(UnorderedListingError):
        await list_digests(store, LAYOUT, set())  # type: ignore[arg-type]
    assert store.asked == ["", ""]


# -- a reader without a base -------------------------------------------------------------------


async def test_what_was_deleted_vanishes_with_the_next_listing(
    corpus: Corpus, reader: Reader
) -> None:
    corpus.store("a", "b")
    await reader.refresh()
    corpus.delete(LAYOUT.object(key_of("a")))
    await reader.refresh()
    assert reader.finds("a", "b") == [True, True]
    reader.clock.now_s += NEXT_LISTING_S
    await reader.refresh()
    assert reader.finds("a", "b") == [False, True]


class HalfAListing(MemoryStore):
    """Lists what it is told to, and breaks off then."""

    error: Exception | None = None

    async def list(self, prefix: str, *, start_after: str = "") -> AsyncIterator[ObjectInfo]:
        async for info in super().list(prefix, start_after=start_after):
            yield info
        if self.error is not None and prefix == LAYOUT.objects:
            raise self.error


@pytest.mark.parametrize("error", [UnavailableError("x"), AccessError("x")])
async def test_a_listing_that_fails_keeps_the_old_and_adds_what_it_saw(
    corpus: Corpus, reader: Reader, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(listing, "PAUSE_S", 0.0)
    half = HalfAListing(corpus.memory.bucket)
    half.error = error
    reader.cache.store = half
    corpus.store("a")
    with pytest.raises(type(error)):
        await reader.refresh()
    assert reader.finds("a") == [True]
    assert not reader.index.loaded
    corpus.delete(LAYOUT.object(key_of("a")))
    corpus.store("b")
    with pytest.raises(type(error)):  # it is due at once, after a failure
        await reader.refresh()
    assert reader.finds("a", "b") == [True, True]
    half.error = None
    await reader.refresh()
    assert reader.finds("a", "b") == [False, True]
    assert reader.index.loaded


async def test_a_listing_that_is_cancelled_keeps_the_old(corpus: Corpus, reader: Reader) -> None:
    corpus.store("a")
    await reader.refresh()
    reader.clock.now_s += NEXT_LISTING_S
    gate = Gate()
    reader.script.faults = [Fault(op="list", name=LAYOUT.objects, gate=gate)]
    refresh = asyncio.create_task(reader.refresh())
    await reached(gate)
    refresh.cancel()
    with pytest.raises(asyncio.CancelledError):
        await refresh
    await reader.index.close()
    assert reader.finds("a") == [True]
