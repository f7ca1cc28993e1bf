# SPDX-License-Identifier: Apache-2.0
"""Random lives of an engine keep every promise; and a fault that breaks one is found.

``make fuzz ARGS="scheduler --seeds 0-300"`` runs the lives alone, or others.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.fuzz.scheduler import Fuzz, Verdict

pytestmark = [
    pytest.mark.slow,
    # vLLM's engine is imported here, and what it imports.
    pytest.mark.filterwarnings("ignore"),
]

SEEDS, PORTION = 300, 50
# Within so many lives a fault must show.
ENOUGH = 60
FAULTS = [
    *("lets go early", "loses loads", "remembers the dead", "never lets go", "sees no change"),
    *("schedules anything", "grants anything", "grants other rows", "only reports"),
    *("keeps the old", "saves another", "keeps old weights", "gives up at once", "never waits"),
    *("keeps open", "forgets fetches", "miscounts", "knows no cost", "knows no replay"),
    "sees no reset",
]


@pytest.fixture(scope="module")
def fuzz(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fuzz]:
    pytest.importorskip("vllm")
    from tests.fuzz.scheduler import fuzzing

    with fuzzing(tmp_path_factory.mktemp("model") / "qwen2-vl") as made:
        yield made


@pytest.mark.parametrize("first", range(0, SEEDS, PORTION))
def test_every_life_keeps_every_promise(fuzz: Fuzz, first: int) -> None:
    verdicts = [fuzz.run(seed) for seed in range(first, first + PORTION)]
    ours = [verdict for verdict in verdicts if verdict.failure and not verdict.is_vllms]
    assert not ours, "\n".join(f"seed {one.seed}: {one.failure}\n{one.trace}" for one in ours)
    assert sum(verdict.stat["grants"] for verdict in verdicts) > PORTION


def first_failure(fuzz: Fuzz, **how: Any) -> Verdict:
    for seed in range(ENOUGH):
        verdict = fuzz.run(seed, **how)
        if verdict.failure is not None:
            return verdict
    raise AssertionError(f"not found within {ENOUGH} lives")


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_ours_is_found(fuzz: Fuzz, name: str) -> None:
    from tests.fuzz import faults

    assert set(FAULTS) == set(faults.FAULTS)
    wire, kind, change = faults.FAULTS[name]
    verdict = first_failure(fuzz, wire=wire, change=change)
    assert verdict.failure is not None
    assert verdict.failure.startswith(kind), verdict.failure
    assert not verdict.is_vllms


@pytest.mark.parametrize("alone", [False, True], ids=["with s3ec", "alone"])
def test_a_fault_of_vllm_is_told_apart(fuzz: Fuzz, alone: bool) -> None:
    from tests.fuzz import faults

    verdict = first_failure(fuzz, change=faults.encodes_no_more, alone=alone)
    assert verdict.failure is not None
    assert verdict.failure.startswith("rows of another picture")
    assert verdict.is_vllms
