# SPDX-License-Identifier: Apache-2.0
"""A client's copy of a corpus's catalogue, from the bucket or from an exported file."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from s3ec.corpus.catalog_file import CatalogRow, require_pyarrow, to_table
from s3ec.corpus.catalog_index import CatalogIndex
from s3ec.errors import ConfigError, S3ECError
from s3ec.runtime import Background
from s3ec.safetensors_file import plain_json

if TYPE_CHECKING:
    import pyarrow as pa

    from s3ec.settings import Settings

log = logging.getLogger(__name__)

REFRESH_S = 300.0
# A request for a missing row has the catalogue read again, but no sooner than this.
_LEAST_AGE_S = 10.0


class HasIndex(Protocol):
    """An object that returns the catalogue as it is now, as ``Corpus.catalog()`` does."""

    def index(self) -> CatalogIndex:
        """The whole catalogue, in memory."""
        ...


Source = HasIndex | CatalogIndex | str | os.PathLike[str]


class KnownCatalog:
    """The catalogue in memory, refreshed in the background. Thread-safe.

    The first call of ``index`` reads it and waits. A later call that finds it older than
    ``refresh_s`` starts a read in a thread, and returns what is there.

    Attributes:
        s3_settings: The settings of the open corpus, if it is on S3; else None.
    """

    def __init__(
        self, source: Source, refresh_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Read nothing yet.

        Raises:
            ConfigError: ``refresh_s`` is not more than 0, or ``source`` cannot be read from.
        """
        if not refresh_s > 0:
            raise ConfigError("`refresh_s` is more than 0", field="refresh_s")
        self._read = _reader_of(source)
        settings: Settings | None = getattr(source, "settings", None)
        self.s3_settings = None if settings is None or settings.url else settings
        self._refresh_s = refresh_s
        self._clock = clock
        self._lock = threading.Lock()
        self._index: CatalogIndex | None = None
        self._read_at = 0.0
        self._background = Background("s3ec-client", self._refresh)

    def index(self) -> CatalogIndex:
        """Return the catalogue as it was last read.

        Raises:
            S3ECError: The first read failed.
        """
        index = self._index
        if index is None:
            with self._lock:
                return self._read_locked() if self._index is None else self._index
        if self._clock() - self._read_at >= self._refresh_s:
            self._background.wake()
        return index

    def read_again(self) -> CatalogIndex:
        """Read the catalogue now, and wait for it.

        Raises:
            S3ECError: It cannot be read; the rows read before stay.
        """
        with self._lock:
            return self._read_locked()

    def _read_locked(self) -> CatalogIndex:
        self._index = self._read()
        self._read_at = self._clock()
        return self._index

    def is_recent(self) -> bool:
        """True if it was read so recently that another read is not worth it."""
        return self._index is not None and self._clock() - self._read_at < _LEAST_AGE_S

    def close(self) -> None:
        """End the thread."""
        self._background.stop()

    def _refresh(self, _pause: Callable[[], None]) -> float:
        try:
            self.read_again()
        except S3ECError as exc:
            log.warning("the catalogue is not read anew, what was known stays: %s", exc)
        return self._refresh_s


def _reader_of(source: Source) -> Callable[[], CatalogIndex]:
    if isinstance(source, CatalogIndex):
        return lambda: source
    if isinstance(source, str | os.PathLike):
        path = Path(source)
        if path.suffix.lower() != ".parquet":
            raise ConfigError(
                f"`{path.name}` is no exported catalogue: it ends with .parquet", field="catalog"
            )
        return lambda: CatalogIndex.from_table(read_export(path))
    if hasattr(source, "index"):
        return source.index
    raise ConfigError(
        "`catalog` is corpus.catalog(), its index(), or the path of an exported file",
        field="catalog",
    )


def read_export(path: Path) -> pa.Table:
    """Read a catalogue that ``s3ec catalog export`` wrote as Parquet, and check each row.

    Raises:
        ConfigError: The file is absent or no catalogue, or pyarrow is not installed.
    """
    require_pyarrow()
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            batches = file.iter_batches(batch_size=4096)
            return to_table([_row(row) for batch in batches for row in batch.to_pylist()])
    except (OSError, pa.ArrowException, KeyError, TypeError, ValueError, RecursionError) as exc:
        raise ConfigError(
            f"`{path}` is no exported catalogue: {type(exc).__name__}: {exc!s:.200}",
            field="catalog",
        ) from exc


def _row(columns: dict[str, Any]) -> CatalogRow:
    for name in ("placeholder", "extra"):
        if isinstance(columns[name], str):
            columns[name] = plain_json(columns[name])
    stored_s = columns.pop("time").timestamp()
    return CatalogRow(nbytes=columns.pop("bytes"), stored_s=stored_s, **columns)
