# SPDX-License-Identifier: Apache-2.0
"""The panels as a dashboard file for Grafana 10 and newer."""

from __future__ import annotations

import json
from typing import Any

from s3ec.dev.observability.panels import ROWS, Panel

_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_SCHEMA_VERSION = 39  # of Grafana 10.4; newer ones migrate it by themselves
_COLUMNS = 24
_WIDTH = _COLUMNS // 4
_STAT_HEIGHT, _SERIES_HEIGHT = 4, 8


def document() -> str:
    """The whole file."""
    return json.dumps(_dashboard(), indent=2) + "\n"


def _dashboard() -> dict[str, Any]:
    return {
        "title": "s3ec",
        "uid": "s3ec",
        "description": "vLLM's encoder cache on object storage: does it help, does anybody wait "
        "for it, is everything stored?",
        "tags": ["vllm", "s3ec"],
        "schemaVersion": _SCHEMA_VERSION,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,  # one cursor in all panels
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "templating": {"list": _variables()},
        "annotations": {"list": []},
        "panels": _panels(),
    }


def _variables() -> list[dict[str, Any]]:
    chosen: list[dict[str, Any]] = [
        {
            "name": "datasource",
            "label": "Prometheus",
            "type": "datasource",
            "query": "prometheus",
            "current": {},
            "hide": 0,
        }
    ]
    before = ""
    for name, label in (("model_name", "Model"), ("instance", "Engine"), ("engine", "Rank")):
        series = f"vllm:s3ec_hits_total{{{before}}}" if before else "vllm:s3ec_hits_total"
        chosen.append(
            {
                "name": name,
                "label": label,
                "type": "query",
                "datasource": _SOURCE,
                "query": {"query": f"label_values({series}, {name})", "refId": name},
                "definition": f"label_values({series}, {name})",
                "refresh": 2,  # with the time range
                "sort": 1,
                "multi": True,
                "includeAll": True,
                "allValue": ".*",
                "current": {"text": ["All"], "value": ["$__all"]},
                "hide": 0,
            }
        )
        before += f'{"," if before else ""}{name}=~"${name}"'
    return chosen


def _panels() -> list[dict[str, Any]]:
    """All panels with their places: rows of as many as fit."""
    made: list[dict[str, Any]] = []
    top = 0
    for row in ROWS:
        made.append(
            {
                "id": len(made) + 1,
                "type": "row",
                "title": row.question,
                "collapsed": False,
                "gridPos": {"x": 0, "y": top, "w": _COLUMNS, "h": 1},
                "panels": [],
            }
        )
        top, left, high = top + 1, 0, 0
        for panel in row.panels:
            height = _STAT_HEIGHT if panel.kind == "stat" else _SERIES_HEIGHT
            if left + _WIDTH > _COLUMNS or (high and high != height):
                top, left = top + high, 0
            made.append(_panel(panel, len(made) + 1, (left, top, _WIDTH, height)))
            left, high = left + _WIDTH, height
        top += high
    return made


def _panel(panel: Panel, number: int, place: tuple[int, int, int, int]) -> dict[str, Any]:
    left, top, width, height = place
    made: dict[str, Any] = {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": _SOURCE,
        "gridPos": {"x": left, "y": top, "w": width, "h": height},
        "fieldConfig": {"defaults": _defaults(panel), "overrides": []},
        "targets": [
            {
                "refId": chr(ord("A") + place_of_one),
                "datasource": _SOURCE,
                "expr": query.expression,
                "legendFormat": query.legend,
                "editorMode": "code",
                "range": True,
            }
            for place_of_one, query in enumerate(panel.queries)
        ],
    }
    if panel.kind == "stat":
        made["options"] = {
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
            "colorMode": "value",
            "graphMode": "area",
            "textMode": "value",
        }
    else:
        made["options"] = {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        }
    return made


def _defaults(panel: Panel) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [{"color": "text", "value": None}]
    if panel.worry_from is not None:
        steps = [{"color": "green", "value": None}, {"color": "red", "value": panel.worry_from}]
    if panel.good_from is not None:
        steps = [{"color": "yellow", "value": None}, {"color": "green", "value": panel.good_from}]
    defaults: dict[str, Any] = {
        "unit": panel.unit,
        "min": 0,
        "thresholds": {"mode": "absolute", "steps": steps},
    }
    if panel.largest is not None:
        defaults["max"] = panel.largest
    if panel.kind == "timeseries":
        defaults["custom"] = {
            "drawStyle": "line",
            "lineWidth": 1,
            "fillOpacity": 40 if panel.stacked else 8,
            "showPoints": "never",
            "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
        }
    return defaults
