# SPDX-License-Identifier: Apache-2.0
"""The other processes of the node, for tests: ``child.py COMMAND ROOT ...``; talks in lines."""

from __future__ import annotations

import fcntl
import itertools
import os
import resource
import sys
import time
from pathlib import Path

from s3ec.errors import TierError
from tests.unit.tier.cases import (
    DESTINATION,
    entry,
    file_of,
    key_at,
    key_of,
    new_tier,
    pin_folders,
    publish_spooled,
    read,
    spool_folders,
    temps_below,
)


def say(line: object) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def hear() -> str:
    return sys.stdin.readline().strip()


def race(root: Path, rounds: int) -> None:
    """Publish and pin one key again and again."""
    tier, key = new_tier(root), key_at(0)
    tier.open()
    blob = entry(key)
    say("ready")
    hear()
    for _ in range(rounds):
        tier.publish(key, [blob[:100], memoryview(blob)[100:]])
        pin = tier.pin(key)
        assert pin is not None
        assert read(pin, key) == blob
        tier.unpin(pin)
    tier.close()
    say("done")


def hold(root: Path, number: int) -> None:
    """Pin one entry, say where, and keep it until told or killed."""
    tier = new_tier(root)
    tier.open()
    pin = tier.pin(key_at(number))
    assert pin is not None
    say(pin.path)
    hear()
    tier.close()


def stop_before_rename(root: Path, number: int) -> None:
    """Publish as far as the rename, and wait there to be killed."""
    tier = new_tier(root)
    tier.open()

    def stop(source: str, target: str) -> None:
        say(source)
        hear()

    os.replace = stop  # type: ignore[assignment]
    tier.publish(key_at(number), [entry(key_at(number))])


def churn(root: Path, budget_bytes: int, first: int, count: int) -> None:
    """Publish many entries into a small budget."""
    tier = new_tier(root, budget_bytes=budget_bytes)
    tier.open()
    say("ready")
    hear()
    for number in range(first, first + count):
        tier.publish(key_at(number), [entry(key_at(number))])
    tier.make_room()
    tier.close()
    say("done")


def flood(root: Path, budget_bytes: int, min_free_bytes: int, rows: int, number: int) -> None:
    """Publish as fast as it goes; says how many were refused."""
    tier = new_tier(root, budget_bytes=budget_bytes, min_free_bytes=min_free_bytes)
    tier.open()
    say("ready")
    hear()
    refused = 0
    for turn in range(120):
        key = key_at(1000 * number + turn)
        try:
            tier.publish(key, [entry(key, rows=rows)])
        except TierError:
            refused += 1
    say(refused)
    hear()
    tier.close()


def occupy(root: Path) -> None:
    """Be the evictor, for as long as wanted."""
    fd = os.open(root / "v1" / "evict.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(fd, fcntl.LOCK_EX)
    say("locked")
    hear()


def fork(root: Path) -> None:
    """Pin in a parent and its forked child; neither may touch the other's pins."""
    tier, key = new_tier(root), key_at(0)
    tier.open()
    tier.publish(key, [entry(key)])
    parents = tier.pin(key)
    assert parents is not None
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            tier.unpin(parents)
            own = tier.pin(key)
            assert own is not None
            assert own.path.parent != parents.path.parent
            assert own.path.parent.name.startswith(f"{os.getpid()}-")
            assert own.path.parent.exists()
            tier.close()
            assert not own.path.parent.exists()
            assert read(parents, key) == entry(key)
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert read(parents, key) == entry(key)
    tier.close()
    say(len(pin_folders(root)))


def fork_evicting(root: Path) -> None:
    """Evict in the background in a parent, then in its forked child."""
    count = 0
    keys = (key_of(f"{number:064x}") for number in itertools.count())

    def fill_up() -> int:
        """Publish until the thread has evicted, and say what it left."""
        nonlocal count
        for key in itertools.islice(keys, 96 - count):
            tier.publish(key, [entry(key)], used=False)
        deadline_s = time.monotonic() + 20
        while (count := tier.usage().entries) > 90 and time.monotonic() < deadline_s:
            time.sleep(0.002)
        return count

    tier = new_tier(root, budget_bytes=100 * len(entry(key_of("0" * 64))))
    tier.open()
    in_parent = fill_up()
    pid = os.fork()
    if pid == 0:
        say(f"parent: {in_parent} child: {fill_up()}")
        tier.close()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    tier.close()


def spool(root: Path, first: int, count: int) -> None:
    """Spool some entries, say where, and keep them until told or killed."""
    tier = new_tier(root)
    tier.open()
    publish_spooled(tier, tier.open_spool(DESTINATION), *range(first, first + count))
    say(f"{os.getpid()}")
    hear()
    tier.close()


def spool_before_rename(root: Path, number: int) -> None:
    """Publish and spool as far as the rename, and wait there to be killed."""
    tier = new_tier(root)
    tier.open()

    def stop(source: str, target: str) -> None:
        say(source)
        hear()

    os.replace = stop  # type: ignore[assignment]
    publish_spooled(tier, tier.open_spool(DESTINATION), number)


def adopt(root: Path) -> None:
    """Adopt until told to stop, and say what was got, and whether all of it can be read."""
    tier = new_tier(root)
    tier.open()
    own = tier.open_spool(DESTINATION)
    say("ready")
    hear()
    got = []
    for _ in range(50):
        got += own.adopt()
    say(" ".join(one.digest.hex() for one in got))
    say(all(own.load(one.digest) is not None for one in got))
    hear()
    for one in got:
        own.remove(one.digest)
    tier.close()


def fork_spool(root: Path) -> None:
    """Spool in a parent and its forked child; neither may touch the other's."""
    tier = new_tier(root)
    tier.open()
    own = tier.open_spool(DESTINATION)
    publish_spooled(tier, own, 0)
    (parents,) = spool_folders(root)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            assert own.nbytes == 0
            own.remove(key_at(0).digest)
            assert own.load(key_at(0).digest) is None
            publish_spooled(tier, own, 1)
            (childs,) = set(spool_folders(root)) - {parents}
            assert childs.name.startswith(f"{os.getpid()}-")
            own.remove(key_at(1).digest)
            tier.close()
            assert not childs.exists()
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    loaded = own.load(key_at(0).digest)
    assert loaded is not None
    assert loaded.blob == entry(key_at(0))
    own.remove(key_at(0).digest)
    tier.close()
    say(len(spool_folders(root)))


def orphan(root: Path) -> None:
    """Pin, then fork a child that does nothing; it says its parent's pin and outlives it."""
    tier, key = new_tier(root), key_at(0)
    tier.open()
    pin = tier.pin(key)
    assert pin is not None
    if os.fork() == 0:
        say(pin.path)
        hear()
        os._exit(0)
    os._exit(0)


def limit(root: Path) -> None:
    """Publish under a limit on file sizes, which the kernel keeps in the middle of a write."""
    tier, key = new_tier(root), key_at(0)
    tier.open()
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, resource.RLIM_INFINITY))
    try:
        tier.publish(key, [entry(key)])
    except TierError as exc:
        say(exc)
    say(f"{file_of(root, key).exists()} {temps_below(root)}")
    tier.close()


if __name__ == "__main__":
    commands = {
        function.__name__: function
        for function in (
            *(race, hold, stop_before_rename, churn, flood, occupy, fork, orphan, limit),
            *(spool, spool_before_rename, adopt, fork_spool, fork_evicting),
        )
    }
    commands[sys.argv[1]](Path(sys.argv[2]), *(int(argument) for argument in sys.argv[3:]))
