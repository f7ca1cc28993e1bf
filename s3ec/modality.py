# SPDX-License-Identifier: Apache-2.0
"""The width and dtype of a namespace's embeddings, recorded once per modality by a producer.

A consumer knows how many rows a request needs but not how wide they are: models that stack
features are wider than their text model. Records are immutable objects, so that two first
producers cannot disagree: the second one reads the first one's record.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from s3ec.codec import DTYPES
from s3ec.errors import AccessError, ConflictError, CorruptEntryError, UnavailableError
from s3ec.identity import Layout, canonical_json
from s3ec.safetensors_file import plain_json
from s3ec.store.base import Store
from s3ec.store.places import served_by

log = logging.getLogger(__name__)

_RECORD_LIMIT = 4096
_MAX_WIDTH = 1_000_000
_DTYPE_NAMES = frozenset(name for name, _ in DTYPES.values())
# How long "no record yet" is cached before the bucket is asked again. A request that waits for the
# first embedding of a namespace is retried about as often.
_ABSENT_TTL_S = 0.05
NEAR_TTL_S = 10.0
"""How long a replica's record is cached before home is asked again."""
SETTLED_S = 300.0
"""How long a writer trusts that descriptor and records exist: `s3ec ns rm` may run beside an idle
engine, which has stored nothing for ten minutes then."""


@dataclass(frozen=True, slots=True)
class Record:
    """Width and dtype of all embeddings of one modality.

    Attributes:
        width: Values per embedding.
        dtype: torch name, such as ``bfloat16``.
    """

    width: int
    dtype: str


_UNKNOWN = None, -math.inf


class ModalityRecords:
    """Reads and writes the records of one namespace; used from one event loop.

    States of a modality: unknown; absent, for a moment; settled, which was seen in the bucket, for
    SETTLED_S; known, which is settled no more. A read of an unknown one makes it absent or settled.
    ``settle`` makes any other one settled, by a write. A known one becomes absent only if a read
    finds nothing: it stays if the bucket fails. A replica's record, read while home does not
    answer, changes none of that: it is expected, for NEAR_TTL_S.
    """

    def __init__(
        self, store: Store, layout: Layout, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store = store
        self._layout = layout
        self._clock = clock
        # The record, or None for absent, and until when that is settled or cached.
        self._seen: dict[str, tuple[Record | None, float]] = {}
        self._told: dict[str, tuple[Record, float]] = {}  # a replica's record, and its expiry
        self._reading: dict[str, asyncio.Task[Record | None]] = {}

    def known(self, modality: str) -> Record | None:
        """Return the record if it was read from home already, from memory."""
        return self._seen.get(modality, _UNKNOWN)[0]

    def expected(self, modality: str) -> Record | None:
        """Return the record if it is known or a replica had it recently, from memory."""
        record, until_s = self._told.get(modality, _UNKNOWN)
        return self.known(modality) or (record if self._clock() < until_s else None)

    async def get(self, modality: str) -> Record | None:
        """Return the record, or None if no producer wrote a usable one yet.

        Raises:
            UnavailableError, AccessError: The bucket could not be asked.
        """
        record, until_s = self._seen.get(modality, _UNKNOWN)
        if record is not None or self._clock() < until_s:
            return record
        return self.expected(modality) or await self._look(modality)

    async def _look(self, modality: str) -> Record | None:
        """Read the record, even a known one; a known record stays if the bucket fails."""
        with served_by() as replicas:
            body = await self._read(self._layout.modality(modality))
        record = parse_record(body) if body is not None else None
        if replicas:
            if record is not None:
                self._told[modality] = record, self._clock() + NEAR_TTL_S
            return self.known(modality) or record
        self._told.pop(modality, None)
        if record is None and body is not None:
            log.error("%s is not a modality record", self._layout.modality(modality))
        believed_s = _ABSENT_TTL_S if record is None else SETTLED_S
        self._seen[modality] = record, self._clock() + believed_s
        return record

    async def get_soon(self, modality: str, patience_s: float) -> Record | None:
        """As get, for a caller that can do without. One read at a time; it outlives its callers.

        Args:
            patience_s: How long the caller that starts the read waits; others do not wait.

        Raises:
            UnavailableError, AccessError: The bucket could not be asked, or takes longer.
        """
        record = self.known(modality)
        if record is not None:
            return record
        reading = self._reading.get(modality)
        if reading is None:
            reading = asyncio.create_task(self.get(modality), name="s3ec-record")
            self._reading[modality] = reading
            reading.add_done_callback(lambda ended: self._end_reading(modality, ended))
            await asyncio.wait([reading], timeout=patience_s)
        if not reading.done():
            raise UnavailableError(f"the record of {modality} does not come")
        return reading.result()

    def _end_reading(self, modality: str, reading: asyncio.Task[Record | None]) -> None:
        del self._reading[modality]
        if not reading.cancelled():
            reading.exception()  # marks it as retrieved; a waiting caller gets it too

    async def _read(self, name: str) -> bytes | None:
        try:
            body = await self._store.get(name, max_bytes=_RECORD_LIMIT)
            return None if body is None else bytes(body)
        except CorruptEntryError as exc:
            if exc.reason == "size":
                return b""  # too large for a record
            raise UnavailableError(f"half a reply for {name}: {exc}") from exc

    async def settle(self, modality: str, mine: Record, *, store: Store | None = None) -> Record:
        """Return the namespace's record: ``mine`` if none was written before.

        SETTLED_S after it was last seen, it is written again if it is absent.

        Args:
            store: Writes it; None for the store that is read. If the server ignores
                ``If-None-Match: *``, only a store that checks first keeps an earlier record.

        Raises:
            UnavailableError, AccessError: The bucket could not be written to, or it could not be
                read while nothing is known.
        """
        known, until_s = self._seen.get(modality, _UNKNOWN)
        now_s = self._clock()
        if known is not None:
            if now_s < until_s:
                return known
            # Other callers use the known record meanwhile: one request for all.
            self._seen[modality] = known, now_s + SETTLED_S
        body = canonical_json({"width": mine.width, "dtype": mine.dtype}).encode()
        try:
            writable = self._store if store is None else store
            await writable.put_if_absent(self._layout.modality(modality), [body])
        except ConflictError:
            if self.known(modality) is None:
                self._seen.pop(modality, None)
            try:
                return await self._look(modality) or mine  # it may have changed by now
            except (UnavailableError, AccessError):
                if known is None:
                    raise
                return known  # most likely the same; checked again after SETTLED_S
        except BaseException:
            if (record := self.known(modality)) is not None:
                self._seen[modality] = record, -math.inf
            raise
        self._seen[modality] = mine, now_s + SETTLED_S
        return mine


def parse_record(body: bytes) -> Record | None:
    try:
        content = plain_json(body.decode("utf-8"))
        width, dtype = content["width"], content["dtype"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    if type(width) is not int or not 0 < width <= _MAX_WIDTH:
        return None
    if not isinstance(dtype, str) or dtype not in _DTYPE_NAMES:
        return None
    return Record(width, dtype)
