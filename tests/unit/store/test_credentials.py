# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import namedtuple
from collections.abc import AsyncIterator
from typing import Any

import pytest
from botocore.exceptions import CredentialRetrievalError, NoCredentialsError

from s3ec.errors import UnavailableError
from s3ec.store.credentials import ChainCredentials
from tests.unit.store.conftest import PATIENCE_S

Keys = namedtuple("Keys", "access_key secret_key token account_id")


class Chain:
    """What the SDK would find, and how often it was asked for."""

    def __init__(self) -> None:
        self.name: str | None = "first"
        self.now_s = 100.0
        self.walks = 0
        self.asked = 0
        self.seconds_left: float | None = None
        self.error: Exception | None = None
        self.gate = threading.Event()
        self.gate.set()
        self.credentials = ChainCredentials(self.find, clock=lambda: self.now_s)
        self.credentials.patience_s = PATIENCE_S

    def find(self) -> Any:
        self.walks += 1
        self.gate.wait()
        if self.name is None:
            raise NoCredentialsError
        return Refreshable(self) if self.seconds_left is not None else Found(self)

    async def name_used(self) -> str:
        name: str = (await self.credentials.get_frozen_credentials()).access_key
        return name


class Found:
    method = "a-test"

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        self.name = chain.name

    def get_frozen_credentials(self) -> Keys:
        return Keys(self.name, "s", None, None)


class Refreshable(Found):
    """As the SDK's: asked for a renewal by each call."""

    def refresh_needed(self, refresh_in: float) -> bool:
        return self.chain.seconds_left is not None and self.chain.seconds_left < refresh_in

    def get_frozen_credentials(self) -> Keys:
        self.chain.asked += 1
        self.chain.gate.wait()
        if self.chain.error is not None:
            raise self.chain.error
        return Keys(self.chain.name, "s", None, None)


@pytest.fixture
async def chain() -> AsyncIterator[Chain]:
    chain = Chain()
    yield chain
    chain.gate.set()
    await chain.credentials.close()


async def test_refused_credentials_are_looked_for_once_however_many_ask(chain: Chain) -> None:
    refused = await chain.credentials.get_frozen_credentials()
    chain.name = "second"  # a moment after the first look, and found all the same
    asked = (chain.credentials.others(refused, "ExpiredToken") for _ in range(8))
    assert [one.access_key for one in await asyncio.gather(*asked)] == ["second"] * 8
    assert await chain.name_used() == "second"
    assert chain.walks == 2


async def test_refusal_of_a_request_from_before_the_change_costs_no_look(chain: Chain) -> None:
    refused = await chain.credentials.get_frozen_credentials()
    chain.name = "second"
    assert await chain.credentials.others(refused, "ExpiredToken") is not None
    late = await chain.credentials.others(refused, "ExpiredToken")
    assert late.access_key == "second"
    assert chain.walks == 2


async def test_refused_without_others_is_used_on_and_looked_for_seldom_and_said_once(
    chain: Chain, caplog: pytest.LogCaptureFixture
) -> None:
    refused = await chain.credentials.get_frozen_credentials()
    for _ in range(20):
        chain.now_s += 1
        assert await chain.credentials.others(refused, "InvalidAccessKeyId") is None
        assert await chain.name_used() == "first"
    assert 3 <= chain.walks <= 6
    assert caplog.text.count("there are no others yet") == 1
    chain.name = "second"
    chain.now_s += 5
    assert (await chain.credentials.others(refused, "InvalidAccessKeyId")).access_key == "second"
    assert caplog.text.count("others are used now") == 1


async def test_a_look_that_hangs_leaves_the_refusal_as_it_is(chain: Chain) -> None:
    refused = await chain.credentials.get_frozen_credentials()
    chain.credentials.patience_s = 0.05
    chain.gate.clear()
    assert await chain.credentials.others(refused, "ExpiredToken") is None


async def test_a_source_in_vain_is_remembered_for_a_while(chain: Chain) -> None:
    chain.name = None
    for _ in range(3):
        with pytest.raises(NoCredentialsError):
            await chain.name_used()
    assert chain.walks == 1
    chain.name = "late"
    chain.now_s += 5
    assert await chain.name_used() == "late"


async def test_a_source_that_hangs_is_waited_for_once_and_not_by_those_that_come_later(
    chain: Chain,
) -> None:
    chain.credentials.patience_s = 0.05
    chain.gate.clear()
    for _ in range(2):
        with pytest.raises(UnavailableError, match="still being looked for"):
            await chain.name_used()
        chain.now_s += 1
    chain.gate.set()
    chain.credentials.patience_s = PATIENCE_S
    assert await chain.name_used() == "first"
    assert chain.walks == 1


async def test_renewal_long_before_the_end_holds_no_request_up(chain: Chain) -> None:
    chain.seconds_left = 800.0
    assert await chain.name_used() == "first"
    chain.gate.clear()  # the service hangs from here on
    chain.now_s += 10
    for _ in range(5):
        assert await chain.name_used() == "first"
    while chain.asked < 2:  # noqa: ASYNC110 -- in a thread
        await asyncio.sleep(0)
    chain.now_s += 10  # the look still goes on, and another one would hang as well
    assert await chain.name_used() == "first"
    assert chain.asked == 2
    chain.name = "second"
    chain.gate.set()
    async with asyncio.timeout(30):
        while await chain.name_used() != "second":  # noqa: ASYNC110 -- a task of its own
            await asyncio.sleep(0)


async def test_renewed_ones_that_have_expired_are_an_error_of_the_sdk(chain: Chain) -> None:
    chain.seconds_left = 10.0
    assert await chain.name_used() == "first"
    chain.now_s += 10
    # What the SDK raises then is a bare RuntimeError, which no boundary would know.
    chain.error = RuntimeError("refreshed credentials are still expired")
    with pytest.raises(CredentialRetrievalError, match="still expired"):
        await chain.name_used()


async def test_repr_holds_no_key(chain: Chain) -> None:
    assert await chain.name_used() == "first"
    assert repr(chain.credentials) == "ChainCredentials(a-test)"
    await chain.credentials.close()


async def test_a_source_that_hangs_for_ever_keeps_few_threads(chain: Chain) -> None:
    chain.credentials.longest_look_s = 0.01
    chain.gate.clear()

    async def ask() -> None:
        with pytest.raises(UnavailableError, match="looked for in vain"):
            await chain.name_used()
        chain.now_s += 10

    async with asyncio.timeout(PATIENCE_S):
        while chain.walks < 4:
            await ask()
    for _ in range(6):
        await ask()
    assert chain.walks == 4
    chain.gate.set()
    while True:
        chain.now_s += 10
        with contextlib.suppress(UnavailableError):
            assert await chain.name_used() == "first"
            break
