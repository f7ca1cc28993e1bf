# SPDX-License-Identifier: Apache-2.0
"""A real bucket with an index in it, and nodes that serve what the index lets them ask for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from s3ec.index import maker
from s3ec.index.child import Job, in_process
from s3ec.index.local import NodeFolder
from s3ec.index.maker import Made, Verified
from s3ec.index.names import ServerClock
from s3ec.node import Node
from s3ec.prefetch import FetchOutcome, FetchResult
from s3ec.settings import Settings
from s3ec.testing.server import S3Server
from tests.faults.embeddings import (
    ENTRY_BYTES,
    LAYOUT,
    NAMESPACE,
    RECORD,
    body_at,
    key_at,
)
from tests.faults.engine import grant, read_all
from tests.support.indexes import delta_bytes, delta_name
from tests.support.on_disk import audit_of
from tests.support.on_disk import evict as evict_copy
from tests.support.waiting import eventually

_TIMEOUT_S = 120.0


class Bucket:
    """A bucket, or one prefix of it, written and looked at past every node and proxy.

    Args:
        server: Of which only a client is used.
        prefix: So that one bucket holds any number of corpora.
        url: Where nodes find it, if that is not the server itself.
    """

    def __init__(self, server: S3Server, bucket: str, prefix: str = "", url: str = "") -> None:
        self.name, self.prefix = bucket, prefix
        self.url = url or server.endpoint_url
        self.client = server.client()
        self._root = f"{prefix}/" if prefix else ""
        self._server = server

    def settings(self, cache_dir: Path, **other: str) -> dict[str, str]:
        return {
            "bucket": self.name,
            "prefix": self.prefix,
            "endpoint_url": self.url,
            "region": "us-east-1",
            "cache_dir": str(cache_dir),
            "min_free_bytes": "0",
            # A busy machine is not the fault that these tests are about.
            "connect_timeout_s": "30",
            "read_timeout_s": "60",
            "defer_timeout_s": "60",
            # Requests are counted here, and those are second ones.
            "hedge": "false",
            "transport": "obstore",
            **other,
        }

    def put(self, name: str, body: bytes) -> None:
        self.client.put_object(Bucket=self.name, Key=self._root + name, Body=body)
        if not body:
            # The next PUT on this connection would hang (SeaweedFS 4.48 with this client).
            self.client = self._server.client()

    def get(self, name: str) -> bytes:
        reply = self.client.get_object(Bucket=self.name, Key=self._root + name)
        body: bytes = reply["Body"].read()
        return body

    def delete(self, *names: str) -> None:
        for name in names:
            self.client.delete_object(Bucket=self.name, Key=self._root + name)

    def names(self, below: str = "") -> list[str]:
        pages = self.client.get_paginator("list_objects_v2").paginate(
            Bucket=self.name, Prefix=self._root + below
        )
        keys = [entry["Key"] for page in pages for entry in page.get("Contents", ())]
        return sorted(key.removeprefix(self._root) for key in keys)

    def stock(self, *numbers: int) -> None:
        """Objects and the modality's record, announced by nobody."""
        self.put(LAYOUT.modality("image"), RECORD)
        for number in numbers:
            self.put(LAYOUT.object(key_at(number)), body_at(number))

    def announce(self, *numbers: int, ago_s: float = 0.0, nbytes: int = ENTRY_BYTES) -> str:
        """One delta of these entries, as a writer of then wrote it; answers its name."""
        name = delta_name(LAYOUT, ago_s=ago_s)
        self.put(name, delta_bytes({key_at(n).digest: nbytes for n in numbers}, LAYOUT))
        return name


@contextmanager
def noding(settings: dict[str, str], *, audit: bool = True) -> Iterator[Node]:
    """A node that looks at the bucket when it is told to, and downloads by itself."""
    made: list[Node] = []

    async def here(job: Job) -> str:
        return await in_process(made[0].store)(job)

    with mock.patch("s3ec.node.in_child", return_value=here):
        made.append(Node(Settings.model_validate(settings), NAMESPACE))
    node = made[0]
    try:
        yield node
        assert node.counters.get("internal_errors") == 0
        assert not audit or audit_of(node.tier) == []
    finally:
        node.close(5)


def refresh(node: Node, times: int = 1) -> None:
    for _ in range(times):
        node.loop.run(node.index.refresh(now=True), _TIMEOUT_S)


def fetch(node: Node, numbers: Iterable[int]) -> dict[int, FetchResult]:
    """Fetch, whatever the index says; bytes are compared."""
    got = grant(node, numbers)
    for number, one in got.items():
        if one.outcome is FetchOutcome.READY:
            assert one.entry is not None
            assert read_all(one.entry) == body_at(number), "wrong bytes"
    return got


def serve(node: Node, numbers: Iterable[int]) -> set[int]:
    """What a scheduler would serve of these: it asks for what the index holds, and no more."""
    without_record = node.counters.get("mismatch.no_record")
    worth = [number for number in numbers if node.index.maybe_contains(key_at(number))]
    found = fetch(node, worth)
    unknown = node.counters.get("mismatch.no_record") > without_record
    expected = {FetchOutcome.READY, FetchOutcome.ABSENT} | (
        {FetchOutcome.MISMATCH} if unknown else set()
    )
    assert {one.outcome for one in found.values()} <= expected
    return {number for number, one in found.items() if one.outcome is FetchOutcome.READY}


def evict(node: Node, numbers: Iterable[int]) -> None:
    """Have the bucket be asked again."""

    def gone(number: int) -> bool:
        evict_copy(node.tier, key_at(number))
        return not node.tier.entries.contains(key_at(number))

    for number in numbers:
        eventually(lambda number=number: gone(number))  # type: ignore[misc]
        node.local.discard(key_at(number))


@contextmanager
def unions_at_once() -> Iterator[None]:
    """Any delta makes a union due."""
    with mock.patch.multiple(maker, UNION_ROWS=0, UNION_SHARE=0.0, UNION_EVERY_S=-60.0):
        yield


def run_union(node: Node) -> Made | None:
    folder = NodeFolder.of(node.tier.folders, NAMESPACE.name)
    with unions_at_once():
        return node.loop.run(maker.make_union(node.store, LAYOUT, folder), _TIMEOUT_S)


def run_rebuild(node: Node, *, ago_s: float = 0.0) -> Made:
    """A listing, named as if it had begun so long ago: the server's clock has whole seconds."""

    class Clock(ServerClock):
        def now_s(self) -> float:
            return super().now_s() - ago_s

    with mock.patch.object(maker, "ServerClock", Clock):
        return node.loop.run(maker.rebuild(node.store, LAYOUT), _TIMEOUT_S)


def run_verify(node: Node) -> Verified:
    """Objects of this moment count as unannounced, too."""
    with mock.patch.object(maker, "YOUNG_S", -3600.0):
        return node.loop.run(maker.verify(node.store, LAYOUT), _TIMEOUT_S)
