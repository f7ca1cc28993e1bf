# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from s3ec.dev.bench.workloads import questions


def test_a_factor_of_one_has_the_published_counts_and_the_smallest_one_document() -> None:
    workload = questions()

    assert len(workload.requests) == 135 * 8
    assert workload.pictures <= 135 * 47
    assert workload.most_images == 5
    assert len(questions(factor=1e-9).requests) == 8
    assert questions(factor=0.1, seed=3) == questions(factor=0.1, seed=3)
    assert questions(factor=0.1, seed=3).requests != questions(factor=0.1, seed=4).requests


def test_a_question_is_about_different_pages_of_one_document() -> None:
    for request in questions(factor=0.05).requests:
        assert len({image.partition("/")[0] for image in request.images}) == 1
        assert len(set(request.images)) == len(request.images)
