# SPDX-License-Identifier: Apache-2.0
"""An engine's figures without vLLM: `metrics_port`, the line in the log, and all ranks' gauges."""

from __future__ import annotations

import logging
import os
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from s3ec.config import load_settings
from s3ec.connector import exporter, metrics
from s3ec.connector.exporter import Exporter, line_of
from s3ec.connector.figures import Figures
from s3ec.counters import Increments
from s3ec.errors import ConfigError
from s3ec.identity import Namespace
from s3ec.node import Node
from s3ec.testing.memory_store import MemoryStore
from s3ec.testing.server import free_port
from tests.support.logs import ours
from tests.support.waiting import DEADLINE_S, eventually

parser = pytest.importorskip("prometheus_client.parser")

LABELS = {"model_name": "m", "engine": "0"}
NAMESPACE = Namespace.from_descriptor({"model": "m"})


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Exporter]]:
    """Makes exporters, each with a node of its own."""
    nodes: list[Node] = []
    made: list[Exporter] = []

    def new(**changes: Any) -> Exporter:
        given = {"bucket": "corpus", "cache_dir": str(tmp_path), "min_free_bytes": 0}
        node = Node(load_settings(given | changes).settings, NAMESPACE, store=MemoryStore())
        nodes.append(node)
        made.append(
            Exporter(
                Figures(node),
                node.settings,
                node.loop,
                node.counters,
                LABELS,
                take=Increments(node.counters).take,
            )
        )
        made[-1].node = node  # type: ignore[attr-defined]
        return made[-1]

    yield new
    for one in made:
        one.close()
    for node in nodes:
        node.close(10)
        assert node.counters.get("internal_errors") == 0


def node_of(one: Exporter) -> Node:
    node: Node = one.node  # type: ignore[attr-defined]
    return node


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in ours(caplog)]


def page(port: int) -> str | None:
    """What a port serves; None while nobody does."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=DEADLINE_S) as body:
            content: bytes = body.read()
    except OSError:
        return None
    return content.decode()


def served(port: int) -> dict[tuple[str, tuple[str, ...]], float]:
    """Samples by name and by the values of our labels, in the order of their names."""
    eventually(lambda: page(port) is not None, "the port is served")
    return {
        (
            sample.name,
            tuple(v for name, v in sorted(sample.labels.items()) if name not in LABELS),
        ): (sample.value)
        for family in parser.text_string_to_metric_families(page(port))
        for sample in family.samples
    }


def test_the_port_serves_counts_gauges_and_histograms_with_vllms_labels(
    make: Callable[..., Exporter],
) -> None:
    port = free_port()
    one = make(metrics_port=port)
    node = node_of(one)
    node.counters.add_all({"hits": 3, "lookups.node.hit": 2, "fetch_items.bucket": 4})
    node.counters.add("pace.withheld", -2)
    for seconds in (0.003, 0.2, 5000.0):
        node.counters.observe("fetch_time.bucket", seconds)
    node.counters.observe("wait_time", 0.5)
    node.levels = {"level.spool_entries": 7}
    one.start()
    found = served(port)
    assert found["vllm:s3ec_hits_total", ()] == 3
    assert found["vllm:s3ec_misses_total", ()] == 0
    assert found["vllm:s3ec_lookups_total", ("hit", "node")] == 2
    assert found["vllm:s3ec_lookups_total", ("hit", "device")] == 0
    assert found["vllm:s3ec_fetches_total", ("bucket",)] == 4
    assert found["vllm:s3ec_places_withheld", ()] == -2
    assert found["vllm:s3ec_spool_entries", ()] == 7
    name = "vllm:s3ec_fetch_time_seconds"
    assert found[f"{name}_bucket", ("0.001", "bucket")] == 0
    assert found[f"{name}_bucket", ("0.005", "bucket")] == 1
    assert found[f"{name}_bucket", ("640.0", "bucket")] == 2
    assert found[f"{name}_bucket", ("+Inf", "bucket")] == 3
    assert found[f"{name}_count", ("bucket",)] == 3
    assert found[f"{name}_sum", ("bucket",)] == pytest.approx(5000.203)
    assert found["vllm:s3ec_wait_time_seconds_count", ()] == 1
    text = page(port)
    assert text is not None
    assert 'vllm:s3ec_hits_total{engine="0",model_name="m"} 3.0' in text


def test_the_port_serves_counters_with_0_before_anything_is_counted(
    make: Callable[..., Exporter],
) -> None:
    port = free_port()
    make(metrics_port=port).start()
    found = served(port)
    assert found["vllm:s3ec_save_problems_total", ("denied",)] == 0
    assert found["vllm:s3ec_internal_errors_total", ()] == 0


def test_the_port_serves_every_metric_of_the_table_with_its_text(
    make: Callable[..., Exporter],
) -> None:
    port = free_port()
    one = make(metrics_port=port)
    node_of(one).levels = dict.fromkeys(metrics.GAUGES, 1.0)
    one.start()
    served(port)
    families = {
        family.name: family.documentation
        for family in parser.text_string_to_metric_families(page(port))
    }
    tables = (metrics.PLAIN, metrics.LEVELS, metrics.GAUGES, metrics.LABELLED, metrics.HISTOGRAMS)
    entries: list[Any] = [metrics.LOOKUPS, *(entry for table in tables for entry in table.values())]
    assert families == {entry[0]: entry[1] for entry in entries}


def test_of_two_engines_one_has_the_port_and_the_other_says_so_once_and_takes_over(
    make: Callable[..., Exporter], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(exporter, "_TRY_AGAIN_S", 0.001)
    port = free_port()
    first, second = make(metrics_port=port), make(metrics_port=port)
    node_of(second).counters.add("hits", 5)
    first.start()
    assert served(port)["vllm:s3ec_hits_total", ()] == 0
    with caplog.at_level(logging.WARNING):
        second.start()
        eventually(lambda: bool(messages(caplog)))
        first.close()

        def taken_over() -> bool:
            text = page(port)
            return text is not None and "vllm:s3ec_hits_total" in text and "} 5.0" in text

        eventually(taken_over)
    complaints = [one for one in messages(caplog) if "not served" in one]
    assert len(complaints) == 1
    assert f"127.0.0.1:{port}: another process has it" in complaints[0]


def test_a_forked_child_does_not_keep_the_port(make: Callable[..., Exporter]) -> None:
    port = free_port()
    first, second = make(metrics_port=port), make(metrics_port=port)
    node_of(second).counters.add("hits", 5)
    first.start()
    assert served(port)["vllm:s3ec_hits_total", ()] == 0
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write)
        os.read(read, 1)  # until the parent closes it
        os._exit(0)
    os.close(read)
    try:
        first.close()
        second.start()
        assert served(port)["vllm:s3ec_hits_total", ()] == 5
    finally:
        os.close(write)
        os.waitpid(child, 0)


def test_without_a_port_nothing_is_served_and_no_client_is_needed(
    make: Callable[..., Exporter], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    make().start()


def test_a_port_without_the_client_is_an_error_that_names_the_extra(
    make: Callable[..., Exporter], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ConfigError, match=r"s3ec\[metrics\]") as found:
        make(metrics_port=1)
    assert found.value.field == "metrics_port"


@pytest.mark.parametrize("port", [-1, 65536, "http"])
def test_a_port_that_is_none_is_refused_by_its_name(port: Any) -> None:
    with pytest.raises(ConfigError, match="metrics_port"):
        load_settings({"bucket": "corpus", "metrics_port": port})


# -- the line in the log -----------------------------------------------------------------------


def test_the_line_says_where_hits_came_from_and_what_was_encoded() -> None:
    counts = {"lookups.device.hit": 98, "lookups.node.hit": 20, "lookups.bucket.hit": 5}
    assert line_of({**counts, "hits": 25, "misses": 7}) == (
        "s3ec: 123 hits (98 device, 20 node, 5 bucket), 7 encoded"
    )


def test_the_line_says_what_moved_and_what_went_wrong() -> None:
    line = line_of(
        {
            "fetch_items.bucket": 2,
            "fetch_bytes.bucket": 5e6,
            "fetch_seconds.bucket": 0.1,
            "load.items": 4,
            "load.seconds": 0.01,
            "save.items": 1,
            "save.bytes": 2.5e6,
            "deferred_requests": 3,
            "deferred_seconds": 0.125,
            "save_problem.dropped": 6,
        }
    )
    assert line == (
        "s3ec: 0 hits (0 device, 0 node, 0 bucket), 0 encoded, 5.0 MB fetched in 50.0 ms each, "
        "4 loads in 2.50 ms each, 1 saved (2.5 MB), 3 requests waited, 0.12 s in all, "
        "6 problems with saves"
    )


def test_nothing_is_said_of_a_minute_in_which_nothing_happened() -> None:
    assert line_of({}) is None
    assert line_of({"index.downloads": 3}) is None


def test_the_line_comes_again_and_again_and_tells_each_thing_once(
    make: Callable[..., Exporter], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(exporter, "LINE_EVERY_S", 0.001)
    one = make()
    with caplog.at_level(logging.INFO):
        one.start()
        for number in (1, 2):
            node_of(one).counters.add("misses", number)
            said = f"s3ec: 0 hits (0 device, 0 node, 0 bucket), {number} encoded"
            eventually(lambda said=said: messages(caplog).count(said) == 1)  # type: ignore[misc]


def test_the_end_says_what_was_not_said_yet(
    make: Callable[..., Exporter], caplog: pytest.LogCaptureFixture
) -> None:
    one = make()
    one.start()
    node_of(one).counters.add("misses", 3)
    with caplog.at_level(logging.INFO):
        one.close()
        one.close()
    assert messages(caplog) == ["s3ec: 0 hits (0 device, 0 node, 0 bucket), 3 encoded"]


# -- gauges of all ranks -----------------------------------------------------------------------


def test_gauges_of_ranks_are_added_up_or_compared_and_those_of_the_node_are_told_once(
    make: Callable[..., Exporter],
) -> None:
    node = node_of(make())
    figures = Figures(node)
    node.levels = {"level.tier_bytes": 1000, "level.breaker_open": 0.0}
    rank = {"level.spool_entries": 2, "level.spool_oldest_seconds": 5, "level.breaker_open": 0.0}
    figures.on_report({0: rank})
    figures.on_report({1: {**rank, "level.spool_oldest_seconds": 9, "level.breaker_open": 1.0}})
    assert figures.levels() == {
        "level.tier_bytes": 1000,
        "level.breaker_open": 1.0,
        "level.spool_entries": 4,
        "level.spool_oldest_seconds": 9,
    }
    figures.on_report({1: {"level.spool_entries": 0}})
    assert figures.levels()["level.spool_entries"] == 2


def test_gauges_are_told_again_though_nothing_has_changed(make: Callable[..., Exporter]) -> None:
    node = node_of(make())
    figures = Figures(node)
    for _ in range(2):  # the reader may have started in between
        node.levels = {"level.tier_bytes": 1000}
        assert figures.news() == {"level.tier_bytes": 1000}
        assert figures.news() == {}


def test_a_node_that_follows_the_bucket_keeps_all_its_gauges(make: Callable[..., Exporter]) -> None:
    node = node_of(make())
    node.follow_the_bucket()
    own = metrics.GAUGES.keys() - {"level.index_lag_seconds"}
    of_saves = {name for name in own if "spool" in name or "queue" in name}
    eventually(lambda: node.levels.keys() == own - of_saves, f"{own - node.levels.keys()}")
    assert node.levels["level.tier_budget_bytes"] == node.settings.cache_bytes
