# SPDX-License-Identifier: Apache-2.0
"""The job that fills a corpus: what is left to encode, who encodes it, and what is confirmed.

A thread pool reads and names items, the caller's thread keeps the encoder at work, and a thread of
its own waits for the bucket and writes the catalogue. ``encoder.py`` says who encodes.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import unquote, urlsplit

from s3ec.corpus.catalog_file import STAMP
from s3ec.corpus.confirmations import Confirmations, Failure, Ledger, Origin, failure_of
from s3ec.corpus.encoder import Encoded, Encoder, EncoderError, Picture, VllmEncoder
from s3ec.corpus.reading import ReadOptions, without_secrets
from s3ec.corpus.sources import SourceItem, open_source
from s3ec.counters import Report, unreported
from s3ec.errors import ConfigError, S3ECError, SourceError

if TYPE_CHECKING:
    from s3ec.corpus.bucket import OpenBucket
    from s3ec.corpus.catalog_file import CatalogRow
    from s3ec.corpus.ray_encoder import RayOptions
    from s3ec.identity import Namespace

log = logging.getLogger(__name__)

Status = Literal["complete", "partial", "failed"]
Identifier = Literal["content", "sha256"]

# Items that are read and named ahead of the encoder, for each thread that reads.
_AHEAD = 4
_REPORT_EVERY = 64
# Stands for that of a file that another process will read.
_ANY_SUM = "0" * 64


@dataclass(frozen=True, slots=True)
class JobOptions:
    """How a job works.

    Attributes:
        identifier: What embeddings are called: vLLM's content hash, or ``sha256:HEX`` for clients
            that send that as ``uuid``.
        shard: This job's part and the number of parts, such as (0, 4).
        limit: Most items of the source that are looked at; None for all.
        patience_s: How long the bucket may confirm nothing before the job ends without it.
    """

    identifier: Identifier = "content"
    shard: tuple[int, int] = (0, 1)
    limit: int | None = None
    patience_s: float = 120.0

    def __post_init__(self) -> None:
        number, parts = self.shard
        if not 0 <= number < parts:
            raise ConfigError(
                f"`shard` {number}/{parts} is none; write it as 0/4, from 0/4 to 3/4",
                field="shard",
            )
        if self.limit is not None and self.limit < 1:
            raise ConfigError("`limit` must be 1 or more; leave it out for all", field="limit")
        if self.identifier not in ("content", "sha256"):
            raise ConfigError(
                f"`identifier` {self.identifier!r:.50} is none; it is `content` or `sha256`",
                field="identifier",
            )


@dataclass(slots=True)
class PrecomputeReport:
    """What a job did.

    Attributes:
        namespace: Where the embeddings are.
        items: Of the source, in this shard, that were looked at.
        done_before: Of these, what the catalogue and the index had.
        catalogued: What the index had and the catalogue lacked.
        encoded: What was encoded, confirmed by the bucket and catalogued.
        replaced: Items whose row takes the place of an older one: their file has changed.
        failures: What could not be read or encoded, and what of the source was left out.
        unconfirmed: What was encoded, and the bucket has not confirmed.
        read_bytes: Of the files that were read.
        stored_bytes: Of the objects of what was encoded.
        seconds: How long the job took.
        start_s: Of that, how long it took to import vLLM and to start the engine.
        is_stopped: It was told to end before the end of the source.
        problem: Why it ended before that by itself; else empty.
    """

    namespace: str = ""
    items: int = 0
    done_before: int = 0
    catalogued: int = 0
    encoded: int = 0
    replaced: list[Failure] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    unconfirmed: list[Failure] = field(default_factory=list)
    read_bytes: int = 0
    stored_bytes: int = 0
    seconds: float = 0.0
    start_s: float = 0.0
    engine_started: bool = False
    is_stopped: bool = False
    problem: str = ""

    @property
    def confirmed(self) -> int:
        """Items that the catalogue and the bucket have now."""
        return self.done_before + self.catalogued + self.encoded

    @property
    def encoded_per_s(self) -> float:
        """Without the time in which the engine started."""
        return self.encoded / max(self.seconds - self.start_s, 1e-3)

    @property
    def status(self) -> Status:
        """``complete``: all of the source is there. ``failed``: nothing of it is."""
        if not (self.failures or self.unconfirmed or self.is_stopped or self.problem):
            return "complete"
        return "partial" if self.confirmed else "failed"

    def to_json(self) -> dict[str, Any]:
        """As a plain document, for ``--report`` and ``--json``."""
        return {
            "status": self.status,
            "namespace": self.namespace,
            "item_count": self.items,
            "done_before_count": self.done_before,
            "catalogued_count": self.catalogued,
            "encoded_count": self.encoded,
            "replaced_count": len(self.replaced),
            "failed_count": len(self.failures),
            "unconfirmed_count": len(self.unconfirmed),
            "read_bytes": self.read_bytes,
            "stored_bytes": self.stored_bytes,
            "seconds": round(self.seconds, 3),
            "start_s": round(self.start_s, 3),
            "encoded_per_s": round(self.encoded_per_s, 3),
            "engine_started": self.engine_started,
            "stopped": self.is_stopped,
            "problem": self.problem or None,
            "failures": [asdict(each) for each in self.failures],
            "unconfirmed": [asdict(each) for each in self.unconfirmed],
            "replaced": [asdict(each) for each in self.replaced],
        }


@dataclass(frozen=True, slots=True)
class _Planned:
    """What is to be done for one item; exactly one of these, or nothing where it is done.

    Attributes:
        failure: It cannot be read.
        row: The embedding is there and known: only this row is new.
        is_renewed: The catalogue had the document already, with other words about it.
        found: The embedding is there under this identifier, and no row tells of it.
        picture: To be encoded; with ``found`` as its likely name.
        identifier: Of the embedding, where the catalogue knows it.
    """

    read_bytes: int = 0
    origin: Origin | None = None
    failure: Failure | None = None
    row: CatalogRow | None = None
    is_renewed: bool = False
    found: str | None = None
    picture: Picture | None = None
    identifier: str | None = None

    @property
    def is_done(self) -> bool:
        """Whether bucket and catalogue had it before."""
        left = self.failure or self.row or self.found or self.picture
        return self.is_renewed or left is None


@dataclass(slots=True)
class _UnderWay:
    """A picture that the encoder has, and who waits for it.

    Attributes:
        origin: Of the item.
        digest: Of its key, as far as that is known.
        twins: Items with the same picture.
    """

    origin: Origin
    digest: bytes | None
    twins: list[Origin] = field(default_factory=list)

    @property
    def origins(self) -> list[Origin]:
        return [self.origin, *self.twins]


class Job:
    """Brings the items of a source into a corpus. Used once.

    States: new, then running in ``run``, and ended. ``stop`` has it end soon.
    """

    _ledger: Ledger
    _confirmations: Confirmations

    def __init__(
        self,
        corpus: OpenBucket,
        items: Iterable[SourceItem],
        encoder: Encoder,
        options: JobOptions | None = None,
        *,
        total: Callable[[], int | None] = lambda: None,
        report: Report = unreported,
    ) -> None:
        """Nothing is read yet.

        Args:
            corpus: Where to.
            items: Taken one by one, as they are needed.
            encoder: Closed at the end of ``run``.
            options: How it works.
            total: How many items there are, as far as that is known.
            report: Told how many are done.

        Raises:
            ConfigError: The settings refuse what ``identifier`` asks for.
        """
        self._options = options or JobOptions()
        if self._options.identifier == "sha256" and not corpus.settings.trust_client_ids:
            raise ConfigError(
                "`identifier` = sha256 is a client's name, and `trust_client_ids` = false takes "
                "none of those; set it to true, or take `content`",
                field="identifier",
            )
        self._corpus = corpus
        self._items = items
        self._encoder = encoder
        self._total = total
        self._tell = report
        self._stopped = threading.Event()
        self._under_way: dict[int, _UnderWay] = {}
        self._begun: dict[bytes, _UnderWay] = {}  # the same by their key, as far as that is known
        self._naming = "-"  # see Encoder.naming; names that clients choose never change
        self._opening_s = 0.0
        self._is_open = False
        self.report = PrecomputeReport()

    def stop(self) -> None:
        """Have ``run`` end soon; what is encoded is saved. Also in a signal's handler."""
        self._stopped.set()
        self._encoder.stop()

    @property
    def progress(self) -> PrecomputeReport:
        """The report so far, with what was confirmed by now."""
        self._take_counts()
        return self.report

    def run(self) -> PrecomputeReport:
        """Do it, and return what was done. Faults of items, engine and bucket are in the report.

        Raises:
            ConfigError: The model, an argument, a setting or the source cannot work.
            UnavailableError, AccessError: The bucket did not answer at the start.
            CorruptEntryError: The catalogue is unusable.
        """
        began_s = time.monotonic()
        try:
            namespace = self._open_encoder()
            self.report.namespace = namespace.name
            self._ledger = Ledger(self._corpus, namespace)
            try:
                self._ledger.open()
                self._confirmations = Confirmations(self._corpus, self._ledger)
                self._is_open = True
                try:
                    self._encode_all()
                finally:
                    self._end()
            finally:
                self._ledger.close()
        except BaseException as exc:
            self.report.problem = str(exc) or type(exc).__name__
            raise
        finally:
            self._encoder.close()
            self.report.seconds = time.monotonic() - began_s
            self.report.start_s = self._opening_s + self._encoder.start_s
        return self.report

    def _open_encoder(self) -> Namespace:
        began_s = time.monotonic()
        namespace = self._encoder.namespace()
        if self._options.identifier == "content":
            self._naming = self._encoder.naming
        # Where the engine was started for that, its time is counted as such.
        self._opening_s = time.monotonic() - began_s - self._encoder.start_s
        return namespace

    def _encode_all(self) -> None:
        try:
            for encoded in self._encoder.encode(self._pictures()):
                self._take(encoded)
        except EncoderError as exc:
            log.exception("the job ends")
            self.report.problem = str(exc)
        self.report.is_stopped = self._stopped.is_set()
        if not (self.report.items or self.report.is_stopped or self._options.shard[1] > 1):
            self.report.problem = self.report.problem or "the source has nothing to encode"

    def _end(self) -> None:
        """Let saves come to their end, and count."""
        self.report.engine_started = self._encoder.is_running
        confirmations = self._confirmations
        try:
            confirmations.settle(self._options.patience_s if not self.report.problem else 0.0)
        finally:
            # Which waits for the last uploads once more, and announces them.
            self._encoder.close()
            self.report.unconfirmed = confirmations.end()
            self._take_counts()
        left = "the job ended before it was encoded"
        if not self.report.is_stopped:
            self.report.unconfirmed += [
                origin.failure(left) for each in self._under_way.values() for origin in each.origins
            ]

    def _take_counts(self) -> None:
        if self._is_open:
            self.report.encoded = self._confirmations.encoded
            self.report.catalogued = self._confirmations.catalogued
            self.report.stored_bytes = self._confirmations.stored_bytes

    # -- what is to be done ------------------------------------------------------------------

    def _pictures(self) -> Iterator[Picture]:
        """Those that are to be encoded; all other items are seen to on the way."""
        for plan in self._plans():
            self._count(plan)
            picture = self._picture_of(plan)
            if picture is None:
                continue
            self._confirmations.wait_for_room(self._stopped, self._options.patience_s)
            if self._stopped.is_set():
                return
            yield picture

    def _count(self, plan: _Planned) -> None:
        report = self.report
        report.items += 1
        report.read_bytes += plan.read_bytes
        if plan.failure is not None:
            report.failures.append(plan.failure)
        report.done_before += plan.is_done
        if report.items % _REPORT_EVERY == 0 or self._under_way:
            self._show()

    def _show(self) -> None:
        done = self.report.items - len(self._under_way)
        self._tell("precomputing", done, self._total())

    def _picture_of(self, plan: _Planned) -> Picture | None:
        """What is left to encode of a plan; None where it is done, or waits for what is."""
        confirmations = self._confirmations
        if plan.origin is None or not (plan.row or plan.found or plan.picture):
            return None
        self._note_replaced(plan.origin)
        if plan.row is not None:
            confirmations.add_row(plan.row, is_new=not plan.is_renewed)
            return None
        key = None if plan.found is None else self._ledger.key(plan.found)
        if key is not None and plan.found is not None:
            if plan.picture is None or self._ledger.holds(key):
                # Perhaps another item with this picture was confirmed since this one was looked at.
                confirmations.add(plan.found, key, plan.origin, encoded=False)
                return None
            if confirmations.join(key, plan.origin):
                return None
            if (begun := self._begun.get(key.digest)) is not None:
                begun.twins.append(plan.origin)
                return None
        if plan.picture is None:
            return None
        begun = _UnderWay(plan.origin, None if key is None else key.digest)
        self._under_way[plan.picture.number] = begun
        if begun.digest is not None:
            self._begun[begun.digest] = begun
        return plan.picture

    def _note_replaced(self, origin: Origin) -> None:
        old = self._row_of(origin.item)
        if old is not None and origin.sha256 not in ("", old.sha256):
            self.report.replaced.append(origin.failure("its file has changed"))

    def _take(self, encoded: Encoded) -> None:
        """Note what became of a picture, and of those that are the same."""
        begun = self._under_way.pop(encoded.number)
        if begun.digest is not None:
            self._begun.pop(begun.digest, None)
        if encoded.sha256 and not begun.origin.sha256:  # another process has read it
            begun.origin = replace(begun.origin, sha256=encoded.sha256)
            self.report.read_bytes += encoded.nbytes
            plan = self._plan_known(self._row_of(begun.origin.item), begun.origin, 0)
            if plan is not None and plan.identifier == encoded.identifier:
                self.report.done_before += plan.is_done
                self._picture_of(plan)
                return
            self._note_replaced(begun.origin)
        key = self._ledger.key(encoded.identifier) if encoded.identifier else None
        if key is None or encoded.identifier is None:
            problem = encoded.problem or "nothing is stored under its identifier"
            self.report.failures += [origin.failure(problem) for origin in begun.origins]
        else:
            for origin in begun.origins:
                is_first = origin is begun.origin
                self._confirmations.add(encoded.identifier, key, origin, encoded=is_first)
        self._show()

    def _plans(self) -> Iterator[_Planned]:
        """Plans of the items, in their order, made ahead by some threads."""
        readers = self._encoder.readers
        window: deque[Future[_Planned]] = deque()
        items = enumerate(self._mine())
        with ThreadPoolExecutor(readers, "s3ec-read") as pool:
            try:
                while not self._stopped.is_set():
                    for number, item in itertools.islice(items, readers * _AHEAD - len(window)):
                        window.append(pool.submit(self._plan, number, item))
                    if not window:
                        return
                    plan = window.popleft().result()
                    if self._stopped.is_set():  # a reader that was broken off has no result
                        return
                    yield plan
            finally:
                for each in window:
                    each.cancel()

    def _mine(self) -> Iterator[SourceItem]:
        """The items of this shard. Which one has an item does not depend on the others."""
        number, parts = self._options.shard
        mine = (item for item in self._items if parts == 1 or _shard_of(item, parts) == number)
        return itertools.islice(mine, self._options.limit)

    def _plan(self, number: int, item: SourceItem) -> _Planned:
        """In a thread: what is to be done for one item, by what the bucket has."""
        try:
            return self._plan_readable(number, item)
        except SourceError as exc:
            return _Planned(failure=failure_of(item, exc.reason))
        except EncoderError:
            raise
        except S3ECError as exc:  # a bucket that the item lies in, above all
            return _Planned(failure=failure_of(item, str(exc)))

    def _row_of(self, item: SourceItem) -> CatalogRow | None:
        """The catalogue's row of an item. Files of one name in two places are two documents."""
        place = without_secrets(item.uri)
        rows = self._ledger.catalogue.by_document(item.document, item.page)
        same = (row for row in rows if row.page == item.page and row.uri == place)
        return next((row for row in same if row.modality == item.modality), None)

    def _plan_readable(self, number: int, item: SourceItem) -> _Planned:
        ledger = self._ledger
        file = _file_stamp(item)
        dpi = None if item.page is None else f"{item.options.dpi}"
        stamp = " ".join(filter(None, (self._naming, file, dpi)))
        mine = self._row_of(item)
        picture: Picture | None = None
        if mine is not None and file is not None and mine.extra.get(STAMP) == stamp:
            sha256, nbytes = mine.sha256, 0
        else:
            picture = self._encoder.read(number, item)
            sha256, nbytes = picture.sha256, picture.nbytes
        origin = Origin(item, sha256, stamp)
        plan = self._plan_known(mine, origin, nbytes)
        if plan is not None:
            return plan
        if picture is None:
            picture = self._encoder.read(number, item)
            nbytes = picture.nbytes
            origin = replace(origin, sha256=picture.sha256)
        ledger.require_row(replace(origin, sha256=origin.sha256 or _ANY_SUM))
        if self._options.identifier == "sha256":
            picture = replace(picture, uuid=f"sha256:{picture.sha256}")
        name = self._encoder.identify(picture)
        key = None if name is None else ledger.key(name)
        if name is None or key is None or not ledger.holds(key):
            return _Planned(nbytes, origin, found=name, picture=picture)
        if mine is not None and mine.identifier == name:
            return self._plan_row(mine, mine, origin, nbytes)
        return _Planned(nbytes, origin, found=name if ledger.has_catalogue else None)

    def _plan_known(self, mine: CatalogRow | None, origin: Origin, nbytes: int) -> _Planned | None:
        """A plan by what the catalogue says of a file; None where it knows too little."""
        known = mine
        if mine is None or mine.sha256 != origin.sha256 or not self._is_wanted(mine):
            known = self._ledger.catalogue.by_sha256(origin.sha256)
        if known is None or not self._is_wanted(known) or known.modality != origin.item.modality:
            return None
        key = self._ledger.key(known.identifier)
        if key is None or not self._ledger.holds(key):
            return None
        return self._plan_row(known, mine, origin, nbytes)

    def _plan_row(
        self, known: CatalogRow, mine: CatalogRow | None, origin: Origin, nbytes: int
    ) -> _Planned:
        """The embedding is there, and a row tells all about it."""
        row = origin.row(known, time.time())
        if mine is not None and replace(mine, stored_s=row.stored_s) == row:
            return _Planned(nbytes, origin, identifier=known.identifier)
        self._ledger.require_row(origin)
        is_renewed = known is mine
        return _Planned(nbytes, origin, None, row, is_renewed, identifier=known.identifier)

    def _is_wanted(self, row: CatalogRow) -> bool:
        """Whether its embedding is called as this job calls them, as a server will that asks."""
        by_client = row.identifier == f"sha256:{row.sha256}"
        if self._options.identifier == "sha256":
            return by_client
        return not by_client and str(row.extra.get(STAMP)).partition(" ")[0] == self._naming


def _shard_of(item: SourceItem, parts: int) -> int:
    return zlib.crc32(f"{item.document}\0{item.page}".encode()) % parts


def _file_stamp(item: SourceItem) -> str | None:
    """By what a file is taken for the one that was read before; None for what is no file here."""
    address = urlsplit(item.uri)
    if address.scheme != "file":
        return None
    try:
        found = os.stat(unquote(address.path))
    except OSError:
        return None
    return f"{found.st_size} {found.st_mtime_ns}"


def make_job(
    corpus: OpenBucket,
    source: str,
    model: str,
    options: JobOptions | None = None,
    *,
    read: ReadOptions | None = None,
    column: str | None = None,
    engine: str = "local",
    ray: RayOptions | None = None,
    engine_args: Mapping[str, Any] | None = None,
    batch: int = 64,
    report: Report = unreported,
) -> Job:
    """A job over what a text names, with an encoder that is not started yet.

    Args:
        corpus: Where to.
        source: As ``open_source`` takes it.
        model: As the server's ``--model``, letter by letter.
        options: How it works.
        read: How items are read.
        column: Of a dataset with several columns of files.
        engine: ``local``, which is vLLM here; or ``ray``, one vLLM for each worker of a cluster.
        ray: Which cluster, and how many workers; one worker on one GPU if None.
        engine_args: Further arguments of ``vllm.LLM``, by their Python names.
        batch: Pictures that an engine has at a time.
        report: Told how many items are done.

    Raises:
        ConfigError: An argument, or the source as a whole, cannot be used.
    """
    if batch < 1:
        raise ConfigError("`batch` must be 1 or more", field="batch")
    if engine not in ("local", "ray"):
        raise ConfigError(
            f"`engine` {engine!r:.50} is none; it is `local` or `ray`", field="engine"
        )
    if ray is not None and engine != "ray":
        raise ConfigError("options of Ray are for `engine` = ray", field="engine")
    options = options or JobOptions()
    read = read or ReadOptions()
    if read.settings is None:
        read = replace(read, settings=corpus.settings)

    def items() -> Iterator[SourceItem]:
        return open_source(source, read, column=column)

    make = partial(VllmEncoder, model, corpus.settings, engine_args=engine_args, batch=batch)
    encoder: Encoder = make()  # which says what is wrong with the arguments, whoever encodes
    if engine == "ray":
        from s3ec.corpus.ray_encoder import RayEncoder, RayOptions

        encoder = RayEncoder(make, ray or RayOptions(), chunk=batch)
    first = items()  # before anything is counted: it says what is wrong with the source
    total = total_of(source, items, options)
    return Job(corpus, first, encoder, options, total=total, report=report)


def total_of(
    source: str, items: Callable[[], Iterable[SourceItem]], options: JobOptions
) -> Callable[[], int | None]:
    """Count the items of a source beside the job; answers with what is known of that by now.

    Of a list only the rows are counted: PDF files from elsewhere would be fetched for their pages.
    """
    counted: list[int] = []

    def count() -> None:
        number, parts = options.shard
        try:
            rows = _count_rows(source)
            if rows is not None:
                total = rows // parts
            else:
                mine = (one for one in items() if parts == 1 or _shard_of(one, parts) == number)
                total = sum(1 for _ in mine)
        except Exception:  # only the time left is not known then
            log.debug("the items are not counted", exc_info=True)
            return
        counted.append(total if options.limit is None else min(total, options.limit))

    threading.Thread(target=count, name="s3ec-count", daemon=True).start()
    return lambda: counted[0] if counted else None


def _count_rows(source: str) -> int | None:
    """Rows of a list; None of what is no list."""
    path = Path(source)
    suffix = path.suffix.lower()
    if suffix == ".jsonl" and path.is_file():
        with path.open("rb") as file:
            return sum(1 for line in file if line.strip())
    if suffix in (".parquet", ".pq") and path.is_file():
        from pyarrow import parquet

        rows: int = parquet.read_metadata(path).num_rows
        return rows
    return None
