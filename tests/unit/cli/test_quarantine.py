# SPDX-License-Identifier: Apache-2.0
"""``s3ec quarantine``: what this node does not ask for, shown and cleared."""

from __future__ import annotations

from pathlib import Path

import pytest

from s3ec.counters import Counters
from s3ec.identity import Key, Layout
from s3ec.tier.bad_objects import BadObjects
from s3ec.tier.files import Folders
from tests.unit.cli.conftest import Cli
from tests.unit.index.basics import NAMESPACE, key_of


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BadObjects:
    monkeypatch.setenv("S3EC_CACHE_DIR", str(tmp_path / "cache"))
    return BadObjects(
        Folders(tmp_path / "cache"), NAMESPACE, "0" * 16, ttl_s=600, counters=Counters()
    )


def object_of(key: Key) -> str:
    return Layout(NAMESPACE).object(key)


def test_nothing_is_listed_where_no_engine_has_run(cli: Cli, notes: BadObjects) -> None:
    assert cli.json("quarantine", "ls") == {"objects": []}
    assert "0 objects" in cli("quarantine", "ls").stderr


def test_bad_objects_are_listed_and_cleared_by_identifier_or_name_or_all(
    cli: Cli, notes: BadObjects
) -> None:
    keys = [key_of(number) for number in range(4)]
    for key in keys:
        notes.note(key, "checksum", 0)
    notes.heal(keys[0], 1)
    listed = cli.json("quarantine", "ls")["objects"]
    assert {one["object"] for one in listed} == {object_of(key) for key in keys}
    for one in listed:
        assert (one["namespace"], one["reason"], one["next_revision"]) == (NAMESPACE, "checksum", 1)
        assert one["age_s"] + one["remaining_s"] == pytest.approx(600)
        assert one["next_revision_good"] is (one["object"] == object_of(keys[0]))
    out = cli("quarantine", "ls").stdout
    assert out.count("not stored again yet") == 3
    cleared = cli.json("quarantine", "clear", keys[0].identifier, "--yes")
    assert [one["object"] for one in cleared["objects"]] == [object_of(keys[0])]
    assert (cleared["cleared"], cleared["dry_run"]) == (1, False)
    cli("quarantine", "clear", object_of(keys[1]), "--yes")
    assert notes.is_stale()
    notes.refresh()
    assert [notes.revision(key) for key in keys] == [0, 0, 1, 1]
    cli("quarantine", "clear", keys[1].name, "--yes", code=1)
    for options in ((), ("--dry-run",)):
        waiting = cli.json("quarantine", "clear", "--all", *options)
        assert (len(waiting["objects"]), waiting["cleared"], waiting["dry_run"]) == (2, 0, True)
    assert "cleared 2" in cli("quarantine", "clear", "--all", "--yes").stdout
    assert cli.json("quarantine", "ls") == {"objects": []}


@pytest.mark.parametrize("arguments", [(), ("a" * 64, "--all")])
def test_clear_wants_a_key_or_all(cli: Cli, notes: BadObjects, arguments: tuple[str, ...]) -> None:
    cli("quarantine", "clear", *arguments, code=2)
