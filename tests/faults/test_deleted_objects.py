# SPDX-License-Identifier: Apache-2.0
"""Objects, and the bucket, deleted behind the cache's back: one miss, and hits come back."""

from __future__ import annotations

from pathlib import Path

import pytest

from s3ec.prefetch import FetchOutcome
from s3ec.testing.server import LocalS3
from tests.faults.embeddings import LAYOUT, body_at, key_at
from tests.faults.engine import Engine
from tests.faults.site import Site
from tests.support.on_disk import evict
from tests.support.waiting import eventually


@pytest.mark.parametrize("versioned", [False, True], ids=["deleted", "delete marker"])
def test_object_deleted_out_of_band_is_one_miss_written_again_and_found_by_others(
    stocked: Site, tmp_path: Path, versioned: bool
) -> None:
    if versioned:
        stocked.client.put_bucket_versioning(
            Bucket=stocked.bucket, VersioningConfiguration={"Status": "Enabled"}
        )
    with Engine.at(stocked, tmp_path / "a") as both, Engine.at(stocked, tmp_path / "b") as other:
        other.save_and_wait(1)
        other.announce()
        both.refresh()
        assert both.node.index.maybe_contains(key_at(1))
        reply = stocked.client.delete_object(Bucket=stocked.bucket, Key=LAYOUT.object(key_at(1)))
        assert bool(reply.get("DeleteMarker")) is versioned
        assert both.fetch(1).outcome is FetchOutcome.ABSENT
        assert both.count("index.vanished") == 1
        assert not both.node.index.maybe_contains(key_at(1))
        assert not both.node.index.maybe_contains(key_at(1))
        both.save_and_wait(1)
        both.announce()
        assert both.node.index.maybe_contains(key_at(1))
        assert stocked.body(key_at(1).name) == body_at(1)
        evict(other.node.tier, key_at(1))
        other.refresh()
        assert other.fetch(1).source == "bucket"
    if versioned:
        _empty(stocked)


def test_bucket_that_is_deleted_is_a_miss_and_hits_come_back_with_it(
    stocked: Site, tmp_path: Path, local_s3: LocalS3
) -> None:
    with Engine.at(stocked, tmp_path / "a") as engine:
        engine.save_and_wait(1)
        engine.announce()
        evict(engine.node.tier, key_at(1))
        local_s3.delete_bucket(stocked.bucket)
        assert engine.fetch(1).outcome in (FetchOutcome.ABSENT, FetchOutcome.UNAVAILABLE)
        local_s3.create_bucket(stocked.bucket)
        stocked.stock(1)
        # The breaker lets the bucket rest for a second or more.
        eventually(lambda: engine.fetch(1).outcome is FetchOutcome.READY)


def _empty(site: Site) -> None:
    """Delete all versions, which the fixture that made the bucket leaves alone."""
    found = site.client.list_object_versions(Bucket=site.bucket)
    for one in [*found.get("Versions", ()), *found.get("DeleteMarkers", ())]:
        site.client.delete_object(Bucket=site.bucket, Key=one["Key"], VersionId=one["VersionId"])
