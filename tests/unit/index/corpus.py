# SPDX-License-Identifier: Apache-2.0
"""A bucket with an index in it, written by hand, and readers of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from s3ec.counters import Counters
from s3ec.identity import Key
from s3ec.index.child import in_process
from s3ec.index.deltas import encode_delta
from s3ec.index.local import NodeFolder
from s3ec.index.names import Names, SnapshotName, deltas_prefix, snapshots_prefix
from s3ec.index.reader import ManifestIndex
from s3ec.index.snapshot import Rows, encode, merge
from s3ec.store.base import Store
from s3ec.store.endpoint import Endpoint
from s3ec.store.places import Place, PlacesStore
from s3ec.testing.fault_store import Fault, FaultStore, Script
from s3ec.testing.memory_store import MemoryStore
from tests.support.clock import Clock
from tests.support.indexes import LAYOUT, NAMESPACE, key_of

T = TypeVar("T")

REFRESH_S = 10.0


def keys_of(*texts: object) -> list[Key]:
    return [key_of(text) for text in texts]


async def in_thread(
    function: Callable[..., T], *args: object, undo: Callable[[T], object] | None = None
) -> T:
    return await asyncio.to_thread(function, *args)


class Corpus:
    """The bucket's side: what writers and makers have left there, by one clock."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.store = MemoryStore(clock=self.clock)
        self.names = Names()

    @property
    def objects(self) -> dict[str, bytes]:
        return self.store.bucket.objects

    def put(self, name: str, body: bytes, *, modified_s: float | None = None) -> None:
        self.objects[name] = body
        dated_s = self.clock.now_s if modified_s is None else modified_s
        self.store.bucket.modified_s[name] = dated_s

    def delete(self, *names: str) -> None:
        for name in names:
            del self.objects[name]
            del self.store.bucket.modified_s[name]

    def save(self, *texts: object) -> None:
        """Objects themselves."""
        for key in keys_of(*texts):
            self.put(LAYOUT.object(key), b"entry")

    def drop(self, *texts: object) -> None:
        self.delete(*(LAYOUT.object(key) for key in keys_of(*texts)))

    def ulid(self, ago_s: float = 0.0) -> str:
        """A name by the server's clock, so long ago; by another writer if it is not now."""
        names = Names() if ago_s else self.names
        return names.next(self.clock.now_s - ago_s)

    def delta(self, *texts: object, ago_s: float = 0.0, nbytes: int = 5) -> str:
        """Announce keys under a name that is so old; answers the ULID."""
        digests = [key.digest for key in keys_of(*texts)]
        ulid = self.ulid(ago_s)
        body = b"".join(encode_delta(digests, [nbytes] * len(digests), NAMESPACE))
        self.put(deltas_prefix(LAYOUT) + ulid, body)
        return ulid

    def snapshot(self, *texts: object, listed: str | None = None, ulid: str = "") -> SnapshotName:
        """A snapshot with rows for some keys; a listing unless ``listed`` is given."""
        ulid = ulid or self.ulid()
        name = SnapshotName(ulid if listed is None else listed, ulid)
        rows = merge([rows_for(texts)])
        self.put(snapshots_prefix(LAYOUT) + str(name), b"".join(encode(rows, NAMESPACE)))
        return name

    def index_names(self, kind: str) -> list[str]:
        """Names below ``manifest/v2/KIND/``, sorted."""
        prefix = f"{LAYOUT.manifest}v2/{kind}/"
        return sorted(n.removeprefix(prefix) for n in self.objects if n.startswith(prefix))


def near_of(corpus: Corpus) -> Corpus:
    """A replica that has all that home has now."""
    near = Corpus()
    near.objects.update(corpus.objects)
    near.store.bucket.modified_s.update(corpus.store.bucket.modified_s)
    return near


def rows_for(texts: Iterable[object], nbytes: int = 5) -> Rows:
    digests = [key.digest for key in keys_of(*texts)]
    return Rows.of(digests, [nbytes] * len(digests))


class Reader:
    """One process of a node: an index over a folder that others may share."""

    def __init__(
        self,
        corpus: Corpus,
        folder: Path,
        *,
        script: Script | None = None,
        near: Corpus | None = None,
        **options: Any,
    ) -> None:
        store: Store
        self.corpus = corpus
        self.clock = Clock(0.0)
        self.counters = Counters()
        self.script = script or Script()
        self.store = store = FaultStore(corpus.store, self.script)
        if near is not None:
            place = Place("near", near.store, Endpoint(16), self.counters)
            store = PlacesStore(store, [place], is_entry=LAYOUT.is_entry)
        self.folder = NodeFolder(folder, clock=corpus.clock)
        self.index = ManifestIndex(
            store,
            LAYOUT,
            self.folder,
            jobs=options.pop("jobs", in_process(store)),
            disk=in_thread,
            counters=self.counters,
            refresh_s=REFRESH_S,
            clock=self.clock,
            **options,
        )

    def pass_time(self, seconds: float) -> None:
        """Also for the bucket, and for all other readers of it."""
        self.clock.now_s += seconds
        self.corpus.clock.now_s += seconds

    async def refresh(self, *, now: bool = True) -> None:
        """A refresh, and the end of the download that it may have begun."""
        await self.index.refresh(now=now)
        if (fetch := self.index._fetch) is not None:
            await fetch

    def holds(self, *texts: object) -> list[object]:
        """Those that a lookup finds."""
        return [text for text in texts if self.index.maybe_contains(key_of(text))]

    def fault(self, fault: Fault) -> Fault:
        """Have this go wrong; what was added last goes first."""
        self.script.faults.insert(0, fault)
        return fault

    async def close(self) -> None:
        await self.index.close()
