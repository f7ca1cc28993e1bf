# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
from collections import Counter

import pytest

from s3ec.dev.bench import workloads


@pytest.mark.parametrize("name", workloads.NAMES)
def test_the_same_arguments_make_the_same_workload_and_another_seed_another_one(name: str) -> None:
    first, again, other = (workloads.make(name, factor=0.1, seed=seed) for seed in (3, 3, 4))

    assert first == again
    assert first.requests != other.requests
    assert first.about["factor"] == 0.1
    assert first.about["seed"] == 3


@pytest.mark.parametrize(
    ("name", "requests", "pictures", "images"),
    [
        ("questions", 135 * 8, 135 * 47, 5),
        ("decks", 14_560, 52_000, 20),
        ("zipf", 3_099, 26_000, 5),
        ("scan", 3_099 + 2_600, 26_000, 10),
        ("pool", 50, 500, 10),
    ],
)
def test_a_factor_of_one_has_the_published_counts(
    name: str, requests: int, pictures: int, images: int
) -> None:
    workload = workloads.make(name)

    assert len(workload.requests) == requests
    # All that could be asked for; a scan and whole decks do ask for all.
    assert workload.pictures <= pictures
    assert (workload.pictures == pictures) == (name in ("decks", "scan"))
    assert workload.most_images == images


@pytest.mark.parametrize("name", workloads.NAMES)
def test_no_request_shows_a_picture_twice(name: str) -> None:
    for request in workloads.make(name, factor=0.02).requests:
        assert len(set(request.images)) == len(request.images)


@pytest.mark.parametrize("name", workloads.NAMES)
def test_the_smallest_factor_leaves_a_request(name: str) -> None:
    workload = workloads.make(name, factor=1e-9)

    assert workload.requests
    assert workload.references >= workload.pictures > 0


def test_questions_are_about_pages_of_one_document() -> None:
    for request in workloads.make("questions", factor=0.05).requests:
        assert len({image.partition("/")[0] for image in request.images}) == 1


def test_a_deck_is_shown_whole_by_five_or_six_questions() -> None:
    workload = workloads.make("decks", factor=0.01)
    asked = Counter(request.images for request in workload.requests)

    assert set(asked.values()) == {5, 6}
    assert len(workload.requests) == math.floor(5.6 * len(asked))


def test_a_scan_in_the_middle_of_zipf_shows_each_page_once_in_order() -> None:
    zipf, scan = (workloads.make(name, factor=0.01, seed=5) for name in ("zipf", "scan"))
    half = len(zipf.requests) // 2
    shown = [image for request in scan.requests[half : half + 26] for image in request.images]

    assert shown == [f"page-{number:05}" for number in range(260)]
    assert [r.images for r in scan.requests[:half]] == [r.images for r in zipf.requests[:half]]
    assert [r.images for r in scan.requests[half + 26 :]] == [
        r.images for r in zipf.requests[half:]
    ]


def test_with_a_rate_requests_arrive_in_order_and_without_one_at_no_time() -> None:
    timed = workloads.make("pool").arriving(4.0)
    at_s = [request.at_s for request in timed.requests]

    assert None not in at_s
    assert at_s == sorted(at_s, key=float)  # type: ignore[arg-type]
    assert {request.at_s for request in workloads.make("pool").requests} == {None}
    assert [r.images for r in timed.requests] == [r.images for r in workloads.make("pool").requests]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"name": "letters"}, "workload 'letters' is not one of questions, decks"),
        ({"name": "zipf", "factor": 0.0}, "factor 0.0 is not above zero"),
        ({"name": "zipf", "factor": float("nan")}, "factor nan"),
    ],
)
def test_an_argument_that_makes_no_workload_is_named(
    arguments: dict[str, object], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        workloads.make(**arguments)  # type: ignore[arg-type]
