# SPDX-License-Identifier: Apache-2.0
"""Copies between buckets of real servers: by the server itself, and through this process."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from s3ec.corpus import CopyOptions, Corpus
from s3ec.errors import AccessError, ConflictError, CorruptEntryError
from s3ec.settings import Settings
from s3ec.store.botocore_s3 import BotocoreStore
from s3ec.testing.server import LocalS3
from tests.contract.conftest import Configure, Transport
from tests.support.corpora import IDS, Filled
from tests.support.folders import object_name, objects_of
from tests.support.waiting import eventually
from tests.unit.cli.corpus import content_hash, entry_bytes

pytestmark = pytest.mark.s3
Prefix = Callable[[str], str]


@pytest.fixture
def prefix(request: pytest.FixtureRequest) -> Prefix:
    """Names folders of one test."""
    name = re.sub(r"[^a-z0-9]+", "-", request.node.name.lower())[:60]
    return lambda which: f"transfer/{name}/{which}"


@pytest.fixture
def here(on_seaweed: Configure, prefix: Prefix) -> Iterator[Filled]:
    with Corpus.open(on_seaweed(prefix=prefix("here"))) as corpus:
        yield Filled(corpus)


@pytest.fixture
def other_bucket(on_seaweed: Configure, s3_bucket: str, prefix: Prefix) -> Settings:
    """A second bucket of the same server."""
    return on_seaweed(bucket=s3_bucket, prefix=prefix("there"))


def test_a_bucket_of_the_same_server_is_copied_by_the_server(
    here: Filled, other_bucket: Settings
) -> None:
    with Corpus.open(other_bucket) as there:
        done = here.corpus.copy_to(there, options=CopyOptions(deep=True))
        assert (done.status, done.copied, done.by_server) == ("complete", 4, 4)
        assert done.announced == 4
        assert objects_of(there, here.name) == objects_of(here.corpus, here.name)
        found = there.verify()
        assert (found.agrees, found.index.entries) == (True, 4)
        again = here.corpus.copy_to(there)
        assert (again.copied, again.present, again.announced) == (0, 4, 0)


def test_what_the_server_copies_is_read_only_by_a_deep_run(
    here: Filled, other_bucket: Settings, local_s3: LocalS3
) -> None:
    """Not deep, damage is copied, which readers find; deep, the copy is deleted again."""
    blob = entry_bytes(IDS[0], here.name)
    name = object_name(here.name, IDS[0])
    local_s3.client().put_object(
        Bucket=here.corpus.settings.bucket,
        Key=f"{here.corpus.settings.prefix}/{name}",
        Body=blob[:-1] + bytes([blob[-1] ^ 1]),
    )
    with Corpus.open(other_bucket) as there:
        done = here.corpus.copy_to(there, options=CopyOptions(deep=True))
        assert (done.status, done.copied) == ("partial", 3)
        assert "deleted again" in done.failures[IDS[0]]
        assert name not in objects_of(there, here.name)
        done = here.corpus.copy_to(there)
        assert (done.status, done.copied) == ("complete", 1)
        with pytest.raises(CorruptEntryError, match="checksum"):
            there.get(IDS[0])


def test_what_is_no_entry_is_not_copied_by_the_server(here: Filled, other_bucket: Settings) -> None:
    here.entry(here.name, "junk", b"<html>" * 100)
    with Corpus.open(other_bucket) as there:
        done = here.corpus.copy_to(there)
        assert (done.status, done.by_server, len(done.failures)) == ("partial", 4, 1)


def test_where_the_server_refuses_to_copy_the_bytes_pass_here(
    here: Filled, other_bucket: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where other credentials may read the one bucket and write to the other."""
    asked: list[str] = []

    async def refuse(_: BotocoreStore, bucket: str, key: str, name: str, **__: object) -> None:
        asked.append(name)
        raise AccessError(f"COPY {bucket}/{key}: denied", is_general=False)

    monkeypatch.setattr(BotocoreStore, "copy_from", refuse)
    with Corpus.open(other_bucket) as there:
        done = here.corpus.copy_to(there, options=CopyOptions(max_concurrency=1))
        assert (done.status, done.copied, done.by_server) == ("complete", 4, 0)
        assert len(asked) == 1
        assert there.verify().agrees


def test_another_server_gets_the_bytes_through_here(
    here: Filled,
    guarded_s3: LocalS3,
    prefix: Prefix,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Its credentials come from a profile, since the environment has those of the first one."""
    credentials = tmp_path / "credentials"
    credentials.write_text(
        f"[there]\naws_access_key_id = {guarded_s3.access_key}\n"
        f"aws_secret_access_key = {guarded_s3.secret_key}\n"
    )
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(credentials))
    settings = {
        "profile": "there",
        "bucket": guarded_s3.create_bucket("transfer-target"),
        "endpoint_url": guarded_s3.endpoint_url,
        "region": "us-east-1",
        "prefix": prefix("there"),
    }
    with Corpus.open(settings) as there:
        done = here.corpus.copy_to(there)
        assert (done.status, done.copied, done.by_server) == ("complete", 4, 0)
        assert objects_of(there, here.name) == objects_of(here.corpus, here.name)


def test_a_bucket_goes_to_a_folder_and_into_another_bucket(
    here: Filled, other_bucket: Settings, tmp_path: Path
) -> None:
    assert here.corpus.export(tmp_path / "disk").status == "complete"
    with Corpus.open(other_bucket) as there:
        done = there.import_from(tmp_path / "disk")
        assert (done.status, done.copied, done.announced) == ("complete", 4, 4)
        assert objects_of(there, here.name) == objects_of(here.corpus, here.name)
        assert there.verify().agrees


IMPORT = """
import json, sys
from s3ec.corpus import CopyOptions, Corpus
with Corpus.open(json.loads(sys.argv[1])) as corpus:
    corpus.import_from(
        sys.argv[2], options=CopyOptions(rate_limit_bytes_per_s=3000, max_concurrency=2)
    )
"""


def test_a_killed_import_is_finished_by_the_next_one(
    here: Filled, other_bucket: Settings, local_s3: LocalS3, tmp_path: Path
) -> None:
    """Also readers are told of what the first one had stored, and had told nobody of."""
    for number in range(60):
        here.entry(here.name, content_hash(f"page {number}"))
    here.corpus.export(tmp_path / "disk")
    given = other_bucket.model_dump(mode="json", include={"bucket", "prefix", "endpoint_url"})
    child = subprocess.Popen(
        [sys.executable, "-c", IMPORT, json.dumps(given), str(tmp_path / "disk")],
        env=os.environ | local_s3.env() | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    with Corpus.open(other_bucket) as there:
        eventually(lambda: len(objects_of(there, here.name)) > 3, "the import began", pause_s=0.05)
        child.kill()
        assert child.wait() == -signal.SIGKILL
        left = len(objects_of(there, here.name))
        assert 3 < left < 64
        done = there.import_from(tmp_path / "disk")
        assert (done.status, done.present, done.announced) == ("complete", left, 64)
        assert objects_of(there, here.name) == objects_of(here.corpus, here.name)
        found = there.verify()
        assert (found.agrees, found.index.entries) == (True, 64)


async def test_a_copy_replaces_nothing_and_is_compared(
    transport: Transport, on_seaweed: Configure, prefix: Prefix
) -> None:
    settings = on_seaweed(prefix=prefix("store"))
    store = transport(settings)
    try:
        await store.put_if_absent("one", [b"first"])
        await store.put_if_absent("two", [b"second"])
        key = f"{settings.prefix}/one"
        await store.copy_from(settings.bucket, key, "copies/one", look_first=True)
        assert await store.get("copies/one", max_bytes=100) == b"first"
        with pytest.raises(ConflictError):
            await store.copy_from(settings.bucket, key, "two", look_first=True)
        assert await store.get("two", max_bytes=100) == b"second"
        with pytest.raises(AccessError, match="COPY"):
            await store.copy_from(settings.bucket, f"{key}-not", "copies/not", look_first=False)
        with pytest.raises(AccessError):
            await store.copy_from("no-such-bucket", key, "copies/not", look_first=False)
        assert await store.head("copies/not") is None
    finally:
        await store.close()
