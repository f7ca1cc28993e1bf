# SPDX-License-Identifier: Apache-2.0
"""Which weights a model's encoder has: a fingerprint of the checkpoint, or why there is none.

Everything here is computed from files, without torch, vLLM or the network, so that every process
of every node and the command line come to the same answer.

The rule works on bytes alone. A Hugging Face snapshot's blob names would be cheaper and would see
every change, but a plain folder with the same files has none, and a blob's name also changes with
the language model: two nodes with one encoder would not share.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import re
import struct
import zipfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

#: What stands in a namespace's descriptor where the model is known by its name alone.
BY_NAME = "by name"
#: The same for `--load-format dummy`: random values, never to be shared with real ones.
DUMMY = "dummy"

# 2 MiB in all. A cold disk of 3000 reads a second, which is what a small cloud volume does, needs
# 170 ms for them.
_SAMPLES = 512
_SAMPLE_BYTES = 4096
_SAMPLES_A_TENSOR = 8
# A network folder answers in a millisecond each; together they take no longer than a few.
_READERS = 16
# What safetensors itself accepts (its MAX_HEADER_SIZE).
_HEADER_LIMIT = 100_000_000
_DIGEST_CHARS = 32

# Formats in which vLLM 0.26 to 0.33 reads the checkpoint's own files. Tensorizer's are somewhere
# else, and what a plugin loads nobody knows.
_FROM_FILES = frozenset(
    ("auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "mistral", "pt", "npcache",
     "bitsandbytes", "gguf", "runai_streamer", "runai_streamer_sharded", "sharded_state",
     "ipc_cache", "modelexpress")
)  # fmt: skip
_SHARDED = ("sharded_state", "runai_streamer_sharded")
# vLLM's loader leaves them out (weight_utils.filter_files_not_needed_for_inference).
_TRAINING = frozenset(
    ("training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt")
)

# Files of processors, and which of their parts count; None is all. The image processor is a part of
# the namespace by itself, see connector/vllm_config.py.
_PROCESSORS = {
    "video_preprocessor_config.json": None,
    "processor_config.json": ("video_processor", "feature_extractor", "audio_processor"),
}

# The decoder layers, the final norm and the head: what a language model computes with after it was
# given the embeddings. Checked for every model of vLLM 0.32: none of their `embed_multimodal`
# touches these. The table of token embeddings counts as the encoder's, because some do read it
# (qwen3_vl, molmo2, moondream3, nano_nemotron_vl). A name that is not certainly the language
# model's is the encoder's: an unknown family shares less than it could, never too much.
_LANGUAGE_MODEL = re.compile(
    r"(?:(?:model|vlm|thinker|language_model|text_model|llm|language|text|transformer|base_model)\.)*"
    r"(?:(?:layers|h|blocks)\.\d+\.|(?:norm|final_norm|final_layernorm|ln_f|lm_head|output)\.)"
)
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Where a model's weights come from, as vLLM was told.

    Attributes:
        model: Folder, file, name on the Hugging Face hub, or URL.
        revision: Branch, tag or commit on the hub; None is ``main``.
        load_format: vLLM's ``--load-format``.
        download_dir: vLLM's ``--download-dir``; None is the hub's own cache folder.
        others: Further models that parts of the encoder are loaded from.
        folders: Folders of the model that hold parts of the encoder beside its other files.
    """

    model: str
    revision: str | None = None
    load_format: str = "auto"
    download_dir: str | None = None
    others: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Weights:
    """What a namespace says about the encoder's weights.

    Attributes:
        fingerprint: ``sha256:`` and 32 hex digits, or DUMMY, or BY_NAME.
        problem: Why a fingerprint was wanted and could not be had; None where nothing is wrong.
    """

    fingerprint: str
    problem: str | None = None


class _NoFingerprintError(Exception):
    """The message says why."""


def weights_of(checkpoint: Checkpoint, *, fingerprint: bool = True) -> Weights:
    """What a namespace should say about the weights of one engine.

    Args:
        fingerprint: Whether to read the checkpoint; False takes its name, unless it is dummy.
    """
    if checkpoint.load_format == "dummy":
        return Weights(DUMMY)
    if not fingerprint:
        return Weights(BY_NAME)
    try:
        return Weights(fingerprint_of(checkpoint))
    except _NoFingerprintError as exc:
        return Weights(BY_NAME, str(exc))
    except OSError as exc:
        return Weights(BY_NAME, f"the weights cannot be read: {exc}")


def fingerprint_of(checkpoint: Checkpoint) -> str:
    """The fingerprint of the encoder's and the projector's weights.

    It covers the names, types and shapes of all tensors that are not certainly the language
    model's, and 2 MiB of their bytes: at least 4 KiB of each tensor, the whole of a small one. How
    the tensors are spread over files does not matter. Of more than 512 tensors, 512 are read.

    It sees another training run, a fine-tuned or quantised encoder, a merged adapter: these change
    nearly every value of a tensor. It cannot see a change of a few values that lies between the
    samples, such as one edited row of a table.

    Checkpoints of other kinds (``.bin``, ``.pt``, GGUF) are taken as a whole, with the language
    model: size, 2 MiB of samples, and the CRC of each tensor where the file is a zip.

    Settings of the video and audio processors count with the weights, where the model has files of
    them: vLLM's identifier does not hold them, and its configuration has the image processor's
    only.

    Returns:
        ``sha256:`` and 32 hex digits.

    Raises:
        _NoFingerprintError: The files are not here, or of a kind that is not known.
        OSError: They cannot be read.
    """
    if checkpoint.load_format not in _FROM_FILES:
        raise _NoFingerprintError(
            f"nobody knows where `--load-format {checkpoint.load_format}` takes its weights from"
        )
    digest = hashlib.sha256(b"s3ec weights 1\n")
    for model in (checkpoint.model, *checkpoint.others):
        revision = checkpoint.revision if model == checkpoint.model else None
        place = _place_of(model, revision, checkpoint.download_dir)
        digest.update(_digest_of_place(place, checkpoint.load_format))
        if model == checkpoint.model:
            for folder in checkpoint.folders:
                digest.update(_digest_of_place(place / folder, checkpoint.load_format))
            digest.update(_processors_of(place))
    return f"sha256:{digest.hexdigest()[:_DIGEST_CHARS]}"


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter's files as they were read.

    Attributes:
        signature: Sizes, times and numbers of the files; cheap to look at again.
        digest: 16 hex digits of their content.
    """

    signature: tuple[tuple[str, int, int, int], ...]
    digest: str


def read_adapter(path: str, known: Adapter | None = None) -> Adapter | None:
    """What a LoRA adapter is: its configuration and its weights, 2 MiB of them.

    Args:
        path: Folder of the adapter, or its name on the hub.
        known: What was read before; taken over where the files were not touched since.

    Returns:
        None where it is not on this machine, is being written, or has no weights of a known kind.
    """
    try:
        place = _place_of(path, None, None)
        files = _adapter_files(place)
        signature = _signature_of(files)
        if known is not None and known.signature == signature:
            return known
        digest = hashlib.sha256(b"s3ec adapter 1\n")
        # Rank and scaling change the result of the same tensors.
        digest.update(hashlib.sha256(files[0].read_bytes()).digest())
        digest.update(_digest_of_opaque(files[1:]))
        if _signature_of(files) != signature:
            return None
    except (_NoFingerprintError, OSError):
        return None
    return Adapter(signature, digest.hexdigest()[:16])


def _adapter_files(place: Path) -> list[Path]:
    """The configuration, then the weights (vLLM 0.32, lora_model.py: from_local_checkpoint)."""
    for kind in ("safetensors", "bin", "pt"):
        weights = place / f"adapter_model.{kind}"
        if weights.is_file():
            return [place / "adapter_config.json", weights]
    raise _NoFingerprintError(f"no adapter in {place}")


def _signature_of(files: Sequence[Path]) -> tuple[tuple[str, int, int, int], ...]:
    facts = [(str(file), file.stat()) for file in files]
    return tuple((name, it.st_size, it.st_mtime_ns, it.st_ino) for name, it in facts)


def content_digest(path: str) -> str:
    """SHA-256 of a small file, 32 hex digits.

    Raises:
        OSError: It cannot be read.
    """
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:_DIGEST_CHARS]


# -- where the files are -----------------------------------------------------------------------


def _place_of(model: str, revision: str | None, download_dir: str | None) -> Path:
    path = Path(model).expanduser()
    if path.exists():
        return path
    if "://" in model:
        raise _NoFingerprintError(f"{model} is not on this machine")
    snapshot = _snapshot_of(model, revision or "main", _hub_cache(download_dir))
    if snapshot is None:
        raise _NoFingerprintError(
            f"{model} is no folder, and no snapshot of it is in {_hub_cache(download_dir)}"
        )
    return snapshot


def _hub_cache(download_dir: str | None) -> Path:
    """Where huggingface_hub 1.x keeps snapshots (its constants.py)."""
    for given in (
        download_dir,
        os.environ.get("HF_HUB_CACHE"),
        os.environ.get("HUGGINGFACE_HUB_CACHE"),
    ):
        if given:
            return Path(given).expanduser()
    home = os.environ.get("HF_HOME") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.join("~", ".cache"), "huggingface"
    )
    return Path(home).expanduser() / "hub"


def _snapshot_of(name: str, revision: str, cache: Path) -> Path | None:
    repository = cache / ("models--" + name.replace("/", "--"))
    try:
        commit = (repository / "refs" / revision).read_text().strip()
    except OSError:
        commit = revision
    if not _COMMIT.fullmatch(commit):
        return None
    snapshot = repository / "snapshots" / commit
    return snapshot if snapshot.is_dir() else None


# -- what is in them ---------------------------------------------------------------------------


def _processors_of(place: Path) -> bytes:
    """A digest of the video and audio processors' settings; empty where no file has any."""
    found: dict[str, Any] = {}
    for name, parts in _PROCESSORS.items():
        file = place / name
        if not file.is_file():
            continue
        try:
            content = json.loads(file.read_bytes())
            wanted = content if parts is None else {k: content[k] for k in parts if k in content}
        except (ValueError, TypeError) as exc:
            raise _NoFingerprintError(f"{file} is damaged: {exc!r}") from exc
        if wanted:
            found[name] = wanted
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).digest() if found else b""


def _digest_of_place(place: Path, load_format: str) -> bytes:
    if place.is_file():
        # GGUF: the encoder is in a file of its own beside it.
        beside = (p for p in place.parent.glob("*mmproj*.gguf") if p != place)
        return _digest_of_opaque([place, *sorted(beside)])
    files = _files_of(place, load_format)
    if files[0].suffix == ".safetensors":
        return _digest_of_safetensors(files)
    return _digest_of_opaque(files)


def _files_of(folder: Path, load_format: str) -> list[Path]:
    """The files that vLLM loads (0.32, default_loader.py: _prepare_weights)."""
    index = "model.safetensors.index.json"
    patterns = ["*.safetensors", "*.bin", "*.pt", "*/*.safetensors"]
    if load_format in ("auto", "mistral") and any(folder.glob("consolidated*.safetensors")):
        patterns, index = ["consolidated*.safetensors"], "consolidated.safetensors.index.json"
    elif load_format == "npcache":
        patterns = ["*.bin"]
    elif load_format == "pt":
        patterns = ["*.pt", "*.bin"]
    for pattern in patterns:
        files = sorted(f for f in folder.glob(pattern) if f.name not in _TRAINING)
        if not files:
            continue
        if pattern.endswith(".safetensors") and load_format not in _SHARDED:
            files = _in_index(files, folder / index)
        return files
    raise _NoFingerprintError(f"there are no weights of a known kind in {folder}")


def _in_index(files: list[Path], index: Path) -> list[Path]:
    """Those that the index names; a folder may hold the same weights twice."""
    if not index.is_file():
        return files
    try:
        named = set(json.loads(index.read_bytes())["weight_map"].values())
    except (ValueError, KeyError, AttributeError, TypeError) as exc:
        raise _NoFingerprintError(f"{index} is damaged: {exc!r}") from exc
    missing = named - {str(file.relative_to(index.parent)) for file in files}
    if missing:
        raise _NoFingerprintError(f"{index} names {min(missing)}, which is not there")
    return [file for file in files if str(file.relative_to(index.parent)) in named]


@dataclass(frozen=True, slots=True)
class _Tensor:
    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int


def _digest_of_safetensors(files: Sequence[Path]) -> bytes:
    # Where every name looks like a language model's, they mean something else.
    counted = _all_tensors(files, _encoder_tensors) or _all_tensors(files, _tensors_of)
    names = [each.name for each in counted]
    once = len(set(names)) == len(names)
    digest = hashlib.sha256()
    for each in counted:
        # Files of the ranks of a sharded checkpoint hold tensors of one name.
        where = "" if once else each.file.name
        line = json.dumps([each.name, where, each.dtype, each.shape], separators=(",", ":"))
        digest.update(line.encode() + b"\n")
    for content in _contents(_samples_of(counted)):
        digest.update(hashlib.sha256(content).digest())
    return digest.digest()


def _all_tensors(files: Sequence[Path], of_file: Callable[[Path], list[_Tensor]]) -> list[_Tensor]:
    tensors = list(itertools.chain.from_iterable(_parallel(of_file, files)))
    return sorted(tensors, key=lambda tensor: (tensor.name, tensor.file))


def _encoder_tensors(file: Path) -> list[_Tensor]:
    """Without the language model's, of which a mixture of experts has hundreds of thousands."""
    return _tensors_of(file, lambda name: not _LANGUAGE_MODEL.match(name))


def _tensors_of(file: Path, counts: Callable[[str], object] = bool) -> list[_Tensor]:
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > _HEADER_LIMIT:
                raise _NoFingerprintError(f"{file} is no safetensors file")
            header = json.loads(stream.read(length))
        return [
            _tensor(name, file, entry, 8 + length)
            for name, entry in header.items()
            if name != "__metadata__" and counts(name)
        ]
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as exc:
        raise _NoFingerprintError(f"{file} is no safetensors file: {exc!r}") from exc


def _tensor(name: str, file: Path, entry: dict[str, Any], data: int) -> _Tensor:
    first, end = entry["data_offsets"]
    return _Tensor(name, file, entry["dtype"], tuple(entry["shape"]), data + first, end - first)


def _samples_of(tensors: Sequence[_Tensor]) -> list[tuple[Path, int, int]]:
    """File, offset and length of what is read."""
    if len(tensors) > _SAMPLES:
        chosen = sorted(tensors, key=lambda t: hashlib.sha256(t.name.encode()).digest())
        tensors = sorted(chosen[:_SAMPLES], key=lambda t: (t.name, t.file))
    each = max(1, min(_SAMPLES_A_TENSOR, _SAMPLES // max(1, len(tensors))))
    return [
        (tensor.file, tensor.start + offset, length)
        for tensor in tensors
        for offset, length in _spread(tensor.size, each)
    ]


def _spread(size: int, count: int) -> Iterable[tuple[int, int]]:
    """At most ``count`` pieces of a run of bytes, evenly spread; all of it where that is less."""
    if size <= count * _SAMPLE_BYTES:
        return [(at, min(_SAMPLE_BYTES, size - at)) for at in range(0, size, _SAMPLE_BYTES)]
    room = size - _SAMPLE_BYTES
    return [(room * (2 * n + 1) // (2 * count), _SAMPLE_BYTES) for n in range(count)]


def _digest_of_opaque(files: Sequence[Path]) -> bytes:
    """Of files whose tensors are not told apart."""
    digest = hashlib.sha256()
    each = max(1, _SAMPLES // len(files))
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        for line in _zip_entries(file):
            digest.update(line.encode())
        samples = [(file, offset, length) for offset, length in _spread(size, each)]
        for content in _contents(samples):
            digest.update(hashlib.sha256(content).digest())
    return digest.digest()


def _zip_entries(file: Path) -> list[str]:
    """Names, sizes and checksums that torch.save wrote; none where the file is no zip."""
    if file.suffix not in (".bin", ".pt") or not zipfile.is_zipfile(file):
        return []
    try:
        with zipfile.ZipFile(file) as archive:
            return [f"{e.filename} {e.file_size} {e.CRC}\n" for e in archive.infolist()]
    except (zipfile.BadZipFile, ValueError) as exc:
        raise _NoFingerprintError(f"{file} is a damaged zip: {exc!r}") from exc


def _contents(samples: Sequence[tuple[Path, int, int]]) -> Iterable[bytes]:
    """What each sample holds, in their order."""
    with contextlib.ExitStack() as stack:
        streams = {
            file: stack.enter_context(file.open("rb", buffering=0))
            for file in {file for file, _, _ in samples}
        }

        def read(sample: tuple[Path, int, int]) -> bytes:
            file, offset, length = sample
            content = os.pread(streams[file].fileno(), length, offset)
            if len(content) != length:
                raise _NoFingerprintError(f"{file} is shorter than its header says")
            return content

        return _parallel(read, samples)


def _parallel(work: Callable[[_Item], _Result], items: Sequence[_Item]) -> list[_Result]:
    if len(items) < 2:
        return [work(item) for item in items]
    with ThreadPoolExecutor(_READERS, thread_name_prefix="s3ec-weights") as pool:
        return list(pool.map(work, items))
