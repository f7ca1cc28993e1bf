# SPDX-License-Identifier: Apache-2.0
"""What an engine has of s3ec, but for the hooks: a node, its fetches and its saves."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from s3ec.node import Node
from s3ec.prefetch import FetchOutcome, FetchRequest, FetchResult
from s3ec.settings import Settings
from s3ec.store.base import Store
from s3ec.tier.open_entry import OpenEntry
from tests.faults.embeddings import (
    NAMESPACE,
    ROWS,
    WIDTH,
    body_at,
    data_at,
    identifier_at,
    key_at,
    spooled_below,
)
from tests.support.waiting import DEADLINE_S, eventually

if TYPE_CHECKING:
    import pytest

    from s3ec.connector.saves import SaveQueue
    from tests.faults.site import Site


class Engine:
    """A context manager; engines that share a cache folder stand for one node's processes.

    Every embedding that it serves is compared with the encoder's, byte by byte.

    Args:
        store: The bucket; None opens the one that the settings name.
        shared: Take the process's shared node, as the connector does.
        saves: Make the save queue at once, so that it adopts what the dead left. Otherwise the
            first save makes it.
        drain_s: How long the end waits for the bucket.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        *,
        store: Store | None = None,
        shared: bool = False,
        saves: bool = False,
        overflow: Literal["block", "drop"] = "block",
        drain_s: float = 0.1,
    ) -> None:
        given = Settings.model_validate(settings)
        make = Node.shared if shared else Node
        self.node = make(given, NAMESPACE, **({} if store is None else {"store": store}))
        self.cache_dir = Path(given.cache_dir)
        self._end = self.node.release if shared else self.node.close
        self._overflow, self._drain_s = overflow, drain_s
        if saves:
            self.queue  # noqa: B018

    @classmethod
    def at(cls, site: Site, cache_dir: Path, **other: str) -> Engine:
        """One with a cache folder of its own, that waits at its end until all is confirmed."""
        return cls(site.settings(**{"cache_dir": str(cache_dir), **other}), drain_s=DEADLINE_S)

    @classmethod
    def unhedged(cls, site: Site, cache_dir: Path) -> Engine:
        """As ``at``; a slow request is not sent twice, so that requests can be counted."""
        return cls.at(site, cache_dir, hedge="false")

    @cached_property
    def queue(self) -> SaveQueue:
        from s3ec.connector.saves import SaveQueue

        return SaveQueue(self.node, budget_bytes=2**22, overflow=self._overflow)

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self, drain_s: float | None = None, *, close_s: float = 10.0) -> int:
        """End as the connector's shutdown does; how many saves the bucket has not confirmed."""
        left = 0
        if "queue" in self.__dict__:
            left = self.queue.drain(self._drain_s if drain_s is None else drain_s)
        end, self._end = self._end, lambda timeout_s: None
        end(close_s)
        assert self.count("internal_errors") == 0, self.node.counters.snapshot()
        return left

    def count(self, name: str) -> float:
        return self.node.counters.get(name)

    # -- the index -------------------------------------------------------------------------------

    def follow(self) -> None:
        """Read the index, and wait until that was done once."""
        self.node.follow_the_bucket()
        eventually(lambda: self.node.index.loaded)

    def refresh(self) -> None:
        """One look at the index."""
        self.node.loop.run(self.node.index.refresh(now=True), DEADLINE_S)

    # -- fetches ---------------------------------------------------------------------------------

    def grant(self, *numbers: int, rows: int = ROWS) -> dict[int, FetchResult]:
        """As a scheduler half does; open for as long as whoever calls this keeps the answer."""
        granted = grant(self.node, numbers, rows=rows)
        for number, one in granted.items():
            self.compare(number, one)
        return granted

    def compare(self, number: int, one: FetchResult) -> None:
        """Also long after the grant: eviction has done nothing to an open file."""
        entry = one.entry
        assert (entry is None) is (one.outcome is not FetchOutcome.READY)
        assert entry is None or read_all(entry) == body_at(number), "wrong bytes"

    def fetch(self, number: int, *, rows: int = ROWS) -> FetchResult:
        """How one fetch ends."""
        return self.grant(number, rows=rows)[number]

    def outcomes(self, *numbers: int) -> list[FetchOutcome]:
        """How fetches at the same time end."""
        granted = self.grant(*numbers)
        return [granted[number].outcome for number in numbers]

    def fetch_in_the_end(self, number: int) -> None:
        """Want it again and again, as requests do, until it is there."""
        eventually(lambda: self.fetch(number).outcome is FetchOutcome.READY)

    # -- saves -----------------------------------------------------------------------------------

    def offer(self, number: int) -> bool:
        """Queue what an encoder gave, as a worker half does; whether it was taken."""
        import torch

        from s3ec.connector.messages import Save

        tensor = torch.frombuffer(bytearray(data_at(number)), dtype=torch.bfloat16)
        return self.queue.put(identifier_at(number), Save("image", {}), tensor.view(ROWS, WIDTH))

    def save(self, *numbers: int) -> None:
        for number in numbers:
            assert self.offer(number), f"{number} was not taken"

    def save_and_wait(self, number: int) -> None:
        """Return when the bucket has answered."""
        before = self._answered
        self.save(number)
        eventually(lambda: self._answered > before)

    @property
    def _answered(self) -> float:
        return sum(map(self.count, ("save.items", "save.existed", "save_problem.bad_object")))

    def announce(self) -> None:
        """Wait until the readers were told of all that was saved: it leaves the spool then."""
        eventually(lambda: not spooled_below(self.cache_dir))


def grant(node: Node, numbers: Iterable[int], *, rows: int = ROWS) -> dict[int, FetchResult]:
    """Fetch at the same time, whatever the index says; all results, held open by them."""
    wanted = {key_at(number).digest: number for number in numbers}
    node.prefetcher.submit([FetchRequest(key_at(n), "image", rows) for n in wanted.values()])
    granted: dict[int, FetchResult] = {}

    def have_all() -> bool:
        granted.update({wanted[one.want.key.digest]: one for one in node.prefetcher.drain()})
        return len(granted) == len(wanted)

    eventually(have_all, "fetches end")
    return granted


def read_all(entry: OpenEntry) -> bytes:
    """What lies in an open file, whatever became of its name."""
    return os.pread(entry.fd, entry.nbytes + 1, 0)


def asks_for(site: Site, number: int) -> int:
    """How often one entry was asked for since the proxy was cleared."""
    return site.gets().count(key_at(number).name)


def warnings_of(caplog: pytest.LogCaptureFixture, part: str) -> list[str]:
    """What was logged as a warning or worse, and holds this."""
    return [
        record.getMessage()
        for record in caplog.records
        if record.levelno >= logging.WARNING and part in record.getMessage()
    ]
