# SPDX-License-Identifier: Apache-2.0
"""The report as a person reads it, on a wide console and on a narrow one."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from s3ec.dev.demo.render import seconds, show
from s3ec.dev.demo.report import Report, deploy_command
from tests.unit.dev.demo.cases import answer, make_report


def shown(report: Report, width: int = 120) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    show(report, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def cells(text: str, start: str) -> list[str]:
    """The words of the first line that begins with ``start``: the table stands above the bars."""
    return next(line for line in text.splitlines() if line.strip().startswith(start)).split()


def test_show_has_a_line_per_picture_and_one_of_totals() -> None:
    text = shown(make_report())
    line = " ".join(cells(text, "p1.png"))
    assert line == "p1.png 2 464 4.00 s 200 ms 20 ms 2.00 ms 500 ms 5.00 s yes"
    line = " ".join(cells(text, "3 pictures"))
    assert line == "3 pictures 1,392 12.00 s 600 ms 60 ms 6.00 ms 1.50 s 15.00 s yes"


@pytest.mark.parametrize("width", [80, 100, 116])
def test_show_cuts_names_but_no_figures_where_the_terminal_is_narrow(width: int) -> None:
    name = "photo-04-hubble_deep_field.jpg"
    picture = replace(make_report(1).pictures[0], name=name, rows=256, nbytes=2_752_960)
    report = replace(
        make_report(1), pictures=(replace(picture, first_token_s=88.88, fetch_s=10.01),)
    )
    text = shown(report, width=width)
    figures = " ".join(cells(text, "photo-")[1:])
    store = "100 ms " if width == 116 else ""
    assert figures == f"256 2,752,960 4.00 s {store}10.01 s 1.00 ms 88.88 s 5.00 s yes"
    assert ("its upload" in text) == bool(store)


def test_show_states_hits_misses_and_that_answers_are_identical() -> None:
    text = shown(make_report())
    assert cells(text, "hits")[1:] == ["3", "of", "3", "pictures"]
    assert cells(text, "misses")[1:] == ["0"]
    assert cells(text, "answers identical")[2] == "yes"
    assert "same tokens for 3 of 3; log probabilities equal" in text
    assert "PROBLEM" not in text


def test_show_states_total_answer_time_with_and_without() -> None:
    report = make_report(preset="encoder-27b")
    line = " ".join(cells(shown(report), "time to first token"))
    assert "1.50 s with s3ec" in line
    assert line.endswith("15.00 s without: 1/10.0 of the time")


def test_show_says_so_where_the_bucket_was_slower() -> None:
    assert "1.20 times as long" in shown(make_report(first_token_s=6.0), width=200)


def test_show_says_what_a_tiny_encoder_cannot_gain_and_where_a_real_one_is() -> None:
    text = shown(make_report(first_token_s=6.0, encode_s=0.02), width=400)
    line = " ".join(cells(text, "break-even")[1:])
    # 6 s from the bucket, 5 s without: a second more of encoding would have been even.
    assert line == (
        "a hit pays where encoding takes over 1.02 s a picture; encoding took 20 ms a picture "
        "here, so it does not. With a real encoder's cost: make demo"
    )
    assert "nothing can be gained" in " ".join(cells(text, "model"))


def test_show_says_that_a_real_encoder_pays() -> None:
    report = make_report(first_token_s=1.5, encode_s=4.0, preset="encoder-27b")
    line = " ".join(cells(shown(report, width=400), "break-even")[1:])
    assert line == (
        "a hit pays where encoding takes over 500 ms a picture; encoding took 4.00 s a picture "
        "here, so it does"
    )


def test_show_claims_no_break_even_below_nothing() -> None:
    text = shown(make_report(first_token_s=0.5, encode_s=4.0), width=400)
    assert "a hit cost nothing that could be measured" in text


def test_show_says_no_and_why_where_answers_differ() -> None:
    other = [answer(0, 7), answer(1, 8)]
    text = shown(make_report(2, hits=1, plain_answers=other))
    assert cells(text, "p1.png")[-1] == "NO"
    assert cells(text, "answers identical")[2] == "NO"
    assert "same tokens for 1 of 2; log probabilities equal; not comparable for 1" in text
    assert "PROBLEM: 1 hits for 2 pictures" in text
    assert "PROBLEM: other answers than without the connector: p1.png" in text


def test_show_says_how_far_probabilities_are_apart() -> None:
    report = make_report(1, plain_answers=[answer(0, 7, shift=0.125)])
    assert "log probabilities differ by up to 0.125" in shown(report)


def test_show_says_where_only_probabilities_tell_answers_apart() -> None:
    alike = [answer(5, 5, shift=0.1 * number) for number in range(3)]
    text = shown(make_report(answers=alike, plain_answers=alike))
    assert "3 for 3 pictures by log probabilities, 1 by tokens alone" in text
    assert cells(shown(make_report()), "different answers")[2:] == ["3", "for", "3", "pictures"]


@pytest.mark.parametrize("width", [60, 120])
def test_show_prints_the_command_in_one_piece(width: int) -> None:
    assert deploy_command() in shown(make_report(), width=width).splitlines()


def test_show_marks_what_the_log_did_not_hold() -> None:
    text = shown(make_report(1, consumer_log=""))
    assert cells(text, "p0.png").count("-") == 2


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, "-"),
        (0.0, "0.00 ms"),
        (0.000289, "0.29 ms"),
        (0.0184, "18 ms"),
        (3.912, "3.91 s"),
        (132.4, "132 s"),
    ],
)
def test_seconds_keeps_three_digits(value: float | None, expected: str) -> None:
    assert seconds(value) == expected
