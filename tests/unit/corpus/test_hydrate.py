# SPDX-License-Identifier: Apache-2.0
"""Hydrate: what comes, what stays, what is left out, and what a killed run leaves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from s3ec.config import load_settings
from s3ec.corpus import Corpus
from s3ec.corpus.hydrate import Hydration
from s3ec.counters import Counters
from s3ec.errors import ConfigError, UnavailableError
from s3ec.identity import Layout, make_key
from s3ec.node import open_tier
from s3ec.store.base import Store
from s3ec.store.endpoint import Endpoint
from s3ec.store.places import Place, PlacesStore
from s3ec.testing.fault_store import Fault, FaultStore, Gate, Script
from s3ec.testing.memory_store import MemoryStore
from s3ec.tier.entries import LocalKeys
from s3ec.tier.tier import Tier
from tests.support.corpora import Bucket
from tests.support.on_disk import audit_of
from tests.support.waiting import DEADLINE_S, eventually
from tests.unit.cli.corpus import MODEL, content_hash, entry_bytes

IDS = [content_hash(f"picture {number}") for number in range(12)]
CLIENTS = "page 12 of a report"
ADAPTERS = f"my-lora:{content_hash('a')}"
ROWS = 64  # of the entries that have a size to speak of
NBYTES = len(entry_bytes(IDS[0], "x" * 30, rows=ROWS))

RECORD = b'{"width": 8, "dtype": "bfloat16"}'


class Rig:
    """A bucket in memory with one namespace, and this node's folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.memory = MemoryStore()
        self.stores: list[FaultStore] = []
        self.opened: list[Corpus] = []
        self.name = self.bucket().namespace(MODEL)
        self.layout = Layout(self.name)
        self.bucket().put(self.layout.modality("image"), RECORD)

    def open(self, *faults: Fault, **changes: object) -> Corpus:
        store = FaultStore(MemoryStore(self.memory.bucket), Script(list(faults)))
        self.stores.append(store)
        folder = {"bucket": "corpus", "cache_dir": str(self.root), "min_free_bytes": 0}
        settings = load_settings({**folder, **changes}).settings
        corpus = Corpus(settings, store=store, attempts=2)
        self.opened.append(corpus)
        return corpus

    def bucket(self) -> Bucket:
        return Bucket(self.open())

    def fill(self, *identifiers: str) -> None:
        for one in identifiers:
            self.bucket().entry(self.name, one, entry_bytes(one, self.name, rows=ROWS))

    def tier(self) -> Tier:
        settings = load_settings({"bucket": "corpus", "cache_dir": str(self.root)}).settings
        return open_tier(settings, self.name, Counters())

    def is_here(self, *identifiers: str) -> bool:
        """Whether all of them can be opened, as an engine does it."""
        tier = self.tier()
        try:
            keys = [make_key(one) for one in identifiers]
            return all(key is not None and tier.entries.open(key) is not None for key in keys)
        finally:
            tier.close()

    def names(self) -> set[str]:
        tier = self.tier()
        try:
            return set(tier.entries.names())
        finally:
            tier.close()

    def path(self, identifier: str) -> Path:
        key = make_key(identifier)
        assert key is not None
        return self.root / "v1" / "objects" / self.name / key.name

    def requests(self, *ops: str) -> int:
        """How many there were so far; for bodies where no other is named."""
        return sum(store.calls[op] for store in self.stores for op in ops or ("get", "get_range"))


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path / "cache")
    yield rig
    for corpus in rig.opened:
        corpus.close()
    if rig.root.exists():
        tier = rig.tier()
        assert audit_of(tier) == []
        tier.close()


# -- what comes --------------------------------------------------------------------------------


def test_everything_comes_and_engines_can_pin_it(rig: Rig) -> None:
    rig.fill(*IDS, CLIENTS, ADAPTERS)
    found = rig.open().hydrate()
    assert (found.fetched, found.status, found.wanted) == (14, "complete", 14)
    assert found.fetched_bytes == sum(
        len(entry_bytes(one, rig.name, rows=ROWS)) for one in (*IDS, CLIENTS, ADAPTERS)
    )
    assert rig.is_here(*IDS, CLIENTS, ADAPTERS)


def test_what_is_here_costs_no_request_and_a_second_run_goes_on(rig: Rig) -> None:
    rig.fill(*IDS[:4])
    rig.open().hydrate(IDS[:2])
    before = rig.requests()
    found = rig.open().hydrate()
    assert (found.here, found.fetched, found.status) == (2, 2, "complete")
    assert rig.requests() == before + 2 + 1  # and the modality's record
    before = rig.requests()
    assert rig.open().hydrate().here == 4
    assert rig.requests() == before


def test_a_list_names_identifiers_labels_and_entries(rig: Rig) -> None:
    rig.fill(*IDS[:4], CLIENTS)
    corpus = rig.open()
    assert corpus.hydrate([IDS[0], CLIENTS]).fetched == 2
    entries = [one for one in corpus.list() if one.identifier == IDS[1]]
    assert corpus.hydrate(entries).fetched == 1
    [label] = [one.label for one in corpus.list() if one.label.startswith("x-")]
    rig.fill(ADAPTERS)
    [other] = [one.label for one in corpus.list() if one.label.startswith("my-lora:")]
    found = corpus.hydrate([label, other])
    assert (found.here, found.fetched) == (1, 1)
    assert rig.is_here(*IDS[:2], CLIENTS, ADAPTERS)
    assert not rig.is_here(IDS[2])


def test_large_entries_come_by_ranges(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.fill(IDS[0], CLIENTS)
    large = entry_bytes(IDS[1], rig.name, rows=20_000)
    rig.bucket().entry(rig.name, IDS[1], large)
    for module in ("s3ec.corpus.hydrate", "s3ec.corpus.entries", "s3ec.store.base"):
        monkeypatch.setattr(f"{module}.PART_BYTES", 2**16)
    found = rig.open().hydrate([IDS[1], IDS[0]])
    assert (found.fetched, found.status) == (2, "complete")
    assert rig.path(IDS[1]).read_bytes() == large
    assert rig.requests("get_range") > len(large) // 2**16


def test_entries_of_any_size_come_from_the_replica_also_while_home_is_down(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.fill(IDS[0])
    large = entry_bytes(IDS[1], rig.name, rows=20_000)
    rig.bucket().entry(rig.name, IDS[1], large)
    for module in ("s3ec.corpus.hydrate", "s3ec.corpus.entries", "s3ec.store.base"):
        monkeypatch.setattr(f"{module}.PART_BYTES", 2**16)
    # The record is read once.
    once = Fault("get", "/modality/", error=UnavailableError, skip=1)
    near = FaultStore(MemoryStore(rig.memory.bucket), Script([once]))

    def places(_: object, home: Store, counters: Counters, *, is_entry: Any) -> PlacesStore:
        return PlacesStore(home, [Place("near", near, Endpoint(16), counters)], is_entry=is_entry)

    monkeypatch.setattr("s3ec.corpus.hydrate.open_places", places)
    corpus = rig.open(Fault("head|get|get_range", "/objects/|/modality/", error=UnavailableError))
    found = corpus.hydrate([IDS[1], IDS[0]], namespace=rig.name)
    assert (found.fetched, found.status, rig.requests("get_range")) == (2, "complete", 0)
    assert rig.path(IDS[1]).read_bytes() == large


def test_an_engine_of_the_node_hears_of_what_comes(rig: Rig) -> None:
    rig.fill(*IDS[:3])
    tier, heard = rig.tier(), LocalKeys()
    news = tier.follow_news(heard.add_all)
    news.start()
    rig.open().hydrate()
    keys = [make_key(one) for one in IDS[:3]]
    eventually(lambda: all(key is not None and heard(key) for key in keys))
    tier.close()


def test_the_least_wanted_would_be_evicted_first(rig: Rig) -> None:
    rig.fill(*IDS[:4])
    order = [IDS[2], IDS[0], IDS[3], IDS[1]]
    rig.open().hydrate(order)
    times = [rig.path(one).stat().st_mtime_ns for one in order]
    assert times == sorted(times, reverse=True)


# -- what is left out --------------------------------------------------------------------------


def test_a_full_tier_keeps_what_it_has_and_takes_the_most_wanted(rig: Rig) -> None:
    rig.fill(*IDS)
    rig.open().hydrate([IDS[11]])
    kept = rig.names()
    # 95% of the budget is for what is there and five entries more.
    budget = int(6.5 * NBYTES / 0.95)
    corpus = rig.open(cache_bytes=budget)
    entries = {entry.identifier: entry for entry in corpus.list()}  # they know their sizes
    found = corpus.hydrate([entries[one] for one in IDS])
    assert (found.stopped, found.status) == ("full", "partial")
    assert (found.here, found.fetched, found.left_out) == (1, 5, 6)
    assert rig.is_here(*IDS[:5])
    assert kept < rig.names()


def test_a_listing_says_how_much_was_left_out(rig: Rig) -> None:
    rig.fill(*IDS)
    found = rig.open(cache_bytes=int(4.5 * NBYTES / 0.95)).hydrate()
    assert (found.fetched, found.left_out) == (4, 8)
    assert found.left_out_bytes == sum(
        len(entry_bytes(one, rig.name, rows=ROWS)) for one in IDS if not rig.is_here(one)
    )


def test_what_fits_comes_whatever_another_one_claims_to_need(rig: Rig) -> None:
    rig.fill(*IDS[:3])
    first, *others = (rig.open().find(one, namespace=rig.name) for one in IDS[:3])
    assert first is not None
    found = rig.open().hydrate([replace(first, nbytes=10**15), *filter(None, others)])
    assert (found.fetched, found.left_out, found.stopped) == (2, 1, "full")
    assert rig.is_here(*IDS[1:3])


def test_without_free_space_nothing_comes(rig: Rig) -> None:
    rig.fill(*IDS[:2])
    found = rig.open(min_free_bytes=2**60).hydrate()
    assert (found.fetched, found.left_out, found.stopped) == (0, 2, "full")


def test_a_rate_limit_is_kept(rig: Rig) -> None:
    rig.fill(*IDS[:5])
    found = rig.open().hydrate(rate_limit_bytes_per_s=20 * NBYTES)
    assert found.fetched == 5
    assert found.seconds >= 4 * 0.99 * NBYTES / (20 * NBYTES)  # the first one waits for nobody


# -- what goes wrong ---------------------------------------------------------------------------


def test_what_is_absent_or_damaged_is_named_and_the_rest_comes(rig: Rig) -> None:
    rig.fill(*IDS[:2])
    good = entry_bytes(IDS[2], rig.name, rows=ROWS)
    rig.bucket().entry(rig.name, IDS[2], good[:-1] + bytes([good[-1] ^ 1]))
    rig.bucket().entry(rig.name, IDS[3], entry_bytes(IDS[4], rig.name))
    rig.bucket().entry(rig.name, CLIENTS, entry_bytes(IDS[4], rig.name))
    found = rig.open().hydrate([*IDS[:4], CLIENTS, content_hash("none")])
    assert (found.fetched, found.absent) == (2, [content_hash("none")])
    assert found.damaged == {IDS[2]: "checksum", IDS[3]: "identifier", CLIENTS: "identifier"}
    assert found.status == "partial"
    assert len(rig.names()) == 2


def test_an_object_that_is_larger_than_its_entry_says_comes(rig: Rig) -> None:
    rig.fill(IDS[0])
    entry = rig.open().find(IDS[0])
    assert entry is not None
    found = rig.open().hydrate([replace(entry, nbytes=100)])
    assert (found.fetched, found.status) == (1, "complete")


def test_an_entry_of_another_width_than_its_modality_is_refused(rig: Rig) -> None:
    rig.bucket().entry(rig.name, IDS[0], entry_bytes(IDS[0], rig.name, width=16))
    assert rig.open().hydrate().damaged == {IDS[0]: "width"}
    assert rig.names() == set()
    assert rig.requests("get", "get_range") == 2  # the entry and the record: again it is the same


def test_a_large_entry_that_is_damaged_leaves_nothing(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = entry_bytes(IDS[0], rig.name, rows=20_000)
    for module in ("s3ec.corpus.hydrate", "s3ec.corpus.entries", "s3ec.store.base"):
        monkeypatch.setattr(f"{module}.PART_BYTES", 2**16)
    for number, body in enumerate((good[:-2], good + b"\0\0", good[:-1] + b"\1")):
        rig.bucket().entry(rig.name, IDS[number], body)
    found = rig.open().hydrate(IDS[:1])
    assert found.damaged == {IDS[0]: "length"}
    found = rig.open().hydrate(IDS[1:3])
    assert set(found.damaged) == set(IDS[1:3])
    assert rig.names() == set()


def test_a_store_that_is_down_is_not_asked_for_everything(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("s3ec.corpus.entries.Outage._MOST_FAILURES", 3)
    rig.fill(*IDS)
    found = rig.open(Fault("get", error=UnavailableError), max_concurrency=1).hydrate()
    assert (len(found.failed), found.left_out, found.status) == (3, 9, "partial")
    assert found.stopped
    assert rig.open().hydrate().status == "complete"


def test_rate_out_of_range_is_refused(rig: Rig) -> None:
    with pytest.raises(ConfigError, match="`rate_limit_bytes_per_s` 0 is out of range; take 1"):
        rig.open().hydrate(rate_limit_bytes_per_s=0)


# -- beside others -----------------------------------------------------------------------------


def test_what_another_process_fetches_is_waited_for(rig: Rig) -> None:
    rig.fill(*IDS[:2])
    gate = Gate()
    first, second = rig.open(Fault("get|get_range", IDS[0], gate=gate)), rig.open()
    before = rig.requests()
    found: list[Hydration] = []
    running = threading.Thread(target=lambda: found.append(first.hydrate([IDS[0]])))
    running.start()
    assert gate.reached.wait(DEADLINE_S)
    beside = threading.Thread(target=lambda: found.append(second.hydrate(IDS[:2])))
    beside.start()
    eventually(lambda: rig.is_here(IDS[1]))
    gate.release()
    running.join(DEADLINE_S)
    beside.join(DEADLINE_S)
    assert sorted((one.here, one.fetched) for one in found) == [(0, 1), (1, 1)]
    assert rig.requests() - before == 2 + 2  # each of them also read the modality's record


def test_an_open_entry_and_another_stay_when_the_tier_is_full(rig: Rig) -> None:
    rig.fill(*IDS)
    tier = rig.tier()
    rig.open().hydrate([IDS[0], IDS[1]])
    key = make_key(IDS[0])
    assert key is not None
    held = tier.entries.open(key)
    assert held is not None
    rig.open(cache_bytes=2 * NBYTES).hydrate()
    assert rig.is_here(IDS[0], IDS[1])
    assert not held.is_evicted
    tier.close()


# Stops in the middle of a large entry, when the others are here.
CHILD = """
import sys
from s3ec.config import load_settings
from s3ec.corpus import Corpus, entries, hydrate
from s3ec.store import base
from s3ec.store.open import open_store
from s3ec.testing.fault_store import Fault, FaultStore, Gate, Script

url, folder, large = sys.argv[1:]
hydrate.PART_BYTES = entries.PART_BYTES = base.PART_BYTES = 2**16
settings = load_settings({"url": url, "cache_dir": folder, "min_free_bytes": 0}).settings
store = FaultStore(open_store(settings), Script([Fault("get_range", large, skip=3, gate=Gate())]))
Corpus(settings, store=store).hydrate()
"""


def test_a_killed_run_leaves_whole_entries_and_the_next_one_goes_on(tmp_path: Path) -> None:
    url, folder = f"file://{tmp_path}/bucket", tmp_path / "cache"
    (tmp_path / "bucket").mkdir()
    settings = {"cache_dir": str(folder), "min_free_bytes": 0}
    with Corpus.open(settings, url=url) as corpus:
        bucket = Bucket(corpus)
        name = bucket.namespace(MODEL)
        bucket.put(Layout(name).modality("image"), RECORD)
        for one in IDS[1:4]:
            bucket.entry(name, one)
        bucket.entry(name, IDS[0], entry_bytes(IDS[0], name, rows=40_000))
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, url, str(folder), IDS[0]], env={**os.environ}
        )
        objects, incoming = folder / "v1" / "objects", folder / "v1" / "incoming"
        try:
            eventually(lambda: len(list(objects.rglob("*.safetensors"))) == 3)
        finally:
            child.send_signal(signal.SIGKILL)
            child.wait()
        found = corpus.hydrate()
        assert (found.here, found.fetched, found.status) == (3, 1, "complete")
    assert list(incoming.iterdir()) == []
    assert sum(one.stat().st_size > 100_000 for one in objects.rglob("*.safetensors")) == 1
