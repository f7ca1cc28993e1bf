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
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from s3ec.dev.bench.corpus import IN_FLIGHT, Corpus
from s3ec.store.concurrency import in_parallel
from s3ec.testing.server import REGION


class RawLoop:
    """One client with its connections, kept over rounds."""

    def __init__(self, corpus: Corpus, folder: Path | None = None) -> None:
        """Connect.

        Args:
            corpus: What it gets.
            folder: Where each body becomes a file; None drops the bodies.
        """
        self._corpus = corpus
        self._folder = folder

    def fetch(self) -> None:
        """GET every object of the corpus.

        Raises:
            RuntimeError: Fewer or more bytes came than are stored.
        """
        if self._get_all() != [self._corpus.entry_bytes] * len(self._corpus.keys):
            raise RuntimeError("not every object came whole")

    def _get_all(self) -> Sequence[int]:
        """Bytes of each object."""
        raise NotImplementedError

    def _path(self, name: str) -> Path | None:
        return self._folder / name.rpartition("/")[2] if self._folder else None

    def _keep(self, name: str, body: Any) -> int:
        path = self._path(name)
        if path is not None:
            with open(path, "wb", buffering=0) as file:
                return file.write(memoryview(body))
        return len(body)

    def close(self) -> None:
        """Let go of the connections."""


def open_loops(
    corpus: Corpus, folder: Path | None = None
) -> tuple[dict[str, RawLoop], dict[str, str]]:
    """A loop for each client that is installed, and why the others are not there.

    Args:
        corpus: What they get.
        folder: Where each body becomes a file; None drops the bodies.
    """
    kinds: dict[str, type[RawLoop]] = {"obstore": ObstoreLoop, "awscrt": CrtLoop}
    if folder is None:
        kinds["aioboto3"] = Aioboto3Loop
    else:
        kinds |= {"obstore in threads": ObstoreThreadsLoop, "http.client in threads": HttpLoop}
    loops, missing = {}, {}
    for name, kind in kinds.items():
        try:
            loops[name] = kind(corpus, folder)
        except ImportError as exc:
            missing[name] = str(exc)
    return loops, missing


class _AsyncioLoop(RawLoop):
    """An asyncio loop in the calling thread."""

    def __init__(self, corpus: Corpus, folder: Path | None = None) -> None:
        super().__init__(corpus, folder)
        self._runner = asyncio.Runner()

    async def _get(self, name: str) -> Any:
        """One object's body."""
        raise NotImplementedError

    async def _get_and_keep(self, name: str) -> int:
        body = await self._get(name)
        if self._folder is None:
            return len(body)
        return await asyncio.to_thread(self._keep, name, body)

    def _get_all(self) -> list[int]:
        names = self._corpus.object_names
        return self._runner.run(in_parallel(names, self._get_and_keep, width=IN_FLIGHT))

    def close(self) -> None:
        self._runner.close()


class Aioboto3Loop(_AsyncioLoop):
    """aioboto3: an asyncio client in Python, bodies through aiohttp."""

    def __init__(self, corpus: Corpus, folder: Path | None = None) -> None:
        super().__init__(corpus, folder)
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

    async def _get(self, name: str) -> Any:
        reply = await self._client.get_object(Bucket=self._corpus.bucket, Key=name)
        async with reply["Body"] as body:
            return await body.read()

    def close(self) -> None:
        self._runner.run(self._stack.aclose())
        super().close()


def _obstore(corpus: Corpus) -> Any:
    from obstore.store import S3Store

    return S3Store(
        corpus.bucket,
        endpoint=corpus.endpoint_url,
        region=REGION,
        access_key_id=corpus.env["AWS_ACCESS_KEY_ID"],
        secret_access_key=corpus.env["AWS_SECRET_ACCESS_KEY"],
        virtual_hosted_style_request=False,
        client_options={"allow_http": True},
        retry_config={"max_retries": 0},
    )


class ObstoreLoop(_AsyncioLoop):
    """obstore: a client in Rust, bodies as buffers of its own."""

    def __init__(self, corpus: Corpus, folder: Path | None = None) -> None:
        super().__init__(corpus, folder)
        self._store = _obstore(corpus)

    async def _get(self, name: str) -> Any:
        import obstore

        reply = await obstore.get_async(self._store, name)
        return await reply.bytes_async()


class _ThreadsLoop(RawLoop):
    """Blocking calls in 16 threads that write as well."""

    def _get_one(self, name: str) -> int:
        raise NotImplementedError

    def _get_all(self) -> list[int]:
        with ThreadPoolExecutor(IN_FLIGHT) as pool:
            return list(pool.map(self._get_one, self._corpus.object_names))


class ObstoreThreadsLoop(_ThreadsLoop):
    """obstore's blocking calls."""

    def __init__(self, corpus: Corpus, folder: Path | None = None) -> None:
        super().__init__(corpus, folder)
        self._store = _obstore(corpus)

    def _get_one(self, name: str) -> int:
        import obstore

        return self._keep(name, obstore.get(self._store, name).bytes())


class HttpLoop(_ThreadsLoop):
    """Python's own HTTP client with signed URLs; a connection and a buffer for each thread."""

    def __init__(self, corpus: Corpus, folder: Path | None = None) -> None:
        import boto3
        from botocore.config import Config

        super().__init__(corpus, folder)
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
        self._mine = threading.local()

    def _get_one(self, name: str) -> int:
        mine = self._mine
        if not hasattr(mine, "connection"):
            host = self._corpus.endpoint_url.removeprefix("http://")
            mine.connection = http.client.HTTPConnection(host)
            mine.buffer = memoryview(bytearray(self._corpus.entry_bytes))
        mine.connection.request("GET", self._urls[name])
        reply = mine.connection.getresponse()
        done = 0
        while count := reply.readinto(mine.buffer[done:]):
            done += count
        return self._keep(name, mine.buffer[:done])


class CrtLoop(RawLoop):
    """awscrt: Amazon's client in C; it writes files itself, or hands over chunks in its threads."""

    def __init__(self, corpus: Corpus, folder: Path | None = None) -> None:
        from awscrt import auth, s3

        super().__init__(corpus, folder)
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

    def _get_all(self) -> list[int]:
        slots = threading.Semaphore(IN_FLIGHT)
        sizes: list[int] = []
        # A request that nobody refers to is cancelled.
        requests = []
        for name in self._corpus.object_names:
            slots.acquire()
            requests.append(self._request(name, sizes, slots))
        for request in requests:
            request.finished_future.result()
        return sizes

    def _request(self, name: str, sizes: list[int], slots: threading.Semaphore) -> Any:
        from awscrt import http, s3

        chunks: list[bytes] = []  # held, as a body that somebody wants
        path = self._path(name)

        def on_body(chunk: bytes, **_: Any) -> None:
            chunks.append(chunk)

        def on_done(*, error: Exception | None = None, **_: Any) -> None:
            if path is None:
                sizes.append(sum(map(len, chunks)))
            elif error is None:  # awscrt may flush the file a moment later
                sizes.append(self._corpus.entry_bytes)
            slots.release()

        host = self._corpus.endpoint_url.removeprefix("http://")
        target = f"/{self._corpus.bucket}/{name}"
        return self._client.make_request(
            type=s3.S3RequestType.GET_OBJECT,
            request=http.HttpRequest("GET", target, http.HttpHeaders([("Host", host)])),
            on_done=on_done,
            **({"on_body": on_body} if path is None else {"recv_filepath": str(path)}),
        )

    def close(self) -> None:
        shut_down = self._client.shutdown_event
        self._client = None  # nothing else asks it to end
        shut_down.wait(10)
