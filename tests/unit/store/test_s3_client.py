# SPDX-License-Identifier: Apache-2.0
"""Each S3 client: how it is made, what signs its requests, how long it lives; what it asks is in
tests/contract.
"""

from __future__ import annotations

import asyncio
import logging
import re
import sys
import traceback
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from botocore.config import Config
from botocore.exceptions import BotoCoreError
from botocore.utils import parse_timestamp

from s3ec.config import load_settings
from s3ec.dev.rigs import proxy_faults as faults
from s3ec.dev.rigs.proxy import FaultProxy, Rule
from s3ec.errors import AccessError, ConfigError
from s3ec.settings import Settings
from s3ec.store.aioboto3_s3 import Aioboto3Store
from s3ec.store.botocore_s3 import BotocoreStore
from s3ec.store.credentials import ChainCredentials
from s3ec.store.open import open_store
from s3ec.store.s3 import ObstoreStore
from s3ec.store.s3_client import (
    Address,
    address_of,
    check_settings,
    new_session,
    open_client,
    parse_time,
)
from tests.unit.store.conftest import KEY_ID, ROLE, SECRET, Configure

TOKEN = "t0ken-unit-test-that-nobody-may-see"
SIGNATURE_QUOTED = (
    "<Error><Code>SignatureDoesNotMatch</Code><Message>Check your key.</Message>"
    f"<CanonicalRequest>PUT x-amz-security-token:{TOKEN}</CanonicalRequest></Error>"
)
BUCKET = "my-corpus"
Make = Callable[..., BotocoreStore]
Transport = type[BotocoreStore]


@pytest.fixture(params=[ObstoreStore, BotocoreStore], ids=["obstore", "botocore"])
def transport(request: pytest.FixtureRequest) -> Transport:
    kind: Transport = request.param
    return kind


@pytest.fixture
async def make(configure: Configure, transport: Transport) -> AsyncIterator[Make]:
    stores = []

    def make(**changes: Any) -> BotocoreStore:
        stores.append(transport(configure(**changes)))
        return stores[-1]

    yield make
    for store in stores:
        await store.close()


def offline(**changes: Any) -> Settings:
    return load_settings({"bucket": BUCKET, **changes}).settings


def address(**changes: Any) -> Address:
    settings = offline(**changes)
    return address_of(open_client(settings).client, settings.bucket)


# -- addresses ---------------------------------------------------------------------------------


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
    keys: None,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert address(**settings) == Address(expected, settings["region"], "s3")


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
    asked: dict[str, Any] = {"region": "r"}
    if name == "AWS_CONFIG_FILE":
        asked["profile"] = "plain"
    with pytest.raises(ConfigError, match=r"AWS_ENDPOINT_URL.*https://") as caught:
        check_settings(offline(**asked))
    assert caught.value.field == "allow_http"
    check_settings(offline(**asked, allow_http=True))


@pytest.mark.parametrize("region", ["", " ", "us_east"])
def test_a_region_of_the_environment_that_is_none_is_named_with_its_variable(
    region: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_DEFAULT_REGION", region)
    with pytest.raises(
        ConfigError, match=r"`region` \(of AWS_DEFAULT_REGION .*us-east-1"
    ) as caught:
        check_settings(offline())
    assert caught.value.field == "region"
    check_settings(offline(region="eu-west-1"))


def test_plain_http_of_a_profiles_services_is_found_before_the_first_request(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "config").write_text(SERVICES)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    with pytest.raises(AccessError, match="allow_http") as caught:
        address(region="r", profile="plain")
    assert caught.value.is_general


def test_address_of_an_access_point_has_the_region_of_its_name(keys: None) -> None:
    name = "arn:aws:s3:eu-west-1:123456789012:accesspoint/corpus"
    assert address(bucket=name, region="us-east-1") == Address(
        "https://corpus-123456789012.s3-accesspoint.eu-west-1.amazonaws.com", "eu-west-1", "s3"
    )


# -- set-up, credentials, life time ---------------------------------------------------------------


@pytest.mark.parametrize("place", ["setting", "environment"])
def test_unknown_profile_is_a_config_error_of_that_field(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if place == "environment":
        monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(ConfigError, match="nobody") as caught:
        open_store(offline(profile="nobody") if place == "setting" else offline())
    assert caught.value.field == "profile"


def test_unreadable_shared_configuration_is_a_config_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config").write_text("[[[ no section\nx")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    with pytest.raises(ConfigError, match="shared configuration"):
        open_store(offline())


@pytest.mark.parametrize("field", ["region", "ca_bundle"])
def test_a_setting_that_the_sdk_cannot_use_is_a_config_error_of_that_field(
    field: str, tmp_path: Path
) -> None:
    (tmp_path / "ca.pem").write_text("not a certificate")
    wrong = {"region": "eu west/1", "ca_bundle": tmp_path / "ca.pem"}
    with pytest.raises(ConfigError) as caught:
        open_store(offline(**{field: wrong[field]}))
    assert caught.value.field == field


async def test_absent_credentials_are_an_access_error_that_heals(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ChainCredentials, "look_every_s", 0.0)
    store = make()
    for _ in range(2):
        with pytest.raises(AccessError, match=r"AWS_ACCESS_KEY_ID.*`profile`") as caught:
            await store.get("x", max_bytes=1)
        assert caught.value.code == "NoCredentialsError"
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY_ID)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    assert await store.get("x", max_bytes=1) is None


def test_second_event_loop_is_refused(
    configure: Configure, keys: None, transport: Transport
) -> None:
    store = transport(configure())

    async def use() -> None:
        await store.get("x", max_bytes=1)

    async def use_and_close() -> None:
        await store.get("x", max_bytes=1)
        with pytest.raises(RuntimeError, match="one event loop"):
            await asyncio.to_thread(asyncio.run, use())
        await store.close()

    asyncio.run(use_and_close())


@pytest.mark.parametrize("source", ["profile", "web identity"])
async def test_a_role_is_assumed_once_and_its_session_signs(
    source: str,
    make: Make,
    proxy: FaultProxy,
    sts: FaultProxy,
    role_profile: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    if source == "profile":
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY_ID)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    else:
        (tmp_path / "token").write_text("a-web-identity-token")
        monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(tmp_path / "token"))
        monkeypatch.setenv("AWS_ROLE_ARN", ROLE)
    store = make(profile=role_profile) if source == "profile" else make()
    for _ in range(3):
        assert await store.get("absent", max_bytes=1) is None
    (asked,) = sts.requests  # the session is kept until it expires
    assert source != "profile" or KEY_ID in asked.headers["authorization"]
    for request in proxy.requests:
        assert KEY_ID not in request.headers["authorization"]
        assert "x-amz-security-token" in request.headers


async def test_credentials_that_expire_are_renewed_between_requests(
    make: Make, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # Each call gives another key that expires at once, by the SDK's idea of expiring soon.
    script = tmp_path / "keys.py"
    script.write_text(
        "import datetime, json, pathlib\n"
        "calls = pathlib.Path(__file__).with_suffix('.calls')\n"
        "calls.write_text((calls.read_text() if calls.exists() else '') + '.')\n"
        "soon = datetime.datetime.now(datetime.UTC) + datetime.timedelta(minutes=2)\n"
        "print(json.dumps({'Version': 1, 'SecretAccessKey': 's', 'Expiration': soon.isoformat(),\n"
        "    'AccessKeyId': f'AKIACALL{len(calls.read_text())}'}))\n"
    )
    (tmp_path / "config").write_text(
        f"[profile renewing]\ncredential_process = {sys.executable} -I {script}\n"
    )
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    # Two minutes from their end the SDK renews them whenever it is asked; wait for each.
    monkeypatch.setattr(ChainCredentials, "look_every_s", 0.0)
    monkeypatch.setattr(ChainCredentials, "last_s", 600)
    store = make(profile="renewing")
    for _ in range(3):
        assert await store.get("absent", max_bytes=1) is None
    keys = [re.findall("AKIACALL[0-9]+", r.headers["authorization"])[0] for r in proxy.requests]
    assert len(set(keys)) == len(keys) >= 3  # the first absence is asked about twice


@pytest.mark.parametrize(
    "name", ["AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE", "the profile", "HTTP_PROXY", "ALL_PROXY"]
)
@pytest.mark.parametrize("value", ["/nowhere/ca.pem", "/", __file__])
def test_an_environment_that_no_client_can_use_is_named_at_the_start(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if name == "the profile":
        (tmp_path / "config").write_text(f"[default]\nca_bundle = {value}\n")
        monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    else:
        monkeypatch.setenv(name, f"socks5:/{value}" if "PROXY" in name else value)
    with pytest.raises(ConfigError, match=name):
        open_store(offline(endpoint_url="http://127.0.0.1:1"))


async def test_role_that_may_not_be_assumed_is_an_access_error_naming_the_role(
    make: Make, keys: None, sts: FaultProxy, role_profile: str
) -> None:
    sts.add(Rule(faults.s3_error(403, "AccessDenied")))
    with pytest.raises(AccessError, match="correct the role"):
        await make(profile=role_profile).get("x", max_bytes=1)


SDK_LOGGERS = list(map(logging.getLogger, ("aioboto3", "aiobotocore", "boto3", "botocore")))


@pytest.fixture
def sdk_levels() -> Iterator[None]:
    levels = [logger.level for logger in SDK_LOGGERS]
    for logger in SDK_LOGGERS:
        logger.setLevel(logging.NOTSET)
    yield
    for logger, level in zip(SDK_LOGGERS, levels, strict=True):
        logger.setLevel(level)


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("", {}),
        ("", {"use_accelerate_endpoint": True}),
        ("https://s3-us-west-2.amazonaws.com", {}),
        ("https://bucket.vpce-1a2b3c-4d5e.s3.us-east-1.vpce.amazonaws.com", {}),
    ],
)
@pytest.mark.parametrize("variant", [True, False])
def test_whatever_the_sdk_asks_at_amazon_is_amazons(
    url: str, options: dict[str, Any], variant: bool
) -> None:
    asked = []
    for bucket, region in (
        ("my-corpus", "us-east-1"),
        ("my-corpus", "cn-north-1"),
        ("my-corpus--use1-az4--x-s3", "us-east-1"),
        ("arn:aws:s3:us-east-1:123456789012:accesspoint/images", "us-east-1"),
    ):
        core = new_session(offline())  # which keeps the SDK's models
        core.set_credentials("nobody", "unused")
        config = Config(
            s3=options, use_fips_endpoint=variant and not url, use_dualstack_endpoint=variant
        )
        with (
            closing(
                core.create_client(
                    "s3", region_name=region, endpoint_url=url or None, config=config
                )
            ) as client,
            suppress(BotoCoreError),
        ):  # some do not go together
            asked.append(address_of(client, bucket))
    assert asked or variant
    assert [each.url for each in asked if not each.is_amazons] == []


@pytest.mark.parametrize("transport", [ObstoreStore, BotocoreStore, Aioboto3Store], indirect=True)
async def test_no_log_and_no_traceback_holds_the_credentials(
    make: Make,
    keys: None,
    sdk_levels: None,
    proxy: FaultProxy,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    transport: Transport,
) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", TOKEN)
    monkeypatch.setattr(Address, "is_amazons", True)  # others' tokens are not given to obstore
    caplog.set_level(logging.DEBUG)
    told = []
    store = make(prefix=transport.__name__)
    await store.put_if_absent("logged", [b"x"])
    assert proxy.requests[0].headers["x-amz-security-token"] == TOKEN
    for fault in (
        # What S3 says to a wrong signature repeats the request, its token included.
        faults.Answer(403, SIGNATURE_QUOTED.encode()),
        faults.s3_error(503, "SlowDown"),
        faults.s3_error(307, "TemporaryRedirect", headers={"location": "/x"}),
        faults.Reset(),
        faults.html_page(),
    ):
        proxy.add(Rule(fault))
        for call in (store.put_if_absent("logged", [b"x"]), store.get_range("logged", 0, 1)):
            try:
                await call
            except Exception as exc:  # noqa: BLE001 -- whatever it is, its text counts
                told.append("".join(traceback.format_exception(exc)) + repr(exc))
    await store.close()
    assert len(told) >= 9  # a page is a body like any other
    text = "\n".join([*told, caplog.text, repr(store)])
    assert SECRET not in text
    assert TOKEN not in text


@pytest.mark.parametrize(
    "value",
    ["2026-11-26T09:44:10Z", "2026-11-26T09:44:10.123Z", "2026-11-26T09:44:10+01:00",
     "Thu, 26 Nov 2026 09:44:10 GMT", "1795686830", "20260101", "2026-11-26", 1795686830, 1.5],
)  # fmt: skip
def test_time_is_read_as_by_the_sdk(value: object) -> None:
    assert parse_time(value) == parse_timestamp(value)
