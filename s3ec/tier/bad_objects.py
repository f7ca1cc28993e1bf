# SPDX-License-Identifier: Apache-2.0
"""Which objects of the bucket are bad, known to all processes of the node for a while.

An object is never replaced, so a bad one would be fetched in vain for ever. Who gets two bad
copies notes it here: nobody on this node asks for that object again until the note runs out, and
whoever encodes the image again writes it beside the bad one, as its one revision (``.r1``).

A note is a small file with a time to live::

    v1/bad-objects/NAMESPACE--DESTINATION--DIGEST.json

It is read as anything from a disk is: whole, bounded, and refused where it is odd.
"""

from __future__ import annotations

import json
import logging
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from s3ec.counters import Counters
from s3ec.errors import CorruptEntryError, TierError
from s3ec.identity import (
    MAX_REVISION,
    Key,
    digest_of_name,
    is_object_name,
    revised_name,
)
from s3ec.safetensors_file import plain_json
from s3ec.tier.files import DiskErrors, Folders, read_small, require_own_folders
from s3ec.tier.scan import EntryFileName

log = logging.getLogger(__name__)

KEPT_NOTES = 1024
"""Of all namespaces together; the oldest go first."""
MANY = 16
"""Objects found bad by one process within a minute that are no coincidence any more."""
_WINDOW_S = 60.0
_NOTE_LIMIT = 4096
_SUFFIX = ".json"
_REASON = re.compile(r"[a-z]{1,32}")
_FIELDS = {"name": str, "reason": str, "since_s": float, "until_s": float, "revision": int,
           "row_time_s": int, "good": bool}  # fmt: skip
# A clock that was set back by more makes a note of the future, which is not believed.
_SKEW_S = 300.0


@dataclass(frozen=True, slots=True)
class BadObject:
    """What is known of one entry.

    Attributes:
        namespace: Where it belongs.
        destination: 16 hex digits that stand for a bucket and a folder in it, see Spool.
        name: The entry's object name below ``objects/``, that of revision 0.
        reason: What was wrong with the last bad copy; a word, see CorruptEntryError.
        since_s: When the first was found, seconds since the epoch.
        until_s: When the note runs out.
        revision: The first revision that is not known to be bad, see above.
        row_time_s: Time of the row that the index held then; 0 where it held none. A later row
            tells that somebody has stored the entry since.
        good: ``revision`` was fetched, or written, by this node.
    """

    namespace: str
    destination: str
    name: str
    reason: str
    since_s: float
    until_s: float
    revision: int
    row_time_s: int = 0
    good: bool = False

    @property
    def key(self) -> Key:
        """Its key, without the identifier, which only objects know."""
        return Key("", self.name, digest_of_name(self.name))

    @property
    def file_name(self) -> str:
        """Of its note."""
        return f"{self.namespace}--{self.destination}--{self.key.digest.hex()}{_SUFFIX}"

    def counts(self, now_s: float) -> bool:
        """Whether it has not run out; one from the future is not believed."""
        return self.since_s - _SKEW_S <= now_s < self.until_s

    def knows_more(self, other: BadObject | None) -> bool:
        """Than another note about the same entry."""
        return other is None or (self.revision, self.good) > (other.revision, other.good)

    def encode(self) -> bytes:
        """The file's content."""
        fields = {name: getattr(self, name) for name in _FIELDS}
        return (json.dumps(fields) + "\n").encode()

    @classmethod
    def parse(cls, namespace: str, destination: str, text: str) -> BadObject | None:
        """The inverse; None for anything that is no note."""
        try:
            fields: Any = plain_json(text)
            note = cls(namespace, destination, **fields)
        except (ValueError, TypeError, RecursionError):
            return None
        if any(type(getattr(note, name)) is not kind for name, kind in _FIELDS.items()):
            return None
        good = (
            note.name.isascii()
            and is_object_name(note.name)
            and _REASON.fullmatch(note.reason)
            and 1 <= note.revision <= MAX_REVISION + 1
        )
        return note if good else None


class BadObjects:
    """The notes of one namespace and bucket, for one process; thread-safe.

    Questions are answered from memory, where also stays what the disk refuses.

    States of an entry, each of which knows more than the one before:

    * No note. ``note`` of the object leads to the next state.
    * Revision 1: the object is bad, and ``.r1`` may be there or not. ``heal`` leads to the next
      state, and ``note`` of ``.r1`` to the last one.
    * Revision 1, good: this node has fetched or written ``.r1``. ``note`` of it leads on.
    * Revision 2: both are bad. There is nothing to ask for or to write.

    A note ends when its time is over, when there are too many, or when somebody deletes it. Then
    there is no note again.

    Counters: ``quarantined_objects`` (objects found bad by this process).
    """

    def __init__(
        self,
        folders: Folders,
        namespace: str,
        destination: str,
        *,
        ttl_s: float,
        counters: Counters,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Nothing is read before ``refresh``.

        Args:
            folders: The tier's.
            namespace: ``Namespace.name``.
            destination: As for ``Tier.open_spool``.
            ttl_s: How long a note counts.
            clock: Seconds since the epoch.
        """
        self._folders = folders
        self._refused = DiskErrors(folders.root, counters).record
        self._counters = counters
        self._place = (namespace, destination)
        self._ttl_s = ttl_s
        self._clock = clock
        self._lock = threading.Lock()  # held while notes are written, never by questions
        self._notes: dict[bytes, BadObject] = {}
        self._unwritten: set[bytes] = set()
        self._seen_ns = -1
        self._said_spent = False
        self._recent_s: deque[float] = deque(maxlen=MANY)
        self._said_many = False

    # -- from memory ---------------------------------------------------------------------------

    def revision(self, key: Key) -> int:
        """The one that is worth asking for, or writing; past MAX_REVISION: none."""
        note = self._noted(key, self._clock())
        return note.revision if note else 0

    def unhealed(self) -> Sequence[BadObject]:
        """Notes about entries of which this node knows no good revision."""
        now_s = self._clock()
        return [note for note in self._notes.values() if not note.good and now_s < note.until_s]

    def _noted(self, key: Key, now_s: float) -> BadObject | None:
        note = self._notes.get(key.digest)
        return note if note is not None and now_s < note.until_s else None

    # -- blocking ------------------------------------------------------------------------------

    def is_stale(self) -> bool:
        """Whether another process has noted something: one stat of a folder, nothing is read."""
        try:
            return os.stat(self._folders.bad_objects).st_mtime_ns != self._seen_ns
        except OSError:
            return False

    def catch_up(self) -> None:
        """As ``refresh``, where that would tell something new. Never raises."""
        if self.is_stale():
            self.refresh()

    def refresh(self) -> None:
        """Read what all processes have noted, and delete what has run out. Never raises."""
        with self._lock:
            self._refresh_locked()

    def note(self, key: Key, reason: str, revision: int, *, row_time_s: int = 0) -> int | None:
        """Two copies of a revision were bad. Never raises.

        Where many objects come bad at once it is not the objects, but something on the way that
        answers for the bucket or damages what passes: then nothing is noted.

        Args:
            reason: A word, see CorruptEntryError.
            revision: Which one: 0 or 1.
            row_time_s: See BadObject.

        Returns:
            The next revision to ask for; None where nothing was noted.
        """
        with self._lock:
            self._refresh_locked(adding=1)
            now_s = self._clock()
            old = self._noted(key, now_s)
            if old is not None and revision < old.revision:
                return old.revision  # another thread or process was faster
            if self._are_many_locked(now_s):
                return None
            note = BadObject(
                *self._place,
                name=key.name,
                reason=reason if _REASON.fullmatch(reason) else "unknown",
                since_s=float(old.since_s if old else now_s),
                until_s=float(now_s + self._ttl_s),
                revision=revision + 1,
                row_time_s=row_time_s,
            )
            self._write_locked(note)
        self._counters.add("quarantined_objects")
        log.warning(
            "object %s of %s is bad (%s); nobody on this node asks for it for %.0f s. `s3ec "
            "quarantine ls` shows such objects; the image's next encode is stored beside it",
            *(revised_name(key.name, revision), note.namespace, note.reason, self._ttl_s),
        )
        if note.revision > MAX_REVISION and not self._said_spent:
            self._said_spent = True
            log.error(
                "entry %s of %s and its revision are both bad; its image is encoded each time "
                "until `s3ec rm` deletes them (said for the first such entry only)",
                *(note.name, note.namespace),
            )
        return note.revision

    def heal(self, key: Key, revision: int) -> None:
        """This revision is good, or was written just now. Never raises."""
        with self._lock:
            if not self._is_unhealed(key, revision):
                return
            self._refresh_locked()  # another process may have found it bad since
            if self._is_unhealed(key, revision):
                self._write_locked(replace(self._notes[key.digest], good=True))

    def _is_unhealed(self, key: Key, revision: int) -> bool:
        note = self._noted(key, self._clock())
        return note is not None and not note.good and note.revision == revision

    def _refresh_locked(self, *, adding: int = 0) -> None:
        """See refresh; makes room for so many notes more."""
        try:
            seen_ns = os.stat(self._folders.bad_objects).st_mtime_ns
            notes = prune(self._folders, self._clock(), kept=KEPT_NOTES - adding)
        except FileNotFoundError:  # somebody emptied the cache; it is made by the next note
            seen_ns, notes = -1, []
        except (OSError, TierError) as exc:
            self._refused("read the notes of bad objects", exc)
            return
        found = {
            note.key.digest: note
            for note in notes
            if (note.namespace, note.destination) == self._place
        }
        for digest in list(self._unwritten):
            note = self._notes[digest]
            if note.counts(self._clock()) and note.knows_more(found.get(digest)):
                found[digest] = note
            else:
                self._unwritten.discard(digest)
        self._notes = found
        self._seen_ns = seen_ns

    def _are_many_locked(self, now_s: float) -> bool:
        """Whether this one is one too many; they are until fewer come, noted or not."""
        while self._recent_s and not 0 <= now_s - self._recent_s[0] < _WINDOW_S:
            self._recent_s.popleft()
        many = len(self._recent_s) == MANY
        self._recent_s.append(now_s)
        if not many:
            self._said_many = False
            return False
        if not self._said_many:
            self._said_many = True
            log.error(
                "%d objects of %s came bad from the bucket within %.0f s: look for what answers "
                "in its place, or damages what passes; further ones are not quarantined",
                *(MANY, self._place[0], _WINDOW_S),
            )
        return True

    def _write_locked(self, note: BadObject) -> None:
        digest = note.key.digest
        self._notes[digest] = note
        self._unwritten.add(digest)
        try:
            path = f"{self._folders.bad_objects}/{note.file_name}"
            self._folders.write_small(path, note.encode())
            self._unwritten.discard(digest)
        except (OSError, TierError) as exc:
            self._refused("note a bad object", exc)


def read_notes(folders: Folders) -> list[BadObject]:
    """All notes of the node that can be read, also those that have run out.

    Raises:
        OSError: The folder cannot be read; FileNotFoundError where it was never made.
        TierError: It is a symbolic link, or not ours alone.
    """
    return [note for _, note in _walk(folders) if note is not None]


def _walk(folders: Folders) -> Iterator[tuple[str, BadObject | None]]:
    top = str(folders.bad_objects)
    require_own_folders((*folders.above, top))
    for name in os.listdir(top):
        yield name, _read(f"{top}/{name}")


def remove_note(folders: Folders, note: BadObject) -> bool:
    """Forget one; False where it was gone.

    Raises:
        OSError: The disk refused.
    """
    try:
        os.unlink(f"{folders.bad_objects}/{note.file_name}")
    except FileNotFoundError:
        return False
    return True


def prune(folders: Folders, now_s: float, *, kept: int) -> list[BadObject]:
    """Delete what has run out, and the oldest where there are too many; answers what is left.

    Raises:
        OSError, TierError: As read_notes.
    """
    left = []
    for name, note in _walk(folders):
        if note is None:
            if EntryFileName.parse(name, _SUFFIX):  # torn, or of no version that we know
                with suppress(FileNotFoundError):
                    os.unlink(f"{folders.bad_objects}/{name}")
        elif note.counts(now_s):
            left.append(note)
        else:
            remove_note(folders, note)
    left.sort(key=lambda note: note.until_s)
    for note in left[:-kept]:
        remove_note(folders, note)
    return left[-kept:]


def _read(path: str) -> BadObject | None:
    """One note; None for what is none of ours, or gone."""
    name = EntryFileName.parse(path.rpartition("/")[2], _SUFFIX)
    if name is None:
        return None
    try:
        text = read_small(path, max_bytes=_NOTE_LIMIT).decode()
    except (OSError, CorruptEntryError, UnicodeDecodeError):
        return None
    note = BadObject.parse(name.namespace, name.destination, text)
    return note if note is not None and note.key.digest == name.digest else None
