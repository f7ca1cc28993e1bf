# SPDX-License-Identifier: Apache-2.0
"""``s3ec config``: each setting, its value, and where the value came from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from s3ec.cli.options import JsonOption, SettingsSource, with_settings
from s3ec.cli.output import App, console, epilog, print_json, print_note

if TYPE_CHECKING:
    from s3ec.config import LoadedSettings

# The origin of a setting that has no value.
_MISSING = "missing"


def register(app: App) -> None:
    """Add ``config`` to the tree."""
    group = App(
        no_args_is_help=True,
        help="Show settings and where they come from.",
        epilog=epilog(
            ("s3ec config show --config @ec.json", "what would the connector use?"),
            ("s3ec config docs > settings.md", "the table of all settings"),
        ),
    )
    group.command(
        "show",
        ("S3EC_BUCKET=embeddings s3ec config show", "from the environment"),
        ('s3ec config show --config \'{"bucket": "embeddings"}\' --json', "for machines"),
    )(with_settings(show))
    group.command("docs", ("s3ec config docs > settings.md", "keep it beside your notes"))(docs)
    app.add_typer(group, name="config")


def show(source: SettingsSource, as_json: JsonOption = False) -> None:
    """Print the value and the origin of each setting. Credentials are not settings.

    A bucket that is missing is marked so, and no error here: other commands need one.
    """
    from s3ec.store.open import choose_transport

    loaded = source.load(need_bucket=False)
    if as_json:
        values = loaded.settings.model_dump(mode="json")
        shown = {name: {"value": values[name], "origin": loaded.origins[name]} for name in values}
        shown["transport"]["chosen"] = choose_transport(loaded.settings).name
        if not loaded.has_place:
            shown["bucket"] = {"value": None, "origin": _MISSING}
        print_json({"settings": shown})
    else:
        _print_table(loaded)
        if not loaded.has_place:
            print_note("no corpus is named: set `bucket` (--bucket, S3EC_BUCKET) or `url`")


def _print_table(loaded: LoadedSettings) -> None:
    from rich.table import Table
    from rich.text import Text

    from s3ec.store.open import choose_transport

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for title in ("setting", "value", "from"):
        table.add_column(title, overflow="fold")
    for name, origin in loaded.origins.items():
        style = "dim" if origin == "default" else ""
        value = _human(getattr(loaded.settings, name))
        if value == "auto" and name == "transport":
            value += f" ({choose_transport(loaded.settings).name})"
        cells = (name, value, origin)
        if name == "bucket" and not loaded.has_place:
            cells, style = (name, "-", _MISSING), "bold red"
        table.add_row(*(Text(cell, style=style) for cell in cells))
    console().print(table)


def _human(value: Any) -> str:
    from pydantic import ByteSize

    if value is None:
        return "unset"
    return value.human_readable() if isinstance(value, ByteSize) else str(value) or '""'


def docs() -> None:
    """Print the table of all settings as Markdown."""
    from s3ec.settings import settings_table

    typer.echo(settings_table(), nl=False)
