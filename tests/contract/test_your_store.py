# SPDX-License-Identifier: Apache-2.0
"""The store's tests against a server of yours, which ``S3EC_TEST_ENDPOINT`` names.

``S3EC_TEST_BUCKET`` is a bucket to write to (each test writes below a prefix of its own and leaves
it there); any other setting can be given in the same way, such as ``S3EC_TEST_CA_BUNDLE``.
Credentials come from the SDK's usual variables or profile. ``aws`` as the endpoint is Amazon's.
"""

from __future__ import annotations

import os
import secrets
from typing import Any

import pytest

from s3ec.config import load_settings
from s3ec.settings import Settings
from s3ec.store.open import probe_conditional_put
from s3ec.testing.contract import MakeStore, StoreContract
from tests.contract.conftest import Transport

# Taken when this is imported: the tests run without any AWS_ or S3EC_ variable.
_PREFIX = "S3EC_TEST_"
_ENDPOINT_VARIABLE = f"{_PREFIX}ENDPOINT"
_YOURS = {name: value for name, value in os.environ.items() if name.startswith(("AWS_", _PREFIX))}
_ENDPOINT = _YOURS.get(_ENDPOINT_VARIABLE, "")
_RUN = secrets.token_hex(4)

pytestmark = pytest.mark.skipif(
    not _ENDPOINT, reason="S3EC_TEST_ENDPOINT and S3EC_TEST_BUCKET name no server of yours"
)


@pytest.fixture(autouse=True)
def _your_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE", "AWS_EC2_METADATA_DISABLED"):
        monkeypatch.delenv(name, raising=False)
    for name, value in _YOURS.items():
        if name.startswith("AWS_"):
            monkeypatch.setenv(name, value)


def _settings(**changes: Any) -> Settings:
    given: dict[str, Any] = {
        "region": "us-east-1",
        # Tests open more connections at once than a small server takes within the default second.
        "connect_timeout_s": 30,
        "read_timeout_s": 30,
        **{
            name.removeprefix(_PREFIX).lower(): value
            for name, value in _YOURS.items()
            if name.startswith(_PREFIX) and name != _ENDPOINT_VARIABLE
        },
    }
    if _ENDPOINT != "aws":
        given["endpoint_url"] = _ENDPOINT
        given["allow_http"] = _ENDPOINT.startswith("http://")
    return load_settings({**given, **changes}).settings


class TestOnYourStore(StoreContract):
    # One more page than the largest that S3 gives.
    list_count = 1005

    @pytest.fixture
    def make_store(self, any_transport: Transport) -> MakeStore:
        return lambda prefix: any_transport(_settings(prefix=prefix))


async def test_your_store_refuses_the_second_writer(transport: Transport) -> None:
    store = transport(_settings(prefix=f"s3ec-test-{_RUN}"))
    assert await probe_conditional_put(store) is True
    await store.close()
