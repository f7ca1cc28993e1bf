# SPDX-License-Identifier: Apache-2.0
"""``bench load`` and ``bench save`` run from end to end where vLLM is; no figure is looked at."""

from __future__ import annotations

import importlib.util

import pytest

from s3ec.bench import load, save
from tests.unit.bench.benches import quick_rows

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]


def test_loads_are_measured_beside_preadv_and_the_example() -> None:
    rows = quick_rows("load")
    assert all(row["value"] > 0 for row in rows.values())
    cases = rows["load.us_per_item"]["detail"]["cases"]
    for size in (1, 8):
        for name in ("s3ec", load.PREADV, load.EXAMPLE):
            assert cases[f"{name}, {size} a step, disk"] > 0


def test_saves_are_measured_beside_a_clone_and_the_example() -> None:
    rows = quick_rows("save")
    cases = rows["save.us_per_item"]["detail"]["cases"]
    assert cases.keys() == {"s3ec, 1 a step", "s3ec, 8 a step", save.CLONE, save.EXAMPLE}
    assert all(value > 0 for value in cases.values())
    assert rows["save.ratio_to_example"]["value"] > 0
    assert "50 us" in rows["save.ratio_to_clone"]["detail"]["formula"]
