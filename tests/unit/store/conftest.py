# SPDX-License-Identifier: Apache-2.0
"""Stores in memory that fail as told, and a bucket of moto behind a proxy that misbehaves."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from s3ec.config import load_settings
from s3ec.counters import Counters
from s3ec.dev.rigs.proxy import FaultProxy
from s3ec.errors import CorruptEntryError
from s3ec.settings import Settings
from s3ec.store.base import Store
from s3ec.store.credentials import ChainCredentials
from s3ec.testing.fault_store import FaultStore, Script
from s3ec.testing.memory_store import MemoryStore
from s3ec.testing.server import MotoServer

KEY_ID = "AKIAUNITTESTUNITTEST"
SECRET = "5ecret-unit-test-key-that-nobody-may-see"
ROLE = "arn:aws:iam::123456789012:role/corpus-reader"
# Far beyond what a test takes; a hang fails the test instead of the run.
PATIENCE_S = 60.0
Configure = Callable[..., Settings]


@pytest.fixture
def counters() -> Counters:
    return Counters()


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def inner(script: Script) -> FaultStore:
    """A store in memory that does what the script says."""
    return FaultStore(MemoryStore(), script)


async def names(store: Store, prefix: str = "") -> list[str]:
    return [info.name async for info in store.list(prefix)]


def corrupt(message: str) -> CorruptEntryError:
    return CorruptEntryError(message, reason="length")


OPERATIONS: dict[str, Callable[[Store], Awaitable[object]]] = {
    "get": lambda store: store.get("a", max_bytes=10),
    "get_range": lambda store: store.get_range("a", 0, 10),
    "put_if_absent": lambda store: store.put_if_absent("b", [b"b"]),
    "head": lambda store: store.head("a"),
    "list": names,
    "list_folders": lambda store: store.list_folders(""),
    "delete": lambda store: store.delete("b"),
    "delete_many": lambda store: store.delete_many(["b", "c"]),
}
every_operation = pytest.mark.parametrize("operation", OPERATIONS)


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY_ID)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)


@pytest.fixture
def proxy(moto_server: MotoServer) -> Iterator[FaultProxy]:
    with FaultProxy(moto_server.endpoint_url) as proxy:
        yield proxy


@pytest.fixture
def sts(moto_server: MotoServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    """The service that gives out sessions of roles."""
    with FaultProxy(moto_server.endpoint_url) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL_STS", proxy.url)
        yield proxy


@pytest.fixture
def role_profile(sts: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A profile of the SDK that assumes a role with the environment's credentials."""
    (tmp_path / "role").write_text(
        f"[profile reader]\nrole_arn = {ROLE}\ncredential_source = Environment\n"
        "region = us-east-1\n"
    )
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "role"))
    return "reader"


@pytest.fixture(scope="module")
def bucket(moto_server: MotoServer, request: pytest.FixtureRequest) -> str:
    """One for each file of tests."""
    return moto_server.create_bucket(request.path.stem.replace("_", "-"))


@pytest.fixture
def configure(proxy: FaultProxy, bucket: str, monkeypatch: pytest.MonkeyPatch) -> Configure:
    """Settings for the bucket, by way of the proxy."""
    monkeypatch.setattr(ChainCredentials, "patience_s", PATIENCE_S)
    defaults = {
        "bucket": bucket,
        "endpoint_url": proxy.url,
        "region": "us-east-1",
        "connect_timeout_s": 20,  # a busy machine is not what these tests are about
        "read_timeout_s": 60,
    }
    return lambda **changes: load_settings({**defaults, **changes}).settings
