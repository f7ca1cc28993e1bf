# SPDX-License-Identifier: Apache-2.0
"""Random workloads whose adapters touch the encoder, are slow to be read, and are replaced."""

from __future__ import annotations

import dataclasses
import random
import re
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from s3ec.connector import adapters
from s3ec.weights import UnknownFilesError

if TYPE_CHECKING:
    from pathlib import Path

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")
scheduler = pytest.importorskip("tests.fuzz.scheduler")
connectors = pytest.importorskip("tests.fuzz.connectors")
engine = pytest.importorskip("tests.fuzz.engine")
outside = pytest.importorskip("tests.fuzz.outside")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

SEEDS = range(40)
# Shares of the passes. Only some runs have any of the first two: what they befall is not cached.
_RELOADS, _REPLACED, _ENDED_READS = 0.01, 0.06, 0.7
_BY_CONTENT = re.compile(r"-[0-9a-f]{16}:")


class Files:
    """The adapters' files: a version for each path, and what was read of it.

    Attributes:
        versions: What lies there.
        read: Path to the version that was read first.
        stale: Paths that were found to have changed since.
    """

    def __init__(self) -> None:
        self.versions: Counter[str] = Counter()
        self.read: dict[str, str] = {}
        self.stale: set[str] = set()

    def read_adapter(self, path: str, known: Any = None) -> tuple[str, Any]:
        digest = f"{self.versions[path]:016x}"
        if known is None:
            self.read[path] = digest
        elif known[0] != digest:
            self.stale.add(path)
            raise UnknownFilesError("its files change while they are in use")
        return digest, ()


def wire_of(kind: type[Any], seen: Counter[str], monkeypatch: pytest.MonkeyPatch) -> type[Any]:
    """s3ec's halves, told of adapters."""

    class Wire(kind):  # type: ignore[misc,valid-type]
        def make_adapters(self, needs_embedding: Callable[[Any], bool]) -> Any:
            self._reads: list[Callable[[], None]] = []
            self._chance = random.Random(f"{self.options} rough")
            self._is_rough = self._chance.random() < 0.5
            self._loras: dict[str, Any] = {}
            self._unknown: set[str] = set()  # names under which nothing may be cached any more
            self._files = Files()
            monkeypatch.setattr(adapters, "read_adapter", self._files.read_adapter)
            wait_s = self.options.defer_timeout_s

            def longest_wait_s(request: Any) -> float:
                bare = any(map(needs_embedding, request.mm_features))
                return max(wait_s, connectors.NO_PIXELS_WAIT_S) if bare else wait_s

            return adapters.Adapters(self._reads.append, longest_wait_s, self.clock)

        def stored_name(self, identifier: str) -> str:
            name, _, tail = identifier.rpartition(":")
            lora = self._loras.get(name)
            return f"{name}-{self._files.read.get(lora.lora_path)}:{tail}" if lora else identifier

        def ensure_cache_available(self, request: Any, num_computed_tokens: int) -> bool:
            lora = request.lora_request
            if lora is not None:
                self._loras[lora.lora_name] = lora
                if lora.lora_path in self._files.stale:
                    self._unknown.add(lora.lora_name)
            return bool(super().ensure_cache_available(request, num_computed_tokens))

        def has_cache_item(self, identifier: str) -> bool:
            granted = bool(super().has_cache_item(identifier))
            name = identifier.rpartition(":")[0]
            if granted and name in self._unknown:
                raise outside.BrokenPromiseError("granted under an unknown adapter", name)
            return granted

        def build_connector_meta(self, output: Any) -> Any:
            plan = super().build_connector_meta(output)
            for identifier in plan.saves:
                name = identifier.rpartition(":")[0]
                if name in self._unknown:
                    raise outside.BrokenPromiseError("saved under an unknown adapter", name)
                seen["saves"] += name in self._loras
            seen["loads"] += sum(bool(load.renamed) for load in plan.loads)
            lora = self._chance.choice(list(self._loras.values())) if self._loras else None
            if lora is not None and self._is_rough and self._chance.random() < _RELOADS:
                again = type(lora)(
                    lora.lora_name, lora.lora_int_id, lora.lora_path, load_inplace=True
                )
                self.half.adapter_loaded(again)
                self._unknown.add(lora.lora_name)
                seen["reloads"] += 1
            if lora is not None and self._is_rough and self._chance.random() < _REPLACED:
                self._files.versions[lora.lora_path] += 1
            while self._reads and self._chance.random() < _ENDED_READS:
                self._reads.pop(0)()
            return plan

        def close(self) -> None:
            seen["replaced"] += len(self._files.stale)
            super().close()

        def check_failure(self, name: str) -> None:
            request = self.requests.get(name)
            if request is None or request.lora_request is None:
                super().check_failure(name)
            # Else it may be failed at once: nobody may know what its adapter is.

    return Wire


def test_no_promise_is_broken_while_adapters_come_and_are_replaced(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen = Counter[str]()
    plain = outside.embedding

    def embedding(identifier: str, rows: int, weights: int) -> Any:
        """The same under vLLM's name and under the one that it is stored by."""
        return plain(_BY_CONTENT.sub(":", identifier), rows, weights)

    for module in (outside, connectors, engine):
        monkeypatch.setattr(module, "embedding", embedding)
    wire = wire_of(connectors.S3EC, seen, monkeypatch)

    def with_adapters(options: Any, habits: Any) -> tuple[Any, Any]:
        """Few pictures and a small device cache: what was saved is soon asked for again."""
        # Others do not know an adapter's content here, so only what this engine saves is found.
        role = "both" if options.role == "consumer" else options.role
        return (
            dataclasses.replace(options, role=role, cache_rows=72),
            dataclasses.replace(habits, adapters=2, pictures=3, requests=40),
        )

    with scheduler.fuzzing(tmp_path / "model") as fuzz:
        verdicts = [fuzz.run(seed, wire=wire, change=with_adapters) for seed in SEEDS]
    broken = [(one.seed, one.failure) for one in verdicts if one.failure and not one.is_vllms]
    assert broken == []
    assert min(seen[what] for what in ("loads", "saves")) > len(SEEDS), seen
    assert min(seen[what] for what in ("reloads", "replaced")) > 5, seen
