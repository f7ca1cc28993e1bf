# SPDX-License-Identifier: Apache-2.0
"""A corpus to another place, with buckets of a real server: by a folder, and by other tools."""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from s3ec.corpus import Corpus
from s3ec.settings import Settings
from s3ec.testing.server import LocalS3
from tests.contract.conftest import Configure
from tests.support.catalogues import row
from tests.support.corpora import IDS, Filled
from tests.support.folders import objects_of
from tests.support.waiting import eventually
from tests.unit.cli.conftest import Cli
from tests.unit.cli.corpus import content_hash

pytestmark = pytest.mark.s3
PAGE = Path(__file__).parents[2] / "docs/maintenance.md"
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


def test_a_bucket_goes_to_a_folder_and_into_another_bucket(
    here: Filled, other_bucket: Settings, tmp_path: Path
) -> None:
    assert here.corpus.export(tmp_path / "disk").status == "complete"
    with Corpus.open(other_bucket) as there:
        done = there.import_from(tmp_path / "disk")
        assert (done.status, done.copied) == ("complete", 4)
        assert objects_of(there, here.name) == objects_of(here.corpus, here.name)
        assert there.verify().agrees


IMPORT = """
import json, sys
from s3ec.config import load_settings
from s3ec.corpus import Corpus
from s3ec.store.open import open_store
from s3ec.testing.fault_store import Fault, FaultStore, Gate, Script
settings = load_settings(json.loads(sys.argv[1])).settings
held = Script([Fault("put_if_absent", name="/objects/", skip=20, gate=Gate())])
with Corpus(settings, store=FaultStore(open_store(settings), held)) as corpus:
    corpus.import_from(sys.argv[2])
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
        assert (done.status, done.present) == ("complete", left)
        assert objects_of(there, here.name) == objects_of(here.corpus, here.name)
        found = there.verify()
        assert (found.agrees, found.index.entries) == (True, 64)


def copy_by_boto3(client: Any, command: list[str]) -> None:
    """The requests of ``aws s3 sync SRC DST --size-only --exclude PATTERN``."""
    source, target, *options = command[3:]
    assert options[:2] == ["--size-only", "--exclude"]
    (bucket, _, begin), (to, _, to_begin) = (
        each.removeprefix("s3://").partition("/") for each in (source, target)
    )
    for info in client.list_objects_v2(Bucket=bucket, Prefix=f"{begin}/")["Contents"]:
        below = info["Key"].removeprefix(f"{begin}/")
        if not fnmatch.fnmatch(below, options[2]):
            copied = {"Bucket": bucket, "Key": info["Key"]}
            client.copy_object(Bucket=to, Key=f"{to_begin}/{below}", CopySource=copied)


def test_the_page_says_how_another_tool_copies_between_buckets(
    here: Filled, other_bucket: Settings, local_s3: LocalS3
) -> None:
    here.corpus.catalog().append([row("page", identifier=IDS[0])])
    places = {
        "s3://embeddings/team-a": f"s3://{here.corpus.settings.corpus.bucket}/"
        f"{here.corpus.settings.prefix}",
        "s3://embeddings-new/team-a": f"s3://{other_bucket.bucket}/{other_bucket.prefix}",
    }
    section = PAGE.read_text().partition("## Copy between buckets")[2]
    [block] = re.findall(r"```bash\n(.*?)```", section.partition("\n## ")[0], re.S)
    said = block.replace("\\\n", " ")
    for name, place in places.items():
        said = said.replace(name, place)
    need, *commands = said.splitlines()
    assert need == "# needs the AWS CLI"
    copying, rebuilding = map(shlex.split, commands)
    assert (copying[:3], rebuilding[:3]) == (["aws", "s3", "sync"], ["s3ec", "manifest", "rebuild"])
    copy_by_boto3(local_s3.client(), copying)
    server = ["--endpoint-url", local_s3.endpoint_url, "--region", "us-east-1"]
    assert Cli().json(*rebuilding[1:], *server)
    with Corpus.open(other_bucket) as there:
        assert objects_of(there, here.name) == objects_of(here.corpus, here.name)
        assert [found.document for found in there.catalog().rows()] == ["page"]
        found = there.verify(deep=True)
        assert (found.agrees, found.index.entries, found.index.unannounced) == (True, 4, 0)
