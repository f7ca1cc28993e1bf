# SPDX-License-Identifier: Apache-2.0
"""Processes of one node that save one entry at the same moment: one object, whole."""

from __future__ import annotations

import os
import signal

import pytest

from tests.faults.embeddings import body_at, key_at
from tests.faults.herd import Herd
from tests.faults.site import Site

pytest.importorskip("torch")

_WRITERS = 8


def test_eight_processes_that_save_one_entry_store_it_once_and_whole(
    site: Site, herd: Herd
) -> None:
    other = site.cache_dir / "v2" / "objects"
    other.mkdir(parents=True, mode=0o700)
    site.cache_dir.chmod(0o700)
    (other / "of-a-later-version").write_bytes(b"x" * 1000)
    pids = [
        herd.start("one", settings=site.settings(max_concurrency="2"), number=0)
        for _ in range(_WRITERS)
    ]
    for pid in pids:
        herd.hear(pid, "up")
    for pid in pids:
        os.kill(pid, signal.SIGUSR1)
    ends = [herd.hear(pid, "end").split()[1:] for pid in pids]
    assert herd.complaints() == []
    assert sum(int(stored) for stored, _, _ in ends) == 1
    assert sum(int(existed) for _, existed, _ in ends) == _WRITERS - 1
    assert {left for _, _, left in ends} == {"0"}
    name = key_at(0).name
    assert site.created.names == {name: 1}
    assert site.body(name) == body_at(0)
    assert site.entries() == {name}
    assert site.spooled() == set()
    assert site.tier_complaints() == []
    assert (other / "of-a-later-version").read_bytes() == b"x" * 1000
