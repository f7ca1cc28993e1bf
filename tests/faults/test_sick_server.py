# SPDX-License-Identifier: Apache-2.0
"""A server that answers badly, slowly or not at all, met by one process's node.

Through the real transports, with a proxy in front of a real server. Whatever happens, a fetch ends
in its time with verified bytes or with a miss, a save is stored once or waits on disk, and when the
fault ends both go on by themselves.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from s3ec.config import load_settings
from s3ec.dev.rigs import proxy_faults as faults
from s3ec.dev.rigs.proxy import Fault, FaultProxy, Rule
from s3ec.prefetch import FetchOutcome, FetchRequest, FetchResult
from s3ec.testing.server import LocalS3
from tests.faults.embeddings import ROWS, body_at, key_at
from tests.faults.engine import Engine
from tests.faults.site import OBJECTS, Site
from tests.support.waiting import eventually, stop

torch = pytest.importorskip("torch")

READY, UNAVAILABLE = FetchOutcome.READY, FetchOutcome.UNAVAILABLE
SLOW_DOWN = faults.s3_error(503, "SlowDown")


class Rig(Engine):
    """An engine that saves, and the pictures that it has not seen yet."""

    def __init__(self, settings: dict[str, Any], site: Site | None) -> None:
        super().__init__(load_settings(settings).settings.model_dump(), saves=True)
        self.site = site
        self.last = 0

    def fresh(self, *, in_bucket: bool) -> int:
        self.last += 1
        if in_bucket:
            assert self.site is not None
            self.site.stock(self.last)
        return self.last

    @property
    def kept(self) -> float:
        """Embeddings that the bucket took, or had."""
        return self.count("save.items") + self.count("save.existed")

    def hits_come_back(self) -> None:
        self.fetch_in_the_end(self.fresh(in_bucket=True))

    def close(self, drain_s: float | None = 30, *, close_s: float = 5) -> int:
        left = super().close(drain_s, close_s=close_s)
        assert self.node.endpoint.places.used == 0
        return left


def limits(cache_dir: Path, **other: Any) -> dict[str, Any]:
    return {
        "cache_dir": str(cache_dir),
        "region": "us-east-1",
        "min_free_bytes": 0,
        "connect_timeout_s": 10.0,
        "read_timeout_s": 5.0,
        "defer_timeout_s": 8.0,
        "index_refresh_s": 0.2,
        "hedge": False,  # requests are counted here
        **other,
    }


@pytest.fixture(scope="module")
def rig(local_s3: LocalS3, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """By the default transport; what each one makes of a fault is asked in tests/contract."""
    bucket = "sick"
    cache_dir = tmp_path_factory.mktemp("cache")
    with FaultProxy(local_s3.endpoint_url) as proxy, pytest.MonkeyPatch.context() as environment:
        for name, value in local_s3.env().items():
            environment.setenv(name, value)
        site = Site(proxy, bucket, local_s3, cache_dir)
        site.client.create_bucket(Bucket=bucket)
        site.stock()
        place = {"bucket": bucket, "endpoint_url": proxy.url, "transport": "obstore"}
        rig = Rig(limits(cache_dir, **place), site)
        rig.node.follow_the_bucket()
        rig.save(rig.fresh(in_bucket=False))  # asks what the server promises, once
        eventually(lambda: rig.kept == 1)
        yield rig
        rig.close()


@pytest.fixture
def proxy(rig: Rig) -> Iterator[FaultProxy]:
    assert rig.site is not None
    rig.site.let_through()
    rig.hits_come_back()
    for _ in range(20):  # so that no test depends on what those before it spent
        rig.node.endpoint.budget.pay_in()
    yield rig.site.proxy
    rig.site.let_through()


# -- reading -----------------------------------------------------------------------------------

ONCE: dict[str, tuple[Fault, str]] = {
    # Repeated by botocore at once, for obstore does not tell what it was.
    "503": (SLOW_DOWN, ""),
    "reset": (faults.Reset(), ""),
    "silence within the body": (faults.Stall(upto=1000), "store.retries"),
    "cut": (faults.Cut(1000), "corrupt.length"),
    "a flipped bit": (faults.Flip(6000), "corrupt.checksum"),
}


@pytest.mark.parametrize("what", ONCE)
def test_a_fault_that_comes_once_is_made_good_by_one_repetition(
    what: str, rig: Rig, proxy: FaultProxy
) -> None:
    fault, counter = ONCE[what]
    number = rig.fresh(in_bucket=True)
    before = rig.count(counter)
    rule = proxy.add(Rule(fault, method="GET", target=OBJECTS, times=1))
    assert rig.fetch(number).outcome is READY
    assert rule.fired == 1
    assert not counter or rig.count(counter) == before + 1
    asked = [one for one in proxy.requests if key_at(number).name in one.target]
    assert len(asked) == 2


@pytest.mark.parametrize(
    "fault",
    [faults.html_page(), faults.Cut(1000)],
    ids=["page", "cut"],
)
def test_what_the_way_does_to_an_embedding_makes_no_object_bad(
    fault: Fault, rig: Rig, proxy: FaultProxy
) -> None:
    """Its key would be denied for an hour, and nothing stored under its name."""
    number = rig.fresh(in_bucket=True)
    rule = proxy.add(Rule(fault, method="GET", target=OBJECTS))
    assert rig.fetch(number).outcome is UNAVAILABLE
    proxy.remove(rule)
    rig.fetch_in_the_end(number)
    assert not rig.count("bad_objects")


@pytest.mark.parametrize(
    ("fault", "counter"),
    [(SLOW_DOWN, "pace.slowed"), (faults.Stall(), "")],
    ids=["503", "silence"],
)
def test_a_fault_that_stays_opens_the_breaker_and_closes_it_when_it_goes(
    fault: Fault, counter: str, rig: Rig, proxy: FaultProxy
) -> None:
    opened, moved = rig.count("breaker.opened"), rig.count(counter)
    number = rig.fresh(in_bucket=True)
    rule = proxy.add(Rule(fault))
    while not rig.node.breaker.is_open:
        assert rig.fetch(number).outcome is UNAVAILABLE
    assert rule.fired >= 1
    assert rig.count("breaker.opened") == opened + 1
    assert not counter or rig.count(counter) > moved
    assert rig.site is not None
    rig.site.let_through()
    eventually(lambda: not rig.node.breaker.is_open)  # by the look at the index, without traffic
    rig.hits_come_back()


def test_one_503_in_ten_is_hardly_noticed(rig: Rig, proxy: FaultProxy) -> None:
    opened = rig.count("breaker.opened")
    numbers = [rig.fresh(in_bucket=True) for _ in range(20)]
    rules = [proxy.add(Rule(SLOW_DOWN, target=OBJECTS, skip=skip, times=1)) for skip in (3, 7, 12)]
    outcomes = [rig.fetch(number).outcome for number in numbers]
    assert outcomes.count(READY) >= 19  # the budget may be spent by what came before
    assert [rule.fired for rule in rules] == [1, 1, 1]
    assert rig.count("breaker.opened") == opened


# -- writing -----------------------------------------------------------------------------------

NOT_STORED_YET: dict[str, tuple[Fault, int]] = {
    "503": (SLOW_DOWN, 2),
    "409": (faults.s3_error(409, "ConditionalRequestConflict"), 2),
    "200 with an error": (faults.Answer(200, b"<Error><Code>InternalError</Code></Error>"), 2),
    "its reply lost": (faults.LoseReply(), 1),
}


@pytest.mark.parametrize("what", NOT_STORED_YET)
def test_a_save_is_stored_once_whatever_the_first_answers_were(
    what: str, rig: Rig, proxy: FaultProxy
) -> None:
    fault, times = NOT_STORED_YET[what]
    number = rig.fresh(in_bucket=False)
    before = rig.kept
    rule = proxy.add(Rule(fault, method="PUT", target=OBJECTS, times=times))
    rig.save(number)
    eventually(lambda: rig.kept == before + 1)
    assert rule.fired == times
    assert rig.site is not None
    assert rig.site.body(key_at(number).name) == body_at(number)
    eventually(lambda: not rig.site or not rig.site.spooled())
    assert rig.kept == before + 1


def test_saves_wait_on_disk_while_the_server_only_refuses_and_none_is_lost(
    rig: Rig, proxy: FaultProxy
) -> None:
    numbers = [rig.fresh(in_bucket=False) for _ in range(6)]
    before, failed = rig.kept, rig.count("save_problem.unavailable")
    rule = proxy.add(Rule(SLOW_DOWN))
    for number in numbers:
        rig.save(number)
    eventually(lambda: rig.node.breaker.is_open)
    eventually(lambda: rig.count("save_problem.unavailable") > failed)
    assert rig.site is not None
    eventually(lambda: rig.site is not None and len(rig.site.spooled()) == len(numbers))
    assert rule.fired
    rig.site.let_through()
    eventually(lambda: rig.kept == before + len(numbers))
    assert {key_at(number).name for number in numbers} <= rig.site.objects()


# -- no server ---------------------------------------------------------------------------------


@pytest.fixture(params=["refused", "black hole"])
def nowhere(request: pytest.FixtureRequest) -> Iterator[str]:
    """A URL at which nothing answers."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        if request.param == "black hole":
            listener.listen(0)
            # Fill the queue of connections that nobody accepts; Linux drops what comes after.
            for _ in range(4):
                client = stack.enter_context(socket.socket())
                client.setblocking(False)
                client.connect_ex(listener.getsockname())
        yield url


def test_a_node_without_a_server_starts_and_soon_asks_no_more(
    nowhere: str,
    tmp_path: Path,
    signed: None,
) -> None:
    place = {"bucket": "corpus", "endpoint_url": nowhere}
    rig = Rig(limits(tmp_path, connect_timeout_s=0.5, **place), None)
    rig.node.follow_the_bucket()
    number = rig.fresh(in_bucket=False)
    while not rig.node.breaker.is_open:
        assert rig.fetch(number).outcome is UNAVAILABLE
    assert rig.count("breaker.opened") == 1
    rig.save(number)
    eventually(lambda: rig.count("save_problem.unavailable") > 0)
    assert rig.close(0.1) == 1
    assert rig.count("spool.left") == 1


def test_a_server_killed_while_it_reads_and_writes_loses_nothing_and_is_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LocalS3(tmp_path / "server") as server:
        for name, value in server.env().items():
            monkeypatch.setenv(name, value)
        server.client().create_bucket(Bucket="corpus")
        with FaultProxy(server.endpoint_url) as proxy:
            site = Site(proxy, "corpus", server, tmp_path / "cache")
            site.stock()
            place = {"bucket": "corpus", "endpoint_url": server.endpoint_url}
            # No silence opens the breaker before the requests are under way.
            rig = Rig(limits(tmp_path / "cache", read_timeout_s=60.0, **place), site)
            rig.node.follow_the_bucket()
            wanted, saved = rig.fresh(in_bucket=True), rig.fresh(in_bucket=False)
            rig.save(rig.fresh(in_bucket=False))
            eventually(lambda: rig.kept == 1)
            assert server.pid is not None
            stop(server.pid)  # so that no request is over before the kill
            rig.save(saved)
            rig.node.prefetcher.submit([FetchRequest(key_at(wanted), "image", ROWS)])
            eventually(lambda: rig.node.endpoint.places.used >= 2)
            server.kill()
            done: list[FetchResult] = []
            eventually(lambda: bool(done.extend(rig.node.prefetcher.drain()) or done))
            assert done[0].outcome is UNAVAILABLE
            eventually(lambda: rig.node.breaker.is_open)
            assert site.spooled()
            server.restart()
            eventually(lambda: rig.kept == 2)
            eventually(lambda: not rig.node.breaker.is_open)
            assert rig.fetch(wanted).outcome is READY
            assert key_at(saved).name in site.objects()
            rig.close()
