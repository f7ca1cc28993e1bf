# SPDX-License-Identifier: Apache-2.0
"""The result of ``bench rag`` as one HTML page without scripts, links, fonts or other files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from typing import Any

from s3ec.dev.bench import svg
from s3ec.dev.bench.result import Reach, Result, Row, rounded
from s3ec.dev.bench.table import figure, machine_line, remark, verdict

# By the number of a configuration; those that people who confuse red and green can tell apart.
COLOURS = {
    1: ("#7b8794", "#9aa5b1"),
    2: ("#56a0d3", "#7cc0ee"),
    3: ("#0072b2", "#3fa2e0"),
    4: ("#00875f", "#2cc795"),
    5: ("#c08a00", "#e8b93a"),
    6: ("#d55e00", "#ff8a3d"),
}
# Where a picture's embedding came from, after the six configurations.
_TIERS = {"device": 7, "node": 8, "bucket": 9, "encoded": 10}
_TIER_COLOURS = {
    7: ("#00875f", "#2cc795"),
    8: ("#56a0d3", "#7cc0ee"),
    9: ("#0b4f80", "#3c7fb5"),
    10: ("#d55e00", "#ff8a3d"),
}
_TIER_NAMES = {
    "device": "the engine's own cache",
    "node": "this node's disk",
    "bucket": "the bucket",
    "encoded": "encoded",
}
_TILES = (
    ("rag.total_ratio", "of the time for all questions"),
    ("rag.ttft_p50_ratio", "of the median time to the first token"),
    ("rag.ttft_p99_ratio", "of the slowest one in a hundred"),
)

_STYLE = """
:root { color-scheme: light dark; --paper: #fbfbfa; --card: #ffffff; --ink: #1c2430;
  --soft-ink: #5b6675; --line: #d9dee5; --good: #00698f; --bad: #b54a00; LIGHT }
@media (prefers-color-scheme: dark) { :root { --paper: #12161c; --card: #1a2028; --ink: #e8ecf1;
  --soft-ink: #a3adba; --line: #333d49; --good: #5fc3ea; --bad: #ff9a57; DARK } }
* { box-sizing: border-box; }
body { font: 16px/1.55 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 68rem; margin: 0 auto; padding: 1.25rem 1rem 3rem; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: .5rem 0; text-wrap: balance; }
h2 { font-size: 1.08rem; line-height: 1.3; margin: 0 0 .2rem; }
p { margin: .4rem 0 .9rem; } p.soft, small, li { color: var(--soft-ink); }
.tiles, .charts { display: grid; gap: 1rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 15rem), 1fr)); margin: 1.2rem 0; }
.charts { grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr)); }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 1rem 1.1rem; min-width: 0; }
.card p { font-size: .9rem; }
.tile b { display: block; font-size: 2.1rem; line-height: 1.15; }
.tile .ok { color: var(--good); } .tile .bad { color: var(--bad); }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: .15rem 1rem; padding: 0;
  margin: .6rem 0 0; font-size: .82rem; }
.legend svg { vertical-align: -1px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .86rem; }
th, td { text-align: right; padding: .3rem .55rem; border-bottom: 1px solid var(--line);
  white-space: nowrap; font-variant-numeric: tabular-nums; }
th:first-child, td:first-child { text-align: left; }
td.why { white-space: normal; text-align: left; color: var(--soft-ink); }
.bad { color: var(--bad); font-weight: 600; } .ok { color: var(--good); }
details { margin-top: 1.2rem; } summary { cursor: pointer; }
pre { font: .78rem/1.4 ui-monospace, monospace; overflow-x: auto; background: var(--card);
  border: 1px solid var(--line); border-radius: 8px; padding: .8rem; max-height: 30rem; }
svg.chart path.l2 { stroke-dasharray: 7 5; }
svg.chart text.in { fill: #fff; font-size: 10.5px; font-weight: 600; }
"""


def page(result: Result, *, now: datetime | None = None) -> str:
    """The page.

    Args:
        result: Of ``bench rag``.
        now: Date to print; the present one if None.
    """
    rows = {row.spec.name: row for row in result.rows}
    legs_row = rows["rag.legs"]
    when = (now or datetime.now(UTC)).strftime("%Y-%m-%d %H:%M UTC")
    if legs_row.value is None:
        body = f"<h1>s3ec bench rag</h1><p>{escape(str(legs_row.detail['why']))}</p>"
    else:
        about = legs_row.detail["about"]
        legs = sorted(legs_row.detail["legs"], key=lambda leg: (leg["number"], _latency(leg)))
        body = "\n".join(
            [
                _head(rows, about),
                _charts(about, legs),
                _table(legs, legs_row.detail["not_measured"]),
                _reaches(result.rows),
                _method(about),
            ]
        )
    detail = json.dumps(rounded([row.to_json() for row in result.rows]), indent=1)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>s3ec bench rag</title><style>{_style()}</style></head>\n<body>\n{body}\n"
        f'<p class="soft"><small>{when}. {escape(machine_line(result.machine))}</small></p>'
        f"<details><summary>All figures as JSON</summary><pre>{escape(detail)}</pre></details>"
        "\n</body></html>\n"
    )


def _style() -> str:
    colours = {**COLOURS, **_TIER_COLOURS}
    light, dark = (
        " ".join(f"--s{series}: {pair[mode]};" for series, pair in colours.items())
        for mode in (0, 1)
    )
    rules = "".join(
        f".s{series} {{ fill: var(--s{series}); }} .l{series} {{ stroke: var(--s{series}); }}"
        for series in colours
    )
    return _STYLE.replace("LIGHT", light).replace("DARK", dark) + svg.STYLE + rules


def _head(rows: Mapping[str, Row], about: Mapping[str, Any]) -> str:
    title = "Questions over document images"
    median = rows["rag.ttft_p50_ratio"].value
    if median:
        title = (
            f"The first word of an answer comes {1 / median:.3g} times as soon when the pages' "
            "embeddings come from a bucket"
            if median < 1
            else "Here the encoder is faster than the bucket"
        )
    tiles = "".join(_tile(rows[name], words) for name, words in _TILES if rows[name].value)
    return (
        f"<h1>{escape(title)}</h1>"
        f"<p>{about['requests']} questions ({escape(str(about['workload']))}) show "
        f"{about['references']} page images, {about['pictures']} of them different. Real vLLM "
        f"engines answer them, restarted in the middle. An embedding has "
        f"{about['object_bytes'] / 1e6:.3g} MB. Encoder: {escape(about['encoder'])}.</p>"
        f'<div class="tiles">{tiles}</div>'
        '<p class="soft">Tiles: s3ec with an empty disk and a full bucket, as a share of vLLM '
        "alone, at the worst latency that was measured.</p>"
    )


def _tile(row: Row, words: str) -> str:
    reach, missed = ("ok", "") if row.ok else ("bad", ": missed")
    return (
        f'<div class="card tile"><b class="{reach}">{row.value:.0%}</b>{escape(words)}'
        f"<br><small>must be at most {Reach.parse(row.spec.reach or '').limit:.0%}{missed}</small>"
        "</div>"
    )


def _charts(about: Mapping[str, Any], legs: Sequence[Mapping[str, Any]]) -> str:
    named = [(leg["name"], leg["number"]) for leg in _middle(legs)]
    cards = [
        (
            "How long until the first token",
            "Bar: half of all requests took less. Marks: nine in ten, and 99 in a hundred.",
            svg.bars([_ttft(leg) for leg in legs], unit="s", about="time to the first token"),
            "",
        ),
        (
            "Where the embeddings came from",
            "Of all pictures shown. What the engine has in its own cache costs nothing.",
            svg.shares(
                [(leg["name"], leg["hit_ratio"]) for leg in legs],
                _TIERS,
                about="share of the pictures by where their embeddings came from",
            ),
            svg.legend([(_TIER_NAMES[tier], series) for tier, series in _TIERS.items()]),
        ),
        (
            "All requests",
            "Share of the requests that had their first token by then.",
            svg.lines(
                [_distribution(leg) for leg in _middle(legs)],
                x="s",
                y="share",
                about="distribution of the time to the first token",
                steps=True,
                log_x=True,
            ),
            svg.legend(named),
        ),
        (
            "When the bucket is further away",
            "Seconds for all questions. Those without a bucket are the same at any distance.",
            svg.lines(
                _by_latency(legs), x="ms", y="s", about="time for all questions by the latency"
            ),
            svg.legend([(one.name, one.series) for one in _by_latency(legs)]),
        ),
    ]
    if len({leg["latency_ms"] for leg in legs}) < 2:
        cards.pop()
    drawn = "".join(
        f'<section class="card"><h2>{escape(title)}</h2><p class="soft">{escape(words)}</p>'
        f"{chart}{legend}</section>"
        for title, words, chart, legend in cards
    )
    return f'<div class="charts">{drawn}</div>'


def _ttft(leg: Mapping[str, Any]) -> svg.Bar:
    times = leg["ttft_s"]
    return svg.Bar(
        leg["name"],
        leg["number"],
        times["p50"],
        f"{figure(times['p50'])} s",
        until=(times["p90"], times["p99"]),
    )


def _distribution(leg: Mapping[str, Any]) -> svg.Line:
    times = leg["all_ttft_s"]
    points = [(value, (place + 1) / len(times)) for place, value in enumerate(times)]
    return svg.Line(leg["name"], leg["number"], [(times[0], 0.0), *points])


def _middle(legs: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """One leg of each configuration: the one at the middle latency."""
    chosen = []
    for number in dict.fromkeys(leg["number"] for leg in legs):
        same = sorted((leg for leg in legs if leg["number"] == number), key=_latency)
        chosen.append(same[len(same) // 2])
    return chosen


def _latency(leg: Mapping[str, Any]) -> int:
    return int(leg["latency_ms"])


def _by_latency(legs: Sequence[Mapping[str, Any]]) -> list[svg.Line]:
    furthest = max(map(_latency, legs), default=0)
    found = []
    for number in dict.fromkeys(leg["number"] for leg in legs):
        same = sorted((leg for leg in legs if leg["number"] == number), key=_latency)
        points = [(float(leg["latency_ms"]), float(leg["seconds"])) for leg in same]
        if len(points) == 1:
            points = [(0.0, points[0][1]), (float(furthest), points[0][1])]
        found.append(svg.Line(same[0]["name"].partition(", 0 ms")[0], number, points))
    return found


def _table(legs: Sequence[Mapping[str, Any]], without: Mapping[Any, str]) -> str:
    heads = (
        *("configuration", "TTFT p50 s", "p90", "p99", "requests/s", "total s", "encodes"),
        *(
            "encode s",
            "own cache",
            "disk",
            "bucket",
            "loaded GB",
            "bucket sent GB",
            "CPU s",
            "CPU s/GB",
        ),
    )
    lines = []
    for leg in legs:
        shares = leg["hit_ratio"]
        cells = [
            *(figure(leg["ttft_s"][share]) for share in ("p50", "p90", "p99")),
            *(figure(leg[name]) for name in ("requests_per_s", "seconds", "encodes", "encode_s")),
            *(f"{shares[tier]:.0%}" for tier in ("device", "node", "bucket")),
            *(figure(leg[name] / 1e9) for name in ("loaded_bytes", "bucket_bytes")),
            *(figure(leg[name]) for name in ("cpu_s", "cpu_s_per_gb")),
        ]
        shown = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        lines.append(f"<tr><td>{escape(leg['name'])}</td>{shown}</tr>")
    lines += [
        f'<tr><td>({number})</td><td class="why" colspan="{len(heads) - 1}">{escape(why)}</td></tr>'
        for number, why in without.items()
    ]
    head = "".join(f"<th>{escape(one)}</th>" for one in heads)
    return (
        f'<section class="card scroll"><h2>All legs</h2><table><tr>{head}</tr>'
        f"{''.join(lines)}</table></section>"
    )


def _reaches(rows: Sequence[Row]) -> str:
    classes = {True: "ok", False: "bad", None: ""}
    lines = "".join(
        f"<tr><td><code>{escape(row.spec.name)}</code></td><td>{figure(row.value)}</td>"
        f'<td>{escape(row.spec.reach or "")}</td><td class="{classes[row.ok]}">'
        f'{escape(verdict(row))}</td><td class="why">{escape(remark(row))}</td></tr>'
        for row in rows
        if row.spec.reach
    )
    return (
        '<section class="card scroll" style="margin-top:1rem"><h2>What must be reached</h2><table>'
        "<tr><th>row</th><th>value</th><th>reach</th><th>ok</th>"
        f'<th style="text-align:left">what it is</th></tr>{lines}</table></section>'
    )


def _method(about: Mapping[str, Any]) -> str:
    return (
        '<section class="card" style="margin-top:1rem"><h2>How it was measured</h2><ul>'
        "<li>Bucket, disk and folder hold the same embeddings of all pictures at the start. Only "
        "the disk of (3) is empty. The mount's own cache is empty too.</li>"
        "<li>The latency is added to each request to the server, by a proxy on this machine.</li>"
        "<li>Each leg is two engines, one for each half of the questions. What a start takes is "
        "not in any time.</li>"
        f"<li>An engine's own cache holds {about['device_images']} embeddings. The cache of "
        "prefixes is off: with a small model it would hold everything.</li>"
        "<li>CPU: of the engine outside its encoder, and of rclone. Per GB loaded it holds what "
        "the words and the prefill take, which is the same in all. The server and the proxy are "
        "not in it.</li>"
        f"<li>Requests: {escape(str(about['loop']))}. Which pages a question shows is drawn at "
        "random: nobody publishes that.</li></ul></section>"
    )
