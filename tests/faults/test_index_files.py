# SPDX-License-Identifier: Apache-2.0
"""Files of the index that are stale, damaged, huge or of another format: a node fetches more than
it needs or less than it could, and what it serves is what it would serve without an index."""

from __future__ import annotations

import itertools
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from s3ec.dev.rigs.proxy import FaultProxy
from s3ec.identity import Namespace
from s3ec.index import deltas
from s3ec.index.local import OVERLAY, NodeFolder
from s3ec.index.names import SnapshotName, snapshots_prefix
from s3ec.index.snapshot import Rows, encode
from s3ec.prefetch import FetchOutcome
from s3ec.safetensors_file import encode_columns
from s3ec.testing.server import LocalS3
from tests.faults.embeddings import ENTRY_BYTES, LAYOUT, NAMESPACE, key_at
from tests.faults.indexed import (
    Bucket,
    evict,
    fetch,
    noding,
    refresh,
    run_rebuild,
    serve,
)

Damage = Callable[[bytes], bytes]

STOCKED = set(range(4))
ASKED = range(6)  # 4: nobody has it, and nobody says so; 5: announced, and not there
_HUGE = 2**20
_OTHER = Namespace.from_descriptor({"model": "other"})


def newer(_: bytes) -> bytes:
    """What a later s3ec may write, its checksums right."""
    metadata = {"s3ec": "rows-3", "namespace": NAMESPACE.name}
    return b"".join(encode_columns(metadata, {"new": np.zeros(8, "<u8")}))


def foreign(_: bytes) -> bytes:
    """Right in all but the namespace: it would hide and invent entries."""
    return b"".join(encode(Rows.of([key_at(4).digest], [9]), _OTHER.name))


DAMAGES: dict[str, Damage] = {
    "truncated": lambda body: body[: len(body) // 2],
    "emptied": lambda _: b"",
    "flipped in front": lambda body: body[:3] + bytes([body[3] ^ 1]) + body[4:],
    "flipped at the end": lambda body: body[:-3] + bytes([body[-3] ^ 1]) + body[-2:],
    "zeros": lambda body: bytes(len(body)),
    "a page of HTML": lambda _: b"<html><body>It works!</body></html>",
    "a header of 2**40 bytes": lambda body: struct.pack("<Q", 2**40) + body[8:],
    "a newer format": newer,
    "of another namespace": foreign,
}


@pytest.fixture
def bucket(
    local_s3: LocalS3, s3_bucket: str, signed: None, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Bucket, FaultProxy]]:
    # A limit below which the huge ones of these tests would not be.
    monkeypatch.setattr(deltas, "MAX_DELTA_BYTES", _HUGE - 1)
    with FaultProxy(local_s3.endpoint_url) as proxy:
        yield Bucket(local_s3, s3_bucket, "corpus", proxy.url), proxy


def fill(bucket: Bucket, tmp_path: Path) -> SnapshotName:
    """0 and 1 in a snapshot, 2 and 3 in a delta, 5 announced without an object; the snapshot."""
    bucket.stock(0, 1)
    with noding(bucket.settings(tmp_path / "first")) as node:
        made = run_rebuild(node, ago_s=10)
    bucket.stock(2, 3)
    bucket.announce(2, 3, 5)
    return made.name


def object_of(snapshot: SnapshotName) -> str:
    return f"{snapshots_prefix(LAYOUT)}{snapshot}"


def test_damaged_deltas_in_the_bucket_hide_what_they_told_and_nothing_else(
    bucket: tuple[Bucket, FaultProxy], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    corpus, _ = bucket
    fill(corpus, tmp_path)
    damages = {**DAMAGES, "huge": lambda _: bytes(_HUGE)}
    told = dict(zip(itertools.count(100), damages, strict=False))
    corpus.stock(*told)
    good: dict[str, bytes] = {}
    for number, what in told.items():
        name = corpus.announce(number)
        good[name] = corpus.get(name)
        corpus.put(name, damages[what](good[name]))
    with noding(corpus.settings(tmp_path / "cache")) as node:
        for _ in range(2):
            refresh(node)
            assert serve(node, [*ASKED, *told]) == STOCKED
        assert node.counters.get("index.refused") >= len(told)
        for name, body in good.items():
            assert caplog.text.count(name) == 1
            corpus.put(name, body)
        refresh(node)
        assert serve(node, [*ASKED, *told]) == STOCKED | told.keys()


def test_damaged_snapshots_in_the_bucket_leave_the_one_before_them_in_use(
    bucket: tuple[Bucket, FaultProxy], tmp_path: Path
) -> None:
    corpus, _ = bucket
    first = fill(corpus, tmp_path)
    good = corpus.get(object_of(first))
    damages = {**DAMAGES, "huge": lambda _: bytes(_HUGE)}
    with noding(corpus.settings(tmp_path / "cache")) as node:
        refresh(node)
        for refused, (what, damage) in enumerate(damages.items(), 1):
            with noding(corpus.settings(tmp_path / f"maker {refused}")) as maker:
                corpus.stock(100 + refused)
                name = object_of(run_rebuild(maker, ago_s=9 - refused / 2).name)
            corpus.put(name, damage(corpus.get(name)))
            refresh(node)
            assert serve(node, [*ASKED, 100 + refused]) == STOCKED, what
            assert node.counters.get("index.refused") == refused, what
            assert node.index.counts().snapshot == first, what
            # Nor does a node that begins now find better.
            with noding(corpus.settings(tmp_path / f"late {refused}")) as late:
                refresh(late)
                assert late.index.counts().snapshot == first, what
                assert serve(late, ASKED) == STOCKED, what
            corpus.delete(name)
        assert good == corpus.get(object_of(first))
        run_rebuild(node)
        refresh(node)
        every = set(range(101, 101 + len(damages)))
        assert serve(node, [*ASKED, *every]) == STOCKED | every


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def link(path: Path) -> None:
    path.rename(path.with_suffix(".elsewhere"))
    path.symlink_to(path.with_suffix(".elsewhere"))


def sparse(path: Path) -> None:
    path.unlink()
    with open(path, "xb") as file:
        file.truncate(2**40)


def rewrite(damage: Damage) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        body = path.read_bytes()
        path.unlink()  # a mapped file must not be shortened
        path.write_bytes(damage(body))

    return change


@pytest.mark.parametrize("what", ["rows", "filter", "overlay"])
def test_damaged_files_in_the_nodes_folder_are_made_again_or_cost_some_hits(
    bucket: tuple[Bucket, FaultProxy], tmp_path: Path, what: str
) -> None:
    corpus, _ = bucket
    snapshot = fill(corpus, tmp_path)
    changes = {name: rewrite(damage) for name, damage in DAMAGES.items()}
    changes |= {"2**40 bytes": sparse, "a folder": folder, "a link": link, "gone": os.unlink}
    settings = corpus.settings(tmp_path / "cache")
    top = tmp_path / "cache" / "v1" / "index" / NAMESPACE.name
    path = top / (OVERLAY if what == "overlay" else f"{snapshot}.{what}")
    with noding(settings, audit=False) as living:  # sizes change under its sums
        refresh(living)
        good = path.read_bytes()
        for name, change in changes.items():
            change(path)
            # Rows and filters were checked when they came: what keeps its size is not read again.
            unread = what == "filter" and path.is_file() and path.stat().st_size == len(good)
            unread = unread or (what == "rows" and name == "flipped at the end")
            with noding(settings, audit=False) as node:
                refresh(node, 2)
                evict(node, ASKED)
                served = serve(node, ASKED)
            assert served <= STOCKED if unread else served == STOCKED, name
            remove(path)
            path.write_bytes(good)
        refresh(living, 2)
        evict(living, ASKED)
        assert serve(living, ASKED) == STOCKED  # it went on with what it had mapped


def remove(path: Path) -> None:
    if path.is_dir():
        path.rmdir()
    else:
        path.unlink(missing_ok=True)


def test_a_stale_index_costs_one_request_for_what_is_gone_and_skips_what_is_new(
    bucket: tuple[Bucket, FaultProxy], tmp_path: Path
) -> None:
    corpus, proxy = bucket
    fill(corpus, tmp_path)
    with noding(corpus.settings(tmp_path / "cache")) as node:
        refresh(node, 2)
        corpus.delete(LAYOUT.object(key_at(0)))  # by hand, so nobody says so
        corpus.stock(4)
        proxy.requests.clear()
        for _ in range(3):
            assert serve(node, ASKED) == {1, 2, 3}
        assert gets_of(proxy, 0) == gets_of(proxy, 5) == 1
        assert gets_of(proxy, 4) == 0
        assert node.counters.get("index.vanished") == 2
        run_rebuild(node)
        refresh(node, 2)
        assert serve(node, ASKED) == {1, 2, 3, 4}
        assert gets_of(proxy, 0) == 1


def test_a_node_removes_the_index_of_a_model_that_it_has_not_used_for_a_week(
    bucket: tuple[Bucket, FaultProxy], tmp_path: Path
) -> None:
    corpus, _ = bucket
    fill(corpus, tmp_path)
    with noding(corpus.settings(tmp_path / "cache")) as node:
        unused = NodeFolder.of(node.tier.folders, _OTHER.name)
        unused.write(OVERLAY, [b"rows"])
        os.utime(unused.path, (0, 0))
        refresh(node, 2)
        assert not unused.path.exists()
        assert serve(node, ASKED) == STOCKED


def gets_of(proxy: FaultProxy, number: int) -> int:
    name = key_at(number).name
    return sum(request.method == "GET" and name in request.target for request in proxy.requests)


@pytest.mark.parametrize("nbytes", [0, ENTRY_BYTES - 1, 2**32 - 1])
def test_sizes_that_are_wrong_never_serve_another_shape(
    bucket: tuple[Bucket, FaultProxy], tmp_path: Path, nbytes: int
) -> None:
    """Whoever may write to the bucket may announce anything, with the right checksums."""
    corpus, _ = bucket
    fill(corpus, tmp_path)
    corpus.announce(0, 1, nbytes=nbytes)
    with noding(corpus.settings(tmp_path / "cache")) as node:
        refresh(node, 2)
        assert node.index.nbytes(key_at(0)) == nbytes
        outcomes = {n: one.outcome for n, one in fetch(node, STOCKED).items()}
        assert set(outcomes.values()) == {FetchOutcome.READY}
