# SPDX-License-Identifier: Apache-2.0
"""A namespace with an index: objects and deltas put there, and what a reader would find."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Mapping

from s3ec.identity import Key, Layout, make_key
from s3ec.index.deltas import Announcer, encode_delta, list_deltas, read_deltas
from s3ec.index.names import Names, SnapshotName, deltas_prefix, list_snapshots
from s3ec.index.snapshot import Rows, Segment, merge
from s3ec.store.base import Store
from s3ec.testing.memory_store import MemoryStore
from tests.support.waiting import until

NAMESPACE = "gemma-0123456789abcdef"
LAYOUT = Layout(NAMESPACE)


def key_of(text: object) -> Key:
    key = make_key(hashlib.sha256(str(text).encode()).hexdigest())
    assert key is not None
    return key


async def put_object(store: Store, key: Key, nbytes: int, layout: Layout = LAYOUT) -> None:
    await store.put_if_absent(layout.object(key), [bytes(nbytes)])


def delta_bytes(sizes: Mapping[bytes, int], layout: Layout = LAYOUT) -> bytes:
    """A delta of digests and sizes."""
    return b"".join(encode_delta(list(sizes), list(sizes.values()), layout.namespace))


def delta_name(layout: Layout = LAYOUT, *, ago_s: float = 0.0) -> str:
    """A name as a writer gives it whose clock is this machine's."""
    return deltas_prefix(layout) + Names().next(time.time() - ago_s)


async def announce(
    store: Store, keys: Iterable[Key], layout: Layout = LAYOUT, *, nbytes: int = 9
) -> str:
    """One delta of these keys; answers its name."""
    name = delta_name(layout)
    sizes = dict.fromkeys((key.digest for key in keys), nbytes)
    await store.put_if_absent(name, [delta_bytes(sizes, layout)])
    return name


async def all_announced(announcer: Announcer) -> None:
    """Have it send all that waits; returns when that is confirmed or given up."""
    announcer.send_soon()
    await until(lambda: not len(announcer))


def put_delta(
    memory: MemoryStore, layout: Layout, keys: Iterable[Key], *, at_s: float, nbytes: int = 9
) -> str:
    """Announce keys as a writer of that moment; answers the delta's name."""
    name = deltas_prefix(layout) + Names().next(at_s)
    sizes = dict.fromkeys((key.digest for key in keys), nbytes)
    memory.bucket.objects[name] = delta_bytes(sizes, layout)
    memory.bucket.modified_s[name] = at_s
    return name


async def view(store: Store, layout: Layout = LAYOUT) -> dict[bytes, int]:
    """What a reader that starts now holds: digests and sizes."""
    name, parts = SnapshotName(), []
    if snapshots := await list_snapshots(store, layout):
        name, info = snapshots[0]
        body = await store.get(info.name, max_bytes=2**40)
        assert body is not None
        parts.append(Segment.parse(body, layout.namespace).rows)
    found = await read_deltas(store, layout, await list_deltas(store, layout, name))
    parts += [rows for rows in found.values() if isinstance(rows, Rows)]
    return sizes_in(Segment.of(merge(parts)))


def sizes_in(segment: Segment) -> dict[bytes, int]:
    """Digests and sizes of all rows."""
    rows = segment.rows
    halves = zip(rows.hi.tolist(), rows.lo.tolist(), rows.nbytes.tolist(), strict=True)
    return {(hi << 64 | lo).to_bytes(16, "big"): nbytes for hi, lo, nbytes in halves}
