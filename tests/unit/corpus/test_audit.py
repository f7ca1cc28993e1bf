# SPDX-License-Identifier: Apache-2.0
"""Deep checks, their states, and repairs, on a bucket in memory and on one that fails."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from s3ec.corpus import deep_check, entries
from s3ec.corpus.audit import Audit, Repair, audit, repair
from s3ec.corpus.catalog import CatalogWriter, read_table
from s3ec.corpus.catalog_file import CatalogRow
from s3ec.corpus.deep_check import AuditState, BadObject, DeepCheck, check_objects
from s3ec.errors import (
    AccessError,
    CorruptEntryError,
    S3ECError,
    TierError,
    UnavailableError,
)
from s3ec.identity import Layout, Namespace, make_key
from s3ec.store import base
from s3ec.store.base import Store
from s3ec.testing.fault_store import Fault, FaultStore, Gate, Script, cut, flip
from s3ec.testing.memory_store import MemoryStore
from tests.support.indexes import put_delta, view
from tests.support.waiting import reached
from tests.unit.cli.corpus import MODEL, content_hash, entry_bytes

NAMESPACE = Namespace.from_descriptor(MODEL)
LAYOUT = Layout(NAMESPACE.name)
IDS = [content_hash(f"page {number}") for number in range(20)]
LORA = f"my-lora:{content_hash('adapted')}"


def object_of(identifier: str) -> str:
    key = make_key(identifier)
    assert key is not None
    return LAYOUT.object(key)


def put(memory: MemoryStore, identifier: str, body: bytes | None = None) -> str:
    """Past any store, as damage comes."""
    name = object_of(identifier)
    memory.bucket.objects[name] = entry_bytes(identifier, NAMESPACE.name) if body is None else body
    memory.bucket.modified_s[name] = 1000.0
    return name


def announce(memory: MemoryStore, *identifiers: str) -> None:
    """Announced so long ago that a listing of now knows better."""
    keys = [key for key in map(make_key, identifiers) if key is not None]
    put_delta(memory, LAYOUT, keys, at_s=time.time() - 3600)


def flipped(identifier: str) -> bytes:
    body = bytearray(entry_bytes(identifier, NAMESPACE.name))
    body[-1] ^= 1
    return bytes(body)


@pytest.fixture
async def memory() -> MemoryStore:
    """Of 20 entries and one of an adapter, all announced."""
    store = MemoryStore()
    await store.put_if_absent(LAYOUT.descriptor, [NAMESPACE.to_json()])
    for identifier in (*IDS, LORA):
        put(store, identifier)
    announce(store, *IDS, LORA)
    return store


async def look(store: Store, *, deep: bool = True, state: AuditState | None = None) -> Audit:
    return await audit(store, LAYOUT, deep=deep, state=state)


async def mend(store: Store, found: Audit) -> Repair:
    return await repair(store, LAYOUT, found)


def deep_of(found: Audit) -> DeepCheck:
    assert found.deep is not None
    return found.deep


@pytest.mark.parametrize("few", [0, 4096], ids=["by folders", "at once"])
async def test_sound_corpus_agrees_and_every_object_is_read_once(
    memory: MemoryStore, monkeypatch: pytest.MonkeyPatch, few: int
) -> None:
    monkeypatch.setattr(deep_check, "FEW", few)
    store = FaultStore(memory)
    found = await look(store)
    assert found.agrees
    deep = deep_of(found)
    assert (deep.objects, deep.corrupt, deep.unread, deep.gone) == (21, 0, 0, 0)
    assert deep.nbytes == sum(
        len(body) for name, body in memory.bucket.objects.items() if "/objects/" in name
    )
    read = [name for op, name in store.log if op == "get" and "/objects/" in name]
    assert sorted(read) == sorted(map(object_of, (*IDS, LORA)))


DAMAGE = {
    "checksum": flipped(IDS[0]),
    "length": entry_bytes(IDS[0], NAMESPACE.name)[:-2],
    "identifier": entry_bytes(IDS[1], NAMESPACE.name),
    "namespace": entry_bytes(IDS[0], "other-0123456789abcdef"),
    "header": b"\x08" + bytes(7) + b"no JSON!" + bytes(100),
}


@pytest.mark.parametrize("reason", DAMAGE)
async def test_damaged_object_is_named_with_its_reason(memory: MemoryStore, reason: str) -> None:
    name = put(memory, IDS[0], DAMAGE[reason])
    deep = deep_of(await look(memory))
    assert [(bad.name, bad.reason) for bad in deep.bad] == [(name, reason)]
    assert (deep.corrupt, deep.unread, dict(deep.reasons)) == (1, 0, {reason: 1})
    assert not deep.agrees


async def test_empty_object_is_corrupt_since_it_keeps_others_from_storing(
    memory: MemoryStore,
) -> None:
    name = put(memory, IDS[0], b"")
    found = await look(memory)
    assert [bad.name for bad in deep_of(found).bad] == [name]
    await mend(memory, found)
    assert name not in memory.bucket.objects


async def test_large_object_is_read_in_parts_and_every_byte_counts(
    memory: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (entries, base):
        monkeypatch.setattr(module, "PART_BYTES", 20_000)
    good = put(memory, "large", entry_bytes("large", NAMESPACE.name, rows=100, width=500))
    store = FaultStore(memory)
    assert deep_of(await look(store)).agrees
    ranges = [name for op, name in store.log if op == "get_range" and name == good]
    assert len(ranges) == 6
    body = bytearray(memory.bucket.objects[good])
    for at in (9, 30_000, len(body) - 1):
        damaged = bytearray(body)
        damaged[at] ^= 1
        memory.bucket.objects[good] = bytes(damaged)
        assert [bad.name for bad in deep_of(await look(memory)).bad] == [good]


async def test_object_that_is_larger_than_a_job_reads_is_no_corrupt_one(
    memory: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(memory, "large", entry_bytes("large", NAMESPACE.name, rows=100, width=500))
    monkeypatch.setattr(deep_check, "MAX_ENTRY_BYTES", 90_000)
    deep = deep_of(await look(memory))
    assert (deep.corrupt, [bad.reason for bad in deep.unreadable]) == (0, ["size"])


async def test_foreign_objects_are_counted_and_not_read(memory: MemoryStore) -> None:
    memory.bucket.objects[f"{LAYOUT.objects}ab/readme.txt"] = b"x"
    deep = deep_of(await look(memory))
    assert (deep.foreign, deep.objects, deep.agrees) == (1, 21, True)


# -- a store that fails ------------------------------------------------------------------------


@pytest.mark.parametrize("error", [UnavailableError, partial(AccessError, is_general=False)])
async def test_object_that_cannot_be_read_is_not_corrupt_and_never_deleted(
    memory: MemoryStore, error: Callable[[str], Exception]
) -> None:
    name = object_of(IDS[3])
    memory.bucket.objects[name] = flipped(IDS[3])  # and nobody can know
    store = FaultStore(memory, Script([Fault("get|get_range", name, error=error)]))
    found = await look(store)
    deep = deep_of(found)
    assert (deep.corrupt, deep.unread, deep.objects) == (0, 1, 20)
    assert not found.agrees
    done = await mend(store, found)
    assert (done.deleted, done.snapshot, done.dropped) == (0, "", 0)
    assert name in memory.bucket.objects


def broken_off(message: str) -> Exception:
    return CorruptEntryError(message, reason="length")


def on_the_way(**fault: Any) -> Fault:
    return Fault("get", object_of(IDS[3]), **fault)


@pytest.mark.parametrize(
    ("faults", "unstable", "unread"),
    [
        ([on_the_way(change=cut(50), times=1)], 1, 0),
        ([on_the_way(change=flip(-9), times=1)], 1, 0),
        ([on_the_way(error=UnavailableError, times=1)], 0, 0),
        ([on_the_way(change=cut(50))], 0, 1),
        ([on_the_way(change=flip(-9 - at), times=1) for at in range(99)], 0, 1),
        ([on_the_way(error=broken_off)], 0, 1),
    ],
    ids=["cut", "flipped", "failed", "always cut", "always another", "breaks off"],
)
async def test_damage_on_the_way_makes_nothing_corrupt(
    memory: MemoryStore, faults: list[Fault], unstable: int, unread: int
) -> None:
    """It is read again, at once or at the end."""
    deep = deep_of(await look(FaultStore(memory, Script(faults))))
    assert (deep.unstable, deep.corrupt, deep.unread) == (unstable, 0, unread)
    assert (deep.objects, deep.agrees) == (21 - unread, not unread)


async def test_outage_is_an_error_and_no_list_of_bad_objects(
    memory: MemoryStore, tmp_path: Path
) -> None:
    fault = Fault("get", "/objects/", skip=3, error=UnavailableError)
    state = new_state(tmp_path)
    with pytest.raises(UnavailableError):
        await look(FaultStore(memory, Script([fault])), state=state)
    state = new_state(tmp_path)
    deep = deep_of(await look(memory, state=state))
    assert (deep.objects, deep.corrupt, deep.unread) == (21, 0, 0)


async def test_object_that_is_deleted_before_its_turn_is_not_missed(memory: MemoryStore) -> None:
    class Deleting(FaultStore):
        async def get(self, name: str, *, max_bytes: int) -> bytes | memoryview | None:
            if name == object_of(IDS[5]):
                await memory.delete(name)
            return await super().get(name, max_bytes=max_bytes)

    deep = deep_of(await look(Deleting(memory)))
    assert (deep.gone, deep.objects, deep.agrees) == (1, 20, True)


# -- going on ----------------------------------------------------------------------------------


OF = {"corpus": "s3://b", "endpoint": None, "namespace": LAYOUT.namespace, "made_s": 1000.0}


def new_state(folder: Path, *, again: bool = True) -> AuditState:
    return AuditState(folder, OF, again=again)


async def break_off(memory: MemoryStore, name: str, state: AuditState, width: int) -> None:
    """Begin a check, and end it at the turn of an object."""
    gate = Gate()
    held = FaultStore(memory, Script([Fault("get", name, gate=gate)]))
    task = asyncio.create_task(check_objects(held, LAYOUT, state, width=width))
    await reached(gate)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("few", [0, 4096], ids=["by folders", "at once"])
async def test_check_that_is_broken_off_goes_on_where_it_was(
    memory: MemoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, few: int
) -> None:
    monkeypatch.setattr(deep_check, "FEW", few)
    names = sorted(map(object_of, (*IDS, LORA)))
    memory.bucket.objects[names[2]] = b"bad"
    memory.bucket.objects[names[18]] = b"bad"
    await break_off(memory, names[10], new_state(tmp_path), width=4)
    again = FaultStore(memory)
    state = new_state(tmp_path)
    deep = await check_objects(again, LAYOUT, state, width=4)
    read = {name for op, name in again.log if op == "get"} - {LAYOUT.descriptor}
    assert read == set(names[10:])
    assert (deep.objects, deep.resumed, deep.corrupt) == (21, 10, 2)
    assert [bad.name for bad in deep.bad] == [names[2], names[18]]
    assert deep.complete


async def test_large_object_has_its_turn_and_does_not_hold_up_the_cursor(
    memory: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = sorted(map(object_of, (*IDS, LORA)))
    nbytes = len(memory.bucket.objects[names[0]])
    monkeypatch.setattr(deep_check, "_INFLIGHT_BYTES", 8 * nbytes)
    memory.bucket.objects[names[3]] = bytes(8 * nbytes)

    class Slow(FaultStore):
        async def get(self, name: str, *, max_bytes: int) -> bytes | memoryview | None:
            found = await super().get(name, max_bytes=max_bytes)
            for _ in range(5 + len(self.log) % 3):  # never do all end at once
                await asyncio.sleep(0)
            return found

    store = Slow(memory)
    await check_objects(store, LAYOUT, width=4)
    order = [name for op, name in store.log if op == "get" and name in names]
    assert order.index(names[3]) == 3


async def test_what_is_stored_behind_the_cursor_is_left_to_the_next_check(
    memory: MemoryStore, tmp_path: Path
) -> None:
    names = sorted(map(object_of, (*IDS, LORA)))
    await break_off(memory, names[10], new_state(tmp_path), width=1)
    late = [content_hash(f"late {number}") for number in range(40)]
    for identifier in late:
        put(memory, identifier, b"bad")
    state = new_state(tmp_path)
    deep = await check_objects(memory, LAYOUT, state)
    assert deep.corrupt == sum(object_of(one) > names[9] for one in late)
    state = new_state(tmp_path)  # it was complete, so this one begins anew
    assert (await check_objects(memory, LAYOUT, state)).corrupt == len(late)


async def test_complete_check_is_not_done_again_for_a_repair(
    memory: MemoryStore, tmp_path: Path
) -> None:
    name = put(memory, IDS[0], b"bad")
    state = new_state(tmp_path)
    await check_objects(memory, LAYOUT, state)
    store = FaultStore(memory)
    state = new_state(tmp_path, again=False)
    found = await look(store, state=state)
    assert [bad.name for bad in deep_of(found).bad] == [name]
    assert not [name for op, name in store.log if op == "get" and "/objects/" in name]


async def test_state_of_something_else_or_damaged_is_not_taken(
    memory: MemoryStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = new_state(tmp_path)
    state.save("x")
    assert new_state(tmp_path).cursor == "x"
    assert AuditState(tmp_path, {**OF, "corpus": "s3://c"}).cursor == ""
    whole = state.path.read_text()
    wrong = whole.replace('"objects": 0', '"objects": "0"')
    assert wrong != whole
    for text in ("", '{"a": 1}\n', "[1]", whole[:-9], wrong):
        caplog.clear()
        state.path.write_text(text)
        assert new_state(tmp_path).cursor == ""
        assert "the check begins from the start" in caplog.text
    (tmp_path / "file").write_text("")
    with pytest.raises(TierError, match="cannot write"):
        new_state(tmp_path / "file" / "x")


async def test_of_very_many_bad_objects_some_are_kept_and_all_counted(
    memory: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deep_check, "MOST_KEPT", 3)
    for identifier in IDS[:9]:
        put(memory, identifier, b"bad")
    deep = deep_of(await look(memory))
    assert (deep.corrupt, len(deep.bad)) == (9, 3)


# -- repairs -----------------------------------------------------------------------------------


async def test_corrupt_object_is_deleted_and_producers_may_store_it_again(
    memory: MemoryStore,
) -> None:
    name = put(memory, IDS[0], flipped(IDS[0]))
    announce(memory, IDS[0])
    key = make_key(IDS[0])
    assert key is not None
    done = await mend(memory, await look(memory))
    assert (done.deleted, done.spared) == (1, 0)
    assert name not in memory.bucket.objects
    assert key.digest not in await view(memory, LAYOUT)
    assert (await look(memory)).agrees
    await memory.put_if_absent(name, [entry_bytes(IDS[0], NAMESPACE.name)])


@pytest.mark.parametrize("op", ["get", "head"])
async def test_store_that_fails_in_a_repair_deletes_nothing(memory: MemoryStore, op: str) -> None:
    names = [put(memory, identifier, b"bad") for identifier in IDS[:3]]
    found = await look(memory)
    store = FaultStore(memory, Script([Fault(op, "/objects/", error=UnavailableError)]))
    try:
        done = await mend(store, found)
        assert (done.deleted, done.spared) == (0, 3)
    except UnavailableError:
        pass
    assert set(names) <= memory.bucket.objects.keys()


@pytest.mark.parametrize(
    "name",
    [
        LAYOUT.descriptor,
        LAYOUT.objects + "README.safetensors",
        LAYOUT.objects + "../namespace.json",
        f"other-0123456789abcdef/objects/{make_key(IDS[0]).name}",  # type: ignore[union-attr]
        f"/{LAYOUT.objects}{make_key(IDS[0]).name}",  # type: ignore[union-attr]
        f"{make_key(IDS[0]).name}",  # type: ignore[union-attr]
        LAYOUT.modality("image"),
        "",
    ],
)
async def test_repair_deletes_nothing_but_entries_of_the_namespace(
    memory: MemoryStore, name: str
) -> None:
    """Whatever an audit's state says, which is a file."""
    bad = put(memory, IDS[0], b"bad")
    found = await look(memory)
    memory.bucket.objects[name] = b"of somebody else"
    deep_of(found).bad.append(BadObject(name, "checksum", "forged"))
    deep_of(found).bad.append(deep_of(found).bad[0])
    done = await mend(memory, found)
    assert (done.deleted, done.spared) == (1, 1)
    assert bad not in memory.bucket.objects
    assert memory.bucket.objects[name] == b"of somebody else"


async def test_repair_deletes_each_object_soon_after_it_was_read(
    memory: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody may store it anew meanwhile."""
    monkeypatch.setattr("s3ec.corpus.audit._AT_A_TIME", 2)
    names = [put(memory, identifier, b"bad") for identifier in IDS[:6]]
    found = await look(memory)

    class Renewed(base.Wrapper):
        """Has the last one stored anew once the first ones are deleted."""

        async def delete_many(self, names: Sequence[str]) -> dict[str, S3ECError]:
            put(memory, last)
            return await super().delete_many(names)

    order = [one.name for one in deep_of(found).bad]
    last = next(one for one in IDS if object_of(one) == order[-1])
    done = await mend(Renewed(memory), found)
    assert (done.deleted, done.spared) == (5, 1)
    assert set(names) & memory.bucket.objects.keys() == {order[-1]}


def newer(identifier: str, namespace: str = NAMESPACE.name) -> bytes:
    """An entry as a release that writes the next format has it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("s3ec.codec.FORMAT_VERSION", 2)
        return entry_bytes(identifier, namespace)


async def test_what_a_newer_release_wrote_stays_and_is_no_fault(memory: MemoryStore) -> None:
    name = put(memory, IDS[0], newer(IDS[0]))
    put(memory, IDS[1], b"bad")
    found = await look(memory)
    deep = deep_of(found)
    assert (deep.newer, deep.corrupt, [one.name for one in deep.bad]) == (1, 1, [object_of(IDS[1])])
    deep.bad.append(BadObject(name, "version", "forged"))
    done = await mend(memory, found)
    assert (done.deleted, done.spared) == (1, 1)
    assert name in memory.bucket.objects
    again = await look(memory)
    assert (deep_of(again).newer, again.agrees) == (1, True)


async def test_version_that_was_damaged_on_its_way_is_not_taken_for_a_newer_one(
    memory: MemoryStore,
) -> None:
    body = entry_bytes(IDS[0], NAMESPACE.name)
    changed = body.replace(b'"s3ec":"1"', b'"s3ec":"3"')
    assert changed != body
    once = Fault("get", object_of(IDS[0]), change=lambda _: changed, times=1)
    deep = deep_of(await look(FaultStore(memory, Script([once]))))
    assert (deep.newer, deep.unstable, deep.agrees) == (0, 1, True)


async def test_of_a_namespace_of_a_newer_release_no_entry_is_read(memory: MemoryStore) -> None:
    """They may be of any form."""
    about = json.dumps({**NAMESPACE.descriptor, "format": 2}).encode()
    memory.bucket.objects[LAYOUT.descriptor] = about
    put(memory, IDS[0], b"another form")
    put(memory, "unannounced")
    deep = deep_of(await look(memory))
    assert (deep.newer, deep.objects, deep.corrupt) == (22, 0, 0)


async def test_index_that_differs_is_rebuilt(memory: MemoryStore) -> None:
    await memory.delete(object_of(IDS[0]))
    put(memory, "stored by other means")
    memory.bucket.modified_s[object_of("stored by other means")] = 1.0
    found = await look(memory)
    index = found.index
    assert (index.missing, index.extra, deep_of(found).agrees) == (1, 1, True)
    done = await mend(memory, found)
    assert done.snapshot
    assert (await look(memory)).agrees
    assert len(await view(memory, LAYOUT)) == 21


def row_of(document: str, identifier: str) -> CatalogRow:
    return CatalogRow(
        document=document,
        page=None,
        uri=f"file:///corpus/{document}",
        sha256="ab" * 32,
        identifier=identifier,
        modality="image",
        rows=4,
        width=8,
        dtype="bfloat16",
        placeholder=None,
        nbytes=100,
        stored_s=1000.0,
        extra={},
    )


def rows_for(identifiers: Sequence[str]) -> list[CatalogRow]:
    return [row_of(f"doc {at}", one) for at, one in enumerate(identifiers)]


async def test_rows_of_the_catalogue_without_an_object_are_found_and_dropped(
    memory: MemoryStore,
) -> None:
    await CatalogWriter(memory, LAYOUT).append(rows_for([*IDS[:4], "sha256:" + "0" * 64]))
    await memory.delete(object_of(IDS[1]))
    found = await look(memory, deep=False)
    catalog = found.catalog
    assert catalog is not None
    assert (catalog.rows, catalog.gone, catalog.unlisted) == (5, 2, 17)
    assert catalog.examples == ["doc 1", "doc 4"]
    assert not found.agrees
    done = await mend(memory, found)
    assert done.dropped == 2
    table = await read_table(memory, LAYOUT)
    assert table.column("document").to_pylist() == ["doc 0", "doc 2", "doc 3"]
    assert (await look(memory)).agrees


async def test_older_row_of_a_dropped_one_does_not_come_back(memory: MemoryStore) -> None:
    await CatalogWriter(memory, LAYOUT).append([row_of("doc", IDS[0])])
    await CatalogWriter(memory, LAYOUT).append([row_of("doc", IDS[1])])
    await memory.delete(object_of(IDS[1]))
    assert (await mend(memory, await look(memory, deep=False))).dropped == 1
    assert len(await read_table(memory, LAYOUT)) == 0


async def test_catalogue_that_is_damaged_is_said_and_the_rest_is_still_looked_at(
    memory: MemoryStore,
) -> None:
    await CatalogWriter(memory, LAYOUT).append([row_of("doc", IDS[0])])
    for name in list(memory.bucket.objects):
        if name.startswith(LAYOUT.catalog):
            memory.bucket.objects[name] = b"no Parquet"
    found = await look(memory)
    assert found.catalog is not None
    assert found.catalog.problem
    assert not found.agrees
    assert deep_of(found).agrees


async def test_no_catalogue_is_no_fault(memory: MemoryStore) -> None:
    found = await look(memory, deep=False)
    assert (found.catalog, found.deep, found.agrees) == (None, None, True)
