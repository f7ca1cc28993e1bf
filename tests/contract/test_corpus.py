# SPDX-License-Identifier: Apache-2.0
"""The public API on a real S3 server."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from s3ec.corpus import Corpus
from s3ec.errors import AccessError, UnavailableError
from s3ec.identity import Layout
from s3ec.store.base import Store
from s3ec.store.concurrency import in_parallel
from s3ec.testing.server import LocalS3
from tests.contract.conftest import Configure
from tests.support.corpora import CorpusSuite, Filled
from tests.unit.cli.corpus import content_hash


@pytest.fixture
def filled(on_seaweed: Configure, request: pytest.FixtureRequest) -> Iterator[Filled]:
    folder = re.sub(r"[^a-z0-9]+", "-", request.node.name.lower())[:60]
    settings = on_seaweed(prefix=f"corpus/{folder}")
    with Corpus.open(settings) as corpus:
        yield Filled(corpus)


@pytest.mark.s3
class TestOnSeaweedFS(CorpusSuite):
    pass


def test_listing_of_several_pages_is_whole(filled: Filled) -> None:
    """Of one folder, so that a page of 1000 ends inside of it."""
    wanted = {f"ab{number:04x}{content_hash('x')[6:]}" for number in range(1010)}

    async def put(store: Store) -> None:
        objects = Layout(filled.name).objects
        names = [f"{objects}ab/{identifier}.safetensors" for identifier in wanted]
        await in_parallel(names, lambda name: store.put_if_absent(name, [b"entry"]))

    filled.corpus.run(put)
    labels = [entry.label for entry in filled.corpus.list()]
    found = [label for label in labels if label in wanted]
    assert len(found) == len(wanted)
    assert set(found) == wanted


def test_bucket_that_is_not_there_is_named(on_seaweed: Configure, local_s3: LocalS3) -> None:
    settings = on_seaweed(bucket="no-such-bucket")
    with Corpus.open(settings) as corpus, pytest.raises(AccessError) as caught:
        corpus.namespaces()
    assert "no-such-bucket" in str(caught.value)
    assert "`bucket`" in str(caught.value)


def test_server_that_is_not_there_is_named_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    where = "http://127.0.0.1:1"
    given = {"region": "us-east-1"}
    with (
        Corpus.open(given, bucket="embeddings", endpoint_url=where) as corpus,
        pytest.raises(UnavailableError) as caught,
    ):
        corpus.namespaces()
    assert str(caught.value) == (
        f"{where}: connection refused; nothing listens at {where}: start the server, or correct "
        "`endpoint_url`"
    )
