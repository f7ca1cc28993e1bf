# SPDX-License-Identifier: Apache-2.0
"""What both tests with vLLM's scheduler share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.fuzz.scheduler import Fuzz


@pytest.fixture(scope="module")
def fuzz(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fuzz]:
    pytest.importorskip("vllm")
    from tests.fuzz.scheduler import fuzzing

    with fuzzing(tmp_path_factory.mktemp("model") / "qwen2-vl") as made:
        yield made
