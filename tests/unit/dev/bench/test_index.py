# SPDX-License-Identifier: Apache-2.0
"""The made-up bases of ``bench index``, their readers and its child processes."""

from __future__ import annotations

from typing import get_args

import pytest

from s3ec.dev.bench.index_made import Keys, Made, Mode, make, reader


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make(tmp_path_factory.mktemp("index"), 20_000)


@pytest.mark.parametrize("mode", get_args(Mode))
def test_reader_opens_the_files_that_are_here_and_downloads_none(made: Made, mode: Mode) -> None:
    keys = Keys(made.base())
    with reader(made, mode) as node:
        assert all(map(node.index.maybe_contains, keys.hits(500)))
        assert not all(map(node.index.maybe_contains, keys.misses(500)))
        assert node.counters.get("index.downloads") == 0
        assert all(map(node.index.holds, keys.hits(10))) == (mode == "exact")
