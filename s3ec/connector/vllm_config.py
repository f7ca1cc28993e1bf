# SPDX-License-Identifier: Apache-2.0
"""What vLLM's configuration says to s3ec: namespace, topology, role, features, checks."""

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

# Those for which some model of vLLM declares placeholder metadata.
MODALITIES = ("image", "video", "audio")
# vLLM hands a request's own embeddings through as a modality of this name; nothing to cache.
PASSED_THROUGH = "prompt_embeds"
# With `--mm-processor-cache-type shm` an item holds three numbers, which say where the worker
# finds its fields (vLLM 0.32, multimodal/cache/shm.py, `address_as_item`).
_SHM_ADDRESS = "address"
# A video's grid alone says where its frames are in time for these only. Qwen2.5-VL, and what is
# made after it, place them by seconds, which such a request cannot carry (vLLM 0.30 to 0.32,
# qwen2_5_vl.py, `second_per_grid_ts`). vLLM then takes one second, and the answers are others.
_TIMED_BY_GRID = ("qwen2_vl",)
_TIMES = "timestamps"
_ROUNDED = 0.01  # of the seconds in a size; all else in one are whole numbers
# Settings of the multimodal configuration that change an encoder's output but not vLLM's hash
# of the image. A release that lacks one counts as having it unset.
_MULTIMODAL_SETTINGS = ("video_pruning_rate", "video_pruning_method", "mm_encoder_attn_dtype")
# Of `mm_processor_kwargs`, those of one modality only. Those of pictures are the namespace's.
_OWN_PROCESSOR_KWARGS = {"video": "videos_kwargs", "audio": "audio_kwargs"}
_ENCODER_CONFIGS = ("vision_config", "audio_config", "speech_config", "encoder_config")
# Parts of a Hugging Face configuration that say nothing about an encoder. What is quantised in the
# checkpoint shows in its tensors.
# On a model's configuration: the settings and the descriptor that were made of it first.
_DESCRIBED = "_s3ec_described"
_NO_ENCODER_CONFIGS = frozenset(
    ("text_config", "llm_config", "language_config", "talker_config", "token2wav_config",
     "code2wav_config", "generation_config", "quantization_config", "compression_config",
     "rope_scaling", "rope_parameters", "auto_map")
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Role:
    """What this vLLM instance does.

    Attributes:
        producer: It may store embeddings.
        consumer: It may load them. A producer that is no consumer runs no language model.
        window_tokens: Most tokens that one step can schedule for a request.
        ranks: Workers that load every granted item (tensor parallel size).
        steps_in_flight: Steps that can be scheduled before the first of them has ended.
        defer_timeout_s: Longest deferral of a request in all.
        asked_every_pass: Whether vLLM calls ensure_cache_available for a request in every
            pass that schedules it (0.30 and newer), or only before its first one.
        can_load: Whether all workers that load see this node's tier. Else nothing is granted.
        stores_again: Workers can store what the device holds already (vLLM's hook
            ``start_save_caches``, 0.30 and newer).
        unshared: Modalities of which nothing is loaded or saved, see ``forms.py``.
        tower_adapters: LoRA adapters may touch the encoder. Nothing that one has its part in is
            loaded or saved.
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
    """How many workers load every granted embedding: those of the first pipeline stage."""
    parallel = vllm_config.parallel_config
    ranks: int = parallel.tensor_parallel_size
    return ranks * getattr(parallel, "prefill_context_parallel_size", 1)


def ranks_problem(vllm_config: Any) -> str | None:
    """Why the ranks that load may not see the scheduler's tier; None if all certainly do."""
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
    """Answers two questions about features without imports or I/O at call time.

    The fields that a model declares for a request without pixels are asked for once, at start-up:
    vLLM builds a processor to answer, which takes far too long for a scheduling pass.
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
        except ImportError:  # no connector of this release answers with them
            return
        self._collect = collect_ec_item_metadata

    def fields_for(self, modality: str) -> Collection[str]:
        """Fields that the model declares; vLLM's resolver would build a processor to answer."""
        return self._fields.get(modality, ())

    @property
    def modalities(self) -> tuple[str, ...]:
        """Those that a request may name without pixels, as far as the model goes."""
        return tuple(modality for modality in MODALITIES if self._fields.get(modality))

    def items_of(self, features: Sequence[Any], unstored: Collection[int]) -> dict[str, Any]:
        """What vLLM's own connectors answer an encoder's request with, by identifier.

        A language instance may do without the pixels of an item that has metadata.

        Args:
            features: Of a request that has ended.
            unstored: Places of those whose embedding nobody will find. They get no metadata.
        """
        if self._collect is None:
            return {}
        items = self._collect(features, self)
        for place in unstored:
            items[features[place].identifier]["metadata"] = {}
        return items

    def needs_embedding(self, feature: Any) -> bool:
        """Whether this feature came without pixels: only a stored embedding can serve it.

        vLLM sends three kinds of them: declared metadata fields, those together with all fields
        that stay on the CPU (the render endpoint), and no data at all (a bare hash). A field that
        is neither declared nor kept on the CPU is what the encoder works on; so is an address in
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
        """Placeholder metadata (grid, timestamps) of a feature as plain JSON.

        Returns:
            Empty where the model needs none. None where this process cannot see it: the fields
            lie in shared memory, which only workers read.
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
    """Whether a request without pixels claims another size than is stored with the embedding.

    Fields that only one of them has are not compared, nor how numbers are nested. Times may have
    been rounded on their way.
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
    """Whether an engine takes requests that name a picture and do not bring it.

    Attributes:
        modalities: For which vLLM is told all that the pixels would tell it.
        problem: What is missing; empty where it takes them.
        mend: What to do about that; empty where nothing can be done.
    """

    modalities: tuple[str, ...]
    problem: str = ""
    mend: str = ""

    def __str__(self) -> str:
        if self.problem:
            return "; ".join(filter(None, [f"no, since {self.problem}", self.mend]))
        return f"yes, for {' and '.join(self.modalities)}"


def without_pixels(vllm_config: Any, features: FeatureReader, role: str) -> WithoutPixels:
    """Read it off model, release and role.

    Args:
        features: Knows what the model declares.
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
    """The namespace that this engine reads and writes.

    Args:
        vllm_config: vLLM's VllmConfig.
        settings: For ``model_identity``, which replaces the ``--model`` string, ``weights``,
            ``encoder_epoch`` and ``tenant_key``.
        weights: What the descriptor says about the model's files; None finds out.

    Raises:
        ConfigError: The configuration cannot be described as JSON; the tenant's secret or a file
            that belongs to the description cannot be read; or nobody knows the weights.
    """
    weights = weights or encoder_weights(vllm_config, settings)
    if weights.problem is not None:
        raise ConfigError(f"nothing can be shared: {weights.problem}", field="weights")
    described = _describe_but_files(vllm_config, settings)
    return Namespace.from_descriptor({**described, **weights.descriptor})


def encoder_weights(vllm_config: Any, settings: Settings) -> Weights:
    """What the files of this engine's model say; takes some 100 ms, and the network for S3."""
    return weights_at(checkpoint_of(vllm_config), settings)


def weights_at(checkpoint: Checkpoint, settings: Settings) -> Weights:
    """As encoder_weights."""

    def tags_below(url: str) -> list[tuple[str, int, str]]:
        from s3ec.store import tags  # the SDK takes 0.3 s

        return tags.tags_below(url, allow_http=settings.allow_http)

    return weights_of(
        checkpoint, fingerprint=settings.weights == "fingerprint", list_bucket=tags_below
    )


def checkpoint_of(vllm_config: Any) -> Checkpoint:
    """Where vLLM takes the model's files from."""
    model = vllm_config.model_config
    load = vllm_config.load_config
    # Ultravox: the audio tower comes from a model of its own.
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
    """The descriptor but for what files say, as it was when this process first asked for it.

    Constructors of some models write into the configuration that is described (0.32, isaac.py,
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
    """Plain JSON, the same on every replica that may share embeddings."""
    model = vllm_config.model_config
    multimodal = model.multimodal_config
    tenant = Tenant.read(settings.tenant_key)
    extra = _multimodal_settings(multimodal)
    processor, media = _processor_kwargs(multimodal), _media_io_kwargs(multimodal)
    # Mean, size, resampling: what a folder whose files are replaced may change as well.
    images = _plain(getattr(model, "hf_image_processor_config", None) or {})
    return {
        "model": settings.model_identity or getattr(model, "model_weights", "") or model.model,
        "revision": model.revision,
        "dtype": str(model.dtype).removeprefix("torch."),
        "quantization": model.quantization,
        **_quantization_config(getattr(model, "quantization_config", None)),
        "encoder": _encoder_configs(model.hf_config),
        # What is of videos or sound alone is in the names of those, see scopes_of.
        "mm_processor_kwargs": _plain(_without(processor, _OWN_PROCESSOR_KWARGS.values())),
        "media_io_kwargs": _plain(_without(media, _OWN_PROCESSOR_KWARGS)),
        "hasher": hash_algorithm(multimodal),
        **({"image_processor": images} if images else {}),
        **({"multimodal": extra} if extra else {}),
        **({"tenant": tenant.id} if tenant else {}),
        **({"epoch": settings.encoder_epoch} if settings.encoder_epoch else {}),
    }


def scopes_of(vllm_config: Any) -> ModalityScopes:
    """What marks the embeddings of each modality that has settings of its own.

    They are told apart by their names, so that engines which differ in how they take videos share
    the embeddings of pictures. vLLM keeps these settings out of a picture's hash as well (0.30 and
    newer, multimodal/processing/inputs.py). Its hash of a video has them in an API server only.
    The pruning of videos is no such setting: it makes embeddings of pictures wider (qwen3_vl.py).
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
    """``--quantization-config``, which says layer by layer what is quantised while it is loaded.

    Args:
        given: A dictionary, or what vLLM makes of it (0.32, config/quantization.py).

    Returns:
        Empty where nothing is set.
    """
    values = given if isinstance(given, dict) else vars(given) if given is not None else {}
    kept = {
        # vLLM's specification of one kind of layers: its string form leaves a half out.
        key: repr(value) if hasattr(value, "activation") else value
        for key, value in values.items()
        if value and not key.startswith("_")
    }
    return {"quantization_config": _plain(kept)} if kept else {}


def _processor_kwargs(multimodal: Any) -> dict[str, Any]:
    """Without where the processor runs: that changes no embedding.

    An encode-only instance on an accelerator runs it there, and vLLM notes it here (0.28 and
    newer, config/vllm.py: _resolve_mm_processor_device).
    """
    given = getattr(multimodal, "mm_processor_kwargs", None) or {}
    return {name: value for name, value in given.items() if name != "device"}


def _media_io_kwargs(multimodal: Any) -> dict[str, Any]:
    """Without what vLLM adds on an encode-only instance on CUDA, and without empty modalities.

    vLLM 0.30 and newer decode video there with torchcodec on the device, or leave an empty entry
    where torchcodec is missing (config/vllm.py: _resolve_mm_video_decode_device). Consumers of the
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
    """The encoders' own settings, without what every Hugging Face configuration has.

    The base class's fields (label maps, generation defaults) come and go with releases of
    transformers and say nothing about an encoder. What stands beside the parts does: which layer
    an image is taken from, how many tokens it becomes, how features are merged. A part of another
    name counts, unless it is certainly not an encoder's: an unknown family shares less than it
    could, never too much.
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
                # In an encoder's part everything is the encoder's, whatever it is called.
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
    """JSON as it is; anything else by its string form."""
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    if value is None or isinstance(value, (bool, int, str)):
        return value
    return repr(value) if isinstance(value, float) else str(value)


def hash_algorithm(multimodal: Any) -> str:
    """The algorithm of vLLM's image hash: a setting since 0.27, a variable before."""
    algorithm = getattr(multimodal, "mm_hasher_algorithm", None)
    if algorithm is None:
        from vllm import envs

        algorithm = getattr(envs, "VLLM_MM_HASHER_ALGORITHM", "blake3")
    return str(algorithm)


def identifier_problem(vllm_config: Any) -> str | None:
    """Why this configuration gives images no content hash; None if it does.

    Without a processor cache and without prefix caching vLLM counts images instead of hashing
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
    """Why nothing would be left where clients' identifiers are refused; None if much is."""
    multimodal = vllm_config.model_config.multimodal_config
    if settings.trust_client_ids or multimodal is None or hash_algorithm(multimodal) != "sha512":
        return None
    return (
        "`trust_client_ids` = false takes identifiers of 64 hex digits for vLLM's own, and with "
        "--mm-hasher-algorithm sha512 they have 128, so nothing would be looked up or saved; use "
        "blake3 or sha256"
    )


def live_weights_problem(vllm_config: Any, settings: Settings) -> str | None:
    """Why this engine's weights are not those of its checkpoint; None if nothing says so."""
    transfer = getattr(vllm_config, "weight_transfer_config", None)
    if transfer is None or settings.live_weights == "ignore":
        return None
    return (
        "--weight-transfer-config says that this engine's weights will change while it runs; s3ec "
        "stays inactive. If its encoder never changes, set `live_weights` = ignore"
    )


def model_problem(vllm_config: Any) -> str | None:
    """Why this model has no encoder cache to connect to; None if it has."""
    model = vllm_config.model_config
    if getattr(model, "is_encoder_decoder", False):
        return "encoder-decoder models keep their encoder outputs elsewhere; s3ec stays inactive"
    if model.multimodal_config is None:
        return "the model takes no images, audio or video; s3ec stays inactive"
    return None
