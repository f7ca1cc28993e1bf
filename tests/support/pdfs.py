# SPDX-License-Identifier: Apache-2.0
"""Small PDF files, made here."""

from __future__ import annotations

import io

from PIL import Image, ImageDraw


def make_busy_pdf(objects: int) -> bytes:
    """A PDF file of one page with so many small rectangles."""
    import pypdfium2

    raw = pypdfium2.raw
    document = pypdfium2.PdfDocument.new()
    page = document.new_page(200, 200)
    for number in range(objects):
        one = raw.FPDFPageObj_CreateNewRect(number % 20 * 10, number // 20 % 20 * 10, 9, 9)
        raw.FPDFPageObj_SetFillColor(one, number % 255, 0, 0, 255)
        raw.FPDFPath_SetDrawMode(one, raw.FPDF_FILLMODE_ALTERNATE, False)
        raw.FPDFPage_InsertObject(page, one)
    page.gen_content()
    file = io.BytesIO()
    document.save(file)
    return file.getvalue()


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
