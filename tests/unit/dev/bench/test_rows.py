# SPDX-License-Identifier: Apache-2.0
"""From made-up rounds to the rows of benchmarks: what is compared with what."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from s3ec.dev.bench import dead, fetch, hydrate, load, rag, rag_warm, save
from s3ec.dev.bench.context import Bench, CannotMeasureError, Context, Row
from s3ec.dev.bench.corpus import Corpus, key_of
from s3ec.dev.bench.rag_rig import Leg
from s3ec.dev.bench.rag_warm import Setting
from s3ec.identity import Namespace


def reported(bench: Bench, report: Callable[..., None], *about: Any) -> dict[str, Row]:
    """What ``report`` makes of these, by the rows' names without that of the benchmark."""
    context = Context(bench, quick=False, scratch=Path(), say=lambda _: None)
    report(context, *about)
    return {row.spec.name.partition(".")[2]: row for row in context.rows("not reported")}


def values(rows: dict[str, Row]) -> dict[str, float | None]:
    return {name: row.value for name, row in rows.items()}


# -- the data path ---------------------------------------------------------------------------------


@pytest.fixture
def corpus() -> Corpus:
    """Ten objects of 100 MB."""
    keys = tuple(key_of(f"{number:064x}") for number in range(10))
    return Corpus("", {}, Namespace.from_descriptor({"model": "m"}), keys, 100_000_000)


def test_a_fetch_is_compared_with_the_raw_loop_and_with_the_one_that_writes_files(
    corpus: Corpus,
) -> None:
    took = {fetch.RAW: (2.0, 1.0), fetch.TO_FILE: (1.0, 2.0), fetch.OURS: (2.5, 3.0)}
    kept = {case: [fetch.Sample(s, cpu, 0.0)] * 3 for case, (s, cpu) in took.items()}

    rows = reported(fetch.BENCH, fetch.report, fetch.FETCH, kept, corpus, {})

    assert values(rows) == pytest.approx(
        {
            "ratio_to_files": 0.4,
            "cpu_ratio_to_files": 1.5,
            "ratio_to_raw": 0.8,
            "cpu_ratio_to_raw": 3.0,
            "gb_per_s": 0.4,
            "cpu_ms_per_object": 300.0,
        }
    )
    assert rows["gb_per_s"].detail["cores_busy"][fetch.RAW] == 0.5
    assert rows["gb_per_s"].samples == 30


def test_hydrating_is_compared_with_the_best_raw_loop_of_each_row(corpus: Corpus) -> None:
    took = {"raw one": (1.0, 4.0, 2.0), "raw two": (2.0, 2.0, 1.0), "s3ec hydrate": (2.0, 4.0, 3.0)}
    kept = {case: [hydrate.Sample(*figures)] * 2 for case, figures in took.items()}

    rows = reported(hydrate.BENCH, hydrate.report, corpus, kept)

    assert values(rows) == {"ratio_to_raw": 0.5, "cpu_ratio_to_raw": 3.0}
    assert {row.detail["note"] for row in rows.values()} == {"over the best, raw two"}


def test_a_load_is_compared_at_each_place_and_the_slowest_step_counts() -> None:
    us = {"s3ec": 30.0, load.PREADV: 20.0, load.EXAMPLE: 60.0}
    kept = {
        f"{name}, {size} a step, disk": [[each * (2 if name == "s3ec" and size == 8 else 1)] * 4]
        for name, each in us.items()
        for size in (1, 8)
    }

    rows = reported(load.BENCH, load.report, ["disk"], kept)

    assert rows["ratio_to_preadv"].value is None
    assert rows["ratio_to_preadv"].detail["why"] == "no tmpfs here"
    assert rows["ratio_to_preadv_disk"].value == 3.0
    assert rows["ratio_to_example"].value == 1.0
    assert rows["us_per_item"].value == 60.0
    assert rows["us_per_item"].detail["cases"][f"{load.PREADV}, 1 a step, disk"] == 20.0


def test_a_save_may_take_fifty_microseconds_beside_its_copies() -> None:
    us = {"s3ec": 350.0, save.CLONE: 200.0}
    kept = {f"{name}, {size} a step": [[each] * 4] for name, each in us.items() for size in (1, 8)}
    kept[save.EXAMPLE] = [[3500.0] * 4]

    rows = reported(save.BENCH, save.report, kept, {"tmpfs": True})

    assert rows["ratio_to_clone"].value == 1.5
    assert rows["ratio_to_clone"].ok
    assert rows["ratio_to_example"].value == pytest.approx(0.1)
    assert rows["us_per_item"].value == 350.0


# -- a dead store ----------------------------------------------------------------------------------


def times(ms: float) -> list[dead.RequestTimes]:
    return [dead.RequestTimes([ms] * 4, [ms / 2] * 8) for _ in range(10)]


def test_a_dead_store_costs_a_quotient_of_99th_percentiles() -> None:
    kept = {dead.PLAIN: times(10.0), dead.DEAD: times(11.0)}

    rows = reported(dead.BENCH, dead.report, kept, {"vllm:s3ec_misses": 40.0})

    ttft, step = rows.values()
    assert ttft.value == pytest.approx(1.1)
    assert ttft.ok is False
    assert (ttft.samples, step.samples) == (40, 80)
    assert ttft.detail["spread"]["rounds"] == 5


@pytest.mark.parametrize("moved", [{}, {"vllm:s3ec_hits": 1.0, "vllm:s3ec_misses": 39.0}])
def test_an_engine_that_had_hits_or_was_not_asked_gives_no_figure(moved: dict[str, float]) -> None:
    with pytest.raises(CannotMeasureError):
        reported(dead.BENCH, dead.report, {dead.PLAIN: times(1), dead.DEAD: times(1)}, moved)


# -- questions over pages --------------------------------------------------------------------------


def leg(number: int, latency_ms: int = 0, *, seconds: float = 1.0, **more: Any) -> Leg:
    return Leg(number, latency_ms, first_s=[seconds], seconds=seconds, references=4, **more)


def rag_rows(*legs: Leg) -> dict[str, Row]:
    return reported(rag.BENCH, rag.report, list(legs), {"object_bytes": 1_000_000})


def test_a_ratio_is_that_of_the_worst_latency_beside_what_has_none() -> None:
    row = rag_rows(leg(1, seconds=10), leg(3, seconds=1), leg(3, 80, seconds=4))["total_ratio"]

    assert row.value == pytest.approx(0.4)
    assert row.detail["cases"] == {
        "0 ms to the bucket": pytest.approx(0.1),
        "80 ms to the bucket": pytest.approx(0.4),
    }


def test_a_row_whose_configuration_was_not_asked_for_says_so() -> None:
    assert rag_rows(leg(4))["total_ratio"].detail["why"] == "configuration 3 was not asked for"


def test_each_picture_shown_is_counted_once_and_the_processor_by_what_was_loaded() -> None:
    # Of four pictures one was on the device, and three came in: two from the bucket, one of them
    # twice, since it had been fetched for a request that came later.
    loading = leg(3, encodes=1, allocations=3, from_bucket=3, cpu_s=7.0)
    alone, found = rag_rows(leg(1, cpu_s=5.0), loading)["legs"].detail["legs"]

    assert found["hit_ratio"] == {"device": 0.25, "node": 0.0, "bucket": 0.5, "encoded": 0.25}
    assert found["loaded_bytes"] == 2_000_000
    assert found["cpu_s_per_gb"] == pytest.approx(7.0 / 0.002)
    assert alone["cpu_s_per_gb"] is None


# -- the same on a warm disk -----------------------------------------------------------------------


def asked(number: int, *p50_s: float, total: float = 1.0, encodes: int = 0) -> Leg:
    """A leg that was asked once for each figure."""
    rounds = [(each, total) for each in p50_s]
    more: Any = {"references": 1, "encodes": encodes}
    return Leg(number, 0, first_s=[*p50_s], rounds=rounds, seconds=total, **more)


def compared(ours: Leg, example: Leg, copies: Leg) -> dict[int, Leg]:
    return {8: ours, 5: example, 7: copies}


def warm_rows(of: dict[Setting, dict[int, Leg]]) -> dict[str, Row]:
    return reported(rag_warm.BENCH, rag_warm.report, of, {"object_bytes": 1})


EQUAL = compared(asked(8, 1, 1, 1, encodes=3), asked(5, 1, 1, 1), asked(7, 1, 1, 1, total=0.5))


def test_a_ratio_is_the_median_of_those_of_each_round_and_the_worst_settings() -> None:
    # The ratio of the medians would be 1.5; a slow round hits both sides of it.
    slow = compared(asked(8, 3, 8, 2, encodes=4), asked(5, 1, 1, 1), asked(7, 1, 2, 4))
    rows = warm_rows({Setting(14, False, 1): EQUAL, Setting(60, True, 2): slow})

    assert rows["warm_p50_ratio"].value == 3
    assert rows["warm_p50_ratio"].detail["cases"] == {
        "14 ms, no language model, clients: 1": 1,
        "60 ms, a language model, clients: 2": 3,
    }
    assert rows["warm_total_ratio"].value == 2
    assert (rows["warm_encodes"].value, rows["warm_encodes"].ok) == (4, False)


def test_the_plain_example_counts_where_a_language_model_answers_several_clients() -> None:
    twice = compared(asked(8, 2, 2, 2), asked(5, 1, 1, 1), asked(7, 1, 1, 1))
    others = {Setting(14, False, 2): twice, Setting(14, True, 1): twice}
    row = warm_rows({**others, Setting(14, True, 2): EQUAL})["warm_p50_ratio_plain"]

    assert row.value == 1
    assert list(row.detail["cases"]) == ["14 ms, a language model, clients: 2"]
