# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import importlib.util
import logging
import sys

import pytest

from s3ec.config import load_settings
from s3ec.errors import AccessError, ConfigError, ConflictError, UnavailableError
from s3ec.store.aioboto3_s3 import Aioboto3Store
from s3ec.store.botocore_s3 import BotocoreStore
from s3ec.store.open import (
    ConditionalPut,
    HeadBeforePut,
    choose_transport,
    open_store,
    probe_conditional_put,
    with_conditional_put,
)
from s3ec.store.s3 import ObstoreStore
from s3ec.testing.fault_store import Fault, FaultStore, Script
from s3ec.testing.memory_store import MemoryStore
from tests.support.overwriting import OverwritingStore

every_server = pytest.mark.parametrize(
    ("kind", "expected"),
    [(MemoryStore, ConditionalPut.ENFORCED), (OverwritingStore, ConditionalPut.IGNORED)],
)


@every_server
async def test_probe_finds_what_a_server_does_and_leaves_nothing(
    kind: type[MemoryStore], expected: ConditionalPut
) -> None:
    store = kind()
    assert await probe_conditional_put(store) is expected
    assert store.bucket.objects == {}


async def test_probe_of_a_reader_is_unknown() -> None:
    denied = Script([Fault(op="put_if_absent|delete", error=AccessError)])
    assert await probe_conditional_put(FaultStore(MemoryStore(), denied)) is ConditionalPut.UNKNOWN


async def test_probe_of_a_writer_that_may_not_overwrite_is_unknown() -> None:
    inner = MemoryStore()
    denied = Script([Fault(op="put_if_absent", error=AccessError, skip=1)])
    assert await probe_conditional_put(FaultStore(inner, denied)) is ConditionalPut.UNKNOWN
    assert inner.bucket.objects == {}


@pytest.mark.parametrize("skip", [0, 1])
async def test_probe_of_a_sick_server_raises_and_leaves_nothing(skip: int) -> None:
    inner = MemoryStore()
    sick = Script([Fault(op="put_if_absent", error=UnavailableError, skip=skip)])
    with pytest.raises(UnavailableError):
        await probe_conditional_put(FaultStore(inner, sick))
    assert inner.bucket.objects == {}


async def test_probe_that_cannot_clean_up_says_what_stays(
    caplog: pytest.LogCaptureFixture,
) -> None:
    inner = MemoryStore()
    store = FaultStore(inner, Script([Fault(op="delete", error=UnavailableError, skip=1)]))
    assert await probe_conditional_put(store) is ConditionalPut.ENFORCED
    (left,) = inner.bucket.objects
    assert left in caplog.text


async def test_a_store_is_probed_once_for_all_who_ask() -> None:
    store = FaultStore(MemoryStore())
    await with_conditional_put(store)
    probed = store.calls.total()
    assert probed == 4
    for _ in range(2):
        assert await with_conditional_put(store) is store
    assert store.calls.total() == probed


async def test_an_identity_without_rights_is_probed_again() -> None:
    """It may be allowed to write later, and then the answer matters."""
    store = FaultStore(
        OverwritingStore(), Script([Fault("put_if_absent", error=AccessError, times=1)])
    )
    assert await with_conditional_put(store) is store
    assert isinstance(await with_conditional_put(store), HeadBeforePut)


async def test_head_before_put_keeps_the_first_writer_where_the_server_does_not_and_warns_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    good = MemoryStore()
    assert await with_conditional_put(good) is good
    store = await with_conditional_put(OverwritingStore())
    await store.put_if_absent("one", [b"first"])
    for _ in range(2):
        with pytest.raises(ConflictError):
            await store.put_if_absent("one", [b"second"])
    assert await store.get("one", max_bytes=10) == b"first"
    warnings = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "ignores If-None-Match" in warnings[0].getMessage()


async def test_head_before_put_stores_nothing_when_the_look_fails() -> None:
    inner = MemoryStore()
    store = HeadBeforePut(FaultStore(inner, Script([Fault(op="head", error=UnavailableError)])))
    with pytest.raises(UnavailableError):
        await store.put_if_absent("one", [b"x"])
    assert inner.bucket.objects == {}


@pytest.mark.parametrize(
    ("asked", "name", "kind"),
    [
        ("auto", "obstore", ObstoreStore),
        ("obstore", "obstore", ObstoreStore),
        ("aioboto3", "aioboto3", Aioboto3Store),
    ],
)
def test_transport_is_what_the_settings_say_and_auto_is_obstore(
    asked: str, name: str, kind: type[BotocoreStore]
) -> None:
    settings = load_settings({"bucket": "bucket", "transport": asked}).settings
    assert choose_transport(settings).name == name
    assert type(open_store(settings)) is kind


def test_without_obstore_auto_is_botocore_and_what_needs_it_an_error_with_the_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    monkeypatch.delitem(sys.modules, "obstore.store", raising=False)
    settings = load_settings({"bucket": "bucket"}).settings
    assert type(open_store(settings)) is BotocoreStore
    assert "pip install obstore" in choose_transport(settings).reason
    for asked, field in (
        ({"bucket": "bucket", "transport": "obstore"}, "transport"),
        ({"url": "file:///corpus"}, "url"),
    ):
        for call in (choose_transport, open_store):
            with pytest.raises(ConfigError, match="pip install obstore") as caught:
                call(load_settings(asked).settings)
            assert caught.value.field == field


def test_asking_for_aioboto3_without_its_extra_is_an_error_with_the_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install aioboto3, or .*`auto`") as caught:
        open_store(load_settings({"bucket": "bucket", "transport": "aioboto3"}).settings)
    assert caught.value.field == "transport"
    assert type(open_store(load_settings({"bucket": "bucket"}).settings)) is ObstoreStore
