# SPDX-License-Identifier: Apache-2.0
"""Processes killed with saves on their way to a real bucket; the next one finishes them."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from s3ec.config import Settings
from s3ec.counters import Counters
from s3ec.identity import digest_of_name
from s3ec.node import Node
from s3ec.prefetch import Outcome, Want
from s3ec.testing.proxy import Exchange, FaultProxy, Rule
from s3ec.testing.proxy_faults import StallUpload
from s3ec.testing.server import LocalS3
from s3ec.tier import Tier
from tests.faults.saving import NAMESPACE, ROWS, data_at, identifier_at, key_at, spooled_below

pytest.importorskip("torch")

_DEADLINE_S = 60.0
_REPOSITORY = Path(__file__).parents[2]
_OBJECTS = f"/{NAMESPACE.name}/objects/"


class Created:
    """Lets requests through, and remembers which PUT the server took."""

    def __init__(self) -> None:
        self.names: Counter[str] = Counter()

    async def apply(self, exchange: Exchange) -> None:
        reply = await exchange.forward()
        _, _, name = exchange.request.target.partition(_OBJECTS)
        if exchange.request.method == "PUT" and reply.status == 200 and name:
            self.names[name.partition("?")[0]] += 1
        await exchange.send(reply)


class Saver:
    """A process that saves, killed or waited for before the next one starts."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.pid = 0
        self.taken = 0
        self._running = False
        assert self._hear() == "ready"

    def start(self, site: Site, overflow: str, count: int, *, finish: bool = False) -> None:
        order = {
            "settings": site.settings(),
            "overflow": overflow,
            "count": count,
            "finish": finish,
        }
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        self.taken = 0
        self._running = True
        self.hear_until("pid ")  # what the child says may come first

    def hear_until(self, word: str) -> str:
        while True:
            line = self._hear()
            if line.startswith("pid "):
                self.pid = int(line[4:])
            if line == "gone":
                self._running = False
            self.taken += line.startswith("put ")
            assert line, "it ended early"
            assert line != "gone" or word == line, "its child ended early"
            assert not line.startswith("refused")
            if line.startswith(word):
                return line

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self.hear_until("gone")

    def end(self) -> None:
        """What a failed test left running."""
        if self._running:
            self.kill()

    def _hear(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


class Site:
    """A bucket behind a proxy, and one node's cache folder."""

    def __init__(self, proxy: FaultProxy, bucket: str, server: LocalS3, cache_dir: Path) -> None:
        self.proxy = proxy
        self.bucket = bucket
        self.cache_dir = cache_dir
        self.created = Created()
        self.proxy.add(Rule(self.created))
        self._client = server.client()

    def settings(self, **other: str) -> dict[str, str]:
        return {
            "bucket": self.bucket,
            "endpoint_url": self.proxy.url,
            "region": "us-east-1",
            "cache_dir": str(self.cache_dir),
            "min_free_bytes": "0",
            "read_timeout_s": "60",
            **other,
        }

    def stall(self, after: int) -> None:
        """Let so many objects through, and no more."""
        self.proxy.add(Rule(StallUpload(), method="PUT", target=_OBJECTS, skip=after))

    def let_through(self) -> None:
        self.proxy.clear()
        self.proxy.add(Rule(self.created))

    def objects(self) -> set[str]:
        pages = self._client.get_paginator("list_objects_v2").paginate(
            Bucket=self.bucket, Prefix=_OBJECTS[1:]
        )
        return {
            entry["Key"][len(_OBJECTS) - 1 :]
            for page in pages
            for entry in page.get("Contents", ())
        }

    def spooled(self) -> set[str]:
        return spooled_below(self.cache_dir)

    def entries(self) -> set[str]:
        folder = self.cache_dir / "v1" / "objects" / NAMESPACE.name
        return {str(path.relative_to(folder)) for path in folder.rglob("*.safetensors")}

    def tier_complaints(self) -> list[str]:
        """The audit, after the sweep that every start of a process does."""
        tier = Tier(
            self.cache_dir,
            NAMESPACE.name,
            budget_bytes=2**30,
            min_free_bytes=0,
            counters=Counters(),
        )
        tier.open()
        try:
            return tier.check()
        finally:
            tier.close()


@pytest.fixture
def site(local_s3: LocalS3, s3_bucket: str, tmp_path: Path) -> Iterator[Site]:
    with FaultProxy(local_s3.endpoint_url) as proxy:
        yield Site(proxy, s3_bucket, local_s3, tmp_path / "cache")


@pytest.fixture
def saver(saver_process: Saver) -> Iterator[Saver]:
    yield saver_process
    saver_process.end()


@pytest.fixture(scope="module")
def saver_process(local_s3: LocalS3) -> Iterator[Saver]:
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("saving.py"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **local_s3.env(), "PYTHONPATH": str(_REPOSITORY)},
        start_new_session=True,
    )
    group = process.pid

    def end() -> None:
        os.killpg(group, signal.SIGKILL)

    # A process that hangs would hang its test in readline.
    deadline = threading.Timer(3 * _DEADLINE_S, end)
    deadline.start()
    try:
        yield Saver(process)
    finally:
        deadline.cancel()
        end()
        with process:
            pass
        deadline.join()


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)


def assert_all_is_well(
    site: Site, count: int, local_s3: LocalS3, empty: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each object once, the spool empty, and a fresh node reads everything back."""
    names = {key_at(number).name for number in range(count)}
    assert site.objects() == names
    assert site.created.names == Counter(names)
    assert list((site.cache_dir / "v1" / "spool").iterdir()) == []
    assert site.tier_complaints() == []

    for name, value in local_s3.env().items():
        monkeypatch.setenv(name, value)
    node = Node(Settings.model_validate(site.settings(cache_dir=str(empty))), NAMESPACE)
    try:
        node.prefetcher.submit([Want(key_at(number), "image", ROWS) for number in range(count)])
        fetched = []

        def have_all() -> bool:
            fetched.extend(node.prefetcher.drain())
            return len(fetched) == count

        eventually(have_all)
        assert {(one.outcome, one.source) for one in fetched} == {(Outcome.READY, "bucket")}
        by_identifier = {one.want.key.identifier: one.pin for one in fetched}
        for number in range(count):
            pin = by_identifier[identifier_at(number)]
            assert pin is not None
            assert pin.path.read_bytes()[pin.header.data_start :] == data_at(number)
        assert node.tier.check() == []
    finally:
        node.close(5)


@pytest.mark.parametrize("finisher", ["block", "drop"])
def test_process_killed_with_a_full_queue_is_finished_by_the_next_one(
    site: Site,
    saver: Saver,
    local_s3: LocalS3,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    finisher: str,
) -> None:
    site.stall(after=0)
    saver.start(site, "drop" if finisher == "block" else "block", 20)
    saver.hear_until("all")
    eventually(lambda: len(site.spooled()) == 20)
    saver.kill()
    assert saver.taken == len(site.spooled()) == 20  # the queue was not empty
    assert site.objects() == set()
    assert site.tier_complaints() == []

    site.let_through()
    saver.start(site, finisher, 20, finish=True)
    assert saver.hear_until("left") == "left 0 errors 0"
    assert saver.taken == 0  # nothing was encoded again
    saver.hear_until("gone")
    assert_all_is_well(site, 20, local_s3, tmp_path / "empty", monkeypatch)


def test_fifteen_kills_at_random_lose_nothing_that_the_tier_shows(
    site: Site,
    saver: Saver,
    local_s3: LocalS3,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")  # noqa: T201 - shown when it fails
    chance = random.Random(seed)
    count = spooled = 0
    for _ in range(15):
        count += 6
        site.let_through()
        site.stall(after=chance.randrange(4))
        before = site.objects()
        saver.start(site, chance.choice(["block", "drop"]), count)
        for _ in range(chance.randint(4, 6)):  # more than are let through, even with adopted ones
            saver.hear_until("put ")
        time.sleep(chance.random() * 0.05)  # not to order anything: to hit any moment
        saver.kill()
        assert saver.taken > len(site.objects() - before)  # the queue was not empty
        spooled += len(site.spooled())
        # Whatever this node would not encode again is in the bucket or on its way there.
        missing = site.entries() - site.objects()
        assert {digest_of_name(name).hex() for name in missing} <= site.spooled()
    assert spooled > 0
    site.let_through()
    saver.start(site, "block", count, finish=True)
    assert saver.hear_until("left") == "left 0 errors 0"
    saver.hear_until("gone")
    assert_all_is_well(site, count, local_s3, tmp_path / "empty", monkeypatch)
