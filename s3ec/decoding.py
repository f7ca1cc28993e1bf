# SPDX-License-Identifier: Apache-2.0
"""Detects images that two releases of vLLM decode to different pixels; no job stores these.

A client's own name of an image (``uuid``) does not change with the release.
``tests/versions/test_decoding.py`` compares releases.
"""

from __future__ import annotations

_PNG = b"\x89PNG\r\n\x1a\n"
_COLOUR_TYPE = 25  # offset of that byte; the first chunk is always the header
_RGB = 2


def has_transparent_colour(data: bytes) -> bool:
    """Return True for an RGB PNG without an alpha channel, with one transparent colour (tRNS).

    Palette and grey PNGs do not count: every release puts those on white.
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


def why_left_out(data: bytes) -> str | None:
    """Return why an image is not stored for other releases; None if all decode it alike."""
    if not has_transparent_colour(data):
        return None
    # convert_image_mode (multimodal/image.py) checks for transparency before it returns an RGB
    # image unchanged. vLLM's own hash of a file changes with it, a client's name does not.
    return "vLLM 0.33 lays RGB PNGs with a transparent colour on white, and older releases do not"
