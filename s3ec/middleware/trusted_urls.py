# SPDX-License-Identifier: Apache-2.0
"""Pictures on other machines, where the operator says that a URL always names the same bytes.

``S3EC_SKIP_URLS=trust``. Nothing is downloaded: the catalogue says which embedding was made of what
a URL gave when the corpus was built. What changed there since is not seen, and so this is off.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, Protocol

from s3ec.errors import ConfigError, S3ECError
from s3ec.identity import is_content_hash
from s3ec.runtime import Background
from s3ec.settings import Settings

log = logging.getLogger(__name__)

VARIABLE = "S3EC_SKIP_URLS"
_NEVER, _TRUST = "never", "trust"
_REFRESH_S = 300.0
# Some 0.4 KB each.
_MOST = 500_000


class Row(Protocol):
    """What is read of a catalogue's row."""

    @property
    def uri(self) -> str:
        """Where it came from."""

    @property
    def identifier(self) -> str:
        """As vLLM spells it."""

    @property
    def placeholder(self) -> Mapping[str, Any] | None:
        """What sizes its placeholder."""


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
        self._rows: Mapping[str, Row] = {}
        self._background = Background("s3ec-skip-urls", self._refresh)
        self._background.wake()

    def close(self) -> None:
        """Read no more."""
        self._background.stop()

    def __call__(self, url: str) -> Row | None:
        """What a URL gave when the corpus was built; None where that is not known."""
        row = self._rows.get(url)
        return row if row is not None and self._is_allowed(url) else None

    def _is_allowed(self, url: str) -> bool:
        from urllib3.util import parse_url

        return not self._domains or parse_url(url).hostname in self._domains

    def _refresh(self, pause: Callable[[], None]) -> float:
        try:
            rows = self._read()
            if rows is not None:
                self._rows = _by_url(rows, pause)
        except S3ECError as exc:
            log.warning("SkipPictures cannot read the catalogue, trying again later: %s", exc)
        self._background.wake()  # again, after the rest
        return self._refresh_s


def _by_url(rows: Iterable[Row], pause: Callable[[], None]) -> Mapping[str, Row]:
    found: dict[str, Row] = {}
    twice: set[str] = set()
    for number, row in enumerate(rows):
        if number % 1000 == 0:
            pause()
        if not row.uri.startswith(("http://", "https://")):
            continue
        # vLLM would call it by its content.
        if not is_content_hash(row.identifier) or ":" in row.identifier:
            continue
        known = found.setdefault(row.uri, row)
        if known.identifier != row.identifier:
            twice.add(row.uri)
        if len(found) >= _MOST:
            log.warning("SkipPictures knows the first %d URLs of the catalogue only", _MOST)
            break
    return {url: row for url, row in found.items() if url not in twice}


class CatalogPictures:
    """The rows of a catalogue's pictures, for TrustedUrls. For one thread.

    A look that finds the same parts as the last one costs one LIST.
    """

    def __init__(self, settings: Settings, namespace: str) -> None:
        """No request goes out.

        Args:
            settings: Of the corpus.
        """
        self._settings = settings
        self._namespace = namespace
        self._parts: frozenset[str] | None = None

    def __call__(self) -> Iterator[Row] | None:
        """All rows; None where all were taken before, and there is no other part since.

        Raises:
            S3ECError: The catalogue cannot be read.
        """
        from s3ec.corpus.catalog import list_parts
        from s3ec.corpus.corpus import Corpus

        with Corpus.open(self._settings) as corpus:
            parts = frozenset(corpus.within(list_parts, self._namespace))
            if parts == self._parts:
                return None
            rows = corpus.catalog(self._namespace).rows("modality = 'image'")
        return self._taken(rows, parts)

    def _taken(self, rows: Iterator[Row], parts: frozenset[str]) -> Iterator[Row]:
        yield from rows
        # What was appended since these were listed may be among the rows: then it comes again.
        self._parts = parts


def trusted_urls(settings: Settings, namespace: str, domains: Collection[str]) -> TrustedUrls:
    """Of the corpus that some settings name."""
    return TrustedUrls(CatalogPictures(settings, namespace), domains=domains)
