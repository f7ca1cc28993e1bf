# SPDX-License-Identifier: Apache-2.0
"""A consumer gives the answers of an engine without the connector, and encodes nothing.

The consumer's own vision encoder has other weights than the one that filled the bucket, so an
image that it encoded itself would be answered differently: ``control`` shows that.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from s3ec.counters import Counters
from s3ec.tier.tier import Tier
from tests.e2e.consumers import Exchange
from tests.e2e.rig import (
    FROM_BUCKET,
    FROM_TIER,
    HITS,
    LOADS,
    MANY,
    MISSES,
    PURPOSES,
    Answer,
    Corpus,
    Gallery,
    Record,
    said,
    scenarios,
)
from tests.support.on_disk import audit_of, found_in, usage_of

_NAMES = [scenario.name for scenario in scenarios(Gallery(dict.fromkeys(PURPOSES, Path("/"))))]


@pytest.fixture
def records(consumers: tuple[dict[str, Record], Exchange]) -> dict[str, Record]:
    return consumers[0]


@pytest.mark.parametrize("name", [name for name in _NAMES if name != "together"])
def test_answers_and_log_probabilities_equal_those_without_the_connector(
    name: str, records: dict[str, Record], reference: dict[str, list[Answer]]
) -> None:
    assert [said(answer) for answer in records[name].answers] == [
        said(answer) for answer in reference[name]
    ]


def test_concurrent_requests_get_the_tokens_they_get_without_the_connector(
    records: dict[str, Record], reference: dict[str, list[Answer]]
) -> None:
    answers = [answer["token_ids"] for answer in records["together"].answers]
    assert answers == [answer["token_ids"] for answer in reference["together"]]


@pytest.mark.parametrize("name", _NAMES)
def test_nothing_of_the_corpus_is_encoded(name: str, records: dict[str, Record]) -> None:
    assert records[name][MISSES] == 0
    assert records[name][LOADS] == records[name][HITS]


def test_an_image_outside_the_corpus_is_encoded_with_this_engines_other_weights(
    records: dict[str, Record], reference: dict[str, list[Answer]]
) -> None:
    control = records["control"]
    assert control[MISSES] == 1
    assert control[HITS] == control[LOADS] == 0
    assert said(control.answers[0]) != said(reference["solo control"][0])


@pytest.mark.parametrize(
    ("name", "loads"),
    [("single", 1), ("several", 3), ("first request", 1), ("more than the cache holds", MANY)],
)
def test_first_use_of_an_image_loads_it_from_the_bucket(
    name: str, loads: int, records: dict[str, Record]
) -> None:
    assert records[name][LOADS] == loads
    assert records[name][FROM_BUCKET] == loads
    assert records[name][FROM_TIER] == 0


def test_an_image_of_an_earlier_request_comes_from_this_nodes_disk(
    records: dict[str, Record],
) -> None:
    assert records["other request"][HITS] == records["other request"][LOADS] == 1
    assert records["other request"][FROM_BUCKET] == 0


def test_images_that_the_encoder_cache_dropped_are_loaded_again_from_this_nodes_disk(
    records: dict[str, Record],
) -> None:
    # The encoder cache holds two of them, so at least the others were dropped.
    assert records["reload"][LOADS] >= MANY - 2
    assert records["reload"][FROM_BUCKET] == 0


def test_an_image_covered_by_the_prefix_cache_is_neither_fetched_nor_loaded(
    records: dict[str, Record],
) -> None:
    repeat = records["repeat"]
    assert repeat.answers[0]["cached_tokens"] > 0
    assert not {HITS, MISSES, LOADS, FROM_BUCKET, FROM_TIER} & repeat.moved.keys()


def test_after_a_prefix_hit_only_the_images_behind_it_are_fetched(
    records: dict[str, Record],
) -> None:
    extended = records["extended"]
    assert extended.answers[0]["cached_tokens"] > 0
    assert extended[LOADS] == 1
    assert extended[FROM_BUCKET] == 1
    assert extended[FROM_TIER] == 0


def test_concurrent_requests_for_one_image_download_it_once(records: dict[str, Record]) -> None:
    assert records["together"][FROM_BUCKET] == 4


def test_the_nodes_disk_is_clean_after_the_engines_end(
    records: dict[str, Record], workdir: Path, corpus: Corpus
) -> None:
    root = workdir / "consumer-tier"
    # vLLM kills an engine that takes long to end, on a busy machine. The next process sweeps.
    Tier(root, corpus.namespace, budget_bytes=2**30, min_free_bytes=0, counters=Counters()).close()
    tier = found_in(root)
    assert audit_of(tier) == []
    assert len(usage_of(tier).entries) >= MANY


def test_no_internal_error_was_contained(records: dict[str, Record]) -> None:
    moved = {name for record in records.values() for name in record.moved}
    assert "vllm:s3ec_internal_errors" not in moved
