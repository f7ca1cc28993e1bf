# SPDX-License-Identifier: Apache-2.0
"""What is asked for at a write: the server-side encryption of the settings, by both transports."""

from __future__ import annotations

import pytest

from s3ec.dev.rigs.proxy import FaultProxy
from s3ec.testing.server import MotoServer
from tests.contract.conftest import BUCKET, Configure, Transport

PREFIX = "x-amz-server-side-encryption"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {}),
        ({"sse": "AES256"}, {PREFIX: "AES256"}),
        ({"sse": "aws:kms"}, {PREFIX: "aws:kms"}),
        (
            {"sse": "aws:kms", "sse_kms_key_id": "alias/corpus"},
            {PREFIX: "aws:kms", f"{PREFIX}-aws-kms-key-id": "alias/corpus"},
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
        assert {k: v for k, v in put.headers.items() if k.startswith(PREFIX)} == expected
        assert not [name for name in get.headers if name.startswith(PREFIX)]
    kept = moto_server.client().head_object(Bucket=BUCKET, Key=f"{prefix}/a")
    assert kept.get("ServerSideEncryption", "AES256") == expected.get(PREFIX, "AES256")
