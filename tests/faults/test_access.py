# SPDX-License-Identifier: Apache-2.0
"""Identities that may do one half: reading works for who may read, saving for who may write."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from s3ec.dev.rigs.proxy import Exchange, FaultProxy, Rule
from s3ec.dev.rigs.proxy_faults import s3_error
from s3ec.prefetch import FetchOutcome
from s3ec.testing.server import Identity, LocalS3
from tests.faults.embeddings import key_at
from tests.faults.engine import Engine, warnings_of
from tests.faults.site import Site
from tests.support.waiting import eventually

CONSUMER = Identity("consumer", may=("s3:GetObject", "s3:ListBucket"))
PRODUCER = Identity("producer", may=("s3:GetObject", "s3:ListBucket", "s3:PutObject"))
BLIND = Identity("blind", may=("s3:GetObject",))
WRITER = Identity("writer", may=("s3:PutObject",))


@pytest.fixture(scope="module")
def guarded() -> Iterator[LocalS3]:
    with LocalS3(identities=[CONSUMER, PRODUCER, BLIND, WRITER]) as server:
        yield server


@pytest.fixture
def site(guarded: LocalS3, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Site]:
    bucket = guarded.create_bucket(f"access-{abs(hash(request.node.name)) % 10**9}")
    with FaultProxy(guarded.endpoint_url) as proxy:
        yield Site(proxy, bucket, guarded, tmp_path / "cache")


def become(who: Identity, guarded: LocalS3, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in guarded.env(who).items():
        monkeypatch.setenv(name, value)


class DenyAbsent:
    """What S3 answers to who may not list: 403 where the server behind says 404."""

    def __init__(self) -> None:
        self.denied = 0

    async def apply(self, exchange: Exchange) -> None:
        reply = await exchange.forward()
        if reply.status == 404:
            self.denied += 1
            answer = s3_error(403, "AccessDenied")
            reply = replace(reply, status=403, headers=dict(answer.headers), body=answer.body)
        await exchange.send(reply)


def test_a_consumer_with_get_and_list_reads_and_its_saves_wait_in_the_spool(
    site: Site,
    guarded: LocalS3,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    site.stock(0, 1)
    site.announce(0, 1)
    become(CONSUMER, guarded, monkeypatch)
    with Engine(site.settings()) as engine:
        engine.follow()
        assert engine.node.index.maybe_contains(key_at(0))
        assert engine.outcomes(0, 7) == [FetchOutcome.READY, FetchOutcome.ABSENT]
        engine.save(2, 3)
        eventually(lambda: engine.count("save_problem.denied") >= 1)
        engine.fetch_in_the_end(1)
        assert site.objects() == {key_at(0).name, key_at(1).name}
        assert engine.count("save.items") == 0
        assert len(site.spooled()) == 2
        # And served from this node meanwhile, as what an encoder gave.
        assert engine.outcomes(2) == [FetchOutcome.READY]
    assert len(site.spooled()) == 2
    assert "s3:PutObject" in warnings_of(caplog, "uploads are failing")[0]


def test_a_producer_without_leave_to_delete_probes_writes_and_announces(
    site: Site, guarded: LocalS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    become(PRODUCER, guarded, monkeypatch)
    with Engine(site.settings()) as engine:
        engine.follow()
        engine.save(0, 1)
        names = {key_at(0).name, key_at(1).name}
        digests = {key_at(0).digest, key_at(1).digest}
        eventually(lambda: site.objects() == names and site.announced() == digests)
        eventually(lambda: not site.spooled())
        assert engine.count("save.items") == 2
        assert engine.count("save_problem.denied") == 0
        assert not engine.node.breaker.is_open
    assert not [request for request in site.proxy.requests if request.method == "DELETE"]
    become(CONSUMER, guarded, monkeypatch)
    other = site.settings(cache_dir=str(site.cache_dir.parent / "other"))
    with Engine(other) as engine:
        engine.follow()
        assert engine.outcomes(0, 1) == [FetchOutcome.READY] * 2


def test_a_writer_that_may_not_read_saves_and_announces(
    site: Site, guarded: LocalS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    become(WRITER, guarded, monkeypatch)
    with Engine(site.settings()) as engine:
        engine.node.follow_the_bucket()
        eventually(lambda: engine.count("index.refresh_failed") > 0)
        engine.save(0)
        eventually(lambda: site.announced() == {key_at(0).digest})
        assert engine.count("save.items") == 1
    assert site.objects() == {key_at(0).name}


def test_an_absent_key_that_is_denied_is_a_miss_named_once(
    site: Site,
    guarded: LocalS3,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    site.stock(0)
    deny = DenyAbsent()
    site.proxy.add(Rule(deny, method="GET"))
    become(BLIND, guarded, monkeypatch)
    with Engine(site.settings()) as engine:
        engine.node.follow_the_bucket()
        eventually(lambda: engine.count("index.refresh_failed") > 0)
        (line,) = warnings_of(caplog, "cannot read the index")
        assert "s3:ListBucket" in line
        assert engine.outcomes(0) == [FetchOutcome.READY]
        for absent in range(10, 12):
            assert engine.outcomes(absent) == [FetchOutcome.ABSENT]
        assert 2 <= deny.denied <= 4  # botocore is asked for the server's words
        assert engine.count("fetch.denied") == 2
        assert len(warnings_of(caplog, "an entry is denied")) == 1
        (line,) = warnings_of(caplog, "an entry is denied")
        assert "s3:ListBucket" in line
