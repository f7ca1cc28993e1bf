# SPDX-License-Identifier: Apache-2.0
"""Writes embeddings as objects, once each, after the bucket's records allow them."""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Sequence
from contextlib import suppress

from s3ec.codec import Header
from s3ec.errors import ConflictError
from s3ec.identity import MAX_REVISION, Key
from s3ec.modality import Record
from s3ec.node import Node
from s3ec.store.base import Store
from s3ec.store.open import with_conditional_put

log = logging.getLogger(__name__)


class Answer(enum.Enum):
    """What the bucket made of an embedding."""

    STORED = enum.auto()
    EXISTED = enum.auto()
    REFUSED = enum.auto()
    """It may never be stored."""


class ObjectWriter:
    """The loop's thread only; any number of calls at once."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._store: Store | None = None
        self._ready: asyncio.Lock | None = None
        self._disagreed: set[str] = set()

    async def write(
        self, key: Key, revision: int, header: Header, pieces: Sequence[bytes | memoryview]
    ) -> Answer:
        """Write one revision of an entry: the first that this node does not know to be bad.

        Args:
            pieces: Of the whole object.

        Raises:
            UnavailableError, AccessError: The bucket did not do its part; it may later.
        """
        if revision > MAX_REVISION:
            self._node.counters.add("save_problem.revisions")
            return Answer.REFUSED
        store = await self._prepared()
        mine = Record(header.shape.width, header.shape.dtype)
        record = await self._node.records.settle(header.modality, mine)
        if record != mine:
            self._refuse(header.modality, record, mine)
            return Answer.REFUSED
        try:
            await store.put_if_absent(self._node.layout.object(key, revision), pieces)
        except ConflictError:
            self._node.counters.add("save.existed")
            return Answer.EXISTED
        return Answer.STORED

    def _refuse(self, modality: str, record: Record, mine: Record) -> None:
        self._node.counters.add("save_problem.record")
        if modality not in self._disagreed:
            self._disagreed.add(modality)
            log.error(
                "nothing of modality %s is saved: namespace %s holds %s, this model gives %s",
                modality,
                self._node.namespace.name,
                record,
                mine,
            )

    async def _prepared(self) -> Store:
        """The store for writing; the first call probes it and writes the descriptor."""
        if self._ready is None:
            self._ready = asyncio.Lock()
        async with self._ready:
            if self._store is None:
                store = await with_conditional_put(self._node.store)
                with suppress(ConflictError):
                    await store.put_if_absent(
                        self._node.layout.descriptor, [self._node.namespace.to_json()]
                    )
                self._store = store
            return self._store
