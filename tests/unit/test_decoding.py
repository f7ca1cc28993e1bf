# SPDX-License-Identifier: Apache-2.0
"""How pictures are decoded: numbers of releases, and which files two of them take otherwise."""

from __future__ import annotations

import pytest

from s3ec import decoding
from s3ec.decoding import Step, has_transparent_colour, number_of, shared_number, why_left_out
from tests.versions.odd_pictures import ODD


@pytest.mark.parametrize(
    ("release", "number"),
    [((0, 25), 1), ((0, 26), 1), ((0, 32), 1), ((0, 33), 2), ((0, 34), 2), ((1, 0), 2), (None, 2)],
)
def test_a_release_decodes_as_the_last_step_before_it(
    release: tuple[int, int] | None, number: int
) -> None:
    assert number_of(release) == number


def test_ways_that_differ_for_rare_pictures_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [shared_number(number) for number in (1, 2)] == [1, 1]
    steps = (*decoding.STEPS, Step((0, 40), "turns all around"), Step((0, 41), "x", lambda _: True))
    monkeypatch.setattr(decoding, "STEPS", steps)
    assert [shared_number(number) for number in (1, 2, 3, 4)] == [1, 1, 3, 3]


def test_a_transparent_colour_is_found_wherever_it_stands() -> None:
    found = {name for name, odd in ODD.items() if has_transparent_colour(odd.data)}
    assert found == {"rgb-trns.png", "rgb16-trns.png", "rgb-trns-late.png"}
    assert all((why_left_out(odd.data) is not None) == (name in found) for name, odd in ODD.items())


def test_what_only_looks_like_one_is_none() -> None:
    plain = ODD["rgb.png"].data
    text = b"tEXt" + b"Comment\0 tRNS"
    with_text = plain[:33] + len(text[4:]).to_bytes(4, "big") + text + bytes(4) + plain[33:]
    assert not has_transparent_colour(with_text)
    for cut in range(len(plain)):  # whatever is cut off, there is an answer
        has_transparent_colour(plain[:cut] + b"tRNS")
    huge = plain[:33] + b"\xff\xff\xff\xfftRNX" + plain[33:] + b"tRNS"
    assert not has_transparent_colour(huge)
    assert not has_transparent_colour(b"")


def test_the_reason_names_the_release() -> None:
    reason = why_left_out(ODD["rgb-trns.png"].data)
    assert reason is not None
    assert reason.startswith("vLLM 0.33 lays RGB PNGs")
