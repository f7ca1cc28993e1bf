# SPDX-License-Identifier: Apache-2.0
"""The pages of the site: links that leave docs/ work in a checkout, and here on the site too.

The pages below OUTSIDE become pages of the site. A link to any other file of the repository
becomes plain text, since the site does not hold that file.
"""

from __future__ import annotations

import posixpath
import re
import shutil
import sys
from collections.abc import Collection
from pathlib import Path

ROOT = Path(__file__).parents[1]
OUTSIDE = (
    "ARCHITECTURE.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "examples/epd/README.md",
    "examples/kubernetes/README.md",
    "examples/compose/README.md",
    "examples/observability/README.md",
    "examples/rag/README.md",
    "terraform/README.md",
    "tests/faults/README.md",
)
_LINK = re.compile(r"\[([^\]]+)\]\((?!https?:|#)([^)#\s]+)(#[^)]*)?\)")


def rewritten(text: str, page: str, pages: Collection[str]) -> str:
    """Markdown of one page with the site's links.

    Args:
        page: Its path on the site: below docs/, or below the root for those of OUTSIDE.
        pages: All paths on the site.
    """
    source = page if page in OUTSIDE else f"docs/{page}"

    def link(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), found[2]))
        target = target.removeprefix("docs/")
        if target not in pages:
            return found[1]
        relative = posixpath.relpath(target, posixpath.dirname(page) or ".")
        return f"[{found[1]}]({relative}{found[3] or ''})"

    return _LINK.sub(link, text)


def main(folder: Path) -> None:
    """Write all pages, and the pictures of docs/, to a folder that a site is built from."""
    shutil.rmtree(folder, ignore_errors=True)
    here = ROOT / "docs"
    sources = {
        path.name: path for path in here.iterdir() if path.suffix != ".py" and path.is_file()
    }
    sources |= {name: ROOT / name for name in OUTSIDE}
    for name, source in sources.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if source.suffix == ".md":
            (folder / name).write_text(rewritten(source.read_text(), name, sources))
        else:
            shutil.copyfile(source, folder / name)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
