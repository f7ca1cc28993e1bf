# SPDX-License-Identifier: Apache-2.0
"""The namespaces of a bucket: lists them, chooses one, and shows why two of them differ."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from s3ec.counters import Report, unreported
from s3ec.errors import AmbiguousError, ConfigError, CorruptEntryError, NotFoundError
from s3ec.identity import (
    DESCRIPTOR_BYTES,
    FORMAT_VERSION,
    Layout,
    canonical_json,
    is_namespace_name,
    is_object_name,
)
from s3ec.safetensors_file import plain_json
from s3ec.store.base import Store
from s3ec.store.concurrency import in_parallel

_SHOWN_CHOICES = 20
_ABSENT = "(not there)"
_HERE = ": here "
_VALUE_CHARACTERS = 60


@dataclass(frozen=True, slots=True)
class NamespaceInfo:
    """One namespace of a bucket: the embeddings of one model, revision, weights and so on.

    Attributes:
        name: Its folder.
        descriptor: Content of ``namespace.json``, empty if that is absent or unusable.
        stored_s: When that was written, seconds since the epoch; 0 if not known.
        indexed: Rows of the newest snapshot of the index; None if there is none, or it was not
            read. It does not count entries stored since.
        entries: Number of entries' objects; None if they were not counted.
        nbytes: Their total size; None likewise.
    """

    name: str
    descriptor: Mapping[str, Any] = field(default_factory=dict)
    stored_s: float = 0.0
    indexed: int | None = None
    entries: int | None = None
    nbytes: int | None = None

    @property
    def slug(self) -> str:
        """The readable part of the name: the same for the same model."""
        return slug_of(self.name)

    @property
    def is_newer(self) -> bool:
        """True if a newer s3ec made it, in a format that this one does not read."""
        version = self.descriptor.get("format", FORMAT_VERSION)
        # An unknown type of version is not an older format either.
        return type(version) is not int or version > FORMAT_VERSION

    @property
    def model(self) -> str:
        """The model's name, one printable line; the slug if the descriptor has none."""
        model = self.descriptor.get("model")
        # It is untrusted: a line break would forge a line wherever names are listed.
        return model if isinstance(model, str) and model.isprintable() else self.slug


def slug_of(name: str) -> str:
    """Return the readable part of a namespace's name: the same for the same model."""
    return name.rpartition("-")[0]


async def list_namespaces(store: Store) -> list[str]:
    """Return the names of the namespaces below the store's prefix, sorted; no foreign folders."""
    folders = [folder.rstrip("/") for folder in await store.list_folders("")]
    return sorted(name for name in folders if is_namespace_name(name))


async def read_namespaces(store: Store, names: Sequence[str]) -> list[NamespaceInfo]:
    """Fetch the descriptors of some namespaces, several at a time."""

    async def read(name: str) -> NamespaceInfo:
        return NamespaceInfo(name, await _read_descriptor(store, name))

    return await in_parallel(names, read)


async def _read_descriptor(store: Store, name: str) -> dict[str, Any]:
    try:
        blob = await store.get(Layout(name).descriptor, max_bytes=DESCRIPTOR_BYTES)
        content = plain_json(bytes(blob).decode("utf-8")) if blob else {}
    except (CorruptEntryError, ValueError, RecursionError):
        return {}  # the content is untrusted; the name still identifies the namespace
    return content if isinstance(content, dict) else {}


async def require_ours(store: Store, namespace: str) -> None:
    """Refuse a namespace that a newer s3ec made: we cannot read it, so we must not change it.

    Every command that writes into a namespace or deletes from it calls this first; one request.

    Raises:
        ConfigError: A newer s3ec made it.
        UnavailableError, AccessError: The store does not answer now, or refuses.
    """
    [about] = await read_namespaces(store, [namespace])
    if about.is_newer:
        raise ConfigError(
            f"{namespace} is of a newer format than this s3ec reads: nothing in it is touched; use "
            "the release that made it",
            field="namespace",
        )


async def describe_namespace(
    store: Store,
    found: NamespaceInfo,
    *,
    count: bool,
    report: Report = unreported,
    numbers: Iterator[int] | None = None,
) -> NamespaceInfo:
    """Add the facts of three more requests, and with ``count`` of a listing of all objects.

    Args:
        report: Called for each object of the listing.
        numbers: Count these objects, together with those of other namespaces.
    """
    from s3ec.index.maker import newest_rows

    layout = Layout(found.name)
    info = await store.head(layout.descriptor)
    sizes = None
    if count:
        objects = layout.objects
        sizes, numbers = [], numbers or itertools.count(1)
        async for each in store.list(objects):
            report("counting objects", next(numbers), None)
            if is_object_name(each.name.removeprefix(objects)):
                sizes.append(each.nbytes)
    return replace(
        found,
        stored_s=info.modified_s if info else 0.0,
        indexed=await newest_rows(store, layout),
        entries=None if sizes is None else len(sizes),
        nbytes=None if sizes is None else sum(sizes),
    )


# -- choosing one ---------------------------------------------------------------------------------


def as_argument(name: str, value: str | None = None) -> str:
    """Return an argument of a call in Python; with a value, as it can be pasted."""
    return f"`{name}`" if value is None else f"{name}={value!r}"


def as_option(name: str, value: str | None = None) -> str:
    """Return an option of a command line; with a value, as it can be pasted."""
    return f"--{name}" if value is None else f"--{name} {shlex.quote(value)}"


Spell: TypeAlias = Callable[[str, str | None], str]
"""How messages spell the caller's arguments: ``as_argument`` or ``as_option``."""


async def choose_namespace(
    store: Store, namespace: str | None, model: str | None, spell: Spell, *, origin: str = ""
) -> tuple[str, str]:
    """Return the namespace that fits; of several of one model, the newest that this release reads.

    The newest is the one whose ``namespace.json`` was written last: its first producer began last.

    Args:
        namespace: Its name or the start of it; None for any.
        model: Part of the model's name; None for any.
        origin: The variable that ``namespace`` comes from, if not from the caller.

    Returns:
        The name, and a note for people; no note if no other one fits.

    Raises:
        NotFoundError: The bucket has none, or none that fits.
        AmbiguousError: Several models fit, or the store has no time of any of them; the message
            lists the choices.
    """
    names = await list_namespaces(store)
    if not names:
        place = " and ".join(spell(name, None) for name in ("bucket", "prefix"))
        raise NotFoundError(f"no namespace here yet; check {place}")
    if namespace is None and model is None and len(names) == 1:
        return names[0], ""
    if namespace in names and model is None:
        return namespace, ""
    found = await read_namespaces(store, names)
    fitting = _fitting(found, namespace or "", model)
    fitting = [each for each in fitting if not each.is_newer] or fitting
    if len(fitting) == 1:
        return fitting[0].name, ""
    if not fitting:
        asked = [spell("model", model)] if model else []
        if namespace:
            asked.insert(0, f"{origin} `{namespace}`" if origin else spell("namespace", namespace))
        raise NotFoundError(
            f"no namespace fits {' and '.join(asked)}; take one of these:{_choices(found, spell)}"
        )
    models = {each.model for each in fitting}
    newest = await _newest(store, fitting) if len(models) == 1 else None
    if newest is None:
        raise AmbiguousError(
            f"{len(fitting)} namespaces fit; add one of these:{_choices(fitting, spell)}",
            field="namespace",
        )
    model_name = models.pop()
    return newest, f"taking {newest}, the newest of {len(fitting)} namespaces of {model_name}"


def _fitting(
    found: Sequence[NamespaceInfo], begin: str, model: str | None
) -> Sequence[NamespaceInfo]:
    """Return those that the arguments allow; a full name is not ambiguous."""
    left = [each for each in found if each.name == begin]
    left = left or [each for each in found if each.name.startswith(begin)]
    if model is None:
        return left
    wanted = model.casefold()
    named = [each for each in left if wanted in (each.model.casefold(), each.slug)]
    return named or [
        each for each in left if wanted in each.model.casefold() or wanted in each.slug
    ]


async def _newest(store: Store, fitting: Sequence[NamespaceInfo]) -> str | None:
    """Return the one that was made last; None if the store has no time of any."""
    infos = await in_parallel(fitting, lambda each: store.head(Layout(each.name).descriptor))
    times_s = [info.modified_s if info else 0.0 for info in infos]
    newest_s = max(times_s)
    return fitting[times_s.index(newest_s)].name if newest_s else None


def _choices(found: Sequence[NamespaceInfo], spell: Spell) -> str:
    """Return the arguments to paste, one per line: of each model, and of each namespace."""
    models = sorted({each.model for each in found})
    options = [spell("model", model) for model in models] if len(models) > 1 else []
    options += [spell("namespace", each.name) for each in found]
    more = len(options) - _SHOWN_CHOICES
    lines = options[:_SHOWN_CHOICES] + [f"and {more} more, see `s3ec ns`"] * (more > 0)
    return "".join(f"\n  {line}" for line in lines)


# -- why two of them differ ------------------------------------------------------------------------


def differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Return the differences of two descriptors, one line per fact, nested keys joined by dots."""
    here, there = _flat(ours), _flat(theirs)
    return [
        f"{key}{_HERE}{here.get(key, _ABSENT)}, there {there.get(key, _ABSENT)}"
        for key in sorted(here.keys() | there.keys())
        if here.get(key, _ABSENT) != there.get(key, _ABSENT)
    ]


@dataclass(frozen=True, slots=True)
class Neighbour:
    """How another namespace differs, which is why two fleets do not share.

    Attributes:
        name: Name of the other namespace.
        differences: One line per fact, see ``differences``; never empty.
    """

    name: str
    differences: Sequence[str]

    @property
    def only(self) -> str | None:
        """The one field in which they differ; None if there are more."""
        return self.differences[0].partition(_HERE)[0] if len(self.differences) == 1 else None


def neighbours(descriptor: Mapping[str, Any], stored: Sequence[NamespaceInfo]) -> list[Neighbour]:
    """Return stored namespaces that differ from a descriptor, fewest differences first.

    Namespaces without a usable descriptor are left out, and so is an equal one.
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
