# SPDX-License-Identifier: Apache-2.0
"""The suite on a folder, and what is a folder's alone."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from urllib.parse import quote

import pytest

from s3ec.config import load_settings
from s3ec.errors import AccessError, ConflictError
from s3ec.store.open import open_store
from s3ec.store.url_store import UrlStore
from s3ec.testing.contract import MakeStore, StoreContract

AMPLE = 2**26


def folder_store(folder: Path) -> UrlStore:
    """A store over a folder that is there."""
    settings = load_settings({"url": f"file://{quote(str(folder))}", "read_timeout_s": 30}).settings
    store = open_store(settings)
    assert isinstance(store, UrlStore)
    return store


class TestFolder(StoreContract):
    list_count = 1005

    @pytest.fixture
    def make_store(self, tmp_path: Path) -> MakeStore:
        def make(prefix: str) -> UrlStore:
            folder = tmp_path / "bucket" / prefix
            folder.mkdir(parents=True, exist_ok=True)
            return folder_store(folder)

        return make


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    folder.mkdir()
    return folder


@pytest.fixture
async def store(folder: Path) -> AsyncIterator[UrlStore]:
    store = folder_store(folder)
    yield store
    await store.close()


NAMES = ["a//b", "a/", "./a", "a/../b", "../outside", "..", "bell\a", "nul\0", "line\nbreak"]


async def test_names_that_are_no_plain_path_are_refused_and_touch_nothing(
    store: UrlStore, folder: Path
) -> None:
    for name in NAMES:
        for call in (
            lambda name=name: store.get(name, max_bytes=1),
            lambda name=name: store.get_range(name, 0, 1),
            lambda name=name: store.put_if_absent(name, [b"x"]),
            lambda name=name: store.head(name),
            lambda name=name: store.delete(name),
        ):
            with pytest.raises(ValueError, match="name"):
                await call()
    assert os.listdir(folder) == []
    assert os.listdir(folder.parent) == ["corpus"]


ODD = ["%2e%2e/x", "a%2fb", "back\\slash", "[x]*?", " ", "~", "x#1y", ".hidden", "~/x", "-rf"]


async def test_odd_names_are_names_of_files_and_no_more(store: UrlStore, folder: Path) -> None:
    for name in ODD:
        await store.put_if_absent(name, [b"x"])
        assert (folder / name).read_bytes() == b"x"
        assert await store.get(name, max_bytes=1) == b"x"
        assert [info.name async for info in store.list("")] == [name]
        await store.delete(name)
        assert await store.head(name) is None


async def test_symbolic_links_are_neither_followed_nor_listed(
    store: UrlStore, folder: Path, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"secret")
    (folder / "file").symlink_to(outside / "secret")
    (folder / "folder").symlink_to(outside)
    (folder / "dangling").symlink_to(outside / "absent")
    await store.put_if_absent("real/x", [b"x"])
    for name in ("file", "folder/secret", "dangling"):
        for call in (
            lambda name=name: store.get(name, max_bytes=10),
            lambda name=name: store.get_range(name, 0, 1),
            lambda name=name: store.head(name),
            lambda name=name: store.delete(name),
            lambda name=name: store.put_if_absent(name, [b"x"]),
        ):
            with pytest.raises(AccessError, match="symbolic links"):
                await call()
    assert [info.name async for info in store.list("")] == ["real/x"]
    assert [info.name async for info in store.list("folder/")] == []
    assert list(await store.list_folders("")) == ["real/"]
    assert os.listdir(outside) == ["secret"]


def make_socket(path: Path) -> None:
    """Bound in its folder: the path of a socket is short."""
    with socket.socket(socket.AF_UNIX) as made:
        before = os.getcwd()
        os.chdir(path.parent)
        try:
            made.bind(path.name)
        finally:
            os.chdir(before)


@pytest.mark.parametrize("make", [os.mkfifo, make_socket], ids=["pipe", "socket"])
async def test_what_is_no_file_is_neither_opened_nor_listed_nor_removed(
    store: UrlStore, folder: Path, make: Callable[[Path], None]
) -> None:
    """To open a pipe takes until somebody writes into it."""
    (folder / "a").mkdir()
    make(folder / "a" / "x")
    for call in (
        lambda: store.get("a/x", max_bytes=10),
        lambda: store.get_range("a/x", 0, 1),
        lambda: store.head("a/x"),
        lambda: store.delete("a/x"),
        lambda: store.put_if_absent("a/x", [b"x"]),
    ):
        with pytest.raises(AccessError, match="it is no file"):
            await call()
    assert list(await store.delete_many(["a/x"])) == ["a/x"]
    assert [info.name async for info in store.list("")] == []
    assert os.listdir(folder / "a") == ["x"]


async def test_no_reader_sees_half_a_file(store: UrlStore, folder: Path) -> None:
    body = os.urandom(20_000_000)
    writing = asyncio.create_task(store.put_if_absent("a/big", [body]))
    seen: set[int] = set()
    while not writing.done():
        info = await store.head("a/big")
        blob = await store.get("a/big", max_bytes=AMPLE)
        listed = [entry.nbytes async for entry in store.list("")]
        seen.update([info.nbytes if info else -1, len(blob) if blob else -1, *listed])
    await writing
    assert seen <= {-1, len(body)}
    assert await store.get("a/big", max_bytes=AMPLE) == body
    assert os.listdir(folder / "a") == ["big"]


async def test_what_a_killed_writer_left_is_neither_listed_nor_in_the_way(
    store: UrlStore, folder: Path
) -> None:
    (folder / "a").mkdir()
    (folder / "a" / "x#1").write_bytes(b"half")  # obstore's name for a file it is writing
    assert [info.name async for info in store.list("")] == []
    assert list(await store.list_folders("")) == []
    await store.put_if_absent("a/x", [b"whole"])
    assert await store.get("a/x", max_bytes=10) == b"whole"
    with pytest.raises(ConflictError):
        await store.put_if_absent("a/x", [b"again"])
    with pytest.raises(AccessError, match="digits"):
        await store.get("a/x#1", max_bytes=10)


async def test_a_file_where_a_folder_should_be_is_absence_and_cannot_be_written_below(
    store: UrlStore,
) -> None:
    await store.put_if_absent("x", [b"x"])
    assert await store.get("x/y", max_bytes=10) is None
    assert await store.head("x/y") is None
    await store.delete("x/y")
    with pytest.raises(AccessError):
        await store.put_if_absent("x/y", [b"y"])
    assert await store.get("x", max_bytes=10) == b"x"


async def test_absent_folder_is_an_access_error_until_it_is_made(tmp_path: Path) -> None:
    store = folder_store(tmp_path / "later")
    calls: list[Callable[[], object]] = [
        lambda: store.get("x", max_bytes=10),
        lambda: store.put_if_absent("x", [b"x"]),
        lambda: store.list_folders(""),
    ]
    for call in calls:
        with pytest.raises(AccessError, match="no such folder; make it, or correct `url`"):
            await call()  # type: ignore[misc]
    (tmp_path / "later").mkdir()
    await store.put_if_absent("x", [b"x"])
    assert await store.get("x", max_bytes=10) == b"x"
    await store.close()


async def test_name_that_the_file_system_refuses_is_an_access_error(store: UrlStore) -> None:
    for call in (
        lambda: store.put_if_absent("n" * 300, [b"x"]),
        lambda: store.get("n" * 300, max_bytes=10),
    ):
        with pytest.raises(AccessError, match="ENAMETOOLONG"):
            await call()
