# SPDX-License-Identifier: Apache-2.0
"""A worker in another process reads the very file that was granted, wherever its name has gone."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from s3ec.connector.messages import Load
from s3ec.tier import OpenEntry, Tier
from tests.support.on_disk import evict
from tests.unit.tier.cases import entry, file_of, key_at, opened

_READ = """
import pickle, sys, torch
from s3ec.connector.loads import read_data
load = pickle.loads(sys.stdin.buffer.read())
memory = torch.empty(load.shape.nbytes, dtype=torch.uint8)
read_data(load, memory)
sys.stdout.buffer.write(memory.numpy().tobytes())
"""


def read_elsewhere(load: Load) -> bytes | str:
    """The values as another process reads them, or the last line of what it complains about."""
    done = subprocess.run(
        [sys.executable, "-c", _READ],
        input=pickle.dumps(load),
        capture_output=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        timeout=120,
        check=False,
    )
    return done.stdout if done.returncode == 0 else done.stderr.decode().splitlines()[-1]


@pytest.fixture
def held(tier: Tier) -> OpenEntry:
    tier.writer.publish(key_at(0), [entry(key_at(0))])
    return opened(tier, key_at(0))


def values(held: OpenEntry) -> bytes:
    return os.pread(held.fd, held.nbytes, held.header.data_start)


def test_by_its_name(held: OpenEntry) -> None:
    assert read_elsewhere(Load.of("a", held)) == values(held)


def test_after_its_eviction(tier: Tier, held: OpenEntry, root: Path) -> None:
    evict(tier, key_at(0))
    assert not file_of(root, key_at(0)).exists()
    assert read_elsewhere(Load.of("a", held)) == values(held)


def test_after_another_one_took_its_name(tier: Tier, held: OpenEntry) -> None:
    before = values(held)
    tier.writer.publish(key_at(0), [entry(key_at(0), seed=1)])
    assert values(opened(tier, key_at(0))) != before
    assert read_elsewhere(Load.of("a", held)) == before


def test_what_nobody_has_open_any_more_is_out_of_reach_and_no_damage(tier: Tier) -> None:
    tier.writer.publish(key_at(0), [entry(key_at(0))])
    load = Load.of("a", opened(tier, key_at(0)))  # which nobody refers to after this
    tier.writer.publish(key_at(0), [entry(key_at(0), seed=1)])
    assert "evicted and is out of reach" in str(read_elsewhere(load))
    assert tier.entries.contains(key_at(0))
