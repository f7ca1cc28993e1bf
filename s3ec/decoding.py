# SPDX-License-Identifier: Apache-2.0
"""How releases of vLLM make pixels of a file, as far as that changes what is encoded.

A client's own name of a picture (``uuid``) says nothing of that, and two releases may make other
pixels of the same bytes. Each way has a number, which stands in an entry's header. Releases whose
ways differ for rare pictures only share a corpus. ``tests/versions/test_decoding.py`` compares.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

_PNG = b"\x89PNG\r\n\x1a\n"
_COLOUR_TYPE = 25  # place of that byte; the first chunk is always the header
_RGB = 2


@dataclass(frozen=True, slots=True)
class Step:
    """A release that makes other pixels than the one before it.

    Attributes:
        since: Major and minor of the release.
        what: What it does otherwise, as a part of a sentence.
        is_about: Whether a file is one of those that become other pixels; None where any may be.
    """

    since: tuple[int, int]
    what: str
    is_about: Callable[[bytes], bool] | None = None


def has_transparent_colour(data: bytes) -> bool:
    """Whether this is a PNG without an alpha channel in which one colour is transparent (tRNS).

    Not of a palette, and not grey: those are laid on white by every release.
    """
    if not data.startswith(_PNG) or data[_COLOUR_TYPE : _COLOUR_TYPE + 1] != bytes([_RGB]):
        return False
    if b"tRNS" not in data:
        return False
    at = len(_PNG)
    while at + 8 <= len(data):
        if data[at + 4 : at + 8] == b"tRNS":
            return True
        at += 12 + int.from_bytes(data[at : at + 4], "big")
    return False


# The number of a way is its place here, from 1. A new step goes to the end.
STEPS = (
    # EXIF turns a picture. RGBA, LA, PA, and P or L with tRNS are laid on white.
    Step((0, 26), "decodes as far back as s3ec knows vLLM"),
    # convert_image_mode (multimodal/image.py) looks for transparency before it returns an RGB
    # picture as it is. vLLM's own hash of a file changes with it, a client's name does not.
    Step((0, 33), "lays RGB PNGs with a transparent colour on white", has_transparent_colour),
)


def number_of(release: tuple[int, int] | None) -> int:
    """The way of a release of vLLM; the last one if it is not known."""
    if release is None:
        return len(STEPS)
    return max(1, sum(step.since <= release for step in STEPS))


def shared_number(number: int) -> int:
    """The first way that differs from this one for rare pictures only; those share a corpus."""
    while number > 1 and STEPS[number - 1].is_about is not None:
        number -= 1
    return number


def why_left_out(data: bytes) -> str | None:
    """Why a picture is not stored for other releases; None where all make the same pixels of it."""
    for step in STEPS:
        if step.is_about is not None and step.is_about(data):
            return f"vLLM {step.since[0]}.{step.since[1]} {step.what}, and older releases do not"
    return None
