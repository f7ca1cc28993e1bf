# SPDX-License-Identifier: Apache-2.0
"""A line of the table of stores in docs/deployment.md, made of what the checks found."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import date

from s3ec.doctor.check import Check, Verdict

# Field of `compatibility` in --json to heading of its column. Between `date` and `failed` each
# field is the check of that name.
COLUMNS = {
    "server": "server",
    "date": "date",
    "conditional_put": "conditional PUT",
    "listing": "listing v2",
    "ranges": "ranges",
    "checksums": "checksums",
    "addressing": "addressing",
    "sse": "SSE",
    "failed": "failed",
}
_CHECKS = tuple(COLUMNS)[2:-1]
# What can fail by the store's doing; the rest is this node's or the credentials'.
_OF_THE_STORE = frozenset({"bucket", "read", "write", *_CHECKS})
# What the server calls itself is its own choice, and ends in a table.
_STRANGE = re.compile(r"[^\w .:,;/()+=-]")
_LONGEST_NAME = 60


def compatibility(
    checks: Sequence[Check], *, server: str | None, day: date
) -> dict[str, str] | None:
    """The fields of COLUMNS, None where no S3 server answered.

    Args:
        checks: Of one run of the doctor.
        server: Name and version, where a person knows them; else what the server says.
        day: When the checks ran.
    """
    outcomes = {check.name: check.outcome for check in checks}
    endpoint = outcomes.get("endpoint")
    if endpoint is None or endpoint.verdict is not Verdict.OK:
        return None
    name = _STRANGE.sub("?", server or endpoint.cell)[:_LONGEST_NAME].strip()
    fields = {"server": name or "unknown", "date": day.isoformat()}
    for check in _CHECKS:
        outcome = outcomes[check]
        untold = "not tried" if outcome.verdict is Verdict.SKIP else str(outcome.verdict)
        fields[check] = outcome.cell or untold
    failed = [check.name for check in checks if check.outcome.verdict is Verdict.FAIL]
    fields["failed"] = ", ".join(name for name in failed if name in _OF_THE_STORE) or "nothing"
    return fields


def row(cells: Sequence[str]) -> str:
    """A row of a Markdown table."""
    return f"| {' | '.join(cells)} |"
