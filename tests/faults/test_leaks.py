# SPDX-License-Identifier: Apache-2.0
"""Many who want one entry at once, and fetches that end early: nothing is left behind."""

from __future__ import annotations

from collections import Counter

import pytest

from s3ec.dev.rigs.proxy import Rule
from s3ec.dev.rigs.proxy_faults import Stall
from tests.faults.embeddings import key_at
from tests.faults.herd import Herd
from tests.faults.site import Site

pytest.importorskip("torch")

_ROUNDS = 3
_STALLED = 50


def test_fetches_that_are_shared_aborted_or_ended_with_the_loop_leave_nothing_behind(
    site: Site, herd: Herd
) -> None:
    site.stock(*range(_ROUNDS))
    silent = [_STALLED + n + more for n in range(_ROUNDS) for more in (0, 100)]
    names = "|".join(key_at(number).name for number in silent)
    rule = Rule(Stall(), method="GET", target=names)
    site.proxy.add(rule)
    pid = herd.start("leaks", settings=site.settings(), rounds=_ROUNDS, stalled=_STALLED)
    assert herd.hear(pid, "left") == "left 0"
    herd.wait(pid)
    assert herd.complaints() == []
    assert rule.fired >= _ROUNDS
    assert herd.hear(pid, "unavailable") == f"unavailable {_ROUNDS}"
    asked = Counter(site.gets())
    for number in range(_ROUNDS):
        assert asked[key_at(number).name] == 1
    assert site.tier_complaints() == []
