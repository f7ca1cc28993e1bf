# SPDX-License-Identifier: Apache-2.0
"""How ``s3ec top`` draws a frame: what answers first, then how long it took, then what is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.columns import Columns
from rich.console import Group
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from s3ec.cli.output import human_age, human_bytes, many, safe
from s3ec.cli.top_figures import OLD_SPOOL_S, STALE_INDEX_S, TIERS, TIMES, Figures, Lookups

if TYPE_CHECKING:
    from rich.console import RenderableType

_NOTHING = "-"
_GOOD, _POOR, _BAD = "green", "yellow", "bold red"
_MOST_PROBLEMS = 8
# From here on the tier evicts with each save; below, it is filling.
_FULL = 0.9
_ROWS = {
    "device": "device",
    "node": "this disk",
    "bucket": "bucket",
    "all": "not encoded",
}


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine in a frame.

    Attributes:
        url: Where its metrics are.
        state: What is to be said about it: how it cannot be reached, or that it started again.
        is_up: Whether it has answered.
        models: Names of its models.
        figures: None before it has answered.
    """

    url: str
    state: str
    is_up: bool
    models: Sequence[str]
    figures: Figures | None


def frame(
    engines: Sequence[Engine], everything: Figures | None, *, clock: str, seconds: float | None
) -> RenderableType:
    """One frame.

    Args:
        engines: All that were asked, in the order of the command line.
        everything: Those that answered, as one. None where none did.
        clock: The time of day, as it is to be shown.
        seconds: Length of the interval; None before there is one.
    """
    parts: list[RenderableType] = [_heading(engines, clock, seconds)]
    if len(engines) > 1:
        parts.append(_engines(engines))
    if everything is None:
        parts.append(Text("no engine answers", style=_BAD))
        return Group(*parts)
    if len(engines) > 1:
        parts.append(Text())
    parts += [*_problems(everything), Text(), _lookups(everything), Text()]
    # Side by side in a terminal of 80 columns, else one below the other.
    parts.append(Columns([_times(everything), _state(everything)], padding=(0, 3)))
    return Group(*parts)


def _heading(engines: Sequence[Engine], clock: str, seconds: float | None) -> RenderableType:
    line = Text("s3ec top", style="bold")
    line.append(f"  {clock}", style="default")
    line.append(f"  last {seconds:.3g} s" if seconds else "  since the start", style="dim")
    if len(engines) > 1:
        up = sum(engine.is_up for engine in engines)
        line.append(f"  {up} of {many(len(engines), 'engine')} answer, shown together below")
        return line
    (engine,) = engines
    line.append(f"  {safe(engine.url)}")
    models = ", ".join(map(safe, engine.models))
    second = Text(models, style="cyan")
    if engine.state:
        second.append(("  " if models else "") + safe(engine.state), style=_BAD)
    return Group(line, second) if second.plain else line


def _grid(*columns: str, right: Sequence[str] = ()) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", pad_edge=False)
    for name in columns:
        table.add_column(name, justify="right" if name in right else "left", no_wrap=True)
    return table


def _engines(engines: Sequence[Engine]) -> RenderableType:
    columns = ("engine", "not encoded", "hits/s", "spool", "tier")
    table = _grid(*columns, right=columns[1:])
    table.add_column("", overflow="fold")
    for engine in engines:
        name = safe(engine.url).removeprefix("http://").removesuffix("/metrics")
        found = engine.figures
        if not engine.is_up or found is None:
            state = Text(safe(engine.state), style=_BAD)
            table.add_row(Text(name), *([Text(_NOTHING, style="dim")] * 4), state)
            continue
        answered = found.lookups["all"]
        bad = found.needs_somebody or engine.state
        table.add_row(
            Text(name),
            _percent(_shown_ratio(answered)),
            _number(answered.hits_per_s),
            _number(found.spool_count),
            _percent(_share(found), good=None),
            Text(safe(engine.state) or ("see below" if bad else "ok"), _BAD if bad else _GOOD),
        )
    return Group(Text(), table)


def _lookups(found: Figures) -> RenderableType:
    columns = ("who answers", "hit ratio", "", "hits/s", "misses/s", "since start")
    table = _grid(*columns, right=("hit ratio", "hits/s", "misses/s", "since start"))
    for tier in (*TIERS, "all"):
        one = found.lookups[tier]
        ratio = _shown_ratio(one)
        style = "bold" if tier == "all" else ""
        table.add_row(
            Text(_ROWS[tier], style=style),
            _percent(ratio),
            ProgressBar(total=1.0, completed=ratio or 0.0, width=20, complete_style=_colour(ratio)),
            _number(one.hits_per_s),
            _number(one.misses_per_s),
            _percent(one.hit_ratio_since_start, good=None),
        )
    return table


def _times(found: Figures) -> RenderableType:
    table = _grid("times", "p50", "p90", "/s", right=("p50", "p90", "/s"))
    for key, name in TIMES.items():
        one = found.times[key]
        style = "dim" if one.since_start else ""
        table.add_row(
            name,
            Text(_duration(one.p50_s), style=style),
            Text(_duration(one.p90_s), style=style),
            _number(one.per_s),
        )
    return table


def _state(found: Figures) -> RenderableType:
    grid = _grid("state", "")
    spared, ran = _number(found.encoder_saved_s_per_min), _number(found.encoder_ran_s_per_min)
    grid.add_row("encoder", f"saved {spared} s/min, ran {ran}")
    fetched, saved = _bytes(found.fetched_bytes_per_s), _bytes(found.saved_bytes_per_s)
    grid.add_row("bucket", f"in {fetched}/s, out {saved}/s")
    grid.add_row("deferred", _deferred(found))
    grid.add_row("save queue", _count(found.save_queue_count))
    grid.add_row("spool", _spool(found))
    grid.add_row("breaker", _breaker(found.breakers_open))
    grid.add_row("index", _index(found))
    grid.add_row("tier", _tier(found))
    return grid


def _deferred(found: Figures) -> Text:
    if found.deferred_per_s is None:
        return Text(_NOTHING, style="dim")
    text = Text(f"{_number(found.deferred_per_s)} requests/s")
    if found.defer_timeouts_per_s:
        text.append(f", {_number(found.defer_timeouts_per_s)} in vain", style=_POOR)
    return text


def _spool(found: Figures) -> Text:
    if found.spool_count is None:
        return Text(_NOTHING, style="dim")
    text = Text(f"{found.spool_count:,.0f}")
    if found.spool_bytes:
        text.append(f", {human_bytes(found.spool_bytes)}")
    if found.spool_count and found.spool_oldest_s is not None:
        old = found.spool_oldest_s > OLD_SPOOL_S
        text.append(f", oldest {human_age(found.spool_oldest_s)}", style=_BAD if old else "")
    return text


def _breaker(breakers_open: float | None) -> Text:
    if breakers_open is None:
        return Text(_NOTHING, style="dim")
    if breakers_open:
        return Text("OPEN: bucket is not asked", style=_BAD)
    return Text("closed", style=_GOOD)


def _index(found: Figures) -> Text:
    if found.index_count is None:
        return Text(_NOTHING, style="dim")
    text = Text(f"{found.index_count:,.0f} entries")
    if found.index_age_s is not None:
        stale = found.index_age_s > STALE_INDEX_S
        text.append(f", {human_age(found.index_age_s)} old", style=_BAD if stale else "")
    return text


def _tier(found: Figures) -> RenderableType:
    share = _share(found)
    if share is None or found.tier_bytes is None or found.tier_budget_bytes is None:
        return Text(_NOTHING, style="dim")
    grid = Table.grid(padding=(0, 3))
    bar = ProgressBar(
        total=1.0,
        completed=min(1.0, share),
        width=8,
        complete_style=_POOR if share > _FULL else _GOOD,
    )
    size = f"{human_bytes(found.tier_bytes)} of {human_bytes(found.tier_budget_bytes)}"
    grid.add_row(bar, Text(size))
    return grid


def _problems(found: Figures) -> list[Text]:
    """A line for each; one that says so where there is none."""
    lines = []
    if found.breakers_open:
        lines.append(Text("the breaker is open: images are encoded, saves wait", style=_BAD))
    if (found.spool_oldest_s or 0) > OLD_SPOOL_S:
        lines.append(Text("the spool is old: the bucket confirms no saves", style=_BAD))
    if (found.index_age_s or 0) > STALE_INDEX_S:
        lines.append(Text("the index is stale: its refreshes fail", style=_BAD))
    for problem in found.problems[:_MOST_PROBLEMS]:
        if problem.lasts:
            lines.append(Text(safe(problem.what), style=_BAD))
        elif problem.recent:
            text = f"{safe(problem.what)}: {problem.count:,.0f}, {problem.recent:,.0f} of them now"
            lines.append(Text(text, style=_BAD))
        else:
            text = f"{safe(problem.what)}: {problem.count:,.0f}, none of them now"
            lines.append(Text(text, style=_POOR))
    if len(found.problems) > _MOST_PROBLEMS:
        lines.append(Text(f"and {len(found.problems) - _MOST_PROBLEMS} more", style=_POOR))
    return lines or [Text("no problems", style=_GOOD)]


# -- figures as text ---------------------------------------------------------------------------


def _shown_ratio(one: Lookups) -> float | None:
    """Of the interval; before there is one, since the start."""
    return one.hit_ratio if one.hits_per_s is not None else one.hit_ratio_since_start


def _share(found: Figures) -> float | None:
    if found.tier_bytes is None or not found.tier_budget_bytes:
        return None
    return found.tier_bytes / found.tier_budget_bytes


def _colour(ratio: float | None) -> str:
    return _GOOD if (ratio or 0) >= 0.5 else _POOR


def _percent(ratio: float | None, *, good: str | None = "") -> Text:
    if ratio is None:
        return Text(_NOTHING, style="dim")
    return Text(f"{100 * ratio:.1f} %", style=_colour(ratio) if good is not None else "")


def _number(value: float | None) -> Text:
    if value is None:
        return Text(_NOTHING, style="dim")
    return Text(f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.1f}")


def _count(value: float | None) -> Text:
    return Text(_NOTHING, style="dim") if value is None else Text(f"{value:,.0f}")


def _bytes(value: float | None) -> str:
    return _NOTHING if value is None else human_bytes(value)


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return _NOTHING
    if seconds < 0.001:
        return f"{1e6 * seconds:.0f} us"
    if seconds < 1:
        return f"{1000 * seconds:.3g} ms"
    return f"{seconds:.2f} s" if seconds < 60 else human_age(seconds)
