# SPDX-License-Identifier: Apache-2.0
"""Everything that an installed distribution brings, and who asks for which versions of it.

As a program it prints the pins of what a release of s3ec brings, for `make audit`.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

Closure = dict[str, list[tuple[str, Requirement]]]
"""Canonical name to who asks for it, and how."""


def requirements_of(name: str, extras: frozenset[str] = frozenset()) -> list[Requirement]:
    """What a distribution asks for on this machine; nothing where it is not installed."""
    try:
        lines = distribution(name).requires or []
    except PackageNotFoundError:
        return []
    return [
        one
        for one in map(Requirement, lines)
        if one.marker is None or any(one.marker.evaluate({"extra": e}) for e in extras or {""})
    ]


def closure_of(name: str, *extras: str) -> Closure:
    """All that a distribution brings, itself left out."""
    found: Closure = {}
    todo = [(name, frozenset(extras))]
    done = set()
    while todo:
        one = todo.pop()
        if one in done:
            continue
        done.add(one)
        for asked in requirements_of(*one):
            found.setdefault(canonicalize_name(asked.name), []).append((one[0], asked))
            todo.append((canonicalize_name(asked.name), frozenset(asked.extras)))
    return found


if __name__ == "__main__":
    for brought in sorted(closure_of("s3ec")):
        print(f"{brought}=={distribution(brought).version}")
