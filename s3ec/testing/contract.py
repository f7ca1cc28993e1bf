# SPDX-License-Identifier: Apache-2.0
"""The suite that every Store passes; subclass StoreContract and give it a factory.

::

    class TestMyStore(StoreContract):
        @pytest.fixture
        def make_store(self) -> MakeStore:
            return lambda prefix: MyStore(bucket="b", prefix=prefix)
"""

# The checks are asserts, as in any test.
# ruff: noqa: S101

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import AsyncIterator, Callable

import pytest
import pytest_asyncio

from s3ec.errors import ConflictError, CorruptEntryError, UnavailableError
from s3ec.store.base import DELETE_AT_A_TIME, ObjectInfo, Store
from s3ec.store.redis_store import RedisStore

MakeStore = Callable[[str], Store]
"""Prefix to a new store over one bucket; the suite closes what it makes."""

_RACERS = 16
_AMPLE = 2**26


async def _names(store: Store, prefix: str, *, start_after: str = "") -> list[str]:
    if isinstance(store, RedisStore):
        pytest.skip("Redis cannot list; all before that was asked of it")
    return [info.name async for info in store.list(prefix, start_after=start_after)]


async def _put_all(store: Store, bodies: dict[str, bytes]) -> None:
    limit = asyncio.Semaphore(32)

    async def put(name: str, body: bytes) -> None:
        async with limit:
            await store.put_if_absent(name, [body])

    await asyncio.gather(*(put(name, body) for name, body in bodies.items()))


class StoreContract:
    """The promises of base.Store, as tests; each test has a prefix of its own.

    Attributes:
        list_count: Objects in the test of a long listing; more than one page of the store.
        decides_races: True if the service checks for an object and writes it in one step. A
            service that does not is unfit for a corpus.
    """

    list_count = 1005
    decides_races = True

    @pytest.fixture
    def make_store(self) -> MakeStore:
        """The only fixture that a subclass must override."""
        raise NotImplementedError("override the make_store fixture")

    @pytest_asyncio.fixture
    async def store(self, make_store: MakeStore) -> AsyncIterator[Store]:
        """Yield a store over a prefix that no other test uses."""
        store = make_store(f"contract-{secrets.token_hex(6)}")
        yield store
        await store.close()

    async def test_get_returns_what_was_put(self, store: Store) -> None:
        for nbytes in (0, 1, 65_537, 2_752_512):
            body = os.urandom(nbytes)
            await store.put_if_absent(f"aa/{nbytes}", [body])
            assert await store.get(f"aa/{nbytes}", max_bytes=_AMPLE) == body

    async def test_bodies_are_read_only_bytes_that_outlive_a_store_which_is_closed_twice(
        self, make_store: MakeStore
    ) -> None:
        store, body = make_store(f"contract-{secrets.token_hex(6)}"), os.urandom(100_000)
        await store.put_if_absent("one", [body])
        whole = await store.get("one", max_bytes=_AMPLE)
        part = await store.get_range("one", 10, 1000)
        for _ in range(2):
            await store.close()
        for blob, expected in ((whole, body), (part, body[10:1010])):
            assert isinstance(blob, (bytes, memoryview))
            view = memoryview(blob)
            assert (view.readonly, view.format, view.nbytes) == (True, "B", len(expected))
            assert bytes(view) == expected

    async def test_put_joins_pieces_of_every_kind_in_order(self, store: Store) -> None:
        data = bytes(range(256)) * 8
        words = memoryview(data).cast("H")
        pieces: list[bytes | memoryview] = [
            b"",
            data[:3],
            memoryview(data)[3:100],
            memoryview(b""),
            words[50:],
            b"end",
        ]
        await store.put_if_absent("pieces", pieces)
        assert await store.get("pieces", max_bytes=_AMPLE) == data + b"end"
        await store.put_if_absent("view", [memoryview(b"abcdef")[2:4]])
        await store.put_if_absent("nothing", [])
        assert await store.get("view", max_bytes=10) == b"cd"
        assert await store.get("nothing", max_bytes=10) == b""

    async def test_absent_object_is_none(self, store: Store) -> None:
        assert await store.get("absent", max_bytes=10) is None
        assert await store.get_range("absent", 0, 10) is None
        assert await store.head("absent") is None

    async def test_get_refuses_objects_above_max_bytes(self, store: Store) -> None:
        await store.put_if_absent("ten", [b"0123456789"])
        assert await store.get("ten", max_bytes=10) == b"0123456789"
        with pytest.raises(CorruptEntryError) as caught:
            await store.get("ten", max_bytes=9)
        assert caught.value.reason == "size"

    async def test_get_range_ends_where_the_object_ends(self, store: Store) -> None:
        await store.put_if_absent("ten", [b"0123456789"])
        for start, length, expected in (
            (0, 4, b"0123"),
            (3, 4, b"3456"),
            (8, 4, b"89"),
            (0, 100, b"0123456789"),
            (9, 1, b"9"),
            (10, 4, b""),
            (1000, 4, b""),
        ):
            assert await store.get_range("ten", start, length) == expected
        await store.put_if_absent("empty", [b""])
        assert await store.get_range("empty", 0, 10) == b""

    async def test_get_range_refuses_impossible_ranges(self, store: Store) -> None:
        for start, length in ((-1, 4), (0, 0), (0, -1)):
            with pytest.raises(ValueError, match="range"):
                await store.get_range("ten", start, length)

    async def test_head_tells_name_and_size(self, store: Store) -> None:
        await store.put_if_absent("aa/ten", [b"0123456789"])
        info = await store.head("aa/ten")
        assert isinstance(info, ObjectInfo)
        assert (info.name, info.nbytes) == ("aa/ten", 10)
        assert info.modified_s >= 0

    async def test_put_if_absent_keeps_first_writer(self, store: Store) -> None:
        await store.put_if_absent("one", [b"first"])
        with pytest.raises(ConflictError):
            await store.put_if_absent("one", [b"second, and longer"])
        assert await store.get("one", max_bytes=100) == b"first"

    async def test_of_16_racing_writers_exactly_one_wins(self, store: Store) -> None:
        if not self.decides_races:
            pytest.skip("this server looks for an object and writes it in two steps")
        bodies = [os.urandom(10_000) for _ in range(_RACERS)]
        puts = (store.put_if_absent("race", [body]) for body in bodies)
        results = await asyncio.gather(*puts, return_exceptions=True)
        winners = [body for body, result in zip(bodies, results, strict=True) if result is None]
        losers = [result for result in results if result is not None]
        assert len(winners) == 1
        assert await store.get("race", max_bytes=_AMPLE) == winners[0]
        # A server answers 409 while another write of this name is running.
        assert all(isinstance(loser, (ConflictError, UnavailableError)) for loser in losers)

    async def test_list_returns_every_object_once_over_many_pages(self, store: Store) -> None:
        bodies = {f"objects/{i:05d}": b"x" * (i % 7) for i in range(self.list_count)}
        await _put_all(store, bodies)
        await _names(store, "objects/00000")  # skips this test if the store cannot list
        listed = [info async for info in store.list("objects/")]
        assert len(listed) == len(bodies)
        assert {info.name: info.nbytes for info in listed} == {
            name: len(body) for name, body in bodies.items()
        }

    async def test_list_start_after_returns_the_later_names(self, store: Store) -> None:
        await _put_all(store, {f"objects/{i:03d}": b"x" for i in range(30)})
        later = await _names(store, "objects/", start_after="objects/019")
        assert sorted(later) == [f"objects/{i:03d}" for i in range(20, 30)]
        assert await _names(store, "objects/", start_after="objects/029") == []

    async def test_list_matches_a_prefix_inside_a_name(self, store: Store) -> None:
        await _put_all(store, {"aa/1": b"", "aa/12": b"", "aa/2": b"", "ab/1": b""})
        assert sorted(await _names(store, "aa/1")) == ["aa/1", "aa/12"]
        assert sorted(await _names(store, "a")) == ["aa/1", "aa/12", "aa/2", "ab/1"]
        assert sorted(await _names(store, "")) == ["aa/1", "aa/12", "aa/2", "ab/1"]

    async def test_list_of_nothing_is_empty(self, store: Store) -> None:
        assert await _names(store, "") == []
        assert await _names(store, "no/such/folder/") == []
        assert list(await store.list_folders("")) == []

    async def test_list_returns_foreign_names_as_they_are(self, store: Store) -> None:
        junk = {"x/a b.txt", "x/größe-日本", "x/1+1=2", "x/100%25", "x/q?a=b&c#d", "x/UP.~tmp'\"<>"}
        await _put_all(store, dict.fromkeys(junk, b"junk"))
        assert set(await _names(store, "x/")) == junk
        for name in junk:
            assert await store.get(name, max_bytes=10) == b"junk"

    async def test_list_can_be_left_early(self, store: Store) -> None:
        await _put_all(store, {f"objects/{i:03d}": b"x" for i in range(30)})
        await _names(store, "objects/000")
        listing = store.list("objects/")
        first = await anext(listing)
        assert first.name.startswith("objects/")
        # The store still works after an unfinished listing.
        assert await store.get(first.name, max_bytes=1) == b"x"

    async def test_list_folders_names_what_is_directly_below(self, store: Store) -> None:
        await _names(store, "")
        await _put_all(store, {"a/b/1": b"", "a/b/2": b"", "a/c/d/3": b"", "a/4": b"", "e/5": b""})
        assert sorted(await store.list_folders("")) == ["a/", "e/"]
        assert sorted(await store.list_folders("a/")) == ["b/", "c/"]
        assert list(await store.list_folders("a/b/")) == []
        with pytest.raises(ValueError, match="slash"):
            await store.list_folders("a")

    async def test_list_folders_over_many_pages(self, store: Store) -> None:
        await _names(store, "")
        await _put_all(store, {f"f{i:03d}/x": b"" for i in range(30)})
        assert sorted(await store.list_folders("")) == [f"f{i:03d}/" for i in range(30)]

    async def test_delete_is_idempotent_and_frees_the_name(self, store: Store) -> None:
        await store.put_if_absent("one", [b"first"])
        await store.delete("one")
        await store.delete("one")
        assert await store.get("one", max_bytes=10) is None
        assert await _names(store, "") == []
        await store.put_if_absent("one", [b"again"])
        assert await store.get("one", max_bytes=10) == b"again"

    async def test_delete_many_removes_those_named_and_no_others(self, store: Store) -> None:
        gone = ["a/1", "a/2", "a b&<c>\"'/größe-日本+%25", "1"]
        await _put_all(store, dict.fromkeys([*gone, "a/3", "kept"], b"x"))
        assert await store.delete_many([*gone, "absent", "a/1"]) == {}
        assert sorted(await _names(store, "")) == ["a/3", "kept"]
        assert await store.delete_many(gone) == {}  # absence is success
        assert await store.delete_many([]) == {}
        assert sorted(await _names(store, "")) == ["a/3", "kept"]

    async def test_delete_many_takes_a_thousand_names(self, store: Store) -> None:
        names = [f"objects/{i:04d}" for i in range(DELETE_AT_A_TIME)]
        await _put_all(store, dict.fromkeys([*names[::10], "kept"], b"x"))
        assert await store.delete_many(names) == {}
        assert await _names(store, "") == ["kept"]
        with pytest.raises(ValueError, match="1000"):
            await store.delete_many([*names, "kept"])
        assert await _names(store, "") == ["kept"]

    async def test_delete_many_with_a_name_that_is_none_deletes_nothing(self, store: Store) -> None:
        await store.put_if_absent("one", [b"x"])
        for name in ("", "/absolute"):
            with pytest.raises(ValueError, match="name"):
                await store.delete_many(["one", name])
        assert await _names(store, "") == ["one"]

    async def test_concurrent_reads_return_their_own_objects(self, store: Store) -> None:
        bodies = {f"n{i}": os.urandom(20_000 + i) for i in range(48)}
        await _put_all(store, bodies)
        read = await asyncio.gather(*(store.get(name, max_bytes=_AMPLE) for name in bodies))
        assert read == list(bodies.values())

    async def test_prefixes_keep_stores_apart(self, make_store: MakeStore) -> None:
        token = secrets.token_hex(4)
        one, longer = make_store(f"t-{token}"), make_store(f"t-{token}x")
        try:
            await one.put_if_absent("name", [b"1"])
            await longer.put_if_absent("name", [b"22"])
            assert await one.get("name", max_bytes=10) == b"1"
            assert await longer.get("name", max_bytes=10) == b"22"
            assert await _names(one, "") == ["name"]
            await one.delete("name")
            assert await longer.get("name", max_bytes=10) == b"22"
        finally:
            await one.close()
            await longer.close()

    async def test_prefix_of_any_printable_characters(self, make_store: MakeStore) -> None:
        store = make_store(f"{secrets.token_hex(4)}/mit Leerzeichen/größe/日本/a+b%20&c=d/~#?")
        try:
            await store.put_if_absent("aa/x", [b"body"])
            assert await store.get("aa/x", max_bytes=10) == b"body"
            assert await store.get_range("aa/x", 1, 2) == b"od"
            assert await store.head("aa/x") is not None
            assert await _names(store, "aa/") == ["aa/x"]
            assert await _names(store, "", start_after="aa/x") == []
            assert list(await store.list_folders("")) == ["aa/"]
            await store.delete("aa/x")
            assert await store.head("aa/x") is None
        finally:
            await store.close()

    async def test_without_a_prefix_names_are_keys(self, make_store: MakeStore) -> None:
        store, folder = make_store(""), f"root-{secrets.token_hex(4)}"
        try:
            await store.put_if_absent(f"{folder}/x", [b"body"])
            assert await store.get(f"{folder}/x", max_bytes=10) == b"body"
            assert await _names(store, f"{folder}/") == [f"{folder}/x"]
            assert f"{folder}/" in await store.list_folders("")
        finally:
            await store.delete(f"{folder}/x")
            await store.close()

    async def test_names_up_to_1024_bytes(self, make_store: MakeStore) -> None:
        prefix = secrets.token_hex(4)
        store = make_store(prefix)
        # Parts of at most 255 bytes, the limit of servers that store files.
        name = "/".join(["n" * 200] * 6)[: 1024 - len(prefix) - 1]
        try:
            await store.put_if_absent(name, [b"far"])
            assert await store.get(name, max_bytes=10) == b"far"
            assert await _names(store, "") == [name]
        finally:
            await store.close()

    async def test_names_that_leave_the_prefix_are_refused(self, store: Store) -> None:
        for name in ("", "/absolute"):
            with pytest.raises(ValueError, match="name"):
                await store.put_if_absent(name, [b"x"])
            with pytest.raises(ValueError, match="name"):
                await store.get(name, max_bytes=10)
            with pytest.raises(ValueError, match="name"):
                await store.delete(name)
