# SPDX-License-Identifier: Apache-2.0
"""Real pictures without a download: photographs, scans, and document pages drawn here.

The photographs and the scans are files of the scikit-image wheel; the pages are drawn with
Pillow and the font inside it. The same arguments give the same bytes with the same Pillow.
"""

from __future__ import annotations

import importlib.util
import io
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from s3ec.errors import ConfigError

# Of scikit-image's data folder, what its wheel carries (0.25, 0.26): everything else there is
# downloaded at first use.
_FILES = (
    "astronaut.png",
    "chelsea.png",
    "coffee.png",
    "rocket.jpg",
    "hubble_deep_field.jpg",
    "motorcycle_left.png",
    "page.png",  # a page of text, scanned
)

_PAGE = (827, 1169)  # A4 at 100 dots per inch
_MARGIN = 70
_INK = (25, 25, 35)
_GREY = (150, 150, 160)
_PAPER = (255, 255, 255)
_COLOURS = ((52, 101, 164), (204, 0, 0), (78, 154, 6), (196, 160, 0), (117, 80, 123))

_PROSE = (
    "the pump valve pressure of each unit was measured before and after service and report "
    "shows a loss in flow at high load for two sites while energy cost fell by nine percent "
    "we advise to replace seals every quarter keep spare parts on stock and train new staff "
    "on safe shutdown because most faults began with late maintenance not with bad design"
)
_CITIES = ("Bergen", "Porto", "Lyon", "Graz", "Gdansk", "Turku", "Leeds", "Bari")
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug")


def write_pictures(out: Path, count: int = 12) -> list[Path]:
    """Write different pictures into a folder, PNG and JPEG.

    Args:
        out: Folder, made if missing; files of the same name are replaced.
        count: How many. The first seven are photographs and a scan, all others drawn pages.

    Returns:
        The files, in an order that does not depend on `count`.

    Raises:
        ConfigError: scikit-image is not installed, or its wheel lacks a picture.
    """
    out.mkdir(parents=True, exist_ok=True)
    folder = photo_folder()
    paths: list[Path] = []
    for name in _FILES[:count]:
        try:
            content = (folder / name).read_bytes()
        except FileNotFoundError as exc:
            raise ConfigError(f"this scikit-image has no {name}: install 0.25 or 0.26") from exc
        paths.append(_write(out / f"photo-{len(paths):02d}-{name}", content))
    for number in range(count - len(paths)):
        draw = _PAGE_KINDS[number % len(_PAGE_KINDS)]
        # Every fourth page as JPEG, as scanners and exports make them.
        suffix, encoding = (".jpg", "JPEG") if number % 4 == 3 else (".png", "PNG")
        buffer = io.BytesIO()
        _page(draw, number).save(buffer, encoding)
        name = f"page-{number:04d}-{draw.__name__.lstrip('_')}{suffix}"
        paths.append(_write(out / name, buffer.getvalue()))
    return paths


def _write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


@cache
def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)


def photo_folder() -> Path:
    # Found, not imported: importing skimage takes seconds and most of scipy.
    spec = importlib.util.find_spec("skimage")
    if spec is None or spec.origin is None:
        raise ConfigError("scikit-image is not installed: pip install scikit-image")
    return Path(spec.origin).parent / "data"


class _Canvas:
    """A page with a cursor that moves down."""

    def __init__(self) -> None:
        self.image = Image.new("RGB", _PAGE, _PAPER)
        self.draw = ImageDraw.Draw(self.image)
        self.y = _MARGIN
        self.width = _PAGE[0] - 2 * _MARGIN

    def write(self, text: str, size: int, x: int = _MARGIN) -> None:
        """Write one line at the cursor, without moving it."""
        self.draw.text((x, self.y), text, fill=_INK, font=_font(size))

    def line(self, text: str, size: int, gap: int = 12) -> None:
        """Write one line and move below it."""
        self.write(text, size)
        self.y += size + gap


def _page(draw: Callable[[_Canvas, random.Random], None], number: int) -> Image.Image:
    # The seed is the page's number alone, so a page is the same whatever `count` is.
    rng = random.Random(number)
    canvas = _Canvas()
    canvas.line(f"Document {number + 1:04d}", 34, gap=24)
    draw(canvas, rng)
    canvas.y = _PAGE[1] - _MARGIN
    canvas.write(f"page {number + 1}", 16)
    return canvas.image


def _sentence(rng: random.Random) -> str:
    words = _PROSE.split()
    start = rng.randrange(len(words))
    return " ".join((words * 2)[start : start + rng.randint(8, 18)]).capitalize() + "."


def _letter(canvas: _Canvas, rng: random.Random) -> None:
    font = _font(20)
    for _ in range(rng.randint(4, 6)):
        line = ""
        for word in " ".join(_sentence(rng) for _ in range(rng.randint(3, 5))).split():
            longer = f"{line} {word}".strip()
            if font.getlength(longer) > canvas.width:
                canvas.line(line, 20, gap=6)
                longer = word
            line = longer
        canvas.line(line, 20, gap=26)


def _table(canvas: _Canvas, rng: random.Random) -> None:
    columns = (_MARGIN, 330, 480, 630)
    header = ("Site", "Units", "Hours", "Faults")
    rows: list[tuple[str, ...]] = [header]
    for city in rng.sample(_CITIES, len(_CITIES)):
        numbers = (rng.randint(2, 90), rng.randint(100, 9000), rng.randint(0, 40))
        rows.append((city, *map(str, numbers)))
    for row in rows:
        for x, cell in zip(columns, row, strict=True):
            canvas.write(cell, 24 if row is header else 22, x)
        canvas.y += 40
        canvas.draw.line((_MARGIN, canvas.y, _MARGIN + canvas.width, canvas.y), fill=_GREY)
        canvas.y += 10


def _bar_chart(canvas: _Canvas, rng: random.Random) -> None:
    canvas.line("Faults per month", 24)
    bottom, height = 900, 600
    step = canvas.width // len(_MONTHS)
    colour = rng.choice(_COLOURS)
    for place, month in enumerate(_MONTHS):
        value = rng.randint(5, 100)
        left = _MARGIN + place * step
        top = bottom - height * value // 100
        canvas.draw.rectangle((left, top, left + step - 18, bottom), fill=colour)
        canvas.y = top - 26
        canvas.write(str(value), 20, left)
        canvas.y = bottom + 10
        canvas.write(month, 20, left)


_PAGE_KINDS: tuple[Callable[[_Canvas, random.Random], None], ...] = (_letter, _table, _bar_chart)
