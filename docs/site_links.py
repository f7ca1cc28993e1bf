# SPDX-License-Identifier: Apache-2.0
"""mkdocs hook: links that leave docs/ work in a checkout; this makes them work on the site too.

The pages below OUTSIDE become pages of the site. A link to any other file of the repository
becomes plain text, since the site does not hold that file.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

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


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that lie outside docs/."""
    from mkdocs.structure.files import File

    for name in OUTSIDE:
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Turn the links of one page into those of the site."""
    return rewritten(markdown, page.file.src_uri, {one.src_uri for one in files})
