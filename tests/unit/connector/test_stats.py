# SPDX-License-Identifier: Apache-2.0
"""What of our counts reaches vLLM's metrics."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from s3ec.connector.metrics import LABELLED, LEVELS, NOT_EXPORTED, PLAIN
from s3ec.fetch import FetchOutcome

pytest.importorskip("vllm")
stats = pytest.importorskip("s3ec.connector.stats")
prometheus = pytest.importorskip("prometheus_client")

PACKAGE = Path(__file__).parents[3] / "s3ec"


class FakeMetric:
    """A counter or a gauge of prometheus_client, as far as vLLM promises that Ray's has it."""

    made: ClassVar[dict[str, FakeMetric]] = {}

    def __init__(self, *, name: str, labelnames: list[str], **_: str) -> None:
        self.labelnames = labelnames
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
        names.update(re.findall(r'f"(fetch[a-z_]*\.)\{', file.read_text()))
    return names


def test_every_counter_is_exported_or_left_out_on_purpose() -> None:
    names = counted_names()
    assert "spool.adopted" in names
    prefixes = tuple(LABELLED)
    missing = {
        name
        for name in names - set(NOT_EXPORTED)
        if name not in {**PLAIN, **LEVELS} and not name.startswith(prefixes)
    }
    assert missing == set()
    assert set(NOT_EXPORTED) <= names


def test_every_value_of_a_label_has_a_meaning() -> None:
    names = counted_names()
    for prefix, (_, _, _, values) in LABELLED.items():
        used = {name.removeprefix(prefix) for name in names if name.startswith(prefix)}
        assert {value for value in used if value and not value.endswith(".")} <= set(values), prefix
    outcomes = {outcome.value for outcome in FetchOutcome}
    assert outcomes <= set(LABELLED["fetch."][3])


def test_a_report_is_added_to_the_counters_by_name_and_by_label(metrics: Any) -> None:
    for _ in range(2):
        metrics.observe({"load.rescued": 1, "spool.adopted": 3, "fetch_parked": 1})
    assert FakeMetric.made["vllm:s3ec_load_rescues"].values == {("model", "0"): 2}
    assert FakeMetric.made["vllm:s3ec_spool"].values == {("model", "0", "adopted"): 6}


def test_a_level_goes_up_and_down(metrics: Any) -> None:
    for amount, level in ((8, 8), (4, 12), (-5, 7)):
        metrics.observe({"pace.withheld": amount})
        assert FakeMetric.made["vllm:s3ec_places_withheld"].values == {("model", "0"): level}


def test_metric_names_are_unique() -> None:
    names = [entry[0] for entry in (*PLAIN.values(), *LEVELS.values(), *LABELLED.values())]
    assert len(names) == len(set(names))
