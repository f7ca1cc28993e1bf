# SPDX-License-Identifier: Apache-2.0
"""GET loops of obstore with nothing around them: the best that a client can do here.

A loop keeps 16 requests in flight, reads each body whole, looks at its length and drops it, or
writes it to a fresh file. No retries, no checksums, no deadlines. Loops of aioboto3, of awscrt and
of Python's own HTTP client were measured beside it; none was faster.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from s3ec.dev.bench.context import CannotMeasureError
from s3ec.dev.bench.corpus import IN_FLIGHT, Corpus
from s3ec.store.concurrency import in_parallel
from s3ec.testing.server import REGION


class RawLoop:
    """One client with its connections, kept over rounds."""

    def __init__(
        self, corpus: Corpus, folder: Path | None = None, *, in_threads: bool = False
    ) -> None:
        """Connect.

        Args:
            corpus: What it gets.
            folder: Where each body becomes a file; None drops the bodies.
            in_threads: Blocking calls in 16 threads, which write as well, and no asyncio loop.

        Raises:
            CannotMeasureError: obstore is not installed.
        """
        try:
            from obstore.store import S3Store
        except ImportError as exc:
            raise CannotMeasureError(f"obstore is not installed: {exc}") from exc
        self._corpus = corpus
        self._folder = folder
        self._in_threads = in_threads
        self._runner = asyncio.Runner()
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

    def fetch(self) -> None:
        """GET every object of the corpus.

        Raises:
            RuntimeError: Fewer or more bytes came than are stored.
        """
        names = self._corpus.object_names
        if self._in_threads:
            with ThreadPoolExecutor(IN_FLIGHT) as pool:
                sizes = list(pool.map(self._get_blocking, names))
        else:
            sizes = self._runner.run(in_parallel(names, self._get, width=IN_FLIGHT))
        if sizes != [self._corpus.entry_bytes] * len(names):
            raise RuntimeError("not every object came whole")

    def close(self) -> None:
        """End the loop."""
        self._runner.close()

    async def _get(self, name: str) -> int:
        import obstore

        body = await (await obstore.get_async(self._store, name)).bytes_async()
        if self._folder is None:
            return len(body)
        return await asyncio.to_thread(self._keep, name, body)

    def _get_blocking(self, name: str) -> int:
        import obstore

        return self._keep(name, obstore.get(self._store, name).bytes())

    def _keep(self, name: str, body: Any) -> int:
        if self._folder is None:
            return len(body)
        with open(self._folder / name.rpartition("/")[2], "wb", buffering=0) as file:
            return file.write(memoryview(body))
