# SPDX-License-Identifier: Apache-2.0
"""What the tests of bad days share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from s3ec.testing.proxy import FaultProxy
from s3ec.testing.server import LocalS3
from tests.faults.site import Site


@pytest.fixture
def site(local_s3: LocalS3, s3_bucket: str, tmp_path: Path) -> Iterator[Site]:
    with FaultProxy(local_s3.endpoint_url) as proxy:
        yield Site(proxy, s3_bucket, local_s3, tmp_path / "cache")
