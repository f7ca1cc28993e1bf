# SPDX-License-Identifier: Apache-2.0
"""Why two namespaces of a bucket differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from s3ec.corpus import NamespaceInfo
from s3ec.identity import canonical_json

_ABSENT = "(not there)"
_HERE = ": here "
_VALUE_CHARACTERS = 60


def differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """What differs between two descriptors, one line per fact, nested keys joined by dots."""
    here, there = _flat(ours), _flat(theirs)
    return [
        f"{key}{_HERE}{here.get(key, _ABSENT)}, there {there.get(key, _ABSENT)}"
        for key in sorted(here.keys() | there.keys())
        if here.get(key, _ABSENT) != there.get(key, _ABSENT)
    ]


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A namespace beside another one: what keeps two fleets from sharing.

    Attributes:
        name: Of the other.
        differences: One line per fact, see ``differences``; never empty.
    """

    name: str
    differences: Sequence[str]

    @property
    def only(self) -> str | None:
        """The one field in which they differ; None where there are more."""
        return self.differences[0].partition(_HERE)[0] if len(self.differences) == 1 else None


def neighbours(descriptor: Mapping[str, Any], stored: Sequence[NamespaceInfo]) -> list[Neighbour]:
    """The stored namespaces that differ from a descriptor, those with the fewest differences first.

    What has no usable descriptor is left out, and so is the one that is alike.
    """
    beside = [
        Neighbour(one.name, differences(descriptor, one.descriptor))
        for one in stored
        if one.descriptor
    ]
    return sorted((one for one in beside if one.differences), key=lambda one: len(one.differences))


def _flat(descriptor: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    facts: dict[str, str] = {}
    for key, value in descriptor.items():
        if isinstance(value, Mapping) and value:
            facts.update(_flat(value, f"{prefix}{key}."))
        else:
            text = canonical_json(value)
            cut = text if len(text) <= _VALUE_CHARACTERS else f"{text[:_VALUE_CHARACTERS]}..."
            facts[f"{prefix}{key}"] = cut
    return facts
