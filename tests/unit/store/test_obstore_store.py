# SPDX-License-Identifier: Apache-2.0
"""What is obstore's alone: what it leaves to the SDK, its environment, forks, its absence."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest
from obstore.exceptions import GenericError

from s3ec.dev.rigs import proxy_faults as faults
from s3ec.dev.rigs.proxy import Exchange, FaultProxy, Reply, Rule
from s3ec.errors import ConflictError, CorruptEntryError, S3ECError, UnavailableError
from s3ec.store import s3
from s3ec.store.s3 import ObstoreStore
from tests.unit.store.conftest import SECRET, Configure

# Every test signs.
pytestmark = pytest.mark.usefixtures("keys")


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
    configure: Configure, proxy: FaultProxy, bucket: str, monkeypatch: pytest.MonkeyPatch
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
    assert request.target == f"/{bucket}/environment/x"
    assert request.headers["authorization"].startswith("AWS4-HMAC-SHA256")
    assert len(request.headers["x-amz-content-sha256"]) == 64
    assert request.headers["if-none-match"] == "*"
    assert "x-amz-request-payer" not in request.headers
    await store.close()


async def test_objects_of_obstore_do_not_show_the_credentials_and_are_let_go_of(
    configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    genuine = s3.S3Store

    def noted(*args: Any, **kwargs: Any) -> Any:
        made.append(genuine(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(s3, "S3Store", noted)
    store = ObstoreStore(configure())
    assert await store.get("absent", max_bytes=1) is None
    (client,) = made
    shown = f"{client!r} {client.config} {client.client_options} {client.credential_provider}"
    assert SECRET not in shown
    holders = sys.getrefcount(client)
    await store.close()
    assert sys.getrefcount(client) < holders


async def test_what_obstore_cannot_read_is_left_to_the_sdk_for_a_minute_with_one_warning(
    configure: Configure,
    proxy: FaultProxy,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    later_s = 0.0
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + later_s)
    monkeypatch.setattr(s3, "time", clock)
    store = ObstoreStore(configure(prefix="unread"))
    await store.put_if_absent("x", [b"x"])
    proxy.clear(Rule(faults.Chunked(), method="GET"))  # of no length that anybody told
    for tries in (2, 1):  # the first failure may have been its connection's
        for _ in range(3):
            assert await store.get("x", max_bytes=1) == b"x"
        assert senders(proxy) == ["obstore", "sdk"] * tries + ["sdk"] * (3 - tries)
        proxy.requests.clear()
        later_s += 61
    assert caplog.text.count("obstore fails at reads, and botocore does not") == 1
    proxy.clear()
    assert await store.get("x", max_bytes=1) == b"x"
    await store.put_if_absent("y", [b"y"])
    assert senders(proxy) == ["obstore"] * 2
    await store.close()


async def test_a_race_of_writers_is_no_conflict_and_a_name_that_is_taken_is_one(
    configure: Configure, proxy: FaultProxy
) -> None:
    store = ObstoreStore(configure(prefix="taken"))
    proxy.clear(Rule(faults.s3_error(409, "ConditionalRequestConflict"), method="PUT", times=1))
    with pytest.raises(UnavailableError, match="409"):  # the other one may fail yet
        await store.put_if_absent("x", [b"x"])
    await store.put_if_absent("x", [b"x"])
    with pytest.raises(ConflictError, match="412"):
        await store.put_if_absent("x", [b"y"])
    assert senders(proxy) == ["obstore"] * 3
    await store.close()


async def test_a_certificate_that_obstore_cannot_read_leaves_all_to_the_sdk(
    configure: Configure, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise GenericError("no")

    monkeypatch.setattr(s3, "S3Store", refuse)
    store = ObstoreStore(configure(prefix="unmade"))
    await store.put_if_absent("x", [b"x"])
    assert await store.get("x", max_bytes=1) == b"x"
    assert set(senders(proxy)) == {"sdk"}
    await store.close()


class More:
    """A range that says it has 10 bytes, with more of them, up to the announced length."""

    def __init__(self, announced: int) -> None:
        self.announced = announced
        self.sent_bytes = 0

    async def apply(self, exchange: Exchange) -> None:
        head = {"content-range": "bytes 0-9/10", "etag": '"x"'}
        await exchange.read_body()
        await exchange.send(Reply(206, head, b""), length=self.announced)
        while self.sent_bytes < min(self.announced, 200 * 2**20):
            await exchange.send_raw(bytes(200_000))
            self.sent_bytes += 200_000
        await exchange.released.wait()


@pytest.mark.parametrize("announced", [200_000, 10**12], ids=["longer", "endless"])
async def test_range_longer_than_it_says_is_corrupt_and_given_up_after_some_megabytes(
    announced: int, configure: Configure, proxy: FaultProxy
) -> None:
    store, fault = ObstoreStore(configure(prefix="more")), More(announced)
    with contextlib.suppress(ConflictError):
        await store.put_if_absent("x", [bytes(10)])
    rule = proxy.add(Rule(fault, method="GET"))
    with pytest.raises(CorruptEntryError, match="bytes where 10 were announced"):
        await store.get_range("x", 0, 10)
    assert rule.fired == 1
    proxy.clear()
    await store.close()
    assert fault.sent_bytes < 50 * 2**20  # the sockets' buffers take some


async def test_body_too_large_for_one_buffer_is_read_by_pieces_and_stopped_when_it_is_longer(
    configure: Configure, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3, "COLLECT_BYTES", 9)
    store, body = ObstoreStore(configure(prefix="pieces")), bytes(range(256)) * 12_000
    await store.put_if_absent("x", [body])
    assert await store.get("x", max_bytes=len(body)) == body
    assert await store.get_range("x", 5, 100_000) == body[5:100_005]
    proxy.add(Rule(More(10**12), method="GET"))
    with pytest.raises(CorruptEntryError, match="10 were announced"):
        await store.get_range("x", 0, 10)
    proxy.clear()
    await store.close()


async def test_directory_bucket_is_left_to_the_sdk_with_a_warning(
    configure: Configure, proxy: FaultProxy, caplog: pytest.LogCaptureFixture
) -> None:
    store = ObstoreStore(configure(bucket="corpus--use1-az4--x-s3"))
    for name in ("x", "y"):
        with pytest.raises(S3ECError):  # moto has none
            await store.get(name, max_bytes=1)
    assert set(senders(proxy)) == {"sdk"}
    assert caplog.text.count("kind of bucket") == 1
    await store.close()


FORKING = """
import asyncio, json, os, sys, threading
from s3ec.config import load_settings
from s3ec.store.s3 import ObstoreStore

ours = set()

async def use():
    store = ObstoreStore(load_settings(json.loads(sys.argv[1])).settings)
    try:
        return await store.get("x", max_bytes=10)
    finally:
        ours.update(str(t.native_id) for t in threading.enumerate() if t.name.startswith("s3ec"))
        await store.close()

assert asyncio.run(use()) == b"forked"
# A thread that ends holds a lock of OpenSSL for a moment, and a child that is forked then for ever.
while ours & set(os.listdir("/proc/self/task")):
    os.sched_yield()
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
    extra = settings.model_dump_json(
        include={"bucket", "endpoint_url", "region", "connect_timeout_s"}
    )
    result = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", FORKING, extra],
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    assert "forked after obstore" in result.stderr
    assert senders(proxy) == ["obstore", "sdk"]
