# SPDX-License-Identifier: Apache-2.0
"""The README's table of settings, made from the settings themselves."""

from __future__ import annotations

from pydantic import ByteSize

from s3ec.settings import Settings


def settings_table() -> str:
    """The README's table of settings, Markdown."""
    rows = ["| setting | default | meaning |", "|---|---|---|"]
    for name, field in Settings.model_fields.items():
        if name == "bucket":  # or `url`, as its description says
            default = "required"
        elif field.default_factory is not None:
            default = "see right"
        elif isinstance(field.default, ByteSize):
            default = f"`{field.default.human_readable(separator='')}`"
        else:
            default = "unset" if field.default is None else f"`{field.default}`"
            default = '`""`' if field.default == "" else default
        rows.append(f"| `{name}` | {default} | {field.description} |")
    return "\n".join(rows) + "\n"
