# SPDX-License-Identifier: Apache-2.0
"""How stores of URLs are made; requests are in tests/contract."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest
from obstore.store import AzureStore, GCSStore

from s3ec.config import load_settings
from s3ec.errors import ConfigError
from s3ec.store import url_store
from s3ec.store.open import open_store
from s3ec.store.url_store import UrlStore


def opened(url: str, **changes: Any) -> UrlStore:
    store = open_store(load_settings({"url": url, **changes}).settings)
    assert isinstance(store, UrlStore)
    return store


@pytest.fixture(autouse=True)
def account(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")


@pytest.mark.parametrize(
    ("url", "kind"), [("gs://corpus/a", GCSStore), ("az://corpus/a", AzureStore)]
)
def test_stores_of_clouds_are_made_without_a_loop_and_without_a_request(
    url: str, kind: type[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    client = url_store.cloud_client(load_settings({"url": url}).settings)
    assert isinstance(client, kind)
    monkeypatch.setattr(url_store, "cloud_client", lambda settings: client)
    store = opened(url)
    assert repr(store) == f"UrlStore({url})"
    holders = sys.getrefcount(client)
    asyncio.run(store.close())
    assert sys.getrefcount(client) < holders  # its connections are closed


def test_azure_without_an_account_is_a_config_error_that_names_the_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME")
    with pytest.raises(ConfigError, match="set AZURE_STORAGE_ACCOUNT_NAME") as caught:
        opened("az://corpus")
    assert caught.value.field == "url"


def test_authorities_that_are_no_certificates_are_a_config_error(tmp_path: Path) -> None:
    bundle = tmp_path / "ca.pem"
    bundle.write_text("-----BEGIN CERTIFICATE-----\n!\n-----END CERTIFICATE-----\n")
    with pytest.raises(ConfigError):
        opened("gs://corpus", ca_bundle=str(bundle))


async def test_a_store_serves_one_loop(tmp_path: Path) -> None:
    store = opened(tmp_path.as_uri())
    assert await store.head("x") is None
    with pytest.raises(RuntimeError, match="one event loop"):
        await asyncio.to_thread(lambda: asyncio.run(store.head("x")))  # type: ignore[arg-type]
    await store.close()
    with pytest.raises(RuntimeError, match="closed"):
        await store.head("x")
