# SPDX-License-Identifier: Apache-2.0
"""Long work on the index in a process of its own: a fresh interpreter of low priority, no fork."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from s3ec.counters import Counters
from s3ec.errors import (
    AccessError,
    ConfigError,
    CorruptEntryError,
    S3ECError,
    TierError,
    UnavailableError,
)
from s3ec.identity import Layout
from s3ec.settings import Settings
from s3ec.store.base import Store

LISTING_EVERY_S = 86400.0
"""Of a fleet that writes one engine lists the objects so often."""
_RAISED = {each.__name__: each for each in (UnavailableError, AccessError, TierError)}
_NICE = 19
# What a child says in the end, and what it may say before: warnings of libraries.
_SAID_CHARACTERS = 2000


@dataclass(frozen=True, slots=True)
class Job:
    """What to do.

    Attributes:
        kind: ``fetch`` downloads a snapshot and makes its filter; ``union`` and ``listing`` make a
            snapshot, write it to the bucket, and leave it here with its filter.
        namespace: Its name.
        folder: The node's folder of the index.
        snapshot: For ``fetch``: ``ULID-LISTED``.
        older_s: For ``listing``: how old the last one must be.
    """

    kind: Literal["fetch", "union", "listing"]
    namespace: str
    folder: str
    snapshot: str = ""
    older_s: float = LISTING_EVERY_S


Jobs: TypeAlias = Callable[[Job], Awaitable[str]]
"""Runs a job; returns the name of the snapshot; empty where there was nothing to do.

Raises UnavailableError, AccessError, CorruptEntryError or TierError as the work does.
"""


def in_child(settings: Settings) -> Jobs:
    """Runs jobs in a child process, which ends with this one. The loop's thread stays free.

    Args:
        settings: With which the child opens the bucket.
    """

    async def run(job: Job) -> str:
        # Settings go through a pipe, since everybody may read a command line.
        order = json.dumps({"job": asdict(job), "settings": settings.model_dump(mode="json")})
        child = await asyncio.to_thread(_start)
        try:
            status, out, err = await asyncio.to_thread(_talk, child, order)
        finally:
            child.kill()  # where this was cancelled
        try:
            answer = json.loads(out)
        except ValueError:
            raise UnavailableError(
                f"a child process that was to {job.kind} ended with {status}: "
                f"{err[-_SAID_CHARACTERS:]}"
            ) from None
        if "error" not in answer:
            return str(answer["snapshot"])
        if answer["error"] == CorruptEntryError.__name__:
            raise CorruptEntryError(answer["message"], reason=answer["reason"])
        raise _RAISED.get(answer["error"], UnavailableError)(answer["message"])

    return run


def in_process(store: Store) -> Jobs:
    """Runs jobs here, for commands and for tests whose bucket no child can reach."""
    return lambda job: _work(job, store)


async def _work(job: Job, store: Store) -> str:
    from s3ec.index2 import maker
    from s3ec.index2.local import NodeFolder
    from s3ec.index2.names import SnapshotName

    layout, node = Layout(job.namespace), NodeFolder(Path(job.folder))
    if job.kind == "fetch":
        name = SnapshotName.parse(job.snapshot)
        if name is None:
            raise CorruptEntryError(f"{job.snapshot!r:.100} is no snapshot", reason="header")
        await maker.fetch_snapshot(store, layout, node, name)
        return str(name)
    if job.kind == "union":
        made = await maker.make_union(store, layout, node)
    else:
        made = await maker.make_listing(store, layout, node, older_s=job.older_s)
    return "" if made is None else str(made.name)


def _start() -> subprocess.Popen[str]:
    try:
        return subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    except OSError as exc:
        raise UnavailableError(f"cannot start a child process: {exc}") from exc


def _talk(child: subprocess.Popen[str], order: str) -> tuple[int, str, str]:
    """Give a child its order and wait for its end; its input stays open as long as we live."""
    errors: list[str] = []
    with child:
        if child.stdin is None or child.stdout is None or child.stderr is None:
            raise RuntimeError("a child without pipes")
        listener = threading.Thread(target=lambda: errors.append(child.stderr.read()), daemon=True)  # type: ignore[union-attr]
        listener.start()
        try:
            child.stdin.write(order + "\n")
            child.stdin.flush()
        except OSError:
            pass  # it says why, or ends without a word
        said = child.stdout.read()
        listener.join()
        return child.wait(), said, "".join(errors)


# -- in the child ----------------------------------------------------------------------------------


def main() -> None:
    """Do what stands in the first line of the input, and say in one line what came of it."""
    os.nice(_NICE)
    order = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        answer: dict[str, str] = {"snapshot": asyncio.run(_open_and_work(order))}
    except S3ECError as exc:
        answer = {"error": type(exc).__name__, "message": str(exc)}
        answer["reason"] = getattr(exc, "reason", "")
    sys.stdout.write(json.dumps(answer))
    sys.stdout.flush()
    os._exit(0)  # without a wait for the store's threads


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(1)


async def _open_and_work(order: dict[str, dict[str, object]]) -> str:
    from s3ec.store.endpoint import Endpoint
    from s3ec.store.open import open_store, resilient

    settings = Settings.model_validate(order["settings"])
    job = Job(**order["job"])  # type: ignore[arg-type]
    try:
        opened = open_store(settings, patient=True)
    except ConfigError as exc:
        raise AccessError(str(exc)) from exc
    store = resilient(opened, Endpoint.of(settings), Counters(), hedge=False)
    try:
        return await _work(job, store)
    finally:
        await store.close()


if __name__ == "__main__":
    main()
