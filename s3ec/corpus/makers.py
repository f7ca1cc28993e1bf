# SPDX-License-Identifier: Apache-2.0
"""What entries were made with, to find all that a faulty release stored.

The catalogue tells, where it has a row of an entry as it lies there now. Else the entry's header
does, by one request each, and who asks is told how many that are before the first one.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import AsyncIterable, Callable, Mapping, Sequence
from dataclasses import dataclass

from s3ec.codec import MADE_BY_CHARACTERS
from s3ec.corpus.entries import CorpusEntry, read_header
from s3ec.counters import Report, unreported
from s3ec.errors import ConfigError, CorruptEntryError
from s3ec.identity import Layout, make_key
from s3ec.store.base import Store
from s3ec.store.concurrency import in_parallel
from s3ec.tenant import Tenant

_WORD = re.compile(r"([a-z]+)=([!-~]+)")
# A row says when its job saw the entry, by the job's clock. What is so much younger was stored
# again since, and perhaps by another release.
_CLOCKS_S = 300.0
_AT_A_TIME = 1000


@dataclass(frozen=True, slots=True)
class MadeBy:
    """Which entries are meant, by what they were made with.

    Attributes:
        words: Name to pattern, such as ``{"vllm": "0.32.*"}``. All must fit.
    """

    words: Mapping[str, str]

    @classmethod
    def parse(cls, text: str) -> MadeBy:
        """Read names and versions with spaces or commas between them, such as ``vllm=0.32.*``.

        Raises:
            ConfigError: It is something else.
        """
        words = [_WORD.fullmatch(word) for word in re.split(r"[ ,]+", text.strip(" ,"))]
        if len(text) > MADE_BY_CHARACTERS or not all(words):
            raise ConfigError(
                f"{text!r:.100} is no list of names and versions; write `--made-by` as "
                "vllm=0.32.0, or 'vllm=0.32.* platform=NVIDIA*'",
                field="made_by",
            )
        return cls({word[1]: word[2] for word in words if word is not None})

    def fits(self, made_by: str) -> bool:
        """Whether an entry that says this is meant. One that says nothing is not."""
        said = dict(word.partition("=")[::2] for word in made_by.split(" "))
        return all(
            fnmatch.fnmatchcase(said.get(name, ""), pattern) and name in said
            for name, pattern in self.words.items()
        )


class Makers:
    """What the catalogue tells, and headers."""

    def __init__(self, told: Mapping[str, tuple[str, float]]) -> None:
        """Use ``open_makers``.

        Args:
            told: Name of an entry's object, below ``objects/``, to what made it and to when that
                was seen, seconds since the epoch.
        """
        self._told = told

    def told(self, entry: CorpusEntry) -> str | None:
        """What the catalogue says; None where only the header tells."""
        made_by, seen_s = self._told.get(entry.name, ("", 0.0))
        return None if not made_by or entry.modified_s > seen_s + _CLOCKS_S else made_by


async def open_makers(store: Store, layout: Layout, tenant: Tenant | None) -> Makers:
    """Read the catalogue, if there is one; a listing where there is none.

    Memory: as read_table, and some 300 bytes for each of its embeddings.

    Raises:
        ConfigError: There is a catalogue, and the extra is missing.
        CorruptEntryError: None of its parts can be used.
        UnavailableError, AccessError: The store does not answer now, or refuses.
    """
    from s3ec.corpus.catalog import list_parts, read_table

    if not await list_parts(store, layout):
        return Makers({})
    import pyarrow as pa

    table = await read_table(store, layout)
    seen = table.column("time").cast(pa.int64())
    told: dict[str, tuple[str, float]] = {}
    makers: dict[str, str] = {}  # each of a few texts once
    columns = (table.column("identifier"), table.column("made_by"), seen)
    for batch in zip(*(column.chunks for column in columns), strict=True):
        for identifier, made_by, at_us in zip(*(part.to_pylist() for part in batch), strict=True):
            key = make_key(identifier, tenant)
            if key is not None and told.get(key.name, ("", 0.0))[1] <= at_us / 1e6:
                told[key.name] = (makers.setdefault(made_by, made_by), at_us / 1e6)
    return Makers(told)


async def names_made_by(
    store: Store,
    wanted: MadeBy,
    makers: Makers,
    entries: AsyncIterable[Sequence[CorpusEntry]],
    *,
    headers: Callable[[int], object],
    report: Report = unreported,
) -> set[str]:
    """The objects of those entries that were made so.

    Memory: some 500 bytes for each entry of which the catalogue does not tell.

    Args:
        headers: Told how many headers will be read, before the first one is.
        report: Told how many were.

    Raises:
        UnavailableError, AccessError: The store does not answer now, or refuses.
    """
    chosen: set[str] = set()
    untold: list[CorpusEntry] = []
    async for some in entries:
        for entry in some:
            said = makers.told(entry)
            if said is None:
                untold.append(entry)
            elif wanted.fits(said):
                chosen.add(entry.object_name)
    headers(len(untold))
    for start in range(0, len(untold), _AT_A_TIME):
        group = untold[start : start + _AT_A_TIME]
        found = await in_parallel(group, lambda entry: _read_maker(store, entry))
        pairs = zip(group, found, strict=True)
        chosen.update(entry.object_name for entry, said in pairs if wanted.fits(said))
        report("reading headers", start + len(group), len(untold))
    return chosen


async def _read_maker(store: Store, entry: CorpusEntry) -> str:
    """What an entry says; empty where it is gone, has no usable header, or does not say."""
    try:
        found = await read_header(store, entry)
    except CorruptEntryError:
        return ""
    return found.header.maker.made_by if found and found.header else ""
