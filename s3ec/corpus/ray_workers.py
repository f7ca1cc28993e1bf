# SPDX-License-Identifier: Apache-2.0
"""One worker of a job on a Ray cluster: an encoder, and a thread that keeps it at work.

It reads, names and encodes items. What comes in and goes out says where an item lies, not its
bytes. ``ray_encoder`` is the other side. Nothing here imports Ray.
"""

from __future__ import annotations

import logging
import os
import queue
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from s3ec.corpus.encoder import Encoded, Encoder, EncoderError, Picture
from s3ec.errors import S3ECError, SourceError

if TYPE_CHECKING:
    from s3ec.corpus.sources import SourceItem
    from s3ec.identity import Namespace

log = logging.getLogger(__name__)

# How long the driver waits for a result before it is told that there is none yet.
_TAKE_S = 5.0
# What is kept of items that were read and that nobody has asked for yet.
_KEPT_ITEMS = 512
_KEPT_BYTES = 2**30


class Worker:
    """The actor. Its methods are called by several threads at once.

    The engine runs in this very process, unless the environment says otherwise: a worker that is
    killed then leaves nothing behind that holds its GPU.
    """

    def __init__(self, make_encoder: Callable[[], Encoder]) -> None:
        """Start nothing yet.

        Raises:
            ConfigError: What the encoder's own constructor raises.
        """
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        self._encoder = make_encoder()
        self._lock = threading.Lock()
        self._kept: dict[int, Picture] = {}
        self._orders: queue.SimpleQueue[Picture | None] = queue.SimpleQueue()
        self._inside = 0  # of the encoder
        self._results: queue.SimpleQueue[Encoded | None] = queue.SimpleQueue()
        self._problem: S3ECError | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> tuple[str, Namespace]:
        """Where it runs, for people, and where it saves.

        Raises:
            ConfigError, EncoderError: See Encoder.namespace.
        """
        namespace = self._encoder.namespace()
        return f"process {os.getpid()} on {socket.gethostname()}", namespace

    def read(self, number: int, item: SourceItem) -> Picture:
        """Read an item, and keep its bytes for what follows; answers without them."""
        picture = self._encoder.read(number, item)
        self._keep(picture)
        return replace(picture, data=b"", item=item)

    def identify(self, picture: Picture) -> str | None:
        """See Encoder."""
        return self._encoder.identify(self._whole(picture))

    def _keep(self, picture: Picture) -> None:
        with self._lock:
            self._kept[picture.number] = picture
            nbytes = sum(len(each.data) for each in self._kept.values())
            while len(self._kept) > 1 and (len(self._kept) > _KEPT_ITEMS or nbytes > _KEPT_BYTES):
                nbytes -= len(self._kept.pop(next(iter(self._kept))).data)

    def _whole(self, picture: Picture) -> Picture:
        """The picture with its bytes; read again where they are not here any more."""
        kept = self._kept.get(picture.number)
        if kept is not None:
            return replace(picture, data=kept.data)
        if picture.item is None:
            raise SourceError("it is not known where it lies")
        found = self._encoder.read(picture.number, picture.item)
        if picture.sha256 and found.sha256 != picture.sha256:
            raise SourceError("it has changed while the job ran; run the job again")
        return replace(picture, data=found.data)

    def give(self, pictures: list[Picture]) -> None:
        """Have some encoded."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="s3ec-worker", daemon=True)
                self._thread.start()
        for picture in pictures:
            self._orders.put(picture)

    def take(self) -> list[Encoded]:
        """What was encoded since the last call; waits some seconds for a first one.

        Raises:
            EncoderError, ConfigError: The engine did not start, or it ended.
        """
        found: list[Encoded] = []
        with suppress(queue.Empty):
            each = self._results.get(timeout=_TAKE_S)
            while True:
                found += [] if each is None else [each]
                each = self._results.get_nowait()
        if not found and self._problem is not None:
            raise self._problem
        return found

    def _run(self) -> None:
        try:
            for encoded in self._encoder.encode(self._feed()):
                self._done(encoded)
        except S3ECError as exc:
            self._problem = exc
        except BaseException as exc:  # the top of the thread: the driver has to hear of it
            log.exception("the worker ends")
            self._problem = EncoderError(f"the worker ended: {type(exc).__name__}: {exc}")
        self._results.put(None)

    def _done(self, encoded: Encoded) -> None:
        with self._lock:
            self._inside -= 1
            self._kept.pop(encoded.number, None)
        self._results.put(encoded)

    def _feed(self) -> Iterator[Picture | None]:
        """Orders as they come; None while the encoder should go on with what it has."""
        while True:
            try:
                picture = self._orders.get(block=self._inside == 0)
            except queue.Empty:
                yield None
                continue
            if picture is None:
                return
            with self._lock:
                self._inside += 1
            try:
                whole = self._whole(picture)
            except SourceError as exc:
                self._done(Encoded(picture.number, None, exc.reason))
            else:
                yield whole

    def close(self) -> None:
        """Let the engine finish its saves, and end it."""
        self._encoder.stop()
        self._orders.put(None)
        thread = self._thread
        if thread is not None:
            thread.join()
        self._encoder.close()
