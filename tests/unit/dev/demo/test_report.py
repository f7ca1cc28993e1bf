# SPDX-License-Identifier: Apache-2.0
"""What the report says of a run, and what it complains about."""

from __future__ import annotations

import json
import shlex

import pytest

from s3ec.config import load_settings
from s3ec.dev.demo.report import deploy_command
from tests.unit.dev.demo.cases import answer, digest_of, fetched, loaded, make_report


def test_a_good_run_has_no_problems() -> None:
    report = make_report()
    assert report.problems() == []
    assert report.identical
    assert report.distinct_answers == 3
    assert report.first_token_ratio == pytest.approx(0.1)


def test_pictures_take_their_times_from_their_own_log_lines() -> None:
    second = make_report().pictures[1]
    assert second.name == "p1.png"
    assert second.digest == digest_of(1)
    assert (second.rows, second.width, second.dtype, second.nbytes) == (2, 4, "bfloat16", 464)
    assert (second.store_s, second.fetch_s, second.load_s) == (0.2, 0.02, 0.002)
    assert (second.encode_s, second.first_token_s, second.plain_first_token_s) == (4.0, 0.5, 5.0)


def test_break_even_is_where_both_answers_take_equally_long() -> None:
    report = make_report(first_token_s=6.0, encode_s=0.25)
    assert report.encode_s == 0.25
    # With an encoder that is slower by this, the answer without would have taken 6 s as well.
    assert report.break_even_s - report.encode_s == pytest.approx(6.0 - 5.0)
    document = report.to_json()
    assert document["break_even_s"] == report.break_even_s


def test_totals_are_sums() -> None:
    totals = make_report().totals
    assert totals.nbytes == 3 * 464
    assert totals.encode_s == 12.0
    assert totals.fetch_s == pytest.approx(0.06)
    assert totals.load_s == pytest.approx(0.006)
    assert (totals.first_token_s, totals.plain_first_token_s) == (1.5, 15.0)


def test_too_few_hits_are_a_problem() -> None:
    assert make_report(hits=2).problems() == ["2 hits for 3 pictures"]


def test_misses_are_a_problem() -> None:
    assert make_report(misses=1).problems() == ["1 pictures were encoded by the consumer"]


def test_other_tokens_are_a_problem_that_names_the_picture() -> None:
    report = make_report(2, plain_answers=[answer(0, 7), answer(1, 8)])
    assert not report.identical
    assert report.problems() == ["other answers than without the connector: p1.png"]


def test_equal_tokens_with_other_probabilities_are_not_identical() -> None:
    report = make_report(2, plain_answers=[answer(0, 7), answer(1, 7, shift=1e-6)])
    assert report.pictures[1].same_tokens
    assert not report.identical
    assert len(report.problems()) == 1


def test_one_answer_for_all_pictures_is_a_problem() -> None:
    same = [answer(5, 5)] * 3
    report = make_report(answers=same, plain_answers=same)
    assert report.problems() == [
        "all pictures have the same answer, so comparing answers shows nothing"
    ]


def test_answers_that_differ_in_probability_only_are_different_answers() -> None:
    alike = [answer(5, 5, shift=0.1 * number) for number in range(3)]
    report = make_report(answers=alike, plain_answers=alike)
    assert (report.distinct_answers, report.distinct_texts) == (3, 1)
    assert report.problems() == []


def test_one_picture_alone_may_have_one_answer() -> None:
    assert make_report(1).problems() == []


@pytest.mark.parametrize("missing", ["fetched from the bucket", "loaded into the encoder cache"])
def test_an_embedding_that_the_log_does_not_show_is_a_problem(missing: str) -> None:
    lines = [fetched(0), loaded(0), fetched(1), loaded(1)]
    del lines[2 if missing.startswith("fetched") else 3]
    report = make_report(2, consumer_log="\n".join(lines))
    assert report.problems() == [f"the log does not show that 1 pictures were {missing}"]


def test_a_fetch_from_the_tier_does_not_count_as_one_from_the_bucket() -> None:
    log = "\n".join([fetched(0, source="tier"), loaded(0)])
    report = make_report(1, consumer_log=log)
    assert report.pictures[0].fetch_s is None
    assert report.problems() != []


def test_to_json_is_json_and_agrees_with_the_report() -> None:
    report = make_report(hits=2, misses=1)
    document = json.loads(json.dumps(report.to_json()))
    assert document["ok"] is False
    assert document["problems"] == report.problems()
    assert (document["hits"], document["misses"]) == (2, 1)
    assert document["totals"]["plain_first_token_s"] == 15.0
    assert [picture["name"] for picture in document["pictures"]] == ["p0.png", "p1.png", "p2.png"]
    assert document["pictures"][0]["token_ids"] == [0, 7]


def test_deploy_command_holds_a_configuration_that_s3ec_accepts() -> None:
    words = shlex.split(deploy_command())
    assert words[:4] == ["vllm", "serve", "MODEL", "--ec-transfer-config"]
    transfer = json.loads(words[4])
    assert (transfer["ec_connector"], transfer["ec_role"]) == ("S3ECConnector", "ec_both")
    assert load_settings(transfer["ec_connector_extra_config"]).settings.bucket == "BUCKET"


def test_deploy_command_holds_no_path_of_this_machine() -> None:
    assert "/" not in deploy_command()
