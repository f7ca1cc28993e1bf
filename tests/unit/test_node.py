# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from s3ec.config import load_settings
from s3ec.errors import UnavailableError
from s3ec.identity import Layout, Namespace
from s3ec.index import maker
from s3ec.index.local import NodeFolder
from s3ec.node import Node, destination_of, refresh_pause_s
from s3ec.store.endpoint import Breaker
from s3ec.testing.memory_store import MemoryStore
from s3ec.tier.claims import Claim
from s3ec.tier.evictor import evict_lock
from s3ec.tier.files import Folders
from s3ec.tier.inspection import Inspection
from tests.support.file_calls import open_below
from tests.support.on_disk import audit_of, running_total
from tests.support.waiting import eventually
from tests.unit.index.corpus import NAMESPACE, Corpus, key_of
from tests.unit.tier.cases import (
    DESTINATION,
    child,
    entry,
    key_at,
    new_tier,
    opened,
    publish,
)
from tests.unit.tier.cases import NAMESPACE as CHILDS_NAMESPACE


def destination(**changes: Any) -> str:
    return destination_of(load_settings(changes).settings)


def test_destination_of_s3_stays_what_spools_on_disk_have_in_their_names() -> None:
    assert destination(bucket="corpus", prefix="a") == "ae441ceb2774632d"
    assert destination(url="s3://corpus/a") == destination(bucket="corpus", prefix="a")


def test_every_place_has_a_destination_of_its_own() -> None:
    places = [
        {"bucket": "corpus"},
        {"bucket": "corpus", "prefix": "a"},
        {"bucket": "corpus", "endpoint_url": "http://127.0.0.1:1"},
        {"url": "gs://corpus"},
        {"url": "az://corpus"},
        {"url": "gs://corpus/a"},
        {"url": "file:///corpus"},
        {"url": "file:///corpus/a"},
    ]
    assert len({destination(**place) for place in places}) == len(places)


@pytest.mark.parametrize("url", ["file:///a%20b", "file:///a b/"])
def test_one_place_written_in_two_ways_has_one_destination(url: str) -> None:
    assert destination(url=url) == destination(url="file:///a%20b")


# -- following the bucket ----------------------------------------------------------------------


@pytest.fixture
def corpus() -> Corpus:
    return Corpus()


@pytest.fixture
def make_node(corpus: Corpus, tmp_path: Path) -> Iterator[Callable[..., Node]]:
    nodes: list[Node] = []

    def make(namespace: str = NAMESPACE, **changes: Any) -> Node:
        place = {} if "url" in changes else {"bucket": "corpus"}
        given = {**place, "cache_dir": str(tmp_path), "index_refresh_s": 0.1}
        settings = load_settings(given | changes).settings
        store = MemoryStore(corpus.store.bucket, clock=corpus.clock)
        nodes.append(Node(settings, Namespace(namespace, {}), store=store))
        return nodes[-1]

    yield make
    for node in nodes:
        node.close(10)
        assert node.counters.get("internal_errors") == 0


def test_a_node_follows_snapshots_and_deltas(
    corpus: Corpus, make_node: Callable[..., Node]
) -> None:
    corpus.snapshot("a")
    node = make_node()
    node.follow_the_bucket()
    eventually(lambda: node.index.maybe_contains(key_of("a")))
    corpus.delta("b")
    eventually(lambda: node.index.maybe_contains(key_of("b")))
    corpus.snapshot("a", "b", "c")
    eventually(lambda: node.index.maybe_contains(key_of("c")))
    assert node.index.maybe_contains(key_of("a"))


def test_a_node_does_not_spin_while_a_probe_of_its_breaker_is_out() -> None:
    breaker = Breaker()
    assert refresh_pause_s(10, breaker) == 10
    breaker.is_open = True
    assert breaker.pause_s == 0  # the pause is over, and somebody asks
    assert 0.5 < refresh_pause_s(10, breaker) < 1


def test_a_node_that_may_write_lists_what_has_no_index(
    corpus: Corpus, make_node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_often(monkeypatch)
    corpus.save("a")
    node = make_node()
    node.follow_the_bucket()
    node.maintain_the_index()
    eventually(lambda: node.index.maybe_contains(key_of("a")))
    assert node.counters.get("index.listings") == 1


def test_a_node_knows_at_once_what_another_process_of_it_puts_on_its_disk(
    make_node: Callable[..., Node], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = make_node(CHILDS_NAMESPACE)
    walks: list[str] = []

    def names() -> Iterator[str]:
        walks.append("one")
        yield from ()

    monkeypatch.setattr(node.tier.entries, "names", names)
    node.follow_the_bucket()
    eventually(lambda: len(walks) == 2)  # one of them for the residents
    with child("churn", tmp_path, 1 << 30, 0, 3) as other:
        other.hear()
        other.say()
        eventually(lambda: all(node.local(key_at(number)) for number in range(3)))
        other.hear()
        other.end()
    assert len(walks) == 2


def test_a_node_that_ends_in_the_middle_of_a_refresh_leaves_no_file_half(
    corpus: Corpus, make_node: Callable[..., Node]
) -> None:
    corpus.snapshot(*range(1000))
    for number in range(64):
        corpus.delta(1000 + number)
    node = make_node()
    node.follow_the_bucket()
    eventually(lambda: node.counters.get("index.downloads") > 0)
    node.close(10)
    again = make_node()
    assert audit_of(again.tier) == []
    again.follow_the_bucket()
    every = [key_of(number) for number in range(1064)]
    eventually(lambda: all(map(again.index.maybe_contains, every)))


def make_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maker, "LOOK_EVERY_S", 0.01)


def test_a_node_whose_loop_cannot_be_stopped_gives_its_tier_back_all_the_same(
    make_node: Callable[..., Node], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = make_node()
    stop = node.loop.stop

    def failing(timeout_s: float) -> None:
        stop(timeout_s)
        raise IndexError("a fault of ours")

    monkeypatch.setattr(node.loop, "stop", failing)
    node.tier.writer.publish(key_at(0), [entry(key_at(0), namespace=NAMESPACE)])
    node.residents.add(key_at(0).digest, opened(node.tier, key_at(0)))
    assert open_below(tmp_path) != []
    with pytest.raises(IndexError, match="fault of ours"):
        node.close(10)
    assert open_below(tmp_path) == []


# -- what is granted at once -------------------------------------------------------------------


def is_granted(node: Node, number: int = 0) -> bool:
    return node.residents.get(key_at(number).digest, time.monotonic()) is not None


@pytest.fixture
def with_record(corpus: Corpus) -> None:
    record = b'{"width": 32, "dtype": "bfloat16"}'
    corpus.put(Layout(CHILDS_NAMESPACE).modality("image"), record)


@pytest.mark.usefixtures("with_record")
def test_what_is_on_the_disk_is_granted_once_the_bucket_has_answered(
    make_node: Callable[..., Node], tmp_path: Path
) -> None:
    tier = new_tier(tmp_path)
    publish(tier, 0)
    node = make_node(CHILDS_NAMESPACE)
    node.residents.add(key_at(0).digest, opened(tier, key_at(0)))
    publish(tier, 1)
    assert not is_granted(node)
    node.follow_the_bucket()
    eventually(lambda: is_granted(node) and is_granted(node, 1))
    tier.close()


@pytest.mark.usefixtures("with_record")
def test_nothing_is_granted_at_once_while_the_bucket_is_silent(
    make_node: Callable[..., Node], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = new_tier(tmp_path)
    publish(tier, 0)
    tier.close()
    node = make_node(CHILDS_NAMESPACE)
    node.follow_the_bucket()
    eventually(lambda: is_granted(node))

    async def refuse(*_: object) -> None:
        raise UnavailableError("no answer")

    monkeypatch.setattr(node.index, "refresh", refuse)
    before = node.counters.get("index.refresh_failed")
    eventually(lambda: node.counters.get("index.refresh_failed") > before)
    assert is_granted(node)  # it has answered lately
    with monkeypatch.context() as patch:
        # Four refreshes of 0.1 s and 10 s; what was verified is believed for longer.
        patch.setattr(node.index, "answered_s", lambda: 11)
        assert not is_granted(node)
    monkeypatch.undo()
    eventually(lambda: is_granted(node))


@pytest.mark.parametrize(
    "record", [None, b'{"width": 33, "dtype": "bfloat16"}', b'{"width": 32, "dtype": "float32"}']
)
def test_what_the_record_does_not_confirm_is_not_granted_at_once(
    corpus: Corpus, make_node: Callable[..., Node], tmp_path: Path, record: bytes | None
) -> None:
    name = Layout(CHILDS_NAMESPACE).modality("image")
    if record is not None:
        corpus.put(name, record)
    tier = new_tier(tmp_path)
    publish(tier, 0)
    tier.close()
    node = make_node(CHILDS_NAMESPACE)
    node.follow_the_bucket()
    eventually(lambda: len(node.residents) == 1)
    if record is not None:
        eventually(lambda: node.records.known("image") is not None)
    assert not is_granted(node)
    if record is None:  # until its first producer has written it
        corpus.put(name, b'{"width": 32, "dtype": "bfloat16"}')
        eventually(lambda: is_granted(node))


@pytest.mark.usefixtures("with_record")
def test_nothing_is_granted_at_once_where_a_folder_stands_for_the_bucket(
    make_node: Callable[..., Node], tmp_path: Path
) -> None:
    tier = new_tier(tmp_path)
    publish(tier, 0)
    tier.close()
    node = make_node(CHILDS_NAMESPACE, url=f"file://{tmp_path}/corpus")
    node.follow_the_bucket()
    eventually(lambda: len(node.residents) == 1)
    eventually(lambda: node.records.known("image") is not None)
    assert not is_granted(node)


# -- forks -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_forked_child_makes_a_node_of_its_own_and_leaves_its_parents_alone(
    tmp_path: Path,
) -> None:
    with child("fork", tmp_path / "cache") as parent:
        assert parent.hear() == "done"
        parent.end()


def test_a_forked_child_keeps_no_lock_of_its_dead_parent(tmp_path: Path) -> None:
    root = tmp_path / "cache"
    with child("orphan", root) as parent:
        temp = Path(parent.hear())
        parent.kill()  # its child lives
        tier = new_tier(root)
        # Nor does it keep open what its parent had, and blocks on the disk with it.
        assert Inspection.open(root).report(now_s=time.time()).open_nbytes == 0
        claim = tier.entries.open_or_claim(key_at(1))
        assert isinstance(claim, Claim)
        tier.claims.release(claim)
        assert len(tier.open_spool(DESTINATION).adopt()) == 1
        assert not temp.exists()
        with evict_lock(Folders(root)) as alone:
            assert alone
        assert running_total(tier) > 0
        node = NodeFolder.of(tier.folders, CHILDS_NAMESPACE)
        made = node.try_claim("make")
        assert made is not None
        node.release(made)
        parent.say()
        tier.close()
