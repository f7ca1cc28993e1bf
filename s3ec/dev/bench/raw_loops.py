# SPDX-License-Identifier: Apache-2.0
"""GET loops into memory with nothing around them: what each S3 client can do at best here.

Every loop keeps 16 requests in flight, reads each body whole, looks at its length and drops it.
No retries, no checksums, no deadlines.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol

from s3ec.dev.bench.corpus import IN_FLIGHT, Corpus
from s3ec.testing.server import REGION


class RawLoop(Protocol):
    """One client with its connections, kept over rounds."""

    def fetch(self) -> None:
        """GET every object of the corpus.

        Raises:
            RuntimeError: Fewer or more bytes came than are stored.
        """
        ...

    def close(self) -> None:
        """Let go of the connections."""
        ...


def open_loops(corpus: Corpus) -> tuple[dict[str, RawLoop], dict[str, str]]:
    """A loop per client that is installed, and why the others are not there."""
    loops: dict[str, RawLoop] = {}
    missing: dict[str, str] = {}
    makers: dict[str, Callable[[Corpus], RawLoop]] = {
        "aioboto3": Aioboto3Loop,
        "obstore": ObstoreLoop,
        "awscrt": CrtLoop,
    }
    for name, make in makers.items():
        try:
            loops[name] = make(corpus)
        except ImportError as exc:
            missing[name] = str(exc)
    return loops, missing


class _AsyncioLoop:
    """An asyncio loop in the calling thread."""

    def __init__(self, corpus: Corpus) -> None:
        self._corpus = corpus
        self._runner = asyncio.Runner()

    async def _get(self, name: str) -> int:
        """Bytes of one object's body."""
        raise NotImplementedError

    def fetch(self) -> None:
        self._runner.run(_all_of(self._corpus, self._get))

    def close(self) -> None:
        self._runner.close()


class Aioboto3Loop(_AsyncioLoop):
    """aioboto3: an asyncio client in Python, bodies through aiohttp."""

    def __init__(self, corpus: Corpus) -> None:
        super().__init__(corpus)
        self._stack = contextlib.AsyncExitStack()
        self._client: Any = self._runner.run(self._connect())

    async def _connect(self) -> Any:
        import aioboto3
        from botocore.config import Config

        config = Config(
            max_pool_connections=IN_FLIGHT,
            retries={"total_max_attempts": 1},
            proxies={},
            s3={"addressing_style": "path"},
            response_checksum_validation="when_required",
        )
        client = aioboto3.Session().client(
            "s3", endpoint_url=self._corpus.endpoint_url, region_name=REGION, config=config
        )
        return await self._stack.enter_async_context(client)

    async def _get(self, name: str) -> int:
        reply = await self._client.get_object(Bucket=self._corpus.bucket, Key=name)
        async with reply["Body"] as body:
            return len(await body.read())

    def close(self) -> None:
        self._runner.run(self._stack.aclose())
        super().close()


class ObstoreLoop(_AsyncioLoop):
    """obstore: a client in Rust, bodies as buffers of its own."""

    def __init__(self, corpus: Corpus) -> None:
        from obstore.store import S3Store

        super().__init__(corpus)
        self._store = S3Store(
            corpus.bucket,
            endpoint=corpus.endpoint_url,
            region=REGION,
            access_key_id=corpus.env["AWS_ACCESS_KEY_ID"],
            secret_access_key=corpus.env["AWS_SECRET_ACCESS_KEY"],
            virtual_hosted_style_request=False,
            client_options={"allow_http": True},
            retry_config={"max_retries": 0},
        )

    async def _get(self, name: str) -> int:
        import obstore

        reply = await obstore.get_async(self._store, name)
        return len(await reply.bytes_async())


class ObstoreToFileLoop(ObstoreLoop):
    """The same, each body written to a fresh file: what storing the bytes costs, unverified."""

    def __init__(self, corpus: Corpus, folder: Path) -> None:
        super().__init__(corpus)
        self._folder = folder

    async def _get(self, name: str) -> int:
        import obstore

        reply = await obstore.get_async(self._store, name)
        path = self._folder / name.rpartition("/")[2]
        return await asyncio.to_thread(_write, path, await reply.bytes_async())

    def empty(self) -> None:
        """Delete the files."""
        for path in self._folder.iterdir():
            path.unlink()


class OneByOneLoop(ObstoreLoop):
    """One object after the other."""

    def fetch(self) -> None:
        self._runner.run(self._one_by_one())

    async def _one_by_one(self) -> None:
        for name in self._corpus.object_names:
            nbytes = await self._get(name)
            if nbytes != self._corpus.entry_bytes:
                raise RuntimeError(f"{nbytes} bytes came of {self._corpus.entry_bytes}")


class ObstoreRangesLoop(OneByOneLoop):
    """Likewise, each object as ranges that are all asked for at once."""

    def __init__(self, corpus: Corpus, range_bytes: int) -> None:
        super().__init__(corpus)
        self._range_bytes = range_bytes

    async def _get(self, name: str) -> int:
        import obstore

        whole = self._corpus.entry_bytes
        parts = await asyncio.gather(
            *(
                obstore.get_range_async(
                    self._store, name, start=at, end=min(at + self._range_bytes, whole)
                )
                for at in range(0, whole, self._range_bytes)
            )
        )
        return sum(map(len, parts))


class CrtLoop:
    """awscrt: Amazon's client in C, bodies as chunks in callbacks of its threads."""

    def __init__(self, corpus: Corpus) -> None:
        from awscrt import auth, s3

        self._corpus = corpus
        credentials = auth.AwsCredentialsProvider.new_static(
            corpus.env["AWS_ACCESS_KEY_ID"], corpus.env["AWS_SECRET_ACCESS_KEY"]
        )
        self._client: Any = s3.S3Client(
            region=REGION,
            tls_mode=s3.S3RequestTlsMode.DISABLED,
            signing_config=s3.create_default_s3_signing_config(
                region=REGION, credential_provider=credentials
            ),
        )

    def fetch(self) -> None:
        slots = threading.Semaphore(IN_FLIGHT)
        bodies: dict[str, list[bytes]] = {}
        # A request that nobody refers to is cancelled.
        requests = []
        for name in self._corpus.object_names:
            slots.acquire()
            requests.append(self._request(name, bodies, slots))
        for request in requests:
            request.finished_future.result()
        if bodies:
            raise RuntimeError(f"awscrt: {len(bodies)} objects were not of their size")

    def _request(
        self, name: str, bodies: dict[str, list[bytes]], slots: threading.Semaphore
    ) -> Any:
        from awscrt import http, s3

        chunks = bodies[name] = []

        def on_body(chunk: bytes, **_: Any) -> None:
            chunks.append(chunk)

        def on_done(**_: Any) -> None:
            if sum(map(len, chunks)) == self._corpus.entry_bytes:
                del bodies[name]
            slots.release()

        host = self._corpus.endpoint_url.removeprefix("http://")
        return self._client.make_request(
            type=s3.S3RequestType.GET_OBJECT,
            request=http.HttpRequest(
                "GET", f"/{self._corpus.bucket}/{name}", http.HttpHeaders([("Host", host)])
            ),
            on_body=on_body,
            on_done=on_done,
        )

    def close(self) -> None:
        shut_down = self._client.shutdown_event
        self._client = None  # nothing else asks it to end
        shut_down.wait(10)


async def _all_of(corpus: Corpus, get: Callable[[str], Awaitable[int]]) -> None:
    names = iter(corpus.object_names)

    async def some() -> None:
        for name in names:
            nbytes = await get(name)
            if nbytes != corpus.entry_bytes:
                raise RuntimeError(f"{nbytes} bytes came of an object of {corpus.entry_bytes}")

    async with asyncio.TaskGroup() as group:
        for _ in range(IN_FLIGHT):
            group.create_task(some())


def _write(path: Path, body: Any) -> int:
    with open(path, "wb", buffering=0) as file:
        return file.write(memoryview(body))
