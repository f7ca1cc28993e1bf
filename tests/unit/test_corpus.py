# SPDX-License-Identifier: Apache-2.0
"""The public API on a bucket in memory; what it says of wrong settings; tensors; threads."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from s3ec import codec
from s3ec.config import load_settings
from s3ec.corpus import Corpus
from s3ec.errors import (
    ConfigError,
    NotFoundError,
    S3ECError,
    UnavailableError,
)
from s3ec.identity import Layout, make_key
from s3ec.store.base import Store
from s3ec.tenant import Tenant
from s3ec.testing.fault_store import Fault, FaultStore, Gate, Script
from s3ec.testing.memory_store import MemoryStore
from s3ec.testing.server import MotoServer
from tests.support.corpora import IDS, Bucket, CorpusSuite, Filled
from tests.support.waiting import DEADLINE_S, until
from tests.unit.cli.corpus import MODEL, content_hash, entry_bytes

Make = Callable[..., Corpus]


@pytest.fixture
def make() -> Iterator[Make]:
    """Opens corpora on one bucket in memory, or on another store."""
    opened: list[Corpus] = []
    memory = MemoryStore()

    def make(store: Store | None = None, **changes: Any) -> Corpus:
        settings = load_settings({"bucket": "corpus", **changes}).settings
        own = MemoryStore(memory.bucket)
        opened.append(Corpus(settings, store=store or own, attempts=2))
        return opened[-1]

    yield make
    for corpus in opened:
        corpus.close()
        corpus.close()
    assert memory.check() == []
    assert not [t.name for t in threading.enumerate() if t.name == "s3ec-corpus"]


@pytest.fixture
def filled(make: Make) -> Filled:
    return Filled(make())


class TestInMemory(CorpusSuite):
    pass


# -- settings ----------------------------------------------------------------------------------


def test_arguments_win_over_settings_and_those_over_variables(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("S3EC_BUCKET", "variable")
    monkeypatch.setenv("S3EC_REGION", "eu-west-1")
    with Corpus.open() as corpus:
        assert str(corpus.settings.corpus) == "s3://variable"
    with Corpus.open({"bucket": "settings", "prefix": "p"}) as corpus:
        assert str(corpus.settings.corpus) == "s3://settings/p"
    with Corpus.open({"bucket": "settings"}, url="s3://argument/a") as corpus:
        assert repr(corpus) == "Corpus('s3://argument/a')"
        assert corpus.settings.region == "eu-west-1"
        with Corpus.open(corpus.settings) as again:
            assert again.settings is corpus.settings


@pytest.mark.parametrize(
    ("given", "field", "says"),
    [
        ({}, "bucket", "set it as the argument `bucket`, or as S3EC_BUCKET"),
        ({"bucket": "a/b"}, "bucket", "`bucket` (str, from the argument `bucket`)"),
        ({"bucket": 7}, "bucket", "`bucket` (int, from the argument `bucket`)"),
        ({"bucket": "b" * 9, "endpoint_url": "x"}, "endpoint_url", "endpoint_url"),
        ({"settings": {"buket": "b"}}, "buket", "did you mean `bucket`?"),
        ({"settings": {"bucket": "a/b"}}, "bucket", "(str, from `settings`)"),
        ({"bucket": "b" * 9, "settings": {"profile": "nobody"}}, "profile", "nobody"),
    ],
)
def test_wrong_setting_is_named_with_its_place(given: Any, field: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Corpus.open(**given)
    assert caught.value.field == field
    assert says in str(caught.value)


def test_empty_bucket_names_the_arguments_to_check(make: Make) -> None:
    with pytest.raises(NotFoundError, match="check `bucket` and `prefix`"):
        make().get(IDS[0])
    assert make().namespaces() == []


def test_variable_names_the_namespace(filled: Filled, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("S3EC_NAMESPACE", "nobody")
    with pytest.raises(NotFoundError, match="S3EC_NAMESPACE `nobody`"):
        filled.corpus.list()
    assert filled.corpus.stat(IDS[0], namespace=filled.name) is not None
    monkeypatch.setenv("S3EC_NAMESPACE", filled.name[:6])
    assert filled.corpus.stat(IDS[0]) is not None


def test_namespace_of_a_newer_release_is_taken_only_by_its_name(
    filled: Filled, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("s3ec.identity.FORMAT_VERSION", 2)
        newer = filled.namespace({**MODEL, "revision": "r2"})
    assert filled.corpus.choose() == filled.name
    assert filled.corpus.choose(newer) == newer


@pytest.mark.parametrize("version", [2, 1.5, "1", True, None], ids=repr)
def test_namespace_of_a_newer_release_stays_as_it_is(make: Make, version: object) -> None:
    """Nor is a version of another form one that this release reads."""
    memory = MemoryStore()
    corpus = make(memory)
    filled = Filled(corpus)
    filled.entry(filled.name, "damaged", b"of another form")
    found = corpus.verify(deep=True)
    about = json.dumps({**MODEL, "format": version}).encode()
    memory.bucket.objects[Layout(filled.name).descriptor] = about
    before = dict(memory.bucket.objects)
    calls: list[Callable[[], object]] = [
        lambda: corpus.delete(IDS),
        lambda: corpus.delete(IDS, dry_run=True),
        lambda: corpus.gc(max_bytes=0),
        lambda: corpus.gc(max_bytes=0, dry_run=True),
        lambda: corpus.repair(found),
    ]
    for call in calls:
        with pytest.raises(ConfigError, match="newer format"):
            call()
    assert memory.bucket.objects == before


@pytest.mark.parametrize("other", [{"endpoint_url": "https://production:9000"}, {}], ids=str)
def test_state_of_an_audit_is_of_one_server(tmp_path: Path, other: dict[str, str]) -> None:
    """Another one has a bucket of the same name, or another bucket has its address by now."""
    states = tmp_path / "states"

    def opened(store: MemoryStore, **place: str) -> Corpus:
        given = {"bucket": "embeddings", "endpoint_url": "https://staging:9000", **place}
        return Corpus(load_settings(given).settings, store=store)

    with opened(MemoryStore(clock=lambda: 1000.0)) as corpus:
        name = Filled(corpus).name
        corpus.verify(name, deep=True, state=states)
        assert corpus.verify(name, deep=True, state=states, resume_complete=True).deep is not None
    made_s = 1000.0 if other else 2000.0
    with opened(MemoryStore(clock=lambda: made_s), **other) as corpus:
        Filled(corpus)
        found = corpus.verify(name, deep=True, state=states, resume_complete=True).deep
        assert found is not None
        assert (found.objects, found.resumed) == (4, 0)


# -- tenants -----------------------------------------------------------------------------------


def test_tenant_finds_its_entries_and_nobody_else_does(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACME", "the secret of acme, long enough")
    tenant = Tenant(b"the secret of acme, long enough")
    bucket = Bucket(make())
    name = bucket.namespace({**MODEL, "tenant": tenant.id})
    key = make_key(IDS[0], tenant)
    assert key is not None
    bucket.put(Layout(name).object(key), entry_bytes(key.stored, name))
    assert bucket.corpus.stat(IDS[0]) is None
    holder = make(tenant_key="env:ACME")
    entry = holder.stat(IDS[0])
    assert entry is not None
    assert entry.identifier is None  # the bucket does not know it
    assert entry.header is not None
    assert entry.header.identifier == key.stored
    assert holder.delete(IDS[0]).count == 1
    monkeypatch.delenv("ACME")
    with pytest.raises(ConfigError, match="ACME"):
        make(tenant_key="env:ACME").get(IDS[0])


# -- tensors -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_numpy_and_torch_have_the_stored_values(filled: Filled, dtype: str) -> None:
    torch = pytest.importorskip("torch")
    values = torch.linspace(-3e4, 3e4, 24).reshape(4, 6).to(getattr(torch, dtype))
    data = values.view(torch.uint8).numpy().tobytes()
    header = codec.Header(
        "t", filled.name, "image", codec.Shape(4, 6, dtype), codec.checksum(data), {}
    )
    filled.entry(filled.name, "t", codec.encode_header(header) + data)
    embedding = filled.corpus.get("t")
    assert embedding is not None
    tensor = embedding.to_torch()
    assert tensor.dtype == values.dtype
    assert torch.equal(tensor, values)
    tensor.zero_()  # a copy: the bytes stay
    array = embedding.to_numpy()
    assert array.dtype == ("float16" if dtype == "float16" else "float32")
    assert (array == values.to(torch.float32).numpy()).all()
    assert array.shape == embedding.shape == (4, 6)


# -- faults ------------------------------------------------------------------------------------


def faulty(make: Make, *faults: Fault) -> Filled:
    script = Script()
    filled = Filled(make(FaultStore(MemoryStore(), script)))
    for fault in faults:
        script.faults.append(fault)
    return filled


def test_request_is_sent_again_where_one_answer_fails(make: Make) -> None:
    once = Fault(op="get", name="/objects/", error=UnavailableError, times=1)
    assert faulty(make, once).corpus.get(IDS[0]) is not None
    assert once.struck == 1


def test_entry_that_is_deleted_while_it_is_read_is_absent(make: Make, filled: Filled) -> None:
    entry = filled.corpus.find(IDS[0])
    assert entry is not None
    make().delete(IDS[0])
    assert filled.corpus.stat(entry) is None
    assert filled.corpus.get(entry) is None


# -- threads -----------------------------------------------------------------------------------


async def test_it_works_where_a_loop_runs_already(filled: Filled) -> None:
    assert asyncio.get_running_loop()
    assert filled.corpus.get(IDS[0]) is not None


def test_closed_corpus_says_so(filled: Filled) -> None:
    listing = filled.corpus.list()
    next(listing)
    other = filled.corpus.list()
    filled.corpus.close()
    asks: list[Callable[[], object]] = [
        lambda: filled.corpus.get(IDS[0]),
        lambda: next(other),
        filled.corpus.namespaces,
    ]
    for ask in asks:
        with pytest.raises(S3ECError, match="closed; open another"):
            ask()
    listing.close()  # type: ignore[attr-defined]


def test_a_call_ends_when_another_thread_closes_the_corpus(make: Make) -> None:
    gate = Gate()
    filled = faulty(make, Fault(op="get_range", gate=gate))
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(filled.corpus.stat, IDS[0])
        assert gate.reached.wait(DEADLINE_S)
        filled.corpus.close()
        with pytest.raises(S3ECError, match="closed meanwhile"):
            call.result(DEADLINE_S)


def test_interrupted_call_waits_until_it_has_cleaned_up(make: Make) -> None:
    """Ctrl-C in the main thread, while it waits."""
    cleaned, main = [], threading.get_ident()

    def waits() -> bool:
        """For the result; to start the loop, it has waited for something else."""
        frame = sys._current_frames()[main]
        above = frame.f_back
        return (
            frame.f_code is threading.Condition.wait.__code__
            and above is not None
            and above.f_code is Future.result.__code__
        )

    async def work(_: Store) -> None:
        try:
            await until(waits)
            await asyncio.sleep(0.2)  # it has called wait, and is about to sleep in it
            signal.pthread_kill(main, signal.SIGINT)
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            cleaned.append("up")

    corpus = make()
    with pytest.raises(KeyboardInterrupt):
        corpus.run(work)
    assert cleaned == ["up"]
    assert corpus.namespaces() == []


def put_many(corpus: Corpus, count: int) -> set[str]:
    layout = Layout(Bucket(corpus).namespace(MODEL))
    labels = {content_hash(str(number)) for number in range(count)}

    async def put(store: Store) -> None:
        for label in labels:
            key = make_key(label)
            assert key is not None
            await store.put_if_absent(layout.object(key), [b"entry"])

    corpus.run(put)
    return labels


@pytest.mark.parametrize(("count", "requests"), [(100, (1, 0)), (5000, (257, 1))])
def test_each_entry_is_listed_once_and_few_with_few_requests(
    make: Make, count: int, requests: tuple[int, int]
) -> None:
    store = FaultStore(MemoryStore())
    corpus = make(store)
    labels = put_many(corpus, count)
    corpus.choose()
    before = store.calls["list"], store.calls["list_folders"]
    assert sorted(entry.label for entry in corpus.list()) == sorted(labels)
    after = store.calls["list"], store.calls["list_folders"]
    assert (after[0] - before[0], after[1] - before[1]) == requests


def test_listing_that_nobody_ends_holds_nothing_up(make: Make) -> None:
    corpus = make()
    put_many(corpus, 3500)  # some batches, of which one waits to be taken
    listing = corpus.list()
    next(listing)
    corpus.close()


# -- the page ----------------------------------------------------------------------------------

PAGE = Path(__file__).parents[2] / "docs/python.md"


def test_the_examples_of_the_page_run(
    moto_server: MotoServer,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("torch")
    for name, value in moto_server.env().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("S3EC_ENDPOINT_URL", moto_server.endpoint_url)
    monkeypatch.setenv("S3EC_CONNECT_TIMEOUT_S", "10")  # the machine may be busy
    monkeypatch.setenv("S3EC_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    assert len(blocks) >= 5
    moto_server.create_bucket("embeddings")
    try:
        with Corpus.open(bucket="embeddings", prefix="team-a") as corpus:
            bucket = Bucket(corpus)
            name = bucket.namespace(MODEL)
            for text in ("page-12-of-report", *"abc"):
                bucket.entry(name, text)
        names: dict[str, Any] = {}
        for block in blocks:
            exec(compile(block, str(PAGE), "exec"), names)
    finally:
        moto_server.delete_bucket("embeddings")
    assert "acme/vision-9b" in capsys.readouterr().out
