# SPDX-License-Identifier: Apache-2.0
"""All results as one HTML file that needs nothing but itself: no scripts, no links, no fonts."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from typing import Any

from s3ec.dev.bench import registry
from s3ec.dev.bench.result import Result, Row, rounded
from s3ec.dev.bench.table import figure, remark, verdict

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8882; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { margin-top: 2.5rem; border-bottom: 1px solid var(--line); }
table { border-collapse: collapse; width: 100%; font-size: .92rem; }
th, td { text-align: left; padding: .3rem .7rem; border-bottom: 1px solid var(--line);
  vertical-align: top; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
tr.case td { border-bottom: none; padding-top: 0; padding-bottom: 0; opacity: .75; }
tr.case td:first-child { padding-left: 2rem; }
.ok { color: #0072b2; } .bad { color: #d55e00; font-weight: 600; } .none { opacity: .6; }
code, pre { font-family: ui-monospace, monospace; font-size: .85rem; }
pre { background: var(--soft); padding: .8rem; overflow-x: auto; }
img { max-width: 100%; height: auto; background: white; margin: 1rem 0; }
.scroll { overflow-x: auto; }
"""
_CLASSES = {True: "ok", False: "bad", None: "none"}


def html(
    results: Sequence[Result], plots: Mapping[str, bytes], *, now: datetime | None = None
) -> str:
    """The report.

    Args:
        results: In the order to show them.
        plots: Name of a benchmark to its plot, a PNG file.
        now: Date to print; the present one if None.
    """
    when = (now or datetime.now(UTC)).strftime("%Y-%m-%d %H:%M UTC")
    rows = [row for result in results for row in result.rows]
    failed = sum(row.ok is False for row in rows)
    unmeasured = sum(row.ok is None for row in rows)
    summary = f"{len(rows)} rows, {failed} not reached, {unmeasured} not measurable here"
    body = [
        f"<h1>s3ec bench</h1><p>{when}. {summary}.</p>",
        _machine(results[0].machine if results else {}),
        *(_section(result, plots.get(result.bench)) for result in results),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>s3ec bench</title><style>{_STYLE}</style></head>\n"
        f"<body>\n{chr(10).join(body)}\n</body></html>\n"
    )


def _machine(machine: Mapping[str, Any]) -> str:
    flat = {**machine, **machine.get("versions", {})}
    flat.pop("versions", None)
    if "memory_bytes" in flat:
        flat["memory"] = f"{flat.pop('memory_bytes') / 2**30:.1f} GiB"
    cells = "".join(
        f"<tr><th>{escape(name.replace('_', ' '))}</th><td>{escape(str(value))}</td></tr>"
        for name, value in flat.items()
    )
    return f"<table>{cells}</table>"


def _section(result: Result, plot: bytes | None) -> str:
    entry = registry.ENTRIES.get(result.bench)
    image = ""
    if plot is not None:
        data = base64.b64encode(plot).decode("ascii")
        image = f'<img alt="plot of {escape(result.bench)}" src="data:image/png;base64,{data}">'
    heads = '<th>row</th><th class="n">value</th><th>unit</th><th>reach</th><th>ok</th>'
    table = "".join(_row(row) for row in result.rows)
    detail = json.dumps(rounded([row.to_json() for row in result.rows]), indent=1)
    return (
        f"<h2>{escape(result.bench)}</h2><p>{escape(entry.summary if entry else '')}</p>"
        f'<div class="scroll"><table><tr>{heads}<th>rounds, or why not</th></tr>{table}</table>'
        f"</div>{image}<details><summary>all details</summary>"
        f"<pre>{escape(detail)}</pre></details>"
    )


def _row(row: Row) -> str:
    cases = row.detail.get("cases") or {}
    lines = [
        f"<tr><td><code>{escape(row.spec.name)}</code></td>"
        f'<td class="n">{escape(figure(row.value))}</td><td>{escape(row.spec.unit)}</td>'
        f"<td>{escape(row.spec.reach or '')}</td>"
        f'<td class="{_CLASSES[row.ok]}">{escape(verdict(row))}</td>'
        f"<td>{escape(remark(row))}</td></tr>"
    ]
    lines += [
        f'<tr class="case"><td>{escape(name)}</td><td class="n">{escape(figure(value))}</td>'
        "<td></td><td></td><td></td><td></td></tr>"
        for name, value in cases.items()
    ]
    return "".join(lines)
