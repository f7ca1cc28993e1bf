# SPDX-License-Identifier: Apache-2.0
"""Real pictures without a download: photographs, scans, and document pages drawn here.

The photographs and the scans are files of the scikit-image wheel; the pages are drawn with
Pillow and the font inside it. The same arguments give the same bytes with the same Pillow.
"""

from __future__ import annotations

import importlib.util
import io
import random
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
_PAPER = (255, 255, 255)

_PROSE = (
    "the pump valve pressure of each unit was measured before and after service and report "
    "shows a loss in flow at high load for two sites while energy cost fell by nine percent "
    "we advise to replace seals every quarter keep spare parts on stock and train new staff "
    "on safe shutdown because most faults began with late maintenance not with bad design"
)


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
        # Every fourth page as JPEG, as scanners and exports make them.
        suffix, encoding = (".jpg", "JPEG") if number % 4 == 3 else (".png", "PNG")
        buffer = io.BytesIO()
        _page(number).save(buffer, encoding)
        paths.append(_write(out / f"page-{number:04d}{suffix}", buffer.getvalue()))
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


def _page(number: int) -> Image.Image:
    """A letter; the seed is the page's number alone, so it is the same whatever `count` is."""
    rng = random.Random(number)
    page = Image.new("RGB", _PAGE, _PAPER)
    draw, font, y = ImageDraw.Draw(page), _font(20), _MARGIN + 60
    draw.text((_MARGIN, _MARGIN), f"Document {number + 1:04d}", fill=_INK, font=_font(34))
    for _ in range(rng.randint(4, 6)):
        words = " ".join(_sentence(rng) for _ in range(rng.randint(3, 5))).split()
        while words:
            line = words.pop(0)
            while words and font.getlength(f"{line} {words[0]}") <= _PAGE[0] - 2 * _MARGIN:
                line += f" {words.pop(0)}"
            draw.text((_MARGIN, y), line, fill=_INK, font=font)
            y += 26
        y += 20
    draw.text((_MARGIN, _PAGE[1] - _MARGIN), f"page {number + 1}", fill=_INK, font=_font(16))
    return page


def _sentence(rng: random.Random) -> str:
    words = _PROSE.split()
    start = rng.randrange(len(words))
    return " ".join((words * 2)[start : start + rng.randint(8, 18)]).capitalize() + "."
