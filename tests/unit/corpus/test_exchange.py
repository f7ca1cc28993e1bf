# SPDX-License-Identifier: Apache-2.0
"""Export and import, with corpora that lie in folders."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from s3ec import codec
from s3ec.config import load_settings
from s3ec.corpus import Corpus
from s3ec.errors import AccessError, ConfigError, NotFoundError, TierError, UnavailableError
from s3ec.identity import Layout, Namespace
from s3ec.index.names import SnapshotName
from s3ec.store.base import NoSpaceError
from s3ec.store.open import KEPT_PROBE
from s3ec.testing.fault_store import Fault, FaultStore, Script
from s3ec.testing.memory_store import MemoryStore
from tests.support.catalogues import row
from tests.support.corpora import IDS, Filled
from tests.support.disks import small_tmpfs
from tests.support.folders import files_of, in_folder, object_name, objects_of, put_over
from tests.support.waiting import eventually
from tests.unit.cli.corpus import MODEL, OTHER, content_hash, entry_bytes

NAMESPACE = Namespace.from_descriptor(MODEL).name


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Filled]:
    with in_folder(tmp_path / "here") as corpus:
        yield Filled(corpus)


@pytest.fixture
def there(tmp_path: Path) -> Iterator[Corpus]:
    with in_folder(tmp_path / "there") as corpus:
        yield corpus


@pytest.fixture
def disk(here: Filled, tmp_path: Path) -> Path:
    """What was exported from here."""
    here.corpus.export(tmp_path / "disk")
    return tmp_path / "disk"


def damaged(identifier: str) -> bytes:
    """An entry with another last bit."""
    blob = entry_bytes(identifier, NAMESPACE)
    return blob[:-1] + bytes([blob[-1] ^ 1])


# -- out and in again ------------------------------------------------------------------------------


def test_export_has_the_same_bytes_and_an_index_and_a_second_one_copies_nothing(
    here: Filled, tmp_path: Path
) -> None:
    folder = tmp_path / "media" / "disk"
    done = here.corpus.export(folder)
    objects = objects_of(here.corpus, NAMESPACE)
    assert (done.status, done.copied, done.present) == ("complete", len(IDS), 0)
    assert done.nbytes == sum(map(len, objects.values()))
    with in_folder(folder) as exported:
        assert objects_of(exported, NAMESPACE) == objects
        found = exported.verify()
        assert (found.agrees, found.index.entries) == (True, len(IDS))
    names = files_of(folder).keys()
    assert {f"{NAMESPACE}/modality/image.json", f"{NAMESPACE}/namespace.json"} < names
    assert {path.name for path in folder.iterdir()} == {NAMESPACE}
    again = here.corpus.export(folder)
    assert (again.copied, again.present) == (0, len(IDS))
    assert names <= files_of(folder).keys()


def test_import_replaces_nothing_and_adds_what_lacks(
    here: Filled, there: Corpus, tmp_path: Path
) -> None:
    """What is there has another grid on record, and another size."""
    header = codec.parse_header(entry_bytes(IDS[0], NAMESPACE))
    other = replace(header, placeholder={"image_grid_thw": [1, 2, 2], "note": "x" * 200})
    mine = codec.encode_header(other) + entry_bytes(IDS[0], NAMESPACE)[header.data_start :]
    Filled(there)
    put_over(tmp_path / "there", object_name(NAMESPACE, IDS[0]), mine)
    here.entry(NAMESPACE, "another one")
    here.corpus.export(tmp_path / "disk")
    done = there.import_from(tmp_path / "disk")
    assert (done.copied, done.present) == (1, len(IDS))
    embedding = there.get(IDS[0])
    assert embedding is not None
    assert embedding.file == mine


# -- what is chosen --------------------------------------------------------------------------------


def test_only_what_is_listed_is_copied_and_what_is_absent_is_named(
    here: Filled, tmp_path: Path
) -> None:
    label = next(e.label for e in here.corpus.list() if e.label.startswith("x-"))
    absent = content_hash("nothing")
    done = here.corpus.export(tmp_path / "disk", identifiers=[IDS[0], label, absent])
    assert (done.copied, done.failures) == (2, {absent: "it is not there"})
    assert done.status == "partial"
    with in_folder(tmp_path / "disk") as exported:
        assert {entry.label for entry in exported.list()} == {IDS[0], label}


def test_selection_that_cannot_be_meant_is_refused(here: Filled, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        here.corpus.export(tmp_path / "disk", identifiers=["renderer0-mm-1-image-0"])
    assert caught.value.field == "identifiers"
    assert not (tmp_path / "disk").exists()


def test_rows_of_what_is_chosen_go_along(here: Filled, there: Corpus, tmp_path: Path) -> None:
    rows = [row(f"manuals/{n}.png", identifier=identifier) for n, identifier in enumerate(IDS)]
    here.corpus.catalog().append(rows)
    done = here.corpus.export(tmp_path / "disk", identifiers=[IDS[0], IDS[3]])
    assert (done.copied, done.catalogued) == (2, 2)
    again = here.corpus.export(tmp_path / "disk")
    assert (again.copied, again.present, again.catalogued) == (2, 2, 2)
    assert here.corpus.export(tmp_path / "disk").catalogued == 0
    assert there.import_from(tmp_path / "disk").catalogued == 4
    assert list(there.catalog().rows()) == list(here.corpus.catalog().rows())


def test_row_that_is_there_is_not_replaced_by_an_import(there: Corpus, disk: Path) -> None:
    there.import_from(disk)
    theirs = row("a.png", sha256="cd" * 32, identifier=IDS[0], stored_s=250_000_000_000.0)
    with in_folder(disk) as exported:
        exported.catalog().append([theirs, row("b.png", identifier=IDS[1])])
    mine = row("a.png", identifier=IDS[1], stored_s=1.0)
    there.catalog().append([mine])
    done = there.import_from(disk)
    assert (done.status, done.catalogued) == ("complete", 1)
    assert there.catalog().find("a.png") == [mine]


# -- what is bad -----------------------------------------------------------------------------------


def test_damaged_entries_are_named_and_the_others_are_copied(here: Filled, tmp_path: Path) -> None:
    put_over(tmp_path / "here", object_name(NAMESPACE, IDS[1]), damaged(IDS[1]))
    done = here.corpus.export(tmp_path / "disk")
    assert (done.status, done.copied) == ("partial", len(IDS) - 1)
    [(label, reason)] = done.failures.items()
    assert label == IDS[1]
    assert f"{object_name(NAMESPACE, IDS[1])} (checksum)" in reason


@pytest.mark.parametrize("body", [b"", b"half of it"])
def test_what_a_power_cut_left_half_is_named_and_not_replaced_until_it_is_repaired(
    here: Filled, disk: Path, body: bytes
) -> None:
    put_over(disk, object_name(NAMESPACE, IDS[0]), body)
    done = here.corpus.export(disk)
    assert (done.copied, done.present) == (0, len(IDS) - 1)
    assert "what is there is bad, and nothing is replaced" in done.failures[IDS[0]]
    with in_folder(disk) as exported:
        assert objects_of(exported, NAMESPACE)[object_name(NAMESPACE, IDS[0])] == body
        assert exported.repair(exported.verify(deep=True)).deleted == 1
    again = here.corpus.export(disk)
    assert (again.status, again.copied, again.present) == ("complete", 1, len(IDS) - 1)


def test_entries_of_another_width_than_on_record_are_refused(here: Filled, tmp_path: Path) -> None:
    odd = content_hash("odd")
    here.entry(NAMESPACE, odd, entry_bytes(odd, NAMESPACE, width=16))
    assert here.corpus.export(tmp_path / "disk", identifiers=[IDS[0]]).copied == 1
    done = here.corpus.export(tmp_path / "disk", identifiers=[odd])
    assert done.status == "failed"
    assert "its width is 16" in done.failures[odd]


# -- hostile folders -------------------------------------------------------------------------------


def test_nothing_is_read_over_a_link(there: Corpus, disk: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside.safetensors"
    target = disk / object_name(NAMESPACE, IDS[0])
    target.rename(outside)
    target.symlink_to(outside)
    folder = (disk / object_name(NAMESPACE, IDS[1])).parent
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    done = there.import_from(disk)
    assert (done.status, done.copied) == ("complete", 2)


def test_what_is_no_file_is_not_opened(there: Corpus, disk: Path) -> None:
    path = disk / object_name(NAMESPACE, IDS[0])
    path.unlink()
    os.mkfifo(path)
    assert there.import_from(disk).copied == len(IDS) - 1


@pytest.mark.parametrize("name", ["namespace.json", "modality/image.json"])
def test_records_that_are_no_files_keep_nobody_waiting(
    here: Filled, there: Corpus, disk: Path, name: str
) -> None:
    path = disk / NAMESPACE / name
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    if name == "namespace.json":
        for call in (lambda: there.import_from(disk), lambda: here.corpus.export(disk)):
            with pytest.raises(AccessError, match="it is no file"):
                call()
    else:  # those of the other side count
        assert there.import_from(disk).status == "complete"
    assert path.is_fifo()


@pytest.mark.parametrize("linked", ["", "objects"])
def test_export_removes_nothing_behind_a_link(here: Filled, tmp_path: Path, linked: str) -> None:
    disk, elsewhere = tmp_path / "disk", tmp_path / "elsewhere"
    elsewhere.mkdir()
    under_way = elsewhere / ".tmp-0123456789abcdef"
    under_way.write_bytes(b"of somebody else")
    link = disk / NAMESPACE / linked
    link.parent.mkdir(parents=True)
    link.symlink_to(elsewhere)
    with suppress(AccessError):
        here.corpus.export(disk)
    assert list(elsewhere.iterdir()) == [under_way]


def test_files_that_are_no_entries_are_named_or_left_alone(
    there: Corpus, disk: Path, tmp_path: Path
) -> None:
    odd: dict[str, Callable[[Path], object]] = {
        content_hash("huge"): lambda path: os.truncate(path, 3 * 2**30),
        content_hash("page"): lambda path: path.write_bytes(b"<html>" * 100),
        content_hash("cut"): lambda path: path.write_bytes(damaged(IDS[0])[:-10]),
        content_hash("copy"): lambda path: path.write_bytes(entry_bytes(IDS[0], NAMESPACE)),
        content_hash("foreign"): lambda path: path.write_bytes(
            entry_bytes(content_hash("foreign"), Namespace.from_descriptor(OTHER).name)
        ),
    }
    for identifier, make in odd.items():
        put_over(disk, object_name(NAMESPACE, identifier), b"")
        make(disk / object_name(NAMESPACE, identifier))
    for name in ("objects/readme.txt", "objects/zz/x.safetensors", "other/thing"):
        put_over(disk, f"{NAMESPACE}/{name}", b"what is this")
    done = there.import_from(disk)
    assert (done.status, done.copied) == ("partial", len(IDS))
    reasons = {label: done.failures[label] for label in odd}
    assert done.failures.keys() == odd.keys()
    assert "more than any entry has" in reasons[content_hash("huge")]
    assert "another identifier" in reasons[content_hash("copy")]
    assert "written for namespace" in reasons[content_hash("foreign")]
    assert len(objects_of(there, NAMESPACE)) == len(IDS)
    stored = files_of(tmp_path / "there")
    parts = {"objects", "modality", "manifest", "namespace.json"}
    assert {name.split("/")[1] for name in stored if name != KEPT_PROBE} == parts


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (None, "is not there"),
        (b"{}", "is unusable"),
        (b"[1", "is unusable"),
        (b'{"a": 1}', "is that of no model"),
        (Namespace.from_descriptor(OTHER).to_json(), "is that of "),
    ],
)
def test_descriptor_that_does_not_say_the_namespace_is_refused(
    there: Corpus, disk: Path, body: bytes | None, says: str
) -> None:
    put_over(disk, f"{NAMESPACE}/namespace.json", body or b"")
    if body is None:
        (disk / NAMESPACE / "namespace.json").unlink()
    with pytest.raises(ConfigError, match=rf"namespace\.json .*{says}.*restore it") as caught:
        there.import_from(disk)
    assert caught.value.field == "namespace"
    assert there.namespaces() == []


def test_folder_that_is_not_there_is_named(there: Corpus, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no folder") as caught:
        there.import_from(tmp_path / "nothing")
    assert caught.value.field == "folder"
    (tmp_path / "empty").mkdir()
    with pytest.raises(NotFoundError, match="empty holds no namespace"):
        there.import_from(tmp_path / "empty")


# -- vLLM's layout ---------------------------------------------------------------------------------


def example_file(folder: Path, identifier: str, body: bytes) -> None:
    put_over(folder, f"{identifier}/encoder_cache.safetensors", body)


def sealed(header: bytes, data: bytes = b"") -> bytes:
    return len(header).to_bytes(8, "little") + header + data


@pytest.fixture
def ec(here: Filled, tmp_path: Path) -> Path:
    """A folder as vLLM's ECExampleConnector would have it, with two of the entries from here."""
    for identifier in IDS[:2]:
        found = here.corpus.get(identifier)
        assert found is not None
        tensor = {"dtype": "BF16", "shape": found.shape, "data_offsets": [0, len(found.data)]}
        header = json.dumps({"ec_cache": tensor}).encode()
        example_file(tmp_path / "ec", identifier, sealed(header, bytes(found.data)))
    return tmp_path / "ec"


def test_import_of_vllms_layout_has_the_same_values(here: Filled, there: Corpus, ec: Path) -> None:
    name = Filled.namespace(Filled(there), OTHER)
    done = there.import_example(ec, namespace=name, modality="video")
    assert (done.copied, done.status, done.namespace) == (2, "complete", name)
    for identifier in IDS[:2]:
        ours = here.corpus.get(identifier)
        theirs = there.get(identifier, namespace=name)
        assert ours is not None
        assert theirs is not None
        assert theirs.data == ours.data
        assert (theirs.shape, theirs.dtype) == (ours.shape, ours.dtype)
        assert (theirs.header.modality, theirs.header.placeholder) == ("video", None)
    assert there.verify(name).index.unannounced == 0
    again = there.import_example(ec, namespace=name)
    assert (again.copied, again.present) == (0, 2)


def test_nothing_is_imported_into_a_namespace_of_a_newer_release(
    here: Filled, there: Corpus, disk: Path, ec: Path, tmp_path: Path
) -> None:
    about = json.dumps({**MODEL, "format": codec.FORMAT_VERSION + 1}).encode()
    put_over(tmp_path / "there", Layout(here.name).descriptor, about)
    before = files_of(tmp_path / "there")
    for call in (there.import_from, there.import_example):
        with pytest.raises(ConfigError, match="newer format"):
            call(ec if call == there.import_example else disk)
    assert files_of(tmp_path / "there") == before


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "no safetensors file"),
        (b"\xff" * 8, "header"),
        (sealed(b"{}"), "not one tensor"),
        (sealed(b'{"ec_cache": 7}'), "no safetensors file"),
        (
            sealed(b'{"ec_cache":{"dtype":"I64","shape":[1,1],"data_offsets":[0,8]}}', b"x" * 8),
            "no",
        ),
        (sealed(b'{"ec_cache":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', bytes(4)), "no"),
        (
            sealed(b'{"ec_cache":{"dtype":"F32","shape":[0,1],"data_offsets":[0,0]}}'),
            "without values",
        ),
        (
            sealed(b'{"ec_cache":{"dtype":"F32","shape":[1,1],"data_offsets":[0,4]}}', bytes(3)),
            "no safetensors file",
        ),
        (
            sealed(b'{"ec_cache":{"dtype":"F32","shape":[1,1],"data_offsets":[4,8]}}', bytes(8)),
            "no safetensors file",
        ),
        (
            sealed(
                b'{"ec_cache":{"dtype":"F32","shape":[1,1],"data_offsets":[0,4]}}',
                b"\x00\x00\xc0\x7f",
            ),
            "NaN",
        ),
    ],
)
def test_bad_files_of_vllms_layout_are_named(
    there: Corpus, tmp_path: Path, body: bytes, reason: str
) -> None:
    Filled(there)
    bad = content_hash("bad")
    example_file(tmp_path / "ec", bad, body)
    (tmp_path / "ec" / content_hash("asked for only")).mkdir()
    example_file(tmp_path / "ec", "page-12", body)
    done = there.import_example(tmp_path / "ec")
    assert (done.status, done.skipped, list(done.failures)) == ("failed", 1, [bad])
    assert reason in done.failures[bad]
    assert there.get(bad) is None


# -- bad days --------------------------------------------------------------------------------------

EXPORT = """
import sys
from s3ec.config import load_settings
from s3ec.corpus import Corpus
from s3ec.store.open import open_store
from s3ec.testing.fault_store import Fault, FaultStore, Gate, Script
settings = load_settings({"url": sys.argv[1]}).settings
held = Script([Fault("get", name="/objects/", skip=20, gate=Gate())])
with Corpus(settings, store=FaultStore(open_store(settings), held)) as corpus:
    corpus.export(sys.argv[2])
"""


@pytest.mark.slow
def test_a_killed_export_leaves_nothing_half_and_the_next_one_goes_on(
    here: Filled, tmp_path: Path
) -> None:
    identifiers = [content_hash(f"page {number}") for number in range(60)]
    for identifier in identifiers:
        here.entry(NAMESPACE, identifier)
    source, disk = tmp_path / "here", tmp_path / "disk"
    child = subprocess.Popen(
        [sys.executable, "-c", EXPORT, source.as_uri(), str(disk)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    objects = disk / NAMESPACE / "objects"
    eventually(lambda: len(list(objects.rglob("*.safetensors"))) > 3, "the export began")
    os.kill(child.pid, signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    whole = objects_of(here.corpus, NAMESPACE)
    left = {name: body for name, body in files_of(disk).items() if name in whole}
    assert 3 < len(left) < len(whole)
    assert all(whole[name] == body for name, body in left.items())
    put_over(disk, f"{NAMESPACE}/objects/ab/.tmp-0123456789abcdef", b"what it was writing")
    for mine in (".tmp-0123456789abcdef", f"{NAMESPACE}/chapter#1"):
        put_over(disk, mine, b"somebody's own")
    done = here.corpus.export(disk)
    assert (done.status, done.present, done.copied) == (
        "complete",
        len(left),
        len(whole) - len(left),
    )
    assert {name for name in files_of(disk) if "#" in name or ".tmp" in name} == {
        ".tmp-0123456789abcdef",
        f"{NAMESPACE}/chapter#1",
    }
    with in_folder(disk) as exported:
        assert objects_of(exported, NAMESPACE) == whole
        assert exported.verify().agrees


WITHOUT_LINKS = """
import sys
from pathlib import Path
from tests.faults.seccomp import refuse_hard_links
if not refuse_hard_links():
    sys.exit(77)
from s3ec.corpus import Corpus
with Corpus.open(url=sys.argv[1]) as corpus:
    done = corpus.export(sys.argv[2])
    again = corpus.export(sys.argv[2])
    print(done.status, done.copied, again.present)
    try:
        corpus.export(sys.argv[3])
    except Exception as exc:
        print(type(exc).__name__)
"""


@pytest.mark.slow
def test_a_memory_stick_without_hard_links_takes_an_export(here: Filled, tmp_path: Path) -> None:
    large = content_hash("large")
    here.entry(NAMESPACE, large, entry_bytes(large, NAMESPACE, rows=8192))
    disk = tmp_path / "disk"
    put_over(disk, f"{NAMESPACE}/objects/.tmp-0123456789abcdef", b"a killed one's")
    with small_tmpfs(tmp_path / "stick", size=2**16, inodes=0) as stick:
        done = subprocess.run(
            [
                *(sys.executable, "-c", WITHOUT_LINKS),
                *((tmp_path / "here").as_uri(), str(disk), str(stick / "corpus")),
            ],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            cwd=Path(__file__).parents[3],
            capture_output=True,
            text=True,
            check=False,
        )
        assert not [name for name in files_of(stick) if ".tmp-" in name]
    if done.returncode == 77:
        pytest.skip("this machine cannot refuse links")
    assert done.stdout.split("\n")[:2] == ["complete 5 5", "NoSpaceError"], done.stderr
    assert not [name for name in files_of(disk) if ".tmp-" in name or "#" in name]
    with in_folder(disk) as exported:
        assert objects_of(exported, NAMESPACE) == objects_of(here.corpus, NAMESPACE)
        found = exported.verify()
        assert (found.agrees, found.index.snapshot != SnapshotName()) == (True, True)


def test_a_full_disk_is_named_and_nothing_is_lost(here: Filled, tmp_path: Path) -> None:
    large = [content_hash(f"large {number}") for number in range(8)]
    for identifier in large:
        here.entry(NAMESPACE, identifier, entry_bytes(identifier, NAMESPACE, rows=8192))
    whole = objects_of(here.corpus, NAMESPACE)
    with small_tmpfs(tmp_path / "stick", size=2**19, inodes=0) as stick:
        with pytest.raises(NoSpaceError, match="the disk is full"):
            here.corpus.export(stick / "corpus")
        left = {n: b for n, b in files_of(stick / "corpus").items() if n in whole}
        assert all(whole[name] == body for name, body in left.items())
        assert not [name for name in files_of(stick) if "#" in name]
        subprocess.run(["mount", "-o", "remount,size=16m", str(stick)], check=True)
        done = here.corpus.export(stick / "corpus")
        assert (done.status, done.present) == ("complete", len(left))
        with in_folder(stick / "corpus") as exported:
            assert objects_of(exported, NAMESPACE) == whole
            assert exported.verify().agrees


def test_two_exports_into_one_folder_at_once_lose_nothing(here: Filled, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    others: list[str] = []

    def another(what: str, done: int, total: int | None) -> None:
        if what == "copying" and done == 1 and not others:
            with in_folder(tmp_path / "here") as same:
                others.append(same.export(disk).status)

    done = here.corpus.export(disk, report=another)
    assert (done.status, done.copied + done.present) == ("complete", len(IDS))
    assert others == ["complete"]
    with in_folder(disk) as exported:
        assert objects_of(exported, NAMESPACE) == objects_of(here.corpus, NAMESPACE)
        assert exported.verify(deep=True).agrees
    assert not [name for name in files_of(disk) if ".tmp-" in name]


def test_folder_that_cannot_be_made_is_named(here: Filled, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(TierError, match="may write to"):
        here.corpus.export(tmp_path / "file" / "corpus")


def faulty(script: Script, **settings: int) -> tuple[Corpus, FaultStore]:
    """A corpus in memory with 40 entries beside those of IDS, whose requests fail by a plan."""
    memory = MemoryStore()
    loaded = load_settings({"bucket": "corpus", **settings}).settings
    with Corpus(loaded, store=MemoryStore(memory.bucket)) as corpus:
        filled = Filled(corpus)
        for number in range(40):
            filled.entry(NAMESPACE, content_hash(f"page {number}"))
    store = FaultStore(memory, script)
    return Corpus(loaded, store=store, attempts=1), store


def test_an_entry_that_the_bucket_does_not_give_is_named(tmp_path: Path) -> None:
    bad = object_name(NAMESPACE, IDS[0])
    corpus, _ = faulty(Script([Fault("get", name=bad, error=UnavailableError)]))
    with corpus:
        done = corpus.export(tmp_path / "disk")
    assert (done.status, done.copied) == ("partial", 43)
    assert list(done.failures) == [IDS[0]]


def test_an_outage_ends_it_and_the_next_run_goes_on(tmp_path: Path) -> None:
    corpus, store = faulty(
        Script([Fault("get", error=UnavailableError, skip=10)]), max_concurrency=1
    )
    with corpus:
        with pytest.raises(UnavailableError):
            corpus.export(tmp_path / "disk")
        store.plan = Script()
        done = corpus.export(tmp_path / "disk")
        assert done.status == "complete"
        assert done.copied + done.present == 44
        assert done.present > 0


def test_a_refusal_of_everything_ends_it_at_once(tmp_path: Path) -> None:
    corpus, store = faulty(
        Script([Fault("get", name="/objects/", error=AccessError)]), max_concurrency=1
    )
    with corpus, pytest.raises(AccessError):
        corpus.export(tmp_path / "disk")
    assert len([name for op, name in store.log if op == "get" and "/objects/" in name]) == 1
