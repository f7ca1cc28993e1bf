# SPDX-License-Identifier: Apache-2.0
"""Describes a model's encoder by its files: a fingerprint of the weights, processors and code.

Everything here is computed from files, without torch, vLLM or the network, so that every process
of every node and the command line get the same result. If the weights are in a bucket, a listing
with tags replaces them; the caller makes it.

The fingerprint uses bytes alone. A Hugging Face snapshot's blob names would be cheaper and would
detect every change, but a plain folder with the same files has none, and a blob's name also changes
with the language model: two nodes with one encoder would not share.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import itertools
import json
import os
import re
import struct
import zipfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from s3ec.errors import S3ECError

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

#: The descriptor's value of `weights` if the model is known by its name alone.
BY_NAME = "by name"
#: The same for `--load-format dummy`: random values, never to be shared with real ones.
DUMMY = "dummy"

# Samples of each tensor: one at its start, one at its end, and two between.
_SAMPLES = 4
_SAMPLE_BYTES = 4096
# Distance of samples in a file whose tensors are not parsed. So a projector has some in any case.
_STRIDE_BYTES = 2**20
# A network folder takes a millisecond per read; parallel reads take little longer than one.
_READERS = 16
# The limit of safetensors itself (its MAX_HEADER_SIZE).
_HEADER_LIMIT = 100_000_000
_DIGEST_CHARS = 32

# Formats in which vLLM 0.26 to 0.33 reads the checkpoint's own files. Tensorizer's are elsewhere,
# ModelExpress and the IPC cache take them from another process, and a plugin may load anything.
_FROM_FILES = frozenset(
    ("auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "mistral", "pt", "npcache",
     "bitsandbytes", "gguf", "runai_streamer", "runai_streamer_sharded", "sharded_state")
)  # fmt: skip
_SHARDED = ("sharded_state", "runai_streamer_sharded")
# vLLM's loader leaves them out (weight_utils.filter_files_not_needed_for_inference).
_TRAINING = frozenset(
    ("training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt")
)

# Files that processors are made from. Parts of some models have a folder with a separate
# configuration.
_PROCESSORS = ("preprocessor_config.json", "processor_config.json",
               "video_preprocessor_config.json", "tekken.json")  # fmt: skip
# These depend on the process that saved the file, or concern the language model alone.
_NO_PROCESSOR = frozenset(("transformers_version", "_name_or_path", "chat_template"))
# Files that may name classes of another repository's code ("org/repository--module.Class").
_WITH_CODE = ("config.json", "tokenizer_config.json", *_PROCESSORS[:3])
_ELSEWHERE = re.compile(rb'"([\w.-]+(?:/[\w.-]+)?)--[\w./-]+"')

# The decoder layers, the final norm and the head: the parts of a language model that work on the
# embeddings. Checked for every model of vLLM 0.32: none of their `embed_multimodal` reads these.
# The table of token embeddings counts as the encoder's, because some do read it (qwen3_vl, molmo2,
# moondream3, nano_nemotron_vl). A name that is not certainly the language model's counts as the
# encoder's: an unknown family shares less than it could, never too much. So does a bare
# `blocks.0.`, the form of a vision tower that is saved alone (cosmos3).
_WRAPPER = r"(?:(?:model|vlm|thinker|base_model|language_model|text_model|llm|language|text)\.)"
_LANGUAGE_MODEL = re.compile(
    rf"{_WRAPPER}+(?:layers\.\d+|norm|final_norm|final_layernorm|lm_head|output)\."
    rf"|{_WRAPPER}*(?:transformer|language_model|language|text)\.(?:(?:h|blocks)\.\d+|ln_f)\."
    r"|lm_head\."
)
# In Mistral's own files (consolidated*.safetensors) their names have no prefix.
_MISTRAL_LANGUAGE_MODEL = re.compile(r"(?:layers\.\d+|norm|output)\.")
_COMMIT = re.compile(r"[0-9a-f]{40}")

Tags = Sequence[tuple[str, int, str]]
"""Objects below a URL: name, bytes, and the tag (ETag) that changes when it is replaced."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Where a model's files come from, as configured in vLLM.

    Attributes:
        model: Folder, file, name on a hub, or URL of the weights.
        revision: Branch, tag or commit on the hub; None is ``main``.
        load_format: vLLM's ``--load-format``.
        download_dir: vLLM's ``--download-dir``, for weights; None is the hub's own cache folder.
        others: Further models that parts of the encoder are loaded from.
        files: As ``model``, for the small files. vLLM mirrors those of a bucket into a folder.
        runs_code: True if the model's own code is run.
        code_revision: As ``revision``, for that code; None is that of the repository it is in.
    """

    model: str
    revision: str | None = None
    load_format: str = "auto"
    download_dir: str | None = None
    others: tuple[str, ...] = ()
    files: str = ""
    runs_code: bool = False
    code_revision: str | None = None


@dataclass(frozen=True, slots=True)
class Weights:
    """A namespace's record of a model's files.

    Attributes:
        fingerprint: ``sha256:`` and 32 hex digits, or DUMMY, or BY_NAME; empty if there is a
            problem.
        processors: Name to digest, of the files that processors are made from.
        code: Name to digest, of the model's own code.
        problem: Why the weights, processors or code are unknown. Then nothing may be shared. None
            if there is no problem.
    """

    fingerprint: str
    processors: dict[str, str] = field(default_factory=dict)
    code: dict[str, str] = field(default_factory=dict)
    problem: str | None = None

    @property
    def descriptor(self) -> dict[str, Any]:
        """The part of a namespace's descriptor that comes from files."""
        parts = {"processors": self.processors, "code": self.code}
        return {"weights": self.fingerprint, **{name: it for name, it in parts.items() if it}}


class UnknownFilesError(Exception):
    """The content of the files is unknown; the message says why."""


def weights_of(
    checkpoint: Checkpoint,
    *,
    fingerprint: bool = True,
    list_bucket: Callable[[str], Tags] | None = None,
) -> Weights:
    """Return the namespace's record for the files of one engine's model.

    Args:
        fingerprint: True to read the weights; False takes their name, unless they are dummies.
        list_bucket: Lists the objects below an ``s3://`` URL, over the network. None forbids that.
    """
    try:
        if checkpoint.load_format == "dummy":
            known = DUMMY
        elif not fingerprint:
            known = BY_NAME
        else:
            known = fingerprint_of(checkpoint, list_bucket)
        files = checkpoint.files or checkpoint.model
        try:
            place = place_of(files, checkpoint.revision, None)
        except UnknownFilesError:
            if fingerprint:
                raise
            return Weights(known)  # a setting that trusts the name of the weights covers these too
        code = {}
        if checkpoint.runs_code:
            revision = checkpoint.code_revision
            code = _code_of(place_of(files, revision or checkpoint.revision, None), revision)
        return Weights(known, _processors_of(place), code)
    except UnknownFilesError as exc:
        return Weights("", problem=str(exc))
    except OSError as exc:
        return Weights("", problem=f"the model's files cannot be read: {exc}")


def fingerprint_of(checkpoint: Checkpoint, list_bucket: Callable[[str], Tags] | None = None) -> str:
    """Return the fingerprint of the encoder's and the projector's weights.

    It covers the names, types and shapes of all tensors that are not certainly the language
    model's, and four samples of 4 KiB of each: at its start, at its end and between. The
    distribution of tensors over files does not matter.

    It detects another training run, a fine-tuned or quantised encoder, a new projector, a merged
    adapter: these change nearly every value of a tensor. It cannot detect a change of a few values
    between the samples, such as one edited row of a table.

    Checkpoints of other kinds (``.bin``, ``.pt``, GGUF) are covered as a whole, with the language
    model: size, a sample of 4 KiB of each MiB, and the CRC of each tensor if the file is a zip.
    Those in a bucket likewise, by the names, sizes and tags of their objects.

    Returns:
        ``sha256:`` and 32 hex digits.

    Raises:
        UnknownFilesError: The files are not here, or of an unknown kind.
        OSError: They cannot be read.
    """
    if checkpoint.load_format not in _FROM_FILES:
        raise UnknownFilesError(
            f"nobody knows where `--load-format {checkpoint.load_format}` takes its weights from"
        )
    digest = hashlib.sha256(b"s3ec weights 2\n")
    if checkpoint.model.startswith("s3://") and list_bucket is not None:
        digest.update(_digest_of_tags(checkpoint.model, list_bucket))
    else:
        place = place_of(checkpoint.model, checkpoint.revision, checkpoint.download_dir)
        digest.update(_digest_of_place(place, checkpoint.load_format))
    for other in checkpoint.others:
        place = place_of(other, None, checkpoint.download_dir)
        digest.update(_digest_of_place(place, checkpoint.load_format, whole=True))
    return f"sha256:{digest.hexdigest()[:_DIGEST_CHARS]}"


def content_digest(path: str | Path) -> str:
    """Return the SHA-256 of a small file, 32 hex digits.

    Raises:
        OSError: It cannot be read.
    """
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:_DIGEST_CHARS]


# -- where the files are -----------------------------------------------------------------------


def place_of(model: str, revision: str | None, download_dir: str | None) -> Path:
    """Return the file or folder in which vLLM finds a model or an adapter.

    Args:
        download_dir: See Checkpoint.

    Raises:
        UnknownFilesError: It is not on this machine.
    """
    path = Path(model).expanduser()
    if path.exists():
        return path
    if "://" in model:
        raise UnknownFilesError(f"{model} is not on this machine")
    if os.environ.get("VLLM_USE_MODELSCOPE", "").strip().lower() in ("1", "true"):
        return _modelscope_snapshot(model, revision, download_dir)
    snapshot = _snapshot_of(model, revision or "main", _hub_cache(download_dir))
    if snapshot is None:
        raise UnknownFilesError(
            f"{model} is no folder, and no snapshot of it is in {_hub_cache(download_dir)}"
        )
    return snapshot


def _modelscope_snapshot(model: str, revision: str | None, download_dir: str | None) -> Path:
    """Ask ModelScope, whose cache has had several layouts; it reads the disk only."""
    try:
        module = importlib.import_module("modelscope.hub.snapshot_download")
        found = Path(
            module.snapshot_download(
                model_id=model, revision=revision, cache_dir=download_dir, local_files_only=True
            )
        )
    except Exception as exc:  # it raises many types
        raise UnknownFilesError(f"ModelScope has no copy of {model} here: {exc!r}") from exc
    if not found.is_dir():
        raise UnknownFilesError(f"ModelScope has no copy of {model} here")
    return found


def _hub_cache(download_dir: str | None) -> Path:
    """Return the folder of huggingface_hub 1.x for snapshots (its constants.py)."""
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


# -- processors and code -----------------------------------------------------------------------


def _processors_of(place: Path) -> dict[str, str]:
    """Return digests of the files that the processors of all modalities are made from."""
    if not place.is_dir():
        return {}
    files = [place / name for name in _PROCESSORS]
    for name in (*_PROCESSORS, "config.json"):
        files += sorted(place.glob(f"*/{name}"))
    found = {}
    for file in filter(Path.is_file, files):
        try:
            content = json.loads(file.read_bytes()) if "config" in file.name else None
        except ValueError as exc:
            raise UnknownFilesError(f"{file} is damaged: {exc!r}") from exc
        if isinstance(content, dict):
            kept = {key: value for key, value in content.items() if key not in _NO_PROCESSOR}
            text = json.dumps(kept, sort_keys=True).encode()
            digest = hashlib.sha256(text).hexdigest()[:_DIGEST_CHARS]
        else:
            digest = content_digest(file)
        found[str(file.relative_to(place))] = digest
    return found


def _code_of(place: Path, revision: str | None) -> dict[str, str]:
    """Return digests of a model's own code, and of code from other repositories of the hub.

    Repositories that are not on this machine were not needed here.
    """
    if not place.is_dir():
        return {}
    folders = {"": place}
    for file in filter(Path.is_file, (place / name for name in _WITH_CODE)):
        for match in _ELSEWHERE.finditer(file.read_bytes()):
            other = match[1].decode()
            with contextlib.suppress(UnknownFilesError):
                folders[f"{other}--"] = place_of(other, revision, None)
    return {
        f"{front}{file.relative_to(folder)}": content_digest(file)
        for front, folder in folders.items()
        for file in sorted(folder.rglob("*.py"))
        if not any(part.startswith(".") for part in file.relative_to(folder).parts)
    }


# -- content of the weights --------------------------------------------------------------------


def _digest_of_tags(url: str, list_bucket: Callable[[str], Tags]) -> bytes:
    """Return the digest of weights in a bucket, which never reach this machine's disk."""
    try:
        found = sorted(one for one in list_bucket(url) if one[0].endswith(".safetensors"))
    except S3ECError as exc:
        raise UnknownFilesError(f"the weights in {url} cannot be listed: {exc}") from exc
    if not found:
        raise UnknownFilesError(f"there are no weights of a known kind in {url}")
    return hashlib.sha256(json.dumps(found).encode()).digest()


def _digest_of_place(place: Path, load_format: str, *, whole: bool = False) -> bytes:
    """
    Args:
        whole: True if all of it is the encoder's.
    """
    if place.is_file():
        # GGUF: the encoder is in a separate file in the same folder.
        beside = (p for p in place.parent.glob("*mmproj*.gguf") if p != place)
        return _digest_of_opaque(place.parent, [place, *sorted(beside)])
    files = _files_of(place, load_format)
    tensors = [file for file in files if file.suffix == ".safetensors"]
    digest = hashlib.sha256(_digest_of_safetensors(place, tensors, whole=whole))
    digest.update(_digest_of_opaque(place, [file for file in files if file not in tensors]))
    return digest.digest()


def _files_of(folder: Path, load_format: str) -> list[Path]:
    """Return the files that vLLM loads (0.32, default_loader.py: _prepare_weights).

    Also those one folder below: some models have towers there (kimi_audio, mimo_audio, cosmos3).
    """
    index = "model.safetensors.index.json"
    patterns = ["*.safetensors", "*.bin", "*.pt"]
    if load_format in ("auto", "mistral") and any(folder.glob("consolidated*.safetensors")):
        patterns, index = ["consolidated*.safetensors"], "consolidated.safetensors.index.json"
    elif load_format == "npcache":
        patterns = ["*.bin"]
    elif load_format == "pt":
        patterns = ["*.pt", "*.bin"]
    files: list[Path] = []
    for pattern in patterns:
        files = _weights_like(folder, pattern)
        if files:
            if pattern.endswith(".safetensors") and load_format not in _SHARDED:
                files = _in_index(files, folder / index)
            break
    files += _weights_like(folder, "*/*.safetensors") + _weights_like(folder, "*/*.bin")
    if not files:
        raise UnknownFilesError(f"there are no weights of a known kind in {folder}")
    return files


def _weights_like(folder: Path, pattern: str) -> list[Path]:
    return sorted(file for file in folder.glob(pattern) if file.name not in _TRAINING)


def _in_index(files: list[Path], index: Path) -> list[Path]:
    """Return the files that the index names; a folder may hold the same weights twice."""
    if not index.is_file():
        return files
    try:
        named = set(json.loads(index.read_bytes())["weight_map"].values())
    except (ValueError, KeyError, AttributeError, TypeError) as exc:
        raise UnknownFilesError(f"{index} is damaged: {exc!r}") from exc
    missing = named - {str(file.relative_to(index.parent)) for file in files}
    if missing:
        raise UnknownFilesError(f"{index} names {min(missing)}, which is not there")
    return [file for file in files if str(file.relative_to(index.parent)) in named]


@dataclass(frozen=True, slots=True)
class _Tensor:
    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int


def _digest_of_safetensors(folder: Path, files: Sequence[Path], *, whole: bool) -> bytes:
    counted: list[_Tensor] = []
    if not whole:
        # Skip the language model's: a mixture of experts has hundreds of thousands.
        counted = _all_tensors(files, lambda file: _tensors_of(folder, file, _is_encoders))
    # If every name looks like a language model's, the names mean something else.
    counted = counted or _all_tensors(files, lambda file: _tensors_of(folder, file))
    names = [each.name for each in counted]
    once = len(set(names)) == len(names)
    digest = hashlib.sha256()
    for each in counted:
        # The ranks' files of a sharded checkpoint hold tensors of the same name.
        where = "" if once else each.file.name
        line = json.dumps([each.name, where, each.dtype, each.shape], separators=(",", ":"))
        digest.update(line.encode() + b"\n")
    samples = [
        [(each.file, each.start + at, length) for at, length in _spread(each.size, _SAMPLES)]
        for each in counted
    ]
    for content in _digests(samples):
        digest.update(content)
    return digest.digest()


def _is_encoders(name: str, file: Path) -> bool:
    """Return True if a tensor may be the encoder's or the projector's, by its name."""
    if file.name.startswith("consolidated") and _MISTRAL_LANGUAGE_MODEL.match(name):
        return False
    return not _LANGUAGE_MODEL.match(name)


def _all_tensors(files: Sequence[Path], of_file: Callable[[Path], list[_Tensor]]) -> list[_Tensor]:
    tensors = list(itertools.chain.from_iterable(_parallel(of_file, files)))
    return sorted(tensors, key=lambda tensor: (tensor.name, tensor.file))


def _tensors_of(
    folder: Path, file: Path, counts: Callable[[str, Path], bool] = lambda *_: True
) -> list[_Tensor]:
    # A subfolder becomes part of the names: those are no language model's.
    front = str(file.parent.relative_to(folder) / "_")[:-1]
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > _HEADER_LIMIT:
                raise UnknownFilesError(f"{file} is no safetensors file")
            header = json.loads(stream.read(length))
        return [
            _tensor(front + name, file, entry, 8 + length)
            for name, entry in header.items()
            if name != "__metadata__" and counts(front + name, file)
        ]
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as exc:
        raise UnknownFilesError(f"{file} is no safetensors file: {exc!r}") from exc


def _tensor(name: str, file: Path, entry: dict[str, Any], data: int) -> _Tensor:
    first, end = entry["data_offsets"]
    return _Tensor(name, file, entry["dtype"], tuple(entry["shape"]), data + first, end - first)


_Sample = tuple[Path, int, int]
"""File, offset and length of one read."""


def _spread(size: int, count: int) -> Iterable[tuple[int, int]]:
    """Spread at most ``count`` pieces over ``size`` bytes, first to last; cover all if they fit.

    Returns:
        Offset and length of each.
    """
    if size <= count * _SAMPLE_BYTES:
        return [(at, min(_SAMPLE_BYTES, size - at)) for at in range(0, size, _SAMPLE_BYTES)]
    room = size - _SAMPLE_BYTES
    return [(room * number // (count - 1), _SAMPLE_BYTES) for number in range(count)]


def _digest_of_opaque(folder: Path, files: Sequence[Path]) -> bytes:
    """Return the digest of files whose tensors are not parsed."""
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.relative_to(folder)} {size}\n".encode())
        for line in _zip_entries(file):
            digest.update(line.encode())
        pieces = _spread(size, max(_SAMPLES, size // _STRIDE_BYTES))
        samples = [(file, at, length) for at, length in pieces]
        for content in _digests([[sample] for sample in samples]):
            digest.update(content)
    return digest.digest()


def _zip_entries(file: Path) -> list[str]:
    """Return names, sizes and checksums that torch.save wrote; none if the file is no zip."""
    if file.suffix not in (".bin", ".pt") or not zipfile.is_zipfile(file):
        return []
    try:
        with zipfile.ZipFile(file) as archive:
            return [f"{e.filename} {e.file_size} {e.CRC}\n" for e in archive.infolist()]
    except (zipfile.BadZipFile, ValueError) as exc:
        raise UnknownFilesError(f"{file} is a damaged zip: {exc!r}") from exc


def _digests(samples: Sequence[Sequence[_Sample]]) -> list[bytes]:
    """Return the SHA-256 of each group of samples, in their order."""
    with contextlib.ExitStack() as stack:
        streams = {
            file: stack.enter_context(file.open("rb", buffering=0))
            for file in {file for group in samples for file, _, _ in group}
        }

        def read(group: Sequence[_Sample]) -> bytes:
            digest = hashlib.sha256()
            for file, offset, length in group:
                content = os.pread(streams[file].fileno(), length, offset)
                if len(content) != length:
                    raise UnknownFilesError(f"{file} is shorter than its header says")
                digest.update(content)
            return digest.digest()

        return _parallel(read, samples)


def _parallel(work: Callable[[_Item], _Result], items: Sequence[_Item]) -> list[_Result]:
    if len(items) < 2:
        return [work(item) for item in items]
    with ThreadPoolExecutor(_READERS, thread_name_prefix="s3ec-weights") as pool:
        return list(pool.map(work, items))
