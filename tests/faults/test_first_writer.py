# SPDX-License-Identifier: Apache-2.0
"""No serving engine overwrites or deletes an entry, in the whole of its life.

A real server behind a proxy that records what is asked of it: saves, saves of what is there,
fetches, a bad entry, what vanished, the clean-up of the index, and the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from s3ec.prefetch import FetchOutcome
from tests.faults.embeddings import key_at
from tests.faults.engine import Engine
from tests.faults.site import OBJECTS, Site
from tests.support.waiting import eventually

pytest.importorskip("torch")

COUNT = 3
WRITES = {"PUT", "POST", "DELETE", "PATCH"}


@contextmanager
def serving(site: Site, folder: str) -> Iterator[Engine]:
    with Engine.at(site, site.cache_dir / folder, index_refresh_s="0.1") as engine:
        engine.node.follow_the_bucket()
        engine.node.maintain_the_index()
        yield engine


def test_in_an_engines_life_an_entry_is_written_once_and_conditionally(
    site: Site, signed: None
) -> None:
    with serving(site, "first") as first:
        first.save(*range(COUNT))
    before = {name: site.body(name) for name in site.objects()}
    assert len(before) == COUNT

    bad = key_at(0).name
    site.put(0, b"x" * 100)
    gone = key_at(1).name
    site.client.delete_object(Bucket=site.bucket, Key=OBJECTS[1:] + gone)
    with serving(site, "second") as second:
        eventually(lambda: second.node.index.maybe_contains(key_at(2)))
        assert second.fetch(0).outcome is FetchOutcome.CORRUPT
        assert second.fetch(1).outcome is FetchOutcome.ABSENT
        assert second.fetch(2).outcome is FetchOutcome.READY
        second.save(*range(COUNT))  # what a producer does that encoded them again
        assert second.close() == 0
        assert second.count("save.items") >= 1  # what vanished
        assert second.count("save.existed") >= 1

    after = {name: site.body(name) for name in site.objects()}
    assert after == after | before | {bad: b"x" * 100}  # nothing there was changed or deleted
    requests = [one for one in site.proxy.requests if OBJECTS in one.target]
    writes = [one for one in requests if one.method in WRITES]
    assert len(writes) >= 2 * COUNT
    for one in writes:
        assert one.method == "PUT"
        assert one.headers.get("if-none-match") == "*"
        assert one.target.partition("?")[2] in ("", "x-id=PutObject")
    # Nor are objects deleted many at a time, with their names in the body.
    assert [one for one in site.proxy.requests if one.method == "POST"] == []
