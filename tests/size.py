# SPDX-License-Identifier: Apache-2.0
"""How large the project is: ``python -m tests.size`` prints what is counted, as JSON.

* ``core_files``, ``core_lines``: Python of connector, tier, index, store and the top level.
* ``wheel_files``, ``wheel_lines``: Python that users install; ``s3ec/dev`` is not in the wheel.
* ``test_lines``: Python below ``tests/``.
* ``reach_ins``: how often tests touch what is private: an attribute that begins with one
  underscore, of anything but ``self``, ``cls``, ``os`` and ``sys``; ``monkeypatch.setattr`` of
  such a name; an import of one.
* ``readme_lines``: README.md.

How many files a hit and a save pass is counted by ``python -m tests.trips``.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
CORE = ("connector", "tier", "index", "store")
_PUBLIC_PARENTS = {"self", "cls", "os", "sys"}
# Of named tuples: public, whatever they look like.
_PUBLIC_NAMES = {"_replace", "_asdict"}


def main() -> None:
    """Print all figures."""
    package = ROOT / "s3ec"
    core = [*package.glob("*.py")] + [
        one for part in CORE for one in (package / part).rglob("*.py")
    ]
    wheel = [one for one in package.rglob("*.py") if package / "dev" not in one.parents]
    tests = [*(ROOT / "tests").rglob("*.py")]
    figures = {
        "core_files": len(core),
        "core_lines": sum(map(_lines, core)),
        "wheel_files": len(wheel),
        "wheel_lines": sum(map(_lines, wheel)),
        "test_lines": sum(map(_lines, tests)),
        "reach_ins": sum(sum(1 for _ in reach_ins(one.read_text())) for one in tests),
        "readme_lines": _lines(ROOT / "README.md"),
    }
    sys.stdout.write(json.dumps(figures, indent=2) + "\n")


def _lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def reach_ins(source: str) -> Iterator[str]:
    """The private names that a file of tests touches, one for each time."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and _is_private(node.attr):
            if not (isinstance(node.value, ast.Name) and node.value.id in _PUBLIC_PARENTS):
                yield node.attr
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("s3ec"):
            yield from (alias.name for alias in node.names if _is_private(alias.name))
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "setattr"
            and len(node.args) > 1
            and isinstance(node.args[1], ast.Constant)
        ):
            name = str(node.args[1].value)
            if _is_private(name.rsplit(".", maxsplit=1)[-1]):
                yield name


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in _PUBLIC_NAMES


if __name__ == "__main__":
    main()
