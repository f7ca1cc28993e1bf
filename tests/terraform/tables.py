# SPDX-License-Identifier: Apache-2.0
"""The tables of variables and outputs in the READMEs below ``terraform/``, made from the files.

``python -m tests.terraform.tables`` writes them anew; a test compares.
"""

from __future__ import annotations

import re
from pathlib import Path

from tests.terraform.cases import SOURCE

FOLDERS = sorted(path.parent for path in SOURCE.glob("*/*/main.tf"))
_BLOCK = re.compile(r'^(variable|output) "(\w+)" \{\n(.*?)^\}', re.MULTILINE | re.DOTALL)
_TABLES = re.compile(r"^## Variables\n.*\Z", re.MULTILINE | re.DOTALL)


def tables(folder: Path) -> str:
    """Both sections of one module's or example's README, which end it."""
    variables = [
        f"| `{name}` | {_default(body)} | {_description(body)} |"
        for name, body in _blocks(folder / "variables.tf")
    ]
    outputs = [
        f"| `{name}` | {_description(body)} |" for name, body in _blocks(folder / "outputs.tf")
    ]
    lines = [
        *("## Variables", "", "| variable | default | meaning |", "|---|---|---|", *variables, ""),
        *("## Outputs", "", "| output | meaning |", "|---|---|", *outputs),
    ]
    return "\n".join(lines) + "\n"


def with_tables(folder: Path) -> str:
    """The README of ``folder`` as it ought to be."""
    text = (folder / "README.md").read_text()
    head = _TABLES.sub("", text).rstrip("\n")
    return f"{head}\n\n{tables(folder)}"


def _blocks(path: Path) -> list[tuple[str, str]]:
    return [(name, body) for _, name, body in _BLOCK.findall(path.read_text())]


def _description(body: str) -> str:
    long = re.search(r"^  description = <<-EOT\n(.*?)^  EOT$", body, re.MULTILINE | re.DOTALL)
    if long:
        return " ".join(long.group(1).split())
    short = re.search(r'^  description = "(.*)"$', body, re.MULTILINE)
    if short is None:
        raise ValueError(f"a block without a description: {body}")
    return short.group(1).replace('\\"', '"')


def _default(body: str) -> str:
    found = re.search(r"^  default\s+= (.*)$", body, re.MULTILINE)
    if found is None:
        return "required"
    default = found.group(1)
    if default.count("{") != default.count("}") or default.count("[") != default.count("]"):
        raise ValueError(f"a default over several lines: {body}")
    return f"`{default}`"


def main() -> None:
    """Write all of them."""
    for folder in FOLDERS:
        (folder / "README.md").write_text(with_tables(folder))


if __name__ == "__main__":
    main()
