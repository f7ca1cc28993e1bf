# SPDX-License-Identifier: Apache-2.0
"""Set-up, credentials and life time of both transports; requests are in tests/contract."""

from __future__ import annotations

import asyncio
import logging
import re
import sys
import traceback
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from s3ec.config import load_settings
from s3ec.dev.rigs import proxy_faults as faults
from s3ec.dev.rigs.proxy import FaultProxy, Rule
from s3ec.errors import AccessError, ConfigError
from s3ec.settings import Settings
from s3ec.store import credentials, s3_client
from s3ec.store.aioboto3_s3 import Aioboto3Store
from s3ec.store.botocore_s3 import BotocoreStore
from s3ec.store.open import open_store
from s3ec.store.s3 import ObstoreStore
from s3ec.testing.server import MotoServer

KEY_ID = "AKIAUNITTESTUNITTEST"
SECRET = "5ecret-unit-test-key-that-nobody-may-see"
TOKEN = "t0ken-unit-test-that-nobody-may-see"
SIGNATURE_QUOTED = (
    "<Error><Code>SignatureDoesNotMatch</Code><Message>Check your key.</Message>"
    f"<CanonicalRequest>PUT x-amz-security-token:{TOKEN}</CanonicalRequest></Error>"
)
ROLE = "arn:aws:iam::123456789012:role/corpus-reader"
Make = Callable[..., BotocoreStore]
Transport = type[BotocoreStore]


@pytest.fixture(
    params=[ObstoreStore, BotocoreStore, Aioboto3Store], ids=["obstore", "botocore", "aioboto3"]
)
def transport(request: pytest.FixtureRequest) -> Transport:
    kind: Transport = request.param
    return kind


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY_ID)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)


@pytest.fixture(scope="module")
def bucket(moto_server: MotoServer) -> str:
    return moto_server.create_bucket("unit-store")


@pytest.fixture
def configure(moto_server: MotoServer, bucket: str) -> Callable[..., Settings]:
    defaults = {
        "bucket": bucket,
        "endpoint_url": moto_server.endpoint_url,
        "region": "us-east-1",
    }
    return lambda **changes: load_settings({**defaults, **changes}).settings


@pytest.fixture
async def make(configure: Callable[..., Settings], transport: Transport) -> AsyncIterator[Make]:
    stores = []

    def make(**changes: Any) -> BotocoreStore:
        stores.append(transport(configure(**changes)))
        return stores[-1]

    yield make
    for store in stores:
        await store.close()


@pytest.fixture
def clients_made(monkeypatch: pytest.MonkeyPatch, transport: Transport) -> list[int]:
    """One entry per SDK client that is made."""
    made: list[int] = []
    genuine = transport._connect

    async def counting(store: BotocoreStore) -> Any:
        made.append(1)
        return await genuine(store)

    monkeypatch.setattr(transport, "_connect", counting)
    return made


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry per walk through the SDK's chain."""
    made: list[int] = []
    genuine = s3_client._find_credentials

    def counting(settings: Settings) -> Any:
        made.append(1)
        return genuine(settings)

    monkeypatch.setattr(s3_client, "_find_credentials", counting)
    return made


def offline(**changes: Any) -> Settings:
    return load_settings({"bucket": "bucket", **changes}).settings


@pytest.mark.parametrize(
    ("setting", "expected"),
    [("auto", ObstoreStore), ("aioboto3", Aioboto3Store), ("obstore", ObstoreStore)],
)
def test_open_store_makes_the_transport_without_a_loop(setting: str, expected: Transport) -> None:
    store = open_store(offline(transport=setting))
    assert type(store) is expected
    asyncio.run(store.close())


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


def test_impossible_region_is_a_config_error_of_that_field() -> None:
    with pytest.raises(ConfigError) as caught:
        open_store(offline(region="eu west/1"))
    assert caught.value.field == "region"


def test_ca_bundle_without_certificates_is_a_config_error_of_that_field(tmp_path: Path) -> None:
    path = tmp_path / "ca.pem"
    path.write_text("not a certificate")
    with pytest.raises(ConfigError) as caught:
        open_store(offline(ca_bundle=path))
    assert caught.value.field == "ca_bundle"


def test_repr_names_the_place_and_nothing_else(keys: None, transport: Transport) -> None:
    store = transport(offline(prefix="a b", endpoint_url="http://127.0.0.1:1"))
    assert repr(store) == f"{transport.__name__}(s3://bucket/a b/ at http://127.0.0.1:1)"


async def test_profile_of_the_shared_configuration_is_used(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moto_server: MotoServer
) -> None:
    (tmp_path / "credentials").write_text(
        f"[corpus]\naws_access_key_id = {KEY_ID}\naws_secret_access_key = {SECRET}\n"
    )
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    # A named profile goes before keys in the environment.
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIASOMEBODYELSE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    with FaultProxy(moto_server.endpoint_url) as proxy:
        store = make(profile="corpus", endpoint_url=proxy.url)
        assert await store.get("absent", max_bytes=1) is None
        assert KEY_ID in proxy.requests[0].headers["authorization"]
        await store.close()


async def test_absent_credentials_are_an_access_error_that_heals(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(credentials, "_LOOK_EVERY_S", 0.0)
    store = make()
    for _ in range(2):
        with pytest.raises(AccessError, match=r"AWS_ACCESS_KEY_ID.*`profile`") as caught:
            await store.get("x", max_bytes=1)
        assert caught.value.code == "NoCredentialsError"
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY_ID)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    assert await store.get("x", max_bytes=1) is None


async def test_many_calls_without_credentials_look_for_them_once(
    make: Make, looks: list[int]
) -> None:
    store = make()
    for _ in range(2):
        calls = (store.get("x", max_bytes=1) for _ in range(8))
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(result, AccessError) for result in results)
    assert looks == [1]


async def test_half_of_the_credentials_is_an_access_error(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY_ID)
    with pytest.raises(AccessError, match="AWS_SECRET_ACCESS_KEY"):
        await make().get("x", max_bytes=1)


async def test_client_is_made_once_for_many_first_calls(
    make: Make, keys: None, clients_made: list[int]
) -> None:
    store = make()
    assert clients_made == []
    await asyncio.gather(*(store.get(f"n{i}", max_bytes=1) for i in range(20)))
    assert clients_made == [1]


def test_second_event_loop_is_refused(
    configure: Callable[..., Settings], keys: None, transport: Transport
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


async def test_call_after_close_is_an_error_of_the_caller(make: Make, keys: None) -> None:
    store = make()
    await store.close()
    with pytest.raises(RuntimeError, match="closed"):
        await store.get("x", max_bytes=1)


async def test_role_is_assumed_and_its_session_signs(
    make: Make, keys: None, moto_server: MotoServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FaultProxy(moto_server.endpoint_url) as sts, FaultProxy(moto_server.endpoint_url) as s3:
        monkeypatch.setenv("AWS_ENDPOINT_URL_STS", sts.url)
        store = make(role_arn=ROLE, endpoint_url=s3.url)
        for _ in range(3):
            assert await store.get("absent", max_bytes=1) is None
        assert len(sts.requests) == 1  # the session is kept until it expires
        assert KEY_ID in sts.requests[0].headers["authorization"]
        for request in s3.requests:
            assert KEY_ID not in request.headers["authorization"]
            assert "x-amz-security-token" in request.headers
        await store.close()


async def test_web_identity_of_the_environment_is_used(
    make: Make, moto_server: MotoServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "token").write_text("a-web-identity-token")
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(tmp_path / "token"))
    monkeypatch.setenv("AWS_ROLE_ARN", ROLE)
    with FaultProxy(moto_server.endpoint_url) as sts, FaultProxy(moto_server.endpoint_url) as s3:
        monkeypatch.setenv("AWS_ENDPOINT_URL_STS", sts.url)
        store = make(endpoint_url=s3.url)
        for _ in range(2):
            assert await store.get("absent", max_bytes=1) is None
        assert len(sts.requests) == 1
        assert all("x-amz-security-token" in request.headers for request in s3.requests)
        await store.close()


async def test_credentials_that_expire_are_renewed_between_requests(
    make: Make, moto_server: MotoServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
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
    monkeypatch.setattr(credentials, "_LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(credentials, "_LAST_S", 600)
    with FaultProxy(moto_server.endpoint_url) as s3:
        store = make(endpoint_url=s3.url, profile="renewing")
        for _ in range(3):
            assert await store.get("absent", max_bytes=1) is None
        keys = [re.findall("AKIACALL[0-9]+", r.headers["authorization"])[0] for r in s3.requests]
        assert len(set(keys)) == 3
        await store.close()


async def test_endpoint_of_the_sdks_environment_serves_where_no_setting_names_one(
    make: Make, keys: None, moto_server: MotoServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FaultProxy(moto_server.endpoint_url) as s3:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", s3.url)
        store = make(endpoint_url=None, addressing_style="path")
        assert await store.get("absent", max_bytes=1) is None
        assert [request.target for request in s3.requests] == ["/unit-store/absent"]
        await store.close()


async def test_endpoint_of_the_settings_goes_before_the_environments(
    make: Make, keys: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    assert await make().get("absent", max_bytes=1) is None


async def test_role_that_may_not_be_assumed_is_an_access_error_naming_the_setting(
    make: Make, keys: None, moto_server: MotoServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FaultProxy(moto_server.endpoint_url) as sts:
        sts.add(Rule(faults.s3_error(403, "AccessDenied")))
        monkeypatch.setenv("AWS_ENDPOINT_URL_STS", sts.url)
        with pytest.raises(AccessError, match="`role_arn`"):
            await make(role_arn=ROLE).get("x", max_bytes=1)


async def test_role_without_credentials_to_assume_it_is_an_access_error(
    make: Make, looks: list[int]
) -> None:
    store = make(role_arn=ROLE)
    for _ in range(3):
        with pytest.raises(AccessError, match="AWS_ACCESS_KEY_ID"):
            await store.get("x", max_bytes=1)
    assert looks == [1]


async def test_no_log_and_no_traceback_holds_the_credentials(
    make: Make,
    keys: None,
    moto_server: MotoServer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    transport: Transport,
) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", TOKEN)
    for name in ("aioboto3", "aiobotocore", "boto3", "botocore"):
        monkeypatch.setattr(logging.getLogger(name), "level", logging.NOTSET)
        logging.getLogger(name).manager._clear_cache()  # type: ignore[attr-defined]
    caplog.set_level(logging.DEBUG)
    told = []
    with FaultProxy(moto_server.endpoint_url) as proxy:
        store = make(endpoint_url=proxy.url, prefix=transport.__name__)
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


def test_log_level_that_somebody_chose_for_the_sdk_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("botocore"), "level", logging.DEBUG)
    BotocoreStore(offline())
    assert logging.getLogger("botocore").level == logging.DEBUG
