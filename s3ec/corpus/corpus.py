# SPDX-License-Identifier: Apache-2.0
"""A corpus: the embeddings in one bucket. Find, read, delete and check them from any program.

``s3ec.Corpus`` is the public class, and the command line uses it too. It is synchronous, and needs
neither vLLM nor torch: only the call that makes a tensor imports torch. The jobs beside this module
do the work, each a function of a store and a layout; none of them imports this module.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from s3ec.corpus.bucket import OpenBucket
from s3ec.corpus.entries import (
    CorpusEntry,
    Embedding,
    find_entry,
    read_entry,
    read_header,
    scan,
)
from s3ec.counters import Report, unreported
from s3ec.errors import ConfigError, NotFoundError, S3ECError
from s3ec.identity import Key, Layout
from s3ec.namespaces import (
    NamespaceInfo,
    describe_namespace,
    list_namespaces,
    read_namespaces,
)
from s3ec.store.base import Store
from s3ec.store.concurrency import in_parallel

if TYPE_CHECKING:
    from s3ec.corpus.audit import Audit, Repair
    from s3ec.corpus.catalog import Catalog
    from s3ec.corpus.collect import Collection, Deletion
    from s3ec.corpus.exchange import Transferred
    from s3ec.corpus.hydrate import Hydration, Wanted
    from s3ec.corpus.precompute import JobOptions, PrecomputeReport
    from s3ec.settings import Settings


class Corpus(OpenBucket):
    """The embeddings of one bucket and prefix. A context manager; safe to use from any thread.

    States: open until ``close``, then closed for good. It opens no connection before the first call
    that needs one. A forked child opens a corpus of its own.

    **Which namespace.** ``namespace`` is a name or the beginning of one, ``model`` a part of a
    model's name. Without both, the variable ``S3EC_NAMESPACE`` is the namespace. If several match
    and all belong to one model, the corpus uses the newest, and a line in the log (INFO) names it.
    A corpus chooses once and keeps its choice. The choice costs one listing, and two requests for
    each namespace if the name is not given in full.

    **Errors** of all methods, in addition to those that each names: ``ConfigError``, a wrong
    argument; ``UnavailableError``, the store gave no good answer in five attempts; ``AccessError``,
    the store refuses: credentials, permission, no such bucket; ``NotFoundError`` and
    ``AmbiguousError``, no namespace matches, or several do. All are ``S3ECError``. For an absent
    entry the result is None, not an error.

    **report**, if a method takes it, is called with the name of the step, the finished amount, and
    the total (None if unknown). It runs in another thread, and must return soon.
    """

    @classmethod
    def open(
        cls,
        settings: Settings | Mapping[str, Any] | None = None,
        *,
        url: str | None = None,
        bucket: str | None = None,
        prefix: str | None = None,
        endpoint_url: str | None = None,
    ) -> Corpus:
        """Open the corpus that arguments and settings name. This sends no request.

        Values come from the same places as on the command line. An argument overrides ``settings``,
        and ``settings`` override ``S3EC_*`` variables. Credentials come from the SDK's own chain.

        Args:
            settings: Settings by name, as in ``ec_connector_extra_config``; or a loaded
                ``Settings`` object, and then no other argument.
            url: ``s3://BUCKET/PREFIX``; or outside S3, such as ``file:///FOLDER``, ``gs://BUCKET``.
            bucket: The bucket's name.
            prefix: Folder inside the bucket.
            endpoint_url: URL of an S3-compatible server; AWS if it is set nowhere.

        Raises:
            ConfigError: A setting is unknown, wrong or missing, or the profile, region or CA file
                is unusable. The message names the field and the fix.
        """
        from s3ec.config import load_settings
        from s3ec.settings import Settings

        given = {"url": url, "bucket": bucket, "prefix": prefix, "endpoint_url": endpoint_url}
        arguments = {name: value for name, value in given.items() if value is not None}
        if not isinstance(settings, Settings):
            settings = load_settings(
                settings, origin="`settings`", options=arguments, as_arguments=True
            ).settings
        elif arguments:
            raise ConfigError(
                f"`{next(iter(arguments))}` beside loaded `settings`: give one of the two",
                field=next(iter(arguments)),
            )
        return cls(settings)

    def __enter__(self) -> Corpus:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # -- namespaces ----------------------------------------------------------------------------

    def namespaces(
        self, *, count: bool = False, report: Report = unreported
    ) -> Sequence[NamespaceInfo]:
        """Return all namespaces, sorted by name; an empty list for an empty bucket.

        Costs one listing and four requests for each namespace.

        Args:
            count: Also count entries and bytes; this lists every object, 1000 a request.
            report: Called with the number of counted objects.
        """
        numbers = itertools.count(1)

        async def look(store: Store) -> list[NamespaceInfo]:
            found = await read_namespaces(store, await list_namespaces(store))
            return await in_parallel(
                found,
                lambda one: describe_namespace(
                    store, one, count=count, report=report, numbers=numbers
                ),
            )

        return self.run(look)

    # -- entries -------------------------------------------------------------------------------

    def find(
        self, identifier: str, *, namespace: str | None = None, model: str | None = None
    ) -> CorpusEntry | None:
        """Return the entry of an identifier, without its header.

        Costs one small request, and a listing of a few names if the identifier is not given in
        full.

        Args:
            identifier: As vLLM writes it, a label, or 8 or more hex digits of a content hash.

        Returns:
            None if there is no such entry, or if the identifier can never be stored.

        Raises:
            AmbiguousError: Several entries begin with these digits; the message lists some.
        """
        name = self.choose(namespace, model=model)
        return self.run(lambda store: find_entry(store, name, identifier, self.tenant))

    def stat(
        self,
        identifier: str | CorpusEntry,
        *,
        namespace: str | None = None,
        model: str | None = None,
    ) -> CorpusEntry | None:
        """Return the entry of an identifier with its header: size, age, shape, dtype and so on.

        Costs the requests of ``find``, and one for the first 16 KiB. It does not read the values.

        Args:
            identifier: As for ``find``; or an entry of this corpus, which needs no search.

        Returns:
            The entry with its header; None if there is no such entry.

        Raises:
            ConfigError: This identifier can never be stored: it is empty, longer than 4096 bytes,
                not Unicode, or a counter of one process.
            CorruptEntryError: The entry exists, but is damaged. ``reason`` says why.
            AmbiguousError: As for ``find``.
        """
        entry = self._entry(identifier, namespace, model)
        if entry is None:
            return None
        return self.run(lambda store: read_header(store, entry))

    def get(
        self,
        identifier: str | CorpusEntry,
        *,
        namespace: str | None = None,
        model: str | None = None,
        report: Report = unreported,
    ) -> Embedding | None:
        """Return an embedding with all its bytes, after a check of each byte.

        Costs the requests of ``find``, and one more; for an entry of more than 8 MiB, one for the
        header and one for each 8 MiB, four at a time. Memory: the entry once.

        Args:
            identifier: As for ``stat``.
            report: Called with the number of received bytes of a large entry.

        Returns:
            None if there is no such entry.

        Raises:
            ConfigError, CorruptEntryError, AmbiguousError: As for ``stat``.
        """
        entry = self._entry(identifier, namespace, model)
        if entry is None:
            return None
        return self.run(lambda store: read_entry(store, entry, report))

    def list(
        self,
        namespace: str | None = None,
        *,
        model: str | None = None,
    ) -> Iterator[CorpusEntry]:
        """Yield the entries of one namespace, in no order, as the store lists them.

        Costs one request for each 1000 entries. For more than 4096 entries it sends one more
        request for each of up to 256 folders, 16 at a time. It reads at most some thousand entries
        ahead of the caller.
        """
        return self._entries(scan(self._store, self.choose(namespace, model=model)))

    def hydrate(
        self,
        wanted: Iterable[str | CorpusEntry] | None = None,
        *,
        namespace: str | None = None,
        model: str | None = None,
        rate_limit_bytes_per_s: int | None = None,
        report: Report = unreported,
    ) -> Hydration:
        """Fetch entries into this node's disk tier before engines request them, and check every
        byte.

        The tier is that of the settings: ``cache_dir``, ``cache_bytes`` and ``min_free_bytes``.
        Nothing is evicted: when the tier is full, the rest is left out. An entry that is there
        already costs no request, and each other one costs one request (one for each 8 MiB). An
        interruption, also by a signal, leaves only complete entries, and the next call resumes.

        Args:
            wanted: Identifiers as vLLM writes them, or entries of this corpus; the most important
                first. None for everything, in no order.
            rate_limit_bytes_per_s: Limit of the average rate from the bucket; None for no limit.
            report: Called with the number of received bytes.

        Returns:
            Counts, and the names of absent, damaged and left-out entries.

        Raises:
            ConfigError: An identifier can never be stored, or the rate is less than 1.
            TierError: The tier cannot be opened; the message names the fix.
        """
        from s3ec.corpus.hydrate import hydrate

        chosen = None if wanted is None else [self._wanted(one) for one in wanted]
        return self.within(
            lambda store, layout: hydrate(
                *(store, layout, chosen),
                settings=self.settings,
                loop=self._thread,
                rate_limit_bytes_per_s=rate_limit_bytes_per_s,
                report=report,
            ),
            namespace,
            model=model,
        )

    def delete(
        self,
        identifiers: str | CorpusEntry | Iterable[str | CorpusEntry],
        *,
        namespace: str | None = None,
        model: str | None = None,
        dry_run: bool = False,
        report: Report = unreported,
    ) -> Deletion:
        """Delete entries and their rows in the catalogue.

        The engines of this node are notified. Other engines get one miss for a deleted entry.
        Engines that only encode send no lookups: they store the entry again after the next listing,
        such as ``s3ec manifest rebuild``. A node with a copy on its disk serves the copy until it
        evicts it. Costs a lookup for each entry, 16 at a time, and one request for each 1000
        objects. If there is a catalogue, it is read and written.

        Args:
            identifiers: Full identifiers, as vLLM writes them; or entries, all of one namespace,
                which then need not be named.
            dry_run: Only count what would be deleted.
            report: Called with the number of deleted entries.

        Returns:
            The entries that existed, and whether they were deleted.

        Raises:
            ConfigError: An identifier can never be stored, is no name of an entry, or is an entry
                of another namespace; nothing was deleted.
            UnavailableError, AccessError: Some entries may remain.
        """
        given = (identifiers,) if isinstance(identifiers, str | CorpusEntry) else (*identifiers,)
        keys = dict(self._key_of_one(one, "identifiers") for one in given)
        places = {one.namespace for one in given if isinstance(one, CorpusEntry)}
        if places and namespace is None and model is None:
            namespace = min(places)
        name = self.choose(namespace, model=model)
        if places - {name}:
            raise ConfigError(
                f"`identifiers` holds entries of {max(places - {name})}, and `namespace` is "
                f"{name}; delete those of each namespace by themselves",
                field="namespace",
            )

        async def work(store: Store, layout: Layout) -> Deletion:
            from s3ec.corpus.collect import delete

            node = self.index_folder(layout)
            tenant = self.tenant
            return await delete(
                store, layout, keys, tenant=tenant, dry_run=dry_run, node=node, report=report
            )

        return self.within(work, name, write=True, dry_run=dry_run)

    def gc(
        self,
        namespace: str | None = None,
        *,
        model: str | None = None,
        older_than_s: float | None = None,
        max_bytes: int | None = None,
        made_by: str | None = None,
        dry_run: bool = False,
        report: Report = unreported,
    ) -> Collection:
        """Delete entries by age, total size or maker; the remaining ones become the index.

        Several rules together select only entries that match all of them. Costs a listing of
        everything, another one with ``max_bytes`` or ``made_by``, and the costs of ``delete`` for
        the deleted entries. With ``made_by`` it reads the header of each entry that the other rules
        select. The rows of deleted entries in the catalogue are deleted too.

        Args:
            older_than_s: Only entries stored longer ago than this.
            max_bytes: The oldest entries, until the rest fits into this size.
            made_by: Only entries made with these releases, such as ``vllm=0.32.* platform=cpu``.
            dry_run: Only count what would be deleted.
            report: Called with the numbers of listed objects, and of read headers and their total.

        Returns:
            How much was or would be deleted, and how much remains.

        Raises:
            ConfigError: There is no rule.
            UnavailableError, AccessError, TierError: As for ``delete``.
        """
        from s3ec.corpus.collect import Rules, collect_garbage, parse_made_by

        name = self.choose(namespace, model=model)
        wanted = {} if made_by is None else parse_made_by(made_by)
        rules = Rules(older_than_s, max_bytes, wanted)
        return self.within(
            lambda store, layout: collect_garbage(
                *(store, layout, rules),
                tenant=self.tenant,
                dry_run=dry_run,
                node=self.index_folder(layout),
                report=report,
            ),
            name,
            write=True,
            dry_run=dry_run,
        )

    def verify(
        self,
        namespace: str | None = None,
        *,
        model: str | None = None,
        catalog: bool = True,
        deep: bool = False,
        state: str | os.PathLike[str] | None = None,
        resume_complete: bool = False,
        report: Report = unreported,
    ) -> Audit:
        """Compare index, objects and catalogue with a listing of all objects; changes nothing.

        Costs a download of the whole index and a listing of everything, 16 requests at a time. A
        deep check also downloads everything, and lists all but small corpora once more. Memory:
        about 200 MiB; temporary files of 42 bytes for each entry. Entries that are stored or
        deleted during the check are ignored.

        Args:
            catalog: Also check the catalogue, if there is one.
            deep: Read every object and check every byte.
            state: Folder for the progress of a deep check. An interrupted check, also by a signal,
                resumes there; after a complete check a new one starts.
            resume_complete: Take the result of a complete check from ``state``, and read nothing.
            report: Called with the progress.

        Returns:
            Entries that are missing in the index or exist only there (``index``); rows of the
            catalogue without an entry (``catalog``); corrupt and unreadable objects (``deep``).
            ``agrees`` is True if there are none of these.

        Raises:
            TierError: The folder for temporary files, or that of ``state``, cannot be written.
        """
        from s3ec.corpus.audit import audit
        from s3ec.corpus.deep_check import AuditState

        name = self.choose(namespace, model=model)
        opened: AuditState | None = None
        if state is not None and deep:
            place = {
                "corpus": str(self.settings.corpus),
                "endpoint": self.settings.endpoint_url,
                "namespace": name,
                "made_s": self.within(_made_s, name),
            }
            opened = AuditState(state, place, again=not resume_complete)
        return self.within(
            lambda store, layout: audit(
                *(store, layout),
                tenant=self.tenant,
                catalog=catalog,
                deep=deep,
                state=opened,
                report=report,
            ),
            name,
        )

    def repair(
        self,
        found: Audit,
        namespace: str | None = None,
        *,
        model: str | None = None,
        report: Report = unreported,
    ) -> Repair:
        """Repair the faults that ``verify`` found.

        Corrupt objects are read again and deleted if they are still corrupt, so that producers
        store them again. After that, or if the index differs, the index is rebuilt from a listing.
        Rows of the catalogue without an entry are dropped. Objects that could not be read are not
        touched.

        Args:
            found: Report of ``verify`` for the same namespace.
            report: Called with the progress.

        Raises:
            UnavailableError, AccessError: A part may be repaired; call it again.
            TierError: The folder for temporary files is full.
        """
        from s3ec.corpus.audit import repair

        async def work(store: Store, layout: Layout) -> Repair:
            node = self.index_folder(layout)
            return await repair(store, layout, found, tenant=self.tenant, node=node, report=report)

        return self.within(work, namespace, model=model, write=True)

    # -- catalogue -----------------------------------------------------------------------------

    def catalog(self, namespace: str | None = None, *, model: str | None = None) -> Catalog:
        """Return the catalogue of one namespace: the document and page of each embedding.

        Needs pyarrow. The catalogue lists embeddings that jobs over a corpus stored, not those that
        engines save.

        Raises:
            ConfigError: A package is missing.
        """
        from s3ec.corpus.catalog import Catalog

        return Catalog(self, self.choose(namespace, model=model))

    # -- jobs ----------------------------------------------------------------------------------

    def precompute(
        self,
        source: str,
        *,
        model: str,
        options: JobOptions | None = None,
        report: Report = unreported,
    ) -> PrecomputeReport:
        """Encode all pictures, pages, sounds and films of a source that are missing in the corpus.

        Runs vLLM as ``ec_producer`` if there is something to encode, so it needs vLLM, pillow
        and pyarrow. An item counts as done when the bucket has confirmed it and the
        catalogue has its row. A second call resumes where the first one ended, and encodes nothing
        twice. Ctrl-C saves the finished encodes and then ends the call.

        Args:
            source: A folder, a glob, a .jsonl list, or a .pdf file.
            model: The same text as the server's ``--model``.
            options: Names, shards, the engine's arguments: ``s3ec.corpus.precompute.JobOptions``.
            report: Called with the number of finished items.

        Returns:
            The result. ``status`` is ``complete``, ``partial`` or ``failed``; ``failures`` has the
            items that could not be read or encoded.

        Raises:
            ConfigError: The source, the model or an argument cannot work, or a package is missing.
            CorruptEntryError: The catalogue is unusable.
        """
        from s3ec.corpus.precompute import make_job

        return make_job(self, source, model, options, report=report).run()

    # -- to other places -----------------------------------------------------------------------

    def export(
        self,
        folder: str | Path,
        *,
        namespace: str | None = None,
        model: str | None = None,
        identifiers: Sequence[str] | None = None,
        report: Report = unreported,
    ) -> Transferred:
        """Copy a namespace into a folder, and check every byte. A second call copies only missing
        entries.

        An engine can use the folder with ``url: file:///FOLDER``.

        Args:
            folder: Target folder; created if it is absent.
            identifiers: Only these entries: full identifiers, or labels as ``s3ec ls`` prints them.
            report: Called with the number of finished entries.

        Returns:
            The copied entries; ``failures`` has the reason for each that could not be copied.

        Raises:
            ConfigError: An argument is wrong.
            NoSpaceError: The folder's disk is full. Copied entries stay, as in all these cases.
            TierError: The folder cannot be made, or the one for temporary files is full.
        """
        from s3ec.corpus.exchange import export

        keys = None
        if identifiers is not None:
            keys = dict(self._key_of_one(one, "identifiers") for one in identifiers)
        return self.within(
            lambda store, layout: export(
                store, layout, Path(folder), settings=self.settings, keys=keys, report=report
            ),
            namespace,
            model=model,
        )

    def import_from(
        self,
        folder: str | Path,
        *,
        namespace: str | None = None,
        model: str | None = None,
        report: Report = unreported,
    ) -> Transferred:
        """Copy a namespace from a folder that ``export`` made. Nothing in the bucket is replaced.

        Every byte is checked before it is stored. Entries of other namespaces are refused. At the
        end the bucket is listed, so that every reader sees the new entries.

        Args:
            namespace, model: In the folder, see the class.
            report: Called with the number of finished entries.

        Raises:
            ConfigError: There is no such folder, or it has a newer format.
            TierError: The folder for temporary files is full.
        """
        from s3ec.corpus.exchange import folder_settings, import_folder

        there = folder_settings(Path(folder), self.settings)
        with Corpus(there, spell=self._spell, note=self._note) as source:
            if not source.namespaces():
                raise NotFoundError(
                    f"{folder} holds no namespace; name a folder that an export made"
                )
            name = source.choose(namespace, model=model)
        return self.change(
            lambda store: import_folder(
                *(Path(folder), store, Layout(name)), settings=self.settings, report=report
            ),
            name,
        )

    def import_example(
        self,
        folder: str | Path,
        *,
        namespace: str | None = None,
        model: str | None = None,
        modality: str = "image",
        report: Report = unreported,
    ) -> Transferred:
        """Copy entries from a folder in the layout of vLLM's ECExampleConnector.

        The folder names neither the model nor checksums, so the caller must know both to be right.
        Width and type must match the namespace's record.

        Args:
            namespace, model: The target, see the class.
            modality: Modality of all files, such as ``image``.
            report: Called with the number of finished entries.

        Raises:
            ConfigError: There is no such folder.
            TierError: The folder for temporary files is full.
        """
        from s3ec.corpus.exchange import import_example

        return self.within(
            lambda store, layout: import_example(
                *(Path(folder), store, layout),
                modality=modality,
                settings=self.settings,
                report=report,
            ),
            namespace,
            model=model,
            write=True,
        )

    # -- what has no method --------------------------------------------------------------------

    def _key_of_one(self, one: str | CorpusEntry, argument: str) -> tuple[str, Key]:
        text = one.name if isinstance(one, CorpusEntry) else one
        if not isinstance(text, str):
            raise ConfigError(
                f"`{argument}` is a text, not {type(text).__name__}; take vLLM's identifier, a "
                "label or an entry",
                field=argument,
            )
        key = self.key_of(text)
        if key is None:
            raise ConfigError(
                f"{text!r:.100} in `{argument}` is an identifier under which nothing is stored; "
                "take a content hash, or a client's own name of 1 to 4096 bytes",
                field=argument,
            )
        return text, key

    def _wanted(self, one: str | CorpusEntry) -> Wanted:
        from s3ec.corpus.hydrate import Wanted, wanted_entry

        if isinstance(one, CorpusEntry):
            return wanted_entry(one)
        text, key = self._key_of_one(one, "wanted")
        return Wanted(key, text)

    def _entry(
        self, what: str | CorpusEntry, namespace: str | None, model: str | None
    ) -> CorpusEntry | None:
        if isinstance(what, CorpusEntry):
            return what
        self._key_of_one(what, "identifier")
        return self.find(what, namespace=namespace, model=model)

    def _entries(
        self, batches: AsyncGenerator[Sequence[CorpusEntry], None]
    ) -> Iterator[CorpusEntry]:
        async def following(_: Store) -> Sequence[CorpusEntry] | None:
            return await anext(batches, None)

        async def end() -> None:
            await batches.aclose()

        try:
            while (batch := self.run(following)) is not None:
                yield from batch
        finally:
            # Without a wait: the garbage collector may come here, in any thread.
            with suppress(S3ECError):
                self._submit(end())


async def _made_s(store: Store, layout: Layout) -> float:
    """When a namespace was made, by its server: other buckets have one of its name, too."""
    info = await store.head(layout.descriptor)
    return info.modified_s if info else 0.0
