# SPDX-License-Identifier: Apache-2.0
"""Files of the index that are stale, damaged, huge or of a newer format: a node fetches more than
it needs or less than it could, and what it serves is what it would serve without an index."""

from __future__ import annotations

import itertools
import json
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from s3ec.index import bloom, cache, follower, manifest
from s3ec.index.rows import EntryInfo, Rows
from s3ec.index.segment import encode_segment

from s3ec.dev.rigs.proxy import FaultProxy
from s3ec.identity import Namespace
from s3ec.prefetch import FetchOutcome
from s3ec.safetensors_file import encode_columns
from s3ec.testing.server import LocalS3
from tests.faults.embeddings import LAYOUT, NAMESPACE, ROWS, WIDTH, key_at
from tests.faults.indexed import (
    Bucket,
    evict,
    fetch,
    noding,
    refresh,
    run_compact,
    run_rebuild,
    serve,
)

Damage = Callable[[bytes], bytes]

STOCKED = set(range(4))
ASKED = range(6)  # 4: nobody has it, and nobody says so; 5: announced, and not there
_HUGE = 2**20
_OTHER = Namespace.from_descriptor({"model": "other"})


def newer(body: bytes) -> bytes:
    """What a later s3ec may write, its checksums right."""
    if body.startswith(b"{"):
        return json.dumps({**json.loads(body), "format": 2, "new": []}).encode()
    metadata = {"s3ec": "index-2", "namespace": NAMESPACE.name}
    return b"".join(encode_columns(metadata, {"new": np.zeros(8, "<u8")}))


def foreign(_: bytes) -> bytes:
    """Right in all but the namespace: it would hide and invent entries."""
    rows = Rows.from_facts([(key_at(4).digest, EntryInfo())])
    return b"".join(encode_segment(rows, _OTHER.name))


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
    # What was refused is tried again at each second look, and not after minutes.
    monkeypatch.setattr(manifest, "_FULL_EVERY", 2)
    monkeypatch.setattr(follower, "_RETRY_S", 0.0)
    # Limits below which the huge ones of these tests would not be.
    monkeypatch.setattr(cache, "MAX_DELTA_BYTES", _HUGE - 1)
    monkeypatch.setattr(manifest, "MAX_HEAD_BYTES", _HUGE - 1)
    with FaultProxy(local_s3.endpoint_url) as proxy:
        yield Bucket(local_s3, s3_bucket, "corpus", proxy.url), proxy


def fill(bucket: Bucket, tmp_path: Path) -> str:
    """0 and 1 in a base, 2 and 3 in a delta, 5 announced without an object; the delta's name."""
    bucket.stock(0, 1)
    with noding(bucket.settings(tmp_path / "first")) as node:
        run_rebuild(node)
    bucket.stock(2, 3)
    return bucket.announce(2, 3, 5)


def base_file(bucket: Bucket, *, filters: bool) -> str:
    """The one shard of the newest base, or its filter."""
    names = [n for n in bucket.names(LAYOUT.bases) if (".bloom" in n) == filters]
    return max(names)


def test_damaged_deltas_in_the_bucket_hide_what_they_told_and_nothing_else(
    bucket: tuple[Bucket, FaultProxy], tmp_path: Path
) -> None:
    corpus, _ = bucket
    fill(corpus, tmp_path)
    damages = {**DAMAGES, "huge": lambda _: bytes(_HUGE)}
    del damages["a newer format"]  # has the objects listed instead
    told = dict(zip(itertools.count(100), damages, strict=False))
    corpus.stock(*told)
    good: dict[str, bytes] = {}
    for number, what in told.items():
        name = corpus.announce(number)
        good[name] = corpus.get(name)
        corpus.put(name, damages[what](good[name]))
    with noding(corpus.settings(tmp_path / "cache")) as node:
        refresh(node)
        assert serve(node, [*ASKED, *told]) == STOCKED
        assert node.counters.get("index.refused") == len(told)
        for name, body in good.items():
            corpus.put(name, body)
        refresh(node, 2)
        assert serve(node, [*ASKED, *told]) == STOCKED | told.keys()


def test_damaged_heads_in_the_bucket_leave_the_newest_good_base_in_use(
    bucket: tuple[Bucket, FaultProxy], tmp_path: Path
) -> None:
    corpus, _ = bucket
    fill(corpus, tmp_path)
    good = corpus.get(LAYOUT.head(1))
    damages = {**DAMAGES, "huge": lambda _: bytes(_HUGE), "another's": lambda b: b}
    newer_format = damages.pop("a newer format")
    for version, damage in enumerate(damages.values(), 2):
        corpus.put(LAYOUT.head(version), damage(good))
    with noding(corpus.settings(tmp_path / "cache")) as node:
        refresh(node, 2)
        assert serve(node, ASKED) == STOCKED
        assert node.counters.get("index.refused") >= len(damages)
        assert node.index.counts() == (1, 3, 2)
        corpus.stock(4)
        corpus.put(LAYOUT.head(99), newer_format(good))
        refresh(node)
        assert serve(node, ASKED) == STOCKED | {4}  # by a listing
        corpus.delete(*(LAYOUT.head(version) for version in range(2, 100)))
        refresh(node, 2)
        evict(node, ASKED)
        assert serve(node, ASKED) == STOCKED


@pytest.mark.parametrize("mode", ["exact", "bloom"])
def test_damaged_files_of_a_base_in_the_bucket_leave_the_base_before_it_in_use(
    bucket: tuple[Bucket, FaultProxy], tmp_path: Path, mode: str
) -> None:
    corpus, _ = bucket
    fill(corpus, tmp_path)
    damages = {**DAMAGES, "huge": lambda _: bytes(_HUGE), "another's": lambda _: earlier}
    with noding(corpus.settings(tmp_path / "cache", index=mode)) as node:
        refresh(node)
        earlier = corpus.get(base_file(corpus, filters=mode == "bloom"))
        for version, (what, damage) in enumerate(damages.items(), 2):
            corpus.stock(100 + version)
            run_rebuild(node)
            name = base_file(corpus, filters=mode == "bloom")
            good = corpus.get(name)
            corpus.put(name, damage(good))
            refused = node.counters.get("index.refused")
            refresh(node)
            assert serve(node, [*ASKED, 100 + version]) == STOCKED, what
            assert node.counters.get("index.refused") > refused, what
            corpus.put(name, good)
            refresh(node)
            assert node.index.counts()[2] == len(STOCKED) + version - 1, what
            assert serve(node, [*ASKED, 100 + version]) == STOCKED | {100 + version}, what


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


@pytest.mark.parametrize("mode", ["exact", "bloom"])
def test_damaged_files_in_the_nodes_folder_are_fetched_again_or_cost_some_hits(
    bucket: tuple[Bucket, FaultProxy], tmp_path: Path, mode: str
) -> None:
    corpus, _ = bucket
    delta = fill(corpus, tmp_path)
    changes = {what: rewrite(damage) for what, damage in DAMAGES.items()}
    changes |= {"2**40 bytes": sparse, "a folder": folder, "a link": link, "gone": os.unlink}
    if mode == "bloom":  # the same code: one of each kind
        changes = {what: changes[what] for what in ("truncated", "flipped at the end", "a folder")}
    settings = corpus.settings(tmp_path / "cache", index=mode)
    top = tmp_path / "cache" / "v1" / "index" / NAMESPACE.name
    names = [delta, base_file(corpus, filters=mode == "bloom")]
    paths = [top / name.removeprefix(LAYOUT.manifest) for name in names]
    with noding(settings, audit=False) as living:  # sizes change under its sums
        refresh(living)
        good = [path.read_bytes() for path in paths]
        for what, change in changes.items():
            for path in paths:
                change(path)
            with noding(settings, audit=False) as node:
                refresh(node, 2)
                evict(node, ASKED)
                served = serve(node, ASKED)
            # A base was checked when it came: what keeps its size is not read whole again.
            assert served <= STOCKED if what == "flipped at the end" else served == STOCKED, what
            for path, body in zip(paths, good, strict=True):
                remove(path)
                path.write_bytes(body)
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


def test_a_folder_with_yesterdays_index_is_brought_up_to_date(
    bucket: tuple[Bucket, FaultProxy], tmp_path: Path
) -> None:
    corpus, _ = bucket
    fill(corpus, tmp_path)
    with noding(corpus.settings(tmp_path / "cache")) as node:
        refresh(node, 2)
    with noding(corpus.settings(tmp_path / "other")) as node:
        corpus.stock(4)
        corpus.announce(4)
        assert run_compact(node, grace_s=-2.0) is not None  # the old base and its deltas are gone
        corpus.delete(LAYOUT.object(key_at(0)))
        corpus.announce(0, deleted=True)
    with noding(corpus.settings(tmp_path / "cache")) as node:
        refresh(node, 2)
        assert serve(node, ASKED) == {1, 2, 3, 4}
        assert node.index.counts()[2] == 6


def gets_of(proxy: FaultProxy, number: int) -> int:
    name = key_at(number).name
    return sum(request.method == "GET" and name in request.target for request in proxy.requests)


def test_what_only_a_filter_says_costs_one_request_for_each_negative_ttl(
    bucket: tuple[Bucket, FaultProxy], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bloom, "KEYS_PER_BLOCK", 200)  # so that a filter is often wrong
    corpus, proxy = bucket
    corpus.stock(*STOCKED)
    with noding(corpus.settings(tmp_path / "maker")) as node:
        run_rebuild(node)
        corpus.announce(*range(1000, 4000))  # a filter of few keys is never wrong
        assert run_compact(node) is not None
    with noding(corpus.settings(tmp_path / "cache", index="bloom")) as node:
        refresh(node)
        absent = range(10, 410)
        believed = [n for n in absent if node.index.maybe_contains(key_at(n))]
        assert believed  # the fault: a filter that is wrong about some
        assert len(believed) < len(absent)
        assert not any(node.index.holds(key_at(n)) for n in absent)  # a producer would encode
        proxy.requests.clear()
        found = fetch(node, believed)
        assert {one.outcome for one in found.values()} == {FetchOutcome.ABSENT}
        for _ in range(3):
            assert serve(node, absent) == set()
        assert [gets_of(proxy, n) for n in believed] == [1] * len(believed)
        objects = [r for r in proxy.requests if "/objects/" in r.target]
        assert len(objects) == len(believed)
        assert node.counters.get("fetch.absent") == len(believed)
        assert serve(node, STOCKED) == STOCKED


def test_facts_that_are_wrong_skip_an_entry_and_never_serve_it_with_another_shape(
    bucket: tuple[Bucket, FaultProxy], tmp_path: Path
) -> None:
    """Whoever may write to the bucket may announce anything, with the right checksums."""
    corpus, proxy = bucket
    fill(corpus, tmp_path)
    lies = [EntryInfo(rows=ROWS + 1), EntryInfo(width=WIDTH * 2), EntryInfo(dtype="float32")]
    rows = Rows.from_facts(
        [
            (key_at(n).digest, lie._replace(time_s=2**32 - 1))
            for n, lie in zip(itertools.count(), lies, strict=False)
        ]
    ).sorted_unique()
    lie = LAYOUT.delta("7" + "Z" * 25)
    corpus.put(lie, b"".join(encode_segment(rows, NAMESPACE.name)))
    with noding(corpus.settings(tmp_path / "cache")) as node:
        refresh(node, 2)
        worth = [n for n in ASKED if node.index.maybe_contains(key_at(n))]
        outcomes = {n: one.outcome for n, one in fetch(node, worth).items()}
        assert {n for n, outcome in outcomes.items() if outcome is FetchOutcome.MISMATCH} == {
            0,
            1,
            2,
        }
        assert outcomes[3] is FetchOutcome.READY
        assert node.counters.get("mismatch.index") == 3
        assert [gets_of(proxy, n) for n in (0, 1, 2)] == [0, 0, 0]
        corpus.delete(lie)
        run_rebuild(node)
        refresh(node, 2)
        assert serve(node, ASKED) == STOCKED
