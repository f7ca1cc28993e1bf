# SPDX-License-Identifier: Apache-2.0
"""Which namespaces a bucket holds, and why two of them differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from s3ec import plain_json
from s3ec.errors import CorruptEntryError
from s3ec.identity import Layout, canonical_json, is_namespace_name
from s3ec.index.listing import in_parallel
from s3ec.store.base import Store

# Descriptors are a few kilobytes; more is not one of ours.
_DESCRIPTOR_BYTES = 256 * 1024
_ABSENT = "(not there)"
_HERE = ": here "
_VALUE_CHARACTERS = 60


@dataclass(frozen=True, slots=True)
class StoredNamespace:
    """One namespace of a bucket.

    Attributes:
        name: Its folder.
        descriptor: Content of ``namespace.json``, empty where that is absent or unusable.
    """

    name: str
    descriptor: Mapping[str, Any] = field(default_factory=dict)

    @property
    def slug(self) -> str:
        """The readable part of the name."""
        return slug_of(self.name)


def slug_of(name: str) -> str:
    """The readable part of a namespace's name: the same for the same model."""
    return name.rpartition("-")[0]


async def list_namespaces(store: Store) -> list[str]:
    """Names of the namespaces below the store's prefix, sorted; foreign folders left out."""
    folders = [folder.rstrip("/") for folder in await store.list_folders("")]
    return sorted(name for name in folders if is_namespace_name(name))


async def read_namespaces(store: Store, names: Sequence[str]) -> list[StoredNamespace]:
    """Fetch the descriptors of some namespaces, several at a time."""

    async def read(name: str) -> StoredNamespace:
        return StoredNamespace(name, await _read_descriptor(store, name))

    return await in_parallel(names, read)


async def _read_descriptor(store: Store, name: str) -> dict[str, Any]:
    try:
        blob = await store.get(Layout(name).descriptor, max_bytes=_DESCRIPTOR_BYTES)
        content = plain_json.loads(bytes(blob).decode("utf-8")) if blob else {}
    except (CorruptEntryError, ValueError, RecursionError):
        return {}  # anybody may have put anything there; the name still says what it is
    return content if isinstance(content, dict) else {}


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


def neighbours(descriptor: Mapping[str, Any], stored: Sequence[StoredNamespace]) -> list[Neighbour]:
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
