# SPDX-License-Identifier: Apache-2.0
"""A result as a table for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from s3ec.dev.bench.result import Result, Row

if TYPE_CHECKING:
    from rich.table import Table

_STYLES = {True: "green", False: "bold red", None: "dim"}


def figure(value: Any) -> str:
    """A number with three digits that matter; a dash for none."""
    if value is None:
        return "-"
    if value == 0:
        return "0"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def verdict(row: Row) -> str:
    """``yes``, ``NO``, or a dash where nothing was asked or measured."""
    if row.value is None or row.spec.reach is None:
        return "-"
    return "yes" if row.ok else "NO"


def table(result: Result) -> Table:
    """The rows, each followed by its cases."""
    from rich.table import Table
    from rich.text import Text

    made = Table(title=f"s3ec bench {result.bench}", title_justify="left", box=None, pad_edge=False)
    for heading, justify in (
        ("row", "left"),
        ("value", "right"),
        ("unit", "left"),
        ("reach", "left"),
        ("ok", "left"),
        ("rounds, or why not", "left"),
    ):
        made.add_column(heading, justify=justify, no_wrap=heading != "rounds, or why not")  # type: ignore[arg-type]
    for row in result.rows:
        made.add_row(
            Text(row.spec.name),
            Text(figure(row.value)),
            Text(row.spec.unit),
            Text(row.spec.reach or ""),
            Text(verdict(row), style=_STYLES[row.ok] if row.spec.reach else "dim"),
            Text(remark(row), style="dim"),
        )
        for name, value in (row.detail.get("cases") or {}).items():
            made.add_row(Text(f"  {name}", style="dim"), Text(figure(value), style="dim"))
    return made


def remark(row: Row) -> str:
    """Why there is no value, or how far the rounds lie apart, and the row's note."""
    parts = [row.detail["why"]] if row.value is None else []
    spread = row.detail.get("spread")
    if isinstance(spread, Mapping):
        parts.append(f"{figure(spread['min'])} to {figure(spread['max'])}")
    if row.detail.get("note"):
        parts.append(row.detail["note"])
    return "; ".join(parts)


def machine_line(machine: Mapping[str, Any]) -> str:
    """The machine in one line."""
    versions = ", ".join(f"{name} {value}" for name, value in machine["versions"].items())
    return (
        f"{machine['cpus']} x {machine['cpu_model']}, "
        f"{machine['memory_bytes'] / 2**30:.0f} GiB, {machine['kernel']}, "
        f"Python {machine['python']}, {versions}; load {machine['load_1min']}"
    )
