# SPDX-License-Identifier: Apache-2.0
"""New files on this node's disk: written or downloaded, verified, and named last."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from s3ec.codec import Header, Verifier
from s3ec.errors import CorruptEntryError, TierError
from s3ec.identity import Key
from s3ec.tier.entries import Entries
from s3ec.tier.evictor import Evictor
from s3ec.tier.files import Folders, TempFile, is_full, open_entry, touch
from s3ec.tier.news import NewsWriter
from s3ec.tier.open_entry import OpenEntry
from s3ec.tier.spool import Spool, Spooled

T = TypeVar("T")


class EntryWriter:
    """Puts new files onto the disk of one Tier. Blocking and thread-safe.

    A file is complete before it has a name, and so is its holder: a fetched entry is opened first
    (so it needs no second open, and eviction in between does no harm), and a saved one is put into
    the spool first.
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
        """Write one entry, whole or not at all; an existing one is replaced, with its time of use.

        Eviction walks the folder (about 10 us per file there), in a thread that starts a
        little before it is needed. This call waits for a walk only if it would break the
        budget or the free-space floor otherwise.

        Args:
            pieces: The verified bytes of the object, in order; not joined, not copied.
            spool: Holds the entry from before it appears until the bucket has it, so that a
                process killed at any point leaves no entry here that is never uploaded.

        Returns:
            The save that the spool holds; None without ``spool``.

        Raises:
            TierError: Closed, larger than the budget, or the disk is full or failing. The
                spool may hold the entry nevertheless.
        """

        def name(file: TempFile) -> Spooled | None:
            touch(file.path, self._clock())
            path, spooled = self._entries.path(key), None
            if spool is None:
                self._place(file, path)
            else:
                # The spool counts the bytes: they stay on the disk even if the entry goes.
                spooled = spool.add(key, file.path)
                self._folders.place(file, path)
            self._news.notify(key)
            return spooled

        return self._write(key, pieces, name)

    def receive(
        self,
        key: Key,
        pieces: Sequence[bytes | memoryview],
        header: Header,
        *,
        used_s: float | None = None,
    ) -> OpenEntry:
        """Publish an entry that came from the bucket, and hold it open.

        Args:
            pieces: As in ``publish``.
            header: Header of the pieces, verified and compared with the key.
            used_s: Time that counts as its last use for eviction, seconds since the epoch; None
                for now.

        Raises:
            TierError: As in ``publish``.
        """
        return self._write(key, pieces, lambda file: self._name_open(key, file, header, used_s))

    def begin(self, key: Key, first: bytes | memoryview, verifier: Verifier) -> Incoming:
        """Receive one large entry part by part; it appears, open, once all parts are verified.

        Args:
            first: Its first bytes, from which the verifier was made.

        Raises:
            TierError: As in ``publish``.
        """
        nbytes = verifier.header.total_bytes
        try:
            self._evictor.need_room(nbytes)
            file = self._with_room(nbytes, self._folders.new_file)
        except OSError as exc:
            raise TierError(f"cannot receive {key.name}: {exc}") from exc

        incoming = Incoming(self, key, file, verifier)
        try:
            incoming.write_first(first)
        except BaseException:
            incoming.discard()
            raise
        return incoming

    def _place(self, file: TempFile, path: str) -> None:
        """Name a file, and count it; see ``Folders.place``."""
        self._folders.place(file, path)
        self._evictor.account(file.nbytes)

    def _with_room(self, nbytes: int, write: Callable[[], T]) -> T:
        """Call ``write`` for this size; again after an eviction, if the disk is full."""
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
    ) -> T:
        """Write a file and name it; again if its temp file was deleted meanwhile."""
        nbytes = sum(memoryview(piece).nbytes for piece in pieces)

        def write() -> T:
            with self._folders.new_file() as file:
                file.append(pieces)
                return name(file)

        try:
            self._evictor.need_room(nbytes)
            try:
                return self._with_room(nbytes, write)
            except FileNotFoundError:
                return self._with_room(nbytes, write)
        except OSError as exc:
            raise TierError(f"cannot write {self._entries.path(key)}: {exc}") from exc

    def _name_open(
        self, key: Key, file: TempFile, header: Header, used_s: float | None
    ) -> OpenEntry:
        touch(file.path, self._clock() if used_s is None else used_s)
        path = self._entries.path(key)
        entry = OpenEntry(path, open_entry(file.path), header, verified_s=time.monotonic())
        try:
            self._place(file, path)
        except BaseException:
            del entry  # a reference to the exception keeps this frame
            raise
        self._news.notify(key)
        return entry


class Incoming:
    """An entry being received part by part; made by ``EntryWriter.begin``. Blocking.

    States: open, committed, discarded. ``put`` keeps it open, ``commit`` and ``discard`` end it.
    The file is not visible before ``commit``, which discards a bad one. The caller that makes one
    must end it.

    Calls exclude each other: a cancelled coroutine leaves one running in its thread.

    Attributes:
        nbytes: Size of the whole entry.
    """

    def __init__(self, writer: EntryWriter, key: Key, file: TempFile, verifier: Verifier) -> None:
        """See EntryWriter.begin; the verifier has seen the first part."""
        self._writer = writer
        self._key = key
        self.nbytes = verifier.header.total_bytes
        self._file = file
        self._verifier = verifier
        self._lock = threading.Lock()
        self._over = False
        self._checked_bytes = 0
        self._early: dict[int, bytes | memoryview] = {}

    def write_first(self, part: bytes | memoryview) -> None:
        """Write the bytes that the verifier was made from, before any ``put``.

        Raises:
            TierError: The disk is full or failing.
        """
        self._checked_bytes = len(part)
        self._write(part, 0)

    def put(self, parts: Sequence[tuple[int, bytes | memoryview]]) -> None:
        """Write parts that arrive in any order, and verify them in file order.

        An early part is written and kept in memory until then: the checksum needs the order.

        Args:
            parts: Their offsets in bytes, and the bytes. No two overlap.

        Raises:
            CorruptEntryError: A part does not fit, for example longer than announced.
            TierError: The disk is full or failing, or the file was discarded.
        """
        with self._running():
            for at, part in parts:
                if at + len(part) > self.nbytes:
                    raise CorruptEntryError(
                        f"{self._key.name}: goes on after {self.nbytes} bytes", reason="length"
                    )
                if at < self._checked_bytes or at in self._early:
                    # Verified bytes must not be overwritten.
                    raise CorruptEntryError(f"{self._key.name}: byte {at} again", reason="length")
                if at == self._checked_bytes:
                    self._pass(part)
                else:
                    self._early[at] = part
                self._write(part, at)
                while (next_part := self._early.pop(self._checked_bytes, None)) is not None:
                    self._pass(next_part)

    def _pass(self, part: bytes | memoryview) -> None:
        """Verify the next part."""
        self._verifier.feed(part)
        self._checked_bytes += len(part)

    def commit(self) -> OpenEntry:
        """Give the file its name if it is complete and valid.

        Raises:
            CorruptEntryError: It is not complete and valid.
            TierError: The disk refused.
        """
        try:
            with self._running():
                self._verifier.finish()
                return self._writer._name_open(self._key, self._file, self._verifier.header, None)
        except OSError as exc:
            raise TierError(f"cannot publish {self._key.name}: {exc}") from exc
        finally:
            self.discard()

    def discard(self) -> None:
        """Leave nothing behind. Idempotent, also after commit. Waits for another call to end."""
        with self._lock:
            self._over = True
            self._file.discard()

    @contextmanager
    def _running(self) -> Iterator[None]:
        with self._lock:
            if self._over:
                raise TierError(f"{self._key.name} was discarded")
            yield

    def _write(self, part: bytes | memoryview, at: int) -> None:
        try:
            self._writer._with_room(len(part), lambda: self._file.put(part, at))
        except OSError as exc:
            raise TierError(f"cannot write {self._key.name}: {exc}") from exc
