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
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from s3ec.identity import digest_of_name
from s3ec.node import Node
from s3ec.prefetch import FetchOutcome, FetchRequest
from s3ec.settings import Settings
from s3ec.testing.server import LocalS3
from tests.faults.saving import NAMESPACE, ROWS, data_at, identifier_at, key_at
from tests.faults.site import DEADLINE_S, Site, eventually
from tests.support.on_disk import audit_of

pytest.importorskip("torch")

_REPOSITORY = Path(__file__).parents[2]


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
        with suppress(ProcessLookupError):  # it may be at its end
            os.kill(self.pid, signal.SIGKILL)
        self.hear_until("gone")

    def end(self) -> None:
        """What a failed test left running."""
        if self._running:
            self.kill()

    def _hear(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


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
    deadline = threading.Timer(3 * DEADLINE_S, end)
    deadline.start()
    try:
        yield Saver(process)
    finally:
        deadline.cancel()
        end()
        with process:
            pass
        deadline.join()


def assert_all_is_well(
    site: Site, count: int, local_s3: LocalS3, empty: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each object once, the spool empty, and a fresh node reads everything back."""
    names = {key_at(number).name for number in range(count)}
    assert site.objects() == names
    assert site.created.names == Counter(names)
    assert site.announced() == {digest_of_name(name) for name in names}
    assert list((site.cache_dir / "v1" / "spool").iterdir()) == []
    assert site.tier_complaints() == []

    for name, value in local_s3.env().items():
        monkeypatch.setenv(name, value)
    node = Node(Settings.model_validate(site.settings(cache_dir=str(empty))), NAMESPACE)
    try:
        node.prefetcher.submit(
            [FetchRequest(key_at(number), "image", ROWS) for number in range(count)]
        )
        fetched = []

        def have_all() -> bool:
            fetched.extend(node.prefetcher.drain())
            return len(fetched) == count

        eventually(have_all)
        assert {(one.outcome, one.source) for one in fetched} == {(FetchOutcome.READY, "bucket")}
        by_identifier = {one.want.key.identifier: one.pin for one in fetched}
        for number in range(count):
            pin = by_identifier[identifier_at(number)]
            assert pin is not None
            assert pin.path.read_bytes()[pin.header.data_start :] == data_at(number)
        assert audit_of(node.tier) == []
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
    # An entry is in the spool before it is in the tier: one in between is encoded again.
    eventually(lambda: len(site.spooled()) == len(site.entries()) == 20)
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


@pytest.mark.parametrize("reached", [False, True])
def test_process_killed_between_upload_and_announcement_is_announced_by_the_next_one(
    site: Site,
    saver: Saver,
    local_s3: LocalS3,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    reached: bool,
) -> None:
    """The delta has not got to the bucket, or its reply not back to the process."""
    site.stall_announcements(reached=reached)
    saver.start(site, "block", 6)
    saver.hear_until("all")
    eventually(lambda: len(site.objects()) == 6)
    if reached:
        eventually(lambda: site.announced() != set())
    saver.kill()
    assert len(site.spooled()) == 6
    assert reached or site.announced() == set()

    site.let_through()
    saver.start(site, "block", 6, finish=True)
    assert saver.hear_until("left") == "left 0 errors 0"
    assert saver.taken == 0  # nothing was encoded again
    saver.hear_until("gone")
    assert_all_is_well(site, 6, local_s3, tmp_path / "empty", monkeypatch)
