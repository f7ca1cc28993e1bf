# SPDX-License-Identifier: Apache-2.0
"""Cache folders without hard links, of processes with other umasks, and of other users."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from s3ec.dev.rigs.proxy import FaultProxy
from s3ec.testing.server import LocalS3
from tests.faults.embeddings import body_at, key_at
from tests.faults.herd import Herd
from tests.faults.site import Site

pytest.importorskip("torch")

_STOCK = 12
_NOBODY = 65534


@pytest.fixture
def open_site(local_s3: LocalS3, s3_bucket: str) -> Iterator[Site]:
    """Its cache folder lies where every user may go."""
    with tempfile.TemporaryDirectory() as folder, FaultProxy(local_s3.endpoint_url) as proxy:
        os.chmod(folder, 0o755)
        yield Site(proxy, s3_bucket, local_s3, Path(folder) / "cache")


def stock(site: Site) -> None:
    site.stock(*range(_STOCK))


def assert_all_saved(site: Site, *firsts: int) -> None:
    """All of these workers' saves are in the bucket, once, and the folder is in order."""
    saved = {key_at(n).name: n for first in firsts for n in range(first, first + 24)}
    assert site.created.names == dict.fromkeys(saved, 1)
    for name, number in saved.items():
        assert site.body(name) == body_at(number)
    assert site.entries() <= site.objects()
    assert site.tier_complaints() == []


def test_folder_without_hard_links_fetches_evicts_and_saves_from_memory(
    site: Site, herd: Herd
) -> None:
    stock(site)
    settings = site.settings()
    pids = [
        herd.start("work", settings=settings, stock=_STOCK, first=first, linkless=True)
        for first in (100, 200)
    ]
    if herd.hear(pids[0], "u") == "unable":
        pytest.skip("this kernel has no seccomp filters for us")
    for pid in pids:
        assert herd.hear(pid, "refused by the disk") == "refused by the disk 24"
        herd.hear(pid, "done")
    assert herd.complaints() == []
    assert_all_saved(site, 100, 200)


def test_processes_with_open_and_closed_umasks_share_one_folder(site: Site, herd: Herd) -> None:
    stock(site)
    settings = site.settings()
    pids = [
        herd.start("work", settings=settings, stock=_STOCK, first=first, umask=umask)
        for first, umask in ((100, 0o000), (200, 0o077), (300, 0o277))
    ]
    for pid in pids:
        herd.hear(pid, "done")
    assert herd.complaints() == []
    assert_all_saved(site, 100, 200, 300)


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
def test_second_user_is_refused_with_the_fix_and_changes_nothing(
    open_site: Site, herd: Herd
) -> None:
    stock(open_site)
    settings = open_site.settings()
    herd.wait(herd.start("work", settings=settings, stock=_STOCK, first=100))
    other = herd.start("work", settings=settings, stock=_STOCK, first=200, uid=_NOBODY)
    said = herd.hear(other, "refused")
    assert f"belongs to uid 0 and this process runs as uid {_NOBODY}" in said
    assert "cache_dir" in said
    assert_all_saved(open_site, 100)
