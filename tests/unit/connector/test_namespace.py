# SPDX-License-Identifier: Apache-2.0
"""What shares a namespace, and what must not."""

from __future__ import annotations

import copy
import json
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from s3ec.config import load_settings
from s3ec.errors import AccessError, ConfigError
from s3ec.identity import Namespace, is_namespace_name, is_object_name, make_key
from s3ec.settings import Settings
from s3ec.tenant import Tenant
from s3ec.weights import Weights

# Every engine process has it loaded; reading one descriptor needs it too.
pytest.importorskip("transformers")

from s3ec.connector.vllm_config import encoder_weights, namespace_of, scopes_of


class Config:
    """As much of a Hugging Face configuration as is looked at."""

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)

    def to_dict(self) -> dict[str, Any]:
        return {
            name: value.to_dict() if isinstance(value, Config) else value
            for name, value in self.__dict__.items()
        }


def engine() -> Any:
    """A VllmConfig of vLLM 0.32, as far as the namespace goes."""
    hf_config = Config(
        model_type="gemma3",
        mm_tokens_per_image=256,
        image_token_index=262144,
        vision_feature_layer=-2,
        transformers_version="5.19.0",
        id2label={0: "LABEL_0"},
        architectures=["Gemma3ForConditionalGeneration"],
        _name_or_path="/models/gemma",
        text_config=Config(hidden_size=5376, rope_theta=1e6),
        vision_config=Config(
            model_type="siglip",
            hidden_size=1152,
            image_size=896,
            layer_norm_eps=1e-06,
            chunk_size_feed_forward=0,
            problem_type=None,
            _attn_implementation="sdpa",
        ),
    )
    multimodal = SimpleNamespace(
        mm_processor_kwargs=None,
        media_io_kwargs={},
        mm_hasher_algorithm="blake3",
        video_pruning_rate=None,
        video_pruning_method="evs",
        mm_encoder_attn_dtype=None,
        mm_processor_cache_gb=4,
    )
    return SimpleNamespace(
        model_config=SimpleNamespace(
            model="google/gemma-3-27b-it",
            revision=None,
            dtype="torch.bfloat16",
            quantization=None,
            hf_config=hf_config,
            multimodal_config=multimodal,
        ),
        load_config=SimpleNamespace(load_format="auto", download_dir=None),
    )


def settings_of(**values: Any) -> Settings:
    """Settings that take the weights by the model's name: most models here are not on the disk."""
    return load_settings({"bucket": "corpus", "weights": "name", **values}).settings


def put(path: str, value: Any) -> Callable[[Any], None]:
    def apply(config: Any) -> None:
        *folders, last = path.split(".")
        for folder in folders:
            config = getattr(config, folder)
        setattr(config, last, value)

    return apply


ENCODER = "model_config.hf_config.vision_config."
MULTIMODAL = "model_config.multimodal_config."


def test_the_descriptor_is_plain_json_and_the_name_readable() -> None:
    namespace = namespace_of(engine(), settings_of())
    assert namespace.name.startswith("google-gemma-3-27b-it-")
    assert is_namespace_name(namespace.name)
    content = json.loads(namespace.to_json())
    assert content["model"] == "google/gemma-3-27b-it"
    assert content["dtype"] == "bfloat16"
    assert content["hasher"] == "blake3"
    assert content["encoder"]["vision_config"]["image_size"] == 896
    assert content["encoder"]["mm_tokens_per_image"] == 256


@pytest.mark.parametrize(
    "change",
    [
        put("model_config.model", "google/gemma-3-12b-it"),
        put("model_config.revision", "0123abc"),
        put("model_config.dtype", "torch.float16"),
        put("model_config.quantization", "fp8"),
        put("model_config.hf_config.model_type", "gemma3n"),
        # --hf-overrides can change these for one fleet; the embeddings keep their shape.
        put("model_config.hf_config.vision_feature_layer", -1),
        put("model_config.hf_config.vision_feature_select_strategy", "full"),
        put("model_config.hf_config.mm_tokens_per_image", 64),
        put("model_config.hf_config.audio_config", Config(sampling_rate=16000)),
        put("model_config.hf_config.vision_config", None),
        put(f"{ENCODER}image_size", 448),
        put(f"{ENCODER}layer_norm_eps", 1e-05),
        put(f"{ENCODER}more", [1, 2]),
        put(f"{MULTIMODAL}mm_processor_kwargs", {"max_pixels": 50176}),
        put(f"{MULTIMODAL}mm_processor_kwargs", {"images_kwargs": {"max_pixels": 50176}}),
        put(f"{MULTIMODAL}media_io_kwargs", {"image": {"rgba_background_color": [0, 0, 0]}}),
        put(f"{MULTIMODAL}mm_hasher_algorithm", "sha256"),
        # Models that prune videos put positions beside the embeddings of pictures, too.
        put(f"{MULTIMODAL}video_pruning_rate", 0.5),
        put(f"{MULTIMODAL}mm_encoder_attn_dtype", "fp8"),
        put("model_config.hf_image_processor_config", {"image_mean": [0.5, 0.5, 0.5]}),
        put("load_config.load_format", "dummy"),
        put("model_config.quantization_config", {"ignore": ["re:vision_tower.*"]}),
        # Encoders under other names: BLIP-2, Phi-3-V, Qwen2.5-Omni.
        put("model_config.hf_config.qformer_config", Config(layer_norm_eps=1.0)),
        put("model_config.hf_config.img_processor", {"layer_idx": -1}),
        put(
            "model_config.hf_config.thinker_config",
            Config(vision_config=Config(window_size=56), text_config=Config(hidden_size=1)),
        ),
    ],
)
def test_what_changes_embeddings_changes_the_namespace(change: Callable[[Any], None]) -> None:
    other = engine()
    change(other)
    assert namespace_of(other, settings_of()).name != namespace_of(engine(), settings_of()).name


@pytest.mark.parametrize(
    "change",
    [
        put("model_config.hf_config.transformers_version", "5.20.0"),
        put("model_config.hf_config.id2label", {0: "a", 1: "b"}),
        put("model_config.hf_config.architectures", None),
        put("model_config.hf_config._name_or_path", "/other/place"),
        put("model_config.hf_config.text_config", Config(hidden_size=1, rope_theta=1)),
        put(f"{ENCODER}chunk_size_feed_forward", 7),
        put(f"{ENCODER}problem_type", "x"),
        put(f"{ENCODER}_attn_implementation", "eager"),
        put(f"{ENCODER}new_in_a_release", None),
        put(f"{MULTIMODAL}mm_processor_kwargs", {}),
        put(f"{MULTIMODAL}mm_processor_kwargs", {"device": "cuda"}),
        put(f"{MULTIMODAL}media_io_kwargs", None),
        # What vLLM adds on an encode-only instance on CUDA, with torchcodec and without.
        put(f"{MULTIMODAL}media_io_kwargs", {"video": {"backend": "torchcodec", "device": "cuda"}}),
        put(f"{MULTIMODAL}media_io_kwargs", {"video": {}}),
        # What is of videos and of sound alone is in the names of those.
        put(f"{MULTIMODAL}media_io_kwargs", {"video": {"num_frames": 40}}),
        put(f"{MULTIMODAL}media_io_kwargs", {"audio": {"audio_backend": "pyav"}}),
        put(f"{MULTIMODAL}mm_processor_kwargs", {"videos_kwargs": {"fps": 1}}),
        put(f"{MULTIMODAL}mm_processor_kwargs", {"audio_kwargs": {"truncation": True}}),
        put(f"{MULTIMODAL}mm_encoder_only", True),
        put(f"{MULTIMODAL}mm_tensor_ipc", "torch_shm"),
        put("load_config.load_format", "safetensors"),
        put(f"{MULTIMODAL}video_pruning_method", "vidcom2"),
        put(f"{MULTIMODAL}mm_processor_cache_gb", 0),
        put(f"{MULTIMODAL}video_pruning_rate", 0.0),
        put("model_config.quantization_config", {}),
        put("model_config.hf_config.talker_config", Config(hidden_size=1)),
        put("model_config.hf_config.rope_scaling", {"factor": 4.0}),
        put("model_config.hf_config.thinker_config", Config(text_config=Config(vision_config={}))),
    ],
)
def test_what_does_not_change_embeddings_keeps_the_namespace(
    change: Callable[[Any], None],
) -> None:
    other = engine()
    change(other)
    assert namespace_of(other, settings_of()).name == namespace_of(engine(), settings_of()).name


VIDEO, AUDIO = {"video": {"num_frames": 40}}, {"audio": {"audio_backend": "pyav"}}


def name_of(modality: str, **multimodal: Any) -> str:
    config = engine()
    for setting, value in multimodal.items():
        put(f"{MULTIMODAL}{setting}", value)(config)
    return scopes_of(config).name("ab" * 32, modality)


@pytest.mark.parametrize(
    ("setting", "values", "modality"),
    [
        ("media_io_kwargs", [{}, VIDEO, {"video": {"num_frames": 41}}], "video"),
        ("media_io_kwargs", [{}, AUDIO, {"audio": {"audio_backend": "soundfile"}}], "audio"),
        ("media_io_kwargs", [{}, VIDEO, AUDIO, VIDEO | AUDIO], "vision_chunk"),
        ("media_io_kwargs", [{}, {"video": {"backend": "torchcodec"}}], "video"),
        ("media_io_kwargs", [{}, {"video": {"backend": "opencv", "device": "cuda"}}], "video"),
        ("mm_processor_kwargs", [{}, {"videos_kwargs": {"fps": 1}}], "video"),
        ("mm_processor_kwargs", [{}, {"audio_kwargs": {"truncation": True}}], "audio"),
    ],
)
def test_settings_of_one_modality_part_the_names_of_that_alone(
    setting: str, values: list[Any], modality: str
) -> None:
    names = {name_of(modality, **{setting: value}) for value in values}
    assert len(names) == len(values)
    others = {"image", "video", "audio"} - {modality} if modality != "vision_chunk" else {"image"}
    for other in others:
        assert {name_of(other, **{setting: value}) for value in values} == {"ab" * 32}


def test_a_name_is_marked_once_and_stays_a_name_of_ours() -> None:
    once = name_of("video", media_io_kwargs=VIDEO)
    mark, _, rest = once.partition(":")
    assert (mark[:6], rest) == ("video-", "ab" * 32)
    config = engine()
    put(f"{MULTIMODAL}media_io_kwargs", VIDEO)(config)
    scopes = scopes_of(config)
    # A client has read it in the catalogue and sends it.
    assert scopes.name(once, "video") == once
    assert scopes.name("cat", "video") == f"{mark}:cat"
    key = make_key(once)
    assert key is not None
    assert key.name == f"{mark}/ab/{'ab' * 32}.safetensors"
    assert is_object_name(key.name)
    assert make_key(scopes.name("renderer0-mm-1-video-0", "video")) is None
    assert not scopes_of(engine())


def test_pruning_settings_count_together() -> None:
    one, other = engine(), engine()
    put(f"{MULTIMODAL}video_pruning_rate", 0.5)(one)
    put(f"{MULTIMODAL}video_pruning_rate", 0.5)(other)
    put(f"{MULTIMODAL}video_pruning_method", "vidcom2")(other)
    assert namespace_of(one, settings_of()).name != namespace_of(other, settings_of()).name


def test_a_model_identity_stands_for_the_place_the_model_is_mounted_at() -> None:
    one, other = engine(), engine()
    one.model_config.model, other.model_config.model = "/mnt/a/gemma", "/srv/b/gemma"
    apart = {namespace_of(each, settings_of()).name for each in (one, other)}
    assert len(apart) == 2
    same = {namespace_of(each, settings_of(model_identity="gemma")).name for each in (one, other)}
    assert len(same) == 1
    assert next(iter(same)).startswith("gemma-")


def write_weights(folder: Path, content: bytes) -> Path:
    """A checkpoint of one tensor of the encoder."""
    tensor = {"dtype": "U8", "shape": [len(content)], "data_offsets": [0, len(content)]}
    header = json.dumps({"vision_tower.w": tensor}).encode()
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + content)
    return folder


def namespace_at(folder: Path, **more: Any) -> Namespace:
    config = engine()
    config.model_config.model = str(folder)
    return namespace_of(config, settings_of(**{"weights": "fingerprint"} | more))


def test_two_folders_share_if_their_weights_are_the_same(tmp_path: Path) -> None:
    one, copy = (write_weights(tmp_path / name, b"old") for name in ("one", "copy"))
    names = {namespace_at(folder, model_identity="gemma").name for folder in (one, copy)}
    assert len(names) == 1
    other = write_weights(tmp_path / "other", b"new")
    assert namespace_at(other, model_identity="gemma").name not in names


def test_a_folder_whose_weights_were_replaced_is_another_namespace(tmp_path: Path) -> None:
    before = namespace_at(write_weights(tmp_path, b"old"))
    assert before.descriptor["weights"].startswith("sha256:")
    after = namespace_at(write_weights(tmp_path, b"new"))
    assert before.name != after.name
    assert after.name == namespace_at(tmp_path).name


def test_where_the_name_is_to_be_trusted_the_weights_do_not_count(tmp_path: Path) -> None:
    before = namespace_at(write_weights(tmp_path, b"old"), weights="name")
    assert before.descriptor["weights"] == "by name"
    assert before.name == namespace_at(write_weights(tmp_path, b"new"), weights="name").name


def test_dummy_weights_share_with_nobody_who_has_real_ones(tmp_path: Path) -> None:
    write_weights(tmp_path, b"real")
    dummy = engine()
    dummy.model_config.model = str(tmp_path)
    dummy.load_config.load_format = "dummy"
    for weights in ("fingerprint", "name"):
        namespace = namespace_of(dummy, settings_of(weights=weights))
        assert namespace.descriptor["weights"] == "dummy"
        assert namespace.name != namespace_at(tmp_path, weights=weights).name


def streamed(folder: Path) -> Any:
    """vLLM copies the small files into a folder below the home folder and runs on that."""
    config = engine()
    config.model_config.model = str(folder)
    config.model_config.model_weights = "s3://models/gemma"
    config.load_config.load_format = "runai_streamer"
    return config


def test_a_model_in_an_object_store_is_called_by_its_url_and_counts_by_its_tags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tags = [("model.safetensors", 10, '"aa"')]
    monkeypatch.setattr("s3ec.store.tags.tags_below", lambda url, **_: tags)
    (tmp_path / "preprocessor_config.json").write_text('{"size": 1}')
    settings = settings_of(weights="fingerprint")
    before = namespace_of(streamed(tmp_path), settings)
    assert before.descriptor["model"] == "s3://models/gemma"
    assert before.descriptor["weights"].startswith("sha256:")
    assert list(before.descriptor["processors"]) == ["preprocessor_config.json"]
    tags[0] = ("model.safetensors", 10, '"bb"')
    assert namespace_of(streamed(tmp_path), settings).name != before.name


def test_where_nobody_knows_the_weights_there_is_no_namespace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(url: str, **_: Any) -> list[tuple[str, int, str]]:
        raise AccessError("403: not for you", code="AccessDenied")

    monkeypatch.setattr("s3ec.store.tags.tags_below", refused)
    settings = settings_of(weights="fingerprint")
    assert "403: not for you" in str(encoder_weights(streamed(tmp_path), settings).problem)
    with pytest.raises(ConfigError, match="403: not for you") as told:
        namespace_of(streamed(tmp_path), settings)
    assert told.value.field == "weights"
    named = namespace_of(streamed(tmp_path), settings_of())
    assert named.descriptor["weights"] == "by name"


def test_an_epoch_starts_over_on_purpose() -> None:
    names = {
        namespace_of(engine(), settings_of(**given)).name
        for given in (
            {},
            {"encoder_epoch": 1},
            {"encoder_epoch": 2},
            {"encoder_epoch": "after-cve"},
        )
    }
    assert len(names) == 4
    one = namespace_of(engine(), settings_of(encoder_epoch="1"))
    assert one == namespace_of(engine(), settings_of(encoder_epoch=1))
    assert one.descriptor["epoch"] == "1"


def test_processors_and_code_are_in_the_descriptor(tmp_path: Path) -> None:
    write_weights(tmp_path, b"old")
    (tmp_path / "preprocessor_config.json").write_text('{"size": 1}')
    (tmp_path / "modeling_eye.py").write_text("SCALE = 1")
    for weights in ("fingerprint", "name"):
        config = engine()
        config.model_config.model = str(tmp_path)
        settings = settings_of(weights=weights)
        assert "code" not in namespace_of(config, settings).descriptor
        config.model_config.trust_remote_code = True
        found = namespace_of(config, settings).descriptor
        assert (list(found["processors"]), list(found["code"])) == (
            ["preprocessor_config.json"],
            ["modeling_eye.py"],
        )


def test_the_audio_tower_of_another_model_counts(tmp_path: Path) -> None:
    config = engine()
    config.model_config.model = str(write_weights(tmp_path / "main", b"projector"))
    config.model_config.hf_config.audio_model_id = str(write_weights(tmp_path / "tower", b"old"))
    settings = settings_of(weights="fingerprint")
    before = namespace_of(config, settings).name
    write_weights(tmp_path / "tower", b"new")
    assert namespace_of(config, settings).name != before


def test_scales_of_fp8_attention_count_by_their_content(tmp_path: Path) -> None:
    names = []
    for file, content in (("a.json", "{}"), ("b.json", "{}"), ("c.json", '{"q": 2}')):
        (tmp_path / file).write_text(content)
        config = engine()
        put(f"{MULTIMODAL}mm_encoder_attn_dtype", "fp8")(config)
        put(f"{MULTIMODAL}mm_encoder_fp8_scale_path", str(tmp_path / file))(config)
        names.append(namespace_of(config, settings_of()).name)
    assert names[0] == names[1] != names[2]
    put(f"{MULTIMODAL}mm_encoder_fp8_scale_path", str(tmp_path / "gone.json"))(config)
    with pytest.raises(ConfigError, match="--mm-encoder-fp8-scale-path cannot be read"):
        namespace_of(config, settings_of())


def test_a_release_that_lacks_settings_counts_as_having_them_unset(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    old = engine()
    envs = SimpleNamespace(VLLM_MM_HASHER_ALGORITHM="blake3")
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(envs=envs))  # type: ignore[arg-type]
    old.model_config.multimodal_config = SimpleNamespace(mm_processor_kwargs=None)
    assert namespace_of(old, settings_of()).name == namespace_of(engine(), settings_of()).name
    envs.VLLM_MM_HASHER_ALGORITHM = "sha512"
    assert namespace_of(old, settings_of()).name != namespace_of(engine(), settings_of()).name


def test_encoders_described_by_a_dictionary_count_too() -> None:
    one = engine()
    as_dict = copy.deepcopy(one)
    as_dict.model_config.hf_config.vision_config = (
        one.model_config.hf_config.vision_config.to_dict()
    )
    weights = Weights("by name")
    same = [namespace_of(each, settings_of(), weights) for each in (one, as_dict)]
    assert same[0] == same[1]


def test_values_that_json_lacks_are_spelt_out() -> None:
    strange = engine()
    put(
        f"{MULTIMODAL}mm_processor_kwargs", {"size": (1, 2), "kind": complex(1, 2), 3: float("inf")}
    )(strange)
    content = json.loads(namespace_of(strange, settings_of()).to_json())
    assert content["mm_processor_kwargs"] == {"size": [1, 2], "kind": "(1+2j)", "3": "inf"}


def test_releases_that_decode_rare_pictures_otherwise_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from s3ec.connector import compat

    names = set()
    for version in ("0.31.0", "0.32.0", "0.33.0", "0.34.0rc1"):
        monkeypatch.setattr(compat, "vllm_version", lambda version=version: version)
        names.add(namespace_of(engine(), settings_of()).name)
    assert len(names) == 1


def test_the_same_configuration_has_the_same_name_in_every_release_of_s3ec() -> None:
    """A change here empties every corpus; say so in the changelog if it must be."""
    plain = engine()
    plain.model_config.hf_config = Config(
        model_type="gemma3",
        mm_tokens_per_image=256,
        vision_config=Config(model_type="siglip", image_size=896, layer_norm_eps=1e-06),
    )
    assert namespace_of(plain, settings_of()).name == "google-gemma-3-27b-it-33b4fd971131a91b"


def test_two_tenants_have_two_namespaces_that_show_the_id_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ONE", "one secret of 16 bytes or more")
    monkeypatch.setenv("TWO", "two secret of 16 bytes or more")
    names = set()
    for reference in (None, "env:ONE", "env:TWO"):
        settings = Settings.model_validate(
            {
                "bucket": "corpus",
                "cache_dir": tmp_path,
                "tenant_key": reference,
                "weights": "name",
            }
        )
        namespace = namespace_of(engine(), settings)
        tenant = Tenant.read(reference)
        assert namespace.descriptor.get("tenant") == (tenant.id if tenant else None)
        assert b"secret of" not in namespace.to_json()
        names.add(namespace.name)
    assert len(names) == 3
