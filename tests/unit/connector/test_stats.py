# SPDX-License-Identifier: Apache-2.0
"""What of our counts reaches vLLM's metrics."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from s3ec.connector import lookups
from s3ec.connector.metrics import (
    GAUGES,
    HISTOGRAMS,
    LABELLED,
    NOT_EXPORTED,
    PLAIN,
    label_values,
)
from s3ec.counters import TIME_BOUNDS_S, Counters, Increments
from s3ec.fetch import FetchOutcome

pytest.importorskip("vllm")
stats = pytest.importorskip("s3ec.connector.stats")
prometheus = pytest.importorskip("prometheus_client")

PACKAGE = Path(__file__).parents[3] / "s3ec"


class FakeMetric:
    """A metric of prometheus_client, as far as vLLM promises that Ray's has it."""

    made: ClassVar[dict[str, FakeMetric]] = {}

    def __init__(self, *, name: str, labelnames: list[str], **_: Any) -> None:
        self.labelnames = labelnames
        self.observed: list[tuple[tuple[str, ...], float]] = []
        self.values: dict[tuple[str, ...], float] = {}
        self.made[name] = self

    def labels(self, *values: str) -> Any:
        assert len(values) == len(self.labelnames)

        class Child:
            @staticmethod
            def inc(amount: float) -> None:
                self.values[values] = self.values.get(values, 0) + amount

            @staticmethod
            def set(level: float) -> None:
                self.values[values] = level

            @staticmethod
            def observe(amount: float) -> None:
                self.observed.append((values, amount))

        return Child


@pytest.fixture
def metrics() -> Any:
    FakeMetric.made.clear()
    types = dict.fromkeys((prometheus.Counter, prometheus.Gauge, prometheus.Histogram), FakeMetric)
    labels = {0: ["model", "0"]}
    config = SimpleNamespace(ec_transfer_config=None)
    return stats.S3ECPromMetrics(config, types, ["model_name", "engine"], labels)


def counted_names() -> set[str]:
    """Every counter that the package adds to, with labels cut where they are made up."""
    names = set()
    for file in PACKAGE.rglob("*.py"):
        for name in re.findall(r'counters\.add\(\s*f?"([^"]+)"', file.read_text()):
            names.add(name.split("{")[0])
        # Added as a mapping.
        mapped = r'"((?:load|save)\.[a-z]+|tier\.published[a-z_]*)"'
        names.update(re.findall(mapped, file.read_text()))
        names.update(re.findall(r'"(level\.[a-z_]+)"', file.read_text()))
        for name in re.findall(r'\.observe\(f?"([^"]+)"', file.read_text()):
            names.add(name.split("{")[0])
        names.update(re.findall(r'f"(fetch[a-z_]*\.)\{', file.read_text()))
    return names


def test_every_counter_is_exported_or_left_out_on_purpose() -> None:
    names = counted_names()
    assert "spool.adopted" in names
    prefixes = tuple(LABELLED)
    missing = {
        name
        for name in names - set(NOT_EXPORTED)
        if name not in {**PLAIN, **GAUGES, **HISTOGRAMS} and not name.startswith(prefixes)
    }
    assert missing == set()
    assert names >= GAUGES.keys() | HISTOGRAMS.keys()
    assert set(NOT_EXPORTED) <= names


def test_every_value_of_a_label_has_a_meaning() -> None:
    names = counted_names()
    for prefix, (_, _, _, values) in LABELLED.items():
        used = {name.removeprefix(prefix) for name in names if name.startswith(prefix)}
        assert {value for value in used if value and not value.endswith(".")} <= set(values), prefix
    outcomes = {outcome.value for outcome in FetchOutcome}
    assert outcomes <= set(LABELLED["fetch."][3])


def counted(name: str) -> dict[tuple[str, ...], float]:
    """What has been counted, by labels; without those that are 0 from the start."""
    return {labels: value for labels, value in FakeMetric.made[name].values.items() if value}


def test_every_counter_is_there_with_0_before_anything_is_counted(metrics: Any) -> None:
    """Or Prometheus sees no increase when the first error of a kind is counted."""
    for name, *_ in PLAIN.values():
        assert FakeMetric.made[name].values == {("model", "0"): 0}
    for name, _, labels, meanings in LABELLED.values():
        known = {value for value in meanings if not value.endswith(".REASON")}
        series = [label_values(labels, value) for value in known]
        assert FakeMetric.made[name].values == {("model", "0", *values): 0 for values in series}


def test_a_report_is_added_to_the_counters_by_name_and_by_label(metrics: Any) -> None:
    for _ in range(2):
        metrics.observe({"load.rescued": 1, "spool.adopted": 3, "fetch_parked": 1})
    assert FakeMetric.made["vllm:s3ec_load_rescues"].values == {("model", "0"): 2}
    assert counted("vllm:s3ec_spool") == {("model", "0", "adopted"): 6}


def test_a_gauge_says_what_was_sent_last_whoever_read_before(metrics: Any) -> None:
    metrics.observe({"level.spool_entries": 8})
    metrics.observe({"level.spool_entries": 3, "hits": 1})
    metrics.observe({"hits": 1})
    assert FakeMetric.made["vllm:s3ec_spool_entries"].values == {("model", "0"): 3}


def test_several_readers_show_the_last_gauge_and_the_sum_of_what_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As vLLM's several API servers: processes that share a folder, and one that reads it."""
    from prometheus_client import multiprocess, values

    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    kinds = (prometheus.Counter, prometheus.Gauge, prometheus.Histogram)
    types = {kind: functools.partial(kind, registry=None) for kind in kinds}
    config = SimpleNamespace(ec_transfer_config=None)
    reports: dict[str, list[dict[str, Any]]] = {
        "first": [
            {"level.spool_entries": 8, "hits": 1},
            {"load_time#3": 1, "load_time+3": 0.008},
        ],
        "second": [
            {"level.spool_entries": 3, "hits": 1},
            {"load_time#3": 2, "load_time+3": 0.016},
        ],
    }
    for process, told in reports.items():
        shared = values.MultiProcessValue(lambda name=process: name)
        monkeypatch.setattr(values, "ValueClass", shared)
        metrics = stats.S3ECPromMetrics(config, types, ["engine"], {0: ["0"]})
        for report in told:
            metrics.observe(report)
        shared.close_all_files()
    registry = prometheus.CollectorRegistry()
    multiprocess.MultiProcessCollector(registry)
    lines = prometheus.generate_latest(registry).decode().splitlines()
    assert {file.stem.rpartition("_")[2] for file in tmp_path.iterdir()} == reports.keys()
    for sample in ("spool_entries 3.0", "hits_total 2.0"):
        name, value = sample.split()
        assert f'vllm:s3ec_{name}{{engine="0"}} {value}' in lines
    assert 'vllm:s3ec_load_time_seconds_count{engine="0"} 3.0' in lines


def test_a_lookup_has_its_tier_and_its_outcome(metrics: Any) -> None:
    for amounts in (lookups.FROM_NODE, lookups.FROM_BUCKET, lookups.FROM_NOWHERE):
        metrics.observe(dict(amounts))
    assert counted("vllm:s3ec_lookups") == {
        ("model", "0", "device", "miss"): 3,
        ("model", "0", "node", "hit"): 1,
        ("model", "0", "node", "miss"): 2,
        ("model", "0", "bucket", "hit"): 1,
        ("model", "0", "bucket", "miss"): 1,
    }
    assert FakeMetric.made["vllm:s3ec_hits"].values == {("model", "0"): 2}


def test_times_of_several_processes_arrive_in_their_buckets_with_their_sum(metrics: Any) -> None:
    counters = [Counters(), Counters()]
    times = [0.0001, 0.004, 0.0045, 0.005, 0.3, 10.0, 9000.0, 5000.0]
    for number, seconds in enumerate(times):
        counters[number % 2].observe("fetch_time.bucket", seconds)
    counters[0].observe("load_time", 0.02)
    for each in counters:
        metrics.observe(Increments(each).take())
    fetches = FakeMetric.made["vllm:s3ec_fetch_time_seconds"].observed
    assert {labels for labels, _ in fetches} == {("model", "0", "bucket")}
    found = [seconds for _, seconds in fetches]
    assert sum(found) == pytest.approx(sum(times))
    for bound in TIME_BOUNDS_S:
        assert sum(one <= bound for one in found) == sum(one <= bound for one in times), bound
    assert FakeMetric.made["vllm:s3ec_load_time_seconds"].observed == [(("model", "0"), 0.02)]


def test_vllms_own_line_in_the_log_says_nothing_that_ours_says() -> None:
    connector = pytest.importorskip("s3ec.connector.connector").S3ECConnector
    assert connector.build_ec_connector_stats({"hits": 1}).is_empty()


def test_metric_names_are_unique() -> None:
    tables = (PLAIN, GAUGES, LABELLED, HISTOGRAMS)
    names = [entry[0] for table in tables for entry in table.values()]
    assert len(names) == len(set(names))
