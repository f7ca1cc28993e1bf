# SPDX-License-Identifier: Apache-2.0
"""Each transport through a proxy that misbehaves, in front of a server that checks signatures.

Each fault must become the right error, in bounded time, and leave a store that works. What only
botocore asks is tested by its own store: ObstoreStore has it from there.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import secrets
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from s3ec.counters import Counters
from s3ec.dev.rigs import proxy_faults as faults
from s3ec.dev.rigs.proxy import Exchange, Fault, FaultProxy, Reply, Rule
from s3ec.errors import AccessError, ConflictError, CorruptEntryError, S3ECError, UnavailableError
from s3ec.store import s3, s3_client
from s3ec.store.aioboto3_s3 import Aioboto3Store
from s3ec.store.botocore_s3 import BotocoreStore
from s3ec.store.concurrency import RequestSlots
from s3ec.store.endpoint import Endpoint
from s3ec.store.open import resilient
from s3ec.store.s3 import ObstoreStore
from s3ec.testing.server import LocalS3
from tests.contract.conftest import AMPLE, BODY, OPERATIONS, Configure, Issued, Transport, names
from tests.support.waiting import DEADLINE_S, until

Make = Callable[..., BotocoreStore]
CHECKSUM = {BotocoreStore: "x-amz-checksum-crc32", ObstoreStore: "x-amz-checksum-sha256"}
CHECKSUM_OVER_TLS = {**CHECKSUM, ObstoreStore: "x-amz-checksum-crc64nvme"}
# Requests at most for one that fails: what obstore does not tell, botocore is asked.
QUESTIONS = {Aioboto3Store: 1, BotocoreStore: 1, ObstoreStore: 2}
# A connection that was used before may have been dropped, so botocore takes a fresh one then.
TRIES = {Aioboto3Store: 2, BotocoreStore: 2, ObstoreStore: 3}
BODIES = ("get", "get_range", "put")


def by(*kinds: Transport) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("transport", kinds, indirect=True)


for_bodies = by(ObstoreStore, BotocoreStore)
everywhere = by(ObstoreStore, BotocoreStore, Aioboto3Store)


@pytest.fixture(params=[BotocoreStore], ids=["botocore"])
def transport(request: pytest.FixtureRequest) -> Transport:
    kind: Transport = request.param
    return kind


@pytest.fixture
def proxy(local_s3: LocalS3) -> Iterator[FaultProxy]:
    with FaultProxy(local_s3.endpoint_url) as proxy:
        yield proxy


@pytest.fixture
async def make(
    proxy: FaultProxy,
    on_seaweed: Configure,
    transport: Transport,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[Make]:
    """Stores over one fresh prefix that reach the server through the proxy."""
    monkeypatch.setattr(transport, "page_size", 2)
    stores = []
    prefix = f"faults-{secrets.token_hex(6)}"

    def make(*, least_bytes_per_s: float = 65536.0, **changes: Any) -> BotocoreStore:
        settings = on_seaweed(**{"endpoint_url": proxy.url, "prefix": prefix, **changes})
        monkeypatch.setattr(RequestSlots, "least_bytes_per_s", least_bytes_per_s)
        stores.append(transport(settings))
        return stores[-1]

    yield make
    for store in stores:
        await store.close()


@pytest.fixture
async def store(make: Make, proxy: FaultProxy) -> BotocoreStore:
    """A store with two objects, a and b, whose connection pool is warm."""
    store = make()
    await store.put_if_absent("a", [BODY])
    await store.put_if_absent("b/b", [b"b"])
    proxy.clear()
    return store


@pytest.fixture(scope="module", autouse=True)
def small_heap() -> Iterator[None]:
    """Spare the collection after each test what moto and hypothesis have imported."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
async def no_stray_errors() -> AsyncIterator[None]:
    """Nothing ends in the loop's exception handler, where a server would log it."""
    stray: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: stray.append(context))
    yield
    gc.collect()
    await asyncio.sleep(0)
    assert stray == []


# An operation by each transport that has code of its own for it.
each_operation = pytest.mark.parametrize(
    ("transport", "operation"),
    [
        *((ObstoreStore, operation) for operation in BODIES),
        *((BotocoreStore, operation) for operation in OPERATIONS),
        *((Aioboto3Store, operation) for operation in ("get", "put", "list")),
    ],
    indirect=["transport"],
)


async def _assert_works(store: BotocoreStore) -> None:
    async with asyncio.timeout(DEADLINE_S):
        for operation in OPERATIONS.values():
            await operation(store)
        assert await store.get("a", max_bytes=AMPLE) == BODY


async def _fails(call: Awaitable[object], kind: type[S3ECError], match: str = ".") -> S3ECError:
    with pytest.raises(kind, match=match) as caught:
        async with asyncio.timeout(DEADLINE_S):
            await call
    return caught.value


REGION = {"x-amz-bucket-region": "eu-north-1"}
STATUS_FAULTS = {
    "503": (faults.s3_error(503, "SlowDown"), UnavailableError, "503"),
    "500 garbage": (faults.Answer(500, b"<a><b"), UnavailableError, "500"),
    "502 page": (faults.html_page(502), UnavailableError, "502"),
    "429": (faults.Answer(429), UnavailableError, "429"),
    "409": (faults.s3_error(409, "OperationAborted"), UnavailableError, "409"),
    "403": (faults.s3_error(403, "AccessDenied"), AccessError, "403.*allow this identity s3:"),
    "401": (faults.Answer(401), AccessError, "401"),
    "400": (faults.s3_error(400, "ExpiredToken"), AccessError, "400"),
    "301": (faults.s3_error(301, "PermanentRedirect", headers=REGION), AccessError, "eu-north-1"),
    "400 region": (
        faults.s3_error(400, "AuthorizationHeaderMalformed", headers=REGION),
        AccessError,
        "region eu-north-1, set `region`",
    ),
}


@each_operation
async def test_bad_status_maps_to_its_error_without_a_retry(
    operation: str,
    store: BotocoreStore,
    proxy: FaultProxy,
    transport: Transport,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(s3, "OPINION_S", 0.0)  # the answers differ from one moment to the next
    most = QUESTIONS[transport]
    for fault, kind, match in STATUS_FAULTS.values():
        rule = proxy.add(Rule(fault))
        await _fails(OPERATIONS[operation](store), kind, match)
        # No retry of the SDK's, and no search for the right region.
        assert 1 <= rule.fired == len(proxy.requests) <= most
        proxy.clear()
    await _assert_works(store)


@each_operation
async def test_broken_connection_is_unavailable(
    operation: str, store: BotocoreStore, proxy: FaultProxy, transport: Transport
) -> None:
    for fault in (faults.Reset(), faults.LoseReply()):
        rule = proxy.add(Rule(fault))
        await _fails(OPERATIONS[operation](store), UnavailableError)
        assert 1 <= rule.fired <= TRIES[transport]
        proxy.clear()
    with proxy.refusing():
        await _fails(OPERATIONS[operation](store), UnavailableError, "connect")
    await _assert_works(store)


class DropOld:
    """A firewall that has forgotten connections: what comes over one of them is reset."""

    def __init__(self) -> None:
        self.seen: set[tuple[str, int]] = set()
        self.dropped: set[tuple[str, int]] = set()

    async def apply(self, exchange: Exchange) -> None:
        if exchange.client in self.dropped:
            await exchange.read_body()
            exchange.reset()
            return
        self.seen.add(exchange.client)
        await exchange.send(await exchange.forward())


@pytest.mark.parametrize(
    ("transport", "operation"),
    [
        *((ObstoreStore, operation) for operation in ("get", "put")),
        *((BotocoreStore, operation) for operation in ("put", "list")),
        *((Aioboto3Store, operation) for operation in ("get", "put", "list")),
    ],
    indirect=["transport"],
)
async def test_dropped_idle_connections_are_no_fault_of_the_endpoint_for_any_that_meet_them(
    operation: str, store: BotocoreStore, proxy: FaultProxy
) -> None:
    endpoint, counters = Endpoint(16), Counters()
    whole: Any = resilient(store, endpoint, counters, hedge=False)
    fault = DropOld()
    proxy.add(Rule(fault))
    call = OPERATIONS[operation]
    await asyncio.gather(*(call(whole) for _ in range(16)))
    assert fault.seen
    for _ in range(2):  # the second time the client that was made anew has them
        fault.dropped |= fault.seen
        await asyncio.gather(*(call(whole) for _ in range(16)))
    assert not endpoint.breaker.is_open
    assert counters.get("store.retries") == counters.get("breaker.opened") == 0


async def test_a_connection_that_was_idle_for_long_is_not_used_again(
    make: Make, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = DropOld()
    proxy.add(Rule(fault))
    store = make()
    for idle_s, connections in ((60.0, 1), (0.0, 3)):
        monkeypatch.setattr(s3_client, "IDLE_S", idle_s)
        fault.seen.clear()
        for _ in range(3):
            await store.head("a")
        assert len(fault.seen) == connections


@everywhere
async def test_a_store_that_fails_is_not_sent_twice_what_was_asked(
    store: BotocoreStore, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3, "OPINION_S", DEADLINE_S)  # which a busy machine would need
    rule = proxy.add(Rule(faults.s3_error(503, "SlowDown")))
    gets = (store.get("a", max_bytes=AMPLE) for _ in range(16))
    errors = await asyncio.gather(*gets, return_exceptions=True)
    assert 16 <= rule.fired <= 17
    # Those that obstore was told nothing about have the words of the one that botocore was told.
    assert all(isinstance(one, UnavailableError) and one.is_throttle for one in errors)
    assert {str(one).partition(": ")[2] for one in errors} == {"503 SlowDown (told to say so)"}


NOT_THE_ENDPOINTS = {
    "denied": faults.s3_error(403, "AccessDenied"),
    "a name too long": faults.s3_error(400, "KeyTooLongError"),
    "a key that cannot be used": faults.s3_error(400, "KMS.DisabledException"),
    "not there": faults.s3_error(404, "NoSuchKey"),
    "taken": faults.s3_error(412, "PreconditionFailed"),
    "a race": faults.s3_error(409, "ConditionalRequestConflict"),
    "not implemented": faults.s3_error(501, "NotImplemented"),
}


@by(ObstoreStore)
async def test_the_breaker_opens_by_faults_of_the_endpoint_and_by_no_others(
    store: BotocoreStore, proxy: FaultProxy
) -> None:
    endpoint = Endpoint(16)
    whole: Any = resilient(store, endpoint, Counters(), hedge=False)

    async def ask(operation: str) -> None:
        with contextlib.suppress(S3ECError):
            await OPERATIONS[operation](whole)

    for fault in NOT_THE_ENDPOINTS.values():
        rule = proxy.add(Rule(fault))
        for _ in range(4):
            for operation in ("get", "put"):
                await ask(operation)
                assert not endpoint.breaker.is_open, fault
        assert rule.fired >= 8
        proxy.clear()
    rule = proxy.add(Rule(faults.s3_error(503, "SlowDown")))
    while not endpoint.breaker.is_open:
        await ask("get")
    assert rule.fired <= 12


class Dribble:
    """The head of an answer, which never ends."""

    async def apply(self, exchange: Exchange) -> None:
        await exchange.send_raw(b"HTTP/1.1 200 OK\r\nx-padding: ")
        while not exchange.released.is_set():
            await exchange.send_raw(b"x")
            await asyncio.sleep(0.05)


# More than the sockets' buffers take.
LARGE = bytes(16_000_000)
# What is too slow, what is asked for, and the throughput that the store insists on. obstore has no
# limit for the silence after an upload but the deadline, 1.2 s here.
SLOW: dict[str, tuple[Fault, str, float]] = {
    "silence, get": (faults.Stall(), "get", 1e6),
    "silence, put": (faults.Stall(), "put", 1e6),
    "silence within the body": (faults.Stall(upto=1000), "get", 65536.0),
    # No read timeout notices these; the deadline does.
    "trickle, 300 kB in 60 s": (faults.Trickle(piece_bytes=100, pause_s=0.02), "get", 1e6),
    "trickle of a head, get": (Dribble(), "get", 65536.0),
    "upload that nobody reads": (faults.StallUpload(), "large put", 1e9),
}


@for_bodies
@pytest.mark.parametrize("case", SLOW)
async def test_what_is_too_slow_is_unavailable_in_time_and_leaves_a_store_that_works(
    case: str, store: BotocoreStore, make: Make, proxy: FaultProxy
) -> None:
    fault, operation, least_bytes_per_s = SLOW[case]
    hasty = make(connect_timeout_s=0.3, read_timeout_s=0.3, least_bytes_per_s=least_bytes_per_s)
    call = OPERATIONS.get(operation, lambda store: store.put_if_absent("big", [LARGE]))
    rule = proxy.add(Rule(fault))
    asked = 0
    while not rule.fired:  # on a busy machine, the time may be over before it is sent
        await _fails(call(hasty), UnavailableError, r"[Tt]imeout|timed out")
        asked += 1
    assert rule.fired <= asked
    proxy.clear()
    assert await store.head("big") is None
    await _assert_works(store)


@for_bodies
async def test_answer_of_something_that_is_not_s3_is_unavailable(
    store: BotocoreStore, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3, "OPINION_S", 0.0)  # the answers differ from one moment to the next
    for fault in (faults.html_page(), faults.Answer(200), faults.Answer(204)):
        proxy.add(Rule(fault))
        for operation in OPERATIONS.keys() - {"delete"}:  # 204 is the answer to that
            await _fails(OPERATIONS[operation](store), UnavailableError, "answer is not")
        proxy.clear()


async def test_page_in_answer_to_a_deletion_deletes_nothing(
    store: BotocoreStore, proxy: FaultProxy
) -> None:
    proxy.add(Rule(faults.html_page(), method="DELETE"))
    await _fails(store.delete("a"), UnavailableError, "answer is not")
    proxy.clear()
    assert await store.head("a") is not None


def _listing(entry: str) -> Fault:
    body = f"<ListBucketResult><IsTruncated>false</IsTruncated>{entry}</ListBucketResult>"
    return faults.Answer(200, body.encode(), {"content-type": "application/xml"})


_BAD_DATE = {"etag": '"x"', "last-modified": "garbage"}
# Whose form is S3's, and in which something is missing or is no number or date.
UNREADABLE: list[tuple[str, Fault]] = [
    ("list", _listing("<Contents><Key>a</Key><Size>abc</Size></Contents>")),
    ("list", _listing(f"<Contents><Key>a</Key><Size>{'9' * 5000}</Size></Contents>")),
    ("list", _listing("<Contents><Size>1</Size></Contents>")),
    ("list", _listing("<Contents><LastModified>garbage</LastModified></Contents>")),
    ("list", _listing(f"<Contents><LastModified>{10**16}</LastModified></Contents>")),
    ("list_folders", _listing("<CommonPrefixes></CommonPrefixes>")),
    ("head", faults.Answer(200, headers=_BAD_DATE)),
]


async def test_answer_in_which_something_is_missing_or_unreadable_is_unavailable(
    store: BotocoreStore, proxy: FaultProxy
) -> None:
    for operation, fault in UNREADABLE:
        proxy.add(Rule(fault))
        await _fails(OPERATIONS[operation](store), UnavailableError, "not an S3 server's")
        proxy.clear()
    await _assert_works(store)


@for_bodies
async def test_page_with_404_is_a_miss_for_reads_and_an_access_error_otherwise(
    store: BotocoreStore, proxy: FaultProxy
) -> None:
    proxy.add(Rule(faults.html_page(404)))
    assert await store.get("a", max_bytes=AMPLE) is None
    for operation in ("put", "list"):
        await _fails(OPERATIONS[operation](store), AccessError, "nothing here answers as a bucket")


class EndlessAnswer:
    """A status, and a body that goes on for as long as anybody reads it."""

    def __init__(self, status: int) -> None:
        self.status = status
        self.sent_bytes = 0

    async def apply(self, exchange: Exchange) -> None:
        await exchange.read_body()
        head = f"HTTP/1.1 {self.status} Proxied\r\ntransfer-encoding: chunked\r\n\r\n"
        await exchange.send_raw(head.encode())
        while self.sent_bytes < 200 * 2**20:
            await exchange.send_raw(b"100000\r\n" + bytes(2**20) + b"\r\n")
            self.sent_bytes += 2**20


@pytest.mark.parametrize("status", [200, 403, 500])
async def test_an_answer_without_an_end_is_given_up_after_some_megabytes(
    status: int, store: BotocoreStore, proxy: FaultProxy
) -> None:
    fault = EndlessAnswer(status)
    rule = proxy.add(Rule(fault))
    await _fails(OPERATIONS["list" if status == 200 else "get"](store), UnavailableError)
    assert fault.sent_bytes < 50 * 2**20 * rule.fired  # the sockets' buffers take some
    proxy.clear()
    assert await store.get("a", max_bytes=AMPLE) == BODY


@for_bodies
async def test_body_that_ends_early_is_a_corrupt_entry(
    store: BotocoreStore, proxy: FaultProxy
) -> None:
    for fault in (
        *(faults.Cut(nbytes) for nbytes in (0, 100_000, 299_999)),
        faults.Cut(100_000, reset=True),
    ):
        for operation in (store.get("a", max_bytes=AMPLE), store.get_range("a", 0, 300_000)):
            rule = proxy.add(Rule(fault, method="GET"))
            error = await _fails(operation, CorruptEntryError, "ended before its 300000 bytes")
            assert isinstance(error, CorruptEntryError)
            assert error.reason == "length"
            assert rule.fired == 1
            proxy.clear()
    await _assert_works(store)


@by(Aioboto3Store)
async def test_bodies_of_the_extra_transport_that_end_early_are_unavailable(
    store: BotocoreStore, proxy: FaultProxy
) -> None:
    for fault in (faults.Cut(100_000), faults.Cut(100_000, chunked=True)):
        proxy.add(Rule(fault, method="GET"))
        for operation in (store.get("a", max_bytes=AMPLE), store.get_range("a", 0, 300_000)):
            await _fails(operation, UnavailableError)
        proxy.clear()
    await _assert_works(store)


@for_bodies
async def test_body_of_unknown_length_is_read_whole_or_unavailable(
    store: BotocoreStore, proxy: FaultProxy
) -> None:
    proxy.add(Rule(faults.Chunked()))
    assert await store.get("a", max_bytes=len(BODY)) == BODY
    error = await _fails(store.get("a", max_bytes=len(BODY) - 1), CorruptEntryError)
    assert isinstance(error, CorruptEntryError)
    assert error.reason == "size"
    proxy.add(Rule(faults.Cut(100_000, chunked=True)))
    await _fails(store.get("a", max_bytes=AMPLE), UnavailableError)
    proxy.clear()
    await _assert_works(store)


@for_bodies
async def test_announced_terabyte_is_refused_before_its_body(
    store: BotocoreStore, proxy: FaultProxy
) -> None:
    proxy.add(Rule(faults.Announce(10**12)))
    error = await _fails(store.get("a", max_bytes=AMPLE), CorruptEntryError, "1000000000000")
    assert isinstance(error, CorruptEntryError)
    assert error.reason == "size"
    proxy.clear()
    await _assert_works(store)


@for_bodies
async def test_upload_that_is_slow_but_moves_gets_the_time_its_size_needs(
    store: BotocoreStore, make: Make, proxy: FaultProxy
) -> None:
    class Late:
        async def apply(self, exchange: Exchange) -> None:
            await asyncio.sleep(2.3)
            await exchange.read_body()
            await exchange.send(Reply(200, {"etag": '"x"'}))

    proxy.add(Rule(Late(), method="PUT"))
    hasty = make(connect_timeout_s=0.2, read_timeout_s=1.0)  # 2.2 s for a request without a body
    for _ in range(5):
        with contextlib.suppress(UnavailableError):  # a busy machine takes 1 s to answer
            await hasty.put_if_absent("big", [LARGE])
            return
    pytest.fail("it got less time")


async def test_uploads_do_not_wait_for_leave_to_send(
    store: BotocoreStore, proxy: FaultProxy
) -> None:
    await store.put_if_absent("c", [BODY])
    assert "expect" not in proxy.requests[-1].headers


@for_bodies
async def test_cancelled_read_frees_its_slot_and_who_waited_for_it_has_its_whole_time(
    store: BotocoreStore, make: Make, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    deadlines: list[asyncio.Timeout] = []

    def timeout(seconds: float) -> asyncio.Timeout:
        deadlines.append(asyncio.timeout(seconds))
        return deadlines[-1]

    ours = SimpleNamespace(**vars(asyncio) | {"timeout": timeout})
    monkeypatch.setattr("s3ec.store.concurrency.asyncio", ours)
    single = make(max_concurrency=1)
    proxy.add(Rule(faults.Stall(upto=1000)))
    reading = asyncio.create_task(single.get("a", max_bytes=AMPLE))
    waiting = asyncio.create_task(single.get("b/b", max_bytes=10))
    async with asyncio.timeout(DEADLINE_S):
        await until(lambda: bool(proxy.requests))
    assert not waiting.done()
    assert len(deadlines) == 1
    proxy.clear()
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert await asyncio.wait_for(waiting, DEADLINE_S) == b"b"
    assert len(deadlines) == 2


@for_bodies
async def test_no_more_requests_are_out_than_max_concurrency(
    store: BotocoreStore, make: Make, proxy: FaultProxy
) -> None:
    class Watch:
        now = most = 0

        async def apply(self, exchange: Exchange) -> None:
            self.now += 1
            self.most = max(self.most, self.now)
            reply = await exchange.forward()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(until(lambda: self.most >= 3), 10)
            await asyncio.sleep(0.02)  # long enough for one too many to arrive, if it may
            self.now -= 1
            await exchange.send(reply)

    watch = Watch()
    proxy.add(Rule(watch))
    narrow = make(max_concurrency=3)
    await asyncio.gather(*(narrow.get("b/b", max_bytes=10) for _ in range(12)))
    assert watch.most == 3


@everywhere
async def test_put_whose_replies_were_lost_is_stored_once(
    store: BotocoreStore, proxy: FaultProxy, transport: Transport
) -> None:
    rule = proxy.add(Rule(faults.LoseReply(), method="PUT"))
    await _fails(store.put_if_absent("once", [BODY]), UnavailableError)
    assert 1 <= rule.fired <= TRIES[transport]
    proxy.clear()
    await _fails(store.put_if_absent("once", [b"another"]), ConflictError)
    assert await store.get("once", max_bytes=AMPLE) == BODY


@everywhere
async def test_put_refused_for_its_checksum_is_sent_without_from_then_on(
    make: Make, proxy: FaultProxy
) -> None:
    store = make()
    refused = faults.s3_error(501, "NotImplemented")
    rules = [proxy.add(Rule(refused, header=header)) for header in CHECKSUM.values()]
    await store.put_if_absent("c", [BODY])
    assert [rule.fired for rule in rules] in ([1, 0], [1, 1])  # the SDK's, then obstore's
    await store.put_if_absent("d", [BODY])
    assert [rule.fired for rule in rules] in ([1, 0], [1, 1])
    assert await store.get("c", max_bytes=AMPLE) == BODY


@for_bodies
async def test_put_refused_for_another_reason_keeps_the_checksum(
    store: BotocoreStore, proxy: FaultProxy, transport: Transport
) -> None:
    proxy.add(Rule(faults.s3_error(501, "NotImplemented"), method="PUT"))
    error = await _fails(store.put_if_absent("c", [BODY]), AccessError, "lacks a feature")
    assert isinstance(error, AccessError)
    assert error.code == "NotImplemented"
    proxy.clear()
    await store.put_if_absent("c", [BODY])
    assert CHECKSUM[transport] in proxy.requests[-1].headers


@pytest.mark.parametrize(
    "fault",
    [faults.s3_error(501, "NotImplemented"), faults.s3_error(405, "MethodNotAllowed"),
     faults.Answer(405), faults.html_page(501)],
)  # fmt: skip
async def test_server_without_batch_deletes_gets_single_ones_and_is_asked_for_a_batch_once(
    fault: Fault, store: BotocoreStore, proxy: FaultProxy
) -> None:
    rule = proxy.add(Rule(fault, method="POST"))
    for _ in range(2):
        assert await store.delete_many(["a", "b/b", "absent"]) == {}
        assert await names(store) == []
        await store.put_if_absent("a", [b"again"])
    assert rule.fired == 1
    # A single one that fails is told with its name.
    proxy.add(Rule(faults.s3_error(403, "AccessDenied"), method="DELETE", target="/a$"))
    left = await store.delete_many(["a", "b"])
    assert {name: type(exc) for name, exc in left.items()} == {"a": AccessError}


DELETED = b"""<DeleteResult><Deleted><Key>%(root)s/a</Key></Deleted>
<Error><Key>%(root)s/b</Key><Code>AccessDenied</Code><Message>no</Message></Error>
<Error><Key>%(root)s/c</Key><Code>InternalError</Code><Message>later</Message></Error>
<Error><Key>%(root)s/d</Key><Code>SlowDown</Code></Error>
<Error><Key>%(root)s/e</Key><Code>NoSuchKey</Code></Error>
<Error><Key>%(root)s/f</Key><Code>Whatever</Code></Error>
<Error><Key>another/g</Key><Code>AccessDenied</Code></Error></DeleteResult>"""


async def test_answer_about_a_batch_tells_for_each_name_what_became_of_it(
    make: Make, proxy: FaultProxy
) -> None:
    store = make(prefix="batch")
    body = DELETED % {b"root": b"batch"}
    proxy.add(Rule(faults.Answer(200, body, {"content-type": "application/xml"})))
    left = await store.delete_many(list("abcdefg"))
    denied, later, slow, odd, silent = (left[name] for name in "bcdfg")
    assert set(left) == set("bcdfg")
    assert isinstance(denied, AccessError)
    assert (denied.code, denied.is_general) == ("AccessDenied", False)
    assert "s3:DeleteObject" in str(denied)
    assert isinstance(later, UnavailableError)
    assert (later.status, later.is_throttle) == (500, False)
    assert isinstance(slow, UnavailableError)
    assert (slow.status, slow.is_throttle) == (503, True)
    assert isinstance(odd, AccessError)
    assert isinstance(silent, UnavailableError)  # the answer does not tell of it
    assert "batch/b" in str(denied)


async def test_batch_goes_out_with_the_md5_that_every_server_knows(
    store: BotocoreStore, proxy: FaultProxy
) -> None:
    assert await store.delete_many(["a", "b/b"]) == {}
    (request,) = proxy.requests
    assert request.method == "POST"
    assert "content-md5" in request.headers
    assert not [name for name in request.headers if name.startswith("x-amz-checksum")]


async def test_names_that_xml_cannot_hold_are_deleted_alone(
    store: BotocoreStore, proxy: FaultProxy
) -> None:
    await store.put_if_absent("bell\a", [b"x"])
    proxy.clear()
    assert await store.delete_many(["bell\a", "a"]) == {}
    assert sorted(request.method for request in proxy.requests) == ["DELETE", "POST"]
    assert await names(store) == ["b/b"]


async def test_listing_that_breaks_on_its_second_page_fails_after_the_first(
    store: BotocoreStore, proxy: FaultProxy
) -> None:
    await store.put_if_absent("c", [b"c"])
    proxy.add(Rule(faults.s3_error(503, "SlowDown"), skip=1))
    seen: list[str] = []

    async def read_all() -> None:
        async for info in store.list(""):
            seen.append(info.name)  # noqa: PERF401 -- what came before the error counts

    await _fails(read_all(), UnavailableError)
    assert len(seen) == 2


@pytest.mark.parametrize("token", ["", "<NextContinuationToken>t</NextContinuationToken>"])
async def test_listing_that_never_advances_is_unavailable(
    token: str, store: BotocoreStore, proxy: FaultProxy
) -> None:
    page = f"<ListBucketResult><IsTruncated>true</IsTruncated>{token}</ListBucketResult>"
    proxy.add(Rule(faults.Answer(200, page.encode(), {"content-type": "application/xml"})))
    await _fails(names(store), UnavailableError, "does not advance")


async def test_listing_that_begins_anew_with_every_token_is_unavailable(
    store: BotocoreStore, proxy: FaultProxy
) -> None:
    class FirstPage:
        asked = 0

        async def apply(self, exchange: Exchange) -> None:
            self.asked += 1
            token = f"<NextContinuationToken>{self.asked}</NextContinuationToken>"
            page = f"<IsTruncated>true</IsTruncated>{token}{_entry(store, 'a')}"
            if self.asked > 50:
                page = ""
            body = f"<ListBucketResult>{page}</ListBucketResult>".encode()
            await exchange.send(Reply(200, {"content-type": "application/xml"}, body))

    pages = FirstPage()
    proxy.add(Rule(pages))
    await _fails(names(store), UnavailableError, "does not advance")
    assert pages.asked == 2


def _entry(store: BotocoreStore, name: str) -> str:
    return f"<Contents><Key>{store._root}{name}</Key><Size>1</Size></Contents>"


async def test_page_of_another_listing_is_unavailable(
    store: BotocoreStore, proxy: FaultProxy
) -> None:
    """As a cache gives it that does not look at the query: a deletion would go beyond its scope."""
    proxy.add(Rule(_listing(_entry(store, "a") + _entry(store, "b/b")), method="GET"))

    async def remove_below(prefix: str) -> None:
        async for info in store.list(prefix):
            await store.delete(info.name)

    await _fails(remove_below("b/"), UnavailableError, "other names were listed")
    await _fails(store.list_folders("b/"), UnavailableError, "other names were listed")
    proxy.clear()
    await _assert_works(store)


async def test_folders_of_a_server_without_delimiter_are_unavailable(
    store: BotocoreStore, proxy: FaultProxy
) -> None:
    proxy.add(Rule(_listing(_entry(store, "a") + _entry(store, "b/b"))))
    await _fails(store.list_folders(""), UnavailableError, "`delimiter` is not heeded")


@for_bodies
async def test_range_from_a_server_without_ranges_is_cut_out_here(
    store: BotocoreStore, proxy: FaultProxy
) -> None:
    proxy.add(Rule(faults.Answer(200, b"0123456789", {"etag": '"x"'})))
    assert await store.get_range("a", 4, 6) == b"456789"
    await _fails(store.get_range("a", 4, 5), CorruptEntryError)


@for_bodies
async def test_range_that_comes_with_the_status_of_a_whole_object_is_the_range(
    store: BotocoreStore, proxy: FaultProxy
) -> None:
    # As `rclone serve s3` answers.
    class Whole:
        async def apply(self, exchange: Exchange) -> None:
            reply = await exchange.forward()
            assert reply.headers["content-range"] == f"bytes 4-9/{len(BODY)}"
            reply.status = 200
            await exchange.send(reply)

    rule = proxy.add(Rule(Whole()))
    assert await store.get_range("a", 4, 6) == BODY[4:10]
    assert rule.fired >= 1


@for_bodies
async def test_bytes_that_are_not_http_are_unavailable(
    store: BotocoreStore, proxy: FaultProxy
) -> None:
    class Mail:
        async def apply(self, exchange: Exchange) -> None:
            await exchange.read_body()
            await exchange.send_raw(b"220 mail.example ESMTP ready\r\n")
            exchange.close()

    proxy.add(Rule(Mail()))
    for operation in OPERATIONS.values():
        await _fails(operation(store), UnavailableError)
    proxy.clear()
    await _assert_works(store)


@for_bodies
async def test_host_that_swallows_connection_requests_is_unavailable(make: Make) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        # Fill the queue of connections that nobody accepts; Linux drops what comes after.
        full = [socket.socket() for _ in range(4)]
        try:
            for client in full:
                client.setblocking(False)
                client.connect_ex(listener.getsockname())
            store = make(
                endpoint_url=f"http://127.0.0.1:{listener.getsockname()[1]}",
                connect_timeout_s=0.3,
            )
            await _fails(store.get("a", max_bytes=10), UnavailableError, r"[Tt]imeout|timed out")
        finally:
            for client in full:
                client.close()


@for_bodies
async def test_close_ends_what_is_under_way_and_what_waits(make: Make, proxy: FaultProxy) -> None:
    store = make(max_concurrency=1, read_timeout_s=600)
    await store.put_if_absent("a", [BODY])
    proxy.clear()
    proxy.add(Rule(faults.Stall(upto=1000)))
    reading = asyncio.create_task(store.get("a", max_bytes=AMPLE))
    waiting = asyncio.create_task(store.get("a", max_bytes=AMPLE))
    async with asyncio.timeout(DEADLINE_S):
        await until(lambda: bool(proxy.requests))
        await store.close()
        for task in (reading, waiting):
            with pytest.raises(UnavailableError):
                await task
    assert len(proxy.requests) == 1
    with pytest.raises(RuntimeError, match="closed"):
        await store.get("a", max_bytes=AMPLE)


@for_bodies
async def test_https_with_the_authority_in_ca_bundle_sends_bodies_unsigned(
    local_s3: LocalS3, on_seaweed: Configure, transport: Transport, issued: Issued
) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(issued.server)
    with FaultProxy(local_s3.endpoint_url, tls=context) as proxy:
        store = transport(
            on_seaweed(endpoint_url=proxy.url, prefix="tls", ca_bundle=issued.authority)
        )
        await store.put_if_absent("a", [BODY])
        put = proxy.requests[-1]
        assert put.headers["x-amz-content-sha256"] == "UNSIGNED-PAYLOAD"
        assert CHECKSUM_OVER_TLS[transport] in put.headers
        assert await store.get("a", max_bytes=AMPLE) == BODY
        await store.delete("a")
        await store.close()


@by(ObstoreStore)
async def test_self_signed_authority_as_server_is_left_to_the_sdk_with_a_warning(
    local_s3: LocalS3,
    on_seaweed: Configure,
    transport: Transport,
    certificate: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    with FaultProxy(local_s3.endpoint_url, tls=context) as proxy:
        settings = on_seaweed(endpoint_url=proxy.url, prefix="self-signed", ca_bundle=certificate)
        store = transport(settings)
        await store.put_if_absent("a", [BODY])
        assert await store.get("a", max_bytes=AMPLE) == BODY
        await store.delete("a")
        await store.close()
    assert caplog.text.count("does the work of obstore here: obstore fails at reads") == 1
