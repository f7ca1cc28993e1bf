# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of what storing costs and saves."""

from __future__ import annotations

import dataclasses
import math

import pytest

from s3ec.doctor.advise import Measured, inputs_of, preset_of
from s3ec.payoff import (
    DAYS_A_MONTH,
    GPUS,
    MODELS,
    STORES,
    Inputs,
    Known,
    Payoff,
    StorePreset,
    advised_settings,
    alike,
    find_model,
    given,
    pay_off,
    speed_up,
    transformer_tflop,
)

# Round numbers: 1 MB, 10 ms, a dollar a GPU-second, a dollar per GB and month.
ROUND = Inputs(
    rows=given(500),
    width=given(1000),
    itemsize=given(2),
    encode_ms=given(10),
    gpus=given(1),
    gpu_dollars_an_hour=given(3600),
    fetch_ms=given(5),
    node_mb_s=given(1000),
    reads=given(1),
    store=StorePreset("round", 1, 100, 1000, 1.0),
)


def changed(**values: float) -> Payoff:
    return pay_off(
        dataclasses.replace(ROUND, **{name: given(value) for name, value in values.items()})
    )


def of_model(name: str, gpu: str = "h100", store: str = "aws") -> Payoff:
    known = Known(like=MODELS[name], gpu=GPUS[gpu], store=STORES[store])
    return pay_off(inputs_of(known, Measured()))


def words_of(payoff: Payoff) -> set[str]:
    return {payoff.latency.word, payoff.throughput.word, payoff.money.word}


def test_round_numbers() -> None:
    found = pay_off(ROUND)
    assert found.nbytes == 1e6
    assert found.tie_mb_s == 100  # 1 MB in 10 ms
    assert found.gain_ms == 5
    assert found.encode_dollars == pytest.approx(0.01)
    assert found.month_dollars == pytest.approx(0.001)
    assert found.break_even_reads == pytest.approx(0.1)
    assert found.keep_days == pytest.approx(10 * DAYS_A_MONTH)
    assert words_of(found) == {"yes"}


@pytest.mark.parametrize(
    ("values", "verdict", "word"),
    [
        ({"fetch_ms": 10}, "latency", "even"),
        ({"fetch_ms": 13}, "latency", "no"),
        ({"node_mb_s": 100}, "throughput", "even"),
        ({"node_mb_s": 50}, "throughput", "no"),
        ({"reads": 0.1}, "money", "even"),
        ({"reads": 0.05}, "money", "no"),
        ({"reads": 0.0}, "money", "no"),
    ],
)
def test_each_verdict_turns(values: dict[str, float], verdict: str, word: str) -> None:
    assert getattr(changed(**values), verdict).word == word


def test_a_hit_is_fetched_and_then_read() -> None:
    found = pay_off(dataclasses.replace(ROUND, tier_ms=given(2)))
    assert found.gain_ms == 3
    assert found.tier_gain_ms == 8


def test_a_read_that_costs_more_than_an_encode_never_pays() -> None:
    dear = dataclasses.replace(ROUND.store, dollars_gb_read=100.0)
    found = pay_off(dataclasses.replace(ROUND, store=dear))
    assert math.isinf(found.break_even_reads)
    assert found.keep_days == 0
    assert found.money.word == "no"
    assert "costs more than an encode" in found.money.why


def test_the_estimates_come_to_published_figures() -> None:
    """Gemma3's encoder on an H100: 20.05 ms were measured (sglang, issue 34988)."""
    gemma = MODELS["gemma3-27b"]
    assert gemma.encode_ms(GPUS["h100"], 1) == pytest.approx(20.05, rel=0.05)
    assert gemma.encode_ms(GPUS["h100"], 2) == pytest.approx(14.48, rel=0.05)
    # SigLIP: 27 layers, 4096 patches that all attend to each other.
    tflop = transformer_tflop(
        layers=27, width=1152, inner=4304, gated=False, patches=4096, span=4096
    )
    assert tflop == pytest.approx(gemma.tflop, rel=0.05)
    assert speed_up(1) == 1


@pytest.mark.parametrize(
    ("model", "keep_days"),
    [("gemma3-27b", 18), ("internvl3-38b", 39), ("qwen3-vl-8b", 2), ("pixtral-12b", 1)],
)
def test_days_to_keep(model: str, keep_days: float) -> None:
    assert of_model(model).keep_days == pytest.approx(keep_days, abs=0.8)


def test_large_gpus_are_faster_than_s3_and_small_ones_are_not() -> None:
    assert of_model("gemma3-27b", "h100").latency.word == "no"
    assert of_model("gemma3-4b", "l4").latency.word == "yes"
    assert of_model("gemma3-27b", "h100", "minio-nvme").latency.word == "yes"
    assert words_of(of_model("pixtral-12b")) == {"no"}


def test_what_costs_more_than_it_saves_is_stored_at_its_second_encode() -> None:
    assert advised_settings(of_model("internvl3-38b")) == {}  # the defaults
    assert advised_settings(of_model("pixtral-12b")) == {"save": "worth"}


def test_a_model_is_found_by_the_hubs_name_a_folder_or_its_short_name() -> None:
    gemma = MODELS["gemma3-27b"]
    for name in ("google/gemma-3-27b-it", "Google/Gemma-3-27B-it", "gemma-3-27b-it", "gemma3-27b",
                 "/models/gemma-3-27b-it/"):  # fmt: skip
        assert find_model(name) is gemma
    assert find_model("google/gemma-3-27b") is None
    assert alike("google/gemma-3-27b")[0] == "google/gemma-3-27b-it"
    assert alike("Qwen/Qwen3-VL-8B")[0] == "Qwen/Qwen3-VL-8B-Instruct"
    assert alike("0000") == []


def test_devices_by_their_names() -> None:
    assert preset_of("NVIDIA H100 80GB HBM3") is GPUS["h100"]
    assert preset_of("NVIDIA A100-SXM4-80GB") is GPUS["a100"]
    assert preset_of("NVIDIA L4") is GPUS["l4"]
    assert preset_of("NVIDIA L40S") is GPUS["l40s"]
    assert preset_of("NVIDIA H200") is GPUS["h200"]
    assert preset_of("NVIDIA B200") is GPUS["b200"]
    assert preset_of("AMD Instinct MI300X") is GPUS["mi300x"]
    assert preset_of("NVIDIA L40") is None
