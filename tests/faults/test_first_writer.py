# SPDX-License-Identifier: Apache-2.0
"""No serving engine overwrites or deletes an entry, in the whole of its life.

A real server behind a proxy that records what is asked of it: saves, saves of what is there,
fetches, a bad entry, what vanished, the clean-up of the index, and the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from s3ec.connector.messages import Save
from s3ec.node import Node
from s3ec.prefetch import FetchOutcome, FetchRequest, FetchResult
from s3ec.settings import Settings
from s3ec.testing.server import LocalS3
from tests.faults.saving import NAMESPACE, ROWS, WIDTH, data_at, identifier_at, key_at
from tests.faults.site import OBJECTS, Site, eventually

torch = pytest.importorskip("torch")
SaveQueue = pytest.importorskip("s3ec.connector.saves").SaveQueue

COUNT = 3
WRITES = {"PUT", "POST", "DELETE", "PATCH"}


@contextmanager
def engine(site: Site, folder: str, transport: str) -> Iterator[Node]:
    cache_dir = str(site.cache_dir / folder)
    given = site.settings(transport=transport, index_refresh_s="0.1", cache_dir=cache_dir)
    node = Node(Settings.model_validate(given), NAMESPACE)
    node.follow_the_bucket()
    node.compact_the_index()
    try:
        yield node
    finally:
        node.close(10)


def save(node: Node, *numbers: int) -> None:
    queue = SaveQueue(node, budget_bytes=2**20, overflow="block")
    for number in numbers:
        tensor = torch.frombuffer(bytearray(data_at(number)), dtype=torch.bfloat16)
        assert queue.put(identifier_at(number), Save("image", {}), tensor.view(ROWS, WIDTH))
    assert queue.drain(30) == 0


def fetch(node: Node, number: int) -> FetchResult:
    node.prefetcher.submit([FetchRequest(key_at(number), "image", ROWS)])
    eventually(lambda: node.prefetcher.has_news)
    (fetched,) = node.prefetcher.drain()
    if fetched.pin is not None:
        node.prefetcher.release([fetched.pin])
    return fetched


@pytest.mark.parametrize("transport", ["aioboto3", "obstore"])
def test_in_an_engines_life_an_entry_is_written_once_and_conditionally(
    site: Site, local_s3: LocalS3, monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    for name, value in local_s3.env().items():
        monkeypatch.setenv(name, value)
    if transport == "obstore":
        pytest.importorskip("obstore")
    with engine(site, "first", transport) as first:
        save(first, *range(COUNT))
    before = {name: site.body(name) for name in site.objects()}
    assert len(before) == COUNT

    bad = key_at(0).name
    site.client.put_object(Bucket=site.bucket, Key=OBJECTS[1:] + bad, Body=b"x" * 100)
    gone = key_at(1).name
    site.client.delete_object(Bucket=site.bucket, Key=OBJECTS[1:] + gone)
    with engine(site, "second", transport) as second:
        eventually(lambda: second.index.maybe_contains(key_at(2)))
        assert fetch(second, 0).outcome is FetchOutcome.CORRUPT
        assert fetch(second, 1).outcome is FetchOutcome.ABSENT
        assert fetch(second, 2).outcome is FetchOutcome.READY
        save(second, *range(COUNT))  # what a producer does that encoded them again
        assert second.counters.get("save.items") >= 1  # what vanished
        assert second.counters.get("save.existed") >= 1

    after = {name: site.body(name) for name in site.objects()}
    assert after == after | before | {bad: b"x" * 100}  # nothing there was changed or deleted
    requests = [one for one in site.proxy.requests if OBJECTS in one.target]
    writes = [one for one in requests if one.method in WRITES]
    assert len(writes) >= 2 * COUNT
    for one in writes:
        assert one.method == "PUT"
        assert one.headers.get("if-none-match") == "*"
        assert one.target.partition("?")[2] in ("", "x-id=PutObject")
    # Nor are objects deleted many at a time, with their names in the body.
    assert [one for one in site.proxy.requests if one.method == "POST"] == []
