# SPDX-License-Identifier: Apache-2.0
"""What hooks record while somebody wants a trace, and how it comes into the node's folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from s3ec import trace
from s3ec.connector.recorder import Recorder, Recording, TraceWriter
from s3ec.counters import Counters
from s3ec.encode_costs import EncodeCosts
from s3ec.identity import make_key
from s3ec.tier.files import Folders, is_temp_name
from s3ec.tier.trace_requests import LONGEST_S, TraceFolder, TraceRequest
from s3ec.trace import Access, Engine, Hasher, Lost
from tests.support.clock import Clock
from tests.unit.connector.scheduling import World, feature, identifier_of, request
from tests.unit.connector.test_lookups import output

ENGINE = Engine("gemma/abc", "gemma", "ec_both", 100)
SECONDS = 60.0


# -- what hooks see ------------------------------------------------------------------------------


class Recorded:
    """A scheduler half that records."""

    def __init__(self, **more: Any) -> None:
        self.world = World(**more)
        self.recording = Recording(wall_clock=self.world.clock)
        self.world.recorder.recording = self.recording

    def accesses(self) -> list[Access]:
        return self.recording.take()[0]

    def end_pass(self, name: str, *features: Any) -> None:
        """A step computes all of a new request."""
        self.world.half.lookups.end_pass(output({name: (0, 100)}, new={name: list(features)}))


def test_a_load_is_recorded_with_its_size_its_fetch_and_the_wait() -> None:
    it = Recorded()
    world = it.world
    asked = world.defer("far")
    world.clock.now_s += 0.5
    pin = world.finish("far", source="bucket", seconds=0.25)
    assert world.run(asked) == [True]
    it.end_pass("r", feature("far"))
    (far,) = it.accesses()
    assert pin is not None
    assert (far.outcome, far.nbytes, far.fetch_s) == ("bucket", pin.nbytes, 0.25)
    assert (far.request, far.item, far.rows) == ("r", identifier_of("far"), 4)
    assert (far.waited_s, far.at_s, far.modality) == (0.5, world.clock.now_s, "image")


def test_the_second_load_of_a_download_is_one_from_the_node_and_fetched_nothing() -> None:
    it = Recorded()
    it.world.bring("a")
    for name in ("r", "s"):
        assert it.world.run(request(name, feature("a"))) == [True]
        it.end_pass(name, feature("a"))
        it.world.step(["a"])
    first, second = it.accesses()
    assert (first.outcome, second.outcome) == ("bucket", "node")
    assert first.fetch_s is not None
    assert second.fetch_s is None


def test_what_the_device_holds_and_what_is_encoded_are_told_apart() -> None:
    it = Recorded()
    assert it.world.run(request("r", feature("new"), feature("held", 10)), 0) == [False]
    it.end_pass("r", feature("new"), feature("held", 10, rows=7))
    found = {one.item: (one.outcome, one.rows) for one in it.accesses()}
    assert found == {identifier_of("new"): ("encoded", 4), identifier_of("held"): ("device", 7)}


def test_what_a_producer_need_not_encode_is_stored() -> None:
    it = Recorded(producer=True, consumer=False)
    it.world.stock("a")
    assert it.world.run(request("r", feature("a"))) == [True]
    it.end_pass("r", feature("a"))
    assert [one.outcome for one in it.accesses()] == ["stored"]


def test_nothing_is_recorded_where_nobody_wants_it() -> None:
    world = World()
    assert world.run(request("r", feature("a"))) == [False]
    world.half.lookups.end_pass(output({"r": (0, 100)}, new={"r": [feature("a")]}))
    assert world.recorder.recording is None


def test_what_does_not_fit_into_the_queue_is_counted() -> None:
    recording = Recording(most=3)
    for number in range(5):
        recording.accessed("r", number, f"i{number}", "image", 4)
    taken, lost = recording.take()
    assert ([one.item for one in taken], lost) == (["i0", "i1", "i2"], 2)
    recording.accessed("r", 5, "i5", "image", 4)
    assert len(recording.take()[0]) == 1


# -- what the disk thread does ---------------------------------------------------------------------


class Bench:
    """An engine's recorder and its disk thread, and the folder as a command sees it."""

    def __init__(self, root: Path, **more: Any) -> None:
        self.root = root
        self.clock = Clock()
        self.counters = Counters()
        self.recorder = Recorder()
        folders = Folders(root)
        folders.make()
        self.folder = TraceFolder(folders)
        self.writer = TraceWriter(
            folders,
            self.recorder,
            ENGINE,
            EncodeCosts({"image:3": 0.25}),
            self.counters,
            wall_clock=self.clock,
            **more,
        )

    def ask(self, *, with_names: bool = False) -> TraceRequest:
        request = TraceRequest.new(self.clock.now_s, SECONDS, with_names=with_names)
        self.folder.ask(request)
        self.writer.exchange()
        return request

    def access(self, item: str, *, after_s: float = 1.0) -> None:
        self.clock.now_s += after_s
        assert self.recorder.recording is not None
        self.recorder.recording.accessed("r", 0, item, "image", 4)

    def events(self) -> list[trace.Event]:
        (path,) = self.folder.recorded()
        return list(trace.events(path))


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path / "cache")


def test_an_engine_records_from_the_request_to_its_withdrawal(bench: Bench) -> None:
    assert bench.recorder.recording is None
    asked = bench.ask()
    bench.access("a")
    bench.access("b")
    bench.writer.exchange()
    (path,) = bench.folder.recorded()
    assert is_temp_name(path.name)
    bench.access("a")
    bench.folder.withdraw()
    bench.writer.exchange()
    assert bench.recorder.recording is None
    hasher = Hasher(bytes.fromhex(asked.secret))
    a, b = hasher("gemma/abc", "a"), hasher("gemma/abc", "b")
    found = [(one.at_s, one.item) for one in bench.events() if isinstance(one, Access)]
    assert found == [(1.0, a), (2.0, b), (3.0, a)]
    (path,) = bench.folder.recorded()
    assert not is_temp_name(path.name)
    assert trace.read_header(path).engines == (ENGINE,)
    first = next(trace.read(path))
    assert (first.request, first.encode_s) == (hasher("r"), 1.0)


def test_a_trace_holds_neither_names_nor_the_secret(bench: Bench) -> None:
    asked = bench.ask()
    bench.access("a-secret-name")
    bench.writer.close()
    (path,) = bench.folder.recorded()
    text = path.read_text()
    assert "a-secret-name" not in text
    assert '"r"' not in text
    assert asked.secret not in text


def test_a_trace_that_was_asked_for_with_names_says_what_the_objects_are_called(
    bench: Bench,
) -> None:
    bench.ask(with_names=True)
    bench.access("a")
    bench.access("")  # nothing is stored under it
    bench.writer.exchange()
    found = [one.name for one in bench.events() if isinstance(one, Access)]
    key = make_key("a")
    assert key is not None
    assert found == [key.name, None]


def test_a_request_is_answered_once(bench: Bench) -> None:
    bench.ask()
    bench.writer.close()
    bench.writer.exchange()
    assert bench.recorder.recording is None
    bench.folder.withdraw()
    bench.ask()
    assert bench.recorder.recording is not None


def test_an_engine_ends_by_itself_where_the_command_was_killed(bench: Bench) -> None:
    bench.ask()
    bench.access("a", after_s=SECONDS + 1)
    bench.writer.exchange()
    assert bench.recorder.recording is None
    assert len(bench.events()) == 1
    bench.clock.now_s += 3600
    bench.writer.exchange()
    assert bench.folder.recorded() == []
    assert bench.folder.request() is None


def test_an_engine_that_is_killed_leaves_what_it_has_written(bench: Bench) -> None:
    bench.ask()
    bench.access("a")
    bench.writer.exchange()
    bench.access("b")  # not written yet
    assert len(bench.events()) == 1
    assert bench.folder.is_being_written()


def test_what_was_lost_is_stated(bench: Bench) -> None:
    bench.ask()
    recording = bench.recorder.recording = Recording(most=2, wall_clock=bench.clock)
    for number in range(5):
        recording.accessed("r", number, "a", "image", 4)
    bench.writer.exchange()
    bench.writer.exchange()
    assert [one for one in bench.events() if isinstance(one, Lost)] == [Lost(0.0, 3)]


def test_a_trace_does_not_grow_beyond_its_bound(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "cache", largest_bytes=1000)
    bench.ask()
    for _ in range(20):
        bench.access("a", after_s=0.0)
        bench.writer.exchange()
    found = bench.events()
    accesses = sum(isinstance(one, Access) for one in found)
    assert 0 < accesses < 5
    assert sum(one.count for one in found if isinstance(one, Lost)) == 20 - accesses


def test_one_command_at_a_time(bench: Bench) -> None:
    with bench.folder.locked() as alone, bench.folder.locked() as second:
        assert (alone, second) == (True, False)
    with bench.folder.locked() as alone:
        assert alone


def test_nothing_is_left_of_a_trace_that_was_collected(bench: Bench) -> None:
    bench.ask()
    bench.access("a")
    bench.writer.exchange()
    bench.folder.clear()
    assert os.listdir(bench.root / "v1" / "traces") == []
    bench.writer.exchange()  # its file is gone; that is counted
    assert bench.recorder.recording is None
    assert bench.counters.get("tier.errors") == 1


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"{}",
        b'{"name": "a", "secret": "zz", "began_s": 0, "until_s": 1e12}',
        b'{"name": "a", "secret": "' + b"0" * 64 + b'", "began_s": 0, "until_s": NaN}',
        b'{"name": 1, "secret": "' + b"0" * 64 + b'", "began_s": 0, "until_s": 1}',
        b"[" * 4000,
        b" " * 5000,
    ],
)
def test_a_request_that_cannot_be_read_is_none(bench: Bench, content: bytes) -> None:
    path = bench.root / "v1" / "traces" / "request.json"
    path.write_bytes(content)
    bench.writer.exchange()
    assert bench.recorder.recording is None
    assert bench.counters.get("tier.errors") == 0


def test_a_request_for_longer_than_a_day_is_not_obeyed(bench: Bench) -> None:
    bench.folder.ask(TraceRequest.new(bench.clock.now_s, 3 * LONGEST_S))
    bench.writer.exchange()
    assert bench.recorder.recording is None


def test_a_folder_that_others_may_write_to_is_not_obeyed(bench: Bench) -> None:
    bench.folder.ask(TraceRequest.new(bench.clock.now_s, SECONDS))
    (bench.root / "v1" / "traces").chmod(0o777)
    bench.writer.exchange()
    assert bench.recorder.recording is None
    assert bench.counters.get("tier.errors") == 1


def test_a_request_that_is_a_link_is_not_followed(bench: Bench, tmp_path: Path) -> None:
    bench.folder.ask(TraceRequest.new(bench.clock.now_s, SECONDS))
    path = bench.root / "v1" / "traces" / "request.json"
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    bench.writer.exchange()
    assert bench.recorder.recording is None
