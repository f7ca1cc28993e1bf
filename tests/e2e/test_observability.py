# SPDX-License-Identifier: Apache-2.0
"""A real Prometheus that watches a real engine answers every query of dashboard and rules.

The engine has good and bad moments, its bucket's outage among them, so that histograms are not
empty. Needs Debian's Prometheus, which ``make prometheus`` brings.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from s3ec.dev.observability.panels import ROWS, Panel
from s3ec.dev.observability.picture import draw, filled
from s3ec.dev.observability.run import EXAMPLE, Pace, Site, play, running
from s3ec.dev.rigs.nursery import EngineForkServer
from s3ec.dev.rigs.prometheus import find_tool
from s3ec.errors import ConfigError, UnavailableError
from tests.e2e.rig import eventually

_PACE = Pace(pictures=60, encode_s=0.1, first_s=6, again_s=4, evicted_s=5, outage_s=8, after_s=3)
_WINDOW_S = 3600.0  # the whole run, also on a busy machine
_GROUPS = yaml.safe_load((EXAMPLE / "rules.yaml").read_text())["groups"]
RULES = {
    rule.get("alert") or rule["record"]: rule["expr"]
    for group in _GROUPS
    for rule in group["rules"]
}
PANELS = [panel for row in ROWS for panel in row.panels]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, nursery: EngineForkServer) -> Iterator[Site]:
    """When the run is over; engine and Prometheus go on."""
    try:
        find_tool("prometheus")
    except ConfigError as exc:
        pytest.skip(str(exc))
    folder = tmp_path_factory.mktemp("observability")
    with running(folder, _PACE.pictures, nursery) as here:
        play(here, _PACE)
        # A look at everything that has happened.
        eventually(
            lambda: here.prometheus.query("s3ec:bucket_fetch:mean_seconds10m") != [],
            "the rules were looked at",
        )
        yield here


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel.title)
def test_every_query_of_a_panel_finds_data(site: Site, panel: Panel) -> None:
    for query in panel.queries:
        series = site.prometheus.query(filled(query.expression, _WINDOW_S))
        assert series, f"{query.legend}: {query.expression}"
        # Of no event there is no quantile.
        assert not all(math.isnan(float(one["value"][1])) for one in series), query.expression
        named = re.findall(r"\{\{(\w+)\}\}", query.legend)
        for one in series:
            assert set(named) <= set(one["metric"]), query.legend


def test_the_run_was_one_that_shows_something(site: Site) -> None:
    """Zeros would say little about what a panel shows."""

    def now(expression: str) -> float:
        [one] = site.prometheus.query(f"max({expression})")
        return float(one["value"][1])

    for tier in ("device", "node", "bucket"):
        for outcome in ("hit", "miss"):
            assert now(f'vllm:s3ec_lookups_total{{tier="{tier}",outcome="{outcome}"}}') > 0
    assert now("max_over_time(vllm:s3ec_breaker_open[1h])") == 1
    assert now("max_over_time(vllm:s3ec_spool_entries[1h])") >= 1
    assert now("vllm:s3ec_saved_encoder_seconds_total") > 0


def test_query_that_is_none_is_refused(site: Site) -> None:
    with pytest.raises(UnavailableError, match="parse error"):
        site.prometheus.query("sum(")


def test_the_rules_are_loaded_and_healthy(site: Site) -> None:
    loaded = {rule["name"]: rule for rule in site.prometheus.rules()}
    assert set(loaded) == set(RULES)
    for name, rule in loaded.items():
        assert rule["health"] == "ok", (name, rule.get("lastError"))


@pytest.mark.parametrize("name", RULES)
def test_what_a_rule_looks_at_is_there(site: Site, name: str) -> None:
    """Each series in it: an alert by itself says nothing while all is well."""
    selectors = re.findall(r"\b(?:vllm|s3ec):[\w:]+(?:\{[^}]*\})?", RULES[name])
    assert selectors
    for selector in selectors:
        assert site.prometheus.query(selector), selector


def test_alerts_are_silent_for_a_bucket_that_was_down_for_seconds(site: Site) -> None:
    firing = site.prometheus.query('ALERTS{alertstate="firing"}')
    assert [one["metric"]["alertname"] for one in firing] == []


def test_picture_of_the_dashboard_is_drawn(site: Site, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "dashboard.png"
    start_s = site.marks[0][0]
    end_s = site.marks[-1][0] + _PACE.after_s
    draw(
        out,
        site.prometheus,
        start_s=start_s,
        end_s=end_s,
        window_s=10.0,
        marks=site.marks,
        title="a test",
    )
    from PIL import Image

    with Image.open(out) as image:
        assert image.width > 1000
        colours = image.convert("RGB").getcolors(2**24)
    assert colours is not None
    assert len(colours) > 50  # it is not a blank page
