# SPDX-License-Identifier: Apache-2.0
"""What UrlStore does with a cloud, shown on obstore's S3 client: none of the others runs here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from urllib.parse import quote

import pytest
from obstore.store import S3Store

from s3ec.config import load_settings
from s3ec.dev.rigs import proxy_faults as faults
from s3ec.dev.rigs.proxy import FaultProxy, Rule
from s3ec.errors import AccessError, CorruptEntryError, UnavailableError
from s3ec.store import url_store
from s3ec.store.url_store import UrlStore
from s3ec.testing.contract import MakeStore, StoreContract
from s3ec.testing.server import MotoServer
from tests.support.waiting import DEADLINE_S, until

AMPLE = 2**26


@pytest.fixture
def proxy(moto_server: MotoServer) -> Iterator[FaultProxy]:
    with FaultProxy(moto_server.endpoint_url) as proxy:
        yield proxy


@pytest.fixture
def make_store(
    moto_server: MotoServer, moto_bucket: str, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> MakeStore:
    """Stores of gs:// URLs whose requests go to moto."""
    env = moto_server.env()
    client = S3Store(
        moto_bucket,
        endpoint=proxy.url,
        region="us-east-1",
        access_key_id=env["AWS_ACCESS_KEY_ID"],
        secret_access_key=env["AWS_SECRET_ACCESS_KEY"],
        client_options={"allow_http": True, "timeout": "1 day"},
        retry_config={"max_retries": 0},
    )
    monkeypatch.setattr(url_store, "cloud_client", lambda settings: client)
    monkeypatch.setattr(UrlStore, "page_size", 7)

    def make(prefix: str) -> UrlStore:
        url = f"gs://{moto_bucket}/{quote(prefix)}"
        return UrlStore(load_settings({"url": url, "read_timeout_s": 30.0}).settings)

    return make


class TestCloud(StoreContract):
    list_count = 103
    decides_races = False  # moto

    @pytest.fixture
    def make_store(self, make_store: MakeStore) -> MakeStore:
        return make_store


@pytest.fixture
async def store(make_store: MakeStore) -> AsyncIterator[UrlStore]:
    store = make_store("faults")
    assert isinstance(store, UrlStore)
    if await store.head("a") is None:
        await store.put_if_absent("a", [bytes(300_000)])
    yield store
    await store.close()


REFUSALS = (
    (403, "AccessDenied", AccessError, "allow these credentials"),
    (401, "Unauthorized", AccessError, "allow these credentials"),
    (400, "Malformed", UnavailableError, "400"),
    (429, "SlowDown", UnavailableError, "429"),
    (500, "InternalError", UnavailableError, "500"),
    (503, "SlowDown", UnavailableError, "503"),
)


async def test_refusals_of_a_cloud_are_errors_by_what_the_caller_does_next(
    store: UrlStore, proxy: FaultProxy
) -> None:
    for status, code, kind, words in REFUSALS:
        proxy.clear(Rule(faults.s3_error(status, code)))
        for call in (
            lambda: store.get("a", max_bytes=AMPLE),
            lambda: store.get_range("a", 0, 10),
            lambda: store.put_if_absent("b", [b"x"]),
            lambda: store.delete("a"),
            lambda: store.list_folders(""),
            lambda: anext(store.list("")),
        ):
            with pytest.raises(kind, match=words):
                await call()
    proxy.clear()
    assert await store.get("a", max_bytes=AMPLE) == bytes(300_000)


async def test_listing_of_a_bucket_that_is_not_there_names_the_url(
    store: UrlStore, proxy: FaultProxy
) -> None:
    proxy.add(Rule(faults.s3_error(404, "NoSuchBucket")))
    for call in (lambda: store.list_folders(""), lambda: anext(store.list(""))):
        with pytest.raises(UnavailableError, match=r"404.*correct `url`"):
            await call()


async def test_body_that_ends_early_is_a_corrupt_entry(store: UrlStore, proxy: FaultProxy) -> None:
    proxy.add(Rule(faults.Cut(100_000), method="GET"))
    with pytest.raises(CorruptEntryError) as caught:
        await store.get("a", max_bytes=AMPLE)
    assert caught.value.reason == "length"


async def test_close_ends_what_is_under_way(store: UrlStore, proxy: FaultProxy) -> None:
    proxy.clear()
    proxy.requests.clear()
    proxy.add(Rule(faults.Stall()))
    reading = asyncio.create_task(store.get("a", max_bytes=AMPLE))
    async with asyncio.timeout(DEADLINE_S):
        await until(lambda: bool(proxy.requests))
        await store.close()
        with pytest.raises(UnavailableError):
            await reading
