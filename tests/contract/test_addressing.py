# SPDX-License-Identifier: Apache-2.0
"""Stores that know only one of the two places for a bucket's name, and check signatures."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from s3ec.config import load_settings
from s3ec.dev.rigs.proxy import FaultProxy, Rule
from s3ec.dev.rigs.proxy_faults import s3_error
from s3ec.errors import AccessError, ConflictError
from s3ec.store.botocore_s3 import BotocoreStore
from s3ec.store.s3 import ObstoreStore
from s3ec.testing.server import LocalS3
from tests.contract.conftest import BUCKET, DOMAIN, Transport
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
async def store(
    request: pytest.FixtureRequest, proxy: FaultProxy, transport: Transport
) -> AsyncIterator[BotocoreStore]:
    """A store in each style."""
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
    store = transport(settings)
    yield store
    await store.close()


def right_and_wrong(request: pytest.FixtureRequest) -> tuple[str, str]:
    virtual = "virtual" in request.node.callspec.id
    return (IN_HOST, IN_PATH) if virtual else (IN_PATH, IN_HOST)


async def test_store_that_knows_only_the_style_of_the_settings_does_all_that_is_asked(
    request: pytest.FixtureRequest,
    proxy: FaultProxy,
    store: BotocoreStore,
    caplog: pytest.LogCaptureFixture,
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
    # Behind a proxy; see below for obstore's own way.
    assert ("does the work of obstore" in caplog.text) == isinstance(store, ObstoreStore)


async def test_store_that_knows_only_the_other_style_is_a_bucket_that_is_not_there(
    request: pytest.FixtureRequest, proxy: FaultProxy, store: BotocoreStore
) -> None:
    right, _ = right_and_wrong(request)
    refused = proxy.add(Rule(NO_SUCH_BUCKET, target=right))
    with pytest.raises(AccessError, match="create the bucket or correct `bucket`") as caught:
        await store.get("aa/x", max_bytes=10)
    assert caught.value.is_general
    assert refused.fired == len(proxy.requests) == 1


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
