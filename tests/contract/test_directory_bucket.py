# SPDX-License-Identifier: Apache-2.0
"""S3 Express One Zone, as far as it can be tried: a proxy imposes what a directory bucket does.

It gives sessions, lists in no order, and refuses a place to start and a part of a name.
"""

from __future__ import annotations

import random
import re
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, replace
from urllib.parse import parse_qs, urlsplit

import pytest

from s3ec.dev.rigs.proxy import Exchange, FaultProxy, Reply, Rule
from s3ec.dev.rigs.proxy_faults import s3_error
from s3ec.errors import UnavailableError
from s3ec.store.base import ObjectInfo, UnorderedListingError
from s3ec.store.botocore_s3 import BotocoreStore
from s3ec.testing.contract import MakeStore, StoreContract
from s3ec.testing.server import Identity, LocalS3
from tests.contract.conftest import Configure, Transport, _configure
from tests.contract.test_index import test_an_index_lives_below_any_prefix  # noqa: F401

BUCKET = "corpus--use1-az4--x-s3"
_SESSION = (
    b"<CreateSessionResult><Credentials><SessionToken>t</SessionToken>"
    b"<SecretAccessKey>s</SecretAccessKey><AccessKeyId>a</AccessKeyId>"
    b"<Expiration>2100-01-01T00:00:00Z</Expiration></Credentials></CreateSessionResult>"
)
_XML = {"content-type": "application/xml"}
_ENTRY = re.compile(rb"<Contents>.*?</Contents>", re.DOTALL)


@dataclass
class DirectoryBucket:
    """The upstream must take requests of anybody: it knows nothing of sessions."""

    async def apply(self, exchange: Exchange) -> None:
        request = exchange.request
        asked = parse_qs(urlsplit(request.target).query, keep_blank_values=True)
        if "session" in asked:
            await exchange.send(Reply(200, dict(_XML), _SESSION))
            return
        is_listing = asked.get("list-type") == ["2"]
        if is_listing and "start-after" in asked:
            await s3_error(501, "NotImplemented").apply(exchange)
            return
        prefix = asked.get("prefix", [""])[0]
        if is_listing and prefix and not prefix.endswith("/"):
            await s3_error(400, "InvalidRequest").apply(exchange)
            return
        assert "s3express" in request.headers["authorization"]
        kept = {
            name: value
            for name, value in request.headers.items()
            if name not in ("authorization", "x-amz-s3session-token")
        }
        exchange.request = replace(request, headers=kept)
        reply = await exchange.forward()
        entries = _ENTRY.findall(reply.body) if is_listing else []
        random.shuffle(entries)
        reply.body = _ENTRY.sub(lambda _: entries.pop(), reply.body) if entries else reply.body
        await exchange.send(reply)


@pytest.fixture(scope="module")
def directory_bucket() -> Iterator[LocalS3]:
    anybody = Identity("anonymous", actions=("Admin", "Read", "Write", "List"))
    with LocalS3(identities=[anybody]) as server:
        request = urllib.request.Request(f"{server.endpoint_url}/{BUCKET}", method="PUT")
        urllib.request.urlopen(request).close()  # the SDK would ask for a session
        yield server


@pytest.fixture
def in_front(directory_bucket: LocalS3) -> Iterator[FaultProxy]:
    with FaultProxy(directory_bucket.endpoint_url) as proxy:
        proxy.add(Rule(DirectoryBucket()))
        yield proxy


@pytest.fixture
def on_seaweed(
    monkeypatch: pytest.MonkeyPatch, directory_bucket: LocalS3, in_front: FaultProxy
) -> Configure:
    """Also for the test of the index, which is run here once more."""
    return _configure(monkeypatch, directory_bucket.env(), in_front.url, BUCKET)


@pytest.fixture
def transport() -> Transport:
    """To which obstore leaves such a bucket, tests/unit/store/test_obstore_store.py."""
    return BotocoreStore


class TestBehindTheProxy(StoreContract):
    @pytest.fixture
    def make_store(self, on_seaweed: Configure) -> MakeStore:
        return lambda prefix: BotocoreStore(on_seaweed(prefix=prefix))


async def test_a_listing_that_breaks_off_does_not_go_on_where_it_was(
    on_seaweed: Configure, in_front: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BotocoreStore, "page_size", 3)
    store = BotocoreStore(on_seaweed(prefix="broken"))
    for number in range(5):
        await store.put_if_absent(f"o/{number}", [b"x"])

    async def listing() -> list[ObjectInfo]:
        return [info async for info in store.list("o/")]

    rule = Rule(s3_error(503, "SlowDown"), target="list-type=2")
    in_front.add(replace(rule, skip=1))
    with pytest.raises(UnorderedListingError):
        await listing()
    in_front.add(rule)
    with pytest.raises(UnavailableError) as caught:
        await listing()
    assert not isinstance(caught.value, UnorderedListingError)
    await store.close()
