# SPDX-License-Identifier: Apache-2.0
"""How large the project is: ``python -m tests.size`` prints what is counted, as JSON.

* ``core_files``, ``core_lines``: Python of connector, tier, index, store and the top level.
* ``wheel_files``, ``wheel_lines``: Python that users install; ``s3ec/dev`` is not in the wheel.
* ``dev_lines``: Python of ``s3ec/dev``: benchmarks, demo and rigs.
* ``lines``: Python of each package of s3ec; ``top_level`` is its own files.
* ``test_lines``: Python below ``tests/``.
* ``settings``: fields of ``s3ec.settings.Settings``.
* ``readme_lines``: README.md.
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
CORE = ("connector", "tier", "index", "store")


def main() -> None:
    """Print all figures."""
    package = ROOT / "s3ec"
    parts = {"top_level": [*package.glob("*.py")]} | {
        folder.parent.name: [*folder.parent.rglob("*.py")]
        for folder in sorted(package.glob("*/__init__.py"))
    }
    core = [one for part in ("top_level", *CORE) for one in parts[part]]
    wheel = [one for part, files in parts.items() if part != "dev" for one in files]
    tests = [*(ROOT / "tests").rglob("*.py")]
    lines = {part: sum(map(_lines, files)) for part, files in parts.items()}
    figures = {
        "core_files": len(core),
        "core_lines": sum(map(_lines, core)),
        "wheel_files": len(wheel),
        "wheel_lines": sum(map(_lines, wheel)),
        "dev_lines": lines["dev"],
        "lines": lines,
        "test_lines": sum(map(_lines, tests)),
        "settings": settings((package / "settings.py").read_text()),
        "readme_lines": _lines(ROOT / "README.md"),
    }
    sys.stdout.write(json.dumps(figures, indent=2) + "\n")


def _lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def settings(source: str) -> int:
    """How many fields the class ``Settings`` of a file has."""
    (found,) = (
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef) and node.name == "Settings"
    )
    fields = (node.target for node in found.body if isinstance(node, ast.AnnAssign))
    return sum(isinstance(one, ast.Name) and not one.id.startswith("_") for one in fields)


if __name__ == "__main__":
    main()
