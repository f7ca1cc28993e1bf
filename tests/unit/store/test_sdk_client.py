# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import contextlib
from typing import Any

import pytest

from s3ec.config import load_settings
from s3ec.store.sdk_client import Address, address_of, open_client

BUCKET = "my-corpus"


@pytest.mark.parametrize(
    ("settings", "variables", "expected"),
    [
        ({"region": "eu-west-1"}, {}, "https://my-corpus.s3.eu-west-1.amazonaws.com"),
        (
            {"region": "eu-west-1", "addressing_style": "path"},
            {},
            "https://s3.eu-west-1.amazonaws.com/my-corpus",
        ),
        (
            {"region": "cn-north-1"},
            {},
            "https://my-corpus.s3.cn-north-1.amazonaws.com.cn",
        ),
        (
            {"region": "eu-west-1"},
            {"AWS_USE_DUALSTACK_ENDPOINT": "true"},
            "https://my-corpus.s3.dualstack.eu-west-1.amazonaws.com",
        ),
        (
            {"region": "r", "endpoint_url": "http://minio:9000"},
            {},
            "http://minio:9000/my-corpus",
        ),
        (
            {"region": "r", "endpoint_url": "http://minio:9000", "addressing_style": "virtual"},
            {},
            "http://my-corpus.minio:9000",
        ),
        (
            {"region": "r"},
            {"AWS_ENDPOINT_URL_S3": "https://minio:9000"},
            "https://minio:9000/my-corpus",
        ),
    ],
)
async def test_address_is_where_the_sdk_sends_and_nothing_is_sent(
    settings: dict[str, str],
    variables: dict[str, str],
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in {
        "AWS_ACCESS_KEY_ID": "k",
        "AWS_SECRET_ACCESS_KEY": "s",
        **variables,
    }.items():
        monkeypatch.setenv(name, value)
    address = await _address(bucket=BUCKET, **settings)
    assert address == Address(expected, settings["region"], "s3")


async def test_address_of_an_access_point_has_the_region_of_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    name = "arn:aws:s3:eu-west-1:123456789012:accesspoint/corpus"
    assert await _address(bucket=name, region="us-east-1") == Address(
        "https://corpus-123456789012.s3-accesspoint.eu-west-1.amazonaws.com", "eu-west-1", "s3"
    )


async def _address(**settings: Any) -> Address:
    loaded = load_settings(settings).settings
    async with contextlib.AsyncExitStack() as resources:
        opened = await open_client(loaded, resources)
        return await address_of(opened.client, loaded.bucket)
