# SPDX-License-Identifier: Apache-2.0
"""The demo's view of its bucket, on moto."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from s3ec import codec
from s3ec.codec import Header, Shape
from s3ec.dev.demo.bucket import Bucket
from s3ec.errors import CorruptEntryError, UnavailableError
from s3ec.testing.server import MotoServer
from tests.unit.dev.demo.cases import NAMESPACE, digest_of, name_of

NAME = "demo-bucket"


@pytest.fixture
def client(moto_server: MotoServer) -> Iterator[Any]:
    moto_server.create_bucket(NAME)
    yield moto_server.client()
    moto_server.delete_bucket(NAME)


def put(client: Any, number: int) -> bytes:
    """Store an embedding of 64 KiB, more than is read of it; returns the object."""
    shape = Shape(128, 256, "bfloat16")
    tensor = bytes(shape.nbytes)
    header = Header(f"{number:064x}", NAMESPACE, "image", shape, codec.checksum(tensor))
    body = codec.encode_header(header) + tensor
    client.put_object(Bucket=NAME, Key=f"{NAMESPACE}/objects/{name_of(number)}", Body=body)
    return body


def test_wait_for_another_reads_the_entry_that_is_new(client: Any) -> None:
    put(client, 1)
    bucket = Bucket(client, NAME)
    known = bucket.entries()
    body = put(client, 2)
    entry = bucket.wait_for_another(known)
    assert entry.name == f"{NAMESPACE}/objects/{name_of(2)}"
    assert entry.digest == digest_of(2)
    assert entry.nbytes == len(body)
    assert entry.header.identifier == f"{2:064x}"
    assert entry.header.shape == Shape(128, 256, "bfloat16")


def test_entries_are_embeddings_only(client: Any) -> None:
    put(client, 1)
    for name in (f"{NAMESPACE}/namespace.json", f"{NAMESPACE}/objects/note.txt", ".probe/x"):
        client.put_object(Bucket=NAME, Key=name, Body=b"x")
    assert Bucket(client, NAME).entries() == {f"{NAMESPACE}/objects/{name_of(1)}"}


def test_wait_for_another_gives_up_where_nothing_comes(client: Any) -> None:
    with pytest.raises(UnavailableError, match="found 0"):
        Bucket(client, NAME).wait_for_another(set(), timeout_s=0)


def test_wait_for_another_refuses_two_at_once(client: Any) -> None:
    put(client, 1)
    put(client, 2)
    with pytest.raises(UnavailableError, match="found 2"):
        Bucket(client, NAME).wait_for_another(set())


def test_wait_for_another_refuses_an_entry_that_is_not_ours(client: Any) -> None:
    client.put_object(Bucket=NAME, Key=f"{NAMESPACE}/objects/{name_of(1)}", Body=b"<html>" * 9)
    with pytest.raises(CorruptEntryError):
        Bucket(client, NAME).wait_for_another(set())
