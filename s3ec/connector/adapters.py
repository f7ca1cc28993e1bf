# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters that touch the encoder: an embedding is named by an adapter's content.

With ``enable_tower_connector_lora`` vLLM calls an image ``adapter:hash``, whatever the adapter's
files hold. They are hashed whole, once; the hash is a part of the name here. Where nobody can know
what the workers hold, images are neither loaded nor saved.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from s3ec.connector.messages import FileFacts
from s3ec.identity import without_key
from s3ec.weights import UnknownFilesError, place_of

log = logging.getLogger(__name__)

_LOOK_EVERY_S = 1.0
_Content = tuple[str, FileFacts]  # 16 hex digits, and the files


def facts_of(paths: Iterable[str]) -> FileFacts:
    """What changes with each write of some files; empty where one cannot be found."""
    with contextlib.suppress(OSError):
        facts = [(path, os.stat(path)) for path in paths]
        return tuple((p, s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino) for p, s in facts)
    return ()


def read_adapter(path: str, known: _Content | None = None) -> _Content:
    """Hash every byte of an adapter; one that is known is only looked at.

    Raises:
        UnknownFilesError, OSError: vLLM would find no files here; they change; they are unreadable.
    """
    if known is None:
        place = place_of(path, None, None)
        kinds = [place / f"adapter_model.{kind}" for kind in ("safetensors", "bin", "pt")]
        weights = next(filter(Path.is_file, kinds), kinds[0])  # as vLLM 0.32 looks (lora_model.py)
        files = facts_of(map(str, (place / "adapter_config.json", weights)))
        if not files:
            raise UnknownFilesError(f"{place} has not the files of an adapter")
        digest = hashlib.sha256(b"s3ec adapter 2\n")
        for each, *_ in files:
            with open(each, "rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        known = digest.hexdigest()[:16], files
    if facts_of(each for each, *_ in known[1]) != known[1]:
        raise UnknownFilesError("its files change while they are in use")
    return known


@dataclass(slots=True, eq=False)
class Adapter:
    """One name of an adapter: pending, then known by its content; once refused, refused."""

    name: str
    number: int
    path: str
    content: _Content | None = None
    refused: bool = False
    looked_s: float | None = None  # last at its files

    def name_of(self, identifier: str) -> str:
        """``adapter-digest:hash`` for vLLM's ``adapter:hash``; what has no key if it is unknown."""
        if not identifier.startswith(f"{self.name}:"):  # the adapter does not change the encoder
            return identifier
        if self.content is None:
            return without_key(identifier)
        return f"{self.name}-{self.content[0]}{identifier[len(self.name) :]}"

    def refuse(self, why: str) -> None:
        """Say once that nothing of it is loaded or saved until the engine is started again."""
        if not self.refused:
            log.warning("nothing is loaded or saved under adapter %s: %s", self.name, why)
        self.refused, self.content = True, None


class Adapters:
    """What an engine's adapters are. One thread: the scheduler's; others read files for it."""

    def __init__(
        self,
        start: Callable[[Callable[[], None]], None],
        longest_wait_s: Callable[[Any], float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Know none; ``start`` has a function run on a thread that may wait."""
        self._start, self._longest_wait_s, self._clock = start, longest_wait_s, clock
        self._by_name: dict[str, Adapter] = {}
        self._to_look_at: dict[Adapter, None] = {}
        self._found: deque[tuple[Adapter, _Content | None, str]] = deque()

    def of(self, lora: Any) -> Adapter:
        """The adapter that vLLM's LoRARequest is about."""
        adapter = self._by_name.get(lora.lora_name)
        if adapter is None:
            adapter = Adapter(lora.lora_name, lora.lora_int_id, lora.lora_path)
            for other in [one for one in self._by_name.values() if one.number == adapter.number]:
                other.refuse(f"{adapter.name} has its number")
                adapter.refuse(f"{other.name} has its number")
            self._by_name[adapter.name] = adapter
            self._to_look_at[adapter] = None
        elif (adapter.number, adapter.path) != (lora.lora_int_id, lora.lora_path):
            adapter.refuse("it came again with another number or path")
        if getattr(lora, "load_inplace", False):
            adapter.refuse("it is loaded in place")
        return adapter

    def is_ready(self, adapter: Adapter, request: Any) -> bool:
        """Whether a request need not wait until its adapter is read."""
        while self._found:
            one, content, problem = self._found.popleft()
            if content is None:
                one.refuse(problem)
            elif not one.refused:
                one.content = content
        since_s = 0.0 if adapter.looked_s is None else self._clock() - adapter.looked_s
        if adapter.content is not None and since_s >= _LOOK_EVERY_S:
            self._to_look_at[adapter] = None
        known = adapter.refused or adapter.content is not None
        return known or since_s >= self._longest_wait_s(request)

    def look(self) -> None:
        """Have files looked at that requests have asked for; between two passes."""
        for adapter in self._to_look_at:
            adapter.looked_s = self._clock()
            with contextlib.suppress(RuntimeError):  # the loop has ended; so will this engine
                self._start(partial(self._read, adapter, adapter.content))
        self._to_look_at.clear()

    def _read(self, adapter: Adapter, known: _Content | None) -> None:
        content, problem = None, "its files cannot be read"
        try:
            content = read_adapter(adapter.path, known)
        except (UnknownFilesError, OSError) as exc:
            problem = str(exc)
        finally:  # whatever happens, nobody waits for a look that has ended
            self._found.append((adapter, content, problem))
