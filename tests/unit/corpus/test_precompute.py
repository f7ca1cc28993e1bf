# SPDX-License-Identifier: Apache-2.0
"""A job with an encoder that is none: what is encoded, confirmed, catalogued, and done again."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from s3ec.config import load_settings
from s3ec.corpus import Corpus
from s3ec.corpus.catalog import list_parts
from s3ec.corpus.catalog_file import CatalogRow
from s3ec.corpus.confirmations import Ledger
from s3ec.corpus.encoder import Encoded, EncoderError, Picture, VllmEncoder
from s3ec.corpus.precompute import Job, JobOptions, PrecomputeReport, make_job
from s3ec.corpus.reading import ReadOptions
from s3ec.corpus.sources import SourceItem, open_source
from s3ec.decoding import has_transparent_colour
from s3ec.errors import AccessError, ConfigError, SourceError, TierError
from s3ec.identity import Layout, Namespace, make_key
from s3ec.index.local import NodeFolder
from s3ec.store.base import Store
from s3ec.tenant import Tenant
from s3ec.testing.fault_store import Fault, FaultStore, Script
from s3ec.testing.memory_store import MemoryBucket, MemoryStore
from s3ec.tier.files import Folders
from tests.support.indexes import delta_bytes, delta_name
from tests.support.pdfs import make_pdf
from tests.support.waiting import eventually
from tests.unit.cli.corpus import MODEL, entry_bytes
from tests.versions.odd_pictures import ODD

NAMESPACE = Namespace.from_descriptor(MODEL)
LAYOUT = Layout(NAMESPACE.name)
MADE_BY = "vllm=0.32.0 platform=cpu"
# What is never confirmed is not waited for.
AT_ONCE = JobOptions(patience_s=0.0)


def name_of(data: bytes) -> str:
    """What the encoder calls a picture."""
    return hashlib.sha256(b"model" + data).hexdigest()


@dataclass
class FakeEncoder:
    """Stores an entry for each picture, and announces it, unless told otherwise.

    Attributes:
        encoded: Bytes of what it was given.
        before_each: Called with the number of those before each picture.
        at_once: Takes all pictures before it encodes the first.
        reads_later: It knows nothing of a picture before it encodes it, as on a cluster.
    """

    corpus: Corpus
    can_name: bool = True
    tenant: Tenant | None = None
    saves: bool = True
    before_each: Callable[[int], None] = lambda count: None
    reads_later: bool = False
    encoded: list[bytes] = field(default_factory=list)
    is_running: bool = False
    is_closed: bool = False
    at_once: bool = False
    named: int = 0
    stopped: threading.Event = field(default_factory=threading.Event)

    lock: threading.Lock = field(default_factory=threading.Lock)

    start_s: float = 0.0
    release: str = "1"

    @property
    def naming(self) -> str:
        return f"{self.release}:{name_of(b'')[:8]}"

    def namespace(self) -> Namespace:
        return NAMESPACE

    def read(self, number: int, item: SourceItem) -> Picture:
        if self.reads_later:
            return Picture(number, item.modality, b"", item=item)
        return self.read_now(number, item)

    def read_now(self, number: int, item: SourceItem) -> Picture:
        data = item.read()
        sha256 = hashlib.sha256(data).hexdigest()
        return Picture(number, item.modality, data, sha256=sha256)

    def identify(self, picture: Picture) -> str | None:
        if self.reads_later:
            return None
        if picture.data.startswith(b"broken"):
            raise SourceError("cannot identify image file")
        with self.lock:
            self.named += 1
        return picture.uuid or (name_of(picture.data) if self.can_name else None)

    def encode(self, pictures: Iterable[Picture]) -> Iterator[Encoded]:
        for given in list(pictures) if self.at_once else pictures:
            picture = given
            self.is_running = True
            self.before_each(len(self.encoded))
            if self.stopped.is_set():
                return
            read: dict[str, Any] = {}
            if self.reads_later:
                assert given.item is not None
                picture = self.read_now(given.number, given.item)
                read = {"sha256": picture.sha256, "nbytes": len(picture.data)}
            self.encoded.append(picture.data)
            if picture.data.startswith(b"too large"):
                problem = "ValueError: the prompt is too long"
                yield Encoded(picture.number, None, problem, **read)
                continue
            identifier = picture.uuid or name_of(picture.data)
            if self.saves:
                save(self.corpus, identifier, self.tenant)
            yield Encoded(picture.number, identifier, **read)

    def stop(self) -> None:
        self.stopped.set()

    def close(self) -> None:
        self.is_closed = True


def save(
    corpus: Corpus, identifier: str, tenant: Tenant | None = None, *, told_bytes: int | None = None
) -> None:
    """What an engine does: the object, then its announcement, as of so many bytes."""
    key = make_key(identifier, tenant)
    assert key is not None
    body = entry_bytes(key.stored, NAMESPACE.name, made_by=MADE_BY)
    put(corpus, LAYOUT.descriptor, NAMESPACE.to_json())
    put(corpus, LAYOUT.object(key), body)
    put(corpus, delta_name(LAYOUT), delta_bytes({key.digest: told_bytes or len(body)}, LAYOUT))


def put(corpus: Corpus, name: str, body: bytes) -> None:
    async def work(store: Store) -> None:
        if await store.head(name) is None:
            await store.put_if_absent(name, [body])

    corpus.run(work)


@dataclass
class Desk:
    """A folder of pictures, and a bucket."""

    corpus: Corpus
    folder: Path

    def write(self, **files: bytes) -> None:
        for name, data in files.items():
            (self.folder / f"{name}.png").write_bytes(data)

    def job(
        self,
        encoder: FakeEncoder,
        options: JobOptions | None = None,
        items: Iterable[SourceItem] | None = None,
    ) -> Job:
        found = open_source(str(self.folder)) if items is None else items
        return Job(self.corpus, found, encoder, options)

    def run(
        self, options: JobOptions | None = None, **how: Any
    ) -> tuple[PrecomputeReport, FakeEncoder]:
        encoder = FakeEncoder(self.corpus, **how)
        report = self.job(encoder, options).run()
        assert encoder.is_closed
        assert report.engine_started == encoder.is_running
        return report, encoder

    def rows(self) -> dict[str, Any]:
        """The catalogue by document, and page where there is one."""
        return {
            f"{row.document}:{row.page}" if row.page else row.document: row
            for row in self.corpus.catalog(NAMESPACE.name).rows()
        }


@pytest.fixture
def bucket() -> MemoryBucket:
    return MemoryBucket()


@pytest.fixture
def open_corpus(bucket: MemoryBucket, tmp_path: Path) -> Iterator[Callable[..., Corpus]]:
    opened: list[Corpus] = []

    def make(store: Store | None = None, **changes: Any) -> Corpus:
        given = {"bucket": "corpus", "cache_dir": str(tmp_path / "tier"), "min_free_bytes": 0}
        settings = load_settings({**given, **changes}).settings
        opened.append(Corpus(settings, store=store or MemoryStore(bucket), attempts=1))
        return opened[-1]

    yield make
    for corpus in opened:
        corpus.close()


@pytest.fixture
def desk(open_corpus: Callable[..., Corpus], tmp_path: Path) -> Desk:
    folder = tmp_path / "pages"
    folder.mkdir()
    return Desk(open_corpus(), folder)


def test_what_is_encoded_is_confirmed_and_catalogued(desk: Desk) -> None:
    desk.write(a=b"one", b=b"two")
    report, encoder = desk.run()
    assert (report.status, report.items, report.encoded, report.done_before) == (
        "complete",
        2,
        2,
        0,
    )
    assert sorted(encoder.encoded) == [b"one", b"two"]
    row = desk.rows()["a.png"]
    blob = entry_bytes(name_of(b"one"), NAMESPACE.name, made_by=MADE_BY)
    assert row.identifier == name_of(b"one")
    assert row.sha256 == hashlib.sha256(b"one").hexdigest()
    assert row.uri == (desk.folder / "a.png").as_uri()
    # By the stored entry's own header.
    assert (row.rows, row.width, row.dtype, row.nbytes) == (4, 8, "bfloat16", len(blob))
    assert row.placeholder == {"image_grid_thw": [1, 2, 2]}
    assert row.made_by == MADE_BY
    assert report.stored_bytes == 2 * len(blob)
    assert report.to_json()["encoded_count"] == 2


def test_a_node_that_has_no_tier_yet_gets_its_folders(
    desk: Desk, open_corpus: Callable[..., Corpus], tmp_path: Path
) -> None:
    desk.write(a=b"one")
    fresh = Desk(open_corpus(cache_dir=str(tmp_path / "home" / ".cache" / "s3ec")), desk.folder)
    report, _ = fresh.run()
    assert (report.status, report.encoded) == ("complete", 1)
    (tmp_path / "file").touch()
    broken = Desk(open_corpus(cache_dir=str(tmp_path / "file" / "s3ec")), desk.folder)
    with pytest.raises(TierError, match="set `cache_dir` to a folder"):
        broken.run()


def test_a_second_run_encodes_nothing_and_starts_no_engine(desk: Desk) -> None:
    desk.write(a=b"one", b=b"two")
    desk.run()
    report, encoder = desk.run()
    assert (report.status, report.done_before, report.encoded) == ("complete", 2, 0)
    assert not encoder.is_running
    assert report.read_bytes == 0  # a file of the same size and time is not read again


def test_files_that_were_touched_are_read_and_not_encoded(desk: Desk) -> None:
    desk.write(a=b"one", b=b"two")
    desk.run()
    os.utime(desk.folder / "a.png", (1, 1))
    for read_bytes in (3, 0):
        report, encoder = desk.run()
        assert (report.status, report.done_before, report.read_bytes) == ("complete", 2, read_bytes)
        assert not encoder.is_running


def test_files_that_were_changed_are_encoded_again(desk: Desk) -> None:
    desk.write(a=b"one", b=b"two")
    desk.run()
    desk.write(a=b"three")
    report, encoder = desk.run()
    assert (report.done_before, report.encoded) == (1, 1)
    assert encoder.encoded == [b"three"]
    assert desk.rows()["a.png"].identifier == name_of(b"three")
    assert [(each.document, each.reason) for each in report.replaced] == [
        ("a.png", "its file has changed")
    ]
    assert report.to_json()["replaced_count"] == 1


def test_what_another_release_would_call_otherwise_is_not_there_before(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server of that release would ask for another name, and find nothing."""
    desk.write(a=b"one", b=b"two")
    desk.run()

    def new_name_of(data: bytes) -> str:
        return hashlib.sha256(b"new" + data).hexdigest()

    monkeypatch.setattr(f"{__name__}.name_of", new_name_of)
    desk.write(c=b"one")
    report, encoder = desk.run()
    assert (report.status, report.done_before, report.encoded) == ("complete", 0, 2)
    assert sorted(encoder.encoded) == [b"one", b"two"]
    assert {row.identifier for row in desk.rows().values()} == {
        new_name_of(b"one"),
        new_name_of(b"two"),
    }
    report, encoder = desk.run()
    assert (report.done_before, report.read_bytes, encoder.is_running) == (3, 0, False)


def test_after_an_upgrade_that_names_alike_files_are_read_once_and_not_encoded(desk: Desk) -> None:
    desk.write(a=b"one", b=b"two")
    desk.run()
    for read_bytes in (6, 0):
        report, encoder = desk.run(release="2")
        assert (report.status, report.done_before, report.read_bytes) == ("complete", 2, read_bytes)
        assert not encoder.is_running


def test_complete_means_all_that_is_below_the_source(desk: Desk, tmp_path: Path) -> None:
    desk.write(a=b"one")
    (desk.folder / "linked").symlink_to(tmp_path, target_is_directory=True)
    (desk.folder / "b.txt").touch()
    (desk.folder / "c.txt").touch()
    report, encoder = desk.run()
    assert (report.status, encoder.encoded) == ("partial", [b"one"])
    assert {each.document: each.reason.partition(";")[0] for each in report.failures} == {
        "linked": "links to folders are not followed",
        "b.txt": "left out: 2 of the files end with .txt, and none is taken for a picture, film, "
        "sound or PDF file",
    }


def test_the_rate_is_without_the_time_that_the_engine_took_to_start(desk: Desk) -> None:
    report = PrecomputeReport(encoded=30, seconds=70.0, start_s=60.0)
    assert report.encoded_per_s == 3.0
    desk.write(a=b"one")
    encoder = FakeEncoder(desk.corpus)

    def start(count: int) -> None:
        encoder.start_s = 50.0

    encoder.before_each = start
    assert desk.job(encoder).run().start_s >= 50.0


def test_what_only_the_encoder_reads_is_catalogued_with_the_sums_of_its_files(desk: Desk) -> None:
    desk.write(a=b"one", b=b"two")
    first, _ = desk.run(reads_later=True)
    assert (first.status, first.encoded, first.read_bytes) == ("complete", 2, 6)
    assert desk.rows()["a.png"].sha256 == hashlib.sha256(b"one").hexdigest()
    desk.write(b=b"three")
    second, encoder = desk.run(reads_later=True)
    assert (second.done_before, second.encoded, encoder.encoded) == (1, 1, [b"three"])
    assert [each.document for each in second.replaced] == ["b.png"]
    os.utime(desk.folder / "a.png", (1, 1))
    third, _ = desk.run(reads_later=True)
    assert (third.status, third.done_before, third.encoded) == ("complete", 2, 0)


def test_what_cannot_be_read_is_listed_and_stops_nothing(desk: Desk) -> None:
    desk.write(a=b"one", b=b"broken", c=b"two", d=b"too large")
    report, encoder = desk.run()
    assert (report.status, report.encoded) == ("partial", 2)
    assert {failure.document: failure.reason for failure in report.failures} == {
        "b.png": "cannot identify image file",
        "d.png": "ValueError: the prompt is too long",
    }
    assert encoder.encoded.count(b"one") == encoder.encoded.count(b"two") == 1
    (desk.folder / "b.png").unlink()
    (desk.folder / "d.png").unlink()
    report, encoder = desk.run()
    assert (report.status, report.done_before, encoder.encoded) == ("complete", 2, [])


def test_an_empty_source_is_a_failure_but_for_an_empty_shard(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeEncoder, "namespace", None)  # vLLM's would take its import
    report, _ = desk.run()
    assert (report.status, report.problem) == ("failed", "the source has nothing to encode")
    report, _ = desk.run(JobOptions(shard=(0, 4)))
    assert report.status == "complete"
    assert report.to_json()["namespace"] is None  # none was chosen


def test_progress_ends_with_all_items_where_all_were_there(desk: Desk) -> None:
    desk.write(a=b"one", b=b"two")
    desk.run()
    told: list[tuple[str, int, int | None]] = []
    found = open_source(str(desk.folder))
    encoder = FakeEncoder(desk.corpus)
    Job(desk.corpus, found, encoder, total=lambda: 2, report=lambda *it: told.append(it)).run()
    assert told[-1] == ("precomputing", 2, 2)


def test_a_bucket_that_refuses_at_the_start_is_in_the_report_too(
    desk: Desk, bucket: MemoryBucket, open_corpus: Callable[..., Corpus]
) -> None:
    desk.write(a=b"one")
    fault = Fault("list.*", "/manifest/", error=AccessError)
    sick = Desk(open_corpus(FaultStore(MemoryStore(bucket), Script([fault]))), desk.folder)
    encoder = FakeEncoder(sick.corpus)
    job = sick.job(encoder)
    with pytest.raises(AccessError):
        job.run()
    assert job.report.status == "failed"
    assert encoder.is_closed


def test_a_job_that_cannot_read_the_catalogue_leaves_nothing_claimed_on_the_node(
    desk: Desk, bucket: MemoryBucket, open_corpus: Callable[..., Corpus], tmp_path: Path
) -> None:
    desk.write(a=b"one")
    desk.run()
    fault = Fault("list.*", "/catalog/", error=AccessError)
    corpus = open_corpus(FaultStore(MemoryStore(bucket), Script([fault])))
    with pytest.raises(AccessError):
        Desk(corpus, desk.folder).run()
    folder = NodeFolder.of(Folders(tmp_path / "tier"), NAMESPACE.name)
    claim = folder.try_claim("refresh")
    assert claim is not None
    folder.release(claim)


def test_nothing_but_bad_files_is_a_failure(desk: Desk) -> None:
    desk.write(a=b"broken")
    report, encoder = desk.run()
    assert (report.status, report.confirmed) == ("failed", 0)
    assert not encoder.is_running


def test_the_same_picture_is_encoded_once(desk: Desk) -> None:
    desk.write(a=b"one", b=b"one", c=b"one")
    report, encoder = desk.run()
    assert encoder.encoded == [b"one"]
    assert (report.encoded, report.catalogued) == (1, 2)
    assert {row.identifier for row in desk.rows().values()} == {name_of(b"one")}
    assert len(desk.rows()) == 3


def test_picture_that_is_confirmed_after_its_twin_was_looked_at_is_encoded_once(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("s3ec.corpus.confirmations._ROWS_EVERY_S", 0.0)
    monkeypatch.setattr("s3ec.corpus.confirmations._LOOK_S", 0.01)
    desk.write(a=b"one", b=b"two", c=b"one")

    def before_each(count: int) -> None:
        if count == 0:
            eventually(lambda: encoder.named == 3, "all are looked at")
        else:
            eventually(lambda: job.report.encoded == 1, "the first one is confirmed")

    encoder = FakeEncoder(desk.corpus, before_each=before_each)
    job = desk.job(encoder)
    report = job.run()
    assert encoder.encoded == [b"one", b"two"]
    assert (report.status, report.encoded, report.catalogued) == ("complete", 2, 1)


def test_rows_are_written_while_a_cluster_encodes(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("s3ec.corpus.confirmations._ROWS_EVERY_S", 0.0)
    monkeypatch.setattr("s3ec.corpus.confirmations._LOOK_S", 0.01)
    desk.write(a=b"one", b=b"two", c=b"three", d=b"four")

    def before_each(count: int) -> None:
        if count == 3:
            eventually(lambda: desk.corpus.run(lambda store: list_parts(store, LAYOUT)))

    report, _ = desk.run(at_once=True, reads_later=True, before_each=before_each)
    assert (report.status, report.encoded) == ("complete", 4)


def test_every_item_of_a_picture_that_cannot_be_encoded_is_listed(desk: Desk) -> None:
    desk.write(a=b"too large", b=b"too large", c=b"one")
    report, encoder = desk.run(at_once=True)
    assert sorted(encoder.encoded) == [b"one", b"too large"]
    assert [failure.document for failure in report.failures] == ["a.png", "b.png"]
    assert (report.status, report.encoded) == ("partial", 1)


def test_an_item_that_the_catalogue_cannot_name_is_listed_and_costs_no_other_its_row(
    desk: Desk, tmp_path: Path
) -> None:
    desk.write(a=b"one", b=b"two")
    names = {"a": "d" * 5000, "b": "good"}
    lines = [json.dumps({"id": name, "path": f"pages/{at}.png"}) for at, name in names.items()]
    source = tmp_path / "list.jsonl"
    source.write_text("\n".join(lines))
    encoder = FakeEncoder(desk.corpus)
    report = desk.job(encoder, items=open_source(str(source))).run()
    assert encoder.encoded == [b"two"]
    assert list(desk.rows()) == ["good"]
    assert report.status == "partial"
    assert "`document`" in report.failures[0].reason


def test_an_encoder_that_cannot_name_pictures_says_it_when_it_has_encoded_them(desk: Desk) -> None:
    desk.write(a=b"one", b=b"two")
    report, _ = desk.run(can_name=False)
    assert (report.status, report.encoded) == ("complete", 2)
    report, encoder = desk.run(can_name=False)
    assert (report.done_before, encoder.encoded) == (2, [])


def test_what_the_index_has_is_catalogued_without_an_engine(desk: Desk) -> None:
    desk.write(a=b"one", b=b"two")
    save(desk.corpus, name_of(b"one"))
    save(desk.corpus, name_of(b"two"))
    report, encoder = desk.run()
    assert (report.status, report.catalogued, report.encoded) == ("complete", 2, 0)
    assert not encoder.is_running
    assert desk.rows()["a.png"].placeholder == {"image_grid_thw": [1, 2, 2]}


def asked_of_entries(store: FaultStore) -> list[str]:
    return [op for op, name in store.log if name.startswith(LAYOUT.objects)]


def test_an_embedding_is_confirmed_by_one_request_where_the_index_tells_its_size(
    desk: Desk, bucket: MemoryBucket, open_corpus: Callable[..., Corpus]
) -> None:
    desk.write(a=b"one", b=b"two")
    save(desk.corpus, name_of(b"one"))
    save(desk.corpus, name_of(b"two"), told_bytes=7)  # that of another s3ec
    store = FaultStore(MemoryStore(bucket))
    counted = Desk(open_corpus(store), desk.folder)
    report, _ = counted.run()
    assert (report.status, report.catalogued) == ("complete", 2)
    assert sorted(asked_of_entries(store)) == ["get_range"] * 3 + ["head"]
    sizes = {len(body) for name, body in bucket.objects.items() if name.startswith(LAYOUT.objects)}
    assert {row.nbytes for row in counted.rows().values()} == sizes


def test_what_was_deleted_is_encoded_again(desk: Desk) -> None:
    desk.write(a=b"one", b=b"two")
    desk.run()
    desk.corpus.delete(name_of(b"one"), namespace=NAMESPACE.name)
    report, encoder = desk.run(saves=False, options=AT_ONCE)
    assert encoder.encoded == [b"one"]
    assert (report.status, report.done_before, report.encoded) == ("partial", 1, 0)


def test_what_the_bucket_lacks_is_asked_for_once_and_the_next_run_encodes_it(
    desk: Desk, bucket: MemoryBucket, open_corpus: Callable[..., Corpus]
) -> None:
    desk.write(a=b"one")
    save(desk.corpus, name_of(b"one"))
    for name in [name for name in bucket.objects if name.startswith(LAYOUT.objects)]:
        del bucket.objects[name]
    store = FaultStore(MemoryStore(bucket))
    counted = Desk(open_corpus(store), desk.folder)
    report, encoder = counted.run(AT_ONCE)
    assert encoder.encoded == []
    assert "`s3ec manifest rebuild`" in report.unconfirmed[0].reason
    assert asked_of_entries(store) == ["get_range"]
    report, encoder = desk.run()
    assert (report.status, encoder.encoded) == ("complete", [b"one"])


def test_a_copy_under_another_name_needs_no_engine(desk: Desk) -> None:
    desk.write(a=b"one")
    desk.run()
    desk.write(b=b"one")
    report, encoder = desk.run(can_name=False)
    assert (report.done_before, report.catalogued) == (1, 1)
    assert not encoder.is_running


def test_rows_are_written_on_the_way(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a million files that were only touched are not kept until the end."""
    batches: list[int] = []
    append = Ledger.append

    async def noted(ledger: Ledger, store: Store, rows: Sequence[CatalogRow]) -> None:
        batches.append(len(rows))
        await append(ledger, store, rows)

    monkeypatch.setattr(Ledger, "append", noted)
    monkeypatch.setattr("s3ec.corpus.confirmations._ROWS_AT_A_TIME", 2)
    desk.write(a=b"one")
    desk.run()
    desk.write(**{f"copy-{number:02}": b"one" for number in range(40)})

    def items() -> Iterator[SourceItem]:
        for item in open_source(str(desk.folder)):
            if item.document == "copy-39.png":
                eventually(lambda: len(batches) > 1, "those before are written")
            yield item

    encoder = FakeEncoder(desk.corpus)
    report = desk.job(encoder, items=items()).run()
    assert (report.status, report.catalogued, encoder.encoded) == ("complete", 40, [])
    assert len(batches) > 2
    assert sum(batches) == 41


def test_what_the_source_says_is_renewed(desk: Desk) -> None:
    desk.write(a=b"one")
    desk.run()
    items = [replace(item, extra={"title": "A"}) for item in open_source(str(desk.folder))]
    encoder = FakeEncoder(desk.corpus)
    report = desk.job(encoder, items=items).run()
    assert (report.done_before, report.catalogued, encoder.is_running) == (1, 0, False)
    assert desk.rows()["a.png"].extra["title"] == "A"


def two_folders(desk: Desk, one: bytes, other: bytes) -> tuple[Path, Path]:
    """Two folders with a file of one name, of one age."""
    folders = desk.folder / "one", desk.folder / "other"
    for folder, data in zip(folders, (one, other), strict=True):
        folder.mkdir()
        (folder / "a.png").write_bytes(data)
        os.utime(folder / "a.png", ns=(10**18, 10**18))
    return folders


def run_on(desk: Desk, folder: Path) -> tuple[PrecomputeReport, FakeEncoder]:
    encoder = FakeEncoder(desk.corpus)
    return desk.job(encoder, items=open_source(str(folder))).run(), encoder


def test_a_file_of_another_source_is_read_whatever_its_name_size_and_age(desk: Desk) -> None:
    one, other = two_folders(desk, b"one", b"two")
    assert run_on(desk, one)[0].status == "complete"
    report, encoder = run_on(desk, other)
    assert (report.status, report.read_bytes, report.replaced) == ("complete", 3, [])
    assert encoder.encoded == [b"two"]


def test_a_folder_that_was_moved_is_catalogued_where_it_is(desk: Desk) -> None:
    one, other = two_folders(desk, b"one", b"one")
    run_on(desk, one)
    report, encoder = run_on(desk, other)
    assert (report.status, report.catalogued, report.replaced) == ("complete", 1, [])
    assert encoder.encoded == []
    assert desk.rows()["a.png"].uri == (other / "a.png").as_uri()


@pytest.fixture
def host() -> Iterator[str]:
    """A server that has `/a.png` under any query, and nothing else."""

    class Pages(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = b"one" if self.path.startswith("/a.png") else b""
            self.send_response(200 if body else 403)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Pages) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


def test_secrets_in_urls_reach_neither_catalogue_nor_report(desk: Desk, host: str) -> None:
    listed = desk.folder / "list.jsonl"
    urls = [
        f"http://{host}/a.png?X-Amz-Signature=SECRET",
        f"http://{host}/b.png?sig=SECRET",
        f"http://me:SECRET@{host}/a.png",
        f"ftp://me:SECRET@{host}/a.png",
        f" http://me:SECRET@{host}/a.png",
        "http://me:SECRET@[half/a.png",
        "http://me:SECRET@ho\u2100st/a.png",
        "s3://KEY:SECRET@bucket/a.png",
    ]
    rows = [{"document": str(number), "url": url} for number, url in enumerate(urls)]
    listed.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def run() -> PrecomputeReport:
        return desk.job(FakeEncoder(desk.corpus), items=open_source(str(listed))).run()

    report = run()
    assert (report.encoded, len(report.failures)) == (1, len(urls) - 1)
    assert "SECRET" not in json.dumps(report.to_json())
    assert desk.rows()["0"].uri == f"http://{host}/a.png?..."
    parts = desk.corpus.within(list_parts, NAMESPACE.name)
    listed.write_text(listed.read_text().replace("Signature=SECRET", "Signature=OTHER"))
    again = run()
    assert (again.done_before, again.catalogued) == (1, 0)
    assert desk.corpus.within(list_parts, NAMESPACE.name) == parts  # its row says all it can


def test_clients_that_send_the_hash_of_the_file_get_entries_under_that(desk: Desk) -> None:
    desk.write(a=b"one")
    hashed = JobOptions(identifier="sha256")
    desk.run()
    report, encoder = desk.run(hashed)
    assert (report.encoded, encoder.encoded) == (1, [b"one"])
    expected = f"sha256:{hashlib.sha256(b'one').hexdigest()}"
    assert desk.rows()["a.png"].identifier == expected
    for options, found in ((hashed, 0), (None, 1), (hashed, 1)):
        report, encoder = desk.run(options)
        assert (report.status, report.catalogued + report.done_before) == ("complete", 1)
        assert report.catalogued == found
        assert not encoder.is_running


def test_pages_are_items_and_drawn_anew_for_other_dots_per_inch(desk: Desk) -> None:
    (desk.folder / "report.pdf").write_bytes(make_pdf(2))
    report, _ = desk.run()
    assert (report.status, report.encoded) == ("complete", 2)
    assert set(desk.rows()) == {"report.pdf:1", "report.pdf:2"}
    report, _ = desk.run()
    assert (report.done_before, report.read_bytes) == (2, 0)
    items = open_source(str(desk.folder), ReadOptions(dpi=30))
    encoder = FakeEncoder(desk.corpus)
    assert desk.job(encoder, items=items).run().encoded == 2


def test_under_a_tenants_secret_there_is_no_catalogue_and_nothing_is_encoded_twice(
    desk: Desk, open_corpus: Callable[..., Corpus], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TENANT_KEY", "k" * 32)
    corpus = open_corpus(tenant_key="env:TENANT_KEY")
    assert corpus.tenant is not None
    secret = Desk(corpus, desk.folder)
    desk.write(a=b"one", b=b"two")
    encoders = [FakeEncoder(corpus, tenant=corpus.tenant) for _ in range(2)]
    first, second = (secret.job(encoder).run() for encoder in encoders)
    assert (first.status, first.encoded) == ("complete", 2)
    assert (second.status, second.done_before, second.encoded) == ("complete", 2, 0)
    assert not encoders[1].is_running


# -- broken off -----------------------------------------------------------------------------------


def test_a_job_that_is_stopped_goes_on_later(desk: Desk) -> None:
    desk.write(**{f"page-{number:02}": bytes([number]) for number in range(20)})
    encoder = FakeEncoder(desk.corpus)
    job = desk.job(encoder)
    encoder.before_each = lambda count: job.stop() if count == 5 else None
    report = job.run()
    assert (report.status, report.is_stopped, report.encoded) == ("partial", True, 5)
    assert report.unconfirmed == []
    second, again = desk.run()
    assert (second.status, second.done_before, second.encoded) == ("complete", 5, 15)
    assert not set(encoder.encoded) & set(again.encoded)


def test_an_engine_that_ends_leaves_a_report(desk: Desk) -> None:
    desk.write(a=b"one", b=b"two", c=b"three")

    def die(count: int) -> None:
        if count == 2:
            raise EncoderError("the engine ended")

    report, encoder = desk.run(before_each=die)
    assert (report.status, report.problem, report.encoded) == ("partial", "the engine ended", 2)
    assert [each.reason for each in report.unconfirmed] == ["the job ended before it was encoded"]
    second, again = desk.run()
    assert second.status == "complete"
    assert len(again.encoded) == 1
    assert not set(encoder.encoded) & set(again.encoded)


def test_nothing_counts_before_the_bucket_has_confirmed_it(desk: Desk) -> None:
    desk.write(a=b"one", b=b"two")
    report, _ = desk.run(AT_ONCE, saves=False)
    assert (report.status, report.encoded) == ("failed", 0)
    assert {each.document for each in report.unconfirmed} == {"a.png", "b.png"}
    assert "has not confirmed it" in report.unconfirmed[0].reason
    save(desk.corpus, name_of(b"one"))  # as the next engine on the node does from its spool
    assert desk.rows() == {}
    report, encoder = desk.run()
    assert (report.catalogued, report.encoded, encoder.encoded) == (1, 1, [b"two"])


def test_what_is_stored_and_not_announced_does_not_count(desk: Desk) -> None:
    """No reader knows of it."""
    desk.write(a=b"one")
    key = make_key(name_of(b"one"))
    assert key is not None
    name, body = LAYOUT.object(key), entry_bytes(key.stored, NAMESPACE.name)
    report, _ = desk.run(AT_ONCE, saves=False, before_each=lambda _: put(desk.corpus, name, body))
    assert (report.status, report.encoded) == ("failed", 0)
    assert [each.document for each in report.unconfirmed] == ["a.png"]
    assert desk.rows() == {}


def test_a_bad_object_is_named_and_keeps_no_other_item_back(desk: Desk) -> None:
    """It blocks its key, so waiting for it would end nothing."""
    desk.write(a=b"one", b=b"two", c=b"three")
    for data in (b"one", b"two"):
        key = make_key(name_of(data))
        assert key is not None
        put(desk.corpus, LAYOUT.object(key), b"no entry")
        save(desk.corpus, name_of(data))
    report, encoder = desk.run()
    assert (report.status, report.encoded, encoder.encoded) == ("partial", 1, [b"three"])
    assert {each.document for each in report.unconfirmed} == {"a.png", "b.png"}
    assert all("verify --deep --repair" in each.reason for each in report.unconfirmed)
    assert set(desk.rows()) == {"c.png"}
    found = desk.corpus.verify(NAMESPACE.name, deep=True)
    assert desk.corpus.repair(found, NAMESPACE.name).deleted == 2
    report, encoder = desk.run()
    assert (report.status, report.encoded) == ("complete", 2)
    assert set(desk.rows()) == {"a.png", "b.png", "c.png"}


def test_the_bucket_sets_the_pace_and_one_that_confirms_nothing_ends_the_job(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("s3ec.corpus.confirmations._MOST_UNCONFIRMED", 2)
    monkeypatch.setattr("s3ec.corpus.confirmations._LOOK_S", 0.01)
    desk.write(**{f"page-{number}": bytes([number]) for number in range(6)})
    report, encoder = desk.run(AT_ONCE, saves=False)
    assert (report.status, len(encoder.encoded)) == ("failed", 2)
    assert report.problem == "the bucket has confirmed nothing for 0 s"
    report, _ = desk.run()
    assert (report.status, report.encoded) == ("complete", 6)


def test_last_uploads_of_an_engine_that_closes_are_waited_for(desk: Desk) -> None:
    desk.write(a=b"one")

    @dataclass
    class Late(FakeEncoder):
        def close(self) -> None:
            save(self.corpus, name_of(b"one"))
            super().close()

    encoder = Late(desk.corpus, saves=False)
    assert desk.job(encoder, AT_ONCE).run().encoded == 1


def test_a_job_that_is_broken_off_at_its_end_leaves_no_thread(desk: Desk) -> None:
    desk.write(a=b"one")

    @dataclass
    class BrokenOff(FakeEncoder):
        def close(self) -> None:
            if not self.is_closed:
                self.is_closed = True
                raise KeyboardInterrupt

    job = desk.job(BrokenOff(desk.corpus))
    with pytest.raises(KeyboardInterrupt):
        job.run()
    assert "s3ec-confirm" not in {thread.name for thread in threading.enumerate()}


def test_a_catalogue_that_cannot_be_written_loses_nothing(
    desk: Desk, bucket: MemoryBucket, open_corpus: Callable[..., Corpus]
) -> None:
    desk.write(a=b"one", b=b"two")
    fault = Fault("put_if_absent", "/catalog/", error=AccessError)
    sick = Desk(open_corpus(FaultStore(MemoryStore(bucket), Script([fault]))), desk.folder)
    report, encoder = sick.run(AT_ONCE)
    assert (report.status, report.encoded, len(encoder.encoded)) == ("failed", 0, 2)
    assert "catalogue could not be written" in report.unconfirmed[0].reason
    report, encoder = desk.run()
    assert (report.status, report.catalogued, encoder.encoded) == ("complete", 2, [])


# -- which items, and what is refused -------------------------------------------------------------


@pytest.mark.slow
def test_shards_share_the_items_and_new_ones_move_no_others(desk: Desk) -> None:
    desk.write(**{f"page-{number:02}": bytes([number]) for number in range(20)})
    found = [desk.run(JobOptions(shard=(number, 3)))[1].encoded for number in range(3)]
    assert sorted(itertools.chain(*found)) == [bytes([number]) for number in range(20)]
    assert all(found)
    desk.write(**{f"extra-{number}": bytes([number]) * 2 for number in range(6)})
    for number in range(3):
        report, _ = desk.run(JobOptions(shard=(number, 3)))
        assert report.done_before == len(found[number])


def test_a_limit_counts_items_that_are_there_too(desk: Desk) -> None:
    desk.write(a=b"one", b=b"two", c=b"three")
    assert desk.run(JobOptions(limit=2))[0].encoded == 2
    report, _ = desk.run(JobOptions(limit=2))
    assert (report.items, report.done_before) == (2, 2)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"shard": (4, 4)}, "shard"),
        ({"shard": (-1, 4)}, "shard"),
        ({"limit": 0}, "limit"),
        ({"identifier": "md5"}, "identifier"),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=f"`{field}`.*; ") as caught:
        JobOptions(**options)
    assert caught.value.field == field


def test_hashes_of_files_need_clients_that_may_choose(
    desk: Desk, open_corpus: Callable[..., Corpus]
) -> None:
    corpus = open_corpus(trust_client_ids=False)
    with pytest.raises(ConfigError, match="trust_client_ids"):
        Job(corpus, [], FakeEncoder(corpus), JobOptions(identifier="sha256"))


def test_bad_sources_batches_and_arguments_are_refused_before_anything_starts(desk: Desk) -> None:
    with pytest.raises(ConfigError, match="no such file or folder"):
        make_job(desk.corpus, str(desk.folder / "none"), "model")
    with pytest.raises(ConfigError, match="`batch`"):
        JobOptions(batch=0)
    for name in ("model", "ec_transfer_config"):
        with pytest.raises(ConfigError, match=f"`{name}` cannot be given"):
            VllmEncoder("model", desk.corpus.settings, engine_args={name: "x"})
    with pytest.raises(ConfigError, match=r"there is no folder `\./no model`"):
        VllmEncoder("./no model", desk.corpus.settings).namespace()


def test_a_picture_that_releases_decode_in_two_ways_is_left_out_and_the_report_says_why(
    desk: Desk,
) -> None:
    encoder = VllmEncoder("model", desk.corpus.settings)
    path = desk.folder / "odd.png"
    for name, odd in ODD.items():
        path.write_bytes(odd.data)
        item = SourceItem("odd.png", None, path.as_uri())
        if has_transparent_colour(odd.data):
            with pytest.raises(SourceError, match=r"left out, since vLLM 0\.33 lays RGB PNGs"):
                encoder.read(0, item)
            assert encoder.read(0, replace(item, modality="video")).data == odd.data
        else:
            assert encoder.read(0, item).data == odd.data, name


def test_threads_that_name_pictures_wait_for_one_processor(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[int] = []
    has_second = threading.Event()
    processor = SimpleNamespace(
        info=SimpleNamespace(parse_mm_data=dict),
        _get_mm_hashes=lambda inputs: {"image": ["name"]},
    )
    loader = SimpleNamespace(fetch_image=str)

    def make(encoder: VllmEncoder) -> tuple[Any, Any]:
        if "made" not in vars(encoder):  # from Python 3.12 on no cached_property has a lock
            begun.append(1)
            if len(begun) > 1:
                has_second.set()
            has_second.wait(0.2)
            vars(encoder)["made"] = processor, loader
        return processor, loader

    inputs = SimpleNamespace(ProcessorInputs=lambda *given: given)
    monkeypatch.setitem(sys.modules, "vllm.multimodal.processing", inputs)
    monkeypatch.setattr("s3ec.corpus.encoder._on_shelf", nullcontext)
    monkeypatch.setattr(VllmEncoder, "_processor", property(make))
    encoder = VllmEncoder("model", desk.corpus.settings)
    with ThreadPoolExecutor(4) as pool:
        names = list(pool.map(encoder.identify, [Picture(at, "image", b"") for at in range(4)]))
    assert names == ["name"] * 4
    assert len(begun) == 1
