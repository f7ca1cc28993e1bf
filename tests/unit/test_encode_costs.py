# SPDX-License-Identifier: Apache-2.0
"""What encoding costs: how it is learned, and when it is measured again."""

from __future__ import annotations

import math

import pytest

from s3ec.encode_costs import PRIOR_ENCODE_S, EncodeCosts


def test_cost_is_learned_by_modality_and_size_without_the_first_sample() -> None:
    costs = EncodeCosts()
    assert costs.cost_s("image", 256) == PRIOR_ENCODE_S
    costs.add("image", 256, 9.0)  # compilation
    assert costs.cost_s("image", 256) == PRIOR_ENCODE_S
    for _ in range(20):
        costs.add("image", 256, 0.1)
    assert costs.cost_s("image", 256) == pytest.approx(0.1)
    # A size that was never seen takes the nearest one; a modality that was not, the first guess.
    assert costs.cost_s("image", 1024) == pytest.approx(0.4)
    assert costs.cost_s("video", 256) == PRIOR_ENCODE_S


def test_a_hiccup_counts_for_little() -> None:
    costs = EncodeCosts()
    for _ in range(30):
        costs.add("image", 256, 0.1)
    costs.add("image", 256, 60.0)
    assert costs.cost_s("image", 256) <= 0.2


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.inf, math.nan])
def test_a_time_that_cannot_be_is_ignored(seconds: float) -> None:
    costs = EncodeCosts()
    for _ in range(3):
        costs.add("image", 256, seconds)
        costs.add("image", 0, 0.1)
    assert costs.document == {}


def test_each_kind_is_explored_until_its_cost_is_known_and_never_for_long() -> None:
    costs = EncodeCosts()
    assert costs.explore("image", 256)
    assert costs.explore("image", 257)  # of the same size class
    assert [costs.explore("image", 256) for _ in range(5)] == [True] + 4 * [False]
    assert costs.explore("image", 1024)
    assert costs.explore("video", 256)
    for _ in range(2):
        costs.add("video", 256, 0.1)
    assert not costs.explore("video", 256)


def test_a_kind_not_encoded_for_ten_minutes_is_explored_again_where_that_could_matter() -> None:
    costs = EncodeCosts({("image", 9): 0.1 / 256})
    for number in range(600):
        assert not costs.explore("image", 256, 1000.0 + number)
    assert not costs.explore("image", 256, 1601.0, in_doubt=False)
    assert costs.explore("image", 256, 1601.0)
    for number in range(599):
        assert not costs.explore("image", 256, 1700.0 + number)
    costs.add("image", 256, 0.1)  # encoded all the same
    assert not costs.explore("image", 256, 2500.0)


def test_what_was_explored_again_counts_for_all_that_was_believed() -> None:
    costs = EncodeCosts()
    for _ in range(20):
        costs.add("image", 256, 0.6)
    for number in range(301):
        explored = costs.explore("image", 256, 2.0 * number)
    assert explored
    costs.add("image", 256, 0.02)
    assert costs.cost_s("image", 256) == pytest.approx(0.02)
    costs.add("image", 256, 0.04)  # as one of many again
    assert costs.cost_s("image", 256) == pytest.approx(0.024)


def test_a_kind_that_is_seldom_asked_for_is_not_explored_more_often_than_one_in_300() -> None:
    costs = EncodeCosts({("image", 9): 1.0 / 256})
    explored = [
        costs.explore("image", 256, 100.0 * number)
        for number in range(900)
        for _ in range(4)  # items of one request
    ]
    assert 1 <= sum(explored) <= 3


def test_several_alike_in_one_step_count_as_one_of_their_size() -> None:
    costs = EncodeCosts()
    for _ in range(2):
        costs.add("image", 4 * 256, 0.4, items=4)
    assert costs.document == {"image:9": pytest.approx(0.1 / 256)}
