# SPDX-License-Identifier: Apache-2.0
"""The store's suite for an environment of its own: nothing of the checkout, of torch or of vLLM.

Not collected by itself: ``test_environments.py`` runs it there, against the server that the
variable S3EC_TEST_ENDPOINT names.
"""

from __future__ import annotations

import importlib.util
import os

import botocore
import pytest

from s3ec.config import load_settings
from s3ec.store.botocore_s3 import BotocoreStore
from s3ec.store.open import open_store
from s3ec.store.s3 import ObstoreStore
from s3ec.testing.contract import MakeStore, StoreContract

ENDPOINT = {
    "bucket": os.environ["S3EC_TEST_BUCKET"],
    "endpoint_url": os.environ["S3EC_TEST_ENDPOINT"],
    "region": "us-east-1",
    "connect_timeout_s": 10,
    # Writers that race for one name take turns of a second there.
    "read_timeout_s": 30,
}


def test_this_is_the_environment_that_was_asked_for() -> None:
    assert botocore.__version__ == os.environ["S3EC_TEST_BOTOCORE"]
    for absent in ("aioboto3", "aiohttp", "torch", "vllm"):
        assert importlib.util.find_spec(absent) is None
    assert type(open_store(load_settings(ENDPOINT).settings)) is ObstoreStore


class TestDefault(StoreContract):
    list_count = 30  # pages of a server's own size are listed in tests/contract

    @pytest.fixture
    def make_store(self) -> MakeStore:
        return lambda prefix: open_store(load_settings({**ENDPOINT, "prefix": prefix}).settings)


class TestBotocoreAlone(StoreContract):
    list_count = 30

    @pytest.fixture
    def make_store(self) -> MakeStore:
        return lambda prefix: BotocoreStore(load_settings({**ENDPOINT, "prefix": prefix}).settings)
