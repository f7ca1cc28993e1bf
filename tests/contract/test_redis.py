# SPDX-License-Identifier: Apache-2.0
"""Redis as a replica, on a real Valkey: alone, with TLS and a user, and as a cluster."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import pytest_asyncio
import redis

from s3ec.counters import Counters
from s3ec.dev.rigs.valkey import Valkey
from s3ec.errors import (
    TOO_LARGE,
    AccessError,
    ConfigError,
    ConflictError,
    CorruptEntryError,
    S3ECError,
    UnavailableError,
)
from s3ec.settings import Settings
from s3ec.store.endpoint import Endpoint
from s3ec.store.open import open_places
from s3ec.store.places import Place, PlacesStore
from s3ec.store.redis_store import RedisStore
from s3ec.testing.contract import MakeStore, StoreContract
from s3ec.testing.memory_store import MemoryStore
from s3ec.testing.server import HOST
from tests.contract.conftest import Issued
from tests.support.valkey import behind_tls
from tests.support.waiting import eventually

USER, PASSWORD = "reader@fleet", "open: sesame/%"
_PATIENCE = {"connect_timeout_s": 10.0, "read_timeout_s": 30.0}


@pytest.fixture(scope="module")
def alone() -> Iterator[Valkey]:
    with Valkey() as server:
        yield server


@pytest.fixture(scope="module")
def guarded(issued: Issued) -> Iterator[str]:
    """URL of one with TLS, and a user who may do what s3ec does, and that below two prefixes."""
    server = Valkey(
        *("--user", "default", "off"),
        *("--user", USER, "on", f">{PASSWORD}", "~contract-*", "~t-*", "~*/*", "-@all"),
        *("+set", "+exists", "+strlen", "+getrange", "+unlink", "+client|setinfo", "+hello"),
    )
    with server, behind_tls(server.port, issued.server) as port:
        yield f"rediss://reader%40fleet@{HOST}:{port}"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Valkey]:
    with Valkey("--cluster-enabled", "yes", "--cluster-config-file", "nodes") as server:
        client = redis.Redis(host=HOST, port=server.port)
        client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        eventually(lambda: "'ok'" in str(client.execute_command("CLUSTER INFO")), "it is up")
        client.close()
        yield server


class TestWithTlsAndAUser(StoreContract):
    list_count = 1

    @pytest.fixture
    def make_store(self, guarded: str, issued: Issued) -> MakeStore:
        return lambda prefix: RedisStore(
            guarded,
            prefix=prefix or "root",
            password=PASSWORD,
            ca_bundle=issued.authority,
            **_PATIENCE,
        )


class TestOnACluster(StoreContract):
    list_count = 1

    @pytest.fixture
    def make_store(self, cluster: Valkey) -> MakeStore:
        return lambda prefix: RedisStore(cluster.url, prefix=prefix, cluster=True, **_PATIENCE)


@pytest_asyncio.fixture
async def opened() -> AsyncIterator[Callable[..., RedisStore]]:
    made: list[RedisStore] = []

    def make(*args: Any, **options: Any) -> RedisStore:
        made.append(RedisStore(*args, **{**_PATIENCE, **options}))
        return made[-1]

    yield make
    for store in made:
        await store.close()


async def test_it_cannot_list_and_says_so(alone: Valkey, opened: Callable[..., RedisStore]) -> None:
    store = opened(alone.url)
    with pytest.raises(AccessError, match="cannot list") as caught:
        _ = [info async for info in store.list("")]
    assert not caught.value.is_general
    with pytest.raises(AccessError, match="cannot list"):
        await store.list_folders("")


async def test_it_may_forget(alone: Valkey, opened: Callable[..., RedisStore]) -> None:
    store = opened(alone.url, prefix="ttl", ttl_s=1)
    await store.put_if_absent("one", [b"x"])
    with pytest.raises(ConflictError):
        await store.put_if_absent("one", [b"x"])
    while await store.get("one", max_bytes=1) is not None:
        pass
    await store.put_if_absent("one", [b"y"])
    assert await store.get("one", max_bytes=1) == b"y"


async def test_a_wrong_password_is_refused_and_named_without_it(
    guarded: str, issued: Issued, opened: Callable[..., RedisStore]
) -> None:
    store = opened(guarded, password="guessed", ca_bundle=issued.authority)
    with pytest.raises(AccessError) as caught:
        await store.get("contract-x", max_bytes=1)
    assert caught.value.is_general
    assert "guessed" not in str(caught.value)
    store = opened(guarded, password=PASSWORD, prefix="", ca_bundle=issued.authority)
    with pytest.raises(AccessError) as caught:
        await store.get("elsewhere", max_bytes=1)
    assert not caught.value.is_general


async def test_a_server_that_is_not_trusted_is_unavailable(
    guarded: str, opened: Callable[..., RedisStore]
) -> None:
    store = opened(guarded)
    with pytest.raises(UnavailableError, match=r"(?i)certificate"):
        await store.get("x", max_bytes=1)


async def test_a_full_server_takes_nothing_and_still_answers(
    opened: Callable[..., RedisStore],
) -> None:
    with Valkey("--maxmemory", "4mb", "--maxmemory-policy", "noeviction") as server:
        store = opened(server.url)
        await store.put_if_absent("small", [b"x"])
        puts = (store.put_if_absent(f"large-{n}", [bytes(2**20)]) for n in range(10))
        ends = await asyncio.gather(*puts, return_exceptions=True)
        refused = [end for end in ends if isinstance(end, AccessError)]
        assert refused
        assert {(end.code, end.is_general) for end in refused} == {(TOO_LARGE, False)}
        assert await store.get("small", max_bytes=1) == b"x"


async def test_as_many_reads_as_there_are_places_go_out_at_once(
    alone: Valkey, opened: Callable[..., RedisStore]
) -> None:
    store = opened(alone.url, prefix="many")
    await store.put_if_absent("one", [b"x"])
    reads = (store.get("one", max_bytes=1) for _ in range(256))  # the most of max_concurrency
    assert await asyncio.gather(*reads) == [b"x"] * 256


async def test_a_value_of_another_kind_is_a_bad_copy_and_no_failure_of_the_server(
    alone: Valkey, opened: Callable[..., RedisStore]
) -> None:
    admin = redis.Redis(host=HOST, port=alone.port)
    admin.rpush("kinds/one", "x")
    admin.close()
    store = opened(alone.url, prefix="kinds")
    for read in (store.get("one", max_bytes=1), store.get_range("one", 0, 1), store.head("one")):
        with pytest.raises(CorruptEntryError, match="no string"):
            await read


async def test_what_is_no_cluster_or_lacks_a_part_of_one_is_unavailable(
    alone: Valkey, opened: Callable[..., RedisStore]
) -> None:
    with Valkey("--cluster-enabled", "yes", "--cluster-config-file", "nodes") as no_slots:
        for url in (alone.url, no_slots.url):
            store = opened(url, cluster=True)
            for ask in (
                store.get("one", max_bytes=1),
                store.put_if_absent("one", [b"x"]),
                store.delete_many(["one"]),
            ):
                with pytest.raises(UnavailableError):
                    await ask


async def test_a_value_that_is_too_large_is_refused_before_it_is_sent(
    alone: Valkey, opened: Callable[..., RedisStore]
) -> None:
    store = opened(alone.url, prefix="large")
    with pytest.raises(AccessError, match="more than fit") as caught:
        await store.put_if_absent("one", [bytes(2**26), b"x"])
    assert not caught.value.is_general
    assert await store.head("one") is None


async def test_a_server_that_is_killed_is_unavailable_and_empty_when_it_is_back(
    opened: Callable[..., RedisStore],
) -> None:
    with Valkey() as server:
        store = opened(server.url)
        await store.put_if_absent("one", [b"x"])
        server.kill()
        with pytest.raises(UnavailableError):
            await store.get("one", max_bytes=1)
        server.start()
        assert await store.get("one", max_bytes=1) is None
        await store.put_if_absent("one", [b"x"])


async def test_a_connection_that_was_dropped_while_idle_is_no_failure(
    alone: Valkey, opened: Callable[..., RedisStore]
) -> None:
    store = opened(alone.url, prefix="idle")
    await store.put_if_absent("one", [b"x"])
    admin = redis.Redis(host=HOST, port=alone.port)
    admin.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    admin.close()
    reads = (store.get("one", max_bytes=1) for _ in range(8))
    assert await asyncio.gather(*reads) == [b"x"] * 8


# What no Redis answers: of a wrong type, of a wrong form, of another protocol.
STRANGE = {
    "a status": b"+OK\r\n",
    "a number that is none": b":abc\r\n",
    "a number below zero": b":-5\r\n",
    "a length that is none": b"$abc\r\n",
    "a length below zero": b"$-7\r\n",
    "a string": b"$3\r\nabc\r\n",
    "more bytes than asked for": b"$101\r\n" + bytes(101) + b"\r\n",
    "fewer bytes than it says": b"$9\r\nabc\r\n:1\r\n:1\r\n",
    "nothing": b"_\r\n",
    "a list": b"*2\r\n:1\r\n:2\r\n",
    "a list in a list, and so on": b"*1\r\n" * 5000,
    "a list of a length that is none": b"*x\r\n",
    "a map": b"%1\r\n+a\r\n+b\r\n",
    "a map with a key of a list": b"%1\r\n*1\r\n:1\r\n+b\r\n",
    "a set": b"~1\r\n:1\r\n",
    "a fraction": b",1.5\r\n",
    "a truth that is none": b"#x\r\n",
    "a push": b">2\r\n+message\r\n+x\r\n",
    "an error that is no text": b"-\xff\xfe\r\n",
    "a web page": b"HTTP/1.1 400 Bad Request\r\n\r\n",
    "zeros": bytes(100),
    "no answer": b"",
}


@pytest.mark.parametrize("is_greeted", [True, False], ids=["greets", "strange from the start"])
@pytest.mark.parametrize("answer", STRANGE.values(), ids=STRANGE)
async def test_a_server_that_is_no_redis_is_a_miss_of_its_place(
    answer: bytes, is_greeted: bool, opened: Callable[..., RedisStore]
) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while line := await reader.readline():
                if line[:1] != b"*":
                    continue
                words = [
                    (await reader.readline(), await reader.readline())[1]
                    for _ in range(int(line[1:]))
                ]
                greeting = is_greeted and words[0].strip() in (b"HELLO", b"CLIENT")
                writer.write(b"%1\r\n+proto\r\n:3\r\n" if greeting else answer)
                if not answer and not greeting:
                    break
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, HOST, 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        store = opened(f"redis://{HOST}:{port}", read_timeout_s=0.2)
        endpoint, counters, home = Endpoint(4), Counters(), MemoryStore()
        await home.put_if_absent("one", [b"body"])
        place = Place("near", store, endpoint, counters)
        places = PlacesStore(home, [place], is_entry=lambda _: True)
        assert await places.get("one", max_bytes=100) == b"body"
        place.has("one")
        assert await places.get_range("one", 1, 2) == b"od"
        with pytest.raises(S3ECError):
            await store.head("one")
        assert counters.get("place.near.hits") == 0
        await store.close()


def test_settings_name_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    for replica, field in (
        ({"url": "http://x"}, "rediss://HOST"),
        ({"url": "rediss://u:secret@x"}, "no password in the URL"),
        ({"url": "redis://10.0.0.1"}, "rediss://, or `allow_http`"),
        ({"url": "rediss://x", "bucket": "corpus"}, "one of the two"),
        ({"url": "rediss://x", "password": "open sesame"}, "a reference is needed"),
        ({"bucket": "near", "ttl_s": 5}, "together with `url`"),
        ({"url": "rediss://x/zero"}, "number of a database"),
    ):
        with pytest.raises(ValueError, match="replicas") as caught:
            Settings.model_validate({"bucket": "home", "replicas": [replica]})
        assert field in str(caught.value)
        shown = caught.value.errors(include_input=False, include_url=False)  # type: ignore[attr-defined]
        assert "sesame" not in str(shown)
    replica = {"url": "rediss://x", "password": "env:REDIS_PASSWORD"}
    settings = Settings.model_validate({"bucket": "home", "replicas": [replica]})
    with pytest.raises(ConfigError, match="REDIS_PASSWORD is not set"):
        open_places(settings, MemoryStore(), Counters(), is_entry=lambda _: True)
