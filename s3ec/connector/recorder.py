# SPDX-License-Identifier: Apache-2.0
"""Records what an engine asks for, while somebody wants a trace: `s3ec trace`.

Hooks put what they see into a bounded queue in memory, and only while something is recorded. A
disk thread looks once a second whether a trace is wanted, and writes what is in the queue. The
parts, in this order: what the hooks fill; where they find it; and what the disk thread does.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

from s3ec import trace
from s3ec.connector.item_tracker import Item
from s3ec.counters import Counters
from s3ec.encode_costs import EncodeCosts
from s3ec.errors import TierError
from s3ec.identity import Key, make_key
from s3ec.tier.files import DiskErrors, Folders, TempFile
from s3ec.tier.trace_requests import TraceFolder, TraceRequest
from s3ec.trace import Access, Engine, Hasher, Header, Lost, Outcome

log = logging.getLogger(__name__)

# Accesses that wait to be written, a second's worth; more are counted as lost.
MOST_WAITING = 50_000
# Before 0.26 vLLM does not tell when a request ends; of more than these the oldest is dropped.
_MOST_REQUESTS = 10_000
LARGEST_BYTES = 256 * 2**20
"""An engine records no more into one trace; about a million accesses."""


class _Found(NamedTuple):
    outcome: Outcome
    nbytes: int | None = None
    fetch_s: float | None = None


_DEVICE, _ENCODED, _STORED = _Found("device"), _Found("encoded"), _Found("stored")


class Recording:
    """What one trace has of this engine. For the scheduler's thread, but for ``take``."""

    def __init__(
        self, *, most: int = MOST_WAITING, wall_clock: Callable[[], float] = time.time
    ) -> None:
        """Start empty.

        Args:
            most: Accesses that wait for ``take``.
            wall_clock: Seconds since the epoch.
        """
        self._most = most
        self._wall_clock = wall_clock
        # Under vLLM's names.
        self._accesses: deque[Access] = deque()
        self._lost = 0
        self._allocated: dict[tuple[str, int], _Found] = {}  # in this pass
        self._waited_s: dict[str, float] = {}

    def waited(self, request_id: str, seconds: float) -> None:
        """A request was put off for embeddings for so long."""
        while len(self._waited_s) >= _MOST_REQUESTS:
            del self._waited_s[next(iter(self._waited_s))]
        self._waited_s[request_id] = self._waited_s.get(request_id, 0.0) + seconds

    def allocated(self, request_id: str, index: int, *, granted: bool, item: Item | None) -> None:
        """The device lacked an input of a request that is being scheduled.

        Args:
            granted: The encoder need not run for it.
            item: What is loaded for it; None where nothing is.
        """
        found = _ENCODED
        if granted:
            found = _STORED if item is None else _loaded(item)
        self._allocated[request_id, index] = found

    def accessed(
        self, request_id: str, index: int, identifier: str, modality: str, rows: int
    ) -> None:
        """A step needs an input of a request."""
        if len(self._accesses) >= self._most:
            self._lost += 1
            return
        found = self._allocated.get((request_id, index), _DEVICE)
        self._accesses.append(
            Access(
                self._wall_clock(),
                request_id,
                identifier,
                rows,
                found.outcome,
                modality,
                nbytes=found.nbytes,
                waited_s=self._waited_s.get(request_id, 0.0),
                fetch_s=found.fetch_s,
            )
        )

    def end_pass(self) -> None:
        """A scheduling pass has ended."""
        self._allocated.clear()

    def end_request(self, request_id: str) -> None:
        """The request has ended."""
        self._waited_s.pop(request_id, None)

    def take(self) -> tuple[list[Access], int]:
        """What was recorded since the last call, and how many were lost in all; any thread."""
        taken = []
        while self._accesses:
            taken.append(self._accesses.popleft())
        return taken, self._lost


def _loaded(item: Item) -> _Found:
    nbytes = None if item.pin is None else item.pin.nbytes
    return _Found("bucket" if item.downloaded else "node", nbytes, item.fetch_s)


class Recorder:
    """Where hooks find out whether they record.

    Attributes:
        recording: What they fill; None where nobody wants a trace. Set by the disk thread.
    """

    __slots__ = ("recording",)

    def __init__(self) -> None:
        self.recording: Recording | None = None


class TraceWriter:
    """Begins, writes and ends traces, as a command asks for them. Blocking. Never raises.

    =========  =========  =====================================================================
    state      goes to    when
    =========  =========  =====================================================================
    idle       recording  a request is there that was not answered yet
    recording  idle       it is withdrawn, replaced or over, this process ends, or the disk
                          refuses; after LARGEST_BYTES the rest is only counted
    =========  =========  =====================================================================
    """

    def __init__(
        self,
        folders: Folders,
        recorder: Recorder,
        engine: Engine,
        costs: EncodeCosts,
        counters: Counters,
        *,
        make_key: Callable[[str], Key | None] = make_key,
        wall_clock: Callable[[], float] = time.time,
        largest_bytes: int = LARGEST_BYTES,
    ) -> None:
        """Nothing is touched.

        Args:
            folders: The tier's.
            recorder: Of the scheduler half.
            engine: What traces say of this engine.
            costs: What encoding costs here.
            make_key: What an identifier's object is called, for traces with names.
            wall_clock: Seconds since the epoch.
            largest_bytes: Of one trace.
        """
        self._folder = TraceFolder(folders)
        self._recorder = recorder
        self._engine = engine
        self._costs = costs
        self._make_key = make_key
        self._refused = DiskErrors(folders.root, counters).record
        self._wall_clock = wall_clock
        self._largest_bytes = largest_bytes
        # The end of the node may come while a disk thread is still at it.
        self._alone = threading.Lock()
        self._request: TraceRequest | None = None  # of the trace that is recorded or was last
        self._file: TempFile | None = None
        self._told_lost = 0
        self._unwritten = 0

    def exchange(self) -> None:
        """Look whether a trace is wanted, and write what was recorded since the last call."""
        with self._alone:
            try:
                self._exchange()
            except (OSError, TierError) as exc:
                self._give_up(exc)

    def close(self) -> None:
        """End what is being recorded."""
        with self._alone:
            try:
                if self._file is not None:
                    self._write(self._file)
                    self._end()
            except (OSError, TierError) as exc:
                self._give_up(exc)

    def _exchange(self) -> None:
        now_s = self._wall_clock()
        wanted = self._folder.request()
        if wanted is not None and wanted.is_forgotten(now_s):
            self._folder.clear()
        if wanted is not None and not wanted.is_on(now_s):
            wanted = None
        if self._file is not None:
            self._write(self._file)
            if wanted != self._request:
                self._end()
        if self._file is None and wanted is not None and wanted != self._request:
            self._begin(wanted)

    def _begin(self, request: TraceRequest) -> None:
        self._request = request
        self._told_lost = self._unwritten = 0
        file = self._folder.begin()
        try:
            header = trace.header_line(Header(request.began_s, (self._engine,)))
            file.append([f"{header}\n".encode()])
        except BaseException:
            file.discard()
            raise
        self._file = file
        self._recorder.recording = Recording(wall_clock=self._wall_clock)
        log.info("recording what is asked for, for `s3ec trace`")

    def _write(self, file: TempFile) -> None:
        recording, request = self._recorder.recording, self._request
        if recording is None or request is None:
            return
        accesses, lost = recording.take()
        hasher = Hasher(bytes.fromhex(request.secret))
        lines = [trace.event_line(self._hashed(one, hasher, request)) for one in accesses]
        if file.nbytes + sum(map(len, lines)) > self._largest_bytes:
            self._unwritten += len(lines)
            lines = []
        lost += self._unwritten
        if lost > self._told_lost:
            at_s = max(0.0, self._wall_clock() - request.began_s)
            lines.append(trace.event_line(Lost(at_s, lost - self._told_lost)))
            self._told_lost = lost
        if lines:
            file.append(["".join(f"{line}\n" for line in lines).encode()])

    def _hashed(self, access: Access, hasher: Hasher, request: TraceRequest) -> Access:
        key = self._make_key(access.item) if request.with_names else None
        return replace(
            access,
            name=None if key is None else key.name,
            at_s=max(0.0, access.at_s - request.began_s),
            request=hasher(access.request),
            item=hasher(self._engine.namespace, access.item),
            encode_s=self._costs.known_s(access.modality, access.rows),
        )

    def _end(self) -> None:
        self._recorder.recording = None
        file, self._file = self._file, None
        if file is None:
            return
        try:
            self._folder.finish(file)
        except BaseException:
            file.close()  # and stays, as what a killed process leaves
            raise

    def _give_up(self, exc: OSError | TierError) -> None:
        """The disk refused. What was recorded so far may be of use."""
        self._refused("record a trace", exc)
        with suppress(OSError, TierError):
            self._end()
