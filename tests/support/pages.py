# SPDX-License-Identifier: Apache-2.0
"""The shell blocks of README and docs/, and what a block says that it needs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
# What a block may need beyond a bucket, a model and a machine with vLLM. Its first line says so to
# people: `# needs a GPU`, `# needs an account and the internet`.
NEEDS = (
    "a cluster",
    "a GPU",
    "an account",
    "the internet",
    "the AWS CLI",
    "Docker",
    "a development checkout",
    "other machines",
)
_SAYS = re.compile(r"# needs (.+)\n")


@dataclass(frozen=True, slots=True)
class Block:
    """A shell block of a page.

    Attributes:
        page: Path below the checkout.
        line: Number of the page's line with the block's first command.
        text: Its lines.
        needs: What it says it needs; empty where it can be pasted anywhere.
    """

    page: str
    line: int
    text: str
    needs: tuple[str, ...]


def blocks(page: str) -> list[Block]:
    """All shell blocks of a page, in their order.

    Raises:
        ValueError: A first line that begins like a need says none of NEEDS.
    """
    text = (ROOT / page).read_text()
    found = []
    for match in re.finditer(r"^```bash\n(.*?)^```$", text, re.M | re.S):
        line = text.count("\n", 0, match.start(1)) + 1
        says = _SAYS.match(match[1])
        needs = tuple(re.split(r", | and ", says[1])) if says else ()
        if unknown := set(needs) - set(NEEDS):
            raise ValueError(f"{page}:{line} needs {unknown}, which is none of {NEEDS}")
        found.append(Block(page, line, match[1], needs))
    return found


def pages() -> list[str]:
    """README and the pages of docs/ that have a shell block."""
    documents = ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
    return [page for page in documents if blocks(page)]
