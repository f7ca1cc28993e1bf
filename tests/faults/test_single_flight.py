# SPDX-License-Identifier: Apache-2.0
"""Processes that want the same entries at once: one fetches each, whatever becomes of it."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator

import pytest

from s3ec.dev.rigs.proxy import Exchange, Rule
from s3ec.dev.rigs.proxy_faults import s3_error
from s3ec.testing.fault_store import Gate
from tests.faults.embeddings import key_at
from tests.faults.herd import Herd
from tests.faults.site import OBJECTS, Site
from tests.support.waiting import DEADLINE_S, stop

pytest.importorskip("torch")

# Longer than a test may take: whoever goes on before it was told to, not out of patience.
_ENDLESS_S = 600.0


class HeldBack:
    """The upstream's reply, when the gate opens."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    async def apply(self, exchange: Exchange) -> None:
        reply = await exchange.forward()
        await self._gate.wait()
        await exchange.send(reply)


class RefusedLater(HeldBack):
    """An answer that is not asked for again, when the gate opens."""

    async def apply(self, exchange: Exchange) -> None:
        await self._gate.wait()
        await s3_error(403, "AccessDenied").apply(exchange)


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.release()


def stock(site: Site, count: int) -> list[int]:
    site.stock(*range(count))
    return list(range(count))


def hold_back(site: Site, gate: Gate, times: int | None = None) -> None:
    site.proxy.add(Rule(HeldBack(gate), method="GET", target=OBJECTS, times=times))


def start(herd: Herd, site: Site, numbers: list[int], *, patience_s: float = _ENDLESS_S) -> int:
    # Requests are counted: none is sent twice for being slow.
    settings = site.settings(hedge="false")
    return herd.start("want", settings=settings, numbers=numbers, patience_s=patience_s)


def test_entries_that_four_processes_want_at_once_are_fetched_once_each(
    site: Site, herd: Herd, gate: Gate
) -> None:
    numbers = stock(site, 40)
    hold_back(site, gate)
    pids = [start(herd, site, numbers) for _ in range(4)]
    for pid in pids:
        herd.hear(pid, "asked")
    gate.release()
    for pid in pids:
        herd.hear(pid, "done")
    assert herd.complaints() == []
    assert Counter(site.gets()) == Counter(key_at(number).name for number in numbers)
    from_bucket = [words for _, words in herd.said if words.endswith(" bucket")]
    assert len(from_bucket) == len(numbers)
    assert site.tier_complaints() == []


def test_fetch_of_a_killed_process_is_taken_over_at_once_by_one_other(
    site: Site, herd: Herd, gate: Gate
) -> None:
    (number,) = stock(site, 1)
    hold_back(site, gate, times=1)
    killed = start(herd, site, [number])
    assert gate.reached.wait(DEADLINE_S)
    others = [start(herd, site, [number]) for _ in range(3)]
    for pid in others:
        herd.hear(pid, "asked")
    assert len(site.gets()) == 1  # they wait
    herd.kill(killed)
    for pid in others:
        herd.hear(pid, "done")
    assert herd.complaints() == []
    assert len(site.gets()) == 2
    sources = Counter(words for _, words in herd.said if words.startswith("got"))
    assert sources == {f"got {number} bucket": 1, f"got {number} tier": 2}
    assert site.tier_complaints() == []


def test_stopped_process_holds_up_the_others_for_their_patience_and_no_longer(
    site: Site, herd: Herd, gate: Gate
) -> None:
    (number,) = stock(site, 1)
    hold_back(site, gate, times=1)
    stopped = start(herd, site, [number])
    assert gate.reached.wait(DEADLINE_S)
    stop(stopped)
    other = start(herd, site, [number], patience_s=0.1)
    herd.hear(other, "done")  # it went on without the claim
    assert len(site.gets()) == 2
    gate.release()
    os.kill(stopped, signal.SIGCONT)
    herd.hear(stopped, "done")
    assert herd.complaints() == []
    assert site.tier_complaints() == []


def test_fetch_that_fails_is_tried_by_the_next_that_waits(
    site: Site, herd: Herd, gate: Gate
) -> None:
    (number,) = stock(site, 1)
    # Twice, since botocore is asked for the server's words.
    site.proxy.add(Rule(RefusedLater(gate), method="GET", target=OBJECTS, times=2))
    failing = start(herd, site, [number])
    assert gate.reached.wait(DEADLINE_S)
    other = start(herd, site, [number])
    herd.hear(other, "asked")
    gate.release()
    assert herd.hear(failing, "got") == f"got {number} absent"  # for who is denied
    assert herd.hear(other, "got") == f"got {number} bucket"
    assert herd.complaints() == []
