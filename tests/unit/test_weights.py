# SPDX-License-Identifier: Apache-2.0
"""What the fingerprint of a checkpoint sees, what it leaves out, and where there is none."""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
import time
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from s3ec.weights import (
    BY_NAME,
    DUMMY,
    Checkpoint,
    read_adapter,
    weights_of,
)

# Names as they are in the published checkpoints, one layer of each: the encoder's and projector's,
# then the language model's.
FAMILIES: dict[str, tuple[list[str], list[str]]] = {
    "gemma3": (
        [
            "vision_tower.vision_model.encoder.layers.0.self_attn.q_proj.weight",
            "multi_modal_projector.mm_input_projection_weight",
            "language_model.model.embed_tokens.weight",
        ],
        ["language_model.model.layers.0.mlp.up_proj.weight", "language_model.model.norm.weight"],
    ),
    "gemma3 as transformers 5 saves it": (
        ["model.vision_tower.encoder.layers.0.mlp.fc1.weight"],
        ["model.language_model.layers.0.mlp.up_proj.weight", "lm_head.weight"],
    ),
    "qwen2-vl": (
        ["visual.blocks.0.attn.qkv.weight", "visual.merger.mlp.0.weight"],
        ["model.layers.0.self_attn.q_proj.weight", "model.norm.weight", "lm_head.weight"],
    ),
    "qwen3-vl": (
        ["model.visual.deepstack_merger_list.0.norm.weight", "model.visual.blocks.0.norm1.weight"],
        ["model.language_model.layers.0.self_attn.q_norm.weight"],
    ),
    "qwen2.5-omni": (
        ["thinker.visual.blocks.0.attn.q.weight", "thinker.audio_tower.layers.0.fc1.weight"],
        ["thinker.model.layers.0.mlp.up_proj.weight", "thinker.lm_head.weight"],
    ),
    "llava": (
        [
            "vision_tower.vision_model.encoder.layers.0.mlp.fc1.weight",
            "multi_modal_projector.linear_1.weight",
            "image_newline",
        ],
        ["language_model.model.layers.0.mlp.up_proj.weight", "language_model.lm_head.weight"],
    ),
    "internvl": (
        ["vision_model.encoder.layers.0.attn.qkv.weight", "mlp1.1.weight"],
        ["language_model.model.layers.0.attention.wqkv.weight", "language_model.output.weight"],
    ),
    "pixtral, consolidated": (
        [
            "vision_encoder.transformer.layers.0.attention.wq.weight",
            "vision_language_adapter.w_in.weight",
            "patch_merger.merging_layer.weight",
        ],
        ["layers.0.attention.wq.weight", "norm.weight", "output.weight"],
    ),
    "voxtral, consolidated": (
        ["mm_whisper_embeddings.whisper_encoder.transformer.layers.0.attention.wq.weight"],
        ["layers.0.attention.wq.weight"],
    ),
    "phi-3-vision": (
        [
            "model.vision_embed_tokens.img_processor.vision_model.encoder.layers.0.mlp.fc1.weight",
            "model.vision_embed_tokens.img_projection.0.weight",
        ],
        ["model.layers.0.mlp.gate_up_proj.weight"],
    ),
    "phi-4-multimodal": (
        [
            "model.embed_tokens_extend.image_embed.img_processor.encoder.layers.0.mlp.fc1.weight",
            "model.embed_tokens_extend.audio_embed.encoder.encoders.0.feed_forward_in.net.0.weight",
        ],
        ["model.layers.0.self_attn.qkv_proj.lora_A.vision.weight"],
    ),
    "minicpm-v": (
        ["vpm.encoder.layers.0.mlp.fc1.weight", "resampler.kv_proj.weight"],
        ["llm.model.layers.0.mlp.up_proj.weight", "llm.lm_head.weight"],
    ),
    "whisper": (
        ["model.encoder.layers.0.fc1.weight", "model.decoder.layers.0.fc1.weight"],
        [],
    ),
    "molmo": (
        ["model.vision_backbone.image_vit.transformer.resblocks.0.attention.wq.weight"],
        ["model.transformer.blocks.0.att_proj.weight", "model.transformer.ln_f.weight"],
    ),
    "smolvlm": (
        ["model.vision_model.encoder.layers.0.mlp.fc1.weight", "model.connector.proj.weight"],
        ["model.text_model.layers.0.mlp.up_proj.weight"],
    ),
    "deepseek-vl2": (
        ["vision.blocks.0.attn.qkv.weight", "projector.layers.0.weight", "image_newline"],
        ["language.model.layers.0.mlp.up_proj.weight"],
    ),
    "kimi-audio": (
        ["model.vq_adaptor.layers.0.weight", "model.encoder.layers.0.fc1.weight"],
        ["model.layers.0.mlp.up_proj.weight"],
    ),
    "a family that nobody knows": (
        ["eye.stage.0.weight", "brain.layers.0.weight", "layers.zero.weight"],
        [],
    ),
}

Tensors = dict[str, bytes]


def tensors_of(names: list[str], size: int = 64) -> Tensors:
    return {name: random.Random(name).randbytes(size) for name in names}


def write(path: Path, tensors: Mapping[str, bytes]) -> Path:
    header, offset = {}, 0
    for name, content in tensors.items():
        end = offset + len(content)
        header[name] = {"dtype": "U8", "shape": [len(content)], "data_offsets": [offset, end]}
        offset = end
    head = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(struct.pack("<Q", len(head)) + head + b"".join(tensors.values()))
    return path


def mark(folder: Path | str, **more: str) -> str:
    found = weights_of(Checkpoint(str(folder), **more))
    assert found.problem is None, found.problem
    assert found.fingerprint.startswith("sha256:")
    return found.fingerprint


def changed(tensors: Tensors, name: str) -> Tensors:
    return tensors | {name: bytes(byte ^ 1 for byte in tensors[name])}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_of_the_encoder_counts_and_none_of_the_language_model(
    family: str, tmp_path: Path
) -> None:
    encoder, language_model = FAMILIES[family]
    tensors = tensors_of(encoder + language_model)
    base = mark(write(tmp_path / "base" / "model.safetensors", tensors).parent)
    for number, name in enumerate(tensors):
        other = write(tmp_path / str(number) / "model.safetensors", changed(tensors, name))
        assert (mark(other.parent) == base) is (name in language_model), name


def test_a_model_of_nothing_but_language_model_names_counts_as_a_whole(tmp_path: Path) -> None:
    tensors = tensors_of(["model.layers.0.mlp.weight", "lm_head.weight"])
    one = write(tmp_path / "one" / "model.safetensors", tensors)
    other = write(tmp_path / "other" / "model.safetensors", changed(tensors, "lm_head.weight"))
    assert mark(one.parent) != mark(other.parent)


def test_shape_type_and_name_count_where_the_bytes_are_the_same(tmp_path: Path) -> None:
    made = set()
    for number, (name, dtype, shape) in enumerate(
        [("v.w", "U8", [4]), ("v.w", "I8", [4]), ("v.w", "U8", [2, 2]), ("v.x", "U8", [4])]
    ):
        head = json.dumps({name: {"dtype": dtype, "shape": shape, "data_offsets": [0, 4]}}).encode()
        folder = tmp_path / str(number)
        folder.mkdir()
        content = struct.pack("<Q", len(head)) + head + b"abcd"
        (folder / "model.safetensors").write_bytes(content)
        made.add(mark(folder))
    assert len(made) == 4


def test_how_tensors_are_spread_over_files_does_not_count(tmp_path: Path) -> None:
    tensors = tensors_of([name for names in FAMILIES["llava"] for name in names], 10_000)
    one = write(tmp_path / "one" / "model.safetensors", tensors)
    names = list(tensors)
    for number, part in enumerate((names[:2], names[2:])):
        write(
            tmp_path / "two" / f"model-{number}.safetensors",
            {name: tensors[name] for name in reversed(part)},
        )
    assert mark(one.parent) == mark(tmp_path / "two")


def test_what_the_index_does_not_name_does_not_count(tmp_path: Path) -> None:
    tensors = tensors_of(FAMILIES["llava"][0])
    write(tmp_path / "model-00001.safetensors", tensors)
    base = mark(tmp_path)
    weight_map = {"weight_map": dict.fromkeys(tensors, "model-00001.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(weight_map))
    write(tmp_path / "model.fp16.safetensors", tensors_of(["vision.other"]))
    assert mark(tmp_path) == base


def test_mistral_s_own_files_are_taken_where_vllm_takes_them(tmp_path: Path) -> None:
    encoder, language_model = FAMILIES["pixtral, consolidated"]
    tensors = tensors_of(encoder + language_model)
    write(tmp_path / "consolidated.safetensors", tensors)
    base = mark(tmp_path)
    write(tmp_path / "model-00001.safetensors", tensors_of(["vision_tower.w"]))
    assert mark(tmp_path) == mark(tmp_path, load_format="mistral") == base
    assert mark(tmp_path, load_format="hf") != base


def test_a_snapshot_of_the_hub_shares_with_a_plain_copy_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = tensors_of(FAMILIES["gemma3"][0])
    plain = write(tmp_path / "plain" / "model.safetensors", tensors)
    commit = ("0123456789abcdef" * 3)[:40]
    repository = tmp_path / "hub" / "models--acme--vision"
    blob = write(repository / "blobs" / ("e" * 64), tensors)
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").symlink_to(blob)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    wanted = mark(plain.parent)
    assert mark("acme/vision", download_dir=str(tmp_path / "hub")) == wanted
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    assert mark("acme/vision") == wanted
    assert mark("acme/vision", revision=commit) == wanted
    monkeypatch.delenv("HF_HUB_CACHE")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert mark("acme/vision") == wanted


def test_of_many_large_tensors_each_is_sampled(tmp_path: Path) -> None:
    tensors = tensors_of([f"vision.{number}" for number in range(400)], 20_000)
    base = mark(write(tmp_path / "model.safetensors", tensors).parent)
    for name in ("vision.0", "vision.399"):
        other = write(tmp_path / name / "model.safetensors", changed(tensors, name))
        assert mark(other.parent) != base


def test_of_very_many_tensors_another_training_is_seen(tmp_path: Path) -> None:
    tensors = tensors_of([f"vision.{number}" for number in range(2000)], 5_000)
    base = mark(write(tmp_path / "model.safetensors", tensors).parent)
    other = {name: bytes(byte ^ 1 for byte in content) for name, content in tensors.items()}
    assert mark(write(tmp_path / "other" / "model.safetensors", other).parent) != base


def test_files_of_ranks_hold_tensors_of_one_name(tmp_path: Path) -> None:
    ranks = [tensors_of(["visual.w"]), changed(tensors_of(["visual.w"]), "visual.w")]
    for folder, order in (("one", ranks), ("other", ranks[::-1])):
        for rank, tensors in enumerate(order):
            write(tmp_path / folder / f"model-rank-{rank}-part-0.safetensors", tensors)
    one = mark(tmp_path / "one", load_format="sharded_state")
    assert one == mark(tmp_path / "one", load_format="sharded_state")
    assert one != mark(tmp_path / "other", load_format="sharded_state")


def torch_zip(path: Path, contents: list[bytes]) -> Path:
    """As torch.save lays it out: a pickle of names, and one stored entry for each tensor."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr(zipfile.ZipInfo("pytorch_model/data.pkl"), b"names")
        for number, content in enumerate(contents):
            archive.writestr(zipfile.ZipInfo(f"pytorch_model/data/{number}"), content)
    return path


def test_a_pickled_checkpoint_counts_as_a_whole_to_the_last_byte(tmp_path: Path) -> None:
    contents = [random.Random(number).randbytes(4_000_000) for number in range(2)]
    base = mark(torch_zip(tmp_path / "a" / "pytorch_model.bin", contents).parent)
    assert base == mark(torch_zip(tmp_path / "b" / "pytorch_model.bin", contents).parent)
    flipped = [contents[0][:5_000] + b"!" + contents[0][5_001:], contents[1]]
    assert base != mark(torch_zip(tmp_path / "c" / "pytorch_model.bin", flipped).parent)
    (tmp_path / "a" / "training_args.bin").write_bytes(b"no weights")
    assert base == mark(tmp_path / "a")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt"])
def test_other_files_count_as_a_whole_by_size_and_samples(name: str, tmp_path: Path) -> None:
    content = random.Random(0).randbytes(100_000)
    fingerprints = set()
    for number, other in enumerate([content, content + b"x", b"x" + content[1:], content]):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / name).write_bytes(other)
        fingerprints.add(mark(folder))
    assert len(fingerprints) == 3


def test_a_gguf_file_counts_together_with_its_encoder_beside_it(tmp_path: Path) -> None:
    model = tmp_path / "model-Q4.gguf"
    model.write_bytes(b"language" * 10)
    encoder = tmp_path / "mmproj-model.gguf"
    encoder.write_bytes(b"vision" * 10)
    base = mark(model)
    encoder.write_bytes(b"visiom" * 10)
    assert mark(model) != base


def test_an_encoder_from_a_second_model_counts(tmp_path: Path) -> None:
    main = write(tmp_path / "main" / "model.safetensors", tensors_of(["projector.w"])).parent
    tower = tensors_of(["encoder.layers.0.w"])
    fingerprints = set()
    for number, content in enumerate((tower, changed(tower, "encoder.layers.0.w"))):
        other = write(tmp_path / str(number) / "model.safetensors", content).parent
        fingerprints.add(weights_of(Checkpoint(str(main), others=(str(other),))).fingerprint)
    assert len(fingerprints | {mark(main)}) == 3


def test_dummy_weights_are_neither_the_folder_s_nor_the_name_s(tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", tensors_of(FAMILIES["gemma3"][0]))
    dummy = Checkpoint(str(tmp_path), load_format="dummy")
    for fingerprint in (True, False):
        assert weights_of(dummy, fingerprint=fingerprint).fingerprint == DUMMY
    assert weights_of(Checkpoint(str(tmp_path)), fingerprint=False).fingerprint == BY_NAME


def damaged(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\xff" * 100)


def cut(folder: Path) -> None:
    path = write(folder / "model.safetensors", tensors_of(["vision.w"]))
    path.write_bytes(path.read_bytes()[:-10])


def without_a_shard(folder: Path) -> None:
    write(folder / "a.safetensors", tensors_of(["vision.w"]))
    index = {"weight_map": {"vision.w": "a.safetensors", "vision.x": "b.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def odd_index(folder: Path) -> None:
    write(folder / "a.safetensors", tensors_of(["vision.w"]))
    (folder / "model.safetensors.index.json").write_text("[]")


def bad_zip(folder: Path) -> None:
    path = torch_zip(folder / "pytorch_model.bin", [b"abc"])
    content = bytearray(path.read_bytes())
    content[content.rindex(b"PK\x01\x02") : content.rindex(b"PK\x01\x02") + 4] = b"XXXX"
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda folder: None, "no weights of a known kind"),
        (damaged, "is no safetensors file"),
        (cut, "is shorter than its header says"),
        (without_a_shard, "b.safetensors, which is not there"),
        (odd_index, "index.json is damaged"),
        (bad_zip, "is a damaged zip"),
    ],
)
def test_what_cannot_be_read_is_known_by_its_name_and_says_why(
    make: Callable[[Path], None], words: str, tmp_path: Path
) -> None:
    make(tmp_path)
    found = weights_of(Checkpoint(str(tmp_path)))
    assert found.fingerprint == BY_NAME
    assert found.problem is not None
    assert words in found.problem


@pytest.mark.parametrize(
    ("checkpoint", "words"),
    [
        (Checkpoint("s3://models/vision", load_format="runai_streamer"), "not on this machine"),
        (Checkpoint("acme/never-downloaded"), "no snapshot of it is in"),
        (Checkpoint(".", load_format="somebody-s-plugin"), "--load-format somebody-s-plugin"),
        (Checkpoint("s3://models/vision.tensors", load_format="tensorizer"), "tensorizer"),
    ],
)
def test_what_is_elsewhere_is_known_by_its_name_and_says_why(
    checkpoint: Checkpoint, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    found = weights_of(checkpoint)
    assert found.fingerprint == BY_NAME
    assert words in str(found.problem)


def test_an_unreadable_file_is_known_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "gone")
    found = weights_of(Checkpoint(str(tmp_path)))
    assert (found.fingerprint, found.problem is None) == (BY_NAME, False)


# -- adapters ----------------------------------------------------------------------------------


def adapter(folder: Path, tensors: Tensors, rank: int = 8) -> Path:
    write(folder / "adapter_model.safetensors", tensors)
    (folder / "adapter_config.json").write_text(json.dumps({"r": rank}))
    return folder


def digest_of(folder: Path) -> str:
    found = read_adapter(str(folder))
    assert found is not None
    assert len(found.digest) == 16
    return found.digest


def test_an_adapter_is_its_weights_and_its_configuration(tmp_path: Path) -> None:
    tensors = tensors_of(["base_model.model.vision_tower.layers.0.lora_A.weight"], 5_000)
    one = adapter(tmp_path / "one", tensors)
    copy = Path(shutil.copytree(one, tmp_path / "copy"))
    retrained = adapter(tmp_path / "retrained", changed(tensors, next(iter(tensors))))
    scaled = adapter(tmp_path / "scaled", tensors, rank=16)
    base = digest_of(one)
    assert digest_of(copy) == base
    assert len({base, digest_of(retrained), digest_of(scaled)}) == 3


def test_an_adapter_is_read_again_only_where_its_files_were_touched(tmp_path: Path) -> None:
    tensors = tensors_of(["vision_tower.lora_A.weight"])
    folder = adapter(tmp_path, tensors)
    first = read_adapter(str(folder))
    assert first is not None
    assert read_adapter(str(folder), first) is first
    adapter(folder, changed(tensors, "vision_tower.lora_A.weight"))
    later_ns = time.time_ns() + 10**7  # the clock of a file system ticks in up to 10 ms
    os.utime(folder / "adapter_model.safetensors", ns=(later_ns, later_ns))
    again = read_adapter(str(folder), first)
    assert again is not None
    assert again.digest != first.digest


def test_an_adapter_that_is_not_here_is_nothing(tmp_path: Path) -> None:
    assert read_adapter(str(tmp_path / "gone")) is None
    assert read_adapter("acme/never-downloaded") is None
    (tmp_path / "adapter_config.json").write_text("{}")
    assert read_adapter(str(tmp_path)) is None


def test_settings_of_the_video_and_audio_processors_count(tmp_path: Path) -> None:
    """vLLM's configuration shows those of the image processor only."""
    write(tmp_path / "model.safetensors", tensors_of(["visual.w"]))
    (tmp_path / "processor_config.json").write_text('{"image_processor": {"size": 1}}')
    fingerprints = [mark(tmp_path)]
    for name, content in (
        ("video_preprocessor_config.json", {"image_mean": [0.5]}),
        ("video_preprocessor_config.json", {"image_mean": [0.1]}),
        ("processor_config.json", {"feature_extractor": {"hop_length": 160}}),
        ("processor_config.json", {"feature_extractor": {"hop_length": 80}}),
    ):
        (tmp_path / name).write_text(json.dumps(content))
        fingerprints.append(mark(tmp_path))
    assert len(set(fingerprints)) == len(fingerprints)
    # Written anew, with the same content.
    (tmp_path / name).write_text(json.dumps(content, indent=1) + "\n")
    assert mark(tmp_path) == fingerprints[-1]
    (tmp_path / name).write_text("{")
    assert "is damaged" in str(weights_of(Checkpoint(str(tmp_path))).problem)


def test_an_encoder_in_a_folder_of_its_own_counts(tmp_path: Path) -> None:
    """Kimi-Audio's lies beside the files of the rest, which are all that is loaded otherwise."""
    write(tmp_path / "model.safetensors", tensors_of(["model.layers.0.w"]))
    tower = tmp_path / "whisper-large-v3" / "model.safetensors"
    checkpoint = Checkpoint(str(tmp_path), folders=("whisper-large-v3",))
    tensors = tensors_of(["model.encoder.layers.0.w"])
    fingerprints = set()
    for content in (tensors, changed(tensors, "model.encoder.layers.0.w")):
        write(tower, content)
        fingerprints.add(weights_of(checkpoint).fingerprint)
    assert len(fingerprints) == 2
    tower.unlink()
    assert "no weights of a known kind" in str(weights_of(checkpoint).problem)
