# SPDX-License-Identifier: Apache-2.0
"""The installed vLLM makes those pixels of odd files that s3ec believes it makes."""

from __future__ import annotations

import hashlib
import importlib.util
import io
from typing import Any

import pytest

from s3ec.decoding import has_transparent_colour
from tests.versions.odd_pictures import ODD

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # of what vLLM imports
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed"),
]
each_file = pytest.mark.parametrize("name", ODD)


def release() -> tuple[int, int]:
    from s3ec.connector import compat

    found = compat.release(compat.vllm_version())
    assert found is not None
    return found


def expected(name: str) -> tuple[str, str]:
    return ODD[name].way(1 if release() < (0, 33) else 2)


def seen(image: Any) -> str:
    assert image.mode == "RGB"
    return f"{image.width}x{image.height} {hashlib.sha256(image.tobytes()).hexdigest()[:16]}"


@each_file
def test_a_file_has_the_pixels_that_were_recorded(name: str) -> None:
    from vllm.multimodal.media.image import ImageMediaIO

    assert seen(ImageMediaIO().load_bytes(ODD[name].data).media) == expected(name)[0]


@each_file
def test_a_picture_of_pillow_has_the_same_pixels(name: str) -> None:
    from PIL import Image
    from vllm.multimodal.parse import MultiModalDataParser

    image = Image.open(io.BytesIO(ODD[name].data))
    image.load()
    items = MultiModalDataParser().parse_mm_data({"image": [image]})["image"]
    assert seen(items.get(0)) == expected(name)[0]


@each_file
def test_a_file_has_the_content_hash_that_was_recorded(name: str) -> None:
    from vllm.multimodal.hasher import MultiModalHasher
    from vllm.multimodal.media.image import ImageMediaIO

    if release() < (0, 31):
        pytest.skip("another hash")
    media = ImageMediaIO().load_bytes(ODD[name].data)
    found = MultiModalHasher.hash_kwargs("blake3", model_id="m", image=media)
    assert found[:16] == expected(name)[1]


def test_job_leaves_out_all_that_become_other_pixels() -> None:
    others = {name for name, odd in ODD.items() if odd.way(1)[0] != odd.way(2)[0]}
    assert others == {name for name, odd in ODD.items() if has_transparent_colour(odd.data)}
