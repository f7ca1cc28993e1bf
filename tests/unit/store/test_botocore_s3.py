# SPDX-License-Identifier: Apache-2.0
"""What is botocore's alone: threads that hang, and sources of credentials that take their time."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from botocore.exceptions import ConnectionClosedError

from s3ec.dev.rigs import proxy_faults as faults
from s3ec.dev.rigs.proxy import Fault, FaultProxy, Rule
from s3ec.errors import UnavailableError
from s3ec.store.botocore_s3 import BotocoreStore
from s3ec.store.s3_client import Exchange
from tests.support.waiting import eventually, until
from tests.unit.store.conftest import PATIENCE_S, Configure

BODY = os.urandom(300_000)
AMPLE = 2**24


PHASES: dict[str, tuple[Fault, Callable[[BotocoreStore], Awaitable[object]]]] = {
    "head of an answer": (faults.Stall(), lambda store: store.get("a", max_bytes=AMPLE)),
    "body": (faults.Stall(upto=1000), lambda store: store.get("a", max_bytes=AMPLE)),
    "listing": (faults.Stall(upto=10), lambda store: store.list_folders("")),
    "upload": (faults.StallUpload(), lambda store: store.put_if_absent("b", [bytes(32_000_000)])),
}


@pytest.mark.parametrize("phase", PHASES)
async def test_request_that_nobody_waits_for_gives_its_thread_back(
    phase: str, keys: None, configure: Configure, proxy: FaultProxy
) -> None:
    # One thread, which by its socket's limit would wait for ten minutes.
    store = BotocoreStore(configure(prefix=phase, max_concurrency=1, read_timeout_s=600))
    await store.put_if_absent("a", [BODY])
    fault, operation = PHASES[phase]
    rule = proxy.add(Rule(fault, times=1))
    hanging = asyncio.ensure_future(operation(store))
    await until(lambda: rule.fired)
    async with asyncio.timeout(PATIENCE_S):
        hanging.cancel()
        with pytest.raises(asyncio.CancelledError):
            await hanging
        assert await store.get("a", max_bytes=AMPLE) == BODY
    await store.close()


class Connection:
    """One to nobody, of which only this is looked at."""

    def __init__(self) -> None:
        self.sock, self.other = socket.socketpair()

    def close(self) -> None:
        self.sock.close()


def test_answer_that_came_too_late_for_anybody_is_closed() -> None:
    for when in ("while it runs", "between two runs"):
        exchange, connection = Exchange(), Connection()

        def use(exchange: Exchange = exchange, connection: Connection = connection) -> None:
            exchange.uses(connection)

        def use_and_abort(exchange: Exchange = exchange, use: Callable[[], None] = use) -> None:
            use()
            exchange.abort()

        if when == "while it runs":
            exchange.run(use_and_abort)
        else:
            exchange.run(use)
            assert connection.sock.fileno() >= 0  # its body may be read yet
            exchange.abort()
        assert connection.sock.fileno() == -1
        connection.other.close()
        with pytest.raises(ConnectionClosedError):
            exchange.run(lambda: None)


def test_connection_that_another_request_uses_by_now_is_left_alone() -> None:
    exchange, connection = Exchange(), Connection()
    exchange.run(lambda: exchange.uses(connection))
    exchange.is_done_with(connection)
    exchange.abort()
    connection.sock.sendall(b"x")
    assert connection.other.recv(1) == b"x"
    connection.close()
    connection.other.close()


ENDING = """
import asyncio, json, sys, threading
from s3ec.config import load_settings
from s3ec.store.botocore_s3 import BotocoreStore

store = BotocoreStore(load_settings(json.loads(sys.argv[1])).settings)
threading.Thread(
    target=lambda: asyncio.run(store.get("x", max_bytes=10)), daemon=True
).start()
sys.stdin.readline()  # until the request has arrived
"""


def test_thread_that_waits_for_a_server_does_not_keep_a_process_from_ending(
    keys: None, configure: Configure, proxy: FaultProxy
) -> None:
    rule = proxy.add(Rule(faults.Stall()))
    wanted = {"bucket", "endpoint_url", "region", "connect_timeout_s", "read_timeout_s"}
    settings = configure(read_timeout_s=600).model_dump_json(include=wanted)
    with subprocess.Popen(
        [sys.executable, "-c", ENDING, settings],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            eventually(lambda: rule.fired == 1 or process.poll() is not None)
            _, said = process.communicate("go\n", timeout=PATIENCE_S)
        finally:
            process.kill()
    assert process.returncode == 0, said
    assert rule.fired == 1


async def test_length_that_is_no_number_is_unavailable(
    keys: None, configure: Configure, proxy: FaultProxy
) -> None:
    store = BotocoreStore(configure())
    for said in ("many", "-1"):
        proxy.add(Rule(_Length(said)))
        for call in (store.get("x", max_bytes=10), store.head("x"), store.list_folders("")):
            with pytest.raises(UnavailableError):
                await call
        proxy.clear()
    await store.close()


class _Length:
    def __init__(self, said: str) -> None:
        self._said = said

    async def apply(self, exchange: Any) -> None:
        await exchange.read_body()
        head = f'HTTP/1.1 200 OK\r\netag: "x"\r\ncontent-length: {self._said}\r\n\r\n'
        await exchange.send_raw(head.encode())
        exchange.close()


# -- sources of credentials --------------------------------------------------------------------


async def test_service_of_credentials_that_hangs_is_given_up_as_soon_as_a_store_would_be(
    keys: None, configure: Configure, sts: FaultProxy, role_profile: str
) -> None:
    rule = sts.add(Rule(faults.Stall()))
    store = BotocoreStore(configure(profile=role_profile, read_timeout_s=0.3))
    with pytest.raises(UnavailableError):
        await store.get("x", max_bytes=1)
    # It is asked again, which botocore's own limit would put off for a minute.
    async with asyncio.timeout(PATIENCE_S / 2):
        await until(lambda: rule.fired >= 2)
    await store.close()
