# SPDX-License-Identifier: Apache-2.0
"""What the settings have requests say: who pays for them, and the encryption of what is written."""

from __future__ import annotations

import pytest

from s3ec.dev.rigs.proxy import FaultProxy
from s3ec.testing.server import MotoServer
from tests.contract.conftest import BUCKET, Configure, Transport
from tests.contract.test_server_identity import all_go

PAYER = "x-amz-request-payer"
ENCRYPTION = "x-amz-server-side-encryption"


@pytest.mark.parametrize("pays", [False, True])
async def test_every_request_says_who_pays(
    pays: bool, moto_server: MotoServer, on_moto: Configure, any_transport: Transport
) -> None:
    with FaultProxy(moto_server.endpoint_url) as proxy:
        prefix = f"payer-{any_transport.__name__}-{pays}".lower()
        store = any_transport(on_moto(endpoint_url=proxy.url, prefix=prefix, requester_pays=pays))
        await all_go(store, "a")
        assert await store.delete_many(["a"]) == {}
        await store.close()
        assert len(proxy.requests) >= 7
        said = {request.headers.get(PAYER) for request in proxy.requests}
        assert said == ({"requester"} if pays else {None})


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {}),
        ({"sse": "AES256"}, {ENCRYPTION: "AES256"}),
        ({"sse": "aws:kms"}, {ENCRYPTION: "aws:kms"}),
        (
            {"sse": "aws:kms", "sse_kms_key_id": "alias/corpus"},
            {ENCRYPTION: "aws:kms", f"{ENCRYPTION}-aws-kms-key-id": "alias/corpus"},
        ),
    ],
)
async def test_writes_ask_for_the_encryption_of_the_settings_and_reads_for_none(
    changes: dict[str, str],
    expected: dict[str, str],
    moto_server: MotoServer,
    on_moto: Configure,
    transport: Transport,
) -> None:
    with FaultProxy(moto_server.endpoint_url) as proxy:
        prefix = f"sse-{transport.__name__}-{len(expected)}-{changes.get('sse', '')}"
        prefix = prefix.replace(":", "-").rstrip("-")
        store = transport(on_moto(endpoint_url=proxy.url, prefix=prefix, **changes))
        await store.put_if_absent("a", [b"body"])
        assert await store.get("a", max_bytes=10) == b"body"
        await store.close()
        put, get = proxy.requests
        asked = {k: v for k, v in put.headers.items() if k.startswith(ENCRYPTION)}
        assert asked == expected
        assert not [name for name in get.headers if name.startswith(ENCRYPTION)]
    kept = moto_server.client().head_object(Bucket=BUCKET, Key=f"{prefix}/a")
    assert kept.get("ServerSideEncryption", "AES256") == expected.get(ENCRYPTION, "AES256")
