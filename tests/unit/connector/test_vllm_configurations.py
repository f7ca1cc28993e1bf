# SPDX-License-Identifier: Apache-2.0
"""vLLM's own configuration: what a fleet shares, and what its processes agree on."""

from __future__ import annotations

import importlib
import json
import logging
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import pytest

from s3ec.connector import forms
from s3ec.connector.messages import StepPlan
from s3ec.connector.vllm_config import checkpoint_of, namespace_of
from s3ec.corpus.encoder import VllmEncoder
from s3ec.corpus.sources import SourceItem
from s3ec.dev.rigs.models import write_gemma3
from s3ec.errors import SourceError
from s3ec.identity import Namespace
from s3ec.settings import Settings
from s3ec.weights import Checkpoint, weights_of
from tests.unit.connector.processes import NOWHERE
from tests.unit.connector.scheduling import feature, request
from tests.unit.test_weights import tensors_of, write

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")
shell = pytest.importorskip("s3ec.connector.connector")
parts = pytest.importorskip("s3ec.connector.parts")

# What vLLM and transformers warn of while they are imported and configured is not ours.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

# Where nothing listens; what is tested here never asks the bucket.
_NOWHERE = "http://127.0.0.1:9"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gemma3(tmp_path_factory.mktemp("models") / "gemma3")


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    return {"bucket": "embeddings", "endpoint_url": _NOWHERE, "cache_dir": str(tmp_path / "tier")}


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def engine_config(model: Path, ec: dict[str, Any] | None, **options: Any) -> Any:
    """What `vllm serve` would make of these options."""
    from vllm.config import ECTransferConfig
    from vllm.engine.arg_utils import EngineArgs

    made = EngineArgs(
        model=str(model),
        max_model_len=2048,
        enforce_eager=True,
        ec_transfer_config=None if ec is None else ECTransferConfig(**ec),
        **options,
    )
    return made.create_engine_config()


def ec(role: str, settings: dict[str, Any]) -> dict[str, Any]:
    return {
        "ec_connector": "S3ECConnector",
        "ec_role": role,
        "ec_connector_extra_config": settings,
    }


# vLLM's examples/disaggregated: what the scripts give their instances, as far as it is not the
# address, the memory or the connector. Each is (role, options).
_ENCODER = {"enable_prefix_caching": False, "max_num_batched_tokens": 114688, "max_num_seqs": 128}
EXAMPLES: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "disaggregated_encoder/disagg_1e1pd_example.sh": [
        ("ec_producer", _ENCODER),
        ("ec_consumer", {"max_num_seqs": 128}),
    ],
    "disaggregated_encoder/disagg_1e1p1d_example.sh": [
        ("ec_producer", _ENCODER),
        ("ec_consumer", {"max_num_seqs": 128, "kv_role": "kv_producer"}),
    ],
    "disaggregated_encoder/cpu_ec_connector_example.sh": [
        ("ec_producer", {**_ENCODER, "mm_encoder_only": True}),
        ("ec_consumer", {"max_num_seqs": 128}),
    ],
    "disaggregated_encoder/mooncake_connector/disagg_1e1p1d_example.sh": [
        ("ec_producer", {**_ENCODER, "mm_encoder_only": True}),
        ("ec_consumer", {"max_num_seqs": 128, "kv_role": "kv_producer"}),
    ],
    "ec_both_encoder/ec_both_encoder.sh": [
        ("ec_both", {}),
        ("ec_producer", _ENCODER),
        ("ec_consumer", {}),
    ],
}


def _no_torchcodec() -> None:
    raise ImportError("torchcodec")


@pytest.fixture(params=["as it is", "CUDA with torchcodec", "CUDA without torchcodec"])
def platform(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Whose accelerator vLLM believes to run on while it settles roles and devices."""
    import vllm.platforms

    if request.param == "as it is":
        yield lambda config: None
        return
    there = request.param == "CUDA with torchcodec"
    check = (lambda: None) if there else _no_torchcodec

    def resolve(config: Any) -> None:
        """Again what vLLM's __post_init__ does, now with CUDA (the build here has none)."""
        with (
            mock.patch.object(type(vllm.platforms.current_platform), "device_type", "cuda"),
            mock.patch("vllm.utils.import_utils.check_torchcodec_available", check),
        ):
            config._resolve_mm_processor_device()
            config._resolve_mm_video_decode_device()

    yield resolve


@pytest.mark.parametrize("tensor_ipc", ["direct_rpc", "torch_shm"])
@pytest.mark.parametrize("example", EXAMPLES)
def test_the_instances_of_vllm_s_examples_share_a_namespace(
    example: str, tensor_ipc: str, model: Path, settings: dict[str, Any], platform: Any
) -> None:
    from vllm.config import KVTransferConfig

    descriptors = []
    for role, given in EXAMPLES[example]:
        options = {"mm_tensor_ipc": tensor_ipc, **given}
        if kv_role := options.pop("kv_role", None):
            options["kv_transfer_config"] = KVTransferConfig(
                kv_connector="NixlConnector", kv_role=kv_role
            )
        config = engine_config(model, ec(role, settings), **options)
        platform(config)
        descriptors.append(namespace_of(config, Settings.model_validate(settings)).descriptor)
    first, *others = descriptors
    assert all(other == first for other in others)
    assert first["weights"].startswith("sha256:")


def test_vllm_s_dummy_weights_are_known_as_such(model: Path, settings: dict[str, Any]) -> None:
    config = engine_config(model, ec("ec_both", settings), load_format="dummy")
    found = namespace_of(config, Settings.model_validate(settings)).descriptor
    assert found["weights"] == "dummy"


def test_where_vllm_takes_the_weights_from_is_read_off_its_configuration(
    model: Path, tmp_path: Path
) -> None:
    config = engine_config(model, None, download_dir=str(tmp_path), load_format="safetensors")
    assert checkpoint_of(config) == Checkpoint(
        str(model), load_format="safetensors", download_dir=str(tmp_path), files=str(model)
    )
    config = engine_config(model, None, trust_remote_code=True, code_revision="abc")
    assert checkpoint_of(config) == Checkpoint(
        str(model), files=str(model), runs_code=True, code_revision="abc"
    )


def test_layers_that_are_quantised_while_they_are_loaded_count(
    model: Path, settings: dict[str, Any]
) -> None:
    every, language_model = "re:.*", "re:language_model.*"
    cases: list[dict[str, Any]] = [
        {},
        {"quantization": "fp8_per_tensor"},
        {"quantization": "fp8_per_tensor", "quantization_config": {"ignore": ["vision_tower.*"]}},
        {"quantization": "online", "quantization_config": {"linear": "fp8_per_channel"}},
        {"quantization": "online", "quantization_config": {"targets": {every: "fp8_per_channel"}}},
        {
            "quantization": "online",
            "quantization_config": {"targets": {language_model: "fp8_per_channel"}},
        },
    ]
    named = []
    for options in cases:
        configs = [engine_config(model, None, **options) for _ in "12"]
        made = [namespace_of(each, Settings(**settings)).descriptor for each in configs]
        assert made[0] == made[1]
        named.append(Namespace.from_descriptor(made[0]).name)
    assert len(set(named)) == len(cases)


# -- what scheduler and workers agree on -------------------------------------------------------


@pytest.fixture
def connectors(model: Path, settings: dict[str, Any]) -> Iterator[Any]:
    """Makes halves of one engine; ends them."""
    config = engine_config(model, ec("ec_both", settings))
    made: list[Any] = []

    def make(role: str, place: Path = model) -> Any:
        config.model_config.model = str(place)
        config.ec_transfer_config.ec_connector_extra_config["model_identity"] = "gemma"
        made.append(shell.S3ECConnector(config, getattr(shell.ECConnectorRole, role)))
        return made[-1]

    yield make
    for each in made:
        each.shutdown()


def namespace(connector: Any) -> Namespace | None:
    return None if connector.parts.node is None else connector.parts.node.namespace


class Step:
    free_encoder_mm_hashes = ()
    total_num_scheduled_tokens = 0
    num_scheduled_tokens: ClassVar[dict[str, int]] = {}
    scheduled_spec_decode_tokens: ClassVar[dict[str, list[int]]] = {}


def test_a_worker_that_starts_before_the_download_waits_for_the_scheduler_s_word(
    connectors: Any, tmp_path: Path
) -> None:
    worker = connectors("WORKER", tmp_path / "not-yet")
    assert namespace(worker) is None
    cache: dict[str, Any] = {}
    worker.save_caches(cache, "nothing to save")  # as vLLM's profiling does
    scheduler = connectors("SCHEDULER")
    orders = scheduler.build_connector_meta(Step())
    worker.bind_connector_metadata(orders)
    assert namespace(worker) == namespace(scheduler)
    assert namespace(worker).descriptor["weights"].startswith("sha256:")
    worker.start_load_caches(cache)
    worker.clear_connector_metadata()


def test_what_a_models_constructor_writes_into_the_configuration_does_not_part_the_halves(
    model: Path, settings: dict[str, Any]
) -> None:
    config = engine_config(model, ec("ec_both", settings))
    worker = shell.S3ECConnector(config, shell.ECConnectorRole.WORKER)
    # As Isaac's does. The model is made after the worker half and before the scheduler half.
    config.model_config.hf_config.image_token_id = 151655
    scheduler = shell.S3ECConnector(config, shell.ECConnectorRole.SCHEDULER)
    try:
        worker.bind_connector_metadata(scheduler.build_connector_meta(Step()))
        assert namespace(worker) == namespace(scheduler)
        beside = engine_config(model, ec("ec_both", settings))  # a process that makes no model
        assert namespace(worker) == namespace_of(beside, Settings(**settings))
    finally:
        worker.shutdown()
        scheduler.shutdown()


def started(worker: Any) -> Any:
    """A worker connector whose half was made beside the start of the engine."""
    for thread in threading.enumerate():
        if thread.name == "s3ec-start":
            thread.join()
    return worker


def test_a_worker_s_half_is_made_beside_the_start_and_used_with_the_first_plan(
    connectors: Any,
) -> None:
    worker = started(connectors("WORKER"))
    assert worker.parts.worker is None
    scheduler = connectors("SCHEDULER")
    node = scheduler.parts.node
    assert node.users == 2
    worker.bind_connector_metadata(scheduler.build_connector_meta(Step()))
    assert (worker.parts.node, node.users) == (node, 2)
    half = worker.parts.worker
    worker.bind_connector_metadata(scheduler.build_connector_meta(Step()))
    assert worker.parts.worker is half
    worker.shutdown()
    assert node.users == 1


def test_weights_that_were_replaced_while_the_engine_started_stop_it(
    connectors: Any, model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The worker may have loaded the old ones, or some of both."""
    place = Path(shutil.copytree(model, tmp_path / "model"))
    worker = started(connectors("WORKER", place))
    write(place / "model.safetensors", tensors_of(["vision.w"]))
    scheduler = connectors("SCHEDULER", place)
    with caplog.at_level(logging.ERROR, logger="s3ec"):
        for _ in range(2):
            worker.bind_connector_metadata(scheduler.build_connector_meta(Step()))
            report = worker.build_connector_worker_meta()
            scheduler.update_connector_output(SimpleNamespace(ec_connector_worker_meta=report))
    assert worker.parts.worker is None
    assert scheduler.parts.scheduler.stop() is False  # it has stopped
    assert caplog.text.count("it saves nothing") == 1
    assert caplog.text.count("were replaced while this engine started") == 1


def test_processors_that_came_after_the_worker_s_look_stop_nothing(
    connectors: Any, model: Path, tmp_path: Path
) -> None:
    """As where the hub's client fetches them file by file."""
    place = Path(shutil.copytree(model, tmp_path / "model"))
    worker = started(connectors("WORKER", place))
    (place / "video_preprocessor_config.json").write_text('{"size": 1}')
    scheduler = connectors("SCHEDULER", place)
    worker.bind_connector_metadata(scheduler.build_connector_meta(Step()))
    assert namespace(worker) == namespace(scheduler)
    assert "video_preprocessor_config.json" in namespace(worker).descriptor["processors"]
    assert worker.parts.worker is not None


def test_without_the_files_nothing_is_loaded_or_saved_and_that_is_said_once(
    connectors: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    with caplog.at_level(logging.WARNING, logger="s3ec"):
        worker, scheduler = started(connectors("WORKER", empty)), connectors("SCHEDULER", empty)
        for _ in range(2):
            worker.bind_connector_metadata(scheduler.build_connector_meta(Step()))
            worker.save_caches({"a": torch.zeros(1, 1)}, "a")
    told = "nobody knows which weights these are: there are no weights of a known kind"
    assert caplog.text.count(told) == 1
    assert caplog.text.count("set `weights` = name") == 1
    assert scheduler.parts.scheduler is worker.parts.worker is None
    pixels = {"pixel_values": SimpleNamespace(field=SimpleNamespace(keep_on_cpu=False))}
    feature = SimpleNamespace(identifier="a", modality="image", data=pixels)
    asked = SimpleNamespace(request_id="r", mm_features=[feature], num_prompt_tokens=9)
    assert scheduler.ensure_cache_available(asked, 0)
    assert not scheduler.has_cache_item("a")


def test_where_ranks_may_not_see_this_nodes_tier_nobody_waits_for_an_embedding(
    connectors: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(parts, "ranks_problem", lambda _: "they are elsewhere")
    with caplog.at_level(logging.WARNING, logger="s3ec"):
        scheduler = connectors("SCHEDULER")
    assert "nothing will be loaded" in caplog.text
    asked = request("r", feature("a"))
    asked.mm_features[0].data = None  # no pixels: whoever may load would wait for it
    assert not scheduler.ensure_cache_available(asked, 0)
    assert scheduler.take_unavailable_requests() == {"r"}


def test_a_worker_whose_half_did_not_start_says_so_instead_of_loading_nothing(
    connectors: Any, tmp_path: Path
) -> None:
    worker = connectors("WORKER", tmp_path / "not-yet")
    worker.bind_connector_metadata(shell.S3ECMetadata(StepPlan(loads=[NOWHERE])))
    with pytest.raises(RuntimeError, match="did not start"):
        worker.start_load_caches({})


# -- vLLM's names for the parts of a model -----------------------------------------------------

# Module and class of vLLM 0.32, and names in the checkpoint: encoder and projector, language model.
CLASSES: dict[tuple[str, str], tuple[list[str], list[str]]] = {
    ("gemma3_mm", "Gemma3ForConditionalGeneration"): (
        ["model.vision_tower.encoder.layers.0.w", "model.multi_modal_projector.w"],
        ["model.language_model.layers.0.w", "model.language_model.norm.weight", "lm_head.weight"],
    ),
    ("qwen2_vl", "Qwen2VLForConditionalGeneration"): (
        ["visual.blocks.0.w", "visual.merger.w"],
        ["model.layers.0.w", "model.norm.weight", "lm_head.weight"],
    ),
    ("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration"): (
        ["visual.blocks.0.w", "visual.merger.w"],
        ["model.layers.0.w", "model.norm.weight", "lm_head.weight"],
    ),
    ("qwen3_vl", "Qwen3VLForConditionalGeneration"): (
        ["model.visual.blocks.0.w", "model.visual.merger.w"],
        ["model.language_model.layers.0.w", "lm_head.weight"],
    ),
    ("llava", "LlavaForConditionalGeneration"): (
        ["model.vision_tower.encoder.layers.0.w", "model.multi_modal_projector.w"],
        ["model.language_model.layers.0.w", "lm_head.weight"],
    ),
    ("internvl", "InternVLChatModel"): (
        ["vision_model.encoder.layers.0.w", "mlp1.0.weight"],
        ["language_model.model.layers.0.w", "language_model.lm_head.weight"],
    ),
    ("glm4_1v", "Glm4vForConditionalGeneration"): (
        ["model.visual.blocks.0.w", "model.visual.merger.w"],
        ["model.language_model.layers.0.w", "lm_head.weight"],
    ),
}


@pytest.mark.parametrize("family", CLASSES, ids=lambda family: family[1])
def test_what_the_fingerprint_leaves_out_vllm_calls_the_language_model(
    family: tuple[str, str], tmp_path: Path
) -> None:
    module = importlib.import_module(f"vllm.model_executor.models.{family[0]}")
    kind = getattr(module, family[1])
    mapper = getattr(kind, "hf_to_vllm_mapper", None)
    parts = kind.get_mm_mapping(kind)
    encoder, language_model = CLASSES[family]

    def part(name: str) -> str:
        return (str(mapper.map_name(name)) if mapper is not None else name).split(".")[0]

    for names, called in (
        (encoder, [*parts.tower_model, *parts.connector]),
        (language_model, parts.language_model),
    ):
        assert {part(name) for name in names} <= {each.split(".")[0] for each in called}
    tensors = tensors_of(encoder + language_model)
    marks = {
        name: weights_of(
            Checkpoint(
                str(
                    write(
                        tmp_path / str(number) / "model.safetensors", tensors | {name: b"\0" * 64}
                    ).parent
                )
            )
        ).fingerprint
        for number, name in enumerate(tensors)
    }
    base = weights_of(
        Checkpoint(str(write(tmp_path / "base" / "model.safetensors", tensors).parent))
    ).fingerprint
    assert {name for name, mark in marks.items() if mark == base} == set(language_model)


_WRAPPERS = ("model", "vlm", "thinker", "base_model", "language_model", "text_model", "llm",
             "language", "text")  # fmt: skip
_ENDS = ("layers.0.w", "norm.weight", "final_norm.weight", "final_layernorm.weight", "ln_f.weight",
         "lm_head.weight", "output.weight", "h.0.w", "blocks.0.w", "transformer.h.0.w",
         "transformer.blocks.0.w", "transformer.ln_f.weight")  # fmt: skip
# In a process of its own: it imports all models of vLLM.
_LOOK_AT_ALL_MODELS = """
import importlib, json, sys
from vllm.model_executor.models import registry

names, seen = json.load(sys.stdin), 0
for arch, (module, kind) in registry._MULTIMODAL_MODELS.items():
    try:
        kind = getattr(importlib.import_module(f"vllm.model_executor.models.{module}"), kind)
        parts = kind.get_mm_mapping(kind)
    except (AttributeError, ImportError):  # not of this platform, or known to an instance only
        continue
    seen += 1
    mapper = getattr(kind, "hf_to_vllm_mapper", None)
    encoder = tuple(f"{one.rstrip('.')}." for one in [*parts.tower_model, *parts.connector])
    for name in names:
        mapped = mapper.map_name(name) if mapper is not None else name
        if mapped is not None and mapped.startswith(encoder):
            print(arch, name, mapped)
print(seen)
"""


def _is_left_out(name: str, folder: Path) -> bool:
    marks = set()
    for number, content in enumerate((b"a", b"b")):
        file = folder / str(number) / "model.safetensors"
        place = write(file, {"vision.w": b"v", name: content}).parent
        marks.add(weights_of(Checkpoint(str(place))).fingerprint)
    return len(marks) == 1


def test_what_the_fingerprint_leaves_out_is_no_encoder_s_in_any_model_of_vllm(
    tmp_path: Path,
) -> None:
    fronts = ["", *(f"{one}." for one in _WRAPPERS)]
    fronts += [f"{one}.{other}." for one in _WRAPPERS for other in _WRAPPERS]
    names = [f"{front}{end}" for front in fronts for end in _ENDS]
    left_out = [name for name in names if _is_left_out(name, tmp_path)]
    assert len(left_out) > 500
    done = subprocess.run(
        [sys.executable, "-c", _LOOK_AT_ALL_MODELS],
        input=json.dumps(left_out),
        capture_output=True,
        text=True,
        check=True,
    )
    *wrong, seen = done.stdout.splitlines()
    assert [line for line in wrong if "INFO" not in line and "WARNING" not in line] == []
    assert int(seen) > 50


# -- what is saved -----------------------------------------------------------------------------


def one_picture(identifier: str = "ab" * 32, **more: Any) -> Any:
    """A request for it, as vLLM's scheduler has it."""
    pixels = {"pixel_values": SimpleNamespace(field=SimpleNamespace(keep_on_cpu=False))}
    position = SimpleNamespace(offset=0, length=4, get_num_embeds=lambda: 4)
    feature = SimpleNamespace(
        identifier=identifier, modality="image", data=pixels, mm_position=position
    )
    return SimpleNamespace(request_id="r", num_prompt_tokens=5, mm_features=[feature], **more)


def saves_of(scheduler: Any, asker: Any) -> set[str]:
    """What is saved of a request that is scheduled, and encoded."""
    step = Step()
    step.total_num_scheduled_tokens = 5
    assert scheduler.ensure_cache_available(asker, 0)
    assert not scheduler.has_cache_item(asker.mm_features[0].identifier)
    scheduler.update_state_after_alloc(asker, 0)
    return set(scheduler.build_connector_meta(step).plan.saves)


@pytest.mark.parametrize(("role", "saved"), [("ec_both", False), ("ec_producer", True)])
def test_save_worth_stores_no_first_encode_but_that_of_a_pure_producer(
    model: Path, settings: dict[str, Any], role: str, saved: bool
) -> None:
    config = engine_config(model, ec(role, {**settings, "save": "worth"}))
    scheduler = shell.S3ECConnector(config, shell.ECConnectorRole.SCHEDULER)
    asker = one_picture()
    assert bool(saves_of(scheduler, asker)) is saved
    # What the device holds, and nobody encodes again, is not stored either.
    step = Step()
    step.total_num_scheduled_tokens = 5
    assert scheduler.ensure_cache_available(asker, 0)
    assert not scheduler.build_connector_meta(step).plan.saves
    scheduler.shutdown()


def test_what_an_adapter_has_its_part_in_is_not_saved(
    model: Path, settings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    lora = {"enable_lora": True, "max_lora_rank": 8, "enable_tower_connector_lora": True}
    config = engine_config(model, ec("ec_both", settings), **lora)
    scheduler = shell.S3ECConnector(config, shell.ECConnectorRole.SCHEDULER)
    adapted = f"my-lora:{'ab' * 32}"
    asker = one_picture(adapted, lora_request=SimpleNamespace(lora_name="my-lora"))
    assert saves_of(scheduler, asker) == set()
    assert saves_of(scheduler, one_picture(lora_request=None)) == {"ab" * 32}
    assert "--enable-tower-connector-lora" in caplog.text
    scheduler.shutdown()


def test_a_picture_that_may_have_several_forms_is_not_saved(
    model: Path, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forms, "form_of_model", lambda _: ("Processor", forms.Form("cuts them")))
    config = engine_config(model, ec("ec_both", settings))
    scheduler = shell.S3ECConnector(config, shell.ECConnectorRole.SCHEDULER)
    assert saves_of(scheduler, one_picture()) == set()
    scheduler.shutdown()


def test_all_is_shared_of_a_model_with_one_form_of_a_picture(
    model: Path, settings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    config = engine_config(model, ec("ec_both", settings))
    caplog.clear()
    assert forms.unshared_modalities(config.model_config) == ()
    assert not [record for record in caplog.records if record.name.startswith("s3ec")]


def test_a_job_leaves_out_pictures_whose_form_is_never_known(
    model: Path, settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = VllmEncoder(str(model), Settings(**settings))
    never = ("Processor", forms.Form("shrinks them"))
    monkeypatch.setattr(forms, "form_of_model", lambda _: never)
    encoder.namespace()
    path = tmp_path / "page.png"
    path.write_bytes(b"page")
    item = SourceItem("page", None, path.as_uri())
    with pytest.raises(SourceError, match="other pixels of an image"):
        encoder.read(0, item)
    assert encoder.read(1, replace(item, modality="audio")).data == b"page"
    encoder.close()


def test_a_job_notices_that_a_server_would_call_pictures_otherwise(
    model: Path, settings: dict[str, Any], tmp_path: Path
) -> None:
    """vLLM's hash of a picture covers the path of the model."""
    copy = tmp_path / "copy"
    copy.symlink_to(model)
    namings = []
    for path in (model, model, copy):
        encoder = VllmEncoder(str(path), Settings(**settings))
        namings.append(encoder.naming)
        encoder.close()
    assert namings[0] == namings[1] != namings[2]
    assert not any(" " in naming or naming.endswith(":-") for naming in namings)
