# SPDX-License-Identifier: Apache-2.0
"""Encoders of a job: the protocol, and vLLM as ``ec_producer`` in this process.

vLLM is driven as a server drives it, so that identifiers are the server's: each item is a part of
a chat, named by a URL that stands for the file's bytes. ``_shelf`` holds these bytes, whether they
came from a file, a rendered page, or a bucket.
"""

from __future__ import annotations

import functools
import hashlib
import io
import itertools
import json
import logging
import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from s3ec.decoding import why_left_out
from s3ec.errors import ConfigError, S3ECError, SourceError
from s3ec.identity import ModalityScopes, Namespace
from s3ec.settings import Settings

if TYPE_CHECKING:
    from s3ec.corpus.sources import SourceItem

log = logging.getLogger(__name__)

# Time for the last uploads once everything is encoded; the connector drains for 30 s.
_CLOSE_S = 60
_FIRST_VLLM = "0.28"
# Each picture is a new one: vLLM need not keep results of earlier ones.
_ENGINE_DEFAULTS: Mapping[str, Any] = {
    "enable_prefix_caching": False,
    "mm_processor_cache_gb": 0.1,
}
# Arguments of the engine that the job sets.
_OWN_ARGUMENTS = ("model", "ec_transfer_config", "skip_tokenizer_init")


def most_readers() -> int:
    """How many threads read and name items."""
    return min(8, len(os.sched_getaffinity(0)))


class EncoderError(S3ECError):
    """The engine did not start, or it has ended; no further item can be encoded here.

    The caller ends the job, and reports what is done.
    """


@dataclass(frozen=True, slots=True)
class Picture:
    """One item for an encoder.

    Attributes:
        number: Of the item within the job.
        modality: ``image``, ``video`` or ``audio``.
        data: The file's bytes; empty if another process will read them.
        uuid: The name that clients send with it; None if they send none.
        sha256: Of the file's bytes, as hex digits; empty until they are read.
        item: The item of the source, for a process that reads it.
        decoded: The decoded media, by decoder and its options.
    """

    number: int
    modality: str
    data: bytes = field(repr=False)
    uuid: str | None = None
    sha256: str = ""
    item: SourceItem | None = field(default=None, repr=False)
    decoded: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def url(self) -> str:
        """The URL that stands for its bytes in a chat, while it is on the shelf."""
        return f"s3ec:{id(self)}"


@dataclass(frozen=True, slots=True)
class Encoded:
    """The result of one picture.

    Attributes:
        number: The picture's.
        identifier: vLLM's name for its embedding; None if there is none.
        problem: Why there is none.
        sha256, nbytes: Of the file, if another process has read it.
    """

    number: int
    identifier: str | None
    problem: str = ""
    sha256: str = ""
    nbytes: int = 0


class Encoder(Protocol):
    """Encodes pictures, and saves their embeddings to the corpus. For one job.

    States: new, running from the first picture that ``encode`` gets, closed.

    Attributes:
        is_running: True if an engine was started.
        start_s: Seconds that it took to start; 0 if none was started, or other processes did it.
        naming: One word that changes when this encoder may name the same file differently.
    """

    @property
    def is_running(self) -> bool: ...

    @property
    def start_s(self) -> float: ...

    @property
    def naming(self) -> str: ...

    def namespace(self) -> Namespace:
        """The namespace where it saves. Starts an engine only if it cannot be known otherwise.

        Raises:
            ConfigError: The model or an argument cannot work; names what to change.
            EncoderError: The engine did not start.
        """
        ...

    def read(self, number: int, item: SourceItem) -> Picture:
        """Read an item, the ``number``-th of the job. Several threads may call it at once.

        Raises:
            SourceError: It cannot be read.
        """
        ...

    def identify(self, picture: Picture) -> str | None:
        """Find vLLM's name for a picture, without encoding it. Several threads may call it at once.

        Returns:
            The name; None if only encoding can tell it.

        Raises:
            SourceError: It cannot be decoded.
        """
        ...

    def encode(self, pictures: Iterable[Picture]) -> Iterator[Encoded]:
        """Encode pictures, in any order. Takes the next ones when it has room for them.

        Without a first picture no engine is started. After ``stop`` it ends soon, and returns
        nothing for pictures that have begun.

        Raises:
            EncoderError: The engine did not start, or it ended; pictures that have begun are lost.
        """
        ...

    def stop(self) -> None:
        """Make ``encode`` end soon. Any thread may call it, and a signal's handler."""
        ...

    def close(self) -> None:
        """Let the engine finish its saves, and end it. Idempotent."""
        ...


class VllmEncoder:
    """vLLM in this process, or in processes of its own if vLLM starts some.

    One thread uses it, except for ``read``, ``identify`` and ``stop``.
    """

    def __init__(
        self,
        model: str,
        settings: Settings,
        *,
        engine_args: Mapping[str, Any] | None = None,
        batch: int = 64,
    ) -> None:
        """Import and start nothing yet.

        Args:
            model: Exactly as the server's ``--model``.
            settings: Of the corpus; the engine gets them all.
            engine_args: Further arguments of ``vllm.LLM``, by their Python names.
            batch: Pictures that the engine has at a time.

        Raises:
            ConfigError: ``engine_args`` has an argument that the job sets.
        """
        for name in engine_args or {}:
            if name in _OWN_ARGUMENTS:
                raise ConfigError(
                    f"`{name}` cannot be given to the engine: the job sets it; leave it out",
                    field="engine_args",
                )
        self._model = model
        self._settings = settings
        self._arguments = {**_ENGINE_DEFAULTS, **(engine_args or {})}
        self._batch = batch
        self._stopped = threading.Event()
        self._config: Any = None
        self._formless: tuple[str, ...] = ()  # modalities of which nothing is stored
        self._llm: Any = None
        self._loading = threading.Lock()
        self._scopes = ModalityScopes()
        self.start_s = 0.0

    @property
    def is_running(self) -> bool:
        """See Encoder."""
        return self._llm is not None

    @cached_property
    def naming(self) -> str:
        """See Encoder: vLLM's release, and its name for one fixed picture.

        The name also depends on the model's path, and on settings of vLLM.
        """
        import vllm
        from PIL import Image

        file = io.BytesIO()
        Image.new("RGB", (8, 8), (200, 100, 50)).save(file, "PNG")
        name = None
        with suppress(SourceError):  # a model without pictures
            name = self.identify(Picture(-1, "image", file.getvalue()))
        return f"{vllm.__version__}:{(name or '-')[:16]}"

    # -- without an engine -------------------------------------------------------------------

    def namespace(self) -> Namespace:
        """See Encoder; imports vLLM."""
        from s3ec.connector.vllm_config import encoder_weights, namespace_of

        config = self._vllm_config()
        weights = encoder_weights(config, self._settings)
        if weights.problem is not None and self._llm is None:
            self._start()  # which downloads the model if it is not on this node yet
            weights = encoder_weights(config, self._settings)
        return namespace_of(config, self._settings, weights)

    def read(self, number: int, item: SourceItem) -> Picture:
        """See Encoder."""
        if item.modality in self._formless:
            raise SourceError(
                f"the model's processor makes other pixels of an {item.modality} in another "
                "prompt, so nothing is stored"
            )
        data = item.read()
        reason = why_left_out(data) if item.modality == "image" else None
        if reason is not None:
            raise SourceError(f"left out, since {reason}; convert it to a PNG without tRNS")
        return Picture(number, item.modality, data, sha256=hashlib.sha256(data).hexdigest())

    def identify(self, picture: Picture) -> str | None:
        """See Encoder. ``encode`` uses the decoded media again."""
        try:
            found = self._name_of(picture)
        except Exception as exc:  # decoders raise errors of any class
            raise SourceError(_reason(exc)) from exc
        return self._scopes.name(picture.uuid or found, picture.modality)

    def _name_of(self, picture: Picture) -> str:
        """Decode a picture, and get its name from vLLM's processor of the model."""
        from vllm.multimodal.processing import ProcessorInputs

        with self._loading:  # several threads name pictures
            processor, loader = self._processor
        with _on_shelf(picture):
            media = getattr(loader, f"fetch_{picture.modality}")(picture.url)
        info = processor.info
        inputs = ProcessorInputs([], info.parse_mm_data({picture.modality: [media]}))
        if hasattr(processor, "_get_mm_hashes"):  # some models add to it
            hashes = processor._get_mm_hashes(inputs)
        else:  # before 0.32
            algorithm = info.ctx.get_mm_config().mm_hasher_algorithm
            hashes = inputs.get_mm_hashes(info.model_id, algorithm)
        return str(hashes[picture.modality][0])

    @cached_property
    def _processor(self) -> tuple[Any, Any]:
        """vLLM's processor of the model, and a loader of media as vLLM makes it for a chat."""
        from vllm import envs
        from vllm.multimodal import MULTIMODAL_REGISTRY
        from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY

        config = self._vllm_config().model_config
        loader = MEDIA_CONNECTOR_REGISTRY.load(
            envs.VLLM_MEDIA_CONNECTOR, media_io_kwargs=config.multimodal_config.media_io_kwargs
        )
        return MULTIMODAL_REGISTRY.create_processor(config), loader

    def _vllm_config(self) -> Any:
        if self._config is None:
            if self._model.startswith((".", "/")) and not Path(self._model).exists():
                raise ConfigError(f"there is no folder `{self._model}`", field="model")
            try:
                from vllm.engine.arg_utils import EngineArgs
            except ImportError as exc:
                raise ConfigError(
                    f"the job needs vLLM ({exc}); install {_FIRST_VLLM} or newer here"
                ) from exc
            try:
                self._config = EngineArgs(**self._all_arguments()).create_engine_config()
            except TypeError as exc:
                raise ConfigError(
                    f"vLLM does not take these arguments: {exc}; they are those of vllm.LLM",
                    field="engine_args",
                ) from exc
            except (OSError, ValueError) as exc:
                raise ConfigError(f"vLLM refuses the model: {exc}", field="model") from exc
            from s3ec.connector.forms import form_of_model
            from s3ec.connector.vllm_config import model_problem, scopes_of

            problem = model_problem(self._config)
            if problem is not None:
                raise ConfigError(f"`model`: {problem}; take another one", field="model")
            found = form_of_model(self._config.model_config)
            if found is not None:
                self._formless = found[1].modalities
            _shelf()
            self._scopes = scopes_of(self._config)
        return self._config

    def _all_arguments(self) -> dict[str, Any]:
        from vllm.config import ECTransferConfig

        # All settings: the engine reads variables too, and those may name another corpus.
        extra = json.loads(self._settings.model_dump_json())
        if "save_overflow" not in self._settings.model_fields_set:
            extra["save_overflow"] = "block"  # a job must be complete: it waits for a slow store
        return {
            **self._arguments,
            "model": self._model,
            "ec_transfer_config": ECTransferConfig(
                ec_connector="S3ECConnector",
                ec_connector_module_path="s3ec.connector",
                ec_role="ec_producer",
                ec_connector_extra_config=extra,
            ),
        }

    # -- with one ----------------------------------------------------------------------------

    def _start(self) -> None:
        from vllm import LLM

        if not hasattr(LLM, "enqueue_chat"):
            raise ConfigError(f"this vLLM is too old for the job; install {_FIRST_VLLM} or newer")
        began_s = time.monotonic()
        try:
            with _interrupts_for_us():
                self._llm = LLM(**self._all_arguments())
        except ConfigError:
            raise
        except Exception as exc:
            raise EncoderError(f"vLLM did not start: {_reason(exc)}") from exc
        self.start_s = time.monotonic() - began_s

    def encode(self, pictures: Iterable[Picture]) -> Iterator[Encoded]:
        """See Encoder."""
        left = iter(pictures)
        first = next(left, None)
        if first is None:
            return
        self._vllm_config()
        if self._llm is None:
            self._start()
        yield from self._run(itertools.chain([first], left))

    def _run(self, pictures: Iterator[Picture]) -> Iterator[Encoded]:
        """Keep the engine busy until the last picture is encoded."""
        engine = self._llm.llm_engine
        under_way: dict[str, Picture] = {}
        while not self._stopped.is_set():
            is_last = True
            for picture in itertools.islice(pictures, self._batch - len(under_way)):
                is_last = False
                try:
                    under_way[self._enqueue(picture)] = picture
                except Exception as exc:  # noqa: BLE001  of any class: no picture, or too large
                    yield Encoded(picture.number, None, _reason(exc))
            if is_last and not under_way:
                return
            for output in self._step(engine) if under_way else ():
                done = under_way.pop(output.request_id, None) if output.finished else None
                if done is not None:
                    yield self._answer(done, output)
        if under_way:
            engine.abort_request(list(under_way))

    def _enqueue(self, picture: Picture) -> str:
        """Give the engine a picture; returns the name of its request."""
        kind = f"{picture.modality}_url"
        part: dict[str, Any] = {"type": kind, kind: {"url": picture.url}}
        if picture.uuid is not None:
            part["uuid"] = picture.uuid
        from vllm import SamplingParams

        sampling = SamplingParams(max_tokens=1)
        conversation = [{"role": "user", "content": [part]}]
        with _on_shelf(picture):
            (internal,) = self._llm.enqueue_chat([conversation], sampling, use_tqdm=False)
        # vLLM's internal name of a request is the name that its outputs have, and further digits.
        name: str = internal.partition("-")[0]
        return name

    def _step(self, engine: Any) -> list[Any]:
        try:
            outputs: list[Any] = engine.step()
        except Exception as exc:
            raise EncoderError(f"the engine ended: {_reason(exc)}; its log says why") from exc
        return outputs

    def _answer(self, picture: Picture, output: Any) -> Encoded:
        """The result of a picture; the engine's own name for it counts, whatever was expected."""
        items = getattr(output, "ec_transfer_params", None) or {}
        found = next(iter(items)) if len(items) == 1 else picture.uuid or self._name_of(picture)
        return Encoded(picture.number, self._scopes.name(found, picture.modality))

    def stop(self) -> None:
        """See Encoder."""
        self._stopped.set()

    def close(self) -> None:
        """See Encoder. Takes up to a minute if the bucket is slow."""
        self._stopped.set()
        llm, self._llm = self._llm, None
        if llm is not None:
            with suppress(Exception):  # an engine that has ended already
                llm.llm_engine.engine_core.shutdown(timeout=_CLOSE_S)


@functools.cache
def _shelf() -> dict[str, Picture]:
    """Pictures by URL, for vLLM's loaders of media in this process.

    Our loader replaces the one that this process uses, and passes it every other URL.
    """
    from vllm import envs
    from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY

    pictures: dict[str, Picture] = {}
    registry = MEDIA_CONNECTOR_REGISTRY.name2class
    theirs: Any = registry[envs.VLLM_MEDIA_CONNECTOR]

    class FromShelf(theirs):  # type: ignore[misc]
        def load_from_url(self, url: str, media_io: Any, **options: Any) -> Any:
            picture = pictures.get(url)
            if picture is None:
                return super().load_from_url(url, media_io, **options)
            # Decoded once, for naming and for encoding.
            how = f"{type(media_io).__name__} {vars(media_io)}"
            if how not in picture.decoded:
                picture.decoded[how] = media_io.load_bytes(picture.data)
            return picture.decoded[how]

    registry[envs.VLLM_MEDIA_CONNECTOR] = FromShelf
    return pictures


@contextmanager
def _on_shelf(picture: Picture) -> Iterator[None]:
    _shelf()[picture.url] = picture
    try:
        yield
    finally:
        _shelf().pop(picture.url)


@contextmanager
def _interrupts_for_us() -> Iterator[None]:
    """Keep Ctrl-C from the processes that are started inside the block.

    A terminal sends it to all of them at once. vLLM's would end in the middle of their work; the
    job ends them instead. A blocked signal stays blocked in a child, whatever handler it sets.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    from multiprocessing import resource_tracker

    # Started later by itself, it would unblock the signal (Python 3.11).
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _reason(exc: BaseException) -> str:
    """The class and the first line of an error, for the report."""
    lines = str(exc).strip().splitlines()
    return f"{type(exc).__name__}: {lines[0] if lines else 'no message'}"[:500]
