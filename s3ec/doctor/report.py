# SPDX-License-Identifier: Apache-2.0
"""What a check says: a verdict, what was found, and how to mend it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """How a check ended; the values are those of ``s3ec doctor --json``."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    SKIP = "skip"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one check, still without its name.

    Attributes:
        verdict: ``warn`` does not stop a fleet, ``fail`` does, ``skip`` was not examined.
        found: What was seen; never a credential.
        mend: What to do about it; empty where there is nothing to do.
        cell: The same in a word or two, for the table of stores; empty where there is no more to
            say than the verdict.
    """

    verdict: Verdict
    found: str
    mend: str = ""
    cell: str = ""


@dataclass(frozen=True, slots=True)
class Check:
    """A named outcome.

    Attributes:
        name: Stable, for machines: ``bucket``, ``conditional_put``...
        outcome: What the check says.
    """

    name: str
    outcome: Outcome

    def to_json(self) -> dict[str, str]:
        """One element of ``checks`` in ``s3ec doctor --json``."""
        return {
            "name": self.name,
            "verdict": self.outcome.verdict.value,
            "found": self.outcome.found,
            "mend": self.outcome.mend,
        }


def ok(found: str, *, cell: str = "") -> Outcome:
    """All is well."""
    return Outcome(Verdict.OK, found, cell=cell)


def warn(found: str, mend: str, *, cell: str = "") -> Outcome:
    """It works, but not as well as it could."""
    return Outcome(Verdict.WARN, found, mend, cell)


def fail(found: str, mend: str, *, cell: str = "") -> Outcome:
    """It would not work."""
    return Outcome(Verdict.FAIL, found, mend, cell)


def skip(found: str, mend: str = "") -> Outcome:
    """Not examined, and why."""
    return Outcome(Verdict.SKIP, found, mend)
