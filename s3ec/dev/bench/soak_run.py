# SPDX-License-Identifier: Apache-2.0
"""Carries out a soak: which fault comes when, what each one does, and the loop around engines.

A fault is a context manager that lasts as long as its block. What it yields says how often it has
struck something, so that one that hit nothing can be told from one that was survived.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from s3ec.dev.bench.soak_engine import LiveEngine, PictureSet, Sample, Watch
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
_DURATION_S = (4.0, 16.0)
_PAUSE_S = (4.0, 12.0)


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


Struck = Callable[[], int]
Doing = Callable[["Site", random.Random], AbstractContextManager[Struck]]

_OBJECTS = "/objects/"
# Objects or files that one fault befalls.
_MANY = 12


@dataclass
class Site:
    """What there is to damage.

    Attributes:
        server: The bucket's server.
        proxy: In front of it; what the engines ask.
        bucket: Its name.
        tier: The engines' cache folder.
        disk: A small file system of its own that holds ``tier``; None if there is none.
        kill_engine: Kills an engine and waits, on exit, for its next life; None: nobody does.
        deleted: Key of each object that a fault deleted -> when, in seconds since the epoch.
    """

    server: LocalS3
    proxy: FaultProxy
    bucket: str
    tier: Path
    disk: Path | None = None
    kill_engine: Callable[[], AbstractContextManager[None]] | None = None
    deleted: dict[str, float] = field(default_factory=dict)

    def objects(self, rng: random.Random) -> list[str]:
        """Keys of some entries in the bucket, none while it cannot be listed."""
        client = self.server.client()
        found: list[str] = []
        with contextlib.suppress(Exception):  # a server that another fault has ended
            pages = client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket)
            found = sorted(
                entry["Key"]
                for page in pages
                for entry in page.get("Contents", [])
                if _OBJECTS in entry["Key"]
            )
        return rng.sample(found, min(_MANY, len(found)))

    def entries(self, rng: random.Random, count: int = _MANY) -> list[Path]:
        """Some files of entries in the tier."""
        found = sorted(path for path in (self.tier / "v1" / "objects").rglob("*") if path.is_file())
        return rng.sample(found, min(count, len(found)))


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
            body = bytearray(reply.body)
            body[self.rng.randrange(len(body))] ^= 1 << self.rng.randrange(8)
            reply.body = bytes(body)
        await exchange.send(reply)


def _proxied(
    make: Callable[[random.Random], Fault], *, method: str = ".*", target: str = ""
) -> Doing:
    @contextlib.contextmanager
    def fault(site: Site, rng: random.Random) -> Iterator[Struck]:
        rule = site.proxy.add(Rule(make(rng), method=method, target=target))
        try:
            yield lambda: rule.fired
        finally:
            site.proxy.remove(rule)

    return fault


@contextlib.contextmanager
def _refused(site: Site, _: random.Random) -> Iterator[Struck]:
    with site.proxy.refusing():
        yield lambda: 1


@contextlib.contextmanager
def _server_killed(site: Site, _: random.Random) -> Iterator[Struck]:
    site.server.kill()
    try:
        yield lambda: 1
    finally:
        site.server.restart()


@contextlib.contextmanager
def _server_stopped(site: Site, _: random.Random) -> Iterator[Struck]:
    pid = site.server.pid
    if pid is None:
        yield lambda: 0
        return
    os.kill(pid, signal.SIGSTOP)
    try:
        yield lambda: 1
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


# -- in the bucket ---------------------------------------------------------------------------------


@contextlib.contextmanager
def _objects_changed(
    site: Site, rng: random.Random, change: Callable[[dict[str, bytes]], dict[str, bytes]]
) -> Iterator[Struck]:
    """Overwrite some objects; put the old ones back at the end."""
    client = site.server.client()
    before = _contents(site, client, site.objects(rng))
    changed = change(before)
    struck = sum(_put(client, site.bucket, key, content) for key, content in changed.items())
    try:
        yield lambda: struck
    finally:
        for key in changed:
            _put(client, site.bucket, key, before[key], patience_s=30)


def _contents(site: Site, client: Any, keys: list[str]) -> dict[str, bytes]:
    found = {}
    for key in keys:
        with contextlib.suppress(Exception):  # as in objects()
            found[key] = client.get_object(Bucket=site.bucket, Key=key)["Body"].read()
    return found


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


def _objects_corrupted(site: Site, rng: random.Random) -> AbstractContextManager[Struck]:
    def change(before: dict[str, bytes]) -> dict[str, bytes]:
        ways = (_flipped, _halved, lambda _blob, _rng: b"", lambda _blob, _rng: b"<html></html>")
        return {key: rng.choice(ways)(blob, rng) for key, blob in before.items()}

    return _objects_changed(site, rng, change)


def _objects_swapped(site: Site, rng: random.Random) -> AbstractContextManager[Struck]:
    def change(before: dict[str, bytes]) -> dict[str, bytes]:
        keys = list(before)
        return dict(zip(keys, [before[key] for key in keys[1:] + keys[:1]], strict=True))

    return _objects_changed(site, rng, change)


@contextlib.contextmanager
def _objects_deleted(site: Site, rng: random.Random) -> Iterator[Struck]:
    client = site.server.client()
    struck = 0
    for key in site.objects(rng):
        site.deleted[key] = time.time()
        with contextlib.suppress(Exception):  # as in objects()
            client.delete_object(Bucket=site.bucket, Key=key)
            struck += 1
        site.deleted[key] = time.time()
    yield lambda: struck


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
    for path in site.entries(rng):
        with contextlib.suppress(OSError):  # evicted meanwhile
            content = path.read_bytes()
            damaged = rng.choice((_flipped, _halved))(content, rng)
            # In place, as a failing disk does: pins are other names of the same file.
            with path.open("r+b") as file:
                file.write(damaged)
                file.truncate(len(damaged))
            struck += 1
    yield lambda: struck


@contextlib.contextmanager
def _files_removed(site: Site, rng: random.Random) -> Iterator[Struck]:
    struck = 0
    for path in site.entries(rng, 4 * _MANY):
        with contextlib.suppress(OSError):
            path.unlink()
            struck += 1
    yield lambda: struck


@contextlib.contextmanager
def _folder_removed(site: Site, _: random.Random) -> Iterator[Struck]:
    shutil.rmtree(site.tier, ignore_errors=True)
    yield lambda: 1


@contextlib.contextmanager
def _folder_open_to_all(site: Site, _: random.Random) -> Iterator[Struck]:
    try:
        site.tier.chmod(0o777)
    except OSError:  # another fault removed it
        yield lambda: 0
        return
    try:
        yield lambda: 1
    finally:
        with contextlib.suppress(OSError):
            site.tier.chmod(0o700)


@contextlib.contextmanager
def _disk_full(site: Site, _: random.Random) -> Iterator[Struck]:
    if site.disk is None:
        yield lambda: 0
        return
    ballast = site.disk / "ballast"
    try:
        with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(bytes(2**12)):
                pass
        yield lambda: 1
    finally:
        ballast.unlink(missing_ok=True)


# -- of a process ----------------------------------------------------------------------------------


@contextlib.contextmanager
def _engine_killed(site: Site, _: random.Random) -> Iterator[Struck]:
    if site.kill_engine is None:
        yield lambda: 0
        return
    with site.kill_engine():
        yield lambda: 1


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
    "web page": _proxied(lambda _: html_page(), target=_OBJECTS),
    "bits flipped": _proxied(_FlipSomewhere, method="GET"),
    "objects corrupted": _objects_corrupted,
    "objects swapped": _objects_swapped,
    "objects deleted": _objects_deleted,
    "files damaged": _files_damaged,
    "files removed": _files_removed,
    "folder removed": _folder_removed,
    "folder open to all": _folder_open_to_all,
    "disk full": _disk_full,
    "engine killed": _engine_killed,
}


# How soon after a fault embeddings must come from the bucket again: longer than the longest
# pause of a breaker, and than an engine takes for what it was asked before.
_BACK_S = 75.0
_LOOK_S = 0.25


@dataclass(frozen=True, slots=True)
class Plot:
    """What happens, and for how long.

    Attributes:
        minutes: Of faults; engines start and end outside of them.
        seed: Gives the order of faults, their lengths, and the pictures.
        scale: Of the lengths.
        kinds: Faults to choose from.
    """

    minutes: float
    seed: int
    scale: float = 1.0
    kinds: Sequence[str] = tuple(FAULTS)


@dataclass(frozen=True, slots=True)
class Cast:
    """What takes part: things to damage, engines that run, and pictures to ask about."""

    site: Site
    engines: Sequence[LiveEngine]
    album: PictureSet


@dataclass(frozen=True, slots=True)
class Blow:
    """One step that was carried out.

    Attributes:
        step: What was planned.
        began_s: Seconds since the soak began.
        ended_s: The same.
        struck: Kind of fault -> how often it hit something.
        back_s: How long after its end every engine had embeddings from the bucket again; None
            where one had none in time.
    """

    step: Step
    began_s: float
    ended_s: float
    struck: dict[str, int]
    back_s: float | None


@dataclass
class Story:
    """What happened.

    Attributes:
        began_s: On the monotonic clock.
        seconds: How long it was.
    """

    plot: Plot
    engines: Sequence[LiveEngine]
    began_s: float
    seconds: float = 0.0
    blows: list[Blow] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)


class _Now:
    """Names the faults of the moment."""

    def __init__(self) -> None:
        self.kinds: tuple[str, ...] = ()

    def __call__(self) -> str:
        return " and ".join(self.kinds) or "no fault"


def soak(cast: Cast, plot: Plot, *, stop: threading.Event, say: Callable[[str], None]) -> Story:
    """Let it happen; when it returns the engines have ended in order and every fault is over.

    Args:
        cast: Engines that nobody asks yet.
        plot: What is to happen.
        stop: Ends it early once set.
        say: Shows progress.
    """
    story = Story(plot, cast.engines, time.monotonic())
    now = _Now()
    for engine in cast.engines:
        engine.start(now)
    with Watch(cast.engines) as watch:
        _until_back(story.began_s, story, cast, stop)  # there must be something to lose
        for step in plan(plot.seed, _possible(cast.site, plot.kinds), scale=plot.scale):
            if _is_over(story, stop):
                break
            say(f"{story.seconds / 60:.0f} of {plot.minutes:g} minutes: {' and '.join(step.kinds)}")
            story.blows.append(_carry_out(step, story, cast, now, stop))
            stop.wait(step.pause_s)
            cast.site.proxy.requests.clear()  # they would be most of this process's memory
    say("ending the engines")
    for engine in cast.engines:
        engine.stop()
    story.samples = watch.samples
    return story


def _possible(site: Site, kinds: Sequence[str]) -> list[str]:
    impossible = {"disk full"} if site.disk is None else set()
    impossible |= {"engine killed"} if site.kill_engine is None else set()
    return [kind for kind in kinds if kind not in impossible]


def _is_over(story: Story, stop: threading.Event) -> bool:
    story.seconds = time.monotonic() - story.began_s
    for engine in story.engines:
        if engine.failure is not None:
            raise engine.failure
    return (
        stop.is_set()
        or story.seconds >= story.plot.minutes * 60
        or any(engine.gave_up for engine in story.engines)
    )


def _carry_out(step: Step, story: Story, cast: Cast, now: _Now, stop: threading.Event) -> Blow:
    source = random.Random(step.seed)
    began = time.monotonic()
    # What is damaged in the bucket is mended once the server is up again.
    order = sorted(step.kinds, key=list(FAULTS).index, reverse=True)
    with contextlib.ExitStack() as faults:
        struck = {kind: faults.enter_context(FAULTS[kind](cast.site, source)) for kind in order}
        now.kinds = step.kinds
        _pass_time(step.duration_s, story, cast, stop)
        hits = {kind: count() for kind, count in struck.items()}
    now.kinds = ()
    ended = time.monotonic()
    back_s = _until_back(ended, story, cast, stop)
    return Blow(step, began - story.began_s, ended - story.began_s, hits, back_s)


def _pass_time(seconds: float, story: Story, cast: Cast, stop: threading.Event) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end and not stop.wait(_LOOK_S):
        cast.album.share = (time.monotonic() - story.began_s) / (story.plot.minutes * 60)
        for engine in cast.engines:
            engine.unstick()


def _until_back(since: float, story: Story, cast: Cast, stop: threading.Event) -> float | None:
    """Seconds until every engine was asked anew and got something from the bucket."""
    while time.monotonic() < since + _BACK_S and not stop.is_set():
        ends = [engine.first_fetch_after(since) for engine in cast.engines]
        found = [end for end in ends if end is not None]
        if len(found) == len(ends):
            return max(found) - since
        if any(engine.gave_up or engine.failure for engine in cast.engines):
            return None
        _pass_time(_LOOK_S, story, cast, stop)
    return None
