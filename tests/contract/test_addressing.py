# SPDX-License-Identifier: Apache-2.0
"""Stores that know only one of the two places for a bucket's name, and check signatures."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from s3ec.config import load_settings
from s3ec.dev.rigs.proxy import Exchange, FaultProxy, Rule
from s3ec.dev.rigs.proxy_faults import s3_error
from s3ec.errors import AccessError, ConfigError, ConflictError
from s3ec.store.botocore_s3 import BotocoreStore
from s3ec.testing.server import LocalS3, MotoServer
from tests.contract.conftest import BUCKET, DOMAIN, Configure, Transport
from tests.contract.test_server_identity import all_go
from tests.support.disks import run_or_skip

IN_PATH = rf"^http://{re.escape(DOMAIN)}/"
IN_HOST = rf"^http://{BUCKET}\.{re.escape(DOMAIN)}/"
NO_SUCH_BUCKET = s3_error(404, "NoSuchBucket")


@pytest.fixture
def proxy(guarded_s3: LocalS3, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    """The clients' HTTP proxy: names need no DNS then, and requests show the whole URL."""
    for name, value in guarded_s3.env().items():
        monkeypatch.setenv(name, value)
    with FaultProxy(guarded_s3.endpoint_url) as proxy:
        monkeypatch.setenv("http_proxy", proxy.url)
        yield proxy


@pytest.fixture(params=["virtual", "path"])
async def store(request: pytest.FixtureRequest, proxy: FaultProxy) -> AsyncIterator[BotocoreStore]:
    """A store in each style, by the client that does the work behind a proxy."""
    settings = load_settings(
        {
            "bucket": BUCKET,
            "prefix": f"größe und 圖/{request.node.callspec.id}",
            "endpoint_url": f"http://{DOMAIN}",
            "region": "us-east-1",
            "allow_http": True,
            "connect_timeout_s": 10,
            "read_timeout_s": 20,
            "addressing_style": request.param,
        }
    ).settings
    store = BotocoreStore(settings)
    yield store
    await store.close()


def right_and_wrong(request: pytest.FixtureRequest) -> tuple[str, str]:
    virtual = "virtual" in request.node.callspec.id
    return (IN_HOST, IN_PATH) if virtual else (IN_PATH, IN_HOST)


async def test_store_that_knows_only_the_style_of_the_settings_does_all_that_is_asked(
    request: pytest.FixtureRequest, proxy: FaultProxy, store: BotocoreStore
) -> None:
    right, wrong = right_and_wrong(request)
    refused = proxy.add(Rule(NO_SUCH_BUCKET, target=wrong))
    await store.put_if_absent("aa/x", [b"0123456789"])
    with pytest.raises(ConflictError):
        await store.put_if_absent("aa/x", [b"other"])
    assert await store.get("aa/x", max_bytes=10) == b"0123456789"
    assert await store.get_range("aa/x", 3, 4) == b"3456"
    assert await store.head("aa/y") is None
    assert [info.name async for info in store.list("aa/")] == ["aa/x"]
    assert list(await store.list_folders("")) == ["aa/"]
    await store.delete("aa/x")
    assert await store.get("aa/x", max_bytes=10) is None
    assert refused.fired == 0
    assert all(re.search(right, asked.target) for asked in proxy.requests)


async def test_store_that_knows_only_the_other_style_is_a_bucket_that_is_not_there(
    request: pytest.FixtureRequest, proxy: FaultProxy, store: BotocoreStore
) -> None:
    right, _ = right_and_wrong(request)
    refused = proxy.add(Rule(NO_SUCH_BUCKET, target=right))
    with pytest.raises(AccessError, match="create the bucket or correct `bucket`") as caught:
        await store.get("aa/x", max_bytes=10)
    assert caught.value.is_general
    assert refused.fired == len(proxy.requests) == 1


class Below:
    """A server whose names begin below a path, as of some clouds."""

    def __init__(self, path: str) -> None:
        self.path = path

    async def apply(self, exchange: Exchange) -> None:
        target = exchange.request.target
        if not target.startswith(f"{self.path}/"):
            await NO_SUCH_BUCKET.apply(exchange)
            return
        exchange.request = replace(exchange.request, target=target.removeprefix(self.path))
        await exchange.send(await exchange.forward())


async def test_an_endpoint_with_a_path_serves_its_buckets_below_it(
    on_moto: Configure, moto_server: MotoServer, transport: Transport
) -> None:
    path = "/n/tenant.a/"
    # moto, since it minds no signature: that is of the whole path.
    with FaultProxy(moto_server.endpoint_url) as proxy:
        rule = proxy.add(Rule(Below(path.rstrip("/"))))
        store = transport(on_moto(endpoint_url=proxy.url + path, prefix=f"below{path}"))
        await all_go(store, "a")
        assert await store.delete_many(["a", "b"]) == {}
        await store.close()
        assert rule.fired == len(proxy.requests)


def test_a_path_of_an_endpoint_needs_path_style_and_is_not_the_bucket() -> None:
    for changes in (
        {"endpoint_url": "https://host/n", "addressing_style": "virtual"},
        {"endpoint_url": "https://s3.amazonaws.com/n"},
        {"endpoint_url": f"https://host/n/{BUCKET}"},
    ):
        with pytest.raises(ConfigError, match="`endpoint_url` has a path"):
            load_settings({"bucket": BUCKET, **changes})


SEVERAL = """
import asyncio, json, socket, sys
from s3ec.config import load_settings
from s3ec.counters import Counters
from s3ec.dev.rigs.proxy import FaultProxy
from s3ec.store import botocore_s3, s3
from s3ec.store.endpoint import Endpoint
from s3ec.store.open import resilient

async def use(kind, settings):
    endpoint, counters = Endpoint(settings.max_concurrency), Counters()
    store = resilient(kind(settings), endpoint, counters, hedge=False)
    await store.put_if_absent("a", [b"body"])
    gets = (store.get("a", max_bytes=10) for _ in range(16))
    assert await asyncio.gather(*gets) == [b"body"] * 16
    assert await store.head("a") is not None
    await store.delete("a")
    await store.close()
    assert not endpoint.breaker.is_open
    assert counters.get("breaker.opened") == counters.get("store.retries") == 0

with FaultProxy(sys.argv[2]) as proxy, socket.socket() as nobody:
    nobody.bind(("127.0.0.2", proxy.port))
    if sys.argv[3] == "silent":
        nobody.listen(0)
        full = [socket.socket() for _ in range(4)]  # the queue of those that nobody accepts
        for client in full:
            client.setblocking(False)
            client.connect_ex(nobody.getsockname())
    place = {"endpoint_url": f"http://several.test:{proxy.port}", "allow_http": True}
    settings = load_settings({**json.loads(sys.argv[1]), **place}).settings
    for kind in (s3.ObstoreStore, botocore_s3.BotocoreStore):
        asyncio.run(use(kind, settings))
"""


@pytest.mark.parametrize("other", ["silent", "refusing"])
def test_one_of_several_addresses_that_does_not_answer_costs_one_connect(
    other: str, local_s3: LocalS3, on_seaweed: Configure, tmp_path: Path
) -> None:
    (tmp_path / "hosts").write_text("127.0.0.2 several.test\n127.0.0.1 localhost several.test\n")
    there = ("unshare", "-m", "sh", "-c", 'mount --bind "$0" /etc/hosts && exec "$@"')
    run_or_skip(*there, str(tmp_path / "hosts"), "true")
    given = {
        "bucket": on_seaweed().bucket,
        "prefix": f"several-{other}",
        "region": "us-east-1",
        "connect_timeout_s": 0.5,
        "defer_timeout_s": 60,  # a busy machine is not what this is about
        "read_timeout_s": 60,
    }
    words = (json.dumps(given), local_s3.endpoint_url, other)
    command = (*there, str(tmp_path / "hosts"), sys.executable, "-c", SEVERAL, *words)
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


OBSTORE = """
import asyncio, json, sys
from s3ec.config import load_settings
from s3ec.store.s3 import ObstoreStore
from tests.contract.test_server_identity import all_go

async def use(settings):
    store = ObstoreStore(load_settings(settings).settings)
    await all_go(store, "größe")
    await store.close()

for settings in json.loads(sys.argv[1]):
    asyncio.run(use(settings))
"""


def test_obstore_finds_the_bucket_in_the_host_and_in_the_path(
    guarded_s3: LocalS3, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In a process whose ``/etc/hosts`` has the names."""
    for name, value in guarded_s3.env().items():
        monkeypatch.setenv(name, value)
    (tmp_path / "hosts").write_text(f"127.0.0.1 localhost {DOMAIN} {BUCKET}.{DOMAIN}\n")
    there = ("unshare", "-m", "sh", "-c", 'mount --bind "$0" /etc/hosts && exec "$@"')
    run_or_skip(*there, str(tmp_path / "hosts"), "true")
    port = urlsplit(guarded_s3.endpoint_url).port
    given = [
        {
            "bucket": BUCKET,
            "prefix": f"圖/{style}",
            "endpoint_url": f"http://{DOMAIN}:{port}",
            "region": "us-east-1",
            "allow_http": True,
            "addressing_style": style,
        }
        for style in ("virtual", "path")
    ]
    command = (*there, str(tmp_path / "hosts"), sys.executable, "-c", OBSTORE, json.dumps(given))
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
