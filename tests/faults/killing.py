# SPDX-License-Identifier: Apache-2.0
"""One life of a process on the tier, ended by SIGKILL before each change it makes on the disk.

Run as a program: forks a child for each point, in a folder of its own that a killed process left,
looks at what is left, and has a successor finish it. It imports neither torch nor an SDK and has
no thread, so a point takes milliseconds. Prints one line of JSON.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from s3ec import codec
from s3ec.index.local import NodeFolder
from s3ec.index.names import NEVER, SnapshotName
from s3ec.tier import evictor
from s3ec.tier.files import touch
from s3ec.tier.spool import Spool
from s3ec.tier.tier import Tier
from tests.support.on_disk import Asleep, audit_of, evict, make_room
from tests.unit.tier.cases import DESTINATION, NAMESPACE, entry, key_at, new_tier, read

# What changes a folder or a file; `open` only where it may make one.
CALLS = (
    *("open", "writev", "pwrite", "link", "unlink", "replace", "mkdir"),
    *("rmdir", "utime", "chmod", "fchmod"),
)
# What the first eviction of a process sweeps.
_SWEPT = "was left by a writer that died"
_LARGE_ROWS = 1200  # 75 KB: two parts
ENTRIES = {number: entry(key_at(number)) for number in range(20)}
ENTRIES[9] = entry(key_at(9), rows=_LARGE_ROWS)
SAVED = (1, 2, 3, 4)


class Killer:
    """Wraps the calls, and ends this process before the nth; a write also in its middle."""

    def __init__(self, nth: int) -> None:
        self.left = nth
        self.calls = {name: getattr(os, name) for name in CALLS}

    def arm(self) -> None:
        for name in CALLS:
            setattr(os, name, partial(self.call, name))

    def call(self, name: str, *args: object, **options: object) -> object:
        if name == "open" and not int(str(args[1])) & os.O_CREAT:
            return self.calls[name](*args, **options)
        self.tick(name)
        if name in ("writev", "pwrite"):
            self.tick(f"half a {name}", lambda: self.write_half(name, args))
        return self.calls[name](*args, **options)

    def tick(self, what: str, last: Callable[[], object] = lambda: None) -> None:
        self.left -= 1
        if self.left == 0:
            last()
            sys.stderr.write(what)
            sys.stderr.flush()
            os.kill(os.getpid(), signal.SIGKILL)

    def write_half(self, name: str, args: tuple[object, ...]) -> None:
        given = args[1]
        data = bytes(given) if isinstance(given, bytes) else b"".join(given)  # type: ignore[arg-type]
        half = data[: len(data) // 2]
        if name == "writev":
            self.calls[name](args[0], [half])
        else:
            self.calls[name](args[0], half, args[2])


def save(tier: Tier, spool: Spool, *numbers: int) -> None:
    for number in numbers:
        tier.writer.publish(key_at(number), [ENTRIES[number]], spool=spool)


def confirm(bucket: Path, spool: Spool, digest: bytes) -> None:
    """As an upload does: read and verify, store, and only then let go."""
    spooled, loaded = spool.held(digest), spool.load(digest)
    if spooled is None or loaded is None:
        return
    name = bucket / loaded.key.digest.hex()
    name.with_suffix(".part").write_bytes(loaded.blob)
    name.with_suffix(".part").rename(name)
    spool.remove(spooled)


def predecessor(root: Path) -> None:
    """Leaves a spool with two entries, and a file in the making."""
    tier = new_tier(root)
    spool = tier.open_spool(DESTINATION)
    save(tier, spool, 1, 2)
    begin(tier)
    os.kill(os.getpid(), signal.SIGKILL)


def begin(tier: Tier) -> Callable[[], None]:
    """A large entry that comes in parts; answers what finishes it."""
    blob, key = ENTRIES[9], key_at(9)
    first, rest = blob[: 1 << 16], blob[1 << 16 :]
    verifier = codec.Verifier(first, namespace=NAMESPACE, identifier=key.identifier)
    incoming = tier.writer.begin(key, first, verifier)

    def finish() -> None:
        incoming.put([(len(first), rest)])
        incoming.commit()

    return finish


def live(root: Path, bucket: Path) -> None:
    """Everything that a process changes on the disk, once."""
    tier = new_tier(root, budget_bytes=1 << 20)
    spool = tier.open_spool(DESTINATION)
    for one in spool.adopt():
        confirm(bucket, spool, one.digest)
    save(tier, spool, 3, 4)
    confirm(bucket, spool, key_at(3).digest)
    for number in (5, 6, 7):  # of a LoRA folder, a client's name and a plain one
        blob = ENTRIES[number]
        header = codec.verify(blob, namespace=NAMESPACE, identifier=key_at(number).identifier)
        tier.writer.receive(key_at(number), [blob], header)
    begin(tier)()
    held = tier.entries.open(key_at(5))
    expect("open", held is not None, 5)
    if held is not None:
        touch(held.fd)  # as its load does
    tier.writer.publish(key_at(5), [ENTRIES[5]])  # replaces what is open
    tier.entries.drop_bad(key_at(6), "checksum")
    evict(tier, key_at(7))
    files = NodeFolder.of(tier.folders, NAMESPACE, need_room=tier.need_room)
    for snapshot in (SnapshotName(NEVER, NEVER), SnapshotName(NEVER, f"{1:026}")):
        files.write(f"{snapshot}.rows", [bytes(100)])
    make_room(tier, 1 << 20, budget_bytes=1 << 20)
    files.remove_older(snapshot)
    if held is not None:
        expect("open", read(held, key_at(5)) == ENTRIES[5], "evicted")
    tier.close()


def succeed(root: Path, bucket: Path) -> None:
    """The next process: sweeps, takes over, finishes, and can do all that the dead one could."""
    tier = new_tier(root)
    spool = tier.open_spool(DESTINATION)
    for one in spool.adopt():
        confirm(bucket, spool, one.digest)
    make_room(tier)
    expect("swept", audit_of(tier) == [], audit_of(tier))
    for number in (5, 6, 9):
        tier.writer.publish(key_at(number), [ENTRIES[number]])
        held = tier.entries.open(key_at(number))
        expect("opened again", held is not None, number)
        if held is not None:
            expect("bytes", read(held, key_at(number)) == ENTRIES[number], number)
    tier.close()
    expect("spool is empty", os.listdir(root / "v1" / "spool") == [], "")
    expect("no temp", os.listdir(root / "v1" / "incoming") == [], "")


def expect(what: str, holds: bool, detail: object) -> None:
    if not holds:
        raise AssertionError(f"{what}: {detail}")


def in_child(work: Callable[[], None]) -> tuple[int, str]:
    """How it ended, and what it wrote to stderr."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.dup2(writer, 2)
        status = 1
        try:
            work()
            status = 0
        except BaseException as exc:  # noqa: BLE001 - the top of a process
            sys.stderr.write(repr(exc))
            sys.stderr.flush()
        finally:
            os._exit(status)
    os.close(writer)
    with open(reader, encoding="utf-8") as said:
        words = said.read()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), words


def spooled(root: Path) -> set[str]:
    names = (name for _, _, files in os.walk(root / "v1" / "spool") for name in files)
    return {name.rpartition("--")[2].removesuffix(".safetensors") for name in names if "--" in name}


def check_left(root: Path, bucket: Path) -> set[str]:
    """What must hold right after the kill; answers the digests that wait in the spool."""
    tier = new_tier(root)
    complaints = [line for line in audit_of(tier) if not line.endswith(_SWEPT)]
    expect("audit", complaints == [], complaints)
    objects = root / "v1" / "objects" / NAMESPACE
    shown = {number for number in ENTRIES if (objects / key_at(number).name).exists()}
    for number in shown:
        blob = (objects / key_at(number).name).read_bytes()
        expect("whole", blob == ENTRIES[number], number)
    waiting, stored = spooled(root), {path.name for path in bucket.iterdir()}
    for number in shown.intersection(SAVED):
        digest = key_at(number).digest.hex()
        expect("in the bucket or on its way there", digest in waiting | stored, number)
    return waiting


def kill_at(nth: int, folder: Path) -> tuple[str, int]:
    """One point; what was about to be called, and how many entries waited in the spool."""
    folder.mkdir()
    root, bucket = folder / "cache", folder / "bucket"
    bucket.mkdir()
    status, _ = in_child(lambda: predecessor(root))
    expect("predecessor", status == -signal.SIGKILL, status)

    def be_killed() -> None:
        Killer(nth).arm()
        live(root, bucket)

    status, words = in_child(be_killed)
    expect("ended", status in (0, -signal.SIGKILL), words)
    waiting = check_left(root, bucket)
    successor = in_child(lambda: succeed(root, bucket))
    expect(f"successor after {words} ({nth})", successor[0] == 0, successor)
    stored = {path.name: path.read_bytes() for path in bucket.iterdir() if not path.suffix}
    by_digest = {key_at(number).digest.hex(): number for number in ENTRIES}
    for digest, blob in stored.items():
        expect("stored", blob == ENTRIES[by_digest[digest]], digest)
    expect("nothing lost", waiting <= set(stored), waiting)
    expect("of the dead", {key_at(n).digest.hex() for n in (1, 2)} <= set(stored), stored.keys())
    shutil.rmtree(folder)
    return ("" if status == 0 else words), len(waiting)


def main(arguments: Sequence[str]) -> None:
    evictor.Background = Asleep  # type: ignore[misc] # calls in one order
    logging.disable()  # what a child writes is the call that it did not make
    killed: Counter[str] = Counter()
    most_waiting = nth = 0
    while True:
        nth += 1
        call, waiting = kill_at(nth, Path(arguments[0], str(nth)))
        if not call:
            break
        killed[call] += 1
        most_waiting = max(most_waiting, waiting)
    print(json.dumps({"killed": killed, "most_waiting": most_waiting}))  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1:])
