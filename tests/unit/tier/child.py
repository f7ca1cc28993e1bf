# SPDX-License-Identifier: Apache-2.0
"""The other processes of the node, for tests: ``child.py COMMAND ROOT ...``; talks in lines."""

from __future__ import annotations

import asyncio
import fcntl
import gc
import os
import resource
import signal
import socket
import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MethodType
from typing import Any

from s3ec.errors import TierError
from s3ec.index.local import NodeFolder
from s3ec.tier import evictor
from s3ec.tier.claims import Claim
from s3ec.tier.evictor import evict_lock
from s3ec.tier.files import Folders, TempFile, try_lock
from tests.support.file_calls import open_below
from tests.support.on_disk import make_room
from tests.support.waiting import DEADLINE_S, eventually
from tests.unit.tier.cases import (
    DESTINATION,
    NAMESPACE,
    entry,
    key_at,
    new_tier,
    opened,
    publish,
    read,
)


def say(line: object) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def hear() -> str:
    return sys.stdin.readline().strip()


def hold(root: Path, number: int) -> None:
    """Hold one entry open until told, then say whether it can be read."""
    tier, key = new_tier(root), key_at(number)
    held = opened(tier, key)
    say("open")
    hear()
    say(read(held, key) == entry(key))
    hear()
    tier.close()


def few_files(root: Path, most: int) -> None:
    """Have residents where few files may be open; say how many are, and how much is left."""
    soft = min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], most // 2)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, most))
    tier = new_tier(root)
    residents = tier.open_residents(lambda header: True)
    say(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    residents.start()
    eventually(lambda: len(residents) >= most // 2)
    say(len(residents))
    say(len([opened(tier, key) for key in map(key_at, range(5))]))
    tier.close()
    say(len(open_below(root)))


def churn(root: Path, budget_bytes: int, first: int, count: int) -> None:
    """Publish many entries into a small budget."""
    tier = new_tier(root, budget_bytes=budget_bytes)
    say("ready")
    hear()
    for number in range(first, first + count):
        tier.writer.publish(key_at(number), [entry(key_at(number))])
    make_room(tier, budget_bytes=budget_bytes)
    tier.close()
    say("done")


def flood(root: Path, budget_bytes: int, min_free_bytes: int, rows: int, number: int) -> None:
    """Publish as fast as it goes; says how many were refused."""
    tier = new_tier(root, budget_bytes=budget_bytes, min_free_bytes=min_free_bytes)
    say("ready")
    hear()
    refused = 0
    for turn in range(120):
        key = key_at(1000 * number + turn)
        try:
            tier.writer.publish(key, [entry(key, rows=rows)])
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


def spool(root: Path, first: int, count: int) -> None:
    """Spool some entries, say where, and keep them until told or killed."""
    tier = new_tier(root)
    publish(tier, *range(first, first + count), spool=tier.open_spool(DESTINATION))
    say(f"{os.getpid()}")
    hear()
    tier.close()


def adopt(root: Path) -> None:
    """Adopt until told to stop, and say what was got, and whether all of it can be read."""
    tier = new_tier(root)
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
        own.remove(one)
    tier.close()


def fork(root: Path) -> None:
    """Fork a node's process while a thread has locked all there is; the child ends in order."""
    # Not above: most of these processes need none of it.
    from s3ec.config import load_settings
    from s3ec.identity import Namespace
    from s3ec.node import Node

    given = {"bucket": "corpus", "cache_dir": str(root), "endpoint_url": "http://127.0.0.1:9"}
    settings, namespace = load_settings(given).settings, Namespace(NAMESPACE, {})
    node, key = Node.shared(settings, namespace), key_at(0)
    node.tier.writer.publish(key, [entry(key)])
    held, claim = opened(node.tier, key), node.tier.entries.open_or_claim(key_at(1))
    assert isinstance(claim, Claim)
    ours, theirs = socket.socketpair()
    reader, _ = node.loop.run(_connect(ours), DEADLINE_S)
    locked = _all_locked(node, Node._locks)
    index = NodeFolder.of(node.tier.folders, NAMESPACE)
    making = index.try_claim("make")
    assert making is not None
    with locked:
        pid = os.fork()
        if pid == 0:
            signal.alarm(240)
            assert node.is_foreign
            assert os.readlink(f"/proc/self/fd/{ours.fileno()}") == os.devnull
            own = Node.shared(settings, namespace)
            assert own is not node
            assert own.endpoint is not node.endpoint
            assert os.readlink(f"/proc/self/fd/{held.fd}") == os.devnull
            mine = opened(own.tier, key)
            assert mine.pid == os.getpid()
            assert mine.fd != held.fd
            assert own.tier.claims.is_taken(key_at(1).digest)
            assert index.try_claim("make") is None
            del held
            own.tier.claims.release(claim)
            assert own.loop.run(_pid(), DEADLINE_S) == os.getpid()
            for _ in range(2):
                node.release(1)
                node.close(1)
            assert node in Node._shared.values()
            own.release(10)
            assert read(mine, key) == entry(key)
            sys.exit()
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert index.try_claim("make") is None
    index.release(making)
    assert read(held, key) == entry(key)
    assert node.tier.claims.is_taken(key_at(1).digest)
    theirs.send(b"here")
    assert node.loop.run(reader.read(4), DEADLINE_S) == b"here"
    assert node.users == 1
    node.release(10)
    say("done")


async def _connect(sock: socket.socket) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection(sock=sock)


async def _pid() -> int:
    return os.getpid()


@contextmanager
def _all_locked(*things: object) -> Iterator[None]:
    """Have another thread hold every lock in them."""
    kinds = (type(threading.Lock()), type(threading.RLock()))
    inside = (*(dict, list, tuple, set, deque, MethodType), threading.Condition, threading.Event)
    found: dict[int, Any] = {}
    seen: set[int] = set()
    left: list[object] = [*things]
    while left:
        one = left.pop()
        if id(one) in seen or isinstance(one, type):
            continue
        seen.add(id(one))
        if isinstance(one, kinds):
            found[id(one)] = one
        elif isinstance(one, inside) or type(one).__module__.startswith("s3ec."):
            left += gc.get_referents(one)
    assert len(found) > 15
    held, over = threading.Event(), threading.Event()

    def hold() -> None:
        with ExitStack() as stack:
            for lock in found.values():
                stack.enter_context(lock)
            held.set()
            over.wait()

    holder = threading.Thread(target=hold, daemon=True)
    holder.start()
    assert held.wait(DEADLINE_S)
    yield
    over.set()
    holder.join()


def orphan(root: Path) -> None:
    """Hold all that can be held, fork a child that does nothing, and be killed."""
    tier = new_tier(root)
    publish(tier, 0, spool=tier.open_spool(DESTINATION))
    publish(tier, 2)
    held, claim = opened(tier, key_at(2)), tier.entries.open_or_claim(key_at(1))
    os.unlink(held.path)
    assert isinstance(claim, Claim)
    folders = Folders(root)
    temp = TempFile(str(folders.incoming))
    assert NodeFolder.of(tier.folders, NAMESPACE).try_claim("make") is not None
    with evict_lock(folders) as alone:
        assert alone
        assert try_lock(folders.open_own(folders.usage))
        if os.fork() == 0:
            say(temp.path)
            hear()
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    # Whoever holds a lock for seconds is busy, and not stopped.
    evictor.TURN_WAIT_S = evictor.TOTAL_LOCK_TIMEOUT_S = 60.0
    commands = {
        function.__name__: function
        for function in (hold, few_files, churn, flood, occupy, fork, orphan, spool, adopt)
    }
    commands[sys.argv[1]](Path(sys.argv[2]), *(int(argument) for argument in sys.argv[3:]))
