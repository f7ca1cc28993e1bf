# SPDX-License-Identifier: Apache-2.0
"""What the tests of the tier share: small entries, a clock, and child processes."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn
from unittest.mock import patch

from s3ec import codec
from s3ec.codec import Header, Shape
from s3ec.counters import Counters
from s3ec.identity import Key, make_key
from s3ec.index.local import NodeFolder
from s3ec.tier import files
from s3ec.tier.open_entry import OpenEntry
from s3ec.tier.spool import Spool
from s3ec.tier.tier import Tier
from tests.support.clock import Clock
from tests.support.finite import FINITE

MakeTier = Callable[..., Tier]
"""The fixture ``make_tier``."""
NAMESPACE = "tiny-gemma3-0123456789abcdef"
OTHER_NAMESPACE = "tiny-gemma3-fedcba9876543210"
DESTINATION = "0123456789abcdef"
HOUR_S = 3600.0
_DEADLINE_S = 300.0  # only a process that hangs takes so long, however busy the machine is
_REPOSITORY = Path(__file__).parents[3]


def key_of(identifier: str) -> Key:
    key = make_key(identifier)
    assert key is not None
    return key


def key_at(number: int) -> Key:
    """Content hashes, LoRA ones and strings of clients in turn."""
    digest = hashlib.sha256(str(number).encode()).hexdigest()
    return key_of((digest, f"adapter:{digest}", f"client {number}")[number % 3])


def entry(
    key: Key, *, rows: int = 4, seed: int = 0, namespace: str = NAMESPACE, width: int = 32
) -> bytes:
    """A good entry; its tensor depends on the key and the seed. 512 to 1024 bytes by default."""
    shape = Shape(rows, width, "bfloat16")
    start = hashlib.sha256(f"{key.identifier}/{seed}".encode()).digest().translate(FINITE)
    data = (start * (shape.nbytes // len(start) + 1))[: shape.nbytes]
    header = Header(
        identifier=key.identifier,
        namespace=namespace,
        modality="image",
        shape=shape,
        checksum=codec.checksum(data),
    )
    return codec.encode_header(header) + data


SIZE = len(entry(key_of("0" * 64)))
"""Of the entry of every content hash."""


def index_of(tier: Tier, namespace: str = NAMESPACE) -> NodeFolder:
    """This node's files of a namespace's index."""
    return NodeFolder.of(tier.folders, namespace, need_room=tier.need_room)


def read(held: OpenEntry, key: Key) -> bytes:
    """The bytes of an open entry, checked as a worker would."""
    blob = os.pread(held.fd, held.nbytes + 1, 0)
    header = codec.verify(blob, namespace=NAMESPACE, identifier=key.identifier)
    assert (header, len(blob)) == (held.header, held.nbytes)
    return blob


def file_of(tier_root: Path, key: Key, namespace: str = NAMESPACE) -> Path:
    return tier_root / "v1" / "objects" / namespace / key.name


def files_below(folder: Path) -> set[str]:
    """Names of all files at any depth."""
    return {path.name for path in folder.rglob("*") if not path.is_dir()}


def temps_below(folder: Path) -> set[str]:
    return {name for name in files_below(folder) if name.startswith(".tmp-")}


def spool_files(root: Path) -> list[Path]:
    """The files in the spool but for the locks."""
    folder = root / "v1" / "spool"
    return sorted(path for path in folder.glob("*") if path.suffix != ".lock")


def locks_below(root: Path) -> list[Path]:
    return sorted((root / "v1" / "spool").glob("*.lock"))


def spooled_below(root: Path) -> list[str]:
    """Digests of the spooled files."""
    return sorted(path.stem.rpartition("--")[2] for path in spool_files(root))


def digests_of(*numbers: int) -> list[str]:
    """As ``spooled_below`` tells them."""
    return sorted(key_at(number).digest.hex() for number in numbers)


def publish(tier: Tier, *numbers: int, spool: Spool | None = None) -> None:
    for number in numbers:
        tier.writer.publish(key_at(number), [entry(key_at(number))], spool=spool)


def unspool(spool: Spool, key: Key) -> None:
    """What an upload does in the end, for whichever save of the entry is held."""
    held = spool.held(key.digest)
    if held is not None:
        spool.remove(held)


def present(tier: Tier, *numbers: int) -> set[int]:
    """Which of these are here."""
    return {number for number in numbers if tier.entries.contains(key_at(number))}


def even(number: int) -> Key:
    """Keys of entries that all have SIZE."""
    return key_of(f"{number:064x}")


def fill(tier: Tier, *numbers: int) -> None:
    for number in numbers:
        tier.writer.publish(even(number), [entry(even(number))])


def left(tier: Tier, count: int) -> set[int]:
    """Which of the first ``count`` are still here."""
    return {number for number in range(count) if tier.entries.contains(even(number))}


def opened(tier: Tier, key: Key) -> OpenEntry:
    """What must be here, open."""
    held = tier.entries.open(key)
    assert held is not None
    return held


def touch(held: OpenEntry, clock: Callable[[], float]) -> None:
    """Note that an open entry is used, as a load does, at the time of a clock."""
    with patch.object(files, "time", SimpleNamespace(time=clock)):
        files.touch(held.fd)


def use(tier: Tier, key: Key, clock: Callable[[], float]) -> None:
    """As ``touch``, for what must be here."""
    touch(opened(tier, key), clock)


def served(tier: Tier, key: Key) -> bytes:
    """What a worker would get."""
    return read(opened(tier, key), key)


def spooled(spool: Spool, key: Key) -> bytes:
    """What would be uploaded."""
    loaded = spool.load(key.digest)
    assert loaded is not None
    assert loaded.key == key
    return loaded.blob


def refusing(error: int, text: str) -> Callable[..., NoReturn]:
    """A call of the system that a disk refuses."""

    def refuse(*arguments: object, **options: object) -> NoReturn:
        raise OSError(error, text)

    return refuse


def disk_clock() -> Clock:
    """Starts now, since the kernel stamps files; each look moves it, so uses have an order."""
    return Clock(float(int(time.time())), tick_s=0.001)


def new_tier(
    root: Path,
    *,
    budget_bytes: int = 1 << 30,
    min_free_bytes: int = 0,
    clock: Callable[[], float] = time.time,
) -> Tier:
    """For child processes and threads; tests take the fixture ``make_tier``."""
    return Tier(
        root,
        NAMESPACE,
        budget_bytes=budget_bytes,
        min_free_bytes=min_free_bytes,
        counters=Counters(),
        clock=clock,
    )


class Child:
    """A process that runs one command of child.py; talks in lines."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    def hear(self) -> str:
        """The next line; empty when it has ended."""
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def say(self, line: str = "go") -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone, not even a zombie."""
        self._process.kill()
        self._process.wait()

    def end(self) -> None:
        """Wait for its own end, which must be a good one."""
        assert self._process.wait(_DEADLINE_S) == 0


@contextmanager
def child(command: str, *arguments: object) -> Iterator[Child]:
    """Start one; whatever happens it is gone afterwards."""
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("child.py")), command]
        + [str(argument) for argument in arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(_REPOSITORY)},
    )
    # A child that hangs would hang its test in readline.
    deadline = threading.Timer(_DEADLINE_S, process.kill)
    deadline.start()
    try:
        yield Child(process)
    finally:
        deadline.cancel()
        process.kill()
        with process:
            pass
        deadline.join()
