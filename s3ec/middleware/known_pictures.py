# SPDX-License-Identifier: Apache-2.0
"""Finds the embedding of a picture, and keeps it open while its request runs.

A picture is identified by the bytes of its data URL. All calls here block; call them in a thread.
"""

from __future__ import annotations

import binascii
from collections.abc import Callable, Iterable

from s3ec.identity import Key, KeyPolicy
from s3ec.middleware.chat_pictures import UntouchedError
from s3ec.tier.files import touch
from s3ec.tier.open_entry import OpenEntry
from s3ec.tier.tier import Tier


def name_of_picture(url: str, name_of: Callable[[bytes], str | None]) -> str:
    """The identifier that vLLM will give to the picture of a URL.

    A name covers all bytes of a picture, and vLLM has decoded every picture that is stored. So a
    picture that vLLM would refuse has a name, but no embedding.

    Args:
        name_of: ``VLLMNames.name``.

    Raises:
        UntouchedError: The identifier cannot be found here.
    """
    if url[:5].lower() != "data:":
        raise UntouchedError("url")
    found = name_of(_of_data_url(url))
    if found is None:
        raise UntouchedError("format")
    return found


def _of_data_url(url: str) -> bytes:
    """Decode a data URL as strictly as vLLM (0.32, media/connector.py: ``_load_data_url``)."""
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

    The bytes of each are read and compared with their checksum before they are relied on: 0.1 ms
    per MiB (``Tier(check_values=True)``). That counts as a use. If one is evicted before the engine
    needs it, the request is sent again with its pixels.
    """

    def __init__(self, tier: Tier, naming: KeyPolicy, fields: frozenset[str]) -> None:
        """Open nothing yet.

        Args:
            tier: Of the engine's namespace.
            naming: As the engine's connector names entries.
            fields: The fields that must be stored with an embedding to size its placeholder.
        """
        self._entries = tier.entries
        self._naming = naming
        self._fields = fields

    def open(self, identifiers: Iterable[str]) -> dict[str, OpenEntry]:
        """Open the embeddings of all pictures of a request, which needs them until it ends.

        Returns:
            The entries by identifier. Empty it in a thread at the end, since that closes files.

        Raises:
            UntouchedError: One of them is not on this node, or has other fields.
        """
        found: dict[str, OpenEntry] = {}
        try:
            for identifier in dict.fromkeys(identifiers):
                found[identifier] = self._open_one(identifier)
        except BaseException:
            found.clear()  # the exception refers to this frame, and may live for long
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
