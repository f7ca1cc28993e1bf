# SPDX-License-Identifier: Apache-2.0
"""Random lives of an engine keep every promise.

``make fuzz ARGS="scheduler --seeds 0-300"`` runs the lives alone, or others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.fuzz.scheduler import Fuzz

pytestmark = [
    pytest.mark.slow,
    # vLLM's engine is imported here, and what it imports.
    pytest.mark.filterwarnings("ignore"),
]

SEEDS, PORTION = 300, 50


@pytest.mark.parametrize("first", range(0, SEEDS, PORTION))
def test_every_life_keeps_every_promise(fuzz: Fuzz, first: int) -> None:
    verdicts = [fuzz.run(seed) for seed in range(first, first + PORTION)]
    ours = [verdict for verdict in verdicts if verdict.failure and not verdict.is_vllms]
    assert not ours, "\n".join(f"seed {one.seed}: {one.failure}\n{one.trace}" for one in ours)
    assert sum(verdict.stat["grants"] for verdict in verdicts) > PORTION
