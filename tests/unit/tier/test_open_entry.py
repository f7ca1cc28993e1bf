# SPDX-License-Identifier: Apache-2.0
"""Open entries: bytes that can be read to the end, and that cost nothing after it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from s3ec import codec
from s3ec.identity import Key
from s3ec.tier.inspection import Inspection
from s3ec.tier.open_entry import OpenEntry
from s3ec.tier.tier import Tier
from tests.support.clock import Clock
from tests.support.file_calls import open_below
from tests.support.on_disk import audit_of, evict, usage_of
from tests.unit.tier.cases import (
    SIZE,
    MakeTier,
    child,
    entry,
    even,
    file_of,
    fill,
    key_at,
    opened,
    publish,
    read,
)


def open_nbytes(root: Path) -> int:
    """Bytes that were evicted and are still open, as ``s3ec tier`` has it."""
    return Inspection.open(root).report(now_s=time.time()).open_nbytes


WAYS: dict[str, Callable[[Tier], object]] = {
    "opened": lambda tier: opened(tier, key_at(0)),
    "found by a walk": lambda tier: tier.entries.open(Key("", key_at(0).name, key_at(0).digest)),
    "received": lambda tier: tier.writer.receive(
        key_at(0), [entry(key_at(0))], codec.parse_header(entry(key_at(0)))
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_the_file_is_closed_with_the_last_reference(tier: Tier, root: Path, way: str) -> None:
    publish(tier, 0)
    objects = root / "v1" / "objects"
    held = WAYS[way](tier)
    assert isinstance(held, OpenEntry)
    other = held
    evict(tier, key_at(0))
    assert open_nbytes(root) == held.nbytes
    del held
    assert len(open_below(objects)) == 1
    del other
    assert open_below(objects) == []
    assert open_nbytes(root) == 0


# The time of use


def test_publish_notes_the_time_of_use_and_a_look_does_not(
    tier: Tier, root: Path, clock: Clock
) -> None:
    key = key_at(0)
    clock.now_s += 100
    tier.writer.publish(key, [entry(key)])
    noted = file_of(root, key).stat()
    assert abs(noted.st_mtime - clock.now_s) < 1e-5
    clock.now_s += 100
    opened(tier, key)
    tier.entries.open(Key("", key.name, key.digest))
    assert file_of(root, key).stat().st_mtime_ns == noted.st_mtime_ns


# Other processes


def test_what_another_process_has_open_it_reads_after_the_eviction(
    make_tier: MakeTier, root: Path
) -> None:
    tier = make_tier()
    publish(tier, 0)
    nbytes = usage_of(tier).entry_bytes
    with child("hold", root, 0) as other:
        assert other.hear() == "open"
        evict(tier, key_at(0))
        assert open_nbytes(root) == nbytes
        publish(tier, 0, 1)
        assert audit_of(tier) == []
        other.say()
        assert other.hear() == "True"
        other.say()
        other.end()
    assert open_nbytes(root) == 0


def test_a_forked_child_holds_nothing_open_and_takes_nothing_from_its_parent(
    make_tier: MakeTier, root: Path
) -> None:
    tier = make_tier()
    fill(tier, 0)
    held = opened(tier, even(0))
    evict(tier, even(0))
    (ended, end), (told, tell) = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            if os.readlink(f"/proc/self/fd/{held.fd}") == os.devnull:
                del held
                os.write(tell, b"x")
                os.close(end)
                os.read(ended, 1)  # until the parent lets go
                status = 0
        finally:
            os._exit(status)
    os.close(tell)
    assert os.read(told, 1) == b"x"
    assert read(held, even(0)) == entry(even(0))
    assert open_nbytes(root) == SIZE
    del held
    assert open_nbytes(root) == 0  # while the child lives
    for fd in (end, ended, told):
        os.close(fd)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
