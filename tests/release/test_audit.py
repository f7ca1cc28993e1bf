# SPDX-License-Identifier: Apache-2.0
"""What ``make audit`` is told to overlook, it is told why."""

from __future__ import annotations

import re
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
# The reason behind the check's id; checkov takes a comment without one as well.
SKIP = re.compile(r"checkov:skip=(?P<check>CKV2?_[A-Z]+_\d+)(?P<reason>:.*)?")


def test_each_check_of_terraform_that_is_skipped_has_its_reason_beside_it() -> None:
    skips = [
        (path.name, skip)
        for path in (REPOSITORY / "terraform").rglob("*.tf")
        for line in path.read_text().splitlines()
        if "checkov:skip" in line and (skip := SKIP.search(line) or line)
    ]
    assert skips
    for name, skip in skips:
        assert not isinstance(skip, str), f"{name}: no check is named in {skip}"
        assert len((skip["reason"] or "").split()) > 3, f"{name}: {skip['check']} has no reason"


def test_each_check_that_is_skipped_everywhere_has_its_reason_above_it() -> None:
    lines = (REPOSITORY / ".checkov.yaml").read_text().splitlines()
    listed = lines[lines.index("skip-check:") + 1 :]
    for above, line in zip(["", *listed], listed, strict=False):
        assert line.strip().startswith(("#", "- CKV")), line
        assert line.strip().startswith("#") or above.strip().startswith("#"), line


def test_tools_with_an_environment_of_their_own_are_pinned() -> None:
    for name in ("audit", "checkov", "docs"):
        asked = (REPOSITORY / "requirements" / f"{name}.in").read_text().splitlines()
        pinned = (REPOSITORY / "requirements" / f"{name}.txt").read_text().splitlines()
        named = {line.partition("==")[0].replace("_", "-").lower() for line in pinned}
        assert {line for line in asked if not line.startswith("#")} <= named
        assert all("==" in line for line in pinned if not line.startswith("#"))
