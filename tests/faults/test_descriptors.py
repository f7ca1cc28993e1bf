# SPDX-License-Identifier: Apache-2.0
"""A process that may open no more files and sockets: misses, until it may again."""

from __future__ import annotations

import pytest

from tests.faults.herd import Herd
from tests.faults.site import Site

pytest.importorskip("torch")

_STOCK = 48


def test_process_without_descriptors_misses_and_recovers(site: Site, herd: Herd) -> None:
    site.stock(*range(_STOCK))
    settings = site.settings(index_refresh_s="0.2")
    pid = herd.start("starved", settings=settings, stock=_STOCK)
    assert herd.hear(pid, "left") == "left 0"
    herd.wait(pid)
    assert herd.complaints() == []
    assert int(herd.hear(pid, "missed").split()[1]) > 0  # it had too few
    assert int(herd.hear(pid, "refused").split()[1]) > 0
    assert site.spooled() == set()
    assert site.tier_complaints() == []
    assert not site.lost()
