# SPDX-License-Identifier: Apache-2.0
"""``s3ec tier``: no bucket, no network, beside engines that use the folder."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from s3ec.counters import Counters
from s3ec.index.local import NodeFolder
from s3ec.tier.tier import Tier
from tests.support.clock import Clock
from tests.support.on_disk import audit_of, running_total
from tests.unit.cli.conftest import Cli
from tests.unit.tier.cases import (
    DESTINATION,
    NAMESPACE,
    OTHER_NAMESPACE,
    entry,
    file_of,
    key_of,
    new_tier,
    opened,
    read,
)

KEYS = [key_of(f"{number:064x}") for number in range(10)]
SIZE = len(entry(KEYS[0]))


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    for name in list(os.environ):
        if name.startswith("S3EC_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("S3EC_CACHE_DIR", str(folder))
    monkeypatch.setenv("S3EC_CACHE_BYTES", "1MiB")
    return folder


@pytest.fixture
def engine(root: Path) -> Iterator[Tier]:
    """A tier in use: ten entries, one of them open to the end, one waiting for the bucket."""
    tier = new_tier(root)
    spool = tier.open_spool(DESTINATION)
    for number, key in enumerate(KEYS):
        tier.writer.publish(key, [entry(key)], spool=spool if number == 1 else None)
    held = opened(tier, KEYS[0])
    yield tier
    assert read(held, KEYS[0]) == entry(KEYS[0])
    tier.close()


def age(root: Path, number: int, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(file_of(root, KEYS[number]), (then, then))


def present(tier: Tier) -> set[int]:
    return {number for number, key in enumerate(KEYS) if tier.entries.contains(key)}


def test_tier_shows_size_ages_what_is_open_and_spool(cli: Cli, engine: Tier, root: Path) -> None:
    for number, seconds in ((2, 120), (3, 7200), (4, 3 * 86400), (5, 30 * 86400), (6, -1000)):
        age(root, number, seconds)
    engine.writer.publish(KEYS[9], [b"not an entry"])
    assert engine.entries.open(KEYS[9]) is None
    assert cli.json("tier")["evicted_open_bytes"] == 0
    held = opened(engine, KEYS[8])
    file_of(root, KEYS[8]).unlink()
    found = cli.json("tier")
    assert found["cache_dir"] == str(root)
    assert found["bytes"] == 8 * SIZE
    assert found["budget_bytes"] == 1 << 20
    assert found["entry_count"] == 8
    assert found["entry_bytes"] == 8 * SIZE
    assert {age["last_used"]: age["entry_count"] for age in found["ages"]} == {
        "< 1 min": 4,  # one of them in the future: somebody set a clock
        "< 1 h": 1,
        "< 1 day": 1,
        "< 1 week": 1,
        "older": 1,
    }
    assert found["namespaces"] == [{"namespace": NAMESPACE, "entry_count": 8, "bytes": 8 * SIZE}]
    assert found["evicted_open_bytes"] == SIZE
    assert found["spool"] == {"entry_count": 1, "bytes": SIZE}
    text = cli("tier").stdout
    for part in (str(root), "1.0 MiB", "last used", NAMESPACE, "evicted open"):
        assert part in text
    del held
    assert cli.json("tier")["evicted_open_bytes"] == 0


def test_tier_shows_the_files_of_the_index(cli: Cli, engine: Tier) -> None:
    NodeFolder.of(engine.folders, NAMESPACE).write("overlay", [bytes(2048)])
    found = cli.json("tier")
    assert found["index"] == {"index_file_count": 1, "bytes": 2048}
    assert found["bytes"] == 10 * SIZE + 2048
    assert re.search(r"index: size +2.0 KiB", cli("tier").stdout)
    assert cli.json("tier", "check")["complaints"] == []


def test_tier_changes_nothing(cli: Cli, engine: Tier, root: Path) -> None:
    before = {path: path.lstat().st_mtime_ns for path in root.rglob("*")}
    cli("tier")
    cli("tier", "ls")
    cli("tier", "check")
    cli("tier", "evict", "--to", "0", "--dry-run")
    cli("tier", "evict", "--to", "0")
    assert {path: path.lstat().st_mtime_ns for path in root.rglob("*")} == before


def test_ls_begins_with_what_was_used_last_and_ends_with_what_would_be_evicted_first(
    cli: Cli, engine: Tier, root: Path
) -> None:
    order = [7, 1, 9, 0, 5, 3, 8, 2, 6, 4]
    for place, number in enumerate(order):
        age(root, number, 100.0 * (place + 1))
    age(root, 4, -86400.0)  # its clock was ahead: eviction takes it first
    labels = [file_of(root, KEYS[number]).stem for number in order]
    assert cli("tier", "ls", "--names").stdout.split() == labels
    assert cli("tier", "ls", "--names", "--limit", "3").stdout.split() == labels[:3]
    found = cli.json("tier", "ls", "--limit", "4")
    assert [one["label"] for one in found["entries"]] == labels[:4]
    assert [one["bytes"] for one in found["entries"]] == [SIZE] * 4
    assert 199.0 < found["entries"][1]["unused_s"] < 800.0
    assert (found["namespace"], found["entry_count"], found["bytes"], found["more"]) == (
        *(NAMESPACE, 10, 10 * SIZE, True),
    )
    result = cli("tier", "ls", "--limit", "2")
    assert [line.split()[0] for line in result.stdout.splitlines()] == [
        "label",
        *(label[:12] for label in labels[:2]),
    ]
    assert f"10 entries, {10 * SIZE / 1024:.1f} KiB, in {NAMESPACE}; 2 shown" in result.stderr
    cli("tier", "evict", "--to", str(8 * SIZE), "--yes")
    assert cli("tier", "ls", "--names").stdout.split() == labels[:8]


def test_ls_is_of_one_namespace(cli: Cli, engine: Tier, root: Path) -> None:
    other = Tier(root, OTHER_NAMESPACE, budget_bytes=1 << 20, min_free_bytes=0, counters=Counters())
    other.writer.publish(KEYS[0], [entry(KEYS[0], namespace=OTHER_NAMESPACE)])
    other.close()
    found = cli.json("tier", "ls", "--namespace", OTHER_NAMESPACE[:14])
    assert (found["namespace"], found["entry_count"]) == (OTHER_NAMESPACE, 1)
    error = cli("tier", "ls", "--names", code=2).stderr
    assert "say which one with `--namespace`" in error
    assert NAMESPACE in error
    assert OTHER_NAMESPACE in error
    assert "fits no namespace" in cli("tier", "ls", "-n", "x", code=1).stderr
    assert "do not go together" in cli("tier", "ls", "--names", "--json", code=2).stdout


def test_ls_of_a_folder_without_entries_is_empty(cli: Cli, root: Path) -> None:
    new_tier(root).close()
    assert cli("tier", "ls", "--names").stdout == ""
    assert cli.json("tier", "ls")["entries"] == []


def test_evict_takes_the_least_recently_used_and_none_that_waits_for_the_bucket(
    cli: Cli, engine: Tier, root: Path
) -> None:
    for number in (0, 2, 7, 8, 9):
        age(root, number, 86400.0 + number)
    found = cli.json("tier", "evict", "--to", str(6 * SIZE), "--yes")
    assert (found["bytes"], found["evicted"], found["reached"]) == (4 * SIZE, 4, True)
    assert present(engine) == {0, 1, 3, 4, 5, 6}
    assert running_total(engine) == 6 * SIZE
    found = cli.json("tier", "evict", "--to", "0", "--yes")
    assert (found["after_bytes"], found["held_bytes"], found["reached"]) == (
        SIZE,
        SIZE,
        False,
    )
    assert present(engine) == {1}
    assert cli.json("tier")["evicted_open_bytes"] == SIZE
    out = cli("tier", "evict", "--to", "0", "--yes")
    assert "freed 0 B" in out.stdout
    assert "not reached" in out.stderr
    assert audit_of(engine) == []


def test_evict_dry_run_says_what_would_go(cli: Cli, engine: Tier) -> None:
    for options in ((), ("--dry-run",)):
        result = cli("tier", "evict", "--to", "0", *options)
        text = f"would free {9 * SIZE / 1024:.1f} KiB ({9 * SIZE} bytes, 9 entries)"
        assert text in result.stdout
        assert ("--yes does it" in result.stderr) is not bool(options)
        found = cli.json("tier", "evict", "--to", "0", *options)
        assert (found["entry_count"], found["evicted"], found["dry_run"]) == (9, 0, True)
    assert present(engine) == set(range(10))


def test_evict_of_one_namespace_leaves_the_others(cli: Cli, engine: Tier, root: Path) -> None:
    other = Tier(
        root,
        OTHER_NAMESPACE,
        budget_bytes=1 << 20,
        min_free_bytes=0,
        counters=Counters(),
        clock=Clock(),
    )
    for key in KEYS[:4]:
        other.writer.publish(key, [entry(key, namespace=OTHER_NAMESPACE)])
    assert [one["namespace"] for one in cli.json("tier")["namespaces"]] == [
        NAMESPACE,
        OTHER_NAMESPACE,
    ]
    found = cli.json("tier", "evict", "--to", str(SIZE), "-n", OTHER_NAMESPACE[:14], "--yes")
    assert found["namespace"] == OTHER_NAMESPACE
    assert (found["before_bytes"], found["after_bytes"]) == (4 * SIZE, SIZE)
    assert present(engine) == set(range(10))
    assert len(list(other.entries.names())) == 1
    other.close()
    for begin, part, code in (("tiny-", "fits 2 namespaces", 2), ("x", "fits no namespace", 1)):
        out = cli("tier", "evict", "--to", "0", "--namespace", begin, code=code)
        assert part in out.stderr
        assert OTHER_NAMESPACE in out.stderr


@pytest.mark.parametrize("size", ["ten", "-5", "10 parsecs", ""])
def test_bad_size_is_named(cli: Cli, engine: Tier, size: str) -> None:
    out = cli("tier", "evict", f"--to={size}", code=2)
    assert "'--to'" in out.stderr
    assert "10GiB" in out.stderr


@pytest.mark.parametrize("command", [[], ["ls"], ["check"], ["evict", "--to", "0", "--yes"]])
def test_fresh_node_is_no_error_and_its_folder_is_named_with_where_it_came_from(
    cli: Cli, root: Path, command: list[str]
) -> None:
    out = cli("tier", *command)
    assert "nothing here yet" in out.stderr
    assert str(root) in out.stderr
    assert "env S3EC_CACHE_DIR" in out.stderr
    assert "from --cache-dir" in cli("tier", *command, "--cache-dir", str(root / "x")).stderr
    assert cli.json("tier", *command)
    assert not root.exists()


def test_check_finds_what_is_bad_open_to_others_or_not_ours(
    cli: Cli, engine: Tier, root: Path
) -> None:
    bad, open_to_all = file_of(root, KEYS[3]), file_of(root, KEYS[4])
    bad.write_bytes(bad.read_bytes()[:-1] + b"x")
    open_to_all.chmod(0o644)
    bad.parent.chmod(0o755)
    stray = root / "v1" / "stray"
    stray.write_text("somebody's")
    found = cli.json("tier", "check", code=1)
    assert (found["ok"], found["complaint_count"]) == (False, len(found["complaints"]))
    for path in (bad, open_to_all, bad.parent, stray):
        assert any(str(path) in complaint for complaint in found["complaints"])
    assert present(engine) == set(range(10))  # nothing is changed
    bad.unlink()
    stray.unlink()
    open_to_all.chmod(0o600)
    bad.parent.chmod(0o700)
    assert cli.json("tier", "check")["complaints"] == []
    out = cli("tier", "check")
    assert (out.stdout, "0 complaints" in out.stderr) == ("", True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_folder_of_another_user_is_refused_with_the_way_to_look(
    cli: Cli, engine: Tier, root: Path
) -> None:
    os.chown(root, 65534, 65534)
    try:
        out = cli("tier", code=1)
    finally:
        os.chown(root, 0, 0)
    assert "sudo -u '#65534' s3ec tier" in out.stderr


def test_options_before_the_command_are_not_dropped_in_silence(cli: Cli, engine: Tier) -> None:
    for options in (["--cache-dir", "/elsewhere"], ["--json"]):
        assert "after the command" in cli("tier", *options, "check", code=2).stderr


def test_evict_waits_for_no_lock_it_cannot_get(
    cli: Cli, engine: Tier, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from s3ec.tier import inspection
    from s3ec.tier.evictor import evict_lock
    from s3ec.tier.files import Folders

    monkeypatch.setattr(inspection, "LOCK_TIMEOUT_S", 0.02)
    with evict_lock(Folders(root)) as alone:
        assert alone
        assert "try later" in cli("tier", "evict", "--to", "0", "--yes", code=1).stderr
    assert present(engine) == set(range(10))
