# SPDX-License-Identifier: Apache-2.0
"""Reads vLLM's configuration for s3ec: namespace, topology, role, features, checks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from s3ec.errors import ConfigError
from s3ec.identity import ModalityScopes, Namespace, canonical_json
from s3ec.settings import Settings
from s3ec.tenant import Tenant
from s3ec.weights import Checkpoint, Weights, content_digest, weights_of

# Modalities for which a model of vLLM declares placeholder metadata.
MODALITIES = ("image", "video", "audio")
# vLLM passes a request's own embeddings on as a modality of this name; nothing to cache.
PASSED_THROUGH = "prompt_embeds"
# With `--mm-processor-cache-type shm` an item holds three numbers, the address at which the worker
# finds its fields (vLLM 0.32, multimodal/cache/shm.py, `address_as_item`).
_SHM_ADDRESS = "address"
# Models for which a video's grid alone gives its frames' times. Qwen2.5-VL and its successors place
# frames by seconds, which such a request cannot carry (vLLM 0.30 to 0.32, qwen2_5_vl.py,
# `second_per_grid_ts`). vLLM then assumes one second, and the outputs differ.
_TIMED_BY_GRID = ("qwen2_vl",)
_TIMES = "timestamps"
_ROUNDED = 0.01  # tolerance for seconds in a size; all other values of a size are whole numbers
# Settings of the multimodal configuration that change an encoder's output but not vLLM's hash
# of the image. A setting that a release does not have counts as unset.
_MULTIMODAL_SETTINGS = ("video_pruning_rate", "video_pruning_method", "mm_encoder_attn_dtype")
# The `mm_processor_kwargs` of one modality only. Those of images are in the namespace.
_OWN_PROCESSOR_KWARGS = {"video": "videos_kwargs", "audio": "audio_kwargs"}
_ENCODER_CONFIGS = ("vision_config", "audio_config", "speech_config", "encoder_config")
# Attribute of a model's configuration: the settings and the descriptor first made from it.
_DESCRIBED = "_s3ec_described"
# Parts of a Hugging Face configuration that say nothing about an encoder. A quantised checkpoint
# shows in its tensors.
_NO_ENCODER_CONFIGS = frozenset(
    ("text_config", "llm_config", "language_config", "talker_config", "token2wav_config",
     "code2wav_config", "generation_config", "quantization_config", "compression_config",
     "rope_scaling", "rope_parameters", "auto_map")
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Role:
    """The role of this vLLM instance.

    Attributes:
        producer: It may store embeddings.
        consumer: It may load them. A producer that is no consumer runs no language model.
        window_tokens: Most tokens that one step can schedule for a request.
        ranks: Workers that load every granted item (tensor parallel size).
        steps_in_flight: Steps that can be scheduled before the first of them has ended.
        defer_timeout_s: Longest deferral of a request in total.
        asked_every_pass: True if vLLM calls ensure_cache_available for a request in every
            pass that schedules it (0.30 and newer), False if only before its first one.
        can_load: True if all workers that load see this node's tier. Else nothing is granted.
        stores_again: True if workers can store embeddings that are on the device already (vLLM's
            hook ``start_save_caches``, 0.30 and newer).
        unshared: Modalities of which nothing is loaded or saved, see ``forms.py``.
        tower_adapters: True if LoRA adapters may change the encoder. Embeddings of requests with
            an adapter are neither loaded nor saved.
    """

    producer: bool
    consumer: bool
    window_tokens: int
    ranks: int
    steps_in_flight: int
    defer_timeout_s: float
    asked_every_pass: bool = True
    can_load: bool = True
    stores_again: bool = True
    unshared: Collection[str] = ()
    tower_adapters: bool = False


def loading_ranks(vllm_config: Any) -> int:
    """Return how many workers load every granted embedding: those of the first pipeline stage."""
    parallel = vllm_config.parallel_config
    ranks: int = parallel.tensor_parallel_size
    return ranks * getattr(parallel, "prefill_context_parallel_size", 1)


def ranks_problem(vllm_config: Any) -> str | None:
    """Return why ranks that load may not see the scheduler's tier; None if all certainly do."""
    parallel = vllm_config.parallel_config
    ranks = loading_ranks(vllm_config)
    workers = ranks * getattr(parallel, "pipeline_parallel_size", 1)
    backend = getattr(parallel, "distributed_executor_backend", None)
    if backend == "external_launcher" and workers > 1:
        return "external_launcher runs a scheduler for each rank, and all must decide the same"
    if backend not in (None, "uni", "mp", "external_launcher"):
        return "only vLLM's own executors (uni, mp) say on which node a rank runs"
    if ranks > workers // getattr(parallel, "nnodes_within_dp", 1):
        return "the ranks that load run on several nodes"
    return None


class FeatureReader:
    """Finds features without pixels and their metadata, without imports or I/O at call time.

    The fields that a model declares for a request without pixels are read once, at start-up: vLLM
    builds a processor to return them, which takes far too long for a scheduling pass.
    """

    def __init__(self, model_config: Any) -> None:
        self._fields: dict[str, frozenset[str]] = {}
        self._collect: Callable[[Any, Any], dict[str, dict[str, Any]]] | None = None
        try:
            from vllm.distributed.ec_transfer.ec_connector.utils import PlaceholderMetadataResolver
        except ImportError:  # older than the feature: every request brings its pixels
            return
        resolver = PlaceholderMetadataResolver(model_config)
        for modality in MODALITIES:
            self._fields[modality] = frozenset(resolver.fields_for(modality))
        try:
            from vllm.distributed.ec_transfer.ec_connector.utils import collect_ec_item_metadata
        except ImportError:  # no connector of this release returns them
            return
        self._collect = collect_ec_item_metadata

    def fields_for(self, modality: str) -> Collection[str]:
        """Return the fields that the model declares, from memory."""
        return self._fields.get(modality, ())

    @property
    def modalities(self) -> tuple[str, ...]:
        """Modalities that a request may name without pixels, as far as the model allows."""
        return tuple(modality for modality in MODALITIES if self._fields.get(modality))

    def items_of(self, features: Sequence[Any], unstored: Collection[int]) -> dict[str, Any]:
        """Return the items of an encoder's request, by identifier, as vLLM's own connectors do.

        A language instance needs no pixels of an item that has metadata.

        Args:
            features: Features of a request that has ended.
            unstored: Positions of those whose embedding is not stored. They get no metadata.
        """
        if self._collect is None:
            return {}
        items = self._collect(features, self)
        for place in unstored:
            items[features[place].identifier]["metadata"] = {}
        return items

    def needs_embedding(self, feature: Any) -> bool:
        """Return True if this feature came without pixels: only a stored embedding can serve it.

        vLLM sends three kinds of them: declared metadata fields, those together with all fields
        that stay on the CPU (the render endpoint), and no data at all (a bare hash). A field that
        is neither declared nor kept on the CPU is input of the encoder; so is an address in
        shared memory, which vLLM gives to every item that has its data there.
        """
        data = feature.data
        if data is not None:
            fields = self._fields.get(feature.modality, ())
            # Pixels show at the first name in most models. Not items(): it takes a microsecond.
            for key in data:
                if key not in fields and not data[key].field.keep_on_cpu:
                    return False
        return bool(feature.modality != PASSED_THROUGH)

    def placeholder(self, feature: Any) -> dict[str, Any] | None:
        """Return the placeholder metadata (grid, timestamps) of a feature as plain JSON.

        Returns:
            The metadata; empty if the model needs none. None if this process cannot see it: the
            fields are in shared memory, which only workers read.
        """
        fields = self._fields.get(feature.modality)
        if not fields or feature.data is None:
            return {}
        if _SHM_ADDRESS in feature.data:
            return None
        found: dict[str, Any] = {}
        for key, value in feature.data.get_data().items():
            if key in fields:
                tolist = getattr(value, "tolist", None)
                found[key] = value if tolist is None else tolist()
        return found


def contradicts(stored: Mapping[str, Any], claimed: Mapping[str, Any]) -> bool:
    """Return True if a request without pixels claims another size than the stored one.

    Fields that only one side has are not compared, nor is the nesting of numbers. Times may have
    been rounded in transfer.
    """
    for name in stored.keys() & claimed.keys():
        ours, theirs = list(_flat(stored[name])), list(_flat(claimed[name]))
        if len(ours) != len(theirs) or not all(map(_are_alike, ours, theirs)):
            return True
    return False


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        for each in value:
            yield from _flat(each)
    else:
        yield value


def _are_alike(one: Any, other: Any) -> bool:
    if isinstance(one, int | float) and isinstance(other, int | float):
        return abs(one - other) <= _ROUNDED
    return bool(one == other)


@dataclass(frozen=True, slots=True)
class WithoutPixels:
    """Whether an engine accepts requests that name an image and do not bring it.

    Attributes:
        modalities: Modalities for which such a request carries all metadata that vLLM needs.
        problem: What is missing; empty if it accepts them.
        mend: The fix; empty if there is none.
    """

    modalities: tuple[str, ...]
    problem: str = ""
    mend: str = ""

    def __str__(self) -> str:
        if self.problem:
            return "; ".join(filter(None, [f"no, since {self.problem}", self.mend]))
        return f"yes, for {' and '.join(self.modalities)}"


def without_pixels(vllm_config: Any, features: FeatureReader, role: str) -> WithoutPixels:
    """Derive it from model, release and role.

    Args:
        features: Reads the fields that the model declares.
        role: vLLM's ``ec_role``. A consumer accepts them by itself (0.30 and newer).
    """
    multimodal = vllm_config.model_config.multimodal_config
    config = getattr(vllm_config.model_config, "hf_config", None)
    kind = str(getattr(config, "model_type", ""))
    is_timed = kind in _TIMED_BY_GRID or _TIMES in features.fields_for("video")
    modalities = tuple(one for one in features.modalities if one != "video" or is_timed)
    if not hasattr(multimodal, "allow_missing_mm_embeddings"):
        return WithoutPixels((), "this vLLM is older than them", "use vLLM 0.30 or newer")
    if not modalities:
        return WithoutPixels((), f"vLLM declares no sizes for models of type `{kind}`")
    if role not in ("ec_consumer", "ec_both"):
        return WithoutPixels((), f"`ec_role` is {role}", "set it to ec_consumer or ec_both")
    taken = multimodal.allow_missing_mm_embeddings and multimodal.enable_mm_embeds
    if vllm_config.ec_transfer_config is not None and not taken:
        return WithoutPixels((), "vLLM does not take embeddings", "add --enable-mm-embeds")
    return WithoutPixels(modalities)


def namespace_of(vllm_config: Any, settings: Settings, weights: Weights | None = None) -> Namespace:
    """Return the namespace that this engine reads and writes.

    Args:
        vllm_config: vLLM's VllmConfig.
        settings: For ``model_identity``, which replaces the ``--model`` string, ``weights``,
            ``encoder_epoch`` and ``tenant_key``.
        weights: The descriptor's part about the model's files; None reads the files.

    Raises:
        ConfigError: The configuration cannot be described as JSON; the tenant's secret or a file
            that belongs to the description cannot be read; or the weights are unknown.
    """
    weights = weights or encoder_weights(vllm_config, settings)
    if weights.problem is not None:
        raise ConfigError(f"nothing can be shared: {weights.problem}", field="weights")
    described = _describe_but_files(vllm_config, settings)
    return Namespace.from_descriptor({**described, **weights.descriptor})


def encoder_weights(vllm_config: Any, settings: Settings) -> Weights:
    """Describe the files of this engine's model; takes some 100 ms, and the network for S3."""
    return weights_at(checkpoint_of(vllm_config), settings)


def weights_at(checkpoint: Checkpoint, settings: Settings) -> Weights:
    """As encoder_weights, for a checkpoint."""

    def tags_below(url: str) -> list[tuple[str, int, str]]:
        from s3ec.store import tags  # the SDK takes 0.3 s

        return tags.tags_below(url, allow_http=settings.allow_http)

    return weights_of(
        checkpoint, fingerprint=settings.weights == "fingerprint", list_bucket=tags_below
    )


def checkpoint_of(vllm_config: Any) -> Checkpoint:
    """Return where vLLM reads the model's files from."""
    model = vllm_config.model_config
    load = vllm_config.load_config
    # Ultravox: the audio tower comes from a separate model.
    others = getattr(model.hf_config, "audio_model_id", None)
    return Checkpoint(
        # vLLM mirrors the small files of an object store's model into a folder and runs on that.
        model=getattr(model, "model_weights", "") or model.model,
        revision=model.revision,
        load_format=str(load.load_format),
        download_dir=load.download_dir,
        others=(others,) if isinstance(others, str) else (),
        files=model.model,
        runs_code=bool(getattr(model, "trust_remote_code", False)),
        code_revision=getattr(model, "code_revision", None),
    )


def describe_once(vllm_config: Any, settings: Settings) -> dict[str, Any]:
    """Return the descriptor without the files' part, as of this process's first call.

    Constructors of some models write into the described configuration (0.32, isaac.py,
    eagle2_5_vl.py). With one device both halves have the same configuration, and the model is made
    after the worker half and before the scheduler half.
    """
    model = vllm_config.model_config
    known: tuple[Settings, dict[str, Any]] | None = getattr(model, _DESCRIBED, None)
    if known is None or known[0] != settings:
        known = settings, _describe_but_files(vllm_config, settings)
        object.__setattr__(model, _DESCRIBED, known)
    return known[1]


def _describe_but_files(vllm_config: Any, settings: Settings) -> dict[str, Any]:
    """Return plain JSON, the same on every engine that may share embeddings."""
    model = vllm_config.model_config
    multimodal = model.multimodal_config
    tenant = Tenant.read(settings.tenant_key)
    extra = _multimodal_settings(multimodal)
    processor, media = _processor_kwargs(multimodal), _media_io_kwargs(multimodal)
    # Mean, size, resampling: replaced files of a folder may change these as well.
    images = _plain(getattr(model, "hf_image_processor_config", None) or {})
    return {
        "model": settings.model_identity or getattr(model, "model_weights", "") or model.model,
        "revision": model.revision,
        "dtype": str(model.dtype).removeprefix("torch."),
        "quantization": model.quantization,
        **_quantization_config(getattr(model, "quantization_config", None)),
        "encoder": _encoder_configs(model.hf_config),
        # Settings of videos or audio alone are in the names of those, see scopes_of.
        "mm_processor_kwargs": _plain(_without(processor, _OWN_PROCESSOR_KWARGS.values())),
        "media_io_kwargs": _plain(_without(media, _OWN_PROCESSOR_KWARGS)),
        "hasher": hash_algorithm(multimodal),
        **({"image_processor": images} if images else {}),
        **({"multimodal": extra} if extra else {}),
        **({"tenant": tenant.id} if tenant else {}),
        **({"epoch": settings.encoder_epoch} if settings.encoder_epoch else {}),
    }


def scopes_of(vllm_config: Any) -> ModalityScopes:
    """Return the marks of the embeddings of each modality that has settings of its own.

    The marks are part of their names, so that engines which process videos differently still share
    the embeddings of images. vLLM keeps these settings out of an image's hash as well (0.30 and
    newer, multimodal/processing/inputs.py). Its hash of a video has them in an API server only.
    The pruning of videos is no such setting: it makes embeddings of images wider (qwen3_vl.py).
    """
    multimodal = vllm_config.model_config.multimodal_config
    processor, media = _processor_kwargs(multimodal), _media_io_kwargs(multimodal)
    own = {
        modality: [_plain(media.get(modality)), _plain(processor.get(name))]
        for modality, name in _OWN_PROCESSOR_KWARGS.items()
        if media.get(modality) or processor.get(name)
    }
    marks = {modality: _mark(modality, settings) for modality, settings in own.items()}
    # A modality that unites several depends on the settings of all.
    return ModalityScopes(marks, _mark("all", own) if own else "", frozenset(MODALITIES))


def _mark(modality: str, settings: Any) -> str:
    digest = hashlib.sha256(canonical_json(settings).encode()).hexdigest()
    return f"{modality}-{digest[:16]}"


def _without(settings: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name not in names}


def _multimodal_settings(multimodal: Any) -> dict[str, str]:
    found = {
        name: str(value)
        for name in _MULTIMODAL_SETTINGS
        if (value := getattr(multimodal, name, None)) is not None
    }
    if not getattr(multimodal, "video_pruning_rate", None):
        # A rate of 0 prunes nothing, and the method has a default that does nothing alone.
        found.pop("video_pruning_rate", None)
        found.pop("video_pruning_method", None)
    scales = getattr(multimodal, "mm_encoder_fp8_scale_path", None)
    if scales is not None:
        try:
            found["mm_encoder_fp8_scales"] = content_digest(scales)
        except OSError as exc:
            raise ConfigError(
                f"--mm-encoder-fp8-scale-path cannot be read: {exc}",
                field="mm_encoder_fp8_scale_path",
            ) from exc
    return found


def _quantization_config(given: Any) -> dict[str, Any]:
    """Describe ``--quantization-config``: which layers are quantised while they are loaded.

    Args:
        given: A dictionary, or vLLM's object made from it (0.32, config/quantization.py).

    Returns:
        A part of the descriptor; empty if nothing is set.
    """
    values = given if isinstance(given, dict) else vars(given) if given is not None else {}
    kept = {
        # vLLM's specification of one kind of layers: its str() omits one half.
        key: repr(value) if hasattr(value, "activation") else value
        for key, value in values.items()
        if value and not key.startswith("_")
    }
    return {"quantization_config": _plain(kept)} if kept else {}


def _processor_kwargs(multimodal: Any) -> dict[str, Any]:
    """Return the processor's settings without its device, which changes no embedding.

    An encode-only instance on an accelerator runs the processor there, and vLLM adds the device
    (0.28 and newer, config/vllm.py: _resolve_mm_processor_device).
    """
    given = getattr(multimodal, "mm_processor_kwargs", None) or {}
    return {name: value for name, value in given.items() if name != "device"}


def _media_io_kwargs(multimodal: Any) -> dict[str, Any]:
    """Return them without vLLM's additions on an encode-only CUDA instance or empty modalities.

    vLLM 0.30 and newer decode video there with torchcodec on the device, or leave an empty entry
    if torchcodec is missing (config/vllm.py: _resolve_mm_video_decode_device). Consumers of the
    same fleet have neither.
    """
    kept: dict[str, Any] = {}
    for modality, given in (getattr(multimodal, "media_io_kwargs", None) or {}).items():
        values = dict(given)
        if values.pop("device", None) is not None and values.get("backend") == "torchcodec":
            del values["backend"]
        if values:
            kept[modality] = values
    return kept


def _encoder_configs(hf_config: Any) -> dict[str, Any]:
    """Return the encoders' own settings, without the fields of every Hugging Face configuration.

    The base class's fields (label maps, generation defaults) come and go with releases of
    transformers and say nothing about an encoder. Top-level fields do count: which layer an image
    is taken from, how many tokens it becomes, how features are merged. A part of another name
    counts, unless it is certainly not an encoder's: an unknown family shares less than it could,
    never too much.
    """
    from transformers import PretrainedConfig

    common = set(PretrainedConfig().to_dict()) - {"model_type"}

    def own(config: Any) -> dict[str, Any]:
        values = config if isinstance(config, dict) else getattr(config, "to_dict", dict)()
        return {
            key: _plain(value)
            for key, value in values.items()
            if key not in common and not key.startswith("_") and value is not None
        }

    def parts(config: Any) -> dict[str, Any]:
        kept: dict[str, Any] = {}
        for key, value in own(config).items():
            if not isinstance(value, dict):
                kept[key] = value
            elif key not in _NO_ENCODER_CONFIGS:
                # In an encoder's part all fields are the encoder's, whatever their names.
                inner = own(value) if key in _ENCODER_CONFIGS else parts(value)
                if inner:
                    kept[key] = inner
        return kept

    result: dict[str, Any] = {"model_type": getattr(hf_config, "model_type", None)}
    for part in _ENCODER_CONFIGS:
        if kept := own(getattr(hf_config, part, None)):
            result[part] = kept
    return {**parts(hf_config), **result}


def _plain(value: Any) -> Any:
    """Return JSON values unchanged; floats by repr, other types by str."""
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    if value is None or isinstance(value, (bool, int, str)):
        return value
    return repr(value) if isinstance(value, float) else str(value)


def hash_algorithm(multimodal: Any) -> str:
    """Return the algorithm of vLLM's image hash: a setting since 0.27, a variable before."""
    algorithm = getattr(multimodal, "mm_hasher_algorithm", None)
    if algorithm is None:
        from vllm import envs

        algorithm = getattr(envs, "VLLM_MM_HASHER_ALGORITHM", "blake3")
    return str(algorithm)


def identifier_problem(vllm_config: Any) -> str | None:
    """Return why this configuration gives images no content hash; None if it does.

    Without a processor cache and without prefix caching, vLLM numbers images instead of hashing
    them: the same name means another image after a restart.
    """
    multimodal = vllm_config.model_config.multimodal_config
    if multimodal is None or getattr(multimodal, "mm_processor_cache_gb", 1) != 0:
        return None
    if vllm_config.cache_config.enable_prefix_caching:
        return None
    return (
        "with --mm-processor-cache-gb 0 and prefix caching off vLLM numbers images instead of "
        "hashing them, so nothing could be shared; set --mm-processor-cache-gb above 0 or "
        "--enable-prefix-caching"
    )


def trust_problem(vllm_config: Any, settings: Settings) -> str | None:
    """Return why refusing clients' identifiers would refuse all; None if vLLM's own pass."""
    multimodal = vllm_config.model_config.multimodal_config
    if settings.trust_client_ids or multimodal is None or hash_algorithm(multimodal) != "sha512":
        return None
    return (
        "`trust_client_ids` = false takes identifiers of 64 hex digits for vLLM's own, and with "
        "--mm-hasher-algorithm sha512 they have 128, so nothing would be looked up or saved; use "
        "blake3 or sha256"
    )


def live_weights_problem(vllm_config: Any, settings: Settings) -> str | None:
    """Return why this engine's weights will differ from its checkpoint; None if nothing says so."""
    transfer = getattr(vllm_config, "weight_transfer_config", None)
    if transfer is None or settings.live_weights == "ignore":
        return None
    return (
        "--weight-transfer-config says that this engine's weights will change while it runs; s3ec "
        "stays inactive. If its encoder never changes, set `live_weights` = ignore"
    )


def model_problem(vllm_config: Any) -> str | None:
    """Return why this model has no encoder cache to connect to; None if it has one."""
    model = vllm_config.model_config
    if getattr(model, "is_encoder_decoder", False):
        return "encoder-decoder models keep their encoder outputs elsewhere; s3ec stays inactive"
    if model.multimodal_config is None:
        return "the model takes no images, audio or video; s3ec stays inactive"
    return None
