# SPDX-License-Identifier: Apache-2.0
"""Random workloads whose adapters touch the encoder, are slow to be read, and are reloaded."""

from __future__ import annotations

import dataclasses
import random
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from s3ec.connector import adapters
from s3ec.weights import Adapter

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")
scheduler = pytest.importorskip("tests.fuzz.scheduler")
connectors = pytest.importorskip("tests.fuzz.connectors")
engine = pytest.importorskip("tests.fuzz.engine")
outside = pytest.importorskip("tests.fuzz.outside")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

SEEDS = range(40)
_RELOADS, _ENDED_LOOKS = 0.03, 0.7  # shares of the passes
_BY_CONTENT = re.compile(r"-[0-9a-f]{16}:")


class Files:
    """The adapters' files: a version for each path."""

    def __init__(self) -> None:
        self.versions: Counter[str] = Counter()

    def read(self, path: str, known: Adapter | None = None) -> Adapter:
        digest = f"{self.versions[path]:016x}"
        return known if known is not None and known.digest == digest else Adapter((), digest)


def rank_of(kind: type[Any], seen: Counter[str]) -> type[Any]:
    """The played worker, given vLLM's encoder cache as the connector's shell gives it."""

    class Rank(kind):  # type: ignore[misc,valid-type]
        def begin(self, cache: Any, plan: Any) -> None:
            super().begin(adapters.AdapterCache(cache, plan), plan)

        def load(self, cache: Any, plan: Any) -> None:
            super().load(adapters.AdapterCache(cache, plan), plan)
            seen["loads"] += sum(load.identifier in plan.adapters for load in plan.loads)

        def save(self, cache: Any, identifier: str, plan: Any) -> None:
            ours = adapters.name_in_plan(identifier, plan)
            seen["saves"] += ours != identifier
            super().save(adapters.AdapterCache(cache, plan), ours, plan)

    return Rank


def wire_of(kind: type[Any], files: Files, seen: Counter[str]) -> type[Any]:
    """s3ec's halves behind AdapterNames."""

    class Wire(kind):  # type: ignore[misc,valid-type]
        def __init__(self, options: Any, needs_embedding: Callable[[Any], bool], bench: Any):
            super().__init__(options, needs_embedding, bench)
            self._looks: list[Callable[[], None]] = []
            self._chance = random.Random(repr(options))
            self._loras: dict[str, Any] = {}
            self._inner = self.half
            self.half = self._names = adapters.AdapterNames(
                self._inner,
                start=self._looks.append,
                needs_embedding=needs_embedding,
                defer_timeout_s=options.defer_timeout_s,
                counters=self.counters,
                clock=self.clock,
            )

        def ensure_cache_available(self, request: Any, num_computed_tokens: int) -> bool:
            if request.lora_request is not None:
                self._loras[request.lora_request.lora_name] = request.lora_request
            return bool(super().ensure_cache_available(request, num_computed_tokens))

        def build_connector_meta(self, output: Any) -> Any:
            if self._loras and self._chance.random() < _RELOADS:
                lora = self._chance.choice(list(self._loras.values()))
                files.versions[lora.lora_path] += 1
                lora.load_inplace = True
                self._names.adapter_loaded(lora)
                seen["reloads"] += 1
            while self._looks and self._chance.random() < _ENDED_LOOKS:
                self._looks.pop(0)()
            return super().build_connector_meta(output)

        def check_failure(self, name: str) -> None:
            request = self.requests.get(name)
            if request is None or request.lora_request is None:
                super().check_failure(name)
            # Else it may be failed at once: what its adapter is may not be known, and what is
            # stored under the adapter's content may have other rows.

        def _count_deferred(self) -> None:
            """Not checked: who waits for a look at adapter files does not count as deferred."""

        def check_grant(self, identifier: str) -> None:
            super().check_grant(self._names.name_of(identifier))

    return Wire


def test_no_promise_is_broken_while_adapters_come_and_are_replaced(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    files, seen = Files(), Counter[str]()
    plain = outside.embedding

    def embedding(identifier: str, rows: int, weights: int) -> Any:
        """The same under every digest: only its name changes with a reload here."""
        return plain(_BY_CONTENT.sub(":", identifier), rows, weights)

    for module in (outside, connectors, engine):
        monkeypatch.setattr(module, "embedding", embedding)
    monkeypatch.setattr(adapters, "read_adapter", files.read)
    monkeypatch.setattr(connectors, "Rank", rank_of(connectors.Rank, seen))
    wire = wire_of(connectors.S3EC, files, seen)

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
    assert min(seen[what] for what in ("loads", "saves", "reloads")) > len(SEEDS), seen
