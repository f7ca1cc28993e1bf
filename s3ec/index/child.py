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
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Literal, TypeAlias

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
from s3ec.store.places import served_by

LISTING_EVERY_S = 86400.0
"""How often one engine of a writing fleet lists the objects."""
_RAISED = {each.__name__: each for each in (UnavailableError, AccessError, TierError)}
LONGEST_S = 7200.0
"""A child that takes longer is taken to hang: by then its claim has expired."""
# The wait for a killed child, which may still wait for a disk.
_LAST_S = 5.0
# Tries of one request.
_ATTEMPTS = 5
_NICE = 19
# A child finds its modules where its parent does, not in the folder where it was started.
_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.stdin.readline()); "
    f"from {__name__} import main; main()"
)
# The most of a child's output that an error shows; libraries may print warnings before.
_SAID_CHARACTERS = 2000


@dataclass(frozen=True, slots=True)
class Job:
    """The work for a child.

    Attributes:
        kind: ``fetch`` downloads a snapshot and makes its filter; ``union`` and ``listing`` make a
            snapshot, write it to the bucket, and keep it on this node with its filter.
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
"""Runs a job; returns the name of the snapshot; empty if there was nothing to do.

Raises UnavailableError, AccessError, CorruptEntryError or TierError as the work does.
"""


def in_child(settings: Settings) -> Jobs:
    """Run jobs in a child process, which ends with this one.

    Args:
        settings: The child opens the bucket with them.
    """

    async def run(job: Job) -> str:
        # Settings go through a pipe, since every user can read a command line.
        order = json.dumps({"job": asdict(job), "settings": settings.model_dump(mode="json")})
        with TemporaryFile("w+", errors="replace") as file:
            child = _start(file)
            try:
                status = await asyncio.to_thread(_wait_for, child, order)
            finally:
                child.kill()  # in case this was cancelled
            file.seek(0)
            said = file.read()
        try:
            answer = json.loads(said.rpartition("\n")[2])
        except ValueError:
            raise UnavailableError(
                f"a child process that was to {job.kind} ended with {status}: "
                f"{said[-_SAID_CHARACTERS:]}"
            ) from None
        if "error" not in answer:
            return str(answer["snapshot"])
        if answer["error"] == CorruptEntryError.__name__:
            raise CorruptEntryError(answer["message"], reason=answer["reason"])
        raise _RAISED.get(answer["error"], UnavailableError)(answer["message"])

    return run


def in_process(store: Store) -> Jobs:
    """Run jobs in this process, for commands and for tests whose bucket no child can reach."""
    return lambda job: _work(job, store)


async def _work(job: Job, store: Store) -> str:
    from s3ec.index import maker
    from s3ec.index.local import NodeFolder
    from s3ec.index.names import SnapshotName

    layout, node = Layout(job.namespace), NodeFolder(Path(job.folder))
    if job.kind == "fetch":
        name = SnapshotName.parse(job.snapshot)
        if name is None:
            raise CorruptEntryError(f"{job.snapshot!r:.100} is no snapshot", reason="header")
        with served_by() as replicas:
            try:
                await maker.fetch_snapshot(store, layout, node, name)
            except CorruptEntryError as exc:
                if not replicas:
                    raise
                # Home's copy may be good; home does not answer now.
                raise UnavailableError(f"the copy of a replica: {exc}") from exc
        return str(name)
    made = None
    if job.kind == "listing":
        made = await maker.make_listing(store, layout, node, older_s=job.older_s)
    if made is None:  # a listing whose snapshot was damaged is due here, and was made all the same
        made = await maker.make_union(store, layout, node)
    return "" if made is None else str(made.name)


def _start(file: IO[str]) -> subprocess.Popen[str]:
    """Start a child whose output goes to a file. A millisecond; raises UnavailableError."""
    command = [sys.executable, "-P", "-c", _PROGRAM]
    try:
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=file, stderr=file, text=True)
    except OSError as exc:
        raise UnavailableError(f"cannot start a child process: {exc}") from exc


def _wait_for(child: subprocess.Popen[str], order: str) -> int:
    """Send a child its order; returns its exit status. Raises UnavailableError if it hangs.

    Its input stays open as long as this process lives: when the input ends, the child ends.
    """
    if child.stdin is None:
        raise RuntimeError("a child process without an input")
    with suppress(BrokenPipeError):  # the child has ended, with or without a message
        child.stdin.write(f"{json.dumps(sys.path)}\n{order}\n")
        child.stdin.flush()
    try:
        return child.wait(LONGEST_S)
    except subprocess.TimeoutExpired:
        child.kill()
        with suppress(subprocess.TimeoutExpired):
            child.wait(_LAST_S)
        raise UnavailableError("a child process has not ended, and was killed") from None
    finally:
        with suppress(BrokenPipeError):
            child.stdin.close()


# -- in the child ----------------------------------------------------------------------------------


def main() -> None:
    """Run the order in the input's second line, and print the result as the last line."""
    os.nice(_NICE)
    order = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        answer: dict[str, str] = {"snapshot": asyncio.run(_open_and_work(order))}
    except S3ECError as exc:
        answer = {"error": type(exc).__name__, "message": str(exc)}
        answer["reason"] = getattr(exc, "reason", "")
    sys.stdout.write(f"\n{json.dumps(answer)}")
    sys.stdout.flush()
    os._exit(0)  # without a wait for the store's threads


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(1)


async def _open_and_work(order: dict[str, dict[str, object]]) -> str:
    from s3ec.store.open import deleting_everywhere, open_places, open_store
    from s3ec.store.retry import RetryStore

    settings = Settings.model_validate(order["settings"])
    job = Job(**order["job"])  # type: ignore[arg-type]
    try:
        opened = open_store(settings, patient=True)
    except ConfigError as exc:
        raise AccessError(str(exc)) from exc
    # As in a command: no request waits for it, so it needs no breaker.
    store: Store = RetryStore(opened, Counters(), attempts=_ATTEMPTS)
    if job.kind == "fetch":
        is_entry = Layout(job.namespace).is_entry
        store = open_places(settings, store, Counters(), is_entry=is_entry) or store
    else:  # an index is made only from what home holds
        store = deleting_everywhere(settings, store)
    try:
        return await _work(job, store)
    finally:
        await store.close()
