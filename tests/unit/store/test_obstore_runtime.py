# SPDX-License-Identifier: Apache-2.0
"""How processes end that used obstore."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import obstore
import pytest
from obstore.store import MemoryStore

from s3ec.store import obstore_runtime
from s3ec.store.obstore_runtime import held
from s3ec.testing.server import MotoServer
from tests.support.waiting import until

# Ends in the middle of its requests, in a way that stops nothing: the loop's thread is a daemon.
ENDING = """
import asyncio, json, os, sys, threading
from s3ec.config import load_settings
from s3ec.store.s3 import ObstoreStore

verb, settings = sys.argv[1], load_settings(json.loads(sys.argv[2])).settings
warm, mine = threading.Event(), os.urandom(8).hex()

async def repeat(store):
    while True:
        if verb == "GET":
            assert await store.get(mine, max_bytes=100_000) is not None
        else:
            await store.put_if_absent(os.urandom(8).hex(), [memoryview(bytes(100_000))])
        warm.set()

async def use():
    store = ObstoreStore(settings)
    await store.put_if_absent(mine, [bytes(100_000)])
    await asyncio.gather(*(repeat(store) for _ in range(16)), return_exceptions=True)

threading.Thread(target=lambda: asyncio.run(use()), daemon=True).start()
sys.exit(0 if warm.wait(240) else 3)
"""


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["GET", "PUT"])
def test_processes_that_end_in_the_midst_of_requests_are_not_aborted(
    verb: str, moto_server: MotoServer
) -> None:
    settings = {
        "bucket": moto_server.create_bucket(f"ending-{verb.lower()}"),
        "endpoint_url": moto_server.endpoint_url,
        "region": "us-east-1",
        "connect_timeout_s": 20,  # a busy machine is not what this is about
        "read_timeout_s": 60,
    }

    def run(_: int) -> tuple[int, str]:
        ended = subprocess.run(
            [sys.executable, "-c", ENDING, verb, json.dumps(settings)],
            check=False,
            env={**os.environ, **moto_server.env()},
            capture_output=True,
            text=True,
            timeout=300,
        )
        return ended.returncode, ended.stderr if ended.returncode else ""

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(run, range(6))) == [(0, "")] * 6


async def test_what_obstore_was_given_is_held_until_it_lets_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(obstore_runtime, "holding", set())
    store, body = MemoryStore(), bytearray(100_000)  # a buffer that has no hash
    await held(obstore.put_async(store, "x", [held(memoryview(body))]))
    reading = held(obstore.get_async(store, "x"))
    assert len(obstore_runtime.holding) >= 1
    await reading
    del reading

    def all_let_go() -> bool:
        obstore.Bytes()
        return not obstore_runtime.holding

    await until(all_let_go)


# A loop may end right after its first request: nothing of obstore may come to it after that.
STARTING = """
import asyncio, obstore
from s3ec.store import obstore_runtime

answered = []

async def answer():
    await asyncio.sleep(0)
    answered.append("threads")

class User:
    def abandon(self):
        pass

async def use():
    obstore.put_async = lambda *_: asyncio.ensure_future(answer())
    await obstore_runtime.start(User())
    print(answered)

asyncio.run(use())
"""


def test_what_starts_the_threads_is_answered_before_the_first_request() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", STARTING], check=True, capture_output=True, text=True, timeout=300
    )
    assert ended.stdout == "['threads']\n"
