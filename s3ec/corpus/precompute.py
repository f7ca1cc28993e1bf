# SPDX-License-Identifier: Apache-2.0
"""The job that fills a corpus: it plans what to encode, feeds the encoder, and counts the results.

A thread pool reads and names items, and the caller's thread keeps the encoder busy. After each
picture it reports to ``confirmations.py``, which asks the bucket. ``encoder.py`` has the encoders.
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
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from s3ec.corpus.catalog_file import STAMP
from s3ec.corpus.confirmations import (
    Confirmations,
    Counted,
    Failure,
    Ledger,
    Origin,
    failure_of,
)
from s3ec.corpus.encoder import (
    Encoded,
    Encoder,
    EncoderError,
    Picture,
    VllmEncoder,
    most_readers,
)
from s3ec.corpus.reading import ReadOptions, path_of, scheme_of, without_secrets
from s3ec.corpus.sources import SourceItem, open_source
from s3ec.counters import Report, unreported
from s3ec.errors import ConfigError, S3ECError, SourceError

if TYPE_CHECKING:
    from s3ec.corpus.bucket import OpenBucket
    from s3ec.corpus.catalog_file import CatalogRow
    from s3ec.corpus.ray_encoder import RayOptions
    from s3ec.identity import Key, Namespace

log = logging.getLogger(__name__)

Status = Literal["complete", "partial", "failed"]
Identifier = Literal["content", "sha256"]

# Items that are read and named ahead of the encoder, for each thread that reads.
_AHEAD = 4
_REPORT_EVERY = 64


@dataclass(frozen=True, slots=True)
class JobOptions:
    """How a job works.

    Attributes:
        identifier: How embeddings are named: by vLLM's content hash, or ``sha256:HEX`` for clients
            that send that as ``uuid``.
        shard: This job's part and the number of parts, such as (0, 4).
        limit: Most items of the source that are examined; None for all.
        batch: Pictures that an engine has at a time.
        engine_args: Further arguments of ``vllm.LLM``, by their Python names.
        read: How items are read, such as the dots per inch of a PDF's pages.
        ray: One vLLM for each worker of this cluster (package ``ray[data]``); None for vLLM here.
        patience_s: How long the bucket may confirm nothing before the job gives up.
    """

    identifier: Identifier = "content"
    shard: tuple[int, int] = (0, 1)
    limit: int | None = None
    batch: int = 64
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    read: ReadOptions = field(default=ReadOptions())
    ray: RayOptions | None = None
    patience_s: float = 120.0

    def __post_init__(self) -> None:
        number, parts = self.shard
        if not 0 <= number < parts:
            raise ConfigError(
                f"`shard` {number}/{parts} is none; write it as 0/4, from 0/4 to 3/4",
                field="shard",
            )
        for name in ("limit", "batch"):
            given = getattr(self, name)
            if given is not None and given < 1:
                raise ConfigError(f"`{name}` must be 1 or more; leave it out", field=name)
        if self.identifier not in ("content", "sha256"):
            raise ConfigError(
                f"`identifier` {self.identifier!r:.50} is none; it is `content` or `sha256`",
                field="identifier",
            )


@dataclass(slots=True)
class PrecomputeReport:
    """The result of a job.

    Attributes:
        namespace: Where the embeddings are.
        items: Items of the source, in this shard, that were examined.
        done_before: Of these, items that the catalogue and the index had.
        catalogued: Items that the index had and that were missing in the catalogue.
        encoded: Items that were encoded, confirmed by the bucket and catalogued.
        replaced: Items whose row replaces an older one: their file has changed.
        failures: Items that could not be read or encoded, and parts of the source left out.
        unconfirmed: Items that were encoded, and that the bucket has not confirmed.
        read_bytes: Size of the files that were read.
        stored_bytes: Size of the objects of encoded items.
        seconds: How long the job took.
        start_s: Of that, how long it took to import vLLM and to start the engine.
        is_stopped: True if it was stopped before the end of the source.
        problem: The error that ended it before that; else empty.
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
        """Encoded items per second, without the time in which the engine started."""
        return self.encoded / max(self.seconds - self.start_s, 1e-3)

    @property
    def status(self) -> Status:
        """``complete``: all of the source is confirmed. ``failed``: nothing of it is."""
        if not (self.failures or self.unconfirmed or self.is_stopped or self.problem):
            return "complete"
        return "partial" if self.confirmed else "failed"

    def to_json(self) -> dict[str, Any]:
        """As a plain document, for ``--report`` and ``--json``."""
        return {
            "status": self.status,
            "namespace": self.namespace or None,
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
class _Plan:
    """The plan for one item.

    Attributes:
        how: ``done``: bucket and catalogue have it. ``renewed``: the catalogue had the document,
            with other values. Else the count that the item will add to.
        row: The row of an embedding that the bucket has.
        key: The key of an embedding that the bucket may have or that is under way.
        picture: The picture to encode.
    """

    origin: Origin
    how: Counted | Literal["done", "failed"]
    read_bytes: int = 0
    row: CatalogRow | None = None
    key: Key | None = None
    picture: Picture | None = None
    problem: str = ""


class Job:
    """Brings the items of a source into a corpus. Used once, by one thread.

    States: new, then running in ``run``, then ended. ``stop`` ends it soon.
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
            corpus: The corpus to fill.
            items: Taken one by one, as they are needed.
            encoder: Closed at the end of ``run``.
            options: How it works.
            total: Returns how many items there are, None while that is not known.
            report: Called with the number of items that are done.

        Raises:
            ConfigError: The settings refuse this ``identifier``.
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
        # Pictures in the encoder, by number: the key if it is known, and the items.
        self._under_way: dict[int, tuple[Key | None, list[tuple[Origin, Counted]]]] = {}
        self._numbers: dict[Key, int] = {}  # of these
        self._naming = "-"  # see Encoder.naming; names that clients choose never change
        self._opening_s = 0.0
        self.report = PrecomputeReport()

    def stop(self) -> None:
        """Make ``run`` end soon; encoded items are saved. Signal handlers may call it too."""
        self._stopped.set()
        self._encoder.stop()

    def run(self) -> PrecomputeReport:
        """Run the job. The report also has the faults of items, engine and bucket.

        Raises:
            ConfigError: The model, an argument, a setting or the source cannot work.
            UnavailableError, AccessError: The bucket did not answer at the start.
            CorruptEntryError: The catalogue is unusable.
        """
        began_s = time.monotonic()
        try:
            with closing(self._encoder):
                if not self._has_items():
                    return self.report
                namespace = self._open_encoder()
                self.report.namespace = namespace.name
                with closing(Ledger(self._corpus, namespace)) as self._ledger:
                    self._confirmations = Confirmations(self._corpus, self._ledger, self.report)
                    try:
                        self._encode_all()
                    finally:
                        self._end()
        except BaseException as exc:
            self.report.problem = str(exc) or type(exc).__name__
            raise
        finally:
            self.report.seconds = time.monotonic() - began_s
            self.report.start_s = self._opening_s + self._encoder.start_s
        return self.report

    def _has_items(self) -> bool:
        """Take the first item: only a job with items pays for vLLM's import."""
        items = iter(_chosen(self._items, self._options))
        first = next(items, None)
        if first is not None:
            self._items = itertools.chain([first], items)
        elif self._options.shard[1] == 1:
            self.report.problem = "the source has nothing to encode"
        return first is not None

    def _open_encoder(self) -> Namespace:
        began_s = time.monotonic()
        namespace = self._encoder.namespace()
        if self._options.identifier == "content":
            self._naming = self._encoder.naming
        # If the engine was started for that, its time is counted as start-up time.
        self._opening_s = time.monotonic() - began_s - self._encoder.start_s
        return namespace

    def _encode_all(self) -> None:
        try:
            for encoded in self._encoder.encode(self._pictures()):
                self._take(encoded)
        except EncoderError as exc:
            log.debug("the job ends", exc_info=True)  # the report says why
            self.report.problem = str(exc)
        self.report.is_stopped = self._stopped.is_set()
        self._show()

    def _end(self) -> None:
        """Wait for the saves to end, and count what is unconfirmed."""
        report = self.report
        report.engine_started = self._encoder.is_running
        reason = "the job ended before it was encoded"
        left = [
            failure_of(one.item, reason) for _, some in self._under_way.values() for one, _ in some
        ]
        with ExitStack() as last:  # all of it, also after a second Ctrl-C
            last.callback(report.unconfirmed.extend, [] if report.is_stopped else left)
            last.callback(self._confirmations.end)
            # This waits for the last uploads, and announces them.
            last.callback(self._encoder.close)
            self._confirmations.settle(self._options.patience_s if not report.problem else 0.0)

    # -- what is to be done ------------------------------------------------------------------

    def _pictures(self) -> Iterator[Picture]:
        """Yield the pictures to encode; all other items are handled on the way."""
        for plan in self._plans():
            self.report.items += 1
            self.report.read_bytes += plan.read_bytes
            picture = self._begin(plan)
            if self.report.items % _REPORT_EVERY == 0 or self._under_way:
                self._show()
            if picture is not None:
                self._confirmations.wait_for_room(self._stopped, self._options.patience_s)
                if self._stopped.is_set():
                    return
                yield picture

    def _show(self) -> None:
        done = self.report.items - len(self._under_way)
        self._tell("precomputing", done, self._total())

    def _begin(self, plan: _Plan) -> Picture | None:
        """Start a plan. Returns its picture to encode; None if it is done, or waits for another."""
        origin, how, key = plan.origin, plan.how, plan.key
        if how == "failed":
            self.report.failures.append(failure_of(origin.item, plan.problem))
            return None
        self.report.done_before += how in ("done", "renewed")
        if how == "done":
            return None
        self._note_replaced(origin)
        if plan.row is not None:
            self._confirmations.add_row(plan.row, how)
            return None
        picture = plan.picture
        if key is not None:
            # Another item with this picture may have begun or been confirmed since the plan.
            if key in self._numbers:
                self._under_way[self._numbers[key]][1].append((origin, "catalogued"))
                return None
            is_there = self._confirmations.waits_for(key) or self._ledger.holds(key)
            if picture is None or is_there:
                self._confirmations.add(key, origin, "catalogued")
                return None
            self._numbers[key] = picture.number
        if picture is not None:
            self._under_way[picture.number] = key, [(origin, "encoded")]
        return picture

    def _note_replaced(self, origin: Origin) -> None:
        old = self._row_of(origin.item)
        if old is not None and origin.sha256 not in ("", old.sha256):
            self.report.replaced.append(failure_of(origin.item, "its file has changed"))

    def _take(self, encoded: Encoded) -> None:
        """Note the result of a picture, for all items that have it."""
        begun, origins = self._under_way.pop(encoded.number)
        if begun is not None:
            del self._numbers[begun]
        origin, _ = origins[0]
        if encoded.sha256 and not origin.sha256:  # another process has read it
            origin = replace(origin, sha256=encoded.sha256)
            origins = [(origin, "encoded")]
            self.report.read_bytes += encoded.nbytes
            plan = self._plan_known(self._row_of(origin.item), origin, 0)
            if plan and plan.row and plan.row.identifier == encoded.identifier:
                self._begin(plan)
                return
            self._note_replaced(origin)
        # The identifier from the encoder counts, whatever was expected.
        key = self._ledger.key(encoded.identifier) if encoded.identifier else None
        for one, how in origins:
            if key is not None:
                self._confirmations.add(key, one, how)
            else:
                reason = encoded.problem or "nothing is stored under its identifier"
                self.report.failures.append(failure_of(one.item, reason))
        self._show()

    def _plans(self) -> Iterator[_Plan]:
        """Yield the plans of the items, in their order; threads make them ahead."""
        readers = most_readers()
        window: deque[Future[_Plan]] = deque()
        items = enumerate(self._items)
        with ThreadPoolExecutor(readers, "s3ec-read") as pool:
            try:
                while not self._stopped.is_set():
                    for number, item in itertools.islice(items, readers * _AHEAD - len(window)):
                        window.append(pool.submit(self._plan, number, item))
                    if not window:
                        return
                    plan = window.popleft().result()
                    if self._stopped.is_set():  # a reader that was interrupted has no result
                        return
                    yield plan
            finally:
                for each in window:
                    each.cancel()

    def _plan(self, number: int, item: SourceItem) -> _Plan:
        """Plan one item by what the bucket has; in a thread."""
        try:
            return self._plan_readable(number, item)
        except EncoderError:
            raise
        except S3ECError as exc:  # SourceError, or an error of the bucket that holds the item
            problem = exc.reason if isinstance(exc, SourceError) else str(exc)
            return _Plan(Origin(item, "", ""), "failed", problem=problem)

    def _row_of(self, item: SourceItem) -> CatalogRow | None:
        """The catalogue's row of an item. Files of one name in two places are two documents."""
        wanted = item.page, without_secrets(item.uri), item.modality
        rows = self._ledger.catalogue.by_document(item.document, item.page)
        return next((row for row in rows if (row.page, row.uri, row.modality) == wanted), None)

    def _plan_readable(self, number: int, item: SourceItem) -> _Plan:
        ledger = self._ledger
        file = _file_stamp(item)
        dpi = None if item.page is None else f"{item.options.dpi}"
        stamp = " ".join(filter(None, (self._naming, file, dpi)))
        mine = self._row_of(item)
        picture: Picture | None = None
        if mine is not None and file is not None and mine.extra.get(STAMP) == stamp:
            origin = Origin(item, mine.sha256, stamp)
        else:
            picture = self._encoder.read(number, item)
            origin = Origin(item, picture.sha256, stamp)
        plan = self._plan_known(mine, origin, len(picture.data) if picture else 0)
        if plan is not None:
            return plan
        if picture is None:
            picture = self._encoder.read(number, item)
            origin = replace(origin, sha256=picture.sha256)
        ledger.require_row(origin)
        if self._options.identifier == "sha256":
            picture = replace(picture, uuid=f"sha256:{picture.sha256}")
        name = self._encoder.identify(picture)
        key = None if name is None else ledger.key(name)
        if key is None or not ledger.holds(key):
            return _Plan(origin, "encoded", len(picture.data), key=key, picture=picture)
        if mine is not None and mine.identifier == name:
            return self._plan_row(mine, mine, origin, len(picture.data))
        return _Plan(
            origin, "catalogued" if ledger.has_catalogue else "done", len(picture.data), key=key
        )

    def _plan_known(self, mine: CatalogRow | None, origin: Origin, nbytes: int) -> _Plan | None:
        """Plan an item by its row in the catalogue; None if that is not enough."""
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
    ) -> _Plan:
        """Plan an item whose embedding is stored, and described by a row."""
        row = origin.row(known, time.time())
        if mine is not None and replace(mine, stored_s=row.stored_s) == row:
            return _Plan(origin, "done", nbytes, row)
        self._ledger.require_row(origin)
        return _Plan(origin, "renewed" if known is mine else "catalogued", nbytes, row)

    def _is_wanted(self, row: CatalogRow) -> bool:
        """True if its embedding is named as this job, and a server's requests, name it."""
        by_client = row.identifier == f"sha256:{row.sha256}"
        if self._options.identifier == "sha256":
            return by_client
        return not by_client and str(row.extra.get(STAMP)).partition(" ")[0] == self._naming


def _chosen(items: Iterable[SourceItem], options: JobOptions) -> Iterator[SourceItem]:
    """The items of a job. An item's shard does not depend on the other items."""
    number, parts = options.shard
    mine = (one for one in items if _number_of(one) % parts == number)
    return itertools.islice(mine, options.limit)


def _number_of(item: SourceItem) -> int:
    return zlib.crc32(f"{item.document}\0{item.page}".encode())


def _file_stamp(item: SourceItem) -> str | None:
    """Size and time by which a file counts as unchanged; None for an item that is no local file."""
    if scheme_of(item.uri) != "file":
        return None
    try:
        found = os.stat(path_of(item.uri))
    except (OSError, SourceError):
        return None
    return f"{found.st_size} {found.st_mtime_ns}"


def make_job(
    corpus: OpenBucket,
    source: str,
    model: str,
    options: JobOptions | None = None,
    *,
    report: Report = unreported,
) -> Job:
    """Make a job over a source, with an encoder that is not started yet.

    Args:
        corpus: The corpus to fill.
        source: As ``open_source`` takes it.
        model: Exactly as the server's ``--model``.
        options: How it works.
        report: Called with the number of items that are done.

    Raises:
        ConfigError: An argument, or the source as a whole, cannot be used.
    """
    options = options or JobOptions()
    read = replace(options.read, settings=options.read.settings or corpus.settings)
    make = partial(
        VllmEncoder,
        model,
        corpus.settings,
        engine_args=options.engine_args,
        batch=options.batch,
    )
    encoder: Encoder = make()  # this checks the arguments, also for Ray's workers
    if options.ray is not None:
        from s3ec.corpus.ray_encoder import RayEncoder

        encoder = RayEncoder(make, options.ray, chunk=options.batch)
    items = open_source(source, read)
    here = replace(read, settings=None, asks_http=False)  # a PDF file from elsewhere counts once
    total = _total_of(lambda: open_source(source, here), options)
    return Job(corpus, items, encoder, options, total=total, report=report)


def _total_of(
    items: Callable[[], Iterable[SourceItem]], options: JobOptions
) -> Callable[[], int | None]:
    """Count items in a background thread. Returns a function for the number, None until then."""
    counted: list[int] = []

    def count() -> None:
        try:
            counted.append(sum(1 for _ in _chosen(items(), options)))
        except Exception:  # then only the time left stays unknown
            log.debug("the items are not counted", exc_info=True)

    threading.Thread(target=count, name="s3ec-count", daemon=True).start()
    return lambda: counted[0] if counted else None
