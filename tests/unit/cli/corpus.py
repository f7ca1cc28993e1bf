# SPDX-License-Identifier: Apache-2.0
"""Entries in a bucket, made without torch and put there past our own store."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from s3ec import codec
from s3ec.identity import Layout, Namespace, make_key
from tests.support.finite import FINITE

MODEL = {
    "model": "acme/vision-9b",
    "dtype": "bfloat16",
    "revision": "r1",
    "weights": "sha256:0123456789abcdef",
}
OTHER = {"model": "acme/vision-9b", "dtype": "float16", "revision": "r1"}


def content_hash(seed: str) -> str:
    """A 64-hex identifier."""
    return hashlib.sha256(seed.encode()).hexdigest()


def entry_bytes(
    identifier: str, namespace: str, *, rows: int = 4, width: int = 8, made_by: str = ""
) -> bytes:
    """One whole entry with a tensor of bytes that follow from the identifier."""
    shape = codec.Shape(rows, width, "bfloat16")
    data = (hashlib.sha256(identifier.encode()).digest().translate(FINITE) * shape.nbytes)[
        : shape.nbytes
    ]
    header = codec.Header(
        identifier=identifier,
        namespace=namespace,
        modality="image",
        shape=shape,
        checksum=codec.checksum(data),
        placeholder={"image_grid_thw": [1, 2, 2]},
        made_by=made_by,
    )
    return codec.encode_header(header) + data


class Entries:
    """Fills a bucket past our own code; subclasses say how an object gets there."""

    def put(self, name: str, body: bytes) -> None:
        """Put any object; its name is relative to the corpus."""
        raise NotImplementedError

    def namespace(self, descriptor: dict[str, Any]) -> str:
        """Write the descriptor of a namespace and return the name."""
        made = Namespace.from_descriptor(descriptor)
        self.put(Layout(made.name).descriptor, made.to_json())
        return made.name

    def entry(self, namespace: str, identifier: str, body: bytes | None = None) -> bytes:
        """Put the entry of one identifier; other bytes than its own where ``body`` is given."""
        key = make_key(identifier)
        assert key is not None
        blob = entry_bytes(identifier, namespace) if body is None else body
        self.put(Layout(namespace).object(key), blob)
        return blob


@dataclass
class Corpus(Entries):
    """A bucket with entries, which a client of the SDK puts there."""

    client: Any
    bucket: str
    prefix: str = ""

    def put(self, name: str, body: bytes) -> None:
        key = f"{self.prefix}/{name}" if self.prefix else name
        self.client.put_object(Bucket=self.bucket, Key=key, Body=body)
