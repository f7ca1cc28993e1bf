# SPDX-License-Identifier: Apache-2.0
"""GET loops with nothing around them: what each S3 client can do at best here.

Every loop keeps 16 requests in flight, reads each body whole, looks at its length and drops it, or
writes it to a fresh file. No retries, no checksums, no deadlines.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import threading
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
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


def open_loops(
    corpus: Corpus, folder: Path | None = None
) -> tuple[dict[str, RawLoop], dict[str, str]]:
    """A loop for each client that is installed, and why the others are not there.

    Args:
        corpus: What they get.
        folder: Where each body becomes a file; None drops the bodies.
    """
    loops: dict[str, RawLoop] = {}
    missing: dict[str, str] = {}
    makers: dict[str, Callable[[], RawLoop]] = {
        "aioboto3": lambda: Aioboto3Loop(corpus),
        "obstore": lambda: ObstoreLoop(corpus),
        "awscrt": lambda: CrtLoop(corpus),
    }
    if folder is not None:
        makers = {
            "obstore": lambda: ObstoreToFileLoop(corpus, folder),
            "obstore in threads": lambda: ObstoreThreadsLoop(corpus, folder),
            "http.client in threads": lambda: HttpThreadsLoop(corpus, folder),
            "awscrt": lambda: CrtToFileLoop(corpus, folder),
        }
    for name, make in makers.items():
        try:
            loops[name] = make()
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


class ObstoreThreadsLoop(ObstoreLoop):
    """obstore's blocking calls, in 16 threads that write as well."""

    def __init__(self, corpus: Corpus, folder: Path) -> None:
        super().__init__(corpus)
        self._folder = folder

    def fetch(self) -> None:
        with ThreadPoolExecutor(IN_FLIGHT) as pool:
            _require_all(self._corpus, pool.map(self._keep, self._corpus.object_names))

    def _keep(self, name: str) -> int:
        import obstore

        body = obstore.get(self._store, name).bytes()
        return _write(self._folder / name.rpartition("/")[2], body)


class HttpThreadsLoop:
    """Python's own HTTP client in 16 threads, with signed URLs, and a buffer for each thread."""

    def __init__(self, corpus: Corpus, folder: Path) -> None:
        import boto3
        from botocore.config import Config

        self._corpus = corpus
        self._folder = folder
        client = boto3.client(
            "s3",
            endpoint_url=corpus.endpoint_url,
            region_name=REGION,
            aws_access_key_id=corpus.env["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=corpus.env["AWS_SECRET_ACCESS_KEY"],
            config=Config(signature_version="s3v4", s3={"addressing_style": "path"}),
        )
        self._urls = {
            name: client.generate_presigned_url(
                "get_object", {"Bucket": corpus.bucket, "Key": name}, ExpiresIn=86_400
            ).removeprefix(corpus.endpoint_url)
            for name in corpus.object_names
        }

    def fetch(self) -> None:
        names: SimpleQueue[str | None] = SimpleQueue()
        for name in (*self._urls, *[None] * IN_FLIGHT):
            names.put(name)
        with ThreadPoolExecutor(IN_FLIGHT) as pool:
            kept = [pool.submit(self._some, names) for _ in range(IN_FLIGHT)]
            _require_all(self._corpus, [nbytes for one in kept for nbytes in one.result()])

    def _some(self, names: SimpleQueue[str | None]) -> list[int]:
        buffer, sizes = memoryview(bytearray(self._corpus.entry_bytes)), []
        with contextlib.closing(
            http.client.HTTPConnection(self._corpus.endpoint_url.removeprefix("http://"))
        ) as connection:
            while (name := names.get()) is not None:
                connection.request("GET", self._urls[name])
                reply = connection.getresponse()
                done = 0
                while count := reply.readinto(buffer[done:]):
                    done += count
                _write(self._folder / name.rpartition("/")[2], buffer[:done])
                sizes.append(done)
        return sizes

    def close(self) -> None:
        pass


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
        chunks = bodies[name] = []

        def on_body(chunk: bytes, **_: Any) -> None:
            chunks.append(chunk)

        def on_done(**_: Any) -> None:
            if sum(map(len, chunks)) == self._corpus.entry_bytes:
                del bodies[name]
            slots.release()

        return self._get(name, on_body=on_body, on_done=on_done)

    def _get(self, name: str, **how: Any) -> Any:
        from awscrt import http, s3

        host = self._corpus.endpoint_url.removeprefix("http://")
        return self._client.make_request(
            type=s3.S3RequestType.GET_OBJECT,
            request=http.HttpRequest(
                "GET", f"/{self._corpus.bucket}/{name}", http.HttpHeaders([("Host", host)])
            ),
            **how,
        )

    def close(self) -> None:
        shut_down = self._client.shutdown_event
        self._client = None  # nothing else asks it to end
        shut_down.wait(10)


class CrtToFileLoop(CrtLoop):
    """The same, each body written to a fresh file by awscrt itself."""

    def __init__(self, corpus: Corpus, folder: Path) -> None:
        super().__init__(corpus)
        self._folder = folder

    def _request(
        self, name: str, bodies: dict[str, list[bytes]], slots: threading.Semaphore
    ) -> Any:
        bodies[name] = []

        def on_done(*, error: Exception | None, **_: Any) -> None:
            if error is None:  # awscrt may flush the file a moment later
                del bodies[name]
            slots.release()

        path = self._folder / name.rpartition("/")[2]
        return self._get(name, recv_filepath=str(path), on_done=on_done)


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


def _require_all(corpus: Corpus, sizes: Iterable[int]) -> None:
    if [*sizes] != [corpus.entry_bytes] * len(corpus.keys):
        raise RuntimeError("not every object came whole")


def _write(path: Path, body: Any) -> int:
    with open(path, "wb", buffering=0) as file:
        return file.write(memoryview(body))
