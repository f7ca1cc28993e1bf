# SPDX-License-Identifier: Apache-2.0
"""Which embedding a picture has, and a hold on it while its request runs.

A picture is known by its bytes: those of its data URL, or of a file that vLLM would read. All calls
here block and are for threads of their own.
"""

from __future__ import annotations

import binascii
import io
import os
import stat
from collections.abc import Callable, Iterable
from pathlib import Path
from urllib.request import url2pathname

from s3ec.identity import Key, KeyPolicy
from s3ec.middleware.chat_pictures import UntouchedError
from s3ec.tier.files import touch
from s3ec.tier.open_entry import OpenEntry
from s3ec.tier.tier import Tier


class KnownPictures:
    """Finds the names that vLLM will give to the pictures of a request. Thread-safe: keeps nothing.

    vLLM has decoded what is stored under a name, and a name is of all bytes of a picture. So one
    that vLLM would refuse has a name, and no embedding.
    """

    def __init__(
        self, name_of: Callable[[bytes], str | None], *, folder: str = "", most_bytes: int
    ) -> None:
        """Read nothing yet.

        Args:
            name_of: ``VLLMNames.name``.
            folder: The one that vLLM reads files from (``--allowed-local-media-path``); empty for
                none.
            most_bytes: Of one file.
        """
        self._name_of = name_of
        self._folder = Path(folder).resolve() if folder else None
        self._most_bytes = most_bytes

    def name(self, url: str) -> str:
        """The identifier that vLLM will give to the picture of a URL.

        Raises:
            UntouchedError: It cannot be told here.
        """
        scheme = url[:5].lower()
        if scheme == "data:":
            data = _of_data_url(url)
        elif scheme == "file:":
            data = self._of_file(url)
        else:
            raise UntouchedError("url")
        found = self._name_of(data)
        if found is None:
            raise UntouchedError("format")
        return found

    def _of_file(self, url: str) -> bytes:
        path = self._allowed(url)
        if path is None:
            raise UntouchedError("file")
        try:
            # A pipe would be waited for.
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            with io.FileIO(fd) as file:
                about = os.fstat(fd)
                if not stat.S_ISREG(about.st_mode) or about.st_size > self._most_bytes:
                    raise UntouchedError("file")
                return file.read(self._most_bytes)
        except OSError:
            raise UntouchedError("file") from None

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


def _of_data_url(url: str) -> bytes:
    """The bytes, as strictly as vLLM (0.32, media/connector.py: ``_load_data_url``)."""
    spec, comma, text = url[5:].partition(",")
    _, _, encoding = spec.rpartition(";")
    if not comma or ";" not in spec or encoding != "base64":
        raise UntouchedError("unreadable")
    try:
        return _decode_base64(text)
    except (binascii.Error, ValueError):
        raise UntouchedError("unreadable") from None


def _decode_base64(text: str) -> bytes:
    try:
        import pybase64
    except ImportError:
        return binascii.a2b_base64(text, strict_mode=True)
    return bytes(pybase64.b64decode(text, validate=True))


# -- what the node has ----------------------------------------------------------------------------


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

    def open(self, identifiers: Iterable[str]) -> dict[str, OpenEntry]:
        """Open the embeddings of all pictures of a request, which counts on them until it ends.

        Returns:
            By identifier. A thread is to empty it in the end, since that closes files.

        Raises:
            UntouchedError: One of them is not here.
        """
        found: dict[str, OpenEntry] = {}
        try:
            for identifier in dict.fromkeys(identifiers):
                found[identifier] = self._open_one(identifier)
        except BaseException:
            found.clear()  # the exception has this frame, and may live for long
            raise
        return found

    def _open_one(self, identifier: str) -> OpenEntry:
        key: Key | None = self._naming.make_key(identifier)
        entry = None if key is None else self._entries.open(key)
        if entry is None:
            raise UntouchedError("not_here")
        header = entry.header
        if header.modality != "image" or set(header.placeholder or {}) != self._fields:
            del entry  # as above
            raise UntouchedError("no_metadata")
        touch(entry.fd)
        return entry
