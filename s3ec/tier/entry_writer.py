# SPDX-License-Identifier: Apache-2.0
"""New files on this node's disk: written or downloaded, verified, and named last."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, Protocol, TypeVar

from s3ec.codec import Header, Verifier
from s3ec.errors import CorruptEntryError, TierError
from s3ec.identity import Key
from s3ec.tier.entries import Entries
from s3ec.tier.evictor import Evictor
from s3ec.tier.files import Folders, TempFile, is_full, open_entry, use_time_ns
from s3ec.tier.news import NewsWriter
from s3ec.tier.open_entry import OpenEntry
from s3ec.tier.spool import Spool, Spooled

T = TypeVar("T")

# To write one entry: the folder may be missing, and be evicted meanwhile.
_ATTEMPTS = 4


class EntryWriter:
    """Puts new files onto the disk of one Tier. Blocking and thread-safe.

    A file is complete before it has a name, and what must hold it does so before that as well: an
    entry that was fetched is opened (so it costs no second look at the file, and eviction in
    between does no harm), and one that was saved is in the spool.
    """

    def __init__(
        self,
        folders: Folders,
        entries: Entries,
        evictor: Evictor,
        news: NewsWriter,
        *,
        clock: Callable[[], float],
    ) -> None:
        self._folders = folders
        self._entries = entries
        self._evictor = evictor
        self._news = news
        self._clock = clock

    def publish(
        self, key: Key, pieces: Sequence[bytes | memoryview], *, spool: Spool | None = None
    ) -> Spooled | None:
        """Write one entry, whole or not at all; a present one is replaced, its use included.

        Eviction walks the folder (about 10 us per file there), in a thread that starts a
        little before it is needed. This call waits for a walk only where it would break the
        budget or the free-space floor otherwise.

        Args:
            pieces: The verified bytes of the object, in order; not joined, not copied.
            spool: Holds the entry from before it appears until the bucket has it, so that a
                process killed at any point leaves no entry here that nobody uploads.

        Returns:
            What the spool holds of it.

        Raises:
            TierError: Closed, larger than the budget, or the disk is full or failing. The
                spool may hold the entry nevertheless.
        """

        def name(file: TempFile) -> Spooled | None:
            self._finish(file, unread=True)
            spooled = spool.add(key, file.path) if spool is not None else None
            self._place(key, file)
            return spooled

        # The spool tells the running total itself: its bytes stay, whatever becomes of the entry.
        return self._write(key, pieces, name, counted=spool is not None)

    def receive(self, key: Key, pieces: Sequence[bytes | memoryview], header: Header) -> OpenEntry:
        """Publish an entry that came from the bucket, and hold it open.

        Args:
            pieces: As in ``publish``.
            header: Theirs, verified and compared with the key.

        Raises:
            TierError: As in ``publish``.
        """
        return self._write(key, pieces, lambda file: self._name_open(key, file, header))

    def begin(self, key: Key, first: bytes | memoryview, verifier: Verifier) -> Incoming[OpenEntry]:
        """Receive one large entry part by part; it appears, open, when the last one was good.

        Args:
            first: Its first bytes, which the verifier has been made from.

        Raises:
            TierError: As in ``publish``.
        """
        header = verifier.header

        def commit(file: TempFile) -> OpenEntry:
            verifier.finish()
            entry = self._name_open(key, file, header)
            self._evictor.account(header.total_bytes)
            return entry

        incoming = self.open(key.name, header.total_bytes, check=verifier.feed, commit=commit)
        incoming.write_checked(first)
        return incoming

    def publish_ahead(
        self, key: Key, pieces: Sequence[bytes | memoryview], *, used_s: float
    ) -> None:
        """Publish an entry that came from the bucket before anybody asked for it.

        Args:
            pieces: As in ``publish``.
            used_s: Seconds since the epoch. What is evicted goes in the order of these times.

        Raises:
            TierError: As in ``publish``.
        """
        self._write(key, pieces, lambda file: self._name_ahead(key, file, used_s))

    def begin_ahead(
        self, key: Key, first: bytes | memoryview, verifier: Verifier, *, used_s: float
    ) -> Incoming[None]:
        """As ``publish_ahead``, part by part as in ``begin``."""
        header = verifier.header

        def commit(file: TempFile) -> None:
            verifier.finish()
            self._name_ahead(key, file, used_s)
            self._evictor.account(header.total_bytes)

        incoming = self.open(key.name, header.total_bytes, check=verifier.feed, commit=commit)
        incoming.write_checked(first)
        return incoming

    def open(
        self,
        name: str,
        nbytes: int,
        *,
        check: Callable[[bytes | memoryview], object],
        commit: Callable[[TempFile], T],
    ) -> Incoming[T]:
        """A file that comes in parts.

        Args:
            name: What it is, for messages.
            nbytes: What it will have in the end.
            check: Sees the parts in their order. May raise CorruptEntryError.
            commit: Judges the whole file, and gives it its name.

        Raises:
            TierError: There will be no room, or the disk refused.
        """
        try:
            self._evictor.need_room(nbytes)
            file = self._with_room(nbytes, self._folders.new_file)
        except OSError as exc:
            raise TierError(f"cannot receive {name}: {exc}") from exc
        return Incoming(name, nbytes, file, check, commit, self._with_room)

    def _with_room(self, nbytes: int, write: Callable[[], T]) -> T:
        """Write something of this size; once more after an eviction, where the disk is full."""
        try:
            return write()
        except OSError as exc:
            if not is_full(exc) or not self._evictor.make_room(nbytes, full=True, wait=True):
                raise
        try:
            return write()
        except OSError as exc:
            if is_full(exc):
                self._evictor.note_in_vain()
            raise

    def _write(
        self,
        key: Key,
        pieces: Sequence[bytes | memoryview],
        name: Callable[[TempFile], T],
        *,
        counted: bool = False,
    ) -> T:
        """Write a file and name it; again after a vanished folder or a full disk, a few times."""
        nbytes = sum(memoryview(piece).nbytes for piece in pieces)
        try:
            self._evictor.need_room(nbytes)
            written = self._attempt(pieces, nbytes, name)
        except OSError as exc:
            raise TierError(f"cannot write {self._entries.path(key)[0]}: {exc}") from exc
        if not counted:
            self._evictor.account(nbytes)
        return written

    def _attempt(
        self,
        pieces: Sequence[bytes | memoryview],
        nbytes: int,
        name: Callable[[TempFile], T],
    ) -> T:
        def write() -> T:
            file = self._folders.new_file()
            try:
                file.append(pieces)
                return name(file)
            finally:
                file.discard()

        left = _ATTEMPTS
        while True:
            left -= 1
            try:
                return self._with_room(nbytes, write)
            except FileNotFoundError:  # swept by another container, or the folder is gone
                if not left:
                    raise
                self._folders.make()

    def _name_open(self, key: Key, file: TempFile, header: Header) -> OpenEntry:
        self._finish(file)
        path = self._entries.path(key)[0]
        entry = OpenEntry(path, open_entry(file.path), header, verified_s=time.monotonic())
        try:
            self._place(key, file)
        except BaseException:
            del entry  # what keeps the exception keeps this frame
            raise
        return entry

    def _name_ahead(self, key: Key, file: TempFile, used_s: float) -> None:
        self._finish(file, unread=True, used_s=used_s)
        self._place(key, file)

    def _place(self, key: Key, file: TempFile) -> None:
        """Give an entry its name, and tell the node's other processes."""
        self._folders.place(file, *self._entries.path(key))
        self._news.notify(key)

    def _finish(self, file: TempFile, *, unread: bool = False, used_s: float | None = None) -> None:
        file.close()
        mtime_ns = use_time_ns(self._clock() if used_s is None else used_s, unread=unread)
        os.utime(file.path, ns=(mtime_ns, mtime_ns), follow_symlinks=False)


class Incoming(Generic[T]):
    """A file being received part by part; made by ``EntryWriter.open``. Blocking.

    States: open, committed, discarded. ``put`` keeps it open, ``commit`` and ``discard`` end it.
    Nobody sees the file before ``commit``, which only a good one survives. Whoever makes one ends
    it.

    Calls exclude each other. A cancelled coroutine leaves a call running in its thread: ``discard``
    does not wait for that one, which then cleans up at its end.

    Attributes:
        name: What it is, for messages.
        nbytes: What it will have in the end.
    """

    def __init__(
        self,
        name: str,
        nbytes: int,
        file: TempFile,
        check: Callable[[bytes | memoryview], object],
        commit: Callable[[TempFile], T],
        with_room: Callable[[int, Callable[[], None]], None],
    ) -> None:
        """See EntryWriter.open.

        Args:
            with_room: Writes so many bytes, once more after an eviction where the disk is full.
        """
        self.name = name
        self.nbytes = nbytes
        self._file = file
        self._check = check
        self._commit = commit
        self._with_room = with_room
        self._lock = threading.Lock()
        self._over = False
        self._checked_bytes = 0
        self._early: dict[int, bytes | memoryview] = {}

    def put(self, parts: Sequence[tuple[int, bytes | memoryview]]) -> None:
        """Write parts that come in any order, and verify them in theirs.

        What comes before its turn is written and kept until then: the checksum goes in order.

        Args:
            parts: Their offsets in bytes, and the bytes. No two overlap.

        Raises:
            CorruptEntryError: It is not what should come, such as longer than announced.
            TierError: The disk is full or failing, or the file was discarded.
        """
        with self._running():
            for at, part in parts:
                if at + len(part) > self.nbytes:
                    raise CorruptEntryError(
                        f"{self.name}: goes on after {self.nbytes} bytes", reason="length"
                    )
                if at < self._checked_bytes or at in self._early:
                    # What was verified must not be written over.
                    raise CorruptEntryError(f"{self.name}: byte {at} again", reason="length")
                if at == self._checked_bytes:
                    self._pass(part)
                else:
                    self._early[at] = part
                self._write(part, at)
                while (next_part := self._early.pop(self._checked_bytes, None)) is not None:
                    self._pass(next_part)

    def _pass(self, part: bytes | memoryview) -> None:
        """Verify what is next."""
        self._check(part)
        self._checked_bytes += len(part)

    def write_checked(self, part: bytes | memoryview) -> None:
        """Write what is verified already and comes first, before any ``put``.

        Leaves nothing behind where that fails.

        Raises:
            TierError: The disk is full or failing.
        """
        try:
            with self._running():
                self._checked_bytes = len(part)
                self._write(part, 0)
        except BaseException:
            self.discard()
            raise

    def commit(self) -> T:
        """Give the file its name if it is whole and good.

        Raises:
            CorruptEntryError: It is not.
            TierError: The disk refused.
        """
        try:
            with self._running():
                return self._commit(self._file)
        except OSError as exc:
            raise TierError(f"cannot publish {self.name}: {exc}") from exc
        finally:
            self.discard()

    def discard(self) -> None:
        """Leave nothing behind; fine after commit and more than once. Never waits for a call."""
        self._over = True
        if self._lock.acquire(blocking=False):
            try:
                self._file.discard()
            finally:
                self._lock.release()

    @contextmanager
    def _running(self) -> Iterator[None]:
        try:
            with self._lock:
                if self._over:
                    raise TierError(f"{self.name} was discarded")
                yield
        finally:
            if self._over:  # since a moment ago, so discard has left it to us
                self.discard()

    def _write(self, part: bytes | memoryview, at: int) -> None:
        try:
            self._with_room(len(part), lambda: self._file.put(part, at))
        except OSError as exc:
            raise TierError(f"cannot write {self.name}: {exc}") from exc


class Disk(Protocol):
    """Awaits a blocking call in another thread; ``LoopThread.disk`` is one.

    ``undo`` is called with the result where the await was cancelled and nobody else gets it.
    """

    def __call__(
        self,
        function: Callable[..., T],
        *args: object,
        undo: Callable[[T], object] | None = None,
    ) -> Awaitable[T]: ...
