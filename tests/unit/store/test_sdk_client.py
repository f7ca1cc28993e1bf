# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from s3ec.config import load_settings
from s3ec.errors import AccessError, ConfigError
from s3ec.store.s3_client import Address, address_of, check_settings, open_client

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
            {"region": "r", "endpoint_url": "https://minio:9000"},
            {},
            "https://minio:9000/my-corpus",
        ),
        (
            {"region": "r", "endpoint_url": "https://minio:9000", "addressing_style": "virtual"},
            {},
            "https://my-corpus.minio:9000",
        ),
        (
            {"region": "r", "allow_http": "true"},
            {"AWS_ENDPOINT_URL": "http://minio:9000"},
            "http://minio:9000/my-corpus",
        ),
        (
            {"region": "r"},
            {"AWS_ENDPOINT_URL_S3": "https://minio:9000"},
            "https://minio:9000/my-corpus",
        ),
    ],
)
def test_address_is_where_the_sdk_sends_and_nothing_is_sent(
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
    address = _address(bucket=BUCKET, **settings)
    assert address == Address(expected, settings["region"], "s3")


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")


PROFILE = "[profile plain]\nendpoint_url = http://minio:9000\n"
SERVICES = (
    "[profile plain]\naws_access_key_id = k\naws_secret_access_key = s\nservices = s\n"
    "[services s]\ns3 =\n  endpoint_url = http://minio:9000\n"
)


@pytest.mark.parametrize("name", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_CONFIG_FILE"])
def test_plain_http_of_the_sdks_own_configuration_needs_leave_too(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "config").write_text(PROFILE)
    monkeypatch.setenv(
        name, str(tmp_path / "config") if name == "AWS_CONFIG_FILE" else "http://minio:9000"
    )
    asked = {"bucket": BUCKET, "region": "r", "profile": "plain"}
    if name != "AWS_CONFIG_FILE":
        del asked["profile"]
    with pytest.raises(ConfigError, match=r"AWS_ENDPOINT_URL.*https://") as caught:
        check_settings(load_settings(asked).settings)
    assert caught.value.field == "allow_http"
    check_settings(load_settings({**asked, "allow_http": True}).settings)


def test_plain_http_of_a_profiles_services_is_found_before_the_first_request(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "config").write_text(SERVICES)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    with pytest.raises(AccessError, match="allow_http") as caught:
        _address(bucket=BUCKET, region="r", profile="plain")
    assert caught.value.is_general


def test_address_of_an_access_point_has_the_region_of_its_name(keys: None) -> None:
    name = "arn:aws:s3:eu-west-1:123456789012:accesspoint/corpus"
    assert _address(bucket=name, region="us-east-1") == Address(
        "https://corpus-123456789012.s3-accesspoint.eu-west-1.amazonaws.com", "eu-west-1", "s3"
    )


def _address(**settings: Any) -> Address:
    loaded = load_settings(settings).settings
    opened = open_client(loaded)
    return address_of(opened.client, loaded.bucket)
