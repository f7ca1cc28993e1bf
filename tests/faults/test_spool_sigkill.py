# SPDX-License-Identifier: Apache-2.0
"""Processes killed with saves on their way to a real bucket; the next one finishes them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from s3ec.identity import digest_of_name
from s3ec.prefetch import FetchOutcome
from tests.faults.embeddings import key_at
from tests.faults.engine import Engine
from tests.faults.herd import Herd
from tests.faults.site import Site
from tests.support.on_disk import audit_of
from tests.support.waiting import eventually

pytest.importorskip("torch")
pytestmark = pytest.mark.usefixtures("signed")


class Savers:
    """Processes that save the numbers from 0 on, one after the other."""

    def __init__(self, site: Site, herd: Herd) -> None:
        self._site, self._herd = site, herd

    def start(self, overflow: str, count: int, *, finish: bool = False) -> int:
        return self._herd.start(
            "save", settings=self._site.settings(), overflow=overflow, count=count, finish=finish
        )

    def taken(self, pid: int) -> int:
        """How many it was let save so far."""
        return sum(who == pid and words.startswith("put ") for who, words in self._herd.said)

    def finish(self, overflow: str, count: int) -> int:
        """One that sees everything into the bucket; how many it saved itself."""
        pid = self.start(overflow, count, finish=True)
        assert self._herd.hear(pid, "left") == "left 0"
        self._herd.wait(pid)
        assert self._herd.complaints() == []
        return self.taken(pid)


@pytest.fixture
def savers(site: Site, herd: Herd) -> Savers:
    return Savers(site, herd)


def assert_all_is_well(site: Site, count: int, empty: Path) -> None:
    """Each object once, the spool empty, and a fresh node reads everything back."""
    names = {key_at(number).name for number in range(count)}
    assert site.objects() == names
    assert site.created.names == Counter(names)
    assert site.announced() == {digest_of_name(name) for name in names}
    assert list((site.cache_dir / "v1" / "spool").iterdir()) == []
    assert site.tier_complaints() == []
    with Engine.at(site, empty) as engine:
        granted = engine.grant(*range(count)).values()
        assert {(one.outcome, one.source) for one in granted} == {(FetchOutcome.READY, "bucket")}
        assert audit_of(engine.node.tier) == []


@pytest.mark.parametrize("finisher", ["block", "drop"])
def test_process_killed_with_a_full_queue_is_finished_by_the_next_one(
    site: Site, herd: Herd, savers: Savers, tmp_path: Path, finisher: str
) -> None:
    site.stall(after=0)
    pid = savers.start("drop" if finisher == "block" else "block", 20)
    herd.hear(pid, "all")
    # An entry is in the spool before it is in the tier: one in between is encoded again.
    eventually(lambda: len(site.spooled()) == len(site.entries()) == 20)
    herd.kill(pid)
    assert savers.taken(pid) == len(site.spooled()) == 20  # the queue was not empty
    assert site.objects() == set()
    assert site.tier_complaints() == []

    site.let_through()
    assert savers.finish(finisher, 20) == 0  # nothing was encoded again
    assert_all_is_well(site, 20, tmp_path / "empty")


@pytest.mark.parametrize("reached", [False, True])
def test_process_killed_between_upload_and_announcement_is_announced_by_the_next_one(
    site: Site, herd: Herd, savers: Savers, tmp_path: Path, reached: bool
) -> None:
    """The delta has not got to the bucket, or its reply not back to the process."""
    site.stall_announcements(reached=reached)
    pid = savers.start("block", 6)
    herd.hear(pid, "all")
    eventually(lambda: len(site.objects()) == 6)
    if reached:
        eventually(lambda: site.announced() != set())
    herd.kill(pid)
    assert len(site.spooled()) == 6
    assert reached or site.announced() == set()

    site.let_through()
    assert savers.finish("block", 6) == 0  # nothing was encoded again
    assert_all_is_well(site, 6, tmp_path / "empty")
