# SPDX-License-Identifier: Apache-2.0
"""What an engine has of s3ec, but for the hooks, over a real transport on a real bucket."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Literal

import pytest

from s3ec.identity import OBJECT_SUFFIX, Key
from s3ec.node import Node
from s3ec.prefetch import FetchOutcome, FetchRequest, FetchResult
from s3ec.settings import Settings
from tests.faults.living import ROWS, object_at
from tests.faults.saving import NAMESPACE, WIDTH, data_at, identifier_at, key_at
from tests.faults.site import LAYOUT, OBJECTS, Site, eventually

if TYPE_CHECKING:
    from s3ec.connector.saves import SaveQueue

torch = pytest.importorskip("torch")

Kind = Literal["aioboto3", "obstore"]

PATIENCE_S = 30.0


def body_at(number: int) -> bytes:
    """The right bytes of this number's object."""
    return b"".join(object_at(number))


class Engine:
    """A node and its save queue; those that share a cache folder stand for one node's processes.

    Saves begin with the first one.
    """

    def __init__(self, settings: dict[str, str], *, drain_s: float = 0.1) -> None:
        self.node = Node(Settings.model_validate(settings), NAMESPACE)
        self._drain_s = drain_s
        self._saves: SaveQueue | None = None

    @classmethod
    def at(cls, site: Site, cache_dir: Path, **other: str) -> Engine:
        """One with a cache folder of its own, that waits at its end until all is confirmed."""
        return cls(site.settings(**{"cache_dir": str(cache_dir), **other}), drain_s=PATIENCE_S)

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._saves is not None:
            self._saves.drain(self._drain_s)
        self.node.close(10)
        assert self.count("internal_errors") == 0

    def count(self, name: str) -> float:
        return self.node.counters.get(name)

    def follow(self) -> None:
        """Read the index, and wait until that was done once."""
        self.node.follow_the_bucket()
        eventually(lambda: self.node.index.loaded)

    def refresh(self) -> None:
        """One look at the index, and at what other processes of the node noted."""
        self.node.loop.run(self.node.index.refresh(), PATIENCE_S)
        self.node.loop.run(self.node.apply_bad_objects(), PATIENCE_S)

    def fetch(self, number: int, *, rows: int = ROWS) -> FetchResult:
        """As a scheduler half does. What is served has the right bytes, and is unpinned."""
        return self._fetch(number, rows=rows)[0]

    def outcomes(self, *numbers: int) -> list[FetchOutcome]:
        """How fetches at the same time end."""
        return [fetched.outcome for fetched in self._fetch(*numbers, rows=ROWS)]

    def fetch_in_the_end(self, number: int) -> None:
        """Want it again and again, as requests do, until it is there with the right bytes."""
        eventually(lambda: self.fetch(number).outcome is FetchOutcome.READY)

    def _fetch(self, *numbers: int, rows: int) -> list[FetchResult]:
        prefetcher = self.node.prefetcher
        prefetcher.submit([FetchRequest(key_at(number), "image", rows) for number in numbers])
        ended: dict[bytes, FetchResult] = {}

        def have_ended() -> bool:
            ended.update({one.want.key.digest: one for one in prefetcher.drain()})
            return len(ended) == len(numbers)

        eventually(have_ended)
        fetched = [ended[key_at(number).digest] for number in numbers]
        for number, one in zip(numbers, fetched, strict=True):
            assert (one.pin is None) is (one.outcome is not FetchOutcome.READY)
            if one.pin is not None:
                assert one.pin.path.read_bytes() == body_at(number)
                prefetcher.release([one.pin])
        return fetched

    def save(self, *numbers: int) -> None:
        """Queue what an encoder gave, as a worker half does."""
        from s3ec.connector.messages import Save
        from s3ec.connector.saves import SaveQueue

        if self._saves is None:
            self._saves = SaveQueue(self.node, budget_bytes=2**22, overflow="block")
        for number in numbers:
            tensor = torch.frombuffer(bytearray(data_at(number, ROWS)), dtype=torch.bfloat16)
            tensor = tensor.view(ROWS, WIDTH)
            assert self._saves.put(identifier_at(number), Save("image", {}), tensor)

    def save_and_wait(self, number: int) -> None:
        """Return when the bucket has answered."""
        self.save(number)
        saves = self._saves
        assert saves is not None
        eventually(lambda: identifier_at(number) not in saves._pending)

    def announce(self) -> None:
        """Tell the readers at once, and wait until that is confirmed."""
        saves = self._saves
        assert saves is not None
        saves._uploads.flush()
        eventually(lambda: not saves._uploads.unannounced)


def stock(site: Site, *numbers: int) -> None:
    """Put entries and the record of their width into the bucket, past the proxy."""
    site.stock_record(WIDTH)
    for number in numbers:
        site.stock(key_at(number).name, body_at(number))


def gets(site: Site, number: int) -> list[str]:
    """What was asked for since the proxy was cleared: `r0`, `r1`... of one entry, in order."""
    stem = key_at(number).name.removesuffix(OBJECT_SUFFIX)
    asked = []
    for request in site.proxy.requests:
        below = request.target.partition("?")[0].rpartition(OBJECTS)[2]
        if request.method == "GET" and below.startswith(stem):
            asked.append(below[len(stem) :].removesuffix(OBJECT_SUFFIX).lstrip(".") or "r0")
    return asked


def overwrite(site: Site, key: Key, body: bytes, revision: int = 0) -> None:
    """Change an object past all conditions, as only an outsider can."""
    site.client.put_object(Bucket=site.bucket, Key=LAYOUT.object(key, revision), Body=body)
