# SPDX-License-Identifier: Apache-2.0
"""The made-up snapshots of ``bench index`` and their readers."""

from __future__ import annotations

from pathlib import Path

from s3ec.dev.bench.index_made import Keys, make, reader


def test_reader_opens_the_files_that_are_here_and_downloads_none(tmp_path: Path) -> None:
    made = make(tmp_path, 20_000)
    keys = Keys(made.segment())
    with reader(made) as node:
        assert all(map(node.index.maybe_contains, keys.hits(500)))
        assert not any(map(node.index.maybe_contains, keys.misses(500)))
        assert node.counters.get("index.downloads") == 0
        assert node.index.counts().snapshot_rows == made.entries == 20_000
