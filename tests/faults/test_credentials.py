# SPDX-License-Identifier: Apache-2.0
"""Credentials that rotate, are revoked, or come from a service that does not answer."""

from __future__ import annotations

import datetime
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from s3ec.config import load_settings
from s3ec.corpus import Corpus
from s3ec.dev.rigs.proxy import Exchange, FaultProxy, Reply, Rule
from s3ec.dev.rigs.proxy_faults import s3_error
from s3ec.prefetch import FetchOutcome
from s3ec.store import credentials
from s3ec.store.base import Store
from s3ec.store.concurrency import in_parallel
from s3ec.testing.server import Identity, LocalS3
from tests.faults.embeddings import key_at
from tests.faults.engine import Engine, warnings_of
from tests.faults.site import Site
from tests.support.metadata import MetadataService
from tests.support.waiting import DEADLINE_S, eventually

NOBODY = Identity("nobody")


def write_keys(path: Path, who: Identity) -> None:
    path.write_text(
        f"[default]\naws_access_key_id = {who.access_key}\n"
        f"aws_secret_access_key = {who.secret_key}\n"
    )


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is refused is looked for again soon: a test has no five seconds."""
    monkeypatch.setattr(credentials.ChainCredentials, "look_every_s", 0.2)


def test_a_credentials_file_that_is_rotated_is_read_again_and_said_once(
    site: Site,
    local_s3: LocalS3,
    hasty: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    site.stock(0, 1)
    keys = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(keys))
    write_keys(keys, NOBODY)
    me = Identity("me", access_key=local_s3.access_key, secret_key=local_s3.secret_key)
    with Engine(site.settings()) as engine:
        # The server's own word for keys that it does not know any more.
        assert engine.outcomes(0) == [FetchOutcome.UNAVAILABLE]
        assert "InvalidAccessKeyId" in warnings_of(caplog, "an entry is denied")[0]
        eventually(
            lambda: (
                engine.outcomes(0) == [FetchOutcome.UNAVAILABLE]
                and bool(warnings_of(caplog, "there are no others yet"))
            )
        )
        write_keys(keys, me)
        engine.fetch_in_the_end(0)
        assert engine.outcomes(1) == [FetchOutcome.READY]
        assert engine.count("fetch.denied") >= 2
    assert len(warnings_of(caplog, "there are no others yet")) == 1
    assert len(warnings_of(caplog, "others are used now (shared-credentials-file)")) == 1
    refused = [r for r in site.proxy.requests if NOBODY.access_key in r.headers["authorization"]]
    assert 2 <= len(refused) < 20  # no storm
    assert local_s3.secret_key not in caplog.text
    assert NOBODY.secret_key not in caplog.text


class Expired:
    """A server for which keys have expired: as AWS says it, and to a HEAD without a body."""

    def __init__(self, who: Identity) -> None:
        self.who = who
        self.refused = 0

    async def apply(self, exchange: Exchange) -> None:
        if self.who.access_key not in exchange.request.headers["authorization"]:
            await exchange.send(await exchange.forward())
            return
        self.refused += 1
        await s3_error(400, "ExpiredToken").apply(exchange)


@pytest.mark.parametrize("kind", ["obstore", "aioboto3"])
def test_keys_that_rotate_in_the_midst_of_a_command_cost_it_nothing(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = Identity("old"), Identity("new")
    keys = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(keys))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    write_keys(keys, old)
    settings = {"region": "us-east-1", "transport": kind, "cache_dir": str(tmp_path / "cache")}
    with (
        LocalS3(tmp_path / "server", identities=[old, new]) as server,
        FaultProxy(server.endpoint_url) as proxy,
    ):
        bucket = server.create_bucket("rotating")
        fault = Expired(old)

        async def work(store: Store) -> None:
            async def all_of_it() -> None:
                names = [f"{fault.refused}/{number}" for number in range(16)]
                await in_parallel(names, lambda name: store.put_if_absent(name, [b"x"]))
                bodies = await in_parallel(names, lambda name: store.get(name, max_bytes=1))
                assert bodies == [b"x"] * 16
                assert all(await in_parallel(names, store.head))
                assert len([info async for info in store.list("")]) >= 16
                assert await store.delete_many(names) == {}

            await all_of_it()
            write_keys(keys, new)  # whoever rotates them has written the new ones already
            proxy.add(Rule(fault))
            await all_of_it()

        place = {**settings, "bucket": bucket, "endpoint_url": proxy.url}
        with Corpus(load_settings(place).settings, attempts=1) as corpus:
            corpus.run(work)
    assert 1 <= fault.refused <= 17


def test_leave_to_write_that_is_revoked_keeps_the_reads_and_loses_no_save(
    site: Site, signed: None
) -> None:
    site.stock(0, 1)
    with Engine(site.settings()) as engine:
        engine.follow()
        engine.save(2)
        eventually(lambda: key_at(2).name in site.objects())
        engine.announce()  # else that is denied as well, and tried again a minute later
        revoked = site.proxy.add(Rule(s3_error(403, "AccessDenied"), method="PUT"))
        engine.save(3)
        eventually(lambda: engine.count("save_problem.denied") >= 1)
        assert engine.outcomes(0) == [FetchOutcome.READY]
        assert key_at(3).digest.hex() in site.spooled()
        fired = revoked.fired
        site.let_through()
        eventually(lambda: key_at(3).name in site.objects())
        eventually(lambda: not site.spooled())
        engine.fetch_in_the_end(1)
    assert 1 <= fired < 20  # no storm


class OtherClock:
    """A server whose clock is behind, and which refuses signatures as S3 does."""

    def __init__(self, behind: datetime.timedelta) -> None:
        self.behind = behind
        self.refused = 0

    async def apply(self, exchange: Exchange) -> None:
        now = datetime.datetime.now(datetime.UTC) - self.behind
        signed = datetime.datetime.strptime(
            exchange.request.headers["x-amz-date"], "%Y%m%dT%H%M%S%z"
        )
        if abs(now - signed) < datetime.timedelta(minutes=15):
            await exchange.send(await exchange.forward())
            return
        self.refused += 1
        await exchange.read_body()
        body = (
            "<Error><Code>RequestTimeTooSkewed</Code><Message>The difference between the request "
            "time and the current time is too large.</Message>"
            f"<ServerTime>{now:%Y-%m-%dT%H:%M:%SZ}</ServerTime></Error>"
        )
        kind = {"content-type": "application/xml"}
        await exchange.send(Reply(403, kind, body.encode()))


def test_clocks_an_hour_apart_are_named_and_heal(
    site: Site,
    signed: None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    site.stock(0)
    clock = OtherClock(datetime.timedelta(hours=1))
    site.proxy.add(Rule(clock))
    with Engine(site.settings(index_refresh_s="0.1")) as engine:
        engine.node.follow_the_bucket()
        eventually(lambda: bool(warnings_of(caplog, "cannot read the index")))
        assert engine.outcomes(0) == [FetchOutcome.UNAVAILABLE]
        eventually(lambda: engine.node.breaker.is_open)
        (line,) = warnings_of(caplog, "cannot read the index")
        assert "set this machine's clock" in line
        clock.behind = datetime.timedelta()
        engine.fetch_in_the_end(0)
    assert 2 <= clock.refused < 20  # no storm


def test_a_command_waits_for_a_source_that_takes_its_time_and_an_engine_does_not(
    site: Site,
    local_s3: LocalS3,
    hasty: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    site.stock(0)
    gate, keys, config = tmp_path / "gate", tmp_path / "keys", tmp_path / "config"
    found = {"AccessKeyId": local_s3.access_key, "SecretAccessKey": local_s3.secret_key}
    keys.write_text(json.dumps({"Version": 1, **found}))
    look = f"sh -c 'until [ -e {gate} ]; do sleep 0.05; done; cat {keys}'"
    config.write_text(f"[default]\ncredential_process = {look}\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    monkeypatch.setattr(credentials.ChainCredentials, "patience_s", 0.05)
    monkeypatch.setattr(credentials.ChainCredentials, "longest_look_s", DEADLINE_S)
    settings = site.settings()
    with (
        Engine(settings) as engine,
        Corpus.open(settings) as corpus,
        ThreadPoolExecutor(1) as pool,
    ):
        listed = pool.submit(corpus.namespaces)
        try:
            assert engine.outcomes(0) == [FetchOutcome.UNAVAILABLE]
            with pytest.raises(TimeoutError):  # nor is it an error after all of its attempts
                listed.result(2.0)
        finally:
            gate.touch()
        assert len(listed.result(DEADLINE_S)) == 1
        engine.fetch_in_the_end(0)


def test_metadata_that_does_not_answer_holds_nothing_up_and_is_asked_seldom(
    site: Site,
    local_s3: LocalS3,
    hasty: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    site.stock(0)
    monkeypatch.setattr(credentials.ChainCredentials, "patience_s", 0.3)
    with MetadataService(local_s3) as service:
        for name, value in service.env.items():
            monkeypatch.setenv(name, value)
        with Engine(site.settings(index_refresh_s="0.1")) as engine:
            engine.node.follow_the_bucket()
            assert engine.outcomes(0) == [FetchOutcome.UNAVAILABLE]
            eventually(lambda: engine.node.breaker.is_open)
            assert engine.outcomes(0) == [FetchOutcome.UNAVAILABLE]
            assert service.asked >= 1
            assert site.proxy.requests == []
            assert len(warnings_of(caplog, "cannot read the index")) == 1
            service.answering.set()
            engine.fetch_in_the_end(0)
            eventually(lambda: not engine.node.breaker.is_open)
            assert service.asked < 30
