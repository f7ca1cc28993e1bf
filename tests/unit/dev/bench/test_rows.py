# SPDX-License-Identifier: Apache-2.0
"""From made-up rounds to the rows of the benchmarks that move bytes."""

from __future__ import annotations

from pathlib import Path

import pytest

from s3ec.dev.bench import fetch, hydrate, load, save
from s3ec.dev.bench.context import Bench, Context, Row
from s3ec.dev.bench.corpus import Corpus, key_of
from s3ec.identity import Namespace


def context_of(bench: Bench) -> Context:
    return Context(bench, quick=False, scratch=Path(), say=lambda _: None)


def rows_of(context: Context) -> dict[str, Row]:
    return {row.spec.name.partition(".")[2]: row for row in context.rows("not reported")}


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
    context = context_of(fetch.BENCH)

    fetch.report(context, fetch.FETCH, kept, corpus, {})

    rows = rows_of(context)
    assert {name: row.value for name, row in rows.items()} == pytest.approx(
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
    context = context_of(hydrate.BENCH)

    hydrate.report(context, corpus, kept)

    rows = rows_of(context)
    assert {name: row.value for name, row in rows.items()} == {
        "ratio_to_raw": 0.5,
        "cpu_ratio_to_raw": 3.0,
    }
    assert rows["ratio_to_raw"].detail["note"] == "over the best, raw two"
    assert rows["cpu_ratio_to_raw"].detail["note"] == "over the best, raw two"


def test_a_load_is_compared_at_each_place_and_the_slowest_step_counts() -> None:
    us = {"s3ec": 30.0, load.PREADV: 20.0, load.EXAMPLE: 60.0}
    kept = {
        f"{name}, {size} a step, disk": [[each * (2 if name == "s3ec" and size == 8 else 1)] * 4]
        for name, each in us.items()
        for size in (1, 8)
    }
    context = context_of(load.BENCH)

    load.report(context, ["disk"], kept)

    rows = rows_of(context)
    assert rows["ratio_to_preadv"].value is None
    assert rows["ratio_to_preadv"].detail["why"] == "no tmpfs here"
    assert rows["ratio_to_preadv_disk"].value == 3.0
    assert rows["ratio_to_example"].value == 1.0
    assert rows["us_per_item"].value == 60.0
    assert rows["us_per_item"].detail["cases"][f"{load.PREADV}, 1 a step, disk"] == 20.0


def test_a_save_may_take_fifty_microseconds_beside_its_copies() -> None:
    us = {"s3ec": 350.0, save.CLONE: 200.0}
    kept = {f"{name}, {size} a step": [[each] * 4] for name, each in us.items() for size in (1, 8)}
    context = context_of(save.BENCH)

    save.report(context, kept | {save.EXAMPLE: [[3500.0] * 4]}, {"tmpfs": True})

    rows = rows_of(context)
    assert rows["ratio_to_clone"].value == 1.5
    assert rows["ratio_to_clone"].ok
    assert rows["ratio_to_example"].value == pytest.approx(0.1)
    assert rows["us_per_item"].value == 350.0
