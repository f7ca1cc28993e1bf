# SPDX-License-Identifier: Apache-2.0
"""``s3ec config``: each setting, its value, and where the value came from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from s3ec.cli.help import epilog
from s3ec.cli.options import JsonOption, Source, reporting, with_settings
from s3ec.cli.output import console, print_json

if TYPE_CHECKING:
    from s3ec.config import Loaded


def register(app: typer.Typer) -> None:
    """Add ``config`` to the tree."""
    group = typer.Typer(
        no_args_is_help=True,
        help="Show settings and where they come from.",
        epilog=epilog(
            ("s3ec config show --config @ec.json", "what would the connector use?"),
            ("s3ec config docs > settings.md", "the table of all settings"),
        ),
    )
    group.command(
        "show",
        epilog=epilog(
            ("S3EC_BUCKET=embeddings s3ec config show", "from the environment"),
            ('s3ec config show --config \'{"bucket": "embeddings"}\' --json', "for machines"),
        ),
    )(with_settings(show))
    group.command(
        "docs", epilog=epilog(("s3ec config docs > settings.md", "keep it beside your notes"))
    )(reporting(docs))
    app.add_typer(group, name="config")


def show(source: Source, as_json: JsonOption = False) -> None:
    """Print the value and the origin of each setting. Credentials are not settings."""
    from s3ec.store.open import choose_transport

    loaded = source.load()
    if as_json:
        values = loaded.settings.model_dump(mode="json")
        shown = {name: {"value": values[name], "origin": loaded.origins[name]} for name in values}
        shown["transport"]["chosen"] = choose_transport(loaded.settings).name
        print_json(shown)
    else:
        _print_table(loaded)


def _print_table(loaded: Loaded) -> None:
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
        table.add_row(*(Text(cell, style=style) for cell in (name, value, origin)))
    console().print(table)


def _human(value: Any) -> str:
    from pydantic import ByteSize

    if value is None:
        return "unset"
    return value.human_readable() if isinstance(value, ByteSize) else str(value) or '""'


def docs() -> None:
    """Print the table of all settings as Markdown."""
    from s3ec.settings_table import settings_table

    typer.echo(settings_table(), nl=False)
