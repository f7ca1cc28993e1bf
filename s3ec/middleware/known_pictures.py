# SPDX-License-Identifier: Apache-2.0
"""Which embedding a picture has, and a hold on it while its request runs.

A picture is known by the text of its data URL, or by where its file lies and what the file system
says of it. Both are looked up in a bounded memory before anything is decoded. All calls here block
and are for threads of their own.
"""

from __future__ import annotations

import binascii
import hashlib
import io
import logging
import os
import stat
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.request import url2pathname

from cachetools import LRUCache

from s3ec.identity import Key, KeyPolicy
from s3ec.middleware.chat_pictures import Picture, UntouchedError
from s3ec.runtime import DaemonPool
from s3ec.tier.files import touch
from s3ec.tier.open_entry import OpenEntry
from s3ec.tier.tier import Tier

log = logging.getLogger(__name__)

# Names of 64 digits, and grids: some 10 MB.
_REMEMBERED = 32_768
# Pictures that wait to be decoded beside the server's work, and their bytes.
_MOST_WAITING = 8
_WAITING_BYTES = 64 * 2**20
# A file that was written a moment ago can be written again within one tick of its clock.
_SETTLED_NS = 2 * 10**9


class Decoded(Protocol):
    """What vLLM makes of a picture that it has decoded."""

    @property
    def identifier(self) -> str:
        """The name that its content gives it."""

    @property
    def placeholder(self) -> Mapping[str, Any] | None:
        """What sizes its placeholder; None where that could not be found out."""


class Names(Protocol):
    """vLLM's names for pictures, see ``vllm_names.VLLMNames``."""

    def quick(self, data: bytes) -> str | None:
        """By the file's bytes and header; None where that is not enough."""

    def decode(self, data: bytes) -> Decoded:
        """By decoding it."""


@dataclass(frozen=True, slots=True)
class _Known:
    """What is remembered of a picture; without ``decoded`` vLLM may still refuse its pixels."""

    identifier: str
    decoded: bool = False
    placeholder: Mapping[str, Any] | None = None


class KnownPictures:
    """Finds the names that vLLM will give to the pictures of a request. Thread-safe.

    A picture is new, then named (its header was enough) or decoded (in the background, once). A
    client's own name for a picture counts only for one that was decoded and is of the stored
    size: vLLM reads the pixels too, and refuses a request with a broken picture whatever it is
    called.
    """

    def __init__(
        self,
        names: Names,
        *,
        folder: str = "",
        most_bytes: int,
        urls: Callable[[str], Decoded | None] | None = None,
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """Nothing is known yet.

        Args:
            names: vLLM's.
            folder: The one that vLLM reads files from (``--allowed-local-media-path``); empty for
                none.
            most_bytes: Of one file.
            urls: What is known of pictures on other machines; None where they never are.
            now_ns: Nanoseconds since the epoch.
        """
        self._names = names
        self._folder = Path(folder).resolve() if folder else None
        self._most_bytes = most_bytes
        self._urls = urls
        self._now_ns = now_ns
        self._known: LRUCache[bytes, _Known] = LRUCache(_REMEMBERED)
        self._lock = threading.Lock()
        self._pool = DaemonPool(1, "s3ec-skip-decode")
        self._waiting: dict[bytes, int] = {}

    def close(self) -> None:
        """Decode nothing any more."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def name(self, picture: Picture) -> tuple[str, Mapping[str, Any] | None]:
        """The identifier that vLLM will give to a picture.

        Returns:
            Also what must be stored with the embedding; None where the name says it all.

        Raises:
            UntouchedError: It is not known yet, or never will be.
        """
        data: bytes | None = None
        if picture.url[:5].lower() == "data:":
            mark = _digest(picture.url)
            remember = True
        elif picture.url[:5].lower() == "file:":
            mark, data, remember = self._look_at_file(picture)
        else:
            return self._name_of_url(picture)
        known = self._get(mark)
        if known is None or not self._is_enough(known, picture):
            data = data if data is not None else self._bytes_of(picture.url)
            known = self._learn(mark, data, remember, quickly=picture.uuid is None)
        if picture.uuid is None:
            return known.identifier, None
        return picture.uuid, _size_of(known)

    def _name_of_url(self, picture: Picture) -> tuple[str, Mapping[str, Any] | None]:
        found = None if self._urls is None else self._urls(picture.url)
        if found is None:
            raise UntouchedError("url")
        if picture.uuid is None:
            return found.identifier, None
        return picture.uuid, _size_of(found)

    def _learn(self, mark: bytes, data: bytes, remember: bool, *, quickly: bool) -> _Known:
        identifier = self._names.quick(data) if quickly else None
        if identifier is not None:
            known = _Known(identifier)
            if remember:
                self._put(mark, known)
            return known
        if remember:
            self._decode_soon(mark, data)
        raise UntouchedError("new")

    def _decode_soon(self, mark: bytes, data: bytes) -> None:
        with self._lock:
            full = (
                len(self._waiting) >= _MOST_WAITING
                or sum(self._waiting.values()) + len(data) > _WAITING_BYTES
            )
            if full or mark in self._waiting:
                return
            self._waiting[mark] = len(data)
        try:
            self._pool.submit(self._decode, mark, data)
        except RuntimeError:  # it has ended
            self._waiting.pop(mark, None)

    def _decode(self, mark: bytes, data: bytes) -> None:
        try:
            found = self._names.decode(data)
            self._put(mark, _Known(found.identifier, True, found.placeholder))
        except Exception as exc:  # noqa: BLE001 (whatever a decoder makes of a client's bytes)
            log.debug("a picture that vLLM refuses: %r", exc)
        finally:
            with self._lock:
                self._waiting.pop(mark, None)

    def _get(self, mark: bytes) -> _Known | None:
        with self._lock:
            return self._known.get(mark)

    def _put(self, mark: bytes, known: _Known) -> None:
        with self._lock:
            self._known[mark] = known

    def _bytes_of(self, url: str) -> bytes:
        """A data URL's, as strictly as vLLM (0.32, media/connector.py: ``_load_data_url``)."""
        spec, comma, text = url[5:].partition(",")
        _, _, encoding = spec.rpartition(";")
        if not comma or ";" not in spec or encoding != "base64":
            raise UntouchedError("unreadable")
        try:
            return _decode_base64(text)
        except (binascii.Error, ValueError):
            raise UntouchedError("unreadable") from None

    def _is_enough(self, known: _Known | None, picture: Picture) -> bool:
        return known is not None and (known.decoded or picture.uuid is None)

    def _look_at_file(self, picture: Picture) -> tuple[bytes, bytes | None, bool]:
        """What names a file's content, its bytes where they are not known, and whether it rests."""
        path = self._allowed(picture.url)
        if path is None:
            raise UntouchedError("file")
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            with io.FileIO(fd) as file:
                before = os.fstat(fd)
                if not stat.S_ISREG(before.st_mode) or before.st_size > self._most_bytes:
                    raise UntouchedError("file")
                mark = _digest(repr((os.fspath(path), _state(before))))
                if self._is_enough(self._get(mark), picture):
                    return mark, None, True
                data = file.read(self._most_bytes + 1)
                if len(data) != before.st_size or _state(os.fstat(fd)) != _state(before):
                    raise UntouchedError("file")
        except OSError:
            raise UntouchedError("file") from None
        newest_ns = max(before.st_mtime_ns, before.st_ctime_ns)
        return mark, data, newest_ns + _SETTLED_NS < self._now_ns()

    def _allowed(self, url: str) -> Path | None:
        """The file that vLLM would read (0.32, media/connector.py: ``_load_file_url``)."""
        from urllib3.util import parse_url

        if self._folder is None:
            return None
        try:
            parsed = parse_url(url)
            if parsed.scheme != "file":
                return None
            path = Path(url2pathname((parsed.netloc or "") + (parsed.path or ""))).resolve()
        except (ValueError, OSError, RuntimeError):  # also what urllib3 raises
            return None
        return path if self._folder in path.parents else None


def _size_of(picture: Decoded) -> Mapping[str, Any]:
    """What sizes its placeholder, where a client's own name is to count."""
    if picture.placeholder is None:
        raise UntouchedError("client_ids")
    return picture.placeholder


def _state(status: os.stat_result) -> tuple[int, ...]:
    return (
        *(status.st_dev, status.st_ino, status.st_size),
        *(status.st_mtime_ns, status.st_ctime_ns),
    )


def _digest(text: str) -> bytes:
    """What a long text is remembered by; vLLM's own hash takes a third of SHA-256's time."""
    data = text.encode("utf-8", "surrogatepass")
    try:
        from blake3 import blake3
    except ImportError:
        return hashlib.sha256(data).digest()
    return bytes(blake3(data).digest())


def _decode_base64(text: str) -> bytes:
    try:
        import pybase64
    except ImportError:
        return binascii.a2b_base64(text, strict_mode=True)
    return bytes(pybase64.b64decode(text, validate=True))


# -- what the node has ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Opened:
    """What one request counts on, until it ends.

    Attributes:
        named: For each of its pictures the identifier, and what sizes its placeholder.
        entries: One for each embedding, by identifier. Emptied by a thread in the end, since that
            closes files.
    """

    named: Sequence[tuple[str, Mapping[str, Any]]]
    entries: dict[str, OpenEntry]


class Opener:
    """Opens embeddings on this node's disk for requests. Thread-safe.

    The bytes of each are read and compared with their checksum before they are counted on: 0.1 ms
    per MiB (``Tier(check_values=True)``). That counts as a use. Should eviction take one before
    the engine looks for it, the request is asked again with its pixels.
    """

    def __init__(self, tier: Tier, naming: KeyPolicy, fields: frozenset[str]) -> None:
        """Nothing is open.

        Args:
            tier: Of the engine's namespace.
            naming: As the engine's connector names entries.
            fields: What must be stored with an embedding to size its placeholder.
        """
        self._entries = tier.entries
        self._naming = naming
        self._fields = fields

    def open(self, wanted: Sequence[tuple[str, Mapping[str, Any] | None]]) -> Opened:
        """Open the embeddings of all pictures of a request.

        Args:
            wanted: For each its identifier, and what must be stored with it.

        Raises:
            UntouchedError: One of them is not here.
        """
        found: dict[str, OpenEntry] = {}
        try:
            for identifier, placeholder in wanted:
                if identifier not in found:
                    found[identifier] = self._open_one(identifier)
                stored = found[identifier].header.placeholder
                if placeholder is not None and dict(stored or {}) != placeholder:
                    raise UntouchedError("other_size")
        except BaseException:
            found.clear()  # the exception has this frame, and may live for long
            raise
        return Opened([(name, found[name].header.placeholder or {}) for name, _ in wanted], found)

    def _open_one(self, identifier: str) -> OpenEntry:
        key: Key | None = self._naming.make_key(identifier)
        if key is None:
            raise UntouchedError("client_ids")
        entry = self._entries.open(key)
        if entry is None:
            raise UntouchedError("not_here")
        header = entry.header
        if header.modality != "image" or set(header.placeholder or {}) != self._fields:
            del entry  # as above
            raise UntouchedError("no_metadata")
        touch(entry.fd)
        return entry
