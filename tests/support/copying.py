# SPDX-License-Identifier: Apache-2.0
"""An encoder for workers that encodes nothing: it notes in a file what it was given.

A line is ``PID what number``. A file's content says what the encoder does with it.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from s3ec.corpus.encoder import Encoded, EncoderError, Picture
from s3ec.corpus.sources import SourceItem
from s3ec.errors import ConfigError, SourceError
from s3ec.identity import Namespace


@dataclass
class Copier:
    """See encoder.Encoder.

    Attributes:
        log: The file.
        model: Where it saves; ``wrong`` is refused, ``own`` differs in each process.
        gate: Nothing is encoded while this file is not there.
    """

    log: Path
    model: str = "model"
    gate: Path | None = None
    is_running: bool = False
    start_s: float = 0.0
    naming: str = "1:abc"

    def note(self, what: str, number: int = 0) -> None:
        with self.log.open("a") as file:
            file.write(f"{os.getpid()} {what} {number}\n")

    def namespace(self) -> Namespace:
        if self.model == "wrong":
            raise ConfigError("no such model", field="model")
        own = str(os.getpid()) if self.model == "own" else self.model
        return Namespace(name=own, descriptor={})

    def read(self, number: int, item: SourceItem) -> Picture:
        data = item.read()
        sha256 = hashlib.sha256(data).hexdigest()
        return Picture(number, item.modality, data, sha256=sha256)

    def identify(self, picture: Picture) -> str | None:
        if picture.data == b"bad":
            raise SourceError("no picture")
        return picture.uuid

    def encode(self, pictures: Iterable[Picture]) -> Iterator[Encoded]:
        if self.model == "never":
            raise EncoderError("vLLM did not start: no memory")
        self.is_running = True
        for picture in pictures:
            self.note("given", picture.number)
            while self.gate is not None and not self.gate.exists():
                time.sleep(0.001)
            if picture.data == b"ends":
                raise EncoderError("the engine ended")
            self.note("encoded", picture.number)
            yield Encoded(picture.number, picture.uuid or f"id-{picture.number}")

    def stop(self) -> None:
        pass

    def close(self) -> None:
        self.note("closed")
