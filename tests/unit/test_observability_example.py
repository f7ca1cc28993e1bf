# SPDX-License-Identifier: Apache-2.0
"""What lies in examples/observability/ holds together, without an engine and without Docker.

tests/e2e/test_observability.py loads every query into a Prometheus that watches a real engine.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from s3ec.connector.metrics import GAUGES, HISTOGRAMS, LABELLED, PLAIN, label_values
from tests.support.prometheus import find_tool

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "observability"
DASHBOARD = json.loads((FOLDER / "dashboard.json").read_text())
COMPOSE = yaml.safe_load((FOLDER / "compose.yaml").read_text())
RULES = [
    rule
    for group in yaml.safe_load((FOLDER / "rules.yaml").read_text())["groups"]
    for rule in group["rules"]
]
ALERTS = [rule for rule in RULES if "alert" in rule]
# Label to all that it may say, of whatever metric.
VALUES: dict[str, set[str]] = {}
for _name, _text, _labels, _values in (*LABELLED.values(), *HISTOGRAMS.values()):
    for _value in _values:
        for _label, _one in zip(_labels, label_values(_labels, _value), strict=True):
            VALUES.setdefault(_label, set()).add(_one)
METRICS = {
    *(f"{name}_total" for name, *_ in (*PLAIN.values(), *LABELLED.values())),
    *(name for name, *_ in GAUGES.values()),
    *(f"{name}_{part}" for name, *_ in HISTOGRAMS.values() for part in ("bucket", "sum", "count")),
}


def queries() -> Iterator[str]:
    """All expressions of dashboard and rules."""
    for panel in DASHBOARD["panels"]:
        yield from (target["expr"] for target in panel.get("targets", []))
    yield from (rule["expr"] for rule in RULES)


@pytest.fixture
def promtool() -> Path:
    return find_tool("promtool")


# -- the dashboard -----------------------------------------------------------------------------


def test_every_panel_says_what_it_means_and_in_which_unit() -> None:
    panels = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
    titles = [panel["title"] for panel in panels]
    assert len(titles) == len(set(titles)) > 15
    for row in DASHBOARD["panels"]:
        assert row["type"] != "row" or row["title"].endswith("?")
    for panel in panels:
        assert panel["description"].endswith("."), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert panel["targets"], panel["title"]


def test_panels_do_not_overlap_and_have_numbers_of_their_own() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24, panel["title"]
        taken |= cells
    numbers = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(numbers) == len(set(numbers))


def test_every_query_is_of_the_chosen_engines_and_of_the_chosen_prometheus() -> None:
    variables = {one["name"] for one in DASHBOARD["templating"]["list"]}
    assert variables == {"datasource", "model_name", "instance", "engine"}
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", []):
            assert target["datasource"]["uid"] == "${datasource}"
            for labels in re.findall(r"vllm:s3ec_\w+\{([^}]*)\}", target["expr"]):
                for name in ("model_name", "instance", "engine"):
                    assert f'{name}=~"${name}"' in labels, target["expr"]


def test_queries_name_only_metrics_that_exist() -> None:
    recorded = {rule["record"] for rule in RULES if "record" in rule}
    for query in queries():
        named = re.findall(r"\b(?:vllm|s3ec):[\w:]+", query)
        assert named, query
        for name in named:
            assert name in METRICS or name in recorded, f"{name} in {query}"
        for label, value in re.findall(r'\b(\w+)!?="(\w+)"', query):
            assert value in VALUES[label], f"{label}={value} in {query}"


# -- the alerts --------------------------------------------------------------------------------


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])
def test_alert_says_what_it_is_and_what_to_do(alert: dict[str, Any]) -> None:
    told = alert["annotations"]
    assert set(told) == {"summary", "description", "what_to_do", "runbook"}
    assert told["description"].endswith(".")
    assert told["what_to_do"].endswith(".")
    assert alert["labels"]["severity"] in ("warning", "critical")
    page, _, anchor = told["runbook"].partition("#")
    headings = re.findall(r"^#+ +(.+?) *$", (ROOT / page).read_text(), re.M)
    assert anchor in {heading.lower().replace(" ", "-") for heading in headings}


def test_every_alert_is_made_to_fire_in_the_tests_of_the_rules() -> None:
    tested = (FOLDER / "rules_test.yaml").read_text()
    assert {one["alert"] for one in ALERTS if f'"{one["alert"]}"' not in tested} == set()


@pytest.mark.parametrize(
    "command",
    [
        ("test", "rules", "rules_test.yaml"),
        ("check", "rules", "rules.yaml"),
        ("check", "config", "prometheus.yaml"),
    ],
    ids=" ".join,
)
def test_promtool_is_content(promtool: Path, command: tuple[str, ...]) -> None:
    done = subprocess.run(
        [promtool, *command], cwd=FOLDER, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


# -- compose -----------------------------------------------------------------------------------


def test_both_listen_on_this_machine_only() -> None:
    services = COMPOSE["services"]
    assert "--web.listen-address=127.0.0.1:9090" in services["prometheus"]["command"]
    assert services["grafana"]["environment"]["GF_SERVER_HTTP_ADDR"] == "127.0.0.1"


def test_what_compose_mounts_is_there_and_is_where_it_is_looked_for() -> None:
    for service in COMPOSE["services"].values():
        for volume in service["volumes"]:
            source, target, *mode = volume.split(":")
            if source.startswith("./"):
                assert (FOLDER / source).is_file(), volume
                assert mode == ["ro"], volume
                assert target.startswith("/etc/"), volume
            else:
                assert source in COMPOSE["volumes"], volume
    [provider] = yaml.safe_load((FOLDER / "grafana/dashboards.yaml").read_text())["providers"]
    home = COMPOSE["services"]["grafana"]["environment"][
        "GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"
    ]
    assert home == f"{provider['options']['path']}/dashboard.json"
    [source] = yaml.safe_load((FOLDER / "grafana/datasource.yaml").read_text())["datasources"]
    assert source["url"] == "http://127.0.0.1:9090"
    config = yaml.safe_load((FOLDER / "prometheus.yaml").read_text())
    assert source["jsonData"]["timeInterval"] == config["global"]["scrape_interval"]
