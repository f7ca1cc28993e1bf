# SPDX-License-Identifier: Apache-2.0
"""One engine's fetches and saves on a real bucket, without the engine."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

import pytest

from s3ec.identity import OBJECT_SUFFIX, Key
from s3ec.node import Node
from s3ec.prefetch import Fetched, Outcome, Want
from s3ec.settings import Settings
from tests.faults.living import ROWS, object_at
from tests.faults.saving import NAMESPACE, WIDTH, data_at, identifier_at, key_at
from tests.faults.site import LAYOUT, OBJECTS, Site, eventually

torch = pytest.importorskip("torch")

PATIENCE_S = 30.0


def body_at(number: int) -> bytes:
    """The right bytes of this number's object."""
    return b"".join(object_at(number))


class Engine:
    """A node with a save queue; those that share a cache folder stand for one node's processes."""

    def __init__(self, site: Site, cache_dir: Path, *, saves: bool = True, **other: str) -> None:
        from s3ec.connector.saves import SaveQueue

        settings = site.settings(**{"cache_dir": str(cache_dir), **other})
        self.site = site
        self.node = Node(Settings.model_validate(settings), NAMESPACE)
        self.queue = SaveQueue(self.node, budget_bytes=2**22, overflow="block") if saves else None

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self.queue is not None:
            self.queue.drain(PATIENCE_S)
        self.node.close(10)
        assert self.count("internal_errors") == 0

    def count(self, name: str) -> float:
        return self.node.counters.get(name)

    def refresh(self) -> None:
        """One look at the index, and at what other processes of the node noted."""
        self.node.loop.run(self.node.index.refresh(), PATIENCE_S)
        self.node.loop.run(self.node._heed_bad_objects(), PATIENCE_S)

    def fetch(self, number: int, *, rows: int = ROWS) -> Fetched:
        """As a scheduler half does. What is served was compared, and is unpinned."""
        self.node.prefetcher.submit([Want(key_at(number), "image", rows)])
        done: list[Fetched] = []
        eventually(lambda: bool(done.extend(self.node.prefetcher.drain()) or done))
        pin = done[0].pin
        assert (pin is None) is (done[0].outcome is not Outcome.READY)
        if pin is not None:
            assert pin.path.read_bytes() == body_at(number)
            self.node.prefetcher.release([pin])
        return done[0]

    def save(self, number: int) -> None:
        """As a worker half does after an encode; returns when the bucket has answered."""
        from s3ec.connector.plan import Save

        assert self.queue is not None
        values = bytearray(data_at(number, ROWS))
        tensor = torch.frombuffer(values, dtype=torch.bfloat16).view(ROWS, WIDTH)
        assert self.queue.put(identifier_at(number), Save("image", {}), tensor)
        eventually(lambda: identifier_at(number) not in self.queue._pending)  # type: ignore[union-attr]

    def announce(self) -> None:
        """Tell the readers at once, and wait until that is confirmed."""
        assert self.queue is not None
        self.queue._uploads.flush()
        eventually(lambda: not self.queue._uploads.unannounced)  # type: ignore[union-attr]


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
