# SPDX-License-Identifier: Apache-2.0
"""A real S3 server full of valid entries, and what clients need to read them."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from s3ec import codec
from s3ec.codec import Header, Shape
from s3ec.config import load_settings
from s3ec.dev.bench.context import CannotMeasureError, Context
from s3ec.errors import ConfigError
from s3ec.identity import Key, Layout, Namespace, canonical_json, make_key
from s3ec.settings import Settings
from s3ec.testing.server import LocalS3

# One image of Gemma3-27B.
SHAPE = Shape(256, 5376, "bfloat16")
MODALITY = "image"
NAMESPACE = Namespace.from_descriptor({"model": "s3ec/bench"})
IN_FLIGHT = 16
_BUCKET = "bench"
_UPLOADS = 4
# Clears one bit of the exponent's high byte, so that no value is NaN or infinite.
_FINITE = bytes(value & 0xBF for value in range(256))
# No reply may count as late because the machine is busy: it would be asked for twice.
_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Corpus:
    """Entries in a bucket, and what a client needs to read them.

    Attributes:
        endpoint_url: Where clients reach the server, or something in front of it.
        env: Credentials for the SDK's chain.
        namespace: Of all entries.
        keys: One per entry.
        entry_bytes: Size of each object.
        shape: Of each tensor.
    """

    endpoint_url: str
    env: Mapping[str, str]
    namespace: Namespace
    keys: tuple[Key, ...]
    entry_bytes: int
    shape: Shape = SHAPE

    @property
    def bucket(self) -> str:
        """Name of the bucket."""
        return _BUCKET

    @property
    def object_names(self) -> list[str]:
        """Full names of all entries' objects."""
        layout = Layout(self.namespace.name)
        return [layout.object(key) for key in self.keys]

    def settings(self, cache_dir: Path) -> Settings:
        """Settings of a process that reads this corpus into a tier without bounds."""
        extra = {
            "bucket": _BUCKET,
            "endpoint_url": self.endpoint_url,
            "region": self.env["AWS_REGION"],
            "cache_dir": str(cache_dir),
            "min_free_bytes": 0,
            "max_concurrency": IN_FLIGHT,
            "connect_timeout_s": _TIMEOUT_S,
            "read_timeout_s": _TIMEOUT_S,
        }
        return load_settings(extra).settings

    @contextlib.contextmanager
    def environment(self) -> Iterator[None]:
        """Only these credentials, and no setting, profile or proxy of this machine's owner."""
        with mock.patch.dict(os.environ):
            for name in list(os.environ):
                if name.startswith(("AWS_", "S3EC_")) or name.lower().endswith("_proxy"):
                    del os.environ[name]
            os.environ.update(self.env)
            yield


@contextlib.contextmanager
def filled(context: Context, count: int, shape: Shape = SHAPE) -> Iterator[tuple[LocalS3, Corpus]]:
    """Start a SeaweedFS and put ``count`` entries of random data into a bucket of it.

    Raises:
        CannotMeasureError: The server is not installed.
    """
    context.say("starting the server")
    try:
        server = LocalS3()
    except ConfigError as exc:
        raise CannotMeasureError(str(exc)) from exc
    with server:
        server.create_bucket(_BUCKET)
        context.say(f"{count} entries")
        source = random.Random(20_260_201)
        keys = tuple(key_of(f"{source.getrandbits(256):064x}") for _ in range(count))
        nbytes = len(_entry(keys[0], shape))
        corpus = Corpus(server.endpoint_url, server.env(), NAMESPACE, keys, nbytes, shape)
        with corpus.environment():
            upload(server, _BUCKET, keys, shape)
            yield server, corpus


def _entry(key: Key, shape: Shape) -> bytes:
    """One valid entry; the same bytes for the same key."""
    data = random.Random(key.digest).randbytes(shape.nbytes).translate(_FINITE)
    header = Header(key.identifier, NAMESPACE.name, MODALITY, shape, codec.checksum(data))
    return codec.encode_header(header) + data


def upload(server: LocalS3, bucket: str, keys: Sequence[Key], shape: Shape) -> None:
    """Put an entry for each key into a bucket, and their modality's record."""
    client = server.client()
    layout = Layout(NAMESPACE.name)
    record = canonical_json({"width": shape.width, "dtype": shape.dtype}).encode()
    client.put_object(Bucket=bucket, Key=layout.modality(MODALITY), Body=record)

    def put(key: Key) -> None:
        client.put_object(Bucket=bucket, Key=layout.object(key), Body=_entry(key, shape))

    with ThreadPoolExecutor(_UPLOADS) as pool:
        list(pool.map(put, keys))


def key_of(identifier: str) -> Key:
    """The key of a content hash.

    Raises:
        ValueError: It is none.
    """
    key = make_key(identifier)
    if key is None:
        raise ValueError(f"{identifier} is no content hash")
    return key
