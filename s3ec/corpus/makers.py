# SPDX-License-Identifier: Apache-2.0
"""What entries were made with, to find all that a faulty release stored: their headers say it."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import AsyncIterable, Callable, Mapping, Sequence
from dataclasses import dataclass

from s3ec.codec import MADE_BY_CHARACTERS
from s3ec.corpus.entries import CorpusEntry, read_header
from s3ec.counters import Report, unreported
from s3ec.errors import ConfigError, CorruptEntryError
from s3ec.store.base import Store
from s3ec.store.concurrency import in_parallel

_WORD = re.compile(r"([a-z]+)=([!-~]+)")
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


async def names_made_by(
    store: Store,
    wanted: MadeBy,
    entries: AsyncIterable[Sequence[CorpusEntry]],
    *,
    headers: Callable[[int], object],
    report: Report = unreported,
) -> set[str]:
    """The objects of those entries that were made so, by one request each.

    Memory: some 500 bytes for each entry.

    Args:
        headers: Told how many headers will be read, before the first one is.
        report: Told how many were.

    Raises:
        UnavailableError, AccessError: The store does not answer now, or refuses.
    """
    every = [entry async for some in entries for entry in some]
    headers(len(every))
    chosen: set[str] = set()
    for start in range(0, len(every), _AT_A_TIME):
        group = every[start : start + _AT_A_TIME]
        found = await in_parallel(group, lambda entry: _read_maker(store, entry))
        pairs = zip(group, found, strict=True)
        chosen.update(entry.object_name for entry, said in pairs if wanted.fits(said))
        report("reading headers", start + len(group), len(every))
    return chosen


async def _read_maker(store: Store, entry: CorpusEntry) -> str:
    """What an entry says; empty where it is gone, has no usable header, or does not say."""
    try:
        found = await read_header(store, entry)
    except CorruptEntryError:
        return ""
    return found.header.maker.made_by if found and found.header else ""
