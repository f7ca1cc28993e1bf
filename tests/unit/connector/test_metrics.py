# SPDX-License-Identifier: Apache-2.0
"""What an engine tells about itself: the line in the log, and all ranks' gauges."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from s3ec.config import load_settings
from s3ec.connector import metrics
from s3ec.connector.metrics import EngineMetrics, line_of
from s3ec.identity import Namespace
from s3ec.node import Node
from s3ec.testing.memory_store import MemoryStore
from tests.support.logs import ours
from tests.support.waiting import eventually

NAMESPACE = Namespace.from_descriptor({"model": "m"})


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    given = {"bucket": "corpus", "cache_dir": str(tmp_path), "min_free_bytes": 0}
    one = Node(load_settings(given).settings, NAMESPACE, store=MemoryStore())
    yield one
    one.close(10)
    assert one.counters.get("internal_errors") == 0


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in ours(caplog)]


# -- the line in the log -----------------------------------------------------------------------


NOTHING = "s3ec: 0 hits (0 device, 0 node, 0 bucket), 0 encoded"
FETCHES = {"fetch_items.bucket": 4, "fetch_bytes.bucket": 1e6, "fetch_seconds.bucket": 0.044}


@pytest.mark.parametrize(
    ("counts", "line"),
    [
        (
            {"lookups.device.hit": 98, "lookups.node.hit": 20, "lookups.bucket.hit": 5,
             "hits": 25, "misses": 7},
            "s3ec: 123 hits (98 device, 20 node, 5 bucket), 7 encoded",
        ),
        (FETCHES, f"{NOTHING}, 1.0 MB fetched in 11.0 ms each"),
        (
            {"load.items": 4, "load.seconds": 0.01, "save.items": 1, "save.bytes": 2.5e6},
            f"{NOTHING}, 4 loads in 2.50 ms each, 1 saved (2.5 MB)",
        ),
        (
            {"deferred_requests": 3, "deferred_seconds": 0.125, "save_problem.dropped": 6},
            f"{NOTHING}, 3 requests waited, 0.12 s in all, 6 problems with saves",
        ),
        # Why there were no hits, and nothing of what the bucket does not have.
        (
            {**FETCHES, "encode.seconds": 0.064, "misses": 8, "encoded.declined": 6,
             "encoded.late": 2},
            "s3ec: 0 hits (0 device, 0 node, 0 bucket), 8 encoded, 1.0 MB fetched in 11.0 ms each; "
            "8 pictures are in the bucket and were encoded: a fetch takes 11 ms, an encode 8.0 ms; "
            "wait: auto",
        ),
        (
            {"hits": 0, "encoded.late": 1},
            f"{NOTHING}; 1 picture is in the bucket and was encoded: wait: auto",
        ),
        (
            {"hits": 0, "encoded.down": 3},
            f"{NOTHING}; 3 pictures were encoded while the bucket or the disk was not asked",
        ),
        (
            {"hits": 0, "encoded.failed": 2, "encoded.unfit": 1},
            f"{NOTHING}; 3 pictures are in the bucket and were encoded, since they could not be "
            "used",
        ),
        ({"hits": 0, "encoded.absent": 7, "encoded.unshared": 1}, NOTHING),
    ],
)  # fmt: skip
def test_the_line_says_what_was_found_moved_and_encoded_and_why(
    counts: dict[str, float], line: str
) -> None:
    assert line_of(counts) == line


def test_the_line_comes_again_and_again_and_tells_each_thing_once(
    node: Node, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(metrics, "LINE_EVERY_S", 0.001)
    with caplog.at_level(logging.INFO):
        EngineMetrics(node).start()
        for number in (1, 2):
            node.counters.add("misses", number)
            said = f"s3ec: 0 hits (0 device, 0 node, 0 bucket), {number} encoded"
            eventually(lambda said=said: messages(caplog).count(said) == 1)  # type: ignore[misc]


def test_the_end_says_what_was_not_said_yet(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    one = EngineMetrics(node)
    one.start()
    node.counters.add("misses", 3)
    with caplog.at_level(logging.INFO):
        one.close()
        one.close()
    assert messages(caplog) == ["s3ec: 0 hits (0 device, 0 node, 0 bucket), 3 encoded"]


# -- gauges of all ranks -----------------------------------------------------------------------


def test_gauges_of_ranks_are_added_up_or_compared_and_those_of_the_node_are_told_once(
    node: Node,
) -> None:
    told = EngineMetrics(node)
    node.levels = {"level.tier_bytes": 1000, "level.breaker_open": 0.0}
    rank = {"level.spool_entries": 2, "level.spool_oldest_seconds": 5, "level.breaker_open": 0.0}
    told.on_report({0: rank})
    told.on_report({1: {**rank, "level.spool_oldest_seconds": 9, "level.breaker_open": 1.0}})
    assert told.levels() == {
        "level.tier_bytes": 1000,
        "level.breaker_open": 1.0,
        "level.spool_entries": 4,
        "level.spool_oldest_seconds": 9,
    }
    told.on_report({1: {"level.spool_entries": 0}})
    assert told.levels()["level.spool_entries"] == 2


def test_a_node_that_follows_the_bucket_keeps_all_its_gauges(node: Node) -> None:
    node.follow_the_bucket()
    own = metrics.GAUGES.keys()
    of_saves = {name for name in own if "spool" in name or "queue" in name}
    eventually(lambda: node.levels.keys() == own - of_saves, f"{own - node.levels.keys()}")
    assert node.levels["level.tier_budget_bytes"] == node.settings.cache_bytes
