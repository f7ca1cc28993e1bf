# SPDX-License-Identifier: Apache-2.0
"""A process that forks with its node at work: the child takes nothing along and breaks nothing."""

from __future__ import annotations

import pytest

from tests.faults.embeddings import key_at
from tests.faults.herd import Herd
from tests.faults.site import Site
from tests.support.waiting import eventually

pytest.importorskip("torch")

_STOCK = 8
_FIRST = 100


def test_forked_child_uploads_nothing_twice_and_its_parent_goes_on(site: Site, herd: Herd) -> None:
    site.stock(*range(_STOCK))
    site.stall(after=1)  # uploads are under way when the child is made
    parent = herd.start("fork", settings=site.settings(), stock=_STOCK, first=_FIRST)
    herd.hear(parent, "went on")
    assert herd.complaints() == []
    said = dict(herd.said)
    (child,) = said.keys() - {parent} - {herd.parent}
    assert herd.hear(child, "left") == "left 0"
    herd.hear(child, "child done")
    site.let_through()
    assert herd.hear(parent, "left") == "left 0"
    herd.hear(parent, "done")
    assert herd.complaints() == []
    assert site.created.names == {key_at(n).name: 1 for n in range(_FIRST, _FIRST + 6)}
    eventually(lambda: not site.spooled())
    assert site.tier_complaints() == []
