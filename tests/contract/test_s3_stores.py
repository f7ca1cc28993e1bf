# SPDX-License-Identifier: Apache-2.0
"""Each transport against real HTTP servers: moto, and SeaweedFS with its signatures."""

from __future__ import annotations

import pytest

from s3ec.errors import AccessError
from s3ec.store.base import Store
from s3ec.store.botocore_s3 import BotocoreStore
from s3ec.store.s3 import ObstoreStore
from s3ec.testing.contract import MakeStore, StoreContract
from s3ec.testing.server import Identity, LocalS3
from tests.contract.conftest import BUCKET, READER, Configure, Transport, names


class TestOnMoto(StoreContract):
    """The default transport; the others have SeaweedFS."""

    list_count = 120
    decides_races = False

    @pytest.fixture
    def make_store(self, on_moto: Configure, monkeypatch: pytest.MonkeyPatch) -> MakeStore:
        monkeypatch.setattr(ObstoreStore, "page_size", 7)
        return lambda prefix: ObstoreStore(on_moto(prefix=prefix))


class TestOnSeaweed(StoreContract):
    """Pages of its own size are in test_index.py and test_corpus.py."""

    list_count = 120

    @pytest.fixture
    def make_store(
        self,
        on_seaweed: Configure,
        any_transport: Transport,
        monkeypatch: pytest.MonkeyPatch,
    ) -> MakeStore:
        monkeypatch.setattr(any_transport, "page_size", 7)
        # Writers that race for one name take turns of a second there.
        return lambda prefix: any_transport(on_seaweed(prefix=prefix))


async def test_missing_bucket_is_an_access_error_that_names_it(
    on_moto: Configure, transport: Transport
) -> None:
    store = transport(on_moto(bucket="no-such-bucket"))
    for call in (
        lambda: store.get("x", max_bytes=10),
        lambda: store.put_if_absent("x", [b"x"]),
        lambda: store.delete("x"),
        lambda: store.list_folders(""),
        lambda: names(store),
    ):
        with pytest.raises(AccessError, match=r"no-such-bucket.*create the bucket") as caught:
            await call()
        assert caught.value.code == "NoSuchBucket"
    await store.close()


def _store_as(
    identity: Identity,
    server: LocalS3,
    monkeypatch: pytest.MonkeyPatch,
    on_seaweed: Configure,
    transport: Transport,
) -> Store:
    for name, value in server.env(identity).items():
        monkeypatch.setenv(name, value)
    return transport(on_seaweed(endpoint_url=server.endpoint_url, bucket=BUCKET))


@pytest.mark.parametrize("field", ["access_key", "secret_key"])
async def test_wrong_keys_are_an_access_error_without_the_keys(
    field: str,
    guarded_s3: LocalS3,
    monkeypatch: pytest.MonkeyPatch,
    on_seaweed: Configure,
    any_transport: Transport,
) -> None:
    wrong = Identity("nobody", **{"access_key": READER.access_key, field: "wr0ng-" + "k" * 30})
    store = _store_as(wrong, guarded_s3, monkeypatch, on_seaweed, any_transport)
    with pytest.raises(AccessError) as caught:
        await store.get("x", max_bytes=10)
    assert caught.value.code in ("InvalidAccessKeyId", "SignatureDoesNotMatch")
    assert wrong.secret_key not in f"{caught.value!r} {caught.value.__cause__!r} {store!r}"
    await store.close()


# Of the nine digits: the check value of CRC-32, 0xCBF43926, and their SHA-256.
CHECKSUMS = {
    BotocoreStore: ("ChecksumCRC32", "y/Q5Jg=="),
    ObstoreStore: ("ChecksumSHA256", "FeKw08M4keuw8e9gnsQZQgwg4yDOlMZfvIwzEkSOsiU="),
}


async def test_stored_checksum_is_that_of_the_body(
    on_seaweed: Configure, transport: Transport, local_s3: LocalS3
) -> None:
    settings = on_seaweed(prefix=f"checksum-{transport.__name__}")
    store = transport(settings)
    await store.put_if_absent("x", [b"1234", b"56789"])
    stored = local_s3.client().head_object(
        Bucket=settings.bucket, Key=f"{settings.prefix}/x", ChecksumMode="ENABLED"
    )
    name, expected = CHECKSUMS[transport]
    assert stored[name] == expected
    await store.close()
