# SPDX-License-Identifier: Apache-2.0
"""Waiting in vLLM's own scheduler, with a virtual clock: figures do not depend on the machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from s3ec.dev.rigs.virtual_engine import Outcome

pytestmark = [
    pytest.mark.slow,
    # vLLM's engine is imported here, and what it imports.
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(scope="module")
def virtual() -> Any:
    pytest.importorskip("vllm")
    from s3ec.dev.rigs import virtual_engine

    return virtual_engine


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from s3ec.dev.rigs.models import write_gemma3

    return write_gemma3(tmp_path_factory.mktemp("models") / "tiny")


def outcomes(virtual: Any, model: Path, point: Any, count: int = 80) -> dict[str, Outcome]:
    rate = point.load * virtual.capacity(model, point, count=80) if point.load else 0.0
    return {
        wait: virtual.simulate(model, point, wait, count=count, rate=rate, seed=3)
        for wait in ("none", "always", "auto")
    }


@pytest.mark.parametrize(
    ("encode_ms", "fetch_ms", "load", "better"),
    [
        (3, 80, 0.0, "none"),  # a fetch takes far longer than the encoder
        (15, 30, 0.0, "none"),
        (1000, 30, 0.0, "always"),
        (15, 30, 0.9, "always"),  # an encode delays all others
    ],
)
def test_waits_where_that_is_better_and_only_there(
    virtual: Any, model: Path, encode_ms: int, fetch_ms: int, load: float, better: str
) -> None:
    point = virtual.Point(encode_ms / 1000, fetch_ms / 1000, load)
    found = outcomes(virtual, model, point)
    other = found["always" if better == "none" else "none"]
    best, auto = found[better], found["auto"]
    assert best.ttft_p50_s < other.ttft_p50_s
    assert auto.ttft_p50_s <= 1.1 * best.ttft_p50_s
    assert auto.requests_per_s >= 0.97 * best.requests_per_s
    assert auto.learned_encode_s == pytest.approx(point.encode_s, rel=0.01)


@pytest.mark.parametrize("load", [0.0, 0.5])
def test_what_a_replica_lacks_makes_no_engine_slower(
    virtual: Any, model: Path, load: float
) -> None:
    """It has half of what is asked for; home is too far away to wait for."""
    point = virtual.Point(0.015, 0.08, load, near_s=0.005, lag=0.5)
    found = outcomes(virtual, model, point, count=240)
    auto, none = found["auto"], found["none"]
    assert auto.ttft_mean_s <= 1.05 * none.ttft_mean_s
    assert auto.loaded > 60


def test_what_a_straggler_holds_up_is_encoded(virtual: Any, model: Path) -> None:
    """The rest of its request is loaded all the same."""
    found = outcomes(virtual, model, virtual.Point(0.02, 0.03, 0.0, pictures=4), count=240)
    auto = found["auto"]
    assert auto.loaded > 0
    assert auto.encoded > 0
    assert auto.ttft_p99_s < found["always"].ttft_p99_s


@pytest.mark.parametrize(("load", "pictures"), [(0.0, 4), (0.9, 1)])
def test_a_store_that_hangs_costs_next_to_nothing(
    virtual: Any, model: Path, load: float, pictures: int
) -> None:
    """No request fails, so no breaker opens. Waits in vain end by themselves, and there are few."""
    found = outcomes(virtual, model, virtual.Point(0.1, 3600.0, load, pictures), count=160)
    none, auto = found["none"], found["auto"]
    assert auto.loaded == 0
    assert auto.ttft_p50_s <= 1.05 * none.ttft_p50_s
    assert auto.ttft_p99_s <= 1.05 * none.ttft_p99_s
    assert auto.requests_per_s >= 0.95 * none.requests_per_s
