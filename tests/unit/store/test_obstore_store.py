# SPDX-License-Identifier: Apache-2.0
"""What is obstore's alone: what it leaves to the SDK, its environment, forks, its absence."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from s3ec.config import load_settings
from s3ec.dev.rigs import proxy_faults as faults
from s3ec.dev.rigs.proxy import Exchange, FaultProxy, Reply, Rule
from s3ec.errors import ConflictError, CorruptEntryError, UnavailableError
from s3ec.settings import Settings
from s3ec.store import obstore_errors, s3
from s3ec.store.open import open_store
from s3ec.store.s3 import ObstoreStore
from s3ec.testing.server import MotoServer

SECRET = "5ecret-unit-test-key-that-nobody-may-see"
Configure = Callable[..., Settings]


@pytest.fixture
def proxy(moto_server: MotoServer) -> Iterator[FaultProxy]:
    with FaultProxy(moto_server.endpoint_url) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def bucket(moto_server: MotoServer) -> str:
    return moto_server.create_bucket("unit-obstore")


@pytest.fixture
def configure(proxy: FaultProxy, bucket: str, monkeypatch: pytest.MonkeyPatch) -> Configure:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAUNITTESTUNITTEST")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    defaults = {"bucket": bucket, "endpoint_url": proxy.url, "region": "us-east-1"}
    return lambda **changes: load_settings({**defaults, **changes}).settings


def senders(proxy: FaultProxy) -> list[str]:
    """Which client sent each request."""
    return [
        "sdk" if "boto" in request.headers["user-agent"].lower() else "obstore"
        for request in proxy.requests
    ]


async def test_bodies_travel_through_obstore_and_the_rest_through_the_sdk(
    configure: Configure, proxy: FaultProxy
) -> None:
    store = ObstoreStore(configure(prefix="who"))
    await store.put_if_absent("x", [b"x"])
    assert await store.get("x", max_bytes=1) == b"x"
    assert await store.get_range("x", 0, 1) == b"x"
    assert await store.head("x") is not None
    assert [info.name async for info in store.list("")] == ["x"]
    await store.delete("x")
    assert senders(proxy) == ["obstore"] * 3 + ["sdk"] * 3
    await store.close()


@pytest.mark.parametrize("name", ["a//b", "a/", "./a", "a/../b", "bell\a"])
async def test_names_that_obstore_refuses_or_changes_keep_their_bytes(
    name: str, configure: Configure, proxy: FaultProxy
) -> None:
    store = ObstoreStore(configure(prefix="names"))
    await store.put_if_absent(name, [b"x"])
    assert await store.get(name, max_bytes=1) == b"x"
    assert await store.get_range(name, 0, 1) == b"x"
    assert [info.name async for info in store.list("")] == [name]
    await store.delete(name)
    assert set(senders(proxy)) == {"sdk"}
    await store.close()


async def test_environment_of_obstore_changes_nothing(
    configure: Configure, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {
        "AWS_SKIP_SIGNATURE": "true",
        "AWS_UNSIGNED_PAYLOAD": "true",
        "AWS_REQUEST_PAYER": "true",
        "AWS_S3_EXPRESS": "true",
        "AWS_CONDITIONAL_PUT": "disabled",
        "AWS_VIRTUAL_HOSTED_STYLE_REQUEST": "false",
        "AWS_ALLOW_HTTP": "false",
        "AWS_BUCKET": "another",
    }.items():
        monkeypatch.setenv(name, value)
    store = ObstoreStore(configure(prefix="environment"))
    await store.put_if_absent("x", [b"x"])
    request = proxy.requests[0]
    assert request.target == "/unit-obstore/environment/x"
    assert request.headers["authorization"].startswith("AWS4-HMAC-SHA256")
    assert len(request.headers["x-amz-content-sha256"]) == 64
    assert request.headers["if-none-match"] == "*"
    assert "x-amz-request-payer" not in request.headers
    await store.close()


async def test_objects_of_obstore_do_not_show_the_credentials(configure: Configure) -> None:
    store = ObstoreStore(configure())
    assert await store.get("absent", max_bytes=1) is None
    (client,) = store._clients.values()
    shown = f"{client!r} {client.config} {client.client_options} {client.credential_provider}"
    assert SECRET not in shown
    await store.close()
    assert store._clients == {}


async def test_words_of_another_release_cost_a_second_request_and_change_no_answer(
    configure: Configure,
    proxy: FaultProxy,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(obstore_errors, "_STATUS", re.compile("(no such words)"))
    store = ObstoreStore(configure(prefix="drift"))
    await store.put_if_absent("x", [b"x"])
    with pytest.raises(ConflictError):
        await store.put_if_absent("x", [b"y"])
    assert await store.get("x", max_bytes=1) == b"x"
    assert await store.get("absent", max_bytes=1) is None
    assert await store.get_range("x", 5, 1) == b""
    pair = ["obstore", "sdk"]
    assert senders(proxy) == ["obstore", *pair, "obstore", *pair, *pair]
    assert caplog.text.count("cannot read a reply") == 1
    proxy.add(Rule(faults.s3_error(503, "SlowDown")))
    with pytest.raises(UnavailableError, match="503"):
        await store.get("x", max_bytes=1)
    await store.close()


class More:
    """A range that says it has 10 bytes, with more of them."""

    def __init__(self, announced: int) -> None:
        self._announced = announced

    async def apply(self, exchange: Exchange) -> None:
        head = {"content-range": "bytes 0-9/10", "etag": '"x"'}
        await exchange.read_body()
        await exchange.send(Reply(206, head, bytes(200_000)), length=self._announced)
        await exchange.released.wait()


async def test_range_longer_than_it_says_is_corrupt(
    configure: Configure, proxy: FaultProxy
) -> None:
    store = ObstoreStore(configure(prefix="more"))
    await store.put_if_absent("x", [bytes(10)])
    proxy.add(Rule(More(200_000), method="GET"))
    with pytest.raises(CorruptEntryError, match="200000 bytes where 10 were announced"):
        await store.get_range("x", 0, 10)
    proxy.clear()
    await store.close()


class Endless:
    """A range that says it has 10 bytes, and never ends."""

    def __init__(self) -> None:
        self.sent_bytes = 0

    async def apply(self, exchange: Exchange) -> None:
        head = {"content-range": "bytes 0-9/10", "etag": '"x"'}
        await exchange.read_body()
        await exchange.send(Reply(206, head, b""), length=10**12)
        while self.sent_bytes < 200 * 2**20:
            await exchange.send_raw(bytes(2**20))
            self.sent_bytes += 2**20


async def test_range_that_never_ends_is_given_up_after_some_megabytes(
    configure: Configure, proxy: FaultProxy
) -> None:
    store, fault = ObstoreStore(configure(prefix="endless")), Endless()
    await store.put_if_absent("x", [bytes(10)])
    rule = proxy.add(Rule(fault, method="GET"))
    with pytest.raises(CorruptEntryError, match="where 10 were announced"):
        await store.get_range("x", 0, 10)
    assert rule.fired == 1
    await store.close()
    assert fault.sent_bytes < 50 * 2**20  # the sockets' buffers take some


async def test_body_too_large_for_one_buffer_is_read_by_pieces_and_stopped_when_it_is_longer(
    configure: Configure, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3, "_COLLECT_BYTES", 9)
    monkeypatch.setattr(s3, "_PIECE_BYTES", 1000)
    store, body = ObstoreStore(configure(prefix="pieces")), bytes(range(256)) * 2000
    await store.put_if_absent("x", [body])
    assert await store.get("x", max_bytes=len(body)) == body
    assert await store.get_range("x", 5, 100_000) == body[5:100_005]
    proxy.add(Rule(More(10**12), method="GET"))
    with pytest.raises(CorruptEntryError, match="10 were announced"):
        await store.get_range("x", 0, 10)
    proxy.clear()
    await store.close()


async def test_directory_bucket_is_left_to_the_sdk_with_a_warning(
    configure: Configure, caplog: pytest.LogCaptureFixture
) -> None:
    store = ObstoreStore(configure(bucket="corpus--use1-az4--x-s3", endpoint_url=None))
    await store._open()
    assert not store._can_take("x")
    assert not store._can_take("y")
    assert caplog.text.count("kind of bucket") == 1
    await store.close()


FORKING = """
import asyncio, json, os, sys
from s3ec.config import load_settings
from s3ec.store.s3 import ObstoreStore

async def use():
    store = ObstoreStore(load_settings(json.loads(sys.argv[1])).settings)
    try:
        return await store.get("x", max_bytes=10)
    finally:
        await store.close()

assert asyncio.run(use()) == b"forked"
child = os.fork()
if child == 0:
    # A hang of obstore would end at the deadline, as an error.
    os._exit(0 if asyncio.run(use()) == b"forked" else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


async def test_child_forked_after_obstore_started_reads_through_the_sdk_with_a_warning(
    configure: Configure, proxy: FaultProxy
) -> None:
    settings = configure()
    store = ObstoreStore(settings)
    await store.put_if_absent("x", [b"forked"])
    await store.close()
    proxy.requests.clear()
    extra = settings.model_dump_json(include={"bucket", "endpoint_url", "region"})
    result = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", FORKING, extra],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr
    assert "forked after obstore" in result.stderr
    assert senders(proxy) == ["obstore", "sdk"]


def test_fault_of_ours_is_not_taken_for_a_missing_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "s3ec.store.obstore_errors", None)
    monkeypatch.delitem(sys.modules, "s3ec.store.s3")
    with pytest.raises(ImportError, match="obstore_errors"):
        open_store(load_settings({"bucket": "bucket", "transport": "obstore"}).settings)
