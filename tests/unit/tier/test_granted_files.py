# SPDX-License-Identifier: Apache-2.0
"""A worker in another process reads the very file that was granted, wherever its name has gone."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from s3ec import codec
from s3ec.connector.messages import Load
from s3ec.tier.open_entry import OpenEntry
from s3ec.tier.tier import Tier
from tests.support.on_disk import evict
from tests.unit.tier.cases import entry, file_of, key_at, opened

_READ = """
import pickle, sys, torch
from s3ec.connector.loads import read_data

def read(load):
    memory = torch.empty(load.shape.nbytes, dtype=torch.uint8)
    try:
        read_data(load, memory)
    except Exception as exc:
        return str(exc)
    return memory.numpy().tobytes()

sys.stdout.buffer.write(pickle.dumps([read(load) for load in pickle.load(sys.stdin.buffer)]))
"""


def read_elsewhere(*loads: Load) -> list[bytes | str]:
    """The values as another process reads them, or what it complains about."""
    done = subprocess.run(
        [sys.executable, "-c", _READ],
        input=pickle.dumps(loads),
        capture_output=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        timeout=300,
        check=True,
    )
    found: list[bytes | str] = pickle.loads(done.stdout)
    return found


def held_at(tier: Tier, number: int) -> OpenEntry:
    tier.writer.publish(key_at(number), [entry(key_at(number))])
    return opened(tier, key_at(number))


def values(held: OpenEntry) -> bytes:
    return os.pread(held.fd, held.nbytes, held.header.data_start)


def test_what_is_held_open_is_read_whatever_became_of_its_name(tier: Tier, root: Path) -> None:
    in_place, evicted, replaced = (held_at(tier, number) for number in range(3))
    gone = Load.of("3", held_at(tier, 3))  # which nobody refers to after this
    expected = [values(held) for held in (in_place, evicted, replaced)]
    evict(tier, key_at(1))
    assert not file_of(root, key_at(1)).exists()
    for number in (2, 3):
        tier.writer.publish(key_at(number), [entry(key_at(number), seed=1)])
    assert values(opened(tier, key_at(2))) != expected[2]
    loads = [Load.of(f"{n}", held) for n, held in enumerate((in_place, evicted, replaced))]
    *found, complaint = read_elsewhere(*loads, gone)
    assert found == expected
    assert "evicted and is out of reach" in str(complaint)
    assert tier.entries.contains(key_at(3))  # it is no damage


def test_a_load_reaches_its_worker_whatever_the_bucket_says_of_placeholders(tier: Tier) -> None:
    """JSON may be nested deeper than what pickle can follow, and that would end the engine."""
    key, nested = key_at(0), list[Any]()
    for _ in range(480):
        nested = [nested]
    plain = entry(key)
    header = codec.parse_header(plain)
    front = codec.encode_header(replace(header, placeholder={"nested": nested}))
    tier.writer.publish(key, [front + plain[header.data_start :]])
    held = opened(tier, key)
    assert read_elsewhere(Load.of("0", held)) == [values(held)]
