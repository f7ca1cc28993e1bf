# SPDX-License-Identifier: Apache-2.0
"""The faults of a soak: which comes when, and what each one does.

A fault is a context manager that lasts as long as its block. It yields how often it has struck
something, or the proxy's rule that counts, so that one that hit nothing can be told from one that
was survived.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from s3ec.dev.rigs.proxy import Exchange, Fault, FaultProxy, Rule
from s3ec.dev.rigs.proxy_faults import (
    Cut,
    Delay,
    LoseReply,
    Reset,
    Stall,
    StallUpload,
    Trickle,
    html_page,
    s3_error,
)
from s3ec.testing.server import LocalS3

# Two faults at once, so often.
_PAIRS = 0.25
_DURATION_S, _PAUSE_S = (4.0, 16.0), (4.0, 12.0)
OBJECTS = "/objects/"
# Objects or files that one fault befalls.
_MANY = 12


@dataclass(frozen=True, slots=True)
class Step:
    """Faults that begin and end together.

    Attributes:
        kinds: One or two kinds of fault.
        duration_s: How long they last.
        pause_s: Shortest time without a fault after them.
        seed: For whatever they choose at random.
    """

    kinds: tuple[str, ...]
    duration_s: float
    pause_s: float
    seed: int


def plan(seed: int, kinds: Sequence[str], *, scale: float = 1.0) -> Iterator[Step]:
    """Steps without end; every kind comes once before any comes again.

    Args:
        seed: Same seed and kinds, same steps.
        kinds: Of faults.
        scale: Of all times.
    """
    source = random.Random(f"soak {seed}")
    bag: list[str] = []
    while True:
        chosen: list[str] = []
        for _ in range(2 if source.random() < _PAIRS else 1):
            if not bag:
                bag = list(kinds)
                source.shuffle(bag)
            if bag[-1] not in chosen:
                chosen.append(bag.pop())
        yield Step(
            tuple(chosen),
            source.uniform(*_DURATION_S) * scale,
            source.uniform(*_PAUSE_S) * scale,
            source.getrandbits(32),
        )


@dataclass
class Site:
    """What there is to damage.

    Attributes:
        server: The bucket's server.
        proxy: In front of it; what the engines ask.
        bucket: Its name.
        tier: The engines' cache folder.
        disk: A small file system of its own that holds ``tier``; None if there is none.
        kill_engine: Kills an engine and waits, on exit, for its next life.
        deleted: Key of each object that a fault deleted -> when, in seconds since the epoch.
    """

    server: LocalS3
    proxy: FaultProxy
    bucket: str
    tier: Path
    disk: Path | None = None
    kill_engine: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
    deleted: dict[str, float] = field(default_factory=dict)

    def objects(self, client: Any) -> list[str]:
        """Keys of all entries in the bucket, sorted."""
        pages = client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket)
        found = (entry["Key"] for page in pages for entry in page.get("Contents", []))
        return sorted(key for key in found if OBJECTS in key)

    def some_objects(self, rng: random.Random) -> list[str]:
        """Keys of some entries, none while the bucket cannot be listed."""
        found: list[str] = []
        with contextlib.suppress(Exception):  # a server that another fault has ended
            found = self.objects(self.server.client())
        return rng.sample(found, min(_MANY, len(found)))

    def files(self, rng: random.Random, count: int = _MANY) -> list[Path]:
        """Some files of entries in the tier."""
        found = sorted(path for path in (self.tier / "v1" / "objects").rglob("*") if path.is_file())
        return rng.sample(found, min(count, len(found)))


Struck = int | Rule
Doing = Callable[[Site, random.Random], AbstractContextManager[Struck]]


# -- on the way ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Sometimes:
    """A fault that befalls a share of the requests; the others pass."""

    fault: Fault
    share: float
    rng: random.Random

    async def apply(self, exchange: Exchange) -> None:
        if self.rng.random() < self.share:
            await self.fault.apply(exchange)
        else:
            await exchange.send(await exchange.forward())


@dataclass(frozen=True, slots=True)
class _FlipSomewhere:
    """One wrong bit anywhere in the body."""

    rng: random.Random

    async def apply(self, exchange: Exchange) -> None:
        reply = await exchange.forward()
        if reply.body:
            reply.body = _flipped(reply.body, self.rng)
        await exchange.send(reply)


def _proxied(
    make: Callable[[random.Random], Fault], *, method: str = ".*", target: str = ""
) -> Doing:
    @contextlib.contextmanager
    def fault(site: Site, rng: random.Random) -> Iterator[Struck]:
        rule = site.proxy.add(Rule(make(rng), method=method, target=target))
        try:
            yield rule
        finally:
            site.proxy.remove(rule)

    return fault


@contextlib.contextmanager
def _refused(site: Site, _: random.Random) -> Iterator[Struck]:
    with site.proxy.refusing():
        yield 1


@contextlib.contextmanager
def _server_killed(site: Site, _: random.Random) -> Iterator[Struck]:
    site.server.kill()
    try:
        yield 1
    finally:
        site.server.restart()


@contextlib.contextmanager
def _server_stopped(site: Site, _: random.Random) -> Iterator[Struck]:
    pid = site.server.pid
    if pid is None:
        yield 0
        return
    os.kill(pid, signal.SIGSTOP)
    try:
        yield 1
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


# -- in the bucket ---------------------------------------------------------------------------------

Change = Callable[[dict[str, bytes], random.Random], dict[str, bytes]]


def _objects_changed(change: Change) -> Doing:
    """Overwrite some objects; put the old ones back at the end."""

    @contextlib.contextmanager
    def fault(site: Site, rng: random.Random) -> Iterator[Struck]:
        client = site.server.client()
        before = {}
        for key in site.some_objects(rng):
            with contextlib.suppress(Exception):  # a server that another fault has ended
                before[key] = client.get_object(Bucket=site.bucket, Key=key)["Body"].read()
        changed = change(before, rng)
        yield sum(_put(client, site.bucket, key, content) for key, content in changed.items())
        for key in changed:
            _put(client, site.bucket, key, before[key], patience_s=30)

    return fault


def _put(client: Any, bucket: str, key: str, content: bytes, *, patience_s: float = 0.0) -> bool:
    """Whether the server took it, asked again for some time."""
    end = time.monotonic() + patience_s
    while True:
        try:
            client.put_object(Bucket=bucket, Key=key, Body=content)
        except Exception:  # noqa: BLE001 - down for another fault's sake
            if time.monotonic() > end:
                return False
            time.sleep(0.5)
        else:
            return True


def _corrupted(before: dict[str, bytes], rng: random.Random) -> dict[str, bytes]:
    ways = (_flipped, _halved, lambda _blob, _rng: b"", lambda _blob, _rng: b"<html></html>")
    return {key: rng.choice(ways)(blob, rng) for key, blob in before.items()}


def _swapped(before: dict[str, bytes], _: random.Random) -> dict[str, bytes]:
    keys = list(before)
    return dict(zip(keys, [before[key] for key in keys[1:] + keys[:1]], strict=True))


@contextlib.contextmanager
def _objects_deleted(site: Site, rng: random.Random) -> Iterator[Struck]:
    client = site.server.client()
    struck = 0
    for key in site.some_objects(rng):
        site.deleted[key] = time.time()
        with contextlib.suppress(Exception):  # a server that another fault has ended
            client.delete_object(Bucket=site.bucket, Key=key)
            struck += 1
        site.deleted[key] = time.time()
    yield struck


def _flipped(blob: bytes, rng: random.Random) -> bytes:
    if not blob:
        return b"\0"
    place = rng.randrange(len(blob))
    return blob[:place] + bytes([blob[place] ^ 1 << rng.randrange(8)]) + blob[place + 1 :]


def _halved(blob: bytes, rng: random.Random) -> bytes:
    return blob[: rng.randrange(len(blob))] if blob else b""


# -- on the node's disk ----------------------------------------------------------------------------


@contextlib.contextmanager
def _files_damaged(site: Site, rng: random.Random) -> Iterator[Struck]:
    struck = 0
    for path in site.files(rng):
        with contextlib.suppress(OSError):  # evicted meanwhile
            damaged = rng.choice((_flipped, _halved))(path.read_bytes(), rng)
            # In place, as a failing disk does: who has the file open reads the damage.
            with path.open("r+b") as file:
                file.write(damaged)
                file.truncate(len(damaged))
            struck += 1
    yield struck


@contextlib.contextmanager
def _files_removed(site: Site, rng: random.Random) -> Iterator[Struck]:
    struck = 0
    for path in site.files(rng, 4 * _MANY):
        with contextlib.suppress(OSError):
            path.unlink()
            struck += 1
    yield struck


@contextlib.contextmanager
def _folder_removed(site: Site, _: random.Random) -> Iterator[Struck]:
    shutil.rmtree(site.tier, ignore_errors=True)
    yield 1


@contextlib.contextmanager
def _folder_open_to_all(site: Site, _: random.Random) -> Iterator[Struck]:
    with contextlib.suppress(OSError):  # another fault removed it
        site.tier.chmod(0o777)
    try:
        yield 1
    finally:
        with contextlib.suppress(OSError):
            site.tier.chmod(0o700)


@contextlib.contextmanager
def _disk_full(site: Site, _: random.Random) -> Iterator[Struck]:
    ballast = (site.disk or site.tier) / "ballast"
    try:
        with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(bytes(2**12)):
                pass
        yield 1
    finally:
        ballast.unlink(missing_ok=True)


@contextlib.contextmanager
def _engine_killed(site: Site, _: random.Random) -> Iterator[Struck]:
    with site.kill_engine():
        yield 1


DISK_FULL = "disk full"
_SLOW_DOWN = s3_error(503, "SlowDown")
FAULTS: dict[str, Doing] = {
    "server killed": _server_killed,
    "server stopped": _server_stopped,
    "black hole": _proxied(lambda _: StallUpload()),
    "refused": _refused,
    "503 to all": _proxied(lambda _: _SLOW_DOWN),
    "503 to one in ten": _proxied(lambda rng: _Sometimes(_SLOW_DOWN, 0.1, rng)),
    "500 to half": _proxied(lambda rng: _Sometimes(s3_error(500, "InternalError"), 0.5, rng)),
    "429": _proxied(lambda _: s3_error(429, "TooManyRequests", headers={"retry-after": "1"})),
    "403 to all": _proxied(lambda _: s3_error(403, "InvalidAccessKeyId")),
    "403 to writes": _proxied(lambda _: s3_error(403, "AccessDenied"), method="PUT|POST|DELETE"),
    "slow first byte": _proxied(lambda rng: Delay(rng.uniform(0.5, 6))),
    "trickle": _proxied(lambda _: Trickle(512, 0.5), method="GET"),
    "stall in the body": _proxied(lambda _: Stall(upto=100), method="GET"),
    "reset": _proxied(lambda rng: _Sometimes(Reset(), 0.7, rng)),
    "reset in the body": _proxied(lambda rng: Cut(rng.randrange(4000), reset=True), method="GET"),
    "cut": _proxied(lambda rng: Cut(rng.randrange(4000)), method="GET"),
    "lost reply": _proxied(lambda rng: _Sometimes(LoseReply(), 0.7, rng), method="PUT"),
    "web page": _proxied(lambda _: html_page(), target=OBJECTS),
    "bits flipped": _proxied(_FlipSomewhere, method="GET"),
    "objects corrupted": _objects_changed(_corrupted),
    "objects swapped": _objects_changed(_swapped),
    "objects deleted": _objects_deleted,
    "files damaged": _files_damaged,
    "files removed": _files_removed,
    "folder removed": _folder_removed,
    "folder open to all": _folder_open_to_all,
    DISK_FULL: _disk_full,
    "engine killed": _engine_killed,
}
