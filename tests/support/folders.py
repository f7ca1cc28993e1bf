# SPDX-License-Identifier: Apache-2.0
"""Corpora in folders, and what lies in them."""

from __future__ import annotations

from pathlib import Path

from s3ec.corpus import Corpus
from s3ec.identity import Layout, make_key
from s3ec.store.base import Store


def in_folder(folder: Path) -> Corpus:
    """A corpus in a folder, which is made."""
    folder.mkdir(parents=True, exist_ok=True)
    return Corpus.open(url=folder.as_uri())


def files_of(folder: Path) -> dict[str, bytes]:
    """All files, by their names below a folder."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def object_name(namespace: str, identifier: str) -> str:
    """Name of an entry's object."""
    key = make_key(identifier)
    assert key is not None
    return Layout(namespace).object(key)


def put_over(folder: Path, name: str, body: bytes) -> None:
    """Write a file, over another one too, as nothing of ours would."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(body)


def objects_of(corpus: Corpus, namespace: str) -> dict[str, bytes]:
    """The objects of all entries, by their names."""

    async def read(store: Store) -> dict[str, bytes]:
        infos = [info async for info in store.list(Layout(namespace).objects)]
        return {
            info.name: bytes(await store.get(info.name, max_bytes=info.nbytes) or b"")
            for info in infos
        }

    return corpus.run(read)
