# SPDX-License-Identifier: Apache-2.0
"""Two tenants of one bucket, and clients that call their pictures what they like."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from s3ec import codec
from s3ec.connector.messages import Save
from s3ec.identity import (
    KeyPolicy,
    digest_of_name,
    is_object_name,
    key_of_header,
)
from s3ec.prefetch import FetchOutcome, FetchRequest, FetchResult
from s3ec.tenant import Tenant
from s3ec.testing.memory_store import MemoryBucket
from tests.support.on_disk import audit_of
from tests.support.waiting import DEADLINE_S, eventually
from tests.unit.connector.processes import Process
from tests.unit.connector.scheduling import World, feature, identifier_of, request
from tests.unit.tier.cases import key_of

torch = pytest.importorskip("torch")
SaveQueue = pytest.importorskip("s3ec.connector.saves").SaveQueue

SECRETS = {"ACME": "the secret of acme, long enough", "OTHER": "the secret of another tenant"}
HASH = "ab" * 32


class Engine(Process):
    """One process of a tenant, without vLLM."""

    def __init__(self, bucket: MemoryBucket, folder: Path, tenant: str | None) -> None:
        descriptor: dict[str, Any] = {"model": "tiny"}
        if tenant:
            descriptor["tenant"] = Tenant(SECRETS[tenant].encode()).id
        reference = f"env:{tenant}" if tenant else None
        super().__init__(
            folder, shared=bucket, descriptor=descriptor, cache_dir=folder, tenant_key=reference
        )

    def save(self, identifier: str, value: float) -> list[str]:
        queue = SaveQueue(self.node, budget_bytes=2**20, overflow="block")
        assert queue.put(identifier, Save("image", {}), picture(value))
        assert queue.drain(DEADLINE_S) == 0
        stored: list[str] = queue.take_stored()
        return stored

    def fetch(self, identifier: str) -> FetchResult:
        key = self.node.naming.make_key(identifier)
        assert key is not None
        self.node.prefetcher.submit([FetchRequest(key, "image", 4)])
        eventually(lambda: self.node.prefetcher.has_news)
        (fetched,) = self.node.prefetcher.drain()
        return fetched

    def has_value(self, identifier: str, value: float) -> bool:
        fetched = self.fetch(identifier)
        held = fetched.entry
        if held is None:
            return False
        read = os.pread(held.fd, held.nbytes, held.header.data_start)
        return read == picture(value).view(torch.uint8).numpy().tobytes()

    def objects(self) -> dict[str, bytes]:
        start = self.node.layout.objects
        return {n[len(start) :]: b for n, b in self.bucket.objects.items() if n.startswith(start)}


def picture(value: float) -> torch.Tensor:
    return torch.full((4, 8), value, dtype=torch.bfloat16)


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Engine]]:
    """Starts engines on one bucket; each tenant has a cache folder, as its own user has."""
    for name, secret in SECRETS.items():
        monkeypatch.setenv(name, secret)
    bucket = MemoryBucket()
    engines: list[Engine] = []

    def start(tenant: str | None, folder: str | None = None) -> Engine:
        engines.append(Engine(bucket, tmp_path / (folder or f"tier-{tenant}"), tenant))
        return engines[-1]

    yield start
    for engine in engines:
        assert audit_of(engine.node.tier) == []
        engine.node.close(DEADLINE_S)


@pytest.mark.parametrize("identifier", ["report.png", HASH, f"my-lora:{HASH}"])
def test_one_identifier_of_two_tenants_is_two_entries(
    start: Callable[..., Engine], identifier: str
) -> None:
    """Also on one node's disk, which two tenants of one user share."""
    tenants = {name: start(name, "one-tier") for name in ("ACME", "OTHER", None)}
    for value, engine in enumerate(tenants.values()):
        assert engine.save(identifier, value) == [identifier]  # vLLM's name, inside of the engine
    for value, engine in enumerate(tenants.values()):
        assert engine.has_value(identifier, value)
    names = [name for engine in tenants.values() for name in engine.objects()]
    assert len(set(names)) == 3
    assert len({engine.node.namespace.name for engine in tenants.values()}) == 3


def test_what_a_tenant_stores_holds_no_identifier_and_is_read_by_another_process(
    start: Callable[..., Engine],
) -> None:
    for identifier in ("report.png", HASH, f"my-lora:{HASH}"):
        start("ACME", "first").save(identifier, 1)
    reader = start("ACME", "second")
    stored = reader.objects()
    assert len(stored) == 3
    for name, blob in stored.items():
        assert is_object_name(name)
        assert name.split("/")[-1].startswith("t-")
        header = codec.parse_header(blob)
        assert key_of_header(header.identifier, digest_of_name(name)) is not None
        for text in (b"report", HASH.encode(), b"my-lora", SECRETS["ACME"].encode()):
            assert text not in blob
            assert text not in name.encode()
    for identifier in ("report.png", HASH, f"my-lora:{HASH}"):
        fetched = reader.fetch(identifier)
        assert fetched.outcome is FetchOutcome.READY
        assert fetched.source == "bucket"
        assert fetched.entry is not None


def test_a_tenants_entry_in_anothers_place_is_refused(start: Callable[..., Engine]) -> None:
    """What a writer of the bucket can do who does not hold the secret: copy whole objects."""
    acme, other = start("ACME"), start("OTHER")
    acme.save("a", 1)
    acme.save("b", 2)
    ours = acme.node.naming.make_key("c")
    theirs = other.node.naming.make_key("a")
    assert ours is not None
    assert theirs is not None
    other.save("z", 3)  # so that there is a record of the modality
    (copied, *_) = acme.objects().values()
    acme.bucket.objects[acme.node.layout.object(ours)] = copied
    acme.bucket.objects[other.node.layout.object(theirs)] = copied
    for engine, identifier in ((acme, "c"), (other, "a")):
        assert engine.fetch(identifier).outcome is FetchOutcome.CORRUPT
        assert engine.node.counters.get("corrupt.identifier") == 2


def test_the_next_process_uploads_what_a_tenants_engine_left_in_the_spool(
    start: Callable[..., Engine],
) -> None:
    first = start("ACME", "tier")
    first.bucket.objects.clear()
    key = first.node.naming.make_key("report.png")
    assert key is not None
    spool = first.node.tier.open_spool(first.node.destination)
    header = codec.Header(
        key.stored,
        first.node.namespace.name,
        "image",
        codec.Shape(4, 8, "bfloat16"),
        codec.checksum(bytes(64)),
    )
    first.node.tier.writer.publish(key, [codec.encode_header(header), bytes(64)], spool=spool)
    first.node.close(DEADLINE_S)  # nobody uploaded it

    second = start("ACME", "tier")
    queue = SaveQueue(second.node, budget_bytes=2**20, overflow="drop")
    eventually(lambda: second.node.counters.get("spool.replayed") == 1)
    assert queue.drain(DEADLINE_S) == 0
    assert list(second.objects()) == [key.name]


# -- clients that choose -----------------------------------------------------------------------


def test_one_identifier_for_two_pictures_is_one_entry_and_the_first_one_stays(
    start: Callable[..., Engine],
) -> None:
    """Within one namespace an identifier means one picture; SECURITY.md says so."""
    engine = start(None)
    engine.save("report.png", 1)
    engine.save("report.png", 2)
    assert len(engine.objects()) == 1
    fresh = start(None, "another-tier")
    assert fresh.has_value("report.png", 1)


def untrusting(**role: Any) -> World:
    return World(naming=KeyPolicy(trust_client_ids=False), **role)


@pytest.mark.parametrize("consumer", [True, False])
def test_what_a_client_chose_is_neither_looked_up_nor_saved_where_that_is_not_trusted(
    consumer: bool,
) -> None:
    world = untrusting(producer=True, consumer=consumer)
    key = key_of("report.png")
    world.index.add(key)  # stored by somebody who trusts
    asker = request("r", feature("report.png", raw=True))
    assert world.run(asker) == [False]
    plan = world.step()
    assert (plan.loads, plan.saves, world.wanted) == ([], {}, [])
    assert world.counters.get("ids.refused") == 1 + consumer
    assert world.counters.get("refused_identifiers") == 0


def test_a_content_hash_is_served_where_clients_are_not_trusted() -> None:
    world = untrusting(producer=True)
    world.bring("a")
    asker = request("r", feature("a"), feature("new", 20))
    assert world.run(asker) == [True, False]
    plan = world.step()
    assert [load.identifier for load in plan.loads] == [identifier_of("a")]
    assert list(plan.saves) == [identifier_of("new")]
    assert world.counters.get("ids.refused") == 0


def test_a_request_without_pixels_fails_alone_where_its_identifier_is_refused() -> None:
    world = untrusting()
    asker = request("r", feature("report.png", raw=True, pixels=False))
    assert not world.ask(asker)
    assert world.half.take_unavailable_requests() == {"r"}
