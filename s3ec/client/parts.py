# SPDX-License-Identifier: Apache-2.0
"""Content parts of chat messages, made of a catalogue's rows: without pixels, and with them.

A part without pixels has the size of its placeholder and the identifier of its embedding:

    {"type": "image_embeds", "image_embeds": {"image_grid_thw": [1, 16, 16]}, "uuid": "..."}

vLLM 0.30 and newer takes it on an EC consumer, for models that declare such metadata.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import mimetypes
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from cachetools import LRUCache

from s3ec.client.known import KnownCatalog
from s3ec.corpus.catalog_file import STAMP, CatalogRow
from s3ec.corpus.reading import (
    ReadOptions,
    reader_for,
    scheme_of,
    without_secrets,
)
from s3ec.errors import AmbiguousError, ConfigError, NotFoundError, S3ECError, SourceError

Part = dict[str, Any]
Message = Mapping[str, Any]
Fetch = Callable[[CatalogRow], bytes]

MODALITIES = ("image", "video", "audio")
_WITH_PIXELS = {
    **dict.fromkeys(("image_url", "image_pil", "input_image"), "image"),
    **dict.fromkeys(("audio_url", "input_audio"), "audio"),
    "video_url": "video",
}
_MOST_ADDRESSES = 2**16
_DEFAULT_TYPE = {"image": "image/png", "video": "video/mp4", "audio": "audio/wav"}


class PartMaker:
    """Makes parts from the catalogue's rows. Thread-safe."""

    def __init__(
        self,
        known: KnownCatalog,
        without_pixels: Collection[str],
        fetch: Fetch | None,
    ) -> None:
        """Read nothing yet.

        Args:
            without_pixels: Modalities whose parts go without pixels.
            fetch: Reads the bytes that the encoder was given; None reads from the row's ``uri``.

        Raises:
            ConfigError: There is no such modality.
        """
        given = [without_pixels] if isinstance(without_pixels, str) else list(without_pixels)
        if isinstance(without_pixels, str) or not set(given) <= set(MODALITIES):
            raise ConfigError(
                f"`modalities` is a list of some of {', '.join(MODALITIES)}, not {given}",
                field="modalities",
            )
        self._known = known
        self._without_pixels = frozenset(given)
        self._fetch = fetch
        # Identifier -> the caller's address of the file, in case the server needs it.
        self._addresses: LRUCache[str, str] = LRUCache(_MOST_ADDRESSES)
        self._lock = threading.Lock()

    def parts(
        self,
        document: str,
        page: int | None = None,
        *,
        data: bytes | None = None,
        url: str | None = None,
        modality: str = "image",
    ) -> list[Part]:
        """As Pictures.parts."""
        if modality not in MODALITIES:
            raise ConfigError(
                f"`modality` is one of {', '.join(MODALITIES)}, not {modality!r}", field="modality"
            )
        if page is not None and page < 1:
            raise ConfigError(f"`page` is counted from 1, not {page}", field="page")
        if data is not None:
            digest = hashlib.sha256(data).hexdigest()
            row = self._known.index().by_sha256(digest)
            if row is None:
                return [_pixels(modality, _data_url(modality, "", data), f"sha256:{digest}")]
            return [self._without(row) or _checked(row, data)]
        rows = _of_one_place(self._rows(document, page, look_again=url is None), url)
        if not rows and url is not None:
            return [_pixels(modality, url, None)]
        if not rows:
            which = f"`{document}`" if page is None else f"page {page} of `{document}`"
            raise NotFoundError(
                f"{which} is not in the catalogue: precompute it, or give `data` or `url`"
            )
        if url is not None and _is_address(url):
            with self._lock:
                self._addresses.update((row.identifier, url) for row in rows if row.page is None)
        return [self._without(row) or self._pixel_part(row) for row in rows]

    def with_pixels(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages with pixels; parts that the catalogue does not know stay as they are.

        Raises:
            SourceError: Pixels cannot be read.
        """
        index = self._known.index()

        def changed(part: Any) -> Any:
            found = _reference(part)
            row = None if found is None else index.by_identifier(found[0])
            return part if row is None else self._pixel_part(row)

        return [
            {**message, "content": [changed(part) for part in message["content"]]}
            if isinstance(message.get("content"), list)
            else message
            for message in messages
        ]

    def _rows(self, document: str, page: int | None, *, look_again: bool) -> list[CatalogRow]:
        rows = self._known.index().by_document(document, page)
        if not rows and look_again and not self._known.is_recent():
            rows = self._known.read_again().by_document(document, page)
        return rows

    def _without(self, row: CatalogRow) -> Part | None:
        if row.modality not in self._without_pixels or not row.placeholder:
            return None
        kind = f"{row.modality}_embeds"
        return {"type": kind, kind: dict(row.placeholder), "uuid": row.identifier}

    def _pixel_part(self, row: CatalogRow) -> Part:
        """A part with pixels: the row's bytes, or the caller's own address of a whole file."""
        if self._fetch is None and _is_address(row.uri):
            with self._lock:
                url = self._addresses.get(row.identifier)
            if url is not None:
                # Without the identifier: the server may read other bytes there by now, and would
                # store them under it. A name that the server computes itself fits the bytes.
                return _pixels(row.modality, url, None)
            raise SourceError(
                f"{row.uri} is an address, and a catalogue is another's word; give `fetch`, or the "
                "`url` or `data` of a whole file"
            )
        body = self._read(row)
        if hashlib.sha256(body).hexdigest() != row.sha256:
            raise SourceError(f"{row.uri} is not what it was when it was encoded: precompute it")
        return _checked(row, body)

    def _read(self, row: CatalogRow) -> bytes:
        if self._fetch is None:
            return reader_for(self._options_of(row)).read(row.uri, row.page)
        try:
            return self._fetch(row)
        except S3ECError:
            raise
        except Exception as exc:
            raise SourceError(f"`fetch` failed for {row.uri}: {exc}") from exc

    def _options_of(self, row: CatalogRow) -> ReadOptions:
        """The options by which the encoder read a page; defaults if the row does not say."""
        options = ReadOptions(settings=self._known.s3_settings, asks_http=False)
        words = str(row.extra.get(STAMP, "")).split()
        if row.page is not None and words:
            with contextlib.suppress(ValueError):  # no number, or not a valid one
                return replace(options, dpi=int(words[-1]))
        return options


def _is_address(uri: str) -> bool:
    return scheme_of(uri) in ("http", "https")


def _of_one_place(rows: Sequence[CatalogRow], url: str | None) -> list[CatalogRow]:
    """Keep each page once: of files of one name in several places, that of ``url``.

    Raises:
        AmbiguousError: Several differ in content, and none of them is at ``url``.
    """
    place = None if url is None else without_secrets(url)
    pages: dict[tuple[int | None, str], list[CatalogRow]] = {}
    for row in rows:
        pages.setdefault((row.page, row.modality), []).append(row)
    chosen = []
    for each in pages.values():
        mine = [row for row in each if row.uri.partition("#page=")[0] == place] or each
        if len({row.identifier for row in mine}) > 1:
            raise AmbiguousError(
                f"`{mine[0].document}` is in several places: {mine[0].uri}, {mine[1].uri}; give "
                "the `url` of the one that is meant, or `data`"
            )
        chosen.append(max(mine, key=lambda row: row.stored_s))
    return chosen


# -- messages --------------------------------------------------------------------------------------


def _parts_of(messages: Sequence[Message]) -> Iterator[Mapping[str, Any]]:
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            yield from (part for part in content if isinstance(part, Mapping))


def _reference(part: Any) -> tuple[str, str] | None:
    """Identifier and modality of a part that has a size and no pixels."""
    if not isinstance(part, Mapping) or not isinstance(part.get("uuid"), str):
        return None
    for modality in MODALITIES:
        kind = f"{modality}_embeds"
        size = part.get(kind)
        if isinstance(size, Mapping) and kind not in size:
            return part["uuid"], modality
    return None


def references(messages: Sequence[Message]) -> dict[str, str]:
    """Identifier -> modality of all parts without pixels."""
    return dict(filter(None, map(_reference, _parts_of(messages))))


def modalities_with_pixels(messages: Sequence[Message]) -> set[str]:
    """The modalities of which some part has pixels."""
    return {
        modality
        for part in _parts_of(messages)
        for kind, modality in _WITH_PIXELS.items()
        if kind in part or part.get("type") == kind
    }


def _pixels(modality: str, url: str, uuid: str | None) -> Part:
    kind = f"{modality}_url"
    part: Part = {"type": kind, kind: {"url": url}}
    return part if uuid is None else {**part, "uuid": uuid}


def _checked(row: CatalogRow, body: bytes) -> Part:
    """Make the part of bytes that have the row's sha256."""
    return _pixels(row.modality, _data_url(row.modality, row.uri, body), row.identifier)


def _data_url(modality: str, uri: str, body: bytes) -> str:
    kind = mimetypes.guess_type(uri)[0] or ""
    if not kind.startswith(f"{modality}/"):  # such as of a page of a PDF, which is a PNG
        kind = _DEFAULT_TYPE[modality]
    return f"data:{kind};base64,{base64.b64encode(body).decode()}"
