# SPDX-License-Identifier: Apache-2.0
"""A real Prometheus that watches a real engine answers every query of dashboard and rules.

The engine has good and bad moments, its bucket's outage among them, so that histograms are not
empty. Needs Debian's Prometheus, which ``make prometheus`` brings.
"""

from __future__ import annotations

import json
import math
import random
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from s3ec.dev.rigs.engine import EngineProcess, ec_config, image, text
from s3ec.dev.rigs.models import write_gemma3
from s3ec.dev.rigs.nursery import EngineForkServer
from s3ec.dev.rigs.pictures import write_pictures
from s3ec.dev.rigs.proxy import FaultProxy, Rule
from s3ec.dev.rigs.proxy_faults import Delay
from s3ec.dev.rigs.vllm_cpu import ONE_PROCESS
from s3ec.errors import UnavailableError
from s3ec.testing.server import LocalS3
from s3ec.tier.inspection import Inspection
from tests.e2e.rig import eventually
from tests.support.prometheus import Prometheus, find_tool

EXAMPLE = Path(__file__).parents[2] / "examples" / "observability"
_BUCKET = "embeddings"
_PICTURES = 30
_PART = 12  # asked about in each part of the run
_OPTIONS: dict[str, Any] = {
    "max_num_batched_tokens": 128,  # and with it the device cache: two pictures
    "block_size": 32,
}
# What Grafana puts in: all engines, and a time that holds the whole run, also on a busy machine.
_FILLED_IN = {
    "$model_name": ".*",
    "$instance": ".*",
    "$engine": ".*",
    "$__rate_interval": "3600s",
}
_GROUPS = yaml.safe_load((EXAMPLE / "rules.yaml").read_text())["groups"]
RULES = {
    rule.get("alert") or rule["record"]: rule["expr"]
    for group in _GROUPS
    for rule in group["rules"]
}
_DASHBOARD = json.loads((EXAMPLE / "dashboard.json").read_text())
PANELS = [panel for panel in _DASHBOARD["panels"] if panel["type"] != "row"]


@dataclass(frozen=True)
class Site:
    """A real engine with a bucket that has a bad moment, watched by a real Prometheus."""

    engine: EngineProcess
    proxy: FaultProxy
    prometheus: Prometheus
    pictures: list[Path]
    cache_dir: Path


@contextmanager
def running(folder: Path, nursery: EngineForkServer) -> Iterator[Site]:
    """Engine, bucket and Prometheus, all of them ready; they write into ``folder``."""
    with LocalS3() as server, FaultProxy(server.endpoint_url) as proxy:
        server.create_bucket(_BUCKET)
        proxy.add(Rule(Delay(0.02)))  # a network's
        settings = {
            "bucket": _BUCKET,
            "endpoint_url": proxy.url,
            "cache_dir": str(folder / "tier"),
            "cache_bytes": 1_000_000,  # some hundred embeddings
            "min_free_bytes": 0,
            "wait": "always",
            "index_refresh_s": 2,
        }
        with EngineProcess(
            write_gemma3(folder / "gemma3"),
            ec=ec_config("ec_both", settings),
            log_path=folder / "engine.log",
            media=folder,
            env=server.env() | ONE_PROCESS,
            options=_OPTIONS,
            nursery=nursery,
        ) as engine:
            address = engine.serve_metrics()
            with Prometheus(folder / "prometheus", prometheus_config(address)) as prometheus:
                eventually(lambda: prometheus.query("up == 1") != [], "the engine is asked")
                pictures = write_pictures(folder / "pictures", _PICTURES)
                yield Site(engine, proxy, prometheus, pictures, folder / "tier")


def prometheus_config(address: str) -> dict[str, Any]:
    """The example's configuration, for one engine somewhere else, and with quicker looks."""
    config: dict[str, Any] = yaml.safe_load((EXAMPLE / "prometheus.yaml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(EXAMPLE / name) for name in config["rule_files"]]
    config["scrape_configs"][0]["static_configs"] = [{"targets": [address]}]
    return config


def play(site: Site) -> None:
    """Ask the engine in good and in bad moments."""
    rng = random.Random(0)
    shown = 0  # pictures that came up so far
    numbers = iter(range(10**6))
    site.engine.slow_encoder(0.1)

    def is_scraped() -> None:
        """Wait for the next look: what moves within two of them has no rate."""

        def looks() -> float:
            [one] = site.prometheus.query("count_over_time(up[1h])")
            return float(one["value"][1])

        before = looks()
        eventually(lambda: looks() > before, "the engine is looked at")

    def ask(*, new: float, until: float = 1.0) -> None:
        """Questions about pictures, of which a share is new, until so many of all have come up."""
        nonlocal shown
        for asked in range(_PART):
            is_new = asked == 0 or rng.random() < new
            if is_new and shown < until * len(site.pictures):
                picture, shown = site.pictures[shown], shown + 1
            else:
                # A few get most questions.
                picture = site.pictures[min(int(rng.expovariate(0.15)), shown - 1)]
            # Two questions about it, the second while the device still holds it.
            for _ in range(2):
                # Another text in front, or vLLM's prefix cache would answer.
                number = text(f"{next(numbers)}: ")
                site.engine.chat([[number, image(picture), text("What is it?")]], max_tokens=2)
            if asked % 4 == 3:
                is_scraped()

    def is_seen(gauge: str) -> None:
        def seen() -> bool:
            site.engine.chat([[text("tick")]], max_tokens=1)  # gauges move with steps
            return site.prometheus.query(f"max_over_time({gauge}[1h]) > 0") != []

        eventually(seen, f"{gauge} is seen", pause_s=0.2)

    ask(new=0.9, until=0.5)
    ask(new=0.05)
    Inspection.open(site.cache_dir).evict_to(0, now_s=time.time())
    ask(new=0.05)
    with site.proxy.refusing():
        Inspection.open(site.cache_dir).evict_to(0, now_s=time.time())
        ask(new=0.15)
        is_seen("vllm:s3ec_breaker_open")
        is_seen("vllm:s3ec_spool_entries")
    ask(new=0.05)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, nursery: EngineForkServer) -> Iterator[Site]:
    """When the run is over; engine and Prometheus go on."""
    find_tool("prometheus")  # before an engine starts
    folder = tmp_path_factory.mktemp("observability")
    with running(folder, nursery) as here:
        play(here)
        # A look at everything that has happened.
        eventually(
            lambda: here.prometheus.query("s3ec:bucket_fetch:mean_seconds10m") != [],
            "the rules were looked at",
        )
        yield here


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_every_query_of_a_panel_finds_data(site: Site, panel: dict[str, Any]) -> None:
    for target in panel["targets"]:
        expression, legend = target["expr"], target["legendFormat"]
        for variable, value in _FILLED_IN.items():
            expression = expression.replace(variable, value)
        series = site.prometheus.query(expression)
        assert series, f"{legend}: {expression}"
        # Of no event there is no quantile.
        assert not all(math.isnan(float(one["value"][1])) for one in series), expression
        named = re.findall(r"\{\{(\w+)\}\}", legend)
        for one in series:
            assert set(named) <= set(one["metric"]), legend


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
