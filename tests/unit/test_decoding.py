# SPDX-License-Identifier: Apache-2.0
"""Which files two releases of vLLM decode otherwise."""

from __future__ import annotations

from s3ec.decoding import has_transparent_colour, why_left_out
from tests.versions.odd_pictures import ODD


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
