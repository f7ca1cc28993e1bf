# SPDX-License-Identifier: Apache-2.0
"""Which entries a job copies, how, and what became of them: export, import, and cp."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from s3ec.counters import Report, unreported
from s3ec.errors import ConfigError
from s3ec.store.concurrency import REQUESTS_AT_A_TIME

if TYPE_CHECKING:
    from s3ec.corpus.corpus import Corpus


@dataclass(frozen=True, slots=True)
class Selection:
    """Which entries of a namespace are meant; all of them where nothing is said.

    Attributes:
        identifiers: These: identifiers in full, or labels as ``s3ec ls`` prints them.
        where: Those in the catalogue for which this condition of SQL is true.
        adapter: Those of the LoRA adapter of this name.
    """

    identifiers: Sequence[str] | None = None
    where: str | None = None
    adapter: str | None = None

    def within(self, corpus: Corpus, namespace: str) -> Wanted:
        """Find out what that is in one namespace. The catalogue is read where it is asked.

        Raises:
            ConfigError: A list and a condition; an identifier or adapter under which nothing is
                stored; a condition that DuckDB does not take.
        """
        folder = None if self.adapter is None else corpus.adapter_folder(self.adapter)
        if self.adapter is not None and folder is None:
            raise ConfigError(
                "`adapter` is no name under which anything is stored; leave it out for all entries",
                field="adapter",
            )
        texts = self.identifiers
        if self.where is not None:
            if texts is not None:
                raise ConfigError("a list and `where` at once; give one of the two", field="where")
            rows = corpus.catalog(namespace).rows(self.where)
            texts = [row.identifier for row in rows]
        if texts is None:
            return Wanted(None, folder)
        names = {}
        for text in texts:
            # A label says which one it is also where nobody knows the identifier.
            is_label = text.rpartition(":")[2][:2] in ("x-", "t-")
            key = (is_label and corpus.key_of(text, by_name=True)) or corpus.key_of(text)
            if not key:
                raise ConfigError(
                    f"{text!r:.100} is an identifier under which nothing is stored; take it out",
                    field="identifiers",
                )
            names[key.name] = text
        return Wanted(names, folder)


@dataclass(frozen=True, slots=True)
class Wanted:
    """A Selection, by names of objects.

    Attributes:
        names: Names below ``objects/``, and how the caller calls them; None for all.
        adapter: The adapter's folder; None for all.
    """

    names: Mapping[str, str] | None = None
    adapter: str | None = None

    @property
    def is_all(self) -> bool:
        """Whether every entry is wanted."""
        return self.names is None and self.adapter is None

    def has(self, name: str) -> bool:
        """Whether an entry is wanted, by its plain name."""
        in_folder = self.adapter is None or name.startswith(f"{self.adapter}/")
        return in_folder and (self.names is None or name in self.names)


@dataclass(slots=True)
class Transferred:
    """What was copied, and what was not.

    Attributes:
        namespace: Where from; empty for vLLM's layout, which has none.
        to_namespace: Where to; empty likewise.
        copied: Entries that were written now.
        nbytes: Their size.
        by_server: Of these, copied by the server itself.
        present: Entries that were there before.
        skipped: Entries that the layout cannot hold.
        announced: Entries of which the index over there was told now.
        catalogued: Rows of the catalogue that were new over there.
        failures: What could not be copied, by label or by what the caller called it, and why.
    """

    namespace: str = ""
    to_namespace: str = ""
    copied: int = 0
    nbytes: int = 0
    by_server: int = 0
    present: int = 0
    skipped: int = 0
    announced: int = 0
    catalogued: int = 0
    failures: dict[str, str] = field(default_factory=dict)

    @property
    def status(self) -> str:
        """``complete``; ``partial``, where some could not be copied; ``failed`` if none could."""
        if not self.failures:
            return "complete"
        return "partial" if self.copied + self.present else "failed"


@dataclass(frozen=True, slots=True)
class CopyOptions:
    """How to copy.

    Attributes:
        deep: Read every byte of what is there already, and of what the server copied by itself.
        max_concurrency: Entries at a time.
        rate_limit_bytes_per_s: At most so many on average; None for no limit.
        report: Told how many entries are done.
    """

    deep: bool = False
    max_concurrency: int = REQUESTS_AT_A_TIME
    rate_limit_bytes_per_s: int | None = None
    report: Report = unreported
