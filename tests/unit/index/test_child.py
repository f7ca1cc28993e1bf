# SPDX-License-Identifier: Apache-2.0
"""Work in a child process: a fresh interpreter that ends with its parent."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from s3ec.counters import Counters
from s3ec.errors import CorruptEntryError, TierError, UnavailableError
from s3ec.index import child
from s3ec.index.child import Job, in_child
from s3ec.index.local import NodeFolder
from s3ec.index.maker import Made, rebuild
from s3ec.index.names import SnapshotName, snapshots_prefix
from s3ec.index.reader import ManifestIndex
from s3ec.settings import Settings
from s3ec.store.open import open_store
from s3ec.tier.files import is_temp_name
from tests.support.waiting import DEADLINE_S, until
from tests.unit.index.corpus import LAYOUT, NAMESPACE, in_thread, key_of


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    bucket = tmp_path / "bucket"
    for number in range(20):
        path = bucket / LAYOUT.object(key_of(number))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"entry")
    return Settings.model_validate({"url": f"file://{bucket}", "cache_dir": str(tmp_path / "tier")})


def job(tmp_path: Path, **more: object) -> Job:
    return Job(
        **{"kind": "listing", "namespace": NAMESPACE, "folder": str(tmp_path / "node"), **more}
    )  # type: ignore[arg-type]


def hanging(folder: Path) -> str:
    """A program that does not end by itself."""
    script = folder / "hangs"
    script.write_text("#!/bin/sh\nexec tail -f /dev/null\n")
    script.chmod(0o700)
    return str(script)


async def test_a_child_lists_and_a_reader_opens_what_it_left(
    settings: Settings, tmp_path: Path
) -> None:
    jobs = in_child(settings)
    name = SnapshotName.parse(await jobs(job(tmp_path)))
    assert name is not None
    assert NodeFolder(tmp_path / "node").rows_path(name).exists()
    assert await jobs(job(tmp_path)) == ""  # not due any more
    store = open_store(settings)
    for folder in ("node", "other"):  # the second one downloads it, by a child
        index = ManifestIndex(
            store,
            LAYOUT,
            NodeFolder(tmp_path / folder),
            jobs=jobs,
            disk=in_thread,
            counters=Counters(),
        )
        await index.refresh(now=True)
        assert index.counts().snapshot == name
        assert [n for n in range(25) if index.maybe_contains(key_of(n))] == list(range(20))
        await index.close()
    await store.close()


async def test_errors_of_a_child_are_raised_here(settings: Settings, tmp_path: Path) -> None:
    store = open_store(settings)
    made: Made = await rebuild(store, LAYOUT)
    await store.close()
    path = tmp_path / "bucket" / snapshots_prefix(LAYOUT) / str(made.name)
    body = bytearray(path.read_bytes())
    body[-20] ^= 1
    path.write_bytes(body)
    jobs = in_child(settings)
    with pytest.raises(CorruptEntryError) as caught:
        await jobs(job(tmp_path, kind="fetch", snapshot=str(made.name)))
    assert caught.value.reason == "checksum"
    absent = SnapshotName("0" * 25 + "1", "0" * 25 + "1")
    with pytest.raises(UnavailableError, match="is gone"):
        await jobs(job(tmp_path, kind="fetch", snapshot=str(absent)))
    (tmp_path / "file").touch()
    with pytest.raises(TierError):
        await jobs(job(tmp_path, folder=str(tmp_path / "file" / "node")))
    assert not list((tmp_path / "node").glob("*"))


async def test_a_child_that_dies_is_an_error_with_its_last_words(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child.sys, "executable", "/bin/false")
    with pytest.raises(UnavailableError, match="ended with 1"):
        await in_child(settings)(job(tmp_path))
    monkeypatch.setattr(child.sys, "executable", str(tmp_path / "absent"))
    with pytest.raises(UnavailableError, match="cannot start"):
        await in_child(settings)(job(tmp_path))


async def test_a_job_that_is_cancelled_ends_its_child(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[str]] = []

    class Noted(subprocess.Popen[str]):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            started.append(self)

    monkeypatch.setattr(child.sys, "executable", hanging(tmp_path))
    monkeypatch.setattr(child.subprocess, "Popen", Noted)
    task = asyncio.create_task(in_child(settings)(job(tmp_path)))
    await until(lambda: bool(started))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(started[0].wait, DEADLINE_S) != 0


async def test_a_child_that_hangs_is_ended(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or no other process of this node would make or download a snapshot any more."""
    monkeypatch.setattr(child.sys, "executable", hanging(tmp_path))
    monkeypatch.setattr(child, "LONGEST_S", 0.01)
    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises(UnavailableError, match="has not ended"):
            await in_child(settings)(job(tmp_path))


async def test_what_a_childs_libraries_print_does_not_hide_its_answer(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes that are no text to stderr, and a line to stdout, as of a ``sitecustomize``."""
    noise = "import os; os.write(2, b'\\xff\\n'); print('hello', flush=True)"
    setup, _, start = child._PROGRAM.partition("; from ")
    monkeypatch.setattr(child, "_PROGRAM", f"{setup}; {noise}; from {start}")
    assert SnapshotName.parse(await in_child(settings)(job(tmp_path))) is not None


def test_a_child_ends_with_its_parent_and_is_of_low_priority(
    settings: Settings, tmp_path: Path
) -> None:
    """Its input is closed by the kernel when the parent is gone."""
    order = {"job": asdict(job(tmp_path)), "settings": settings.model_dump(mode="json")}
    program = (
        "import asyncio, os, sys; from s3ec.index import child\n"
        "async def wait(order):\n"
        "    print(os.nice(0), flush=True)\n"
        "    await asyncio.sleep(3600)\n"
        "child._open_and_work = wait\n"
        "child.main()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as running:
        assert running.stdin is not None
        assert running.stdout is not None
        running.stdin.write(json.dumps(order) + "\n")
        running.stdin.flush()
        assert int(running.stdout.readline()) >= os.nice(0)
        running.stdin.close()
        assert running.wait(DEADLINE_S) == 1


async def test_a_child_that_is_killed_while_it_writes_leaves_no_snapshot(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither here nor in the bucket; whoever works next is not held up by what it left."""
    marker = tmp_path / "writing"
    hang = (
        "import asyncio, pathlib\n"
        "from s3ec.store.url_store import UrlStore\n"
        "put = UrlStore.put_if_absent\n"
        "async def hang(self, name, body):\n"
        "    if '/snapshot/' in name:\n"
        f"        pathlib.Path({str(marker)!r}).touch()\n"
        "        await asyncio.sleep(3600)\n"
        "    await put(self, name, body)\n"
        "UrlStore.put_if_absent = hang\n"
    )
    setup, _, start = child._PROGRAM.partition("; from ")
    with monkeypatch.context() as patch:
        patch.setattr(child, "_PROGRAM", f"{setup}\n{hang}\nfrom {start}")
        task = asyncio.create_task(in_child(settings)(job(tmp_path)))
        await until(marker.exists)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    node = NodeFolder(tmp_path / "node")
    await until(lambda: not _children_in(tmp_path))
    assert all(is_temp_name(path.name) for path in node.path.iterdir())
    store = open_store(settings)
    assert (await rebuild(store, LAYOUT, node=node)).rows == 20
    await store.close()

    def only_the_snapshot_is_left() -> bool:
        node.remove_older(SnapshotName())
        return sorted(path.suffix for path in node.path.iterdir()) == [".filter", ".rows"]

    await until(only_the_snapshot_is_left)  # the kernel drops a dead process's locks a moment later


def _children_in(folder: Path) -> list[str]:
    """Processes that still have a file of this folder open."""
    found = []
    for fd in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            target = os.readlink(fd)
        except OSError:
            continue
        if target.startswith(str(folder / "node")) and fd.parts[2] != str(os.getpid()):
            found.append(str(fd))
    return found
