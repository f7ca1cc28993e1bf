# SPDX-License-Identifier: Apache-2.0
"""Charts as inline SVG: colours come from the page, so they follow its dark mode.

Each is 380 units wide, which is a phone's screen: on it a unit is a pixel, and a wider place makes
everything larger. Names stand above their bars. A series has the class ``s1``, ``s2``...; ``STYLE``
has the rules for everything else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH = 380
_LEFT, _RIGHT = 6, 58
_ROW, _BAR = 38, 15
_LINES_LEFT, _LINES_HEIGHT = 44, 230
# From here on a linear axis hides the small values.
_LOG_FROM = 12.0
_LONGEST_LABEL = 52

STYLE = """
svg.chart { display: block; width: 100%; height: auto; font: 12px system-ui, sans-serif; }
svg.chart text { fill: var(--ink); } svg.chart text.soft { fill: var(--soft-ink); font-size: 11px; }
svg.chart .grid { stroke: var(--line); stroke-width: 1; }
svg.chart .tick { stroke: var(--ink); stroke-width: 1.5; }
svg.chart .range { stroke: var(--ink); stroke-width: 1; opacity: .55; }
svg.chart path { fill: none; stroke-width: 2.2; stroke-linejoin: round; }
svg.chart text.value { font-variant-numeric: tabular-nums; font-weight: 600; }
"""


@dataclass(frozen=True, slots=True)
class Bar:
    """A value with what is beside it.

    Attributes:
        name: Stands above it.
        series: Which colour.
        value: Its length.
        until: Where a thin line ends, with a mark at each; empty for none.
        label: Stands behind it.
    """

    name: str
    series: int
    value: float
    label: str
    until: Sequence[float] = ()


@dataclass(frozen=True, slots=True)
class Line:
    """Points of one series, in rising order of their first coordinates."""

    name: str
    series: int
    points: Sequence[tuple[float, float]]


def bars(rows: Sequence[Bar], *, unit: str, about: str) -> str:
    """Horizontal bars on one axis, logarithmic where they differ much.

    Args:
        rows: From top to bottom.
        unit: Of the axis.
        about: What the chart shows, for who cannot see it.
    """
    values = [value for row in rows for value in (row.value, *row.until)]
    scale = _scale(values, _LEFT, WIDTH - _RIGHT, from_zero=True)
    height = _ROW * len(rows) + 24
    parts = [
        *_vertical_grid(scale, height - 24, unit),
        *(part for place, row in enumerate(rows) for part in _bar(row, place * _ROW, scale)),
    ]
    return _chart(parts, height, about)


def _bar(row: Bar, top: float, scale: _Scale) -> list[str]:
    middle = top + 16 + _BAR / 2
    end = scale(row.value)
    parts = [
        _text(_LEFT, top + 11, row.name),
        f'<rect class="s{row.series}" x="{_LEFT}" y="{top + 16:g}" '
        f'width="{max(1.5, end - _LEFT):.1f}" height="{_BAR}" rx="2">'
        f"<title>{escape(row.name)}: {escape(row.label)}</title></rect>",
    ]
    if row.until:
        last = scale(max(row.until))
        parts.append(
            f'<line class="range" x1="{end:.1f}" x2="{last:.1f}" y1="{middle:g}" y2="{middle:g}"/>'
        )
        parts += [
            f'<line class="tick" x1="{scale(value):.1f}" x2="{scale(value):.1f}" '
            f'y1="{middle - 5:g}" y2="{middle + 5:g}"/>'
            for value in row.until
        ]
        end = max(end, last)
    return [*parts, _text(end + 5, middle + 4, row.label, "value")]


def shares(
    rows: Sequence[tuple[str, Mapping[str, float]]], kinds: Mapping[str, int], *, about: str
) -> str:
    """Horizontal bars that are cut into shares of one.

    Args:
        rows: Name and shares by kind, from top to bottom.
        kinds: Kind to its series, from left to right.
        about: What the chart shows.
    """
    parts = []
    room = WIDTH - 2 * _LEFT
    for place, (name, by_kind) in enumerate(rows):
        top = place * _ROW
        parts.append(_text(_LEFT, top + 11, name))
        left = float(_LEFT)
        for kind, series in kinds.items():
            width = room * max(0.0, by_kind.get(kind, 0.0))
            if width <= 0:
                continue
            shown = f"{by_kind[kind]:.0%}"
            parts.append(
                f'<rect class="s{series}" x="{left:.1f}" y="{top + 16:g}" width="{width:.1f}" '
                f'height="{_BAR}"><title>{escape(name)}: {escape(kind)} {shown}</title></rect>'
            )
            if width > 30:
                parts.append(
                    f'<text class="in" x="{left + width / 2:.1f}" y="{top + 27.5:g}" '
                    f'text-anchor="middle">{shown}</text>'
                )
            left += width
    return _chart(parts, _ROW * len(rows), about)


def lines(
    series: Sequence[Line], *, x: str, y: str, about: str, steps: bool = False, log_x: bool = False
) -> str:
    """Lines over one pair of axes.

    Args:
        series: Each a line.
        x: Unit of the horizontal axis; ``y`` of the other one.
        about: What the chart shows.
        steps: Whether a value holds until the next one, as in a distribution.
        log_x: Whether the horizontal axis may be logarithmic.
    """
    across = [point[0] for line in series for point in line.points]
    up = [point[1] for line in series for point in line.points]
    bottom = _LINES_HEIGHT - 34
    to_x = _scale(
        across, _LINES_LEFT, WIDTH - 14, from_zero=not log_x, log=None if log_x else False
    )
    to_y = _scale(up, bottom, 14, from_zero=True, log=None if not steps else False)
    parts = _vertical_grid(to_x, bottom, x)
    for value in to_y.ticks():
        height = to_y(value)
        parts.append(
            f'<line class="grid" x1="{_LINES_LEFT}" x2="{WIDTH - 14}" '
            f'y1="{height:.1f}" y2="{height:.1f}"/>'
        )
        parts.append(
            f'<text class="soft" x="{_LINES_LEFT - 5}" y="{height + 4:.1f}" '
            f'text-anchor="end">{_number(value)}</text>'
        )
    parts.append(_text(2, 9, y, "soft"))
    for line in series:
        parts.append(
            f'<path class="l{line.series}" d="{_path(line.points, to_x, to_y, steps=steps)}">'
            f"<title>{escape(line.name)}</title></path>"
        )
    return _chart(parts, _LINES_HEIGHT, about)


def legend(names: Sequence[tuple[str, int]]) -> str:
    """Names with the colours of their series, as HTML."""
    items = "".join(
        f'<li><svg width="12" height="12" aria-hidden="true"><rect class="s{series}" width="12" '
        f'height="12" rx="2"/></svg> {escape(name)}</li>'
        for name, series in names
    )
    return f'<ul class="legend">{items}</ul>'


def _path(points: Sequence[tuple[float, float]], to_x: _Scale, to_y: _Scale, *, steps: bool) -> str:
    words = []
    before = None
    for across, up in points:
        x, y = to_x(across), to_y(up)
        if steps and before is not None:
            words.append(f"H{x:.1f}")
        words.append(f"{'M' if before is None else 'L'}{x:.1f} {y:.1f}")
        before = y
    return "".join(words)


@dataclass(frozen=True, slots=True)
class _Scale:
    """From values to places; the logarithm of a value where ``log``."""

    low: float
    high: float
    start: float
    end: float
    log: bool

    def __call__(self, value: float) -> float:
        at = self._of(max(value, self.low) if self.log else value)
        low, high = self._of(self.low), self._of(self.high)
        return self.start + (at - low) / (high - low) * (self.end - self.start)

    @property
    def _of(self) -> Callable[[float], float]:
        return math.log10 if self.log else float

    def ticks(self) -> list[float]:
        """Round values within it."""
        if self.log:
            decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            whole = self._within(10.0**power for power in decades)
            if len(whole) > 2:
                return whole
            return self._within(first * 10.0**power for power in decades for first in (1, 2, 5))
        step = 10.0 ** math.floor(math.log10(self.high / 3))
        step *= next(more for more in (1, 2, 5, 10) if self.high / (step * more) <= 4.5)
        return [step * number for number in range(math.floor(self.high / step + 1e-9) + 1)]

    def _within(self, values: Iterable[float]) -> list[float]:
        return [value for value in values if self.low <= value <= self.high * 1.0001]


def _scale(
    values: Sequence[float], start: float, end: float, *, from_zero: bool, log: bool | None = None
) -> _Scale:
    positive = [value for value in values if value > 0]
    high = max(positive, default=1.0)
    low = min(positive, default=1.0)
    logarithmic = log if log is not None else high > _LOG_FROM * low
    if logarithmic:
        return _Scale(low / 1.6 if from_zero else low, high, start, end, log=True)
    return _Scale(0.0, high, start, end, log=False)


def _vertical_grid(scale: _Scale, height: float, unit: str) -> list[str]:
    parts = []
    ticks = scale.ticks()
    for number, value in enumerate(ticks):
        x = scale(value)
        shown = _number(value) + (f" {unit}" if number == len(ticks) - 1 else "")
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{height:g}"/>')
        anchor = "end" if x > WIDTH - 60 else "middle" if x > 20 else "start"
        parts.append(
            f'<text class="soft" x="{x:.1f}" y="{height + 15:g}" text-anchor="{anchor}">'
            f"{escape(shown)}</text>"
        )
    return parts


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _text(x: float, y: float, words: str, kind: str = "") -> str:
    shown = words if len(words) <= _LONGEST_LABEL else words[: _LONGEST_LABEL - 1] + "\u2026"
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(shown)}</text>'


def _chart(parts: Sequence[str], height: float, about: str) -> str:
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {height:g}" role="img" '
        f'aria-label="{escape(about)}">{"".join(parts)}</svg>'
    )
