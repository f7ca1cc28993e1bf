# SPDX-License-Identifier: Apache-2.0
"""What the fingerprint of a checkpoint sees, what it leaves out, and where there is none."""

from __future__ import annotations

import json
import random
import struct
import sys
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from s3ec.errors import AccessError
from s3ec.weights import (
    BY_NAME,
    DUMMY,
    Checkpoint,
    Weights,
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
    "moondream3": (
        ["model.vision.blocks.0.attn.qkv.weight", "model.text.wte.weight"],
        ["model.text.blocks.0.attn.qkv.weight"],
    ),
    "qwen-vl": (
        ["transformer.visual.transformer.resblocks.0.mlp.c_fc.weight", "transformer.wte.weight"],
        ["transformer.h.0.attn.c_attn.weight", "transformer.ln_f.weight"],
    ),
    "a family that nobody knows": (
        ["eye.stage.0.weight", "brain.layers.0.weight", "layers.zero.weight"],
        [],
    ),
    "towers that were saved alone": (
        [
            "blocks.0.attn.qkv.weight",
            "layers.0.fc1.weight",
            "norm.weight",
            "h.0.weight",
            "model.blocks.0.attn.qkv.weight",
            "transformer.layers.0.fc1.weight",
            "output.weight",
        ],
        ["model.layers.0.mlp.up_proj.weight"],
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
    file = "consolidated.safetensors" if "consolidated" in family else "model.safetensors"
    base = mark(write(tmp_path / "base" / file, tensors).parent)
    for number, name in enumerate(tensors):
        other = write(tmp_path / str(number) / file, changed(tensors, name))
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
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    assert mark("acme/vision") == wanted
    assert mark("acme/vision", download_dir=str(tmp_path / "hub")) == wanted
    assert mark("acme/vision", revision=commit) == wanted
    monkeypatch.delenv("HF_HUB_CACHE")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert mark("acme/vision") == wanted


def test_however_many_tensors_there_are_each_is_read(tmp_path: Path) -> None:
    """As many as Llama 4 has: a checkpoint that differs in one of them is another one."""
    leaves = ["q_proj", "k_proj", "v_proj", "o_proj", "fc1", "fc2", "ln_1", "ln_2"]
    front = "vision_model.model.layers"
    names = [f"{front}.{layer}.{leaf}.weight" for layer in range(68) for leaf in leaves]
    tensors = tensors_of([*names, "multi_modal_projector.linear_1.weight"])
    base = mark(write(tmp_path / "base" / "model.safetensors", tensors).parent)
    for number, name in enumerate(random.Random(0).sample(list(tensors), 12)):
        other = write(tmp_path / str(number) / "model.safetensors", changed(tensors, name))
        assert mark(other.parent) != base, name


@pytest.mark.parametrize(
    "part",
    [slice(0, 4096), slice(-4096, None), slice(100_000, 300_000), slice(16_384, None)],
    ids=["its begin", "its end", "its middle", "all but its begin"],
)
def test_a_tensor_is_read_in_several_places(part: slice, tmp_path: Path) -> None:
    tensors = tensors_of(["multi_modal_projector.linear_1.weight"], 400_000)
    base = mark(write(tmp_path / "base" / "model.safetensors", tensors).parent)
    content = bytearray(tensors["multi_modal_projector.linear_1.weight"])
    content[part] = bytes(byte ^ 1 for byte in content[part])
    other = {"multi_modal_projector.linear_1.weight": bytes(content)}
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
    content = random.Random(0).randbytes(8_000_000)
    projector = content[:2_500_000] + bytes(2_000_000) + content[4_500_000:]
    fingerprints = set()
    for number, other in enumerate(
        [content, content + b"x", b"x" + content[1:], content[:-1] + b"x", projector, content]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / name).write_bytes(other)
        fingerprints.add(mark(folder))
    assert len(fingerprints) == 5


def test_a_gguf_file_counts_together_with_its_encoder_beside_it(tmp_path: Path) -> None:
    model = tmp_path / "model-Q4.gguf"
    model.write_bytes(b"language" * 10)
    encoder = tmp_path / "mmproj-model.gguf"
    encoder.write_bytes(b"vision" * 10)
    base = mark(model)
    encoder.write_bytes(b"visiom" * 10)
    assert mark(model) != base


def test_an_encoder_from_a_second_model_counts_as_a_whole(tmp_path: Path) -> None:
    """Whatever its tensors are called: there is no language model in it."""
    main = write(tmp_path / "main" / "model.safetensors", tensors_of(["projector.w"])).parent
    names = ["encoder.layers.0.w", "model.layers.0.w", "model.norm.w"]
    tower = tensors_of(names)
    fingerprints = {mark(main)}
    for number, content in enumerate([tower, *(changed(tower, name) for name in names)]):
        other = write(tmp_path / str(number) / "model.safetensors", content).parent
        fingerprints.add(weights_of(Checkpoint(str(main), others=(str(other),))).fingerprint)
    assert len(fingerprints) == 2 + len(names)


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("whisper-large-v3/model.safetensors", "model.encoder.layers.0.w"),  # kimi_audio
        ("audio_tokenizer/pytorch_model.bin", ""),  # mimo_audio
        ("vision_encoder/model.safetensors", "blocks.0.attn.qkv.weight"),  # cosmos3
        ("vision_encoder/model.safetensors", "model.layers.0.w"),
    ],
)
def test_a_tower_in_a_folder_of_its_own_counts(file: str, name: str, tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", tensors_of(["projector.w", "model.layers.0.w"]))
    fingerprints = {mark(tmp_path)}
    for fill in (b"1", b"2"):
        path = tmp_path / file
        if name:
            write(path, {name: fill * 64})
        else:
            torch_zip(path, [fill * 64])
        fingerprints.add(mark(tmp_path))
    assert len(fingerprints) == 3


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
def test_what_cannot_be_read_shares_with_nobody_and_says_why(
    make: Callable[[Path], None], words: str, tmp_path: Path
) -> None:
    make(tmp_path)
    found = weights_of(Checkpoint(str(tmp_path)))
    assert found.fingerprint == ""
    assert words in str(found.problem)
    trusted = weights_of(Checkpoint(str(tmp_path)), fingerprint=False)
    assert (trusted.fingerprint, trusted.problem) == (BY_NAME, None)


@pytest.mark.parametrize(
    ("checkpoint", "words"),
    [
        (Checkpoint("s3://models/vision", load_format="runai_streamer"), "not on this machine"),
        (Checkpoint("gs://models/vision", load_format="runai_streamer"), "not on this machine"),
        (Checkpoint("acme/never-downloaded"), "no snapshot of it is in"),
        (Checkpoint(".", load_format="somebody-s-plugin"), "--load-format somebody-s-plugin"),
        (Checkpoint(".", load_format="ipc_cache"), "--load-format ipc_cache"),
        (Checkpoint(".", load_format="modelexpress"), "--load-format modelexpress"),
        (Checkpoint("s3://models/vision.tensors", load_format="tensorizer"), "tensorizer"),
    ],
)
def test_what_is_elsewhere_shares_with_nobody_and_says_why(
    checkpoint: Checkpoint, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    found = weights_of(checkpoint)
    assert found.fingerprint == ""
    assert words in str(found.problem)
    trusted = weights_of(checkpoint, fingerprint=False)
    assert (trusted.fingerprint, trusted.problem) == (BY_NAME, None)


def test_an_unreadable_file_shares_with_nobody(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "gone")
    found = weights_of(Checkpoint(str(tmp_path)))
    assert (found.fingerprint, found.problem is None) == ("", False)


# -- in a bucket -------------------------------------------------------------------------------

URL = "s3://models/vision"
TAGS = [("model-1.safetensors", 10, '"aa"'), ("model-2.safetensors", 20, '"bb"')]


def streamed(tags: list[tuple[str, int, str]], folder: Path) -> Weights:
    checkpoint = Checkpoint(URL, load_format="runai_streamer", files=str(folder))
    return weights_of(checkpoint, list_bucket={URL: tags}.__getitem__)


def test_weights_in_a_bucket_count_by_the_tags_of_their_objects(tmp_path: Path) -> None:
    base = streamed(TAGS, tmp_path)
    assert base.fingerprint.startswith("sha256:")
    assert base == streamed(TAGS[::-1], tmp_path)
    assert base == streamed([*TAGS, ("README.md", 5, '"cc"')], tmp_path)
    others = {
        streamed(tags, tmp_path).fingerprint
        for tags in (
            [TAGS[0], ("model-2.safetensors", 20, '"dd"')],
            [TAGS[0], ("model-2.safetensors", 21, '"bb"')],
            [TAGS[0], ("model-3.safetensors", 20, '"bb"')],
            TAGS[:1],
        )
    }
    assert len(others | {base.fingerprint}) == 5
    # vLLM has copied the small files into a folder.
    (tmp_path / "preprocessor_config.json").write_text('{"size": 1}')
    assert streamed(TAGS, tmp_path).processors


def test_a_bucket_that_tells_nothing_shares_nothing(tmp_path: Path) -> None:
    assert "no weights of a known kind" in str(streamed([], tmp_path).problem)

    def refused(url: str) -> list[tuple[str, int, str]]:
        raise AccessError("403: not for you", code="AccessDenied")

    checkpoint = Checkpoint(URL, load_format="runai_streamer", files=str(tmp_path))
    found = weights_of(checkpoint, list_bucket=refused)
    assert found.fingerprint == ""
    assert "cannot be listed: 403: not for you" in str(found.problem)


# -- processors and code -----------------------------------------------------------------------


def files_of(folder: Path, **more: Any) -> tuple[dict[str, str], dict[str, str]]:
    found = weights_of(Checkpoint(str(folder), load_format="dummy", **more))
    assert found.problem is None
    return found.processors, found.code


@pytest.mark.parametrize(
    "name",
    ["preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json",
     "tekken.json", "whisper-large-v3/preprocessor_config.json", "audio_tokenizer/config.json"],
)  # fmt: skip
def test_what_processors_are_made_from_counts(name: str, tmp_path: Path) -> None:
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    seen = [files_of(tmp_path)[0]]
    for content in ({"image_mean": [0.5]}, {"image_mean": [0.1]}):
        file.write_text(json.dumps(content))
        seen.append(files_of(tmp_path)[0])
    assert [list(one) for one in seen] == [[], [name], [name]]
    assert seen[1] != seen[2]


def test_what_says_nothing_about_a_processor_does_not_count(tmp_path: Path) -> None:
    file = tmp_path / "processor_config.json"
    file.write_text(json.dumps({"image_processor": {"size": 1}}))
    before = files_of(tmp_path)
    more = {"chat_template": "x", "transformers_version": "5.19", "image_processor": {"size": 1}}
    file.write_text(json.dumps(more, indent=1) + "\n")
    for other in ("tokenizer_config.json", "generation_config.json", "README.md", "config.json"):
        (tmp_path / other).write_text("{}")
    assert files_of(tmp_path) == before
    file.write_text("{")
    found = weights_of(Checkpoint(str(tmp_path), load_format="dummy"))
    assert "processor_config.json is damaged" in str(found.problem)


def test_code_that_the_model_brings_counts_where_it_is_run(tmp_path: Path) -> None:
    assert files_of(tmp_path, runs_code=True) == ({}, {})
    for name in ("modeling_eye.py", "processing_eye.py", "parts/resampler.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        before = files_of(tmp_path, runs_code=True)
        (tmp_path / name).write_text("SCALE = 1")
        added = files_of(tmp_path, runs_code=True)
        (tmp_path / name).write_text("SCALE = 2")
        assert before != added != files_of(tmp_path, runs_code=True)
        assert name in added[1]
    assert files_of(tmp_path) == ({}, {})
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / "left_over.py").write_text("")
    assert len(files_of(tmp_path, runs_code=True)[1]) == 3


def snapshot(cache: Path, name: str, files: Mapping[str, str], commit: str = "a" * 40) -> Path:
    """What the hub's client leaves of a repository."""
    repository = cache / ("models--" + name.replace("/", "--"))
    folder = repository / "snapshots" / commit
    folder.mkdir(parents=True)
    (repository / "refs").mkdir(exist_ok=True)
    (repository / "refs" / "main").write_text(commit)
    for file, content in files.items():
        (folder / file).write_text(content)
    return folder


def test_small_files_come_from_the_hub_s_cache_wherever_the_weights_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's --download-dir is for weights; processors and code come by transformers."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    there = snapshot(tmp_path / "hub", "acme/eye", {"preprocessor_config.json": '{"size": 1}'})
    (there / "processing_eye.py").write_text("SCALE = 1")
    weights = snapshot(tmp_path / "weights", "acme/eye", {})
    write(weights / "model.safetensors", tensors_of(["visual.w"]))
    checkpoint = Checkpoint("acme/eye", download_dir=str(tmp_path / "weights"), runs_code=True)
    before = weights_of(checkpoint)
    assert list(before.processors) == ["preprocessor_config.json"]
    assert list(before.code) == ["processing_eye.py"]
    (there / "preprocessor_config.json").write_text('{"size": 2}')
    after = weights_of(checkpoint)
    assert (after.fingerprint, after.code) == (before.fingerprint, before.code)
    assert after.processors != before.processors


def test_code_of_another_repository_and_of_another_revision_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    model = tmp_path / "model"
    model.mkdir()
    nested = {"vision_config": {"auto_map": {"AutoModel": "nvidia/RADIO--hf_model.RADIOModel"}}}
    (model / "config.json").write_text(json.dumps(nested))
    assert files_of(model, runs_code=True) == ({}, {})
    there = snapshot(tmp_path / "hub", "nvidia/RADIO", {"hf_model.py": "SCALE = 1"})
    before = files_of(model, runs_code=True)
    assert list(before[1]) == ["nvidia/RADIO--hf_model.py"]
    (there / "hf_model.py").write_text("SCALE = 2")
    assert files_of(model, runs_code=True) != before
    snapshot(tmp_path / "hub", "nvidia/RADIO", {"hf_model.py": "SCALE = 1"}, "b" * 40)
    assert files_of(model, runs_code=True, code_revision="b" * 40) == before


def test_a_model_of_modelscope_is_where_that_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never a repository of the same name that the other hub's client has left here."""
    hub = snapshot(tmp_path / "hub", "acme/eye", {})
    write(hub / "model.safetensors", tensors_of(["visual.w"]))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    other = mark("acme/eye")
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "True")
    found = weights_of(Checkpoint("acme/eye"))
    assert "ModelScope has no copy of acme/eye here" in str(found.problem)

    place = tmp_path / "modelscope" / "models" / "acme" / "eye"
    write(place / "model.safetensors", tensors_of(["visual.x"]))
    (place / "preprocessor_config.json").write_text("{}")
    asked = []

    def snapshot_download(**options: Any) -> str:
        asked.append(options)
        return str(place if options["model_id"] == "acme/eye" else place / "gone")

    module = ModuleType("modelscope.hub.snapshot_download")
    module.snapshot_download = snapshot_download  # type: ignore[attr-defined]
    for name in ("modelscope", "modelscope.hub"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert mark("acme/eye") != other
    assert weights_of(Checkpoint("acme/eye")).processors
    assert all(each["local_files_only"] for each in asked)
    assert "ModelScope has no copy" in str(weights_of(Checkpoint("acme/gone")).problem)
