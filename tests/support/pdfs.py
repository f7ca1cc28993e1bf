# SPDX-License-Identifier: Apache-2.0
"""Small PDF files, made here."""

from __future__ import annotations

import io

from PIL import Image, ImageDraw


def make_pdf(pages: int, *, size: tuple[int, int] = (160, 200)) -> bytes:
    """A PDF file of so many different pages, each a picture at 72 dpi."""
    sheets = []
    for number in range(pages):
        sheet = Image.new("RGB", size, (255, 255, 255))
        ImageDraw.Draw(sheet).text((10, 10), f"page {number + 1}", fill=(0, 0, 0))
        sheets.append(sheet)
    file = io.BytesIO()
    sheets[0].save(file, "PDF", save_all=True, append_images=sheets[1:], resolution=72)
    return file.getvalue()
