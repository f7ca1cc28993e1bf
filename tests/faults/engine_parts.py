# SPDX-License-Identifier: Apache-2.0
"""One engine's node and save queue in this process, over a real transport to a real server."""

from __future__ import annotations

from types import TracebackType
from typing import Literal

import pytest

from s3ec.connector.plan import Save
from s3ec.connector.saves import SaveQueue
from s3ec.node import Node
from s3ec.prefetch import Fetched, Outcome, Want
from s3ec.settings import Settings
from tests.faults.living import ROWS, object_at
from tests.faults.saving import NAMESPACE, WIDTH, data_at, identifier_at, key_at
from tests.faults.site import Site, eventually

torch = pytest.importorskip("torch")

Kind = Literal["aioboto3", "obstore"]


def stock(site: Site, *numbers: int) -> None:
    """Put entries and the record of their width into the bucket, past the proxy."""
    site.stock_record(WIDTH)
    for number in numbers:
        site.stock(key_at(number).name, b"".join(object_at(number)))


class Parts:
    """What an engine has of s3ec, but for the hooks; saves begin with the first one."""

    def __init__(self, settings: dict[str, str]) -> None:
        self.node = Node(Settings.model_validate(settings), NAMESPACE)
        self._queue: SaveQueue | None = None

    def __enter__(self) -> Parts:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._queue is not None:
            self._queue.drain(0.1)
        self.node.close(10)
        assert self.node.counters.get("internal_errors") == 0

    def follow(self) -> None:
        """Read the index, and wait until that was done once."""
        self.node.follow_the_bucket()
        eventually(lambda: self.node.index.loaded)

    def fetch(self, *numbers: int) -> list[Outcome]:
        """How fetches of these entries end; those that are ready have the right bytes."""
        prefetcher = self.node.prefetcher
        prefetcher.submit([Want(key_at(number), "image", ROWS) for number in numbers])
        ended: dict[bytes, Fetched] = {}

        def have_ended() -> bool:
            ended.update({one.want.key.digest: one for one in prefetcher.drain()})
            return len(ended) == len(numbers)

        eventually(have_ended)
        for number in numbers:
            pin = ended[key_at(number).digest].pin
            if pin is not None:
                assert pin.path.read_bytes() == b"".join(object_at(number))
                prefetcher.release([pin])
        return [ended[key_at(number).digest].outcome for number in numbers]

    def fetch_in_the_end(self, number: int) -> None:
        """Want it again and again, as requests do, until it is there with the right bytes."""
        eventually(lambda: self.fetch(number) == [Outcome.READY])

    def save(self, *numbers: int) -> None:
        """Queue what an encoder gave."""
        if self._queue is None:
            self._queue = SaveQueue(self.node, budget_bytes=2**22, overflow="drop")
        for number in numbers:
            tensor = torch.frombuffer(bytearray(data_at(number, ROWS)), dtype=torch.bfloat16)
            taken = self._queue.put(
                identifier_at(number), Save("image", {}), tensor.view(ROWS, WIDTH)
            )
            assert taken

    def counted(self, name: str) -> float:
        return self.node.counters.get(name)
