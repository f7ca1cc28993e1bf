# SPDX-License-Identifier: Apache-2.0
"""What is asked of ``s3ec.Corpus``, on any store: in memory here, on a real server in contract."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from s3ec.corpus import Corpus
from s3ec.errors import AmbiguousError, ConfigError, CorruptEntryError, NotFoundError
from s3ec.identity import Namespace
from s3ec.store.base import Store
from tests.unit.cli.corpus import MODEL, OTHER, Entries, content_hash, entry_bytes

FOREIGN = {"model": "other/reader-2b", "dtype": "bfloat16"}
IDS = [content_hash("a"), content_hash("b"), f"my-lora:{content_hash('a')}", "page 12 of a report"]


@dataclass
class Bucket(Entries):
    """A bucket that tests fill past the API, through the store of an open corpus."""

    corpus: Corpus

    def put(self, name: str, body: bytes) -> None:
        async def work(store: Store) -> None:
            await store.put_if_absent(name, [body])

        self.corpus.run(work)


@dataclass
class Filled(Bucket):
    """One namespace with one entry for each of IDS."""

    name: str = ""

    def __post_init__(self) -> None:
        self.name = self.namespace(MODEL)
        for identifier in IDS:
            self.entry(self.name, identifier)


class CorpusSuite:
    """Every test gets ``filled``, which a subclass's fixture makes of a corpus."""

    def test_namespaces_say_what_they_are_of(self, filled: Filled) -> None:
        (found,) = filled.corpus.namespaces(count=True)
        assert (found.name, found.model, found.slug) == (filled.name, MODEL["model"], found.slug)
        assert found.descriptor["revision"] == "r1"
        assert (found.entries, found.indexed) == (4, None)
        assert found.nbytes == sum(len(entry_bytes(one, filled.name)) for one in IDS)
        assert found.stored_s > 0
        assert filled.corpus.namespaces()[0].entries is None

    @pytest.mark.parametrize("identifier", IDS)
    def test_entry_is_found_and_read(self, filled: Filled, identifier: str) -> None:
        corpus, blob = filled.corpus, entry_bytes(identifier, filled.name)
        entry = corpus.stat(identifier)
        assert entry is not None
        assert entry.header is not None
        assert entry.identifier == entry.header.identifier == identifier
        assert (entry.namespace, entry.nbytes) == (filled.name, len(blob))
        assert (entry.header.shape.rows, entry.header.shape.width) == (4, 8)
        assert corpus.stat(entry.label) == entry
        embedding = corpus.get(identifier)
        assert embedding is not None
        assert (embedding.shape, embedding.dtype) == ((4, 8), "bfloat16")
        assert embedding.file == blob
        assert embedding.data == blob[-64:]
        assert embedding.file.readonly

    def test_what_is_absent_is_none(self, filled: Filled) -> None:
        absent = content_hash("nothing")
        assert filled.corpus.find(absent) is None
        assert filled.corpus.stat(absent) is None
        assert filled.corpus.stat("page 13") is None
        assert filled.corpus.get(absent) is None
        assert filled.corpus.get(absent[:8]) is None
        found = filled.corpus.delete([absent, IDS[0]], dry_run=True)
        assert (found.absent, found.count, found.done) == ([absent], 1, False)

    def test_list_has_every_entry_once_and_can_be_left_early(self, filled: Filled) -> None:
        corpus = filled.corpus
        labels = {entry.label for entry in corpus.list()}
        assert len(labels) == len(list(corpus.list())) == len(IDS)
        assert {entry.identifier for entry in corpus.list(filled.name)} == {*IDS[:3], None}
        for entry in corpus.list():
            assert corpus.get(entry) is not None
            break

    def test_delete_removes_objects(self, filled: Filled) -> None:
        corpus = filled.corpus
        before = corpus.verify()
        assert (before.index.objects, before.index.entries, before.agrees) == (4, 0, True)
        tried = corpus.delete(IDS[:2], dry_run=True)
        assert corpus.stat(IDS[0]) is not None
        done = corpus.delete(IDS[:2])
        assert tried.objects == done.objects
        assert (done.count, done.absent, done.done) == (2, [], True)
        assert done.nbytes == 2 * len(entry_bytes(IDS[0], filled.name))
        assert corpus.get(IDS[0]) is None
        entry = corpus.find(IDS[2])
        assert entry is not None
        assert corpus.delete(entry).count == 1
        assert corpus.delete("page 12 of a report").count == 1
        assert corpus.delete(IDS).absent == IDS
        assert list(corpus.list()) == []
        assert corpus.verify().index.objects == 0

    def test_deep_verify_finds_what_is_corrupt_and_repair_mends_it(
        self, filled: Filled, tmp_path: Path
    ) -> None:
        corpus = filled.corpus
        corpus.delete(IDS[0])
        filled.entry(filled.name, IDS[0], entry_bytes(IDS[1], filled.name))
        assert corpus.verify().agrees
        found = corpus.verify(deep=True, state=tmp_path)
        assert found.deep is not None
        assert [bad.reason for bad in found.deep.bad] == ["identifier"]
        assert (found.deep.objects, found.deep.unread, found.agrees) == (4, 0, False)
        done = corpus.repair(found)
        assert (done.deleted, done.spared) == (1, 0)
        assert corpus.find(IDS[0]) is None
        assert corpus.verify(deep=True, state=tmp_path).agrees

    def test_gc_takes_what_the_rules_say_and_no_more(self, filled: Filled) -> None:
        corpus = filled.corpus
        nbytes = sum(entry.nbytes for entry in corpus.list())
        assert corpus.gc(older_than_s=3600.0).objects == 0
        tried = corpus.gc(max_bytes=0, dry_run=True)
        assert (tried.objects, tried.left_objects, tried.done) == (4, 0, False)
        done = corpus.gc(max_bytes=nbytes - 1)
        assert (done.objects, done.left_objects, done.done) == (1, 3, True)
        assert len(list(corpus.list())) == 3
        assert corpus.gc(max_bytes=0).objects == 3
        assert corpus.verify().index.objects == 0
        with pytest.raises(ConfigError, match="nothing says what is to go"):
            corpus.gc()

    def test_entries_are_deleted_where_they_were_listed_and_nowhere_else(
        self, filled: Filled
    ) -> None:
        corpus, newer = filled.corpus, filled.namespace(OTHER)
        for identifier in IDS:
            filled.entry(newer, identifier)
        found = list(corpus.list(filled.name))
        for asked in ({"namespace": newer}, {"namespace": filled.name}):
            with pytest.raises(ConfigError, match="by themselves") as caught:
                corpus.delete([*found, *corpus.list(newer)], **asked)
            assert caught.value.field == "namespace"
        with pytest.raises(ConfigError, match=f"entries of {filled.name}"):
            corpus.delete(found, namespace=newer)
        deleted = corpus.delete(found)
        assert (deleted.namespace, deleted.count) == (filled.name, 4)
        assert list(corpus.list(filled.name)) == []
        assert len(list(corpus.list(newer))) == 4

    @staticmethod
    def names(corpus: Corpus) -> list[str]:
        async def work(store: Store) -> list[str]:
            return [info.name async for info in store.list("")]

        return corpus.run(work)

    def test_bad_entry_is_named_with_what_is_wrong(self, filled: Filled) -> None:
        blob = bytearray(entry_bytes("odd", filled.name))
        blob[-1] ^= 1
        filled.entry(filled.name, "odd", bytes(blob))
        assert filled.corpus.stat("odd") is not None
        with pytest.raises(CorruptEntryError, match=r"objects/.*\(checksum\)") as caught:
            filled.corpus.get("odd")
        assert caught.value.reason == "checksum"
        filled.entry(filled.name, "junk", b"no entry")
        with pytest.raises(CorruptEntryError, match=r"objects/.*\(length\)|objects/"):
            filled.corpus.stat("junk")

    def test_unknown_namespace_lists_what_there_is(self, filled: Filled) -> None:
        asked: list[Callable[[], object]] = [
            lambda: filled.corpus.stat(IDS[0], namespace="nobody"),
            lambda: filled.corpus.list("nobody"),
            lambda: filled.corpus.delete(IDS[0], namespace="nobody"),
            lambda: filled.corpus.verify("nobody"),
        ]
        for ask in asked:
            with pytest.raises(NotFoundError) as caught:
                ask()
            assert str(caught.value) == (
                "no namespace fits namespace='nobody'; take one of these:\n"
                f"  namespace='{filled.name}'"
            )
        with pytest.raises(NotFoundError, match="no namespace fits model='nobody'"):
            filled.corpus.choose(model="nobody")

    def test_several_models_are_ambiguous_until_one_is_named(self, filled: Filled) -> None:
        foreign = filled.namespace(FOREIGN)
        with pytest.raises(AmbiguousError) as caught:
            filled.corpus.get(IDS[0])
        assert caught.value.field == "namespace"
        assert f"\n  namespace='{foreign}'" in str(caught.value)
        assert "\n  model='acme/vision-9b'" in str(caught.value)
        assert filled.corpus.get(IDS[0], model="vision") is not None
        assert filled.corpus.get(IDS[0], namespace=foreign) is None
        filled.namespace(OTHER)
        assert filled.corpus.choose("acme") in (filled.name, Namespace.from_descriptor(OTHER).name)

    def test_bad_identifier_is_named(self, filled: Filled) -> None:
        for identifier in ("", "x" * 4097, "\ud800", "renderer0-mm-1-image-0"):
            for ask in (filled.corpus.stat, filled.corpus.get, filled.corpus.delete):
                with pytest.raises(ConfigError, match="identifier") as caught:
                    ask(identifier)
                assert caught.value.field in ("identifier", "identifiers")
                assert "; take a content hash" in str(caught.value)
        with pytest.raises(ConfigError, match="not int"):
            filled.corpus.stat(7)  # type: ignore[arg-type]

    def test_beginning_of_a_hash_must_be_of_one_entry(self, filled: Filled) -> None:
        entry = filled.corpus.find(IDS[1][:8])
        assert entry is not None
        assert entry.identifier == IDS[1]
        twin = IDS[1][:12] + "0" * 52
        filled.entry(filled.name, twin)
        with pytest.raises(AmbiguousError, match=f"`{IDS[1][:8]}`"):
            filled.corpus.get(IDS[1][:8])
