# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import importlib.util
import logging
from collections.abc import Sequence

import pytest

from s3ec.config import load_settings
from s3ec.errors import AccessError, ConfigError, ConflictError, UnavailableError
from s3ec.store.aioboto3_s3 import Aioboto3Store
from s3ec.store.open import (
    KEPT_PROBE,
    HeadBeforePut,
    open_store,
    probe_conditional_put,
    with_conditional_put,
)
from s3ec.store.s3 import ObstoreStore
from s3ec.testing.fault_store import Fault, FaultStore, Script
from s3ec.testing.memory_store import MemoryStore


class OverwritingStore(MemoryStore):
    """What rclone and s3rver do with If-None-Match: nothing."""

    async def put_if_absent(self, name: str, body: Sequence[bytes | memoryview]) -> None:
        self.bucket.objects.pop(self._key(name), None)
        await super().put_if_absent(name, body)


every_server = pytest.mark.parametrize(
    ("kind", "expected"),
    [(MemoryStore, True), (OverwritingStore, False)],
)


@pytest.mark.parametrize("is_kept", [False, True])
@every_server
async def test_probe_finds_what_a_server_does_and_leaves_one_object(
    kind: type[MemoryStore], expected: bool, is_kept: bool
) -> None:
    store = kind()
    if is_kept:
        await store.put_if_absent(KEPT_PROBE, [b"of another process"])
    assert await probe_conditional_put(store) is expected
    assert list(store.bucket.objects) == [KEPT_PROBE]


@pytest.mark.parametrize("skip", [0, 1])
async def test_probe_of_who_may_not_write_or_not_overwrite_is_unknown(skip: int) -> None:
    denied = Script([Fault(op="put_if_absent", error=AccessError, skip=skip)])
    assert await probe_conditional_put(store := FaultStore(MemoryStore(), denied)) is None
    assert await with_conditional_put(store) is store


@pytest.mark.parametrize("skip", [0, 1])
async def test_probe_of_a_sick_server_raises(skip: int) -> None:
    sick = Script([Fault(op="put_if_absent", error=UnavailableError, skip=skip)])
    with pytest.raises(UnavailableError):
        await probe_conditional_put(FaultStore(MemoryStore(), sick))


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
    assert "does not honour If-None-Match" in warnings[0].getMessage()


async def test_head_before_put_stores_nothing_when_the_look_fails() -> None:
    inner = MemoryStore()
    store = HeadBeforePut(FaultStore(inner, Script([Fault(op="head", error=UnavailableError)])))
    with pytest.raises(UnavailableError):
        await store.put_if_absent("one", [b"x"])
    assert inner.bucket.objects == {}


@pytest.mark.parametrize(
    ("asked", "kind"),
    [({}, ObstoreStore), ({"transport": "aioboto3"}, Aioboto3Store)],
)
def test_transport_is_what_the_settings_say(asked: dict[str, str], kind: type[object]) -> None:
    assert type(open_store(load_settings({"bucket": "bucket", **asked}).settings)) is kind


def test_asking_for_aioboto3_without_its_extra_is_an_error_with_the_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install aioboto3, or .*`obstore`") as caught:
        open_store(load_settings({"bucket": "bucket", "transport": "aioboto3"}).settings)
    assert caught.value.field == "transport"
