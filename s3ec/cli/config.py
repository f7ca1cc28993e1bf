# SPDX-License-Identifier: Apache-2.0
"""``s3ec config``: each setting, its value, and where the value came from."""

from __future__ import annotations

import os
from typing import Any

from s3ec.cli.options import SETTINGS, JsonOption, SettingsSource, with_options
from s3ec.cli.output import App, epilog, print_json, print_note, table

# The origin of a setting that has no value.
_MISSING = "missing"
# The SDK's own, which counts where `endpoint_url` is unset; the first that is set.
_SDK_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")


commands = App()
group = App(
    no_args_is_help=True,
    help="Show settings and their origins.",
    epilog=epilog(("s3ec config show --config @ec.json", "what would the connector use?")),
)
commands.add_typer(group, name="config")


@group.command(
    "show",
    ("S3EC_BUCKET=embeddings s3ec config show", "from the environment"),
    ('s3ec config show --config \'{"bucket": "embeddings"}\' --json', "for machines"),
)
@with_options(SETTINGS)
def show(source: SettingsSource, as_json: JsonOption = False) -> None:
    """Print the value and the origin of each setting. Credentials are not settings.

    A missing bucket is marked, and is no error here: other commands need one.
    """
    loaded = source.load(need_bucket=False)
    values = loaded.settings.model_dump(mode="json")
    shown = {name: {"value": values[name], "origin": loaded.origins[name]} for name in values}
    if not loaded.has_place:
        shown["bucket"] = {"value": None, "origin": _MISSING}
    if values["endpoint_url"] is None and values["url"] is None:
        for variable in filter(os.environ.get, _SDK_ENDPOINTS[::-1]):
            shown["endpoint_url"] = {"value": os.environ[variable], "origin": f"env {variable}"}
    if as_json:
        print_json({"settings": shown})
        return
    rows = [
        {
            "setting": name,
            "value": _human(row, getattr(loaded.settings, name)),
            "from": row["origin"],
        }
        for name, row in shown.items()
    ]
    table(rows)
    if not loaded.has_place:
        print_note("no corpus is named: set `bucket` (--bucket, S3EC_BUCKET) or `url`")


def _human(row: dict[str, Any], setting: object) -> str:
    """A value as people write it."""
    from pydantic import ByteSize

    if row["origin"] == _MISSING:
        return "-"
    if row["value"] is None:
        return "unset"
    return setting.human_readable() if isinstance(setting, ByteSize) else str(row["value"]) or '""'
