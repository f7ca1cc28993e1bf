# SPDX-License-Identifier: Apache-2.0
"""Encode on a Ray cluster: Ray Data runs one vLLM in each worker.

``RayEncoder`` passes chunks of items to ``Dataset.map_batches`` and joins the results. Ray places
the workers, restarts them, and retries the chunks of one that died. A chunk has the addresses of
its items, not their bytes: the worker reads them.
"""

from __future__ import annotations

import logging
import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from s3ec.corpus.encoder import Encoded, Encoder, EncoderError, Picture, most_readers
from s3ec.corpus.reading import require
from s3ec.errors import ConfigError, S3ECError, SourceError

if TYPE_CHECKING:
    from s3ec.corpus.sources import SourceItem
    from s3ec.identity import Namespace

log = logging.getLogger(__name__)

_RETRIES = 2  # of a chunk whose worker dies
_FAILED_CHUNKS = 2  # of each worker, before the job ends: more are not the pictures' fault
_CHUNKS_AT_A_TIME = 2  # a worker reads the next chunk while one is encoded
_PLACED_S = 1800.0  # a cluster may have to start a machine for the first worker


@dataclass(frozen=True, slots=True)
class RayOptions:
    """The cluster, and the resources of each worker.

    Attributes:
        address: Of the cluster, such as ``auto`` or ``ray://HOST:10001``; None for that of
            ``RAY_ADDRESS``, or for the cluster that this process uses already.
        workers: The least and the largest number of workers.
        gpus: Of each worker.
        cpus: Of each worker.
    """

    address: str | None = None
    workers: tuple[int, int] = (1, 1)
    gpus: float = 1.0
    cpus: float = 1.0

    def __post_init__(self) -> None:
        least, most = self.workers
        if not 1 <= least <= most:
            raise ConfigError(
                f"`ray_workers` {least}-{most}: at least 1, and no more at least than at most",
                field="ray_workers",
            )


class Worker:
    """Encodes chunks; ``map_batches`` makes actors of this class. Two threads call it.

    The engine runs in this process unless the environment says otherwise, so that no other process
    keeps the GPU when a worker is killed.
    """

    def __init__(self, make_encoder: Callable[[], Encoder], namespace: str) -> None:
        """Start nothing yet: Ray does not replace a worker whose constructor has failed."""
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        self._encoder = make_encoder()
        self._namespace, self._found = namespace, ""
        self._lock = threading.Lock()

    def __call__(self, batch: Any) -> Any:
        """Encode a chunk: a ``pyarrow.Table`` with one row, a pickled list of pictures."""
        import pyarrow as pa

        pictures = pickle.loads(batch["chunk"][0].as_py())  # noqa: S301  our own driver's
        return pa.table({"results": [pickle.dumps(self._encode(pictures))]})

    def _encode(self, pictures: list[Picture]) -> list[Encoded]:
        with self._lock:
            self._found = self._found or self._encoder.namespace().name  # reads the weights
        if self._found != self._namespace:
            raise EncoderError(
                f"this worker saves to another namespace ({self._found}, and not "
                f"{self._namespace}); have one vLLM and one model on all nodes"
            )
        with ThreadPoolExecutor(most_readers(), "s3ec-read") as pool:
            read = list(pool.map(self._read, pictures))
        results = [each for each in read if isinstance(each, Encoded)]
        good = {each.number: each for each in read if isinstance(each, Picture)}
        with self._lock:
            try:
                for one in self._encoder.encode(good.values()):
                    picture = good[one.number]
                    results.append(replace(one, sha256=picture.sha256, nbytes=len(picture.data)))
            except EncoderError:
                if self._encoder.is_running:  # only a new process has a sound engine
                    log.exception("the worker ends")
                    os.kill(os.getpid(), signal.SIGKILL)
                raise
        return results

    def _read(self, picture: Picture) -> Picture | Encoded:
        """Read and decode a picture; or return why it cannot be read."""
        item: Any = picture.item
        try:
            found = self._encoder.read(picture.number, item)
            if picture.uuid is not None:  # the driver does not know the hash
                found = replace(found, uuid=f"sha256:{found.sha256}")
            self._encoder.identify(found)
        except EncoderError:
            raise
        except S3ECError as exc:
            reason = exc.reason if isinstance(exc, SourceError) else str(exc)
            return Encoded(picture.number, None, reason)
        return found

    def __del__(self) -> None:
        """Let the engine finish its saves: Ray Data ends a worker by deleting it."""
        if encoder := getattr(self, "_encoder", None):
            encoder.close()


class RayEncoder:
    """An Encoder whose work ``Worker`` does. See ``encoder.Encoder``.

    The driver reads and names no item: items that the catalogue does not know go to a worker, whose
    engine does not encode items that the bucket holds.
    """

    start_s = 0.0

    def __init__(
        self, make_encoder: Callable[[], Encoder], options: RayOptions, *, chunk: int = 64
    ) -> None:
        """Start nothing yet.

        Args:
            make_encoder: Called by each worker; can be pickled.
            chunk: Items that a worker gets at a time.

        Raises:
            ConfigError: Ray is not installed, or no cluster is named.
        """
        self._ray, self._data = (
            require(name, "'ray[data]'", "`--engine ray`") for name in ("ray", "ray.data")
        )
        self._address = options.address or os.environ.get("RAY_ADDRESS")
        if self._address is None and not self._ray.is_initialized():
            raise ConfigError(
                "`--engine ray` needs a cluster, and neither `--ray-address` nor RAY_ADDRESS names "
                "one; start one with `ray start --head`, and give `--ray-address auto`",
                field="ray_address",
            )
        self._make_encoder = make_encoder
        self._options = options
        self._resources = {"num_gpus": options.gpus, "num_cpus": options.cpus}
        self._chunk = chunk
        self._stopped = threading.Event()
        self.is_running = False

    def namespace(self) -> Namespace:
        """See Encoder; found on a worker's node."""
        return self._found[0]

    @property
    def naming(self) -> str:
        """See Encoder."""
        return self._found[1]

    @cached_property
    def _found(self) -> tuple[Namespace, str]:
        ray = self._ray
        try:
            if not ray.is_initialized():
                ray.init(self._address, log_to_driver=False, configure_logging=False)
            look = ray.remote(max_calls=1, max_retries=1, **self._resources)(_look)
            found: tuple[Namespace, str] = ray.get(
                look.remote(self._make_encoder), timeout=_PLACED_S
            )
        except (ray.exceptions.RayError, OSError, RuntimeError, ValueError) as exc:
            raise _error_of(exc) from exc
        return found

    def read(self, number: int, item: SourceItem) -> Picture:
        """See Encoder; the worker reads it."""
        return Picture(number, item.modality, b"", item=item)

    def identify(self, picture: Picture) -> str | None:
        """See Encoder."""
        return None

    def encode(self, pictures: Iterable[Picture]) -> Iterator[Encoded]:
        """See Encoder. Holds all pictures: without their bytes some 1 KiB each."""
        left = {picture.number: picture for picture in pictures}
        for chunk in (self._chunk, 1):  # items of a failed chunk are tried alone
            if left and not self._stopped.is_set():
                self.is_running = True
                for encoded in self._execute([*left.values()], chunk):
                    if left.pop(encoded.number, None) is not None:
                        yield encoded
        if not self._stopped.is_set():
            problem = "each worker that has it ends; Ray's logs say why"
            yield from (Encoded(number, None, problem) for number in left)

    def _execute(self, pictures: list[Picture], size: int) -> Iterator[Encoded]:
        """Encode pictures with Ray Data, with a row and a task for each chunk."""
        starts = range(0, len(pictures), size)
        rows = [{"chunk": pickle.dumps(pictures[at : at + size])} for at in starts]
        least, most = (min(each, len(rows)) for each in self._options.workers)
        at_a_time = 1 if size == 1 else _CHUNKS_AT_A_TIME
        dataset = self._data.from_items(rows, override_num_blocks=len(rows)).map_batches(
            Worker,
            batch_size=1,
            batch_format="pyarrow",
            fn_constructor_args=(self._make_encoder, self.namespace().name),
            compute=self._data.ActorPoolStrategy(
                min_size=least,
                max_size=most,
                max_tasks_in_flight_per_actor=at_a_time,
                max_concurrent_calls_per_actor=at_a_time,
                enable_true_multi_threading=True,
            ),
            max_task_retries=_RETRIES,  # Ray 2.64 takes it differently; see pyproject.toml
            **self._resources,
        )
        context = dataset.context
        context.max_errored_blocks = _FAILED_CHUNKS * most
        context.raise_original_map_exception = True
        context.enable_progress_bars = context.print_on_execution_start = False
        how = {"batch_size": None, "batch_format": "pyarrow", "prefetch_batches": 0}
        try:
            for batch in dataset.iter_batches(**how):
                for results in batch["results"]:
                    yield from pickle.loads(results.as_py())  # noqa: S301  our own worker's
                if self._stopped.is_set():
                    return
        except (self._ray.exceptions.RayError, S3ECError, OSError, RuntimeError, ValueError) as exc:
            raise _error_of(exc) from exc

    def stop(self) -> None:
        """End with the chunks that are under way. Ray Data tells the workers to end."""
        self._stopped.set()

    close = stop


def _look(make_encoder: Callable[[], Encoder]) -> tuple[Namespace, str]:
    """Find the namespace and the naming of a worker; runs in a process of its node."""
    encoder = make_encoder()
    try:
        return encoder.namespace(), encoder.naming
    finally:
        encoder.close()


def _error_of(exc: BaseException) -> S3ECError:
    """The error that a worker has raised, or Ray's fault in one line."""
    cause: BaseException | None = exc
    while cause is not None:
        if isinstance(cause, ConfigError | EncoderError):
            return cause
        cause = getattr(cause, "cause", None) or cause.__cause__
    lines = str(exc).strip().splitlines() or ["no message"]
    return EncoderError(f"Ray: {type(exc).__name__}: {lines[0][:500]}; `ray status` says more")
