# SPDX-License-Identifier: Apache-2.0
"""Each transport against real HTTP servers: moto, and SeaweedFS with its signatures."""

from __future__ import annotations

import pytest

from s3ec.errors import AccessError, ConflictError
from s3ec.store.base import Store
from s3ec.store.botocore_s3 import BotocoreStore
from s3ec.store.open import ConditionalPut, probe_conditional_put
from s3ec.store.s3 import ObstoreStore
from s3ec.testing.contract import MakeStore, StoreContract
from s3ec.testing.server import Identity, LocalS3
from tests.contract.conftest import BUCKET, READER, WRITER, Configure, Transport


class TestOnMoto(StoreContract):
    """The default transport; the others have SeaweedFS."""

    list_count = 120
    decides_races = False

    @pytest.fixture
    def make_store(self, on_moto: Configure, monkeypatch: pytest.MonkeyPatch) -> MakeStore:
        monkeypatch.setattr(ObstoreStore, "page_size", 7)
        return lambda prefix: ObstoreStore(on_moto(prefix=prefix))


class TestOnSeaweed(StoreContract):
    # One more page than the largest that S3 gives.
    list_count = 1005

    @pytest.fixture
    def make_store(self, on_seaweed: Configure, any_transport: Transport) -> MakeStore:
        # Writers that race for one name take turns of a second there.
        return lambda prefix: any_transport(on_seaweed(prefix=prefix))


async def test_small_pages_of_seaweed_hold_every_object(
    on_seaweed: Configure, transport: Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "page_size", 7)
    store = transport(on_seaweed(prefix=f"small-pages-{transport.__name__}"))
    names = {f"o/{i:02d}/x" for i in range(40)}
    for name in names:
        await store.put_if_absent(name, [b"x"])
    assert {info.name async for info in store.list("o/")} == names
    later = [info.name async for info in store.list("o/", start_after="o/30/x")]
    assert sorted(later) == [f"o/{i}/x" for i in range(31, 40)]
    assert len(await store.list_folders("o/")) == len(names)
    await store.close()


async def test_missing_bucket_is_an_access_error_that_names_it(
    on_moto: Configure, transport: Transport
) -> None:
    store = transport(on_moto(bucket="no-such-bucket"))

    async def listing() -> None:
        async for _ in store.list(""):
            pass

    for call in (
        lambda: store.get("x", max_bytes=10),
        lambda: store.put_if_absent("x", [b"x"]),
        lambda: store.delete("x"),
        lambda: store.list_folders(""),
        listing,
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


async def test_reader_is_refused_writes_and_its_probe_says_unknown(
    guarded_s3: LocalS3,
    monkeypatch: pytest.MonkeyPatch,
    on_seaweed: Configure,
    transport: Transport,
) -> None:
    store = _store_as(READER, guarded_s3, monkeypatch, on_seaweed, transport)
    with pytest.raises(AccessError, match=r"403 AccessDenied.*s3:PutObject") as caught:
        await store.put_if_absent("x", [b"x"])
    assert caught.value.code == "AccessDenied"
    with pytest.raises(AccessError):
        await store.delete("x")
    assert await probe_conditional_put(store) is ConditionalPut.UNKNOWN
    await store.close()


async def test_writer_is_refused_reads_and_its_probe_finds_the_condition_enforced(
    guarded_s3: LocalS3,
    monkeypatch: pytest.MonkeyPatch,
    on_seaweed: Configure,
    transport: Transport,
) -> None:
    store = _store_as(WRITER, guarded_s3, monkeypatch, on_seaweed, transport)
    name = f"writer/{transport.__name__}"
    await store.put_if_absent(name, [b"x"])
    with pytest.raises(ConflictError):
        await store.put_if_absent(name, [b"x"])
    for call in (lambda: store.get(name, max_bytes=10), lambda: store.head(name)):
        with pytest.raises(AccessError, match="403"):
            await call()
    assert await probe_conditional_put(store) is ConditionalPut.ENFORCED
    await store.close()


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
