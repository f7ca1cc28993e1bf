# SPDX-License-Identifier: Apache-2.0
"""Processes killed: one before each change it makes on the disk, others at random in a crowd."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from s3ec.tier.files import Folders, try_lock
from s3ec.tier.inspection import evicted_and_open
from s3ec.tier.scan import SpoolFileName
from tests.faults.embeddings import body_at, key_at
from tests.faults.herd import Herd
from tests.faults.killing import CALLS
from tests.faults.site import Site
from tests.support.waiting import eventually

pytest.importorskip("torch")

_REPOSITORY = Path(__file__).parents[2]
_STOCK = 24
_AT_ONCE = 6
_KILLS = 20
_KILLED_AT_ONCE = 2  # with one another, as a node short of memory does it
# About 90 entries: less than all that is fetched and saved, so that eviction takes part.
_CACHE_BYTES = 6 * 2**20
# What the next start sweeps.
_SWEPT = "was left by a writer that died"


def dead_spools(cache_dir: Path) -> int:
    """How many entries wait in the spools of the dead."""
    spool = cache_dir / "v1" / "spool"
    dead = 0
    for path in spool.glob("*--*"):
        parts = SpoolFileName.parse(path.name)
        assert parts is not None
        try:
            with (spool / f"{parts.owner}.lock").open("rb") as lock:
                dead += try_lock(lock.fileno())
        except FileNotFoundError:  # another one has just adopted and finished it
            continue
    return dead


def assert_bucket_is_right(site: Site, numbers: range) -> None:
    """What the bucket confirmed is there, bit for bit; what it took, it took once."""
    by_name = {key_at(number).name: number for number in numbers}
    objects = site.objects()
    assert objects == site.stocked | set(site.created.names)
    assert set(site.created.names.values()) == {1}
    assert site.entries() <= objects
    for name in objects:
        assert site.body(name) == body_at(by_name[name])


class Killer:
    """Keeps a few children at work and kills some of them, again and again.

    Attributes:
        left: How often the dead left something, by kind.
    """

    def __init__(self, site: Site, herd: Herd, chance: random.Random) -> None:
        self._site = site
        self._herd = herd
        self._chance = chance
        self._living: list[int] = []
        self.settings = site.settings(cache_bytes=str(_CACHE_BYTES))
        self.first = _STOCK
        self.left: Counter[str] = Counter()

    def fill_up(self) -> None:
        while len(self._living) < _AT_ONCE:
            self.first += 2
            pid = self._herd.start(
                "live",
                settings=self.settings,
                seed=self._chance.randrange(2**32),
                stock=_STOCK,
                first=self.first,
            )
            self._living.append(pid)

    def kill(self, count: int) -> None:
        self._chance.shuffle(self._living)
        chosen, self._living = self._living[:count], self._living[count:]
        self._herd.kill(*chosen)
        self.left["spooled"] += dead_spools(self._site.cache_dir)

    def check(self) -> None:
        """What must hold at any moment, while the others go on."""
        complaints = self._site.complaints_unswept()
        assert [line for line in complaints if not line.endswith(_SWEPT)] == []
        self.left.update(_SWEPT for line in complaints if line.endswith(_SWEPT))
        eventually(lambda: not self._site.lost())
        assert self._herd.complaints() == []


def test_process_killed_before_each_change_on_the_disk_leaves_what_the_next_one_finishes(
    tmp_path: Path,
) -> None:
    """Publish, receive, save, adopt, use, evict, delete, and the writes in their middle too."""
    done = subprocess.run(
        [sys.executable, str(_REPOSITORY / "tests/faults/killing.py"), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(_REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["most_waiting"] == 2  # the queue was not empty
    killed = report["killed"]
    assert set(CALLS) - set(killed) == set()
    assert killed["half a writev"] == killed["writev"] > 0
    assert sum(killed.values()) > 100


@pytest.mark.parametrize("seed", [None])
def test_kills_at_random_in_a_crowd_lose_nothing_and_serve_no_wrong_byte(
    site: Site, herd: Herd, seed: int | None
) -> None:
    seed = random.randrange(2**32) if seed is None else seed
    print(f"seed {seed}")  # noqa: T201 - shown when it fails
    chance = random.Random(seed)
    site.stock(*range(_STOCK))
    killer = Killer(site, herd, chance)
    for _ in range(0, _KILLS, _KILLED_AT_ONCE):
        killer.fill_up()
        time.sleep(chance.random() * 0.2)  # not to order anything: to hit any moment
        killer.kill(_KILLED_AT_ONCE)
        killer.check()
    # These have something on its way for certain.
    site.stall(after=0)
    killer.fill_up()
    eventually(lambda: bool(site.spooled()))
    killer.kill(_AT_ONCE)
    killer.check()
    assert evicted_and_open(Folders(site.cache_dir)) == {}  # death has closed it all
    site.let_through()
    # The kills did hit something.
    print(dict(killer.left))  # noqa: T201
    assert killer.left["spooled"] > 0

    last = herd.start("finish", settings=killer.settings)
    assert herd.hear(last, "left") == "left 0"
    herd.wait(last)
    assert herd.complaints() == []
    assert site.tier_complaints() == []
    assert list((site.cache_dir / "v1" / "spool").iterdir()) == []
    assert_bucket_is_right(site, range(killer.first + 12))
