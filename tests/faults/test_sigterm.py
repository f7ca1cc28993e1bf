# SPDX-License-Identifier: Apache-2.0
"""Engines told to end while the store is dead or slow: what it did not take waits in the spool."""

from __future__ import annotations

import os
import signal
from collections import Counter

import pytest

from s3ec.dev.rigs.proxy import Rule
from s3ec.dev.rigs.proxy_faults import s3_error
from tests.faults.embeddings import key_at
from tests.faults.herd import Herd
from tests.faults.site import OBJECTS, Site
from tests.support.waiting import eventually

pytest.importorskip("torch")

_COUNT = 6
_LINES = 15


@pytest.mark.parametrize(
    ("how", "stored"),
    [("raises", 2), ("ends", 0)],
    ids=["slow-raises", "dead-ends"],
)
def test_sigterm_leaves_what_the_store_did_not_take_to_the_next_process(
    site: Site, herd: Herd, how: str, stored: int
) -> None:
    fault = Rule(s3_error(503, "SlowDown"), method="PUT", target=OBJECTS)
    if stored:  # the rest hangs
        site.stall(after=stored)
    else:
        site.proxy.add(fault)
    pid = herd.start("terminated", settings=site.settings(), count=_COUNT, how=how, timeout_s=3)
    herd.hear(pid, "saved")
    eventually(lambda: len(site.objects()) == stored)
    eventually(lambda: stored > 0 or fault.fired > 0)
    os.kill(pid, signal.SIGTERM)
    left = int(herd.hear(pid, "left").split()[1])
    herd.wait(pid)
    # What is stored and not announced yet waits, too.
    assert _COUNT - stored <= left <= _COUNT
    assert herd.hear(pid, "counted") == f"counted {left}"
    assert herd.complaints() == []
    logged = [words for _, words in herd.said if words.startswith("log")]
    assert any(f"not confirmed {_COUNT - stored} embeddings" in line for line in logged)
    assert not any("lost" in line for line in logged)
    assert len(site.spooled()) >= _COUNT - stored

    site.let_through()
    finisher = herd.start("finish", settings=site.settings())
    assert herd.hear(finisher, "left") == "left 0"
    assert herd.complaints() == []
    names = {key_at(number).name for number in range(_COUNT)}
    assert site.objects() == names
    assert site.created.names == Counter(names)
    assert site.spooled() == set()
    assert site.tier_complaints() == []


def test_shutdown_from_a_signal_handler_ends_wherever_the_thread_was(
    site: Site, herd: Herd
) -> None:
    """At each few lines that it runs in a save and in an end, and where it waits for room."""
    site.stall(after=0)
    pid = herd.start("interrupted", settings=site.settings(), every=_LINES)
    places = [int(herd.hear(pid, f"at {what}").split()[-1]) for what in ("save", "use", "drain")]
    assert min(places) >= 3, places
    herd.hear(pid, "done")
    herd.wait(pid)
    assert herd.complaints() == []
    assert (pid, "taken False") in herd.said
    assert len(site.spooled()) >= 1

    site.let_through()
    finisher = herd.start("finish", settings=site.settings())
    assert herd.hear(finisher, "left") == "left 0"
    assert key_at(0).name in site.objects()
    assert site.created.names.total() == len(site.objects())
