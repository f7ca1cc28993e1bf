# SPDX-License-Identifier: Apache-2.0
"""vLLM's own processor and configuration: names without decoding, and reasons to be off."""

from __future__ import annotations

import io
import random
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from s3ec.dev.rigs.models import write_gemma3, write_qwen_vl
from s3ec.middleware import vllm_names
from s3ec.settings import Settings

pytest.importorskip("vllm")

# What vLLM and transformers warn of while they are imported and configured is not ours.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

_ORIENTATION = 0x0112
_IMAGE_ID = 0x800D


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def qwen(folder: Path) -> Path:
    return write_qwen_vl(folder / "qwen2-vl", "qwen2-vl")


@pytest.fixture(scope="module")
def settings() -> Settings:
    return Settings(bucket="embeddings", cache_dir=Path("/nowhere"))


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def config_of(model: Path, role: str | None = "ec_consumer", **options: Any) -> Any:
    from vllm.config import ECTransferConfig
    from vllm.engine.arg_utils import EngineArgs

    ec = None if role is None else ECTransferConfig(ec_connector="S3ECConnector", ec_role=role)
    made = EngineArgs(
        model=str(model), max_model_len=1024, enforce_eager=True, ec_transfer_config=ec, **options
    )
    return made.create_engine_config()


# -- names -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def names(qwen: Path) -> vllm_names.VLLMNames:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        return vllm_names.names_of(config_of(qwen), None)


def picture(mode: str, form: str, **more: Any) -> bytes:
    source = random.Random(f"{mode}{form}{sorted(more)}")
    made = Image.new("RGB", (48, 32))
    made.putdata([tuple(source.randbytes(3)) for _ in range(48 * 32)])
    buffer = io.BytesIO()
    converted = made.convert("L").convert(mode) if mode in ("I;16", "LA") else made.convert(mode)
    converted.save(buffer, form, **more)
    return buffer.getvalue()


def exif(**tags: Any) -> Image.Exif:
    made = Image.Exif()
    for tag, value in tags.items():
        made[int(tag.removeprefix("t"))] = value
    return made


def hash_of(names: vllm_names.VLLMNames, data: bytes) -> str:
    """As vLLM names the picture when it is in a request, by decoding it."""
    from vllm.multimodal.media.image import ImageMediaIO

    return names._hash({"image": [ImageMediaIO(image_mode="RGB").load_bytes(data)]})


NAMED = {
    "RGB.png": picture("RGB", "PNG"),
    "RGBA.png": picture("RGBA", "PNG"),
    "L.png": picture("L", "PNG"),
    "P.png": picture("P", "PNG"),
    "1.png": picture("1", "PNG"),
    "LA.png": picture("LA", "PNG"),
    "P with transparency.png": picture("P", "PNG", transparency=3),
    "RGB with transparency.png": picture("RGB", "PNG", transparency=(1, 2, 3)),
    "RGB.jpg": picture("RGB", "JPEG"),
    "L.jpg": picture("L", "JPEG"),
    "CMYK.jpg": picture("CMYK", "JPEG"),
    "progressive.jpg": picture("RGB", "JPEG", progressive=True),
    "turned.jpg": picture("RGB", "JPEG", exif=exif(**{f"t{_ORIENTATION}": 6})),
    "turned.png": picture("RGBA", "PNG", exif=exif(**{f"t{_ORIENTATION}": 3})),
    "an id.jpg": picture("RGB", "JPEG", exif=exif(**{f"t{_IMAGE_ID}": "0" * 16})),
    "RGB.webp": picture("RGB", "WEBP"),
    "RGBA.webp": picture("RGBA", "WEBP"),
    "lossless.webp": picture("RGB", "WEBP", lossless=True),
    "moving.webp": picture(
        "RGB", "WEBP", save_all=True, append_images=[Image.new("RGBA", (48, 32))]
    ),
}


@pytest.mark.parametrize("data", NAMED.values(), ids=NAMED)
def test_a_name_by_the_header_is_the_one_that_vllm_gives(
    data: bytes, names: vllm_names.VLLMNames
) -> None:
    assert names.name(data) == hash_of(names, data)


def test_two_pictures_have_two_names(names: vllm_names.VLLMNames) -> None:
    assert len({names.name(data) for data in NAMED.values()}) == len(NAMED)


OTHER = {
    "gif": picture("P", "GIF"),
    "tiff": picture("RGB", "TIFF"),
    "bmp": picture("RGB", "BMP"),
}


@pytest.mark.parametrize("data", OTHER.values(), ids=OTHER)
def test_other_formats_have_no_name(data: bytes, names: vllm_names.VLLMNames) -> None:
    assert names.name(data) is None


@pytest.mark.parametrize("data", [b"", b"no picture", b"\x89PNG\r\n\x1a\n" + b"\0" * 40])
def test_what_is_no_picture_has_no_name(data: bytes, names: vllm_names.VLLMNames) -> None:
    assert names.name(data) is None


def test_a_picture_that_vllm_refuses_for_its_size_has_no_name(
    qwen: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_MAX_IMAGE_PIXELS", "1000")
    small = vllm_names.names_of(config_of(qwen), None)
    assert small.name(NAMED["RGB.png"]) is None  # 1536 pixels


# -- reasons ---------------------------------------------------------------------------------------


def problem(config: Any, settings: Settings) -> str | None:
    return vllm_names.connector_problem(config) or vllm_names.problem_of(config, settings)


@pytest.mark.parametrize("role", ["ec_consumer", "ec_both"])
def test_a_server_that_loads_from_the_node_may_replace(
    role: str, qwen: Path, settings: Settings
) -> None:
    assert vllm_names.release_problem() is None
    assert problem(config_of(qwen, role), settings) is None


@pytest.mark.parametrize(
    ("role", "options", "reason"),
    [
        (None, {}, "no --ec-transfer-config"),
        ("ec_producer", {"enable_prefix_caching": False}, "ec_producer, which loads nothing"),
        ("ec_consumer", {"mm_processor_kwargs": {"max_pixels": 50176}}, "--mm-processor-kwargs"),
        ("ec_consumer", {"media_io_kwargs": {"image": {"image_mode": "L"}}}, "--media-io-kwargs"),
        ("ec_consumer", {"limit_mm_per_prompt": {"image": 0}}, "allows no pictures"),
        (
            "ec_consumer",
            {"mm_processor_cache_gb": 0, "enable_prefix_caching": False},
            "numbers images",
        ),
    ],
)
def test_a_server_that_may_answer_otherwise_says_why_it_is_off(
    role: str | None, options: Mapping[str, Any], reason: str, qwen: Path, settings: Settings
) -> None:
    found = problem(config_of(qwen, role, **options), settings)
    assert found is not None
    assert reason in found


def test_a_model_that_needs_its_pixels_is_left_alone(folder: Path, settings: Settings) -> None:
    found = problem(config_of(write_gemma3(folder / "gemma3")), settings)
    assert found == "the model declares no metadata that stands for a picture"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"lora_config": SimpleNamespace(enable_tower_connector_lora=True)}, "LoRA"),
        ({"kv_transfer_config": SimpleNamespace()}, "--kv-transfer-config"),
        ({"parallel_config.data_parallel_size": 4, "parallel_config.data_parallel_size_local": 2},
         "engines on other nodes"),
        ({"model_config.hf_config.use_unified_vision_chunk": True}, "as one kind"),
        ({"model_config.multimodal_config.enable_mm_embeds": False}, "enable_mm_embeds"),
        ({"ec_transfer_config.ec_connector": "ECExampleConnector"}, "not S3ECConnector"),
        ({"weight_transfer_config": SimpleNamespace()}, "--weight-transfer-config"),
    ],
    ids=str,
)  # fmt: skip
def test_what_this_machine_cannot_configure_turns_it_off_too(
    change: Mapping[str, Any], reason: str, qwen: Path, settings: Settings
) -> None:
    config = config_of(qwen)
    for path, value in change.items():
        *above, name = path.split(".")
        place = config
        for part in above:
            place = getattr(place, part)
        object.__setattr__(place, name, value)
    found = problem(config, settings)
    assert found is not None
    assert reason in found


def test_another_way_to_read_media_turns_it_off(
    qwen: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_MEDIA_CONNECTOR", "mine")
    assert "VLLM_MEDIA_CONNECTOR" in str(problem(config_of(qwen), settings))


def test_a_release_before_the_feature_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from s3ec.connector import compat

    monkeypatch.setattr(compat, "vllm_version", lambda: "0.29.0")
    assert vllm_names.release_problem() == (
        "vLLM 0.29.0 takes no request without pixels; 0.30 and newer do"
    )
