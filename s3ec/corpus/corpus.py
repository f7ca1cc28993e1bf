# SPDX-License-Identifier: Apache-2.0
"""A corpus, the embeddings in one bucket: look around, read, delete and check, from any program.

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
    adapter_folder,
    find_entry,
    read_entry,
    read_header,
    scan,
)
from s3ec.counters import Report, unreported
from s3ec.errors import ConfigError, S3ECError
from s3ec.identity import Key, Layout
from s3ec.namespaces import (
    NamespaceInfo,
    describe_namespace,
    list_namespaces,
    read_namespaces,
)
from s3ec.store.base import Store
from s3ec.store.concurrency import in_parallel
from s3ec.tier.files import Folders

if TYPE_CHECKING:
    from s3ec.corpus.audit import Audit
    from s3ec.corpus.catalog import Catalog
    from s3ec.corpus.collect import Collection, Deletion
    from s3ec.corpus.exchange import Transferred
    from s3ec.corpus.hydrate import Hydration, Wanted
    from s3ec.corpus.precompute import JobOptions, PrecomputeReport
    from s3ec.corpus.repair import Repair
    from s3ec.index.local import NodeFolder
    from s3ec.settings import Settings


class Corpus(OpenBucket):
    """The embeddings of one bucket and prefix. A context manager; safe to use from any thread.

    States: open until ``close``, then closed for good. It opens no connection before the first
    call that needs one. A forked child opens a corpus of its own.

    **Which namespace.** ``namespace`` is a name or the beginning of one, ``model`` a part of a
    model's name. Without both, the variable ``S3EC_NAMESPACE`` is the namespace. If several fit
    and all are of one model, the newest is taken, and a line in the log (INFO) names it. A choice
    is made once for each corpus and kept. It costs one listing, and two requests for each namespace
    where the name is not given in full.

    **Errors** of all methods, beside those that each names: ``ConfigError``, a wrong argument;
    ``UnavailableError``, the store does not answer well now, also not in five attempts;
    ``AccessError``, it refuses: credentials, permission, no such bucket; ``NotFoundError`` and
    ``AmbiguousError``, no namespace fits, or several do. All are ``S3ECError``. An entry that is
    absent is None, not an error.

    **report**, where a method takes it, is called with what is done, how much of it, and of how
    much (None where that is not known). It is called in another thread, and must return soon.
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
        """Open the corpus that arguments and settings name. No request goes out yet.

        The places are those of the command line. An argument wins over ``settings``, those over
        ``S3EC_*`` variables, those over the file that ``S3EC_CONFIG`` names. Credentials come from
        the SDK's own chain.

        Args:
            settings: Settings by name, as in ``ec_connector_extra_config``; or a ``Settings`` that
                was loaded before, and then nothing else.
            url: A corpus outside S3, such as ``file:///FOLDER`` or ``gs://BUCKET``.
            bucket: The bucket's name, or ``s3://BUCKET/PREFIX``.
            prefix: Folder inside the bucket.
            endpoint_url: URL of an S3-compatible server; AWS if it is set nowhere.

        Raises:
            ConfigError: A setting is unknown, wrong or missing, or the profile, region or CA file
                cannot be used. The message names the field and the fix.
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
        """All namespaces, sorted by name; none where nothing was stored yet.

        Costs one listing and four requests for each of them.

        Args:
            count: Count entries and bytes too; lists every object, 1000 a request.
            report: Told how many objects were counted.
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
        """The entry of an identifier, without its header.

        Costs one small request, and a listing of a few names where the identifier is not known in
        full.

        Args:
            identifier: As vLLM spells it, a label, or 8 or more hex digits of a content hash.

        Returns:
            None where there is none, also for what is never stored.

        Raises:
            AmbiguousError: Several entries begin so; the message lists some.
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
        """What is stored under an identifier: size, age, shape, dtype and the rest of its header.

        Costs what find costs, and one request for the first 16 KiB. Its values are not read.

        Args:
            identifier: As for find; or an entry of this corpus, which needs no search.

        Returns:
            The entry with its header; None where there is none.

        Raises:
            ConfigError: Nothing is ever stored under this identifier: it is empty, longer than
                4096 bytes, not Unicode, or a counter of one process.
            CorruptEntryError: It is there, but it is not what it should be. ``reason`` says why.
            AmbiguousError: As find.
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
        """An embedding with all its bytes, each of them checked.

        Costs what find costs, and one request; of an entry of more than 8 MiB one for the header,
        and one for each 8 MiB, four at a time. Memory: the entry once.

        Args:
            identifier: As for stat.
            report: Told how many bytes of a large one have come.

        Returns:
            None where there is none.

        Raises:
            ConfigError, CorruptEntryError, AmbiguousError: As stat.
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
        starts_with: str = "",
        adapter: str | None = None,
    ) -> Iterator[CorpusEntry]:
        """The entries of one namespace, in no order, as the store lists them.

        Costs one request for each 1000 entries. Where there are more than 4096, a request for each
        of up to 256 folders comes on top, 16 at a time. What is ahead of the caller is at most some
        thousand entries.

        Args:
            starts_with: Only entries whose label begins so.
            adapter: Only entries of the LoRA adapter of this name.

        Raises:
            ConfigError: Nothing is ever stored under this adapter.
        """
        folder = adapter_folder(adapter, self.tenant)
        name = self.choose(namespace, model=model)
        return self._entries(scan(self._store, name, starts_with=starts_with, adapter=folder))

    def hydrate(
        self,
        wanted: Iterable[str | CorpusEntry | Wanted] | None = None,
        *,
        namespace: str | None = None,
        model: str | None = None,
        rate_limit_bytes_per_s: int | None = None,
        report: Report = unreported,
    ) -> Hydration:
        """Bring entries to this node's disk tier before engines ask for them, every byte checked.

        The tier is that of the settings: ``cache_dir``, ``cache_bytes`` and ``min_free_bytes``.
        Nothing that is there goes for what comes: where the tier is full, the rest is left out. An
        entry that is there already costs no request, and others cost one (one for each 4 MiB). What
        was broken off, by a signal too, leaves whole entries only, and the next call goes on.

        Args:
            wanted: Identifiers as vLLM spells them, or entries of this corpus; the most wanted
                first. None for everything, in no order.
            rate_limit_bytes_per_s: From the bucket at most, on average; None for as fast as they
                come.
            report: Told how many bytes have come.

        Returns:
            Counts, and names of what is absent or damaged or did not come.

        Raises:
            ConfigError: Nothing is ever stored under an identifier, or the rate is less than 1.
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
        """Delete entries.

        This node's engines are told. Others find out when they ask for it. Those that only encode
        do not ask: they store it again after the next listing, such as ``s3ec manifest rebuild``.
        Rows of the catalogue go with them. A node that has a copy on its disk serves it until it is
        evicted. Costs a look for each entry, 16 at a time, and one request for each 1000 objects.
        Where there is a catalogue, it is read and written.

        Args:
            identifiers: In full, as vLLM spells them; or entries, all of one namespace, which need
                not be named then.
            dry_run: Only say what would go.
            report: Told how many entries are gone.

        Returns:
            What was there, and whether it was deleted.

        Raises:
            ConfigError: An identifier under which nothing is stored, no name of an entry, or
                entries of another namespace; nothing was deleted.
            UnavailableError, AccessError: Some may be left.
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

            node = self._index_folder(layout)
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
        adapter: str | None = None,
        made_by: str | None = None,
        dry_run: bool = False,
        report: Report = unreported,
    ) -> Collection:
        """Delete entries that are old, too many or badly made; what is left becomes the index.

        Rules that are given together narrow: an entry goes where all agree. Costs a listing of
        everything, another one with ``max_bytes`` or ``made_by``, and what delete costs for what
        goes. With ``made_by`` the header of each entry is read that the other rules let
        go. The catalogue's rows of what is gone go too.

        Args:
            older_than_s: Those that were stored so long ago.
            max_bytes: The oldest, until the rest fits.
            adapter: Only those of the LoRA adapter of this name.
            made_by: Only those made with these releases, such as ``vllm=0.32.* platform=cpu``.
            dry_run: Only say what would go.
            report: Told how many objects were looked at, and how many headers were read of how
                many.

        Returns:
            How much went, or would, and how much is left.

        Raises:
            ConfigError: There is no rule, or nothing is stored under this adapter.
            UnavailableError, AccessError, TierError: As delete.
        """
        from s3ec.corpus.collect import Rules, collect_garbage, parse_made_by

        name = self.choose(namespace, model=model)
        wanted = {} if made_by is None else parse_made_by(made_by)
        rules = Rules(older_than_s, max_bytes, adapter_folder(adapter, self.tenant), wanted)
        return self.within(
            lambda store, layout: collect_garbage(
                *(store, layout, rules),
                tenant=self.tenant,
                dry_run=dry_run,
                node=self._index_folder(layout),
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

        Costs a download of the whole index and a listing of everything, 16 requests at a time; a
        deep check a download of everything too, and one more listing of all but small corpora.
        Memory: some 200 MiB; temporary files of 42 bytes for each entry. Entries that are stored or
        deleted meanwhile are not complained about.

        Args:
            catalog: Look at the catalogue as well, where there is one.
            deep: Read every object and check every byte.
            state: A folder where a deep check notes how far it is. One that was broken off, by a
                signal too, goes on there; one that was complete begins anew.
            resume_complete: Take the result of a complete one from ``state``, and read nothing.
            report: Told how far it is.

        Returns:
            What the index lacks and what it only believes (``index``); what the catalogue has that
            is gone (``catalog``); what is corrupt or could not be read (``deep``). ``agrees`` where
            there is nothing of that.

        Raises:
            ConfigError: ``state`` is that of another corpus.
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
        """Mend what verify found.

        Corrupt objects are read again and deleted where they still are, so that producers store
        them again. After that, or where the index differs, it is rebuilt from a listing. Rows of
        the catalogue whose entry is gone are dropped. What could not be read is left alone.

        Args:
            found: By verify, of the same namespace.
            report: Told how far it is.

        Raises:
            UnavailableError, AccessError: Some may be mended; it can be done again.
            TierError: The folder for temporary files is full.
        """
        from s3ec.corpus.repair import repair

        async def work(store: Store, layout: Layout) -> Repair:
            node = self._index_folder(layout)
            return await repair(store, layout, found, tenant=self.tenant, node=node, report=report)

        return self.within(work, namespace, model=model, write=True)

    # -- catalogue -----------------------------------------------------------------------------

    def catalog(self, namespace: str | None = None, *, model: str | None = None) -> Catalog:
        """The catalogue of one namespace: which document and page each embedding belongs to.

        Needs pyarrow. It knows what jobs over a corpus stored; entries that
        engines save are not in it.

        Raises:
            ConfigError: The extra is missing.
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
        """Encode all pictures, pages, sounds and films of a source that are not here yet.

        Runs vLLM as ``ec_producer`` where there is something to encode, so it needs vLLM,
        duckdb, pillow and pyarrow. What counts is confirmed by the bucket and in the catalogue. A
        second call goes on where the first one ended, and encodes nothing twice. Ctrl-C ends it
        once what is encoded is saved.

        Args:
            source: A folder, a glob, a .jsonl list, or a .pdf file.
            model: As the server's ``--model``, letter by letter.
            options: Names, shards, the engine's arguments: ``s3ec.corpus.precompute.JobOptions``.
            report: Told how many items are done.

        Returns:
            What was done. ``status`` is ``complete``, ``partial`` or ``failed``; items that could
            not be read or encoded are in ``failures``.

        Raises:
            ConfigError: The source, the model or an argument cannot work, or something is not
                installed.
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
        where: str | None = None,
        report: Report = unreported,
    ) -> Transferred:
        """Copy a namespace into a folder, every byte checked. A second call copies what is missing.

        ``url: file:///FOLDER`` serves the folder as it is.

        Args:
            folder: Made if it is absent.
            identifiers: Only these: identifiers in full, or labels as ``s3ec ls`` prints them.
            where: Only those in the catalogue for which this condition of SQL is true.
            report: Told how many entries are done.

        Returns:
            What was copied; ``failures`` says of what could not be copied why.

        Raises:
            ConfigError: The folder cannot be made, or an argument is wrong.
            NoSpaceError: Its disk is full. What was copied stays, as in all these cases.
            TierError: The folder for temporary files is full.
        """
        from s3ec.corpus.exchange import export

        return self.within(
            lambda store, layout: export(
                *(store, layout, Path(folder)),
                settings=self.settings,
                identifiers=identifiers,
                where=where,
                report=report,
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
        end the bucket is listed, so that every reader learns of what is new.

        Args:
            namespace, model: In the folder, see the class.
            report: Told how many entries are done.

        Raises:
            ConfigError: There is no such folder, or it is of a newer format.
            TierError: The folder for temporary files is full.
        """
        from s3ec.corpus.exchange import folder_settings, import_folder

        there = folder_settings(Path(folder), self.settings)
        with Corpus(there, wording=self._wording, note=self._note) as source:
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

        Nothing there says of which model it is or whether its values are what they were. You must
        know both. Width and type must be those that the namespace has on record.

        Args:
            namespace, model: Where to, see the class.
            modality: Of all files, such as ``image``.
            report: Told how many entries are done.

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

    def _index_folder(self, layout: Layout) -> NodeFolder:
        """This node's files of the index, by which its engines hear of deletions."""
        from s3ec.index.local import NodeFolder

        root = Path(os.path.realpath(self.settings.cache_dir))
        return NodeFolder.of(Folders(root), layout.namespace)

    def _key_of_one(self, one: str | CorpusEntry, argument: str) -> tuple[str, Key]:
        text = one.name if isinstance(one, CorpusEntry) else _text(one)
        key = self.key_of(text)
        if key is None:
            raise _never_stored(text, argument)
        return text, key

    def _wanted(self, one: str | CorpusEntry | Wanted) -> Wanted:
        from s3ec.corpus.hydrate import Wanted, wanted_by_name

        if isinstance(one, Wanted):
            return one
        if isinstance(one, CorpusEntry):
            return wanted_by_name(one.name, one.nbytes)
        text, key = self._key_of_one(one, "wanted")
        return Wanted(key, text) if key.identifier else wanted_by_name(key.name)

    def _entry(
        self, what: str | CorpusEntry, namespace: str | None, model: str | None
    ) -> CorpusEntry | None:
        if isinstance(what, CorpusEntry):
            return what
        if self.key_of(_text(what)) is None:
            raise _never_stored(what, "identifier")
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
            # Nobody waits: the garbage collector may come here, in any thread.
            with suppress(S3ECError):
                self._submit(end())


async def _made_s(store: Store, layout: Layout) -> float:
    """When a namespace was made, by its server: other buckets have one of its name, too."""
    info = await store.head(layout.descriptor)
    return info.modified_s if info else 0.0


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ConfigError(
            f"`identifier` is a text, not {type(value).__name__}; take vLLM's identifier, a label "
            "or an entry",
            field="identifier",
        )
    return value


def _never_stored(identifier: str, argument: str) -> ConfigError:
    return ConfigError(
        f"{identifier!r:.100} in `{argument}` is an identifier under which nothing is stored; take "
        "a content hash, or a client's own name of 1 to 4096 bytes",
        field=argument,
    )
