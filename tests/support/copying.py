# SPDX-License-Identifier: Apache-2.0
"""An encoder for workers that encodes nothing: it notes in a file what it was given.

A line is ``PID what number``. A file's content says what the encoder does with it.
"""

from __future__ import annotations

import hashlib
import os
import signal
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from s3ec.corpus.encoder import ConfirmedCheck, Encoded, EncoderError, Picture
from s3ec.corpus.sources import SourceItem
from s3ec.errors import ConfigError
from s3ec.identity import Namespace


@dataclass
class Copier:
    """See encoder.Encoder.

    Attributes:
        log: The file.
        model: Where it saves; ``wrong`` is refused, ``own`` differs in each process.
        gate: Nothing is done with an item while this file is not there.
    """

    log: Path
    model: str = "model"
    gate: Path | None = None
    readers: int = 2
    is_running: bool = False
    _stopped: list[bool] = field(default_factory=list)

    def note(self, what: str, number: int = 0) -> None:
        with self.log.open("a") as file:
            file.write(f"{os.getpid()} {what} {number}\n")

    def confirmed_by(self, check: ConfirmedCheck) -> None:
        pass

    def namespace(self) -> Namespace:
        if self.model == "wrong":
            raise ConfigError("no such model", field="model")
        if self.model == "never":
            raise EncoderError("vLLM did not start: no memory")
        own = str(os.getpid()) if self.model == "own" else self.model
        return Namespace(name=own, descriptor={})

    def read(self, number: int, item: SourceItem) -> Picture:
        self.note("read", number)
        data = item.read()
        sha256 = hashlib.sha256(data).hexdigest()
        return Picture(number, item.modality, data, sha256=sha256, nbytes=len(data))

    def identify(self, picture: Picture) -> str | None:
        return None

    def encode(self, pictures: Iterable[Picture | None]) -> Iterator[Encoded]:
        self.is_running = True
        for picture in pictures:
            if self._stopped:
                return
            if picture is None:
                time.sleep(0.001)
                continue
            self.note("given", picture.number)
            while self.gate is not None and not self.gate.exists():
                if self._stopped:
                    return
                time.sleep(0.001)
            if picture.data == b"kills":
                os.kill(os.getpid(), signal.SIGKILL)
            if picture.data == b"ends":
                raise EncoderError("the engine ended")
            self.note("encoded", picture.number)
            if picture.data == b"bad":
                yield Encoded(picture.number, None, "no picture")
            else:
                yield Encoded(picture.number, f"id-{picture.number}")

    def stop(self) -> None:
        self._stopped.append(True)

    def close(self) -> None:
        self.note("closed")
