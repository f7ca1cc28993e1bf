# SPDX-License-Identifier: Apache-2.0
"""Notes of bad objects: shared by a node's processes, bounded, and gone after their time."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from s3ec.counters import Counters
from s3ec.identity import MAX_REVISION
from s3ec.tier import bad_objects
from s3ec.tier.bad_objects import BadObjects, read_notes
from s3ec.tier.files import Folders
from tests.support.clock import Clock
from tests.unit.index.basics import NAMESPACE, key_of
from tests.unit.tier.cases import DESTINATION, refusing

PLACE = DESTINATION
Full = Callable[[], AbstractContextManager[None]]
KEY = key_of("a")


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> Full:
    """While entered, no note can be written."""

    @contextmanager
    def full() -> Iterator[None]:
        with monkeypatch.context() as patch:
            refused = refusing(errno.ENOSPC, "No space left on device")
            patch.setattr(Folders, "write_small", refused)
            yield

    return full


@pytest.fixture
def make(tmp_path: Path, clock: Clock) -> Callable[..., BadObjects]:
    """Makes what each process of the node has."""

    def make(namespace: str = NAMESPACE, destination: str = PLACE) -> BadObjects:
        return BadObjects(
            Folders(tmp_path), namespace, destination, ttl_s=100, counters=Counters(), clock=clock
        )

    return make


def note_files(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "v1" / "bad-objects").iterdir())


def test_a_note_of_one_process_is_known_to_the_others_of_the_same_bucket(
    make: Callable[..., BadObjects], tmp_path: Path
) -> None:
    mine, neighbour, elsewhere = make(), make(), make(destination="f" * 16)
    assert mine.note(KEY, "checksum", 0, row_time_s=7) == 1
    assert mine.revision(KEY) == 1
    for one in (neighbour, elsewhere):
        assert one.is_stale()
        one.refresh()
        assert not one.is_stale()
    assert (neighbour.revision(KEY), elsewhere.revision(KEY)) == (1, 0)
    (note,) = neighbour.unhealed()
    assert (note.name, note.reason, note.row_time_s) == (KEY.name, "checksum", 7)
    (file,) = note_files(tmp_path)
    assert file.name == f"{NAMESPACE}--{PLACE}--{KEY.digest.hex()}.json"
    assert file.stat().st_mode & 0o777 == 0o600


def test_a_good_revision_is_no_reason_to_store_again_until_it_is_found_bad(
    make: Callable[..., BadObjects],
) -> None:
    mine, neighbour = make(), make()
    mine.note(KEY, "checksum", 0)
    mine.heal(KEY, 2)  # of no revision that is asked for
    assert mine.unhealed()
    mine.heal(KEY, 1)
    neighbour.refresh()
    assert (neighbour.unhealed(), neighbour.revision(KEY)) == ([], 1)
    assert neighbour.note(KEY, "header", 1) == 2
    assert len(neighbour.unhealed()) == 1
    assert neighbour.note(KEY, "header", 1) == 2  # another thread's, of the same two copies


def test_notes_run_out_and_their_files_go(
    make: Callable[..., BadObjects], clock: Clock, tmp_path: Path
) -> None:
    mine = make()
    mine.note(KEY, "checksum", 0)
    clock.now_s += 100
    assert (mine.revision(KEY), mine.unhealed()) == (0, [])
    mine.refresh()
    assert note_files(tmp_path) == []
    assert mine.note(KEY, "checksum", 0) == 1


def test_a_note_from_the_future_is_not_believed(
    make: Callable[..., BadObjects], clock: Clock, tmp_path: Path
) -> None:
    make().note(KEY, "checksum", 0)
    clock.now_s -= 10_000
    other = make()
    other.refresh()
    assert (other.revision(KEY), note_files(tmp_path)) == (0, [])


def test_notes_are_bounded_and_the_oldest_go_first(
    make: Callable[..., BadObjects],
    clock: Clock,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bad_objects, "KEPT_NOTES", 3)
    mine = make()
    for number in range(5):
        clock.now_s += 1
        mine.note(key_of(number), "checksum", 0)
        assert len(note_files(tmp_path)) <= 3
    mine.refresh()
    assert [mine.revision(key_of(number)) for number in range(5)] == [0, 0, 1, 1, 1]
    assert len(note_files(tmp_path)) == 3


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[" * 5000,
        "{}",
        "[1]",
        '{"name": "../../etc/passwd"}',
        json.dumps({"name": KEY.name, "reason": "x", "since_s": 1.7e9, "until_s": 1.8e9,
                    "revision": 3}),  # as of a build before the first release
        json.dumps({"name": KEY.name, "reason": "x", "since_s": 1.7e9, "until_s": 1.8e9,
                    "revision": 0}),
        json.dumps({"name": KEY.name, "reason": "x", "since_s": 1.7e9, "until_s": 1.8e9,
                    "revision": True}),
        json.dumps({"name": key_of("b").name, "reason": "x", "since_s": 1.7e9,
                    "until_s": 1.8e9, "revision": 1}),
    ],
)  # fmt: skip
def test_a_note_that_is_none_is_dropped(
    make: Callable[..., BadObjects], tmp_path: Path, text: str
) -> None:
    mine = make()
    mine.note(KEY, "checksum", 0)
    (file,) = note_files(tmp_path)
    file.write_text(text)
    other = make()
    other.refresh()
    assert other.revision(KEY) == 0
    assert note_files(tmp_path) == []


def test_links_and_foreign_files_are_left_alone(
    make: Callable[..., BadObjects], tmp_path: Path
) -> None:
    mine = make()
    mine.note(KEY, "checksum", 0)
    (file,) = note_files(tmp_path)
    text = file.read_text()
    file.unlink()
    (tmp_path / "real").write_text(text)
    os.symlink(tmp_path / "real", file)
    (file.parent / "README").write_text("not ours")
    other = make()
    other.refresh()
    assert other.revision(KEY) == 0
    assert (tmp_path / "real").exists()
    assert [path.name for path in note_files(tmp_path)] == ["README"]


def test_a_disk_that_refuses_leaves_the_note_with_its_process(
    make: Callable[..., BadObjects], tmp_path: Path, full: Full
) -> None:
    mine = make()
    with full():
        assert mine.note(KEY, "checksum", 0) == 1
    mine.refresh()
    assert mine.revision(KEY) == 1
    with pytest.raises(FileNotFoundError):
        read_notes(Folders(tmp_path))


def test_too_many_at_once_are_not_noted_and_later_ones_are(
    make: Callable[..., BadObjects], clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    mine = make()
    for number in range(bad_objects.MANY):
        assert mine.note(key_of(number), "header", 0) == 1
    for _ in range(2):
        assert mine.note(KEY, "header", 0) is None
    assert caplog.text.count("look for what answers in its place") == 1
    clock.now_s += 60
    assert mine.note(KEY, "header", 0) == 1


def test_the_last_revision_is_said_once(
    make: Callable[..., BadObjects], caplog: pytest.LogCaptureFixture
) -> None:
    mine = make()
    for revision in range(MAX_REVISION + 1):
        assert mine.note(KEY, "header", revision) == revision + 1
    assert mine.revision(KEY) > MAX_REVISION
    assert caplog.text.count("both bad") == 1


def test_a_process_that_knows_less_does_not_take_back_what_another_noted(
    make: Callable[..., BadObjects],
) -> None:
    mine, neighbour = make(), make()
    mine.note(KEY, "checksum", 0)
    neighbour.refresh()
    assert neighbour.note(KEY, "checksum", 1) == 2
    mine.heal(KEY, 1)  # fetched before the neighbour found it bad
    third = make()
    third.refresh()
    assert (third.revision(KEY), len(third.unhealed())) == (2, 1)
    assert make().note(KEY, "checksum", 0) == 2  # of a process that has read nothing yet
    third.refresh()
    assert (third.revision(KEY), mine.revision(KEY)) == (2, 2)


def test_what_the_disk_refused_is_not_replaced_by_what_it_has_and_runs_out(
    make: Callable[..., BadObjects], clock: Clock, full: Full
) -> None:
    mine = make()
    mine.note(KEY, "checksum", 0)
    with full():
        assert mine.note(KEY, "checksum", 1) == 2
    mine.refresh()
    assert mine.revision(KEY) == 2
    clock.now_s += 100
    mine.refresh()
    clock.now_s -= 100
    assert mine.revision(KEY) == 0  # forgotten, not only out of date


def test_what_the_disk_refused_gives_way_to_a_note_that_knows_more(
    make: Callable[..., BadObjects], full: Full
) -> None:
    mine, neighbour = make(), make()
    with full():
        assert mine.note(KEY, "checksum", 0) == 1
    assert neighbour.note(KEY, "checksum", 0) == 1
    assert neighbour.note(KEY, "checksum", 1) == 2
    mine.refresh()
    assert mine.revision(KEY) == 2


def test_as_long_as_too_many_come_bad_none_is_noted(
    make: Callable[..., BadObjects], clock: Clock
) -> None:
    mine = make()
    noted = 0
    for number in range(600):  # one every two seconds for twenty minutes
        noted += mine.note(key_of(number), "header", 0) is not None
        clock.now_s += 2
    assert noted == bad_objects.MANY
