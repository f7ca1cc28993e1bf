# SPDX-License-Identifier: Apache-2.0
"""Pictures on other machines, where the operator says that a URL always names the same bytes.

``S3EC_SKIP_URLS=trust``. Nothing is downloaded: the catalogue says which embedding was made of what
a URL gave when the corpus was built. What changed there since is not seen, and so this is off.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import (
    AsyncGenerator,
    Callable,
    Collection,
    Generator,
    Iterable,
    Iterator,
    Mapping,
)
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from s3ec.errors import ConfigError, S3ECError
from s3ec.identity import Layout, is_content_hash
from s3ec.runtime import Background
from s3ec.safetensors_file import plain_json
from s3ec.settings import Settings
from s3ec.store.base import Store

if TYPE_CHECKING:
    import pyarrow as pa


log = logging.getLogger(__name__)

VARIABLE = "S3EC_SKIP_URLS"
_NEVER, _TRUST = "never", "trust"
_REFRESH_S = 300.0
# Some 0.4 KB each, and 1 KB where every placeholder is another one and as long as may be.
_MOST = 500_000
_PLACEHOLDER_BYTES = 512
_BATCH_ROWS = 4096


@dataclass(frozen=True, slots=True)
class Row:
    """What is read of a catalogue's row.

    Attributes:
        uri: Where the picture came from.
        identifier: As vLLM spells it.
        size: What sizes its placeholder, JSON; None where that is not known.
        key: Hash of document, page and modality. Of rows that agree in them the newest counts.
        part: With which it was appended; the newest row is that of the greatest.
    """

    uri: str
    identifier: str
    size: str | None = None
    key: int = 0
    part: str = ""


@dataclass(frozen=True, slots=True)
class _Known:
    """What is kept of a row; see Row."""

    identifier: str
    size: str | None
    key: int
    part: str

    @property
    def placeholder(self) -> Mapping[str, Any] | None:
        """What sizes its placeholder."""
        found: Mapping[str, Any] | None = None if self.size is None else plain_json(self.size)
        return found


def are_trusted() -> bool:
    """Whether URLs of other machines count, from the environment.

    Raises:
        ConfigError: The value is none of the two.
    """
    text = os.environ.get(VARIABLE, _NEVER) or _NEVER
    if text not in (_NEVER, _TRUST):
        raise ConfigError(f"{VARIABLE} must be {_NEVER} or {_TRUST}")
    return text == _TRUST


class TrustedUrls:
    """The catalogue's pictures by their URL, looked at again every five minutes in the background.

    A URL under which the catalogue has two contents is not known.
    """

    def __init__(
        self,
        read: Callable[[], Iterable[Row] | None],
        *,
        domains: Collection[str] = (),
        refresh_s: float = _REFRESH_S,
    ) -> None:
        """Start reading; returns at once.

        Args:
            read: All rows of pictures; None where they are those of the last time. Blocks.
            domains: The only ones that vLLM reads from (``--allowed-media-domains``); empty for
                any.
            refresh_s: Between two looks.
        """
        self._read = read
        self._domains = frozenset(domains)
        self._refresh_s = refresh_s
        self._known: Mapping[bytes, _Known] = {}
        self._background = Background("s3ec-skip-urls", self._refresh)
        self._background.wake()

    def close(self) -> None:
        """Read no more."""
        self._background.stop()

    def __call__(self, url: str) -> _Known | None:
        """What a URL gave when the corpus was built; None where that is not known."""
        known = self._known.get(_digest(url))
        return known if known is not None and self._is_allowed(url) else None

    def _is_allowed(self, url: str) -> bool:
        from urllib3.util import parse_url

        return not self._domains or parse_url(url).hostname in self._domains

    def _refresh(self, pause: Callable[[], None]) -> float:
        try:
            rows = self._read()
            try:
                if rows is not None:
                    self._known = _by_url(rows, pause)
            finally:
                if isinstance(rows, Generator):  # whose bucket is open
                    rows.close()
        except S3ECError as exc:
            log.warning("SkipPictures cannot read the catalogue, trying again later: %s", exc)
        self._background.wake()  # again, after the rest
        return self._refresh_s


def _digest(url: str) -> bytes:
    return hashlib.sha256(url.encode("utf-8", "surrogatepass")).digest()[:16]


def _by_url(rows: Iterable[Row], pause: Callable[[], None]) -> Mapping[bytes, _Known]:
    """What the rows say of _MOST URLs. All rows are looked at: a later one may say otherwise."""
    found: dict[bytes, _Known] = {}
    twice: set[bytes] = set()
    texts: dict[str, str] = {}  # pictures of one size have one placeholder
    is_full = False
    for number, row in enumerate(rows):
        if number % 1000 == 0:
            pause()
        url = _digest(row.uri)
        known = found.get(url)
        if known is not None and known.key != row.key:
            if known.identifier != row.identifier:
                twice.add(url)
            continue
        if known is not None and known.part > row.part:
            continue
        if known is None and len(found) >= _MOST:
            is_full = True
            continue
        size = row.size if len(row.size or "") <= _PLACEHOLDER_BYTES else None
        size = None if size is None else texts.setdefault(size, size)
        found[url] = _Known(row.identifier, size, row.key, row.part)
    if is_full:
        log.warning("SkipPictures knows %d URLs of the catalogue only, which has more", _MOST)
    return {url: known for url, known in found.items() if url not in twice}


class CatalogPictures:
    """The rows of a catalogue's pictures, for TrustedUrls. For one thread.

    A look that finds the same parts as the last one costs one LIST. Memory: one part, while its
    rows are taken.
    """

    def __init__(self, settings: Settings, namespace: str) -> None:
        """No request goes out.

        Args:
            settings: Of the corpus.
        """
        self._settings = settings
        self._namespace = namespace
        self._parts: frozenset[str] | None = None

    def __call__(self) -> Generator[Row, None, None] | None:
        """All rows, replaced ones too; None where all were taken before, and no part is new.

        Raises:
            S3ECError: The catalogue cannot be read; also while rows are taken.
        """
        from s3ec.corpus.catalog import list_parts
        from s3ec.corpus.corpus import Corpus

        with Corpus.open(self._settings) as corpus:
            parts = frozenset(corpus.within(list_parts, self._namespace))
        return None if parts == self._parts else self._rows(parts)

    def _rows(self, parts: frozenset[str]) -> Generator[Row, None, None]:
        from s3ec.corpus.catalog import read_parts
        from s3ec.corpus.corpus import Corpus

        coming: AsyncGenerator[tuple[str, pa.Table], None] | None = None

        def problem(exc: S3ECError) -> None:
            log.warning("this part of the catalogue is left out: %s", exc)

        async def following(store: Store, layout: Layout) -> pa.Table | None:
            nonlocal coming
            if coming is None:
                coming = read_parts(store, layout, problem=problem, at_a_time=1)
            part = await anext(coming, None)
            return part and part[1]

        async def end(_: Store) -> None:
            if coming is not None:
                await coming.aclose()

        with Corpus.open(self._settings) as corpus:
            try:
                while (table := corpus.within(following, self._namespace)) is not None:
                    yield from _rows_of(table)
                    del table  # not in memory while the next one comes
            finally:
                corpus.run(end)
        # What was appended since these were listed may be among the rows: then it comes again.
        self._parts = parts


def _rows_of(table: pa.Table) -> Iterator[Row]:
    """The pictures of a part that have a content hash and a URL of another machine."""
    import pyarrow.compute as pc

    from s3ec.corpus.reading import is_whole

    is_picture = pc.equal(table.column("modality"), "image")
    uris = table.column("uri")
    is_away = pc.or_(pc.starts_with(uris, "http://"), pc.starts_with(uris, "https://"))
    names = ("document", "page", "uri", "identifier", "placeholder", "part")
    some = table.filter(pc.and_(is_picture, is_away)).select(names)
    parts: dict[str, str] = {}  # one text for all rows of a part
    for batch in some.to_batches(max_chunksize=_BATCH_ROWS):
        columns = (column.to_pylist() for column in batch.columns)
        for document, page, uri, identifier, size, part in zip(*columns, strict=True):
            # vLLM would call it by its content. A URL that is not whole names something else.
            if is_whole(uri) and is_content_hash(identifier) and ":" not in identifier:
                key = hash((document, page))
                yield Row(uri, identifier, size, key, parts.setdefault(part, part))


def trusted_urls(settings: Settings, namespace: str, domains: Collection[str]) -> TrustedUrls:
    """Of the corpus that some settings name."""
    return TrustedUrls(CatalogPictures(settings, namespace), domains=domains)
