# SPDX-License-Identifier: Apache-2.0
"""Fetches: each once, in order, within bounds, and none is lost."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from s3ec import codec
from s3ec.codec import Header, Shape
from s3ec.counters import Counters
from s3ec.errors import AccessError, CorruptEntryError, UnavailableError
from s3ec.identity import Key, Layout
from s3ec.index.child import in_process
from s3ec.index.local import NodeFolder
from s3ec.index.reader import ManifestIndex
from s3ec.modality import ModalityRecords
from s3ec.prefetch import (
    FetchOutcome,
    FetchRequest,
    FetchResult,
    Limits,
    Prefetcher,
    Priority,
    Sources,
)
from s3ec.runtime import DiskWatch, LoopThread
from s3ec.testing.fault_store import Fault, FaultStore, Gate, Script, cut, flip, replace
from s3ec.testing.memory_store import MemoryStore
from s3ec.tier.claims import Claim
from s3ec.tier.entries import LocalKeys
from s3ec.tier.open_entry import OpenEntry
from s3ec.tier.tier import Tier
from tests.support.clock import Clock
from tests.support.fake_index import FakeIndex
from tests.support.file_calls import file_calls_of
from tests.support.finite import FINITE
from tests.support.indexes import key_of
from tests.support.on_disk import audit_of, usage_of
from tests.support.waiting import DEADLINE_S, eventually

NAMESPACE = "gemma-0123456789abcdef"
LAYOUT = Layout(NAMESPACE)
ROWS, WIDTH, DTYPE = 4, 32, "bfloat16"
ENTRY_LIMIT = ROWS * WIDTH * 2 + 8 + codec.HEADER_LIMIT  # most that one fetch asks for
OBJECTS = "/objects/"
REPOSITORY = Path(__file__).parents[2]


def entry(
    key: Key,
    *,
    rows: int = ROWS,
    width: int = WIDTH,
    dtype: str = DTYPE,
    modality: str = "image",
    namespace: str = NAMESPACE,
) -> bytes:
    shape = Shape(rows, width, dtype)
    seed = hashlib.sha256(key.name.encode()).digest().translate(FINITE)
    data = (seed * (shape.nbytes // 32 + 1))[: shape.nbytes]
    header = Header(key.identifier, namespace, modality, shape, codec.checksum(data))
    return codec.encode_header(header) + data


def body_of(done: FetchResult) -> bytes:
    """What was fetched, as a worker reads it."""
    assert done.entry is not None
    return os.pread(done.entry.fd, done.entry.nbytes + 1, 0)


def want(text: object, priority: Priority = Priority.DEMAND, **changes: object) -> FetchRequest:
    values: dict[str, object] = {"modality": "image", "rows": ROWS, **changes}
    return FetchRequest(key_of(text), priority=priority, **values)  # type: ignore[arg-type]


class Watch(FaultStore):
    """Knows how many entries are being fetched at a moment, and how large they may be."""

    active = peak = 0

    async def get(self, name: str, *, max_bytes: int) -> bytes | None:
        if OBJECTS not in name:
            return await super().get(name, max_bytes=max_bytes)
        self.active += 1
        self.peak = max(self.peak, self.active)
        try:
            return await super().get(name, max_bytes=max_bytes)
        finally:
            self.active -= 1

    @property
    def fetched(self) -> list[str]:
        """Names of the entries that were asked for, in order."""
        return [name for op, name in self.log if op == "get" and OBJECTS in name]


class Bench:
    """A prefetcher with everything around it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.now_s = 1e9
        self.memory = MemoryStore()
        self.script = Script()
        self.store = Watch(self.memory, self.script)
        self.counters = Counters()
        self.index: ManifestIndex = FakeIndex(self.counters, self.now)
        self.local = LocalKeys()
        watch = DiskWatch(self.counters, patience_s=600)  # a slow disk is not a hung one
        self.loop = LoopThread("s3ec-prefetch-test", disk_threads=4, watch=watch)
        self.tier = self.make_tier()
        self.residents = self.tier.open_residents(lambda _: True)
        self.records = ModalityRecords(self.store, LAYOUT)
        self.bucket = self.memory.bucket.objects
        self.bucket[LAYOUT.modality("image")] = b'{"dtype":"bfloat16","width":32}'
        self.prefetcher = self.make()

    def now(self) -> float:
        return self.now_s

    def make_tier(self, *, min_free_bytes: int = 0) -> Tier:
        return Tier(
            self.folder,
            NAMESPACE,
            budget_bytes=1 << 30,
            min_free_bytes=min_free_bytes,
            counters=self.counters,
        )

    def make(self, *, clock: Callable[[], float] = time.monotonic, **limits: float) -> Prefetcher:
        self.prefetcher = Prefetcher(
            self.loop,
            Sources(
                self.store,
                self.tier,
                LAYOUT,
                self.index,
                self.records,
                self.local,
                self.residents,
            ),
            counters=self.counters,
            limits=Limits(**limits),  # type: ignore[arg-type]
            clock=clock,
        )
        return self.prefetcher

    def read_the_manifest(self, **options: Any) -> ManifestIndex:
        """Have the real index in place of the fake one; answers it."""
        self.index = ManifestIndex(
            *(self.store, LAYOUT, NodeFolder.of(self.tier.folders, NAMESPACE)),
            jobs=in_process(self.store),
            disk=self.loop.disk,
            counters=self.counters,
            **options,
        )
        self.make()
        return self.index

    def stock(self, *texts: object) -> None:
        for text in texts:
            self.put(key_of(text), entry(key_of(text)))

    def put(self, key: Key, body: bytes) -> None:
        self.bucket[LAYOUT.object(key)] = body
        self.index.add(key)

    def hold(self, **where: str) -> Gate:
        gate = Gate()
        self.script.faults.insert(0, Fault(**{"op": "get", "name": OBJECTS} | where, gate=gate))  # type: ignore[arg-type]
        return gate

    def held_up(self, wants: list[FetchRequest], **where: str) -> Gate:
        """Ask for them; the first one has begun, and waits at the gate."""
        gate = self.hold(**where)
        self.prefetcher.submit(wants)
        assert gate.reached.wait(DEADLINE_S)
        return gate

    def collect(self, count: int) -> list[FetchResult]:
        done: list[FetchResult] = []

        def enough() -> bool:
            done.extend(self.prefetcher.drain())
            return len(done) >= count

        eventually(enough, f"{count} fetches, have {done}")
        return done

    def fetch(self, *wants: FetchRequest) -> list[FetchResult]:
        self.prefetcher.submit(wants)
        return self.collect(len(wants))

    def one(self, text: object = "a", **changes: object) -> FetchResult:
        return self.fetch(want(text, **changes))[0]

    def fence(self) -> None:
        """Return after everything that could be started by now was started."""

        async def turn() -> None:
            for _ in range(3):
                await asyncio.gather(*(self.loop.disk(int) for _ in range(8)))

        self.loop.run(turn(), DEADLINE_S)  # behind all that was submitted

    def knows_the_record(self) -> bool:
        """Whether the reading that nobody waits for has ended."""
        try:
            return self.loop.run(self.records.get_soon("image", 0.0), DEADLINE_S) is not None
        except UnavailableError:
            return False

    def until_nobody_claims(self, text: object) -> None:
        digest = key_of(text).digest
        eventually(lambda: not self.tier.claims.is_taken(digest), "the end of the claim")

    def open_files(self) -> int:
        """How many of the tier's entries this process has open, evicted or not."""
        objects, found = str(self.tier.folders.objects), 0
        for number in os.listdir("/proc/self/fd"):
            with suppress(OSError):  # closed by now
                found += os.readlink(f"/proc/self/fd/{number}").startswith(objects)
        return found

    def end(self) -> None:
        self.loop.stop(DEADLINE_S)
        self.tier.close()


class Deadlines:
    """Deadlines that pass when the test says so, not after a time."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._made: list[asyncio.Timeout] = []

    def timeout(self, seconds: float) -> asyncio.Timeout:
        self.seconds.append(seconds)
        self._made.append(asyncio.timeout(None))
        return self._made[-1]

    def expire(self, loop: LoopThread) -> None:
        """Let every deadline so far pass; later ones are not concerned."""

        async def pass_all() -> None:
            for made in self._made:
                with suppress(RuntimeError):  # over already
                    made.reschedule(0)

        loop.run(pass_all(), DEADLINE_S)


@pytest.fixture
def deadlines(monkeypatch: pytest.MonkeyPatch) -> Deadlines:
    deadlines = Deadlines()
    ours = SimpleNamespace(**vars(asyncio) | {"timeout": deadlines.timeout})
    monkeypatch.setattr("s3ec.store.concurrency.asyncio", ours)
    return deadlines


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path / "cache")
    yield bench
    bench.end()
    assert bench.counters.get("internal_errors") == 0
    assert audit_of(bench.tier) == []


# -- outcomes ----------------------------------------------------------------------------------


def test_an_entry_comes_from_the_bucket_once_and_from_the_tier_then(bench: Bench) -> None:
    bench.stock("a")
    first = bench.one()
    assert (first.outcome, first.source) == (FetchOutcome.READY, "bucket")
    assert body_of(first) == entry(key_of("a"))
    assert bench.local(key_of("a"))
    second = bench.one()
    assert (second.outcome, second.source) == (FetchOutcome.READY, "tier")
    assert len(bench.store.fetched) == 1
    assert bench.counters.get("fetch.ready") == 2
    assert bench.counters.get("fetch_items.bucket") == bench.counters.get("fetch_items.tier") == 1
    assert bench.counters.get("fetch_bytes.bucket") == len(entry(key_of("a")))


def test_what_was_downloaded_or_looked_at_is_resident_from_then_on(bench: Bench) -> None:
    """Also what does not fit this request: the next one may need just that."""
    bench.stock("downloaded")
    bench.put(key_of("unfit"), entry(key_of("unfit"), rows=ROWS + 1))
    bench.tier.writer.publish(key_of("here"), [entry(key_of("here"))])
    bench.tier.writer.publish(key_of("unfit here"), [entry(key_of("unfit here"), rows=ROWS + 1)])
    for text in ("downloaded", "here", "unfit", "unfit here"):
        done = bench.one(text)
        resident = bench.residents.get(key_of(text).digest, time.monotonic())
        if text == "unfit":  # nothing of it was kept
            assert resident is None
        elif text == "unfit here":
            assert resident is not None
            assert resident.header.shape.rows == ROWS + 1
        else:
            assert resident is done.entry


def test_what_the_index_never_held_is_no_less_to_be_had_after_a_404(bench: Bench) -> None:
    """Who asks for it all the same expects it at any moment."""
    assert bench.one().outcome is FetchOutcome.ABSENT
    assert bench.counters.get("index.missing") == 0

    def denied(message: str) -> Exception:
        return AccessError(message, is_general=False)

    bench.script.faults = [Fault(op="get", name=OBJECTS, error=denied)]
    assert bench.one().outcome is FetchOutcome.ABSENT  # so S3 says it to who may not list
    assert bench.counters.get("index.missing") == 0
    bench.script.faults = []
    bench.bucket[LAYOUT.object(key_of("a"))] = entry(key_of("a"))
    assert bench.one().outcome is FetchOutcome.READY


def test_what_lies_here_does_not_queue_behind_downloads_that_hang(bench: Bench) -> None:
    bench.make(max_concurrency=2)
    bench.stock("here", "slow 1", "slow 2", "slow 3")
    assert bench.one("here").outcome is FetchOutcome.READY
    gate = bench.held_up([want(f"slow {n}") for n in (1, 2, 3)])
    again = bench.one("here")
    assert (again.outcome, again.source) == (FetchOutcome.READY, "tier")
    gate.release()
    assert all(each.outcome is FetchOutcome.READY for each in bench.collect(3))


def test_what_was_believed_to_be_here_is_downloaded_in_its_turn(bench: Bench) -> None:
    bench.make(max_concurrency=1)
    bench.stock("gone", "slow")
    bench.local.add(key_of("gone"))
    gate = bench.held_up([want("slow")], name=key_of("slow").name)
    bench.prefetcher.submit([want("gone")])
    eventually(lambda: not bench.local(key_of("gone")), "a look at the disk")
    assert bench.store.peak == 1
    gate.release()
    assert {each.source for each in bench.collect(2)} == {"bucket"}
    assert bench.store.peak == 1


def test_what_lies_here_does_not_wait_for_the_record_of_a_slow_bucket(bench: Bench) -> None:
    bench.stock("a", "b")
    for text in ("a", "b"):
        assert bench.one(text).outcome is FetchOutcome.READY
    bench.records = ModalityRecords(bench.store, LAYOUT)  # as after a restart
    bench.make()
    gate = bench.hold(name="/modality/")
    assert bench.one("a").outcome is FetchOutcome.READY
    assert bench.one("b").outcome is FetchOutcome.READY
    assert bench.store.log.count(("get", LAYOUT.modality("image"))) == 2  # one reading goes on
    gate.release()
    eventually(bench.knows_the_record, "the record")


def cut_off(body: bytes) -> bytes:
    raise CorruptEntryError("the body ended early", reason="length")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (flip(-1), "checksum"),
        (flip(100), "header"),
        (cut(100), "length"),
        (cut(0), "length"),
        (cut_off, "length"),
        (replace(b"<html>503</html>" * 20), "header"),
        (replace(entry(key_of("b"))), "identifier"),
        (replace(entry(key_of("a"), namespace="gemma-fedcba9876543210")), "namespace"),
        (lambda body: body + b"\0", "length"),
    ],
)
def test_corrupt_twice_is_a_miss_and_forgotten(
    bench: Bench, change: Callable[[bytes], bytes], reason: str
) -> None:
    bench.stock("a")
    bench.script.faults = [Fault(op="get", name=OBJECTS, change=change)]
    done = bench.one()
    assert (done.outcome, done.entry) == (FetchOutcome.CORRUPT, None)
    assert bench.counters.get("bad_objects") == 1
    assert bench.counters.get(f"corrupt.{reason}") == 2
    assert bench.store.fetched == [LAYOUT.object(key_of("a"))] * 2
    assert not bench.index.maybe_contains(key_of("a"))
    assert not bench.tier.entries.contains(key_of("a"))
    assert len(usage_of(bench.tier).entries) == 0


@pytest.mark.parametrize("knows", ["an index", "the manifest"])
def test_a_bad_object_is_a_miss_for_an_hour_in_this_process(
    bench: Bench, caplog: pytest.LogCaptureFixture, knows: str
) -> None:
    """Whatever asks: nobody asks the bucket for it, and it is counted and named once."""
    if knows == "the manifest":
        bench.read_the_manifest(clock=bench.now)
    key = key_of("a")
    bench.put(key, b"no entry")
    name = LAYOUT.object(key)
    assert bench.one().outcome is FetchOutcome.CORRUPT
    for _ in range(3):
        bench.now_s += 1199
        assert bench.one().outcome is FetchOutcome.CORRUPT
        assert not bench.index.maybe_contains(key)
    assert bench.store.fetched == [name] * 2
    assert bench.counters.get("bad_objects") == 1
    assert caplog.text.count(f"object {name} is bad (") == 1
    warned = [each for each in caplog.records if each.levelname == "WARNING"]
    assert len(warned) == 1
    bench.now_s += 4  # and the hour is over
    assert not bench.index.is_bad(key)
    bench.bucket[name] = entry(key)  # an outsider has mended it
    assert bench.one().outcome is FetchOutcome.READY


def test_what_this_node_has_is_served_though_the_object_is_bad(bench: Bench) -> None:
    bench.put(key_of("a"), b"no entry")
    assert bench.one().outcome is FetchOutcome.CORRUPT
    bench.tier.writer.publish(key_of("a"), [entry(key_of("a"))])  # as a save does
    assert (bench.one().outcome, bench.one().source) == (FetchOutcome.READY, "tier")
    assert len(bench.store.fetched) == 2


@pytest.mark.parametrize(
    ("changes", "counter"),
    [
        ({"rows": ROWS - 1}, "rows"),
        ({"width": WIDTH - 1}, "width"),
        ({"width": WIDTH // 2, "rows": ROWS * 2}, "rows"),
        ({"dtype": "float16"}, "dtype"),
        ({"modality": "video"}, "modality"),
    ],
)
def test_an_entry_of_another_shape_is_a_mismatch(
    bench: Bench, changes: dict[str, object], counter: str
) -> None:
    bench.put(key_of("a"), entry(key_of("a"), **changes))  # type: ignore[arg-type]
    assert bench.one().outcome is FetchOutcome.MISMATCH
    assert bench.counters.get(f"mismatch.{counter}") == 1
    assert bench.index.maybe_contains(key_of("a"))  # somebody else may need just this
    assert len(usage_of(bench.tier).entries) == 0


def test_absent_counts_as_vanished_where_the_index_held_it(bench: Bench) -> None:
    index = bench.read_the_manifest()
    index.add(key_of("a"))
    assert bench.one().outcome is FetchOutcome.ABSENT
    assert bench.counters.get("index.vanished") == 1


def test_a_larger_object_is_refused_unread_and_stays_known(bench: Bench) -> None:
    """A client may have made its row count up; others need the entry."""
    bench.put(key_of("a"), entry(key_of("a"), rows=10_000))
    assert bench.one().outcome is FetchOutcome.MISMATCH
    assert len(bench.store.fetched) == 1
    assert bench.counters.get("mismatch.size") == 1
    assert bench.index.maybe_contains(key_of("a"))


def test_what_was_saved_here_before_the_namespaces_first_record_is_not_here_yet(
    bench: Bench,
) -> None:
    """Its upload writes the record first. A request that waits for it asks again."""
    record = bench.bucket.pop(LAYOUT.modality("image"))
    bench.tier.writer.publish(key_of("a"), [entry(key_of("a"))])
    bench.local.add(key_of("a"))
    assert bench.one().outcome is FetchOutcome.ABSENT
    bench.bucket[LAYOUT.modality("image")] = record
    eventually(lambda: bench.one().outcome is FetchOutcome.READY)


def test_without_a_record_nothing_is_fetched(bench: Bench) -> None:
    bench.stock("a")
    assert bench.one(modality="video").outcome is FetchOutcome.ABSENT
    assert bench.counters.get("mismatch.no_record") == 1
    assert bench.store.fetched == []


# -- a store or disk that does not answer ------------------------------------------------------


@pytest.mark.parametrize("error", [UnavailableError, AccessError])
@pytest.mark.parametrize("where", [OBJECTS, "/modality/"])
def test_a_store_that_fails_is_unavailable_and_nothing_is_forgotten(
    bench: Bench, error: type[Exception], where: str
) -> None:
    bench.stock("a")
    bench.script.faults = [Fault(op="get", name=where, error=error)]
    assert bench.one().outcome is FetchOutcome.UNAVAILABLE
    assert bench.index.maybe_contains(key_of("a"))
    assert bench.counters.get("fetch.denied") == (error is AccessError)
    bench.script.faults = []
    assert bench.one().outcome is FetchOutcome.READY


@pytest.mark.parametrize("error", [UnavailableError, AccessError])
def test_the_tier_serves_though_the_bucket_is_down_since_the_start(
    bench: Bench, error: type[Exception]
) -> None:
    bench.tier.writer.publish(key_of("a"), [entry(key_of("a"))])
    bench.script.faults = [Fault(error=error)]
    done = bench.one()
    assert (done.outcome, done.source) == (FetchOutcome.READY, "tier")
    assert bench.one("b").outcome is FetchOutcome.UNAVAILABLE
    assert bench.one("a", rows=ROWS + 1).outcome is FetchOutcome.MISMATCH


@pytest.mark.parametrize("kind", [KeyError, BaseException, asyncio.CancelledError])
def test_an_error_of_ours_is_counted_and_the_want_is_answered(
    kind: type[BaseException],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A panic of Rust code is a BaseException; a cancellation may be of what is waited for."""
    bench = Bench(tmp_path)
    bench.stock("a", "b")

    def broken(key: Key, **_: object) -> OpenEntry | None:
        raise kind("a fault of ours")

    with monkeypatch.context() as patch:
        patch.setattr(bench.tier.entries, "open_or_claim", broken)
        assert bench.one().outcome is FetchOutcome.UNAVAILABLE
    assert bench.counters.get("internal_errors") == 1
    assert "a fault of ours" in caplog.text
    assert bench.one().outcome is FetchOutcome.READY
    bench.end()


def test_a_fetch_ends_at_its_deadline_and_makes_room(bench: Bench, deadlines: Deadlines) -> None:
    bench.stock("a", "b")
    bench.make(max_concurrency=1, deadline_s=7.0)
    bench.held_up([want("a"), want("b")], name=key_of("a").name)
    assert deadlines.seconds == [7.0]
    deadlines.expire(bench.loop)
    done = {each.want.key: each.outcome for each in bench.collect(2)}
    assert done == {key_of("a"): FetchOutcome.UNAVAILABLE, key_of("b"): FetchOutcome.READY}
    assert bench.store.active == 0


def test_an_entry_that_was_opened_after_the_deadline_is_closed(
    bench: Bench, deadlines: Deadlines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody would ever use it, and eviction could not free its bytes."""
    bench.residents.close()
    bench.stock("a", "b")
    bench.tier.writer.publish(key_of("a"), [entry(key_of("a"))])
    release, slow_ones = threading.Event(), threading.Semaphore(0)
    opened: list[str] = []
    look, receive = bench.tier.entries.open, bench.tier.writer.receive

    def slow(key: Key) -> OpenEntry | None:
        if key == key_of("a"):
            slow_ones.release()
            assert release.wait(DEADLINE_S)
        found = look(key)
        if found is not None:
            opened.append(found.path)
        return found

    def slowly(key: Key, pieces: Sequence[bytes], header: Header) -> OpenEntry:
        slow_ones.release()
        assert release.wait(DEADLINE_S)
        received = receive(key, pieces, header)
        opened.append(received.path)
        return received

    monkeypatch.setattr(bench.tier.entries, "open", slow)
    monkeypatch.setattr(bench.tier.writer, "receive", slowly)
    bench.prefetcher.submit([want("a"), want("b")])
    assert slow_ones.acquire(timeout=DEADLINE_S)
    assert slow_ones.acquire(timeout=DEADLINE_S)
    deadlines.expire(bench.loop)
    assert {each.outcome for each in bench.collect(2)} == {FetchOutcome.UNAVAILABLE}
    release.set()
    eventually(lambda: len(opened) == 2, "both late ones")
    eventually(lambda: bench.open_files() == 0, "their end")


def test_an_entry_is_closed_when_the_record_cannot_be_had_in_time(
    bench: Bench, deadlines: Deadlines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("s3ec.fetch._RECORD_PATIENCE_S", DEADLINE_S)
    bench.tier.writer.publish(key_of("a"), [entry(key_of("a"))])
    bench.held_up([want("a")], name="/modality/")
    deadlines.expire(bench.loop)
    assert bench.collect(1)[0].outcome is FetchOutcome.UNAVAILABLE
    eventually(lambda: bench.open_files() == 0, "the end of it")


def test_what_the_disk_no_longer_holds_is_not_believed_to_be_there(bench: Bench) -> None:
    """Another process evicted it; while the store is down nobody shall wait for it again."""
    bench.local.add(key_of("a"))
    assert bench.one().outcome is FetchOutcome.ABSENT
    assert not bench.local(key_of("a"))


# -- disk and loop -----------------------------------------------------------------------------


def test_the_loop_makes_no_call_that_a_disk_has_to_answer(
    in_parts: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would wait as well, and with it all that needs no disk."""
    bench = in_parts
    bench.stock("new", "parked")
    bench.put(key_of("bad"), b"<html>")
    bench.index.add(key_of("absent"))
    calls = file_calls_of(bench.loop.run(thread_of(), DEADLINE_S), monkeypatch)
    end = others_claim(bench, "parked")
    bench.prefetcher.submit([want("parked")])
    eventually(lambda: bench.counters.get("fetch_parked") == 1, "the other one's fetch")
    bench.fence()
    end()
    assert bench.collect(1)[0].outcome is FetchOutcome.READY
    assert [bench.one("new").source for _ in range(2)] == ["bucket", "tier"]
    assert bench.one("new", rows=ROWS + 1).outcome is FetchOutcome.MISMATCH
    assert bench.one(rows=LARGE_ROWS).outcome is FetchOutcome.READY
    assert bench.one("absent").outcome is FetchOutcome.ABSENT
    assert bench.one("bad").outcome is FetchOutcome.CORRUPT
    assert bench.one("bad").outcome is FetchOutcome.CORRUPT  # from memory
    assert calls == []


def test_who_waits_for_another_process_is_answered_though_the_disk_hangs(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.stock("a")
    bench.make(claim_patience_s=0.0)
    end = others_claim(bench, "a")
    answers = threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr(bench.tier.claims, "is_taken", lambda _: answers.wait(DEADLINE_S))
        assert bench.one().source == "bucket"
        answers.set()
    end()


async def thread_of() -> int:
    return threading.get_ident()


# -- queueing ----------------------------------------------------------------------------------


def test_many_wants_for_one_key_are_one_fetch(bench: Bench) -> None:
    bench.stock("a")
    gate = bench.hold()
    for number in range(32):
        bench.prefetcher.submit([want("a", Priority(number % 2)), want("a")])
    assert gate.reached.wait(DEADLINE_S)
    bench.prefetcher.submit([want("a")])
    bench.fence()
    gate.release()
    assert [done.outcome for done in bench.collect(1)] == [FetchOutcome.READY]
    bench.fence()
    assert bench.prefetcher.drain() == []
    assert len(bench.store.fetched) == 1


def order_of(bench: Bench, texts: Sequence[str] = "abcdefgh") -> list[str]:
    names = {LAYOUT.object(key_of(text)): text for text in texts}
    return [names[name] for name in bench.store.fetched]


def test_a_lookahead_that_is_needed_now_is_promoted_and_fetched_once(bench: Bench) -> None:
    bench.stock(*"abcd")
    bench.make(max_concurrency=1)
    gate = bench.held_up([want(text, Priority.LOOKAHEAD) for text in "abcd"])
    bench.prefetcher.submit([want("d")])
    bench.prefetcher.submit([want("d", Priority.LOOKAHEAD)])  # never back
    bench.fence()
    gate.release()
    bench.collect(4)
    bench.fence()
    assert order_of(bench) == list("adbc")
    assert bench.prefetcher.drain() == []


def test_no_more_than_the_allowed_number_runs_at_a_time(bench: Bench) -> None:
    texts = [str(number) for number in range(12)]
    bench.stock(*texts)
    bench.make(max_concurrency=3)
    gate = bench.hold()
    bench.prefetcher.submit([want(text) for text in texts])
    eventually(lambda: bench.store.active == 3, "three fetches")
    bench.fence()
    assert bench.store.active == 3
    gate.release()
    assert {done.outcome for done in bench.collect(12)} == {FetchOutcome.READY}
    assert bench.store.peak == 3


@pytest.mark.parametrize(("limit", "at_once"), [(1, 1), (ENTRY_LIMIT, 1), (2 * ENTRY_LIMIT + 1, 2)])
def test_no_more_than_the_allowed_bytes_are_in_flight(
    bench: Bench, limit: int, at_once: int
) -> None:
    texts = [str(number) for number in range(6)]
    bench.stock(*texts)
    bench.make(max_concurrency=6, max_inflight_bytes=limit)
    gate = bench.hold()
    bench.prefetcher.submit([want(text) for text in texts])
    eventually(lambda: bench.store.active == at_once, "the first fetches")
    bench.fence()
    assert bench.store.active == at_once
    gate.release()
    assert {done.outcome for done in bench.collect(6)} == {FetchOutcome.READY}
    assert bench.store.peak == at_once


def test_a_full_queue_answers_at_once(bench: Bench) -> None:
    bench.stock(*"abcd")
    bench.make(max_concurrency=1, max_queued=2)
    gate = bench.held_up([want("a")])
    bench.prefetcher.submit([want("b"), want("c"), want("d")])
    assert [(each.want.key, each.outcome) for each in bench.collect(1)] == [
        (key_of("d"), FetchOutcome.UNAVAILABLE)
    ]
    gate.release()
    assert {each.outcome for each in bench.collect(3)} == {FetchOutcome.READY}


# -- large objects -----------------------------------------------------------------------------

LARGE_ROWS = 3000  # 192 kB: ten parts of PART_BYTES below
PART_BYTES = 20_000  # of an object that is fetched alone
PARTS_AT_A_TIME = 4


@pytest.fixture
def in_parts(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """A bench where an entry comes in parts, and holds one such entry."""
    monkeypatch.setattr("s3ec.fetch.PART_BYTES", 2 * PART_BYTES)
    monkeypatch.setattr("s3ec.fetch.PARTS_AT_A_TIME", PARTS_AT_A_TIME // 2)
    bench.put(key_of("a"), entry(key_of("a"), rows=LARGE_ROWS))
    return bench


def ranges(bench: Bench, text: str = "a") -> int:
    asked = ("get_range", LAYOUT.object(key_of(text)))
    return sum((op, name) == asked for op, name in bench.store.log)


def test_a_large_object_comes_in_parts_and_is_whole(in_parts: Bench) -> None:
    done = in_parts.one(rows=LARGE_ROWS)
    assert (done.outcome, done.source) == (FetchOutcome.READY, "bucket")
    assert body_of(done) == entry(key_of("a"), rows=LARGE_ROWS)
    assert ranges(in_parts) == -(-len(body_of(done)) // PART_BYTES)
    assert in_parts.store.fetched == []
    in_parts.until_nobody_claims("a")


def test_a_large_object_takes_the_memory_of_a_few_parts(in_parts: Bench) -> None:
    in_parts.make(max_inflight_bytes=PARTS_AT_A_TIME * PART_BYTES)
    gate = in_parts.hold(op="get_range", name=OBJECTS)
    in_parts.script.faults[0].skip = 1
    in_parts.prefetcher.submit([want("a", rows=LARGE_ROWS)])
    assert gate.reached.wait(DEADLINE_S)
    in_parts.fence()
    assert ranges(in_parts) == 1 + PARTS_AT_A_TIME  # the first, and all that may be out behind it
    gate.release()
    assert in_parts.collect(1)[0].outcome is FetchOutcome.READY


def test_ranges_of_what_the_index_knows_to_fit_are_asked_for_at_once(in_parts: Bench) -> None:
    nbytes = len(entry(key_of("a"), rows=LARGE_ROWS))
    in_parts.read_the_manifest().add(key_of("a"), nbytes)
    in_parts.make()
    gate = in_parts.held_up([want("a", rows=LARGE_ROWS)], op="get_range", name=OBJECTS)
    in_parts.fence()
    assert ranges(in_parts) == PARTS_AT_A_TIME
    gate.release()
    done = in_parts.collect(1)[0]
    assert body_of(done) == entry(key_of("a"), rows=LARGE_ROWS)


def test_a_large_object_that_goes_on_behind_its_end_is_bad(in_parts: Bench) -> None:
    longer = entry(key_of("a"), rows=LARGE_ROWS) + bytes(64)
    in_parts.put(key_of("a"), longer)
    assert in_parts.one(rows=LARGE_ROWS).outcome is FetchOutcome.CORRUPT
    assert in_parts.counters.get("corrupt.length") == 2
    assert usage_of(in_parts.tier).total_bytes == 0


@pytest.mark.parametrize(
    ("change", "reason"), [(flip(-1), "checksum"), (cut(100), "length"), (cut(0), "length")]
)
def test_a_large_object_with_one_bad_part_is_fetched_again(
    in_parts: Bench, change: Callable[[bytes], bytes], reason: str
) -> None:
    in_parts.script.faults = [Fault(op="get_range", name=OBJECTS, change=change, skip=4, times=1)]
    assert in_parts.one(rows=LARGE_ROWS).outcome is FetchOutcome.READY
    assert in_parts.counters.get(f"corrupt.{reason}") == 1


def test_a_large_object_of_another_shape_is_not_read_to_its_end(in_parts: Bench) -> None:
    assert in_parts.one(rows=LARGE_ROWS - 1).outcome is FetchOutcome.MISMATCH
    assert ranges(in_parts) == 1
    assert usage_of(in_parts.tier).total_bytes == 0


def test_a_large_object_that_is_absent_or_vanishes_is_a_miss(in_parts: Bench) -> None:
    in_parts.index.add(key_of("b"))
    assert in_parts.one("b", rows=LARGE_ROWS).outcome is FetchOutcome.ABSENT
    gate = in_parts.hold(op="get_range", name=OBJECTS)
    in_parts.script.faults[0].skip = 1
    in_parts.prefetcher.submit([want("a", rows=LARGE_ROWS)])
    assert gate.reached.wait(DEADLINE_S)
    del in_parts.bucket[LAYOUT.object(key_of("a"))]
    gate.release()
    assert in_parts.collect(1)[0].outcome is FetchOutcome.ABSENT  # at the second attempt
    assert usage_of(in_parts.tier).total_bytes == 0


def test_a_large_object_that_is_broken_off_leaves_nothing(
    in_parts: Bench, deadlines: Deadlines
) -> None:
    gate = in_parts.hold(op="get_range", name=OBJECTS)
    in_parts.script.faults[0].skip = 3
    in_parts.prefetcher.submit([want("a", rows=LARGE_ROWS)])
    assert gate.reached.wait(DEADLINE_S)
    deadlines.expire(in_parts.loop)
    assert in_parts.collect(1)[0].outcome is FetchOutcome.UNAVAILABLE
    eventually(lambda: not list(in_parts.folder.rglob(".tmp-*")), "the temp file's end")
    in_parts.until_nobody_claims("a")
    in_parts.script.faults = []
    assert in_parts.one(rows=LARGE_ROWS).outcome is FetchOutcome.READY


# -- what others want, and nobody any more -----------------------------------------------------


def others_claim(bench: Bench, *texts: str) -> Callable[[], None]:
    """Another process fetches these; gives what ends it."""
    other = bench.make_tier()
    for text in texts:
        assert isinstance(other.entries.open_or_claim(key_of(text)), Claim)
    return other.close


def test_what_another_process_fetches_is_not_fetched_here_and_takes_no_place(
    bench: Bench,
) -> None:
    bench.stock(*"abc")
    bench.make(max_concurrency=1, claim_patience_s=600)
    end = others_claim(bench, "a", "b")
    bench.prefetcher.submit([want("a"), want("b"), want("c")])
    assert [each.want.key for each in bench.collect(1)] == [key_of("c")]
    assert order_of(bench) == ["c"]
    bench.tier.writer.publish(key_of("a"), [entry(key_of("a"))])  # as the other one would
    end()
    done = {each.want.key: each.source for each in bench.collect(2)}
    assert done == {key_of("a"): "tier", key_of("b"): "bucket"}
    assert order_of(bench) == ["c", "b"]
    assert bench.counters.get("fetch_parked") == 2


def test_a_large_object_of_another_process_is_waited_for_as_long_as_it_may_take(
    in_parts: Bench,
) -> None:
    bench, clock = in_parts, Clock()
    bench.stock("small")
    bench.make(clock=clock, claim_patience_s=5.0, max_concurrency=1)
    end = others_claim(bench, "a", "small")
    bench.prefetcher.submit([want("a", rows=LARGE_ROWS), want("small")])
    eventually(lambda: bench.counters.get("fetch_parked") == 2, "both parked")
    asked = ("get", LAYOUT.modality("image"))
    eventually(
        lambda: asked in bench.store.log, "the question for the record, which gives the size"
    )
    eventually(bench.knows_the_record, "the record")
    clock.now_s += 5.1
    # The large one comes before it in every queue, but is not late: 200 kB at 1 MiB/s.
    assert [each.want.key for each in bench.collect(1)] == [key_of("small")]
    assert ranges(bench) == 0
    clock.now_s += 0.1
    assert bench.collect(1)[0].source == "bucket"
    end()


def test_what_nobody_waits_for_goes_behind_all_others_and_comes_all_the_same(
    bench: Bench,
) -> None:
    bench.stock(*"abcdef")
    bench.make(max_concurrency=1)
    gate = bench.held_up([want(text) for text in "abc"])
    bench.prefetcher.submit([want(text, Priority.FORGOTTEN) for text in "ab"])  # a is half fetched
    bench.prefetcher.submit([want("d", Priority.LOOKAHEAD)])
    bench.fence()
    gate.release()
    assert {each.outcome for each in bench.collect(4)} == {FetchOutcome.READY}
    assert order_of(bench) == list("acdb")


# -- the end -----------------------------------------------------------------------------------


def test_stopping_ends_running_and_queued_fetches_and_closes_every_entry(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.stock(*"abcdefgh")
    bench.tier.writer.publish(key_of("h"), [entry(key_of("h"))])
    bench.make(max_concurrency=2)
    assert bench.one("h").outcome is FetchOutcome.READY
    bench.hold()
    bench.prefetcher.submit([want(text) for text in "abcdefg"])
    eventually(lambda: bench.store.active == 2, "two fetches")
    bench.fence()
    started = len(bench.store.fetched)
    bench.loop.stop(DEADLINE_S)
    assert "s3ec-prefetch-test" not in {thread.name for thread in threading.enumerate()}
    assert len(bench.store.fetched) == started == 2
    bench.tier.close()
    gc.collect()
    assert bench.open_files() == 0
    assert "destroyed" not in caplog.text
    assert "exception" not in caplog.text
