# SPDX-License-Identifier: Apache-2.0
"""The two connectors that the hooks benchmark compares, filled and ready to be asked.

Ours is an S3ECConnector over a real Node (tier on disk, index, prefetcher and its loop), wired
by S3ECConnector itself; the bucket is in memory, and the engine and its model are not there. The
other is vLLM's own ECExampleConnector. The scheduling passes that are timed are
here too. Importing this module imports vllm.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from vllm.config import ECTransferConfig
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole
from vllm.distributed.ec_transfer.ec_connector.example_connector import ECExampleConnector
from vllm.multimodal.inputs import (
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    MultiModalSharedField,
    PlaceholderRange,
)
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from s3ec import codec
from s3ec.config import load_settings
from s3ec.connector import saves
from s3ec.connector.connector import S3ECConnector
from s3ec.connector.parts import Parts
from s3ec.dev.bench.corpus import NAMESPACE, key_of
from s3ec.dev.bench.engines import until
from s3ec.dev.bench.hooks import DECODING, HIT, KINDS, MISS, PENDING
from s3ec.dev.bench.measure import time_each
from s3ec.identity import Layout
from s3ec.index.maker import rebuild
from s3ec.modality import Record
from s3ec.node import Node
from s3ec.store.base import Blob
from s3ec.testing.memory_store import MemoryBucket, MemoryStore

IMAGES = 4  # of the larger kind of request
# A Gemma3 image: 256 embeddings between a few tokens that are text. The width does not matter
# to a hook, so the entries are kept small.
_ROWS = 256
_PLACEHOLDER_TOKENS = 260
_WIDTH = 4
_HEAD_TOKENS = 16
# Nothing may time out while the benchmark looks at what is pending.
_HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class Size:
    """How much of everything there is.

    Attributes:
        requests: Requests of each kind, and of each number of images.
        corpus: Keys in the index.
    """

    requests: int = 128
    corpus: int = 100_000


class _GatedStore(MemoryStore):
    """A bucket that never answers for some names, so that they stay pending."""

    def __init__(self, bucket: MemoryBucket, silent: set[str]) -> None:
        super().__init__(bucket)
        self._silent = silent

    async def get(self, name: str, *, max_bytes: int) -> Blob | None:
        if name in self._silent:
            await asyncio.Event().wait()
        return await super().get(name, max_bytes=max_bytes)


class Identifiers:
    """Content hashes as vLLM makes them, the same in every run."""

    def __init__(self) -> None:
        self._random = random.Random(20_260_101)

    def take(self, count: int) -> list[str]:
        """Some that were not given out before."""
        return [f"{self._random.getrandbits(256):064x}" for _ in range(count)]


def make_request(name: str, identifiers: Sequence[str]) -> Request:
    """A request of vLLM's own kind with these images, nothing of it computed."""
    is_embed = torch.ones(_PLACEHOLDER_TOKENS, dtype=torch.bool)
    is_embed[: (_PLACEHOLDER_TOKENS - _ROWS)] = False
    features = []
    for number, identifier in enumerate(identifiers):
        offset = _HEAD_TOKENS + number * _PLACEHOLDER_TOKENS
        shared = MultiModalSharedField(batch_size=1)
        data = MultiModalKwargsItem(
            {
                "pixel_values": MultiModalFieldElem(data=torch.zeros(4), field=shared),
                "image_grid_thw": MultiModalFieldElem(data=torch.tensor([1, 32, 32]), field=shared),
            }
        )
        position = PlaceholderRange(offset, _PLACEHOLDER_TOKENS, is_embed)
        # vLLM's scheduler asks for this too, and each placeholder remembers it: whoever comes
        # first pays for a cumulative sum in torch, which is no cost of a connector.
        position.get_num_embeds()
        features.append(MultiModalFeatureSpec(data, "image", identifier, position, identifier))
    tokens = [1] * (_HEAD_TOKENS + len(identifiers) * _PLACEHOLDER_TOKENS + _HEAD_TOKENS)
    return Request(
        request_id=name,
        prompt_token_ids=tokens,
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        mm_features=features,
    )


def step_output(freed: Sequence[str] = ()) -> SchedulerOutput:
    """What vLLM hands to build_connector_meta."""
    output = SchedulerOutput.make_empty()
    output.free_encoder_mm_hashes = list(freed)
    output.total_num_scheduled_tokens = 1
    return output


class Rig:
    """Our connector, with requests of every kind. Use as ``with rig(...) as made``."""

    def __init__(self, scratch: Path, size: Size) -> None:
        self.size = size
        identifiers = Identifiers()
        self.hits = identifiers.take(size.requests * IMAGES)
        self.misses = identifiers.take(size.requests * IMAGES)
        self.pending = identifiers.take(size.requests * IMAGES)
        self._unseen = identifiers.take(max(size.corpus - 2 * len(self.hits), 0))
        store = self._store(Layout(NAMESPACE.name))
        loaded = load_settings(
            {
                "bucket": "in-memory",
                "cache_dir": str(scratch / "cache"),
                "min_free_bytes": 0,
                "index_refresh_s": 86400,  # once: the loop has to be idle afterwards
                "wait": "always",
                "defer_timeout_s": 60,
                "read_timeout_s": 60,  # what stays pending is no silence before then
            }
        )
        with mock.patch("s3ec.node.open_store", return_value=store):
            self.node = Node(loaded.settings, NAMESPACE, name="s3ec-bench")
        limits = self.node.prefetcher._limits
        self.node.prefetcher._limits = dataclasses.replace(limits, deadline_s=_HOUR_S)
        self.shell = scheduler_shell(self.node)
        self.requests = {
            (kind, images): self._requests(kind, images) for kind in KINDS for images in (1, IMAGES)
        }

    def _store(self, layout: Layout) -> MemoryStore:
        bucket = MemoryBucket()
        for name in self.hits:
            bucket.objects[layout.object(key_of(name))] = _entry(name, layout.namespace)
        silent = {layout.object(key_of(name)) for name in [*self.pending, *self._unseen]}
        bucket.objects.update(dict.fromkeys(silent, b"never read"))
        asyncio.run(rebuild(MemoryStore(bucket), layout))
        return _GatedStore(bucket, silent)

    def _requests(self, kind: str, images: int) -> list[Request]:
        pool = {MISS: self.misses, PENDING: self.pending}.get(kind, self.hits)
        return [
            make_request(f"{kind}-{images}-{n}", pool[n * images : (n + 1) * images])
            for n in range(self.size.requests)
        ]

    def computed_tokens(self, kind: str, request: Request) -> int:
        """What vLLM would say is in the KV cache."""
        return request.num_tokens if kind is DECODING else 0

    def calls(self, kind: str, images: int) -> list[tuple[Request, int]]:
        """Arguments of ensure_cache_available for every request of a kind."""
        return [(r, self.computed_tokens(kind, r)) for r in self.requests[kind, images]]

    def settle(self) -> None:
        """Wait until the loop's thread has nothing to do, so that it takes no time from us."""
        for _ in range(3):
            self.node.loop.run(asyncio.sleep(0), timeout_s=30)

    def end_step(self, freed: Sequence[str] = ()) -> None:
        """Close the scheduling pass, as vLLM does once per step."""
        self.shell.build_connector_meta(step_output(freed))

    def fill(self) -> None:
        """Wait for the index and bring every hit to this node, through the hooks themselves."""
        record = self.node.records.settle("image", Record(_WIDTH, "bfloat16"))
        self.node.loop.run(record, timeout_s=30)
        until(lambda: self.node.index.loaded, "the index is there", pause_s=0.02)
        hits = self.requests[HIT, IMAGES]

        def all_here() -> bool:
            here = [self.shell.ensure_cache_available(request, 0) for request in hits]
            self.end_step()
            return all(here)  # of a list: every one has to be asked for

        until(all_here, "the hits are on this node", pause_s=0.02)
        # Only now, or those that never come would take all places.
        for request in self.requests[PENDING, IMAGES]:
            self.shell.ensure_cache_available(request, 0)
        self.end_step()
        self.settle()
        self.check()

    def check(self) -> None:
        """Compare what each kind is called with what the hooks answer.

        Raises:
            RuntimeError: Something else would be measured than the row says.
        """
        for kind, images in self.requests:
            available: set[bool] = set()
            granted: set[bool] = set()
            for request, tokens in self.calls(kind, images):
                available.add(self.shell.ensure_cache_available(request, tokens))
                granted.update(map(self.shell.has_cache_item, identifiers_of([request])))
            if available != {kind is not PENDING}:
                raise RuntimeError(f"{kind} of {images}: ensure_cache_available said {available}")
            if kind is not DECODING and granted != {kind is HIT}:
                raise RuntimeError(f"{kind} of {images}: has_cache_item said {granted}")
            self.end_step()
            self.end_requests(kind, images)
        errors = self.node.counters.get("internal_errors")
        if errors:
            raise RuntimeError(f"{errors:.0f} hooks raised; see the log")

    def end_requests(self, kind: str, images: int) -> None:
        """Have the connector forget how long these waited, or it would stop deferring them."""
        for request in self.requests[kind, images]:
            self.shell.request_finished(request)


def identifiers_of(requests: Sequence[Request]) -> list[str]:
    """All identifiers in some requests, in their order."""
    return [feature.identifier for request in requests for feature in request.mm_features]


def _entry(identifier: str, namespace: str) -> bytes:
    tensor = torch.zeros(_ROWS, _WIDTH, dtype=torch.bfloat16)
    header = saves.describe(tensor, identifier=identifier, namespace=namespace, modality="image")
    return codec.encode_header(header) + bytes(saves.tensor_bytes(tensor))


def scheduler_shell(node: Node) -> S3ECConnector:
    """S3ECConnector as its constructor leaves it, without the model that it would look into."""
    config = engine_config("S3ECConnector", {})
    config.model_config = SimpleNamespace(multimodal_config=None)
    parts = Parts(config)
    # vLLM would look up the class of the model that is not there.
    all_is_shared = mock.patch("s3ec.connector.forms.unshared_modalities", return_value=())
    with _as_for_qwen2_vl(), all_is_shared:
        parts.start_scheduler(node)
    return S3ECConnector(config, ECConnectorRole.SCHEDULER, parts=parts)


def _as_for_qwen2_vl() -> AbstractContextManager[object]:
    """What vLLM finds out about a model that may be asked without pixels.

    Telling whether they are there costs a look more than for other models.
    """
    try:
        from vllm.distributed.ec_transfer.ec_connector import utils
    except ImportError:  # older than such requests
        return nullcontext()
    return mock.patch.object(
        utils.PlaceholderMetadataResolver,
        "fields_for",
        lambda _self, modality: {"image_grid_thw"} if modality == "image" else set(),
    )


@contextmanager
def rig(scratch: Path, size: Size) -> Iterator[Rig]:
    """A rig that is filled and checked, ended afterwards.

    Raises:
        RuntimeError: It cannot be filled, or answers other than it should.
    """
    made = Rig(scratch, size)
    try:
        made.fill()
        yield made
    finally:
        made.node.close(10)


def example(folder: Path, hits: Sequence[str], misses: Sequence[str]) -> ECExampleConnector:
    """vLLM's ECExampleConnector over a folder that holds the hits.

    It makes a folder for every identifier that it is asked for; here they are there already,
    as they would be the second time.
    """
    for identifier in hits:
        (folder / identifier).mkdir(parents=True)
        (folder / identifier / "encoder_cache.safetensors").touch()
    for identifier in misses:
        (folder / identifier).mkdir(parents=True)
    connector = ECExampleConnector(
        vllm_config=engine_config("ECExampleConnector", {"shared_storage_path": str(folder)}),
        role=ECConnectorRole.SCHEDULER,
    )
    if not all(map(connector.has_cache_item, hits)) or any(map(connector.has_cache_item, misses)):
        raise RuntimeError("ECExampleConnector does not find what is there")
    return connector


def engine_config(name: str, extra: dict[str, Any], *, role: str = "ec_both") -> Any:
    """As much of a VllmConfig as the connectors read."""
    transfer = ECTransferConfig(ec_connector=name, ec_role=role, ec_connector_extra_config=extra)
    return SimpleNamespace(
        ec_transfer_config=transfer,
        model_config=None,
        scheduler_config=SimpleNamespace(max_num_batched_tokens=8192),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
        max_concurrent_batches=2,
    )


Times = Mapping[str, Sequence[int]]
_IDLE_STEPS = 200


@dataclass(frozen=True, slots=True)
class HookCalls:
    """Hook calls to run under strace, and how many they are."""

    run: Callable[[], object]
    calls: int


class Passes:
    """One pass per case. Every pass leaves the rig as it found it."""

    def __init__(self, rig: Rig, example: Any) -> None:
        self._rig = rig
        self._shell = rig.shell
        self._example = example

    def cases(self) -> dict[str, Callable[[], Times]]:
        """All passes, for measure.interleave."""
        made: dict[str, Callable[[], Times]] = {}
        for kind in KINDS:
            for images in (1, IMAGES):
                made[f"{kind}/{images}"] = self._asking(kind, images)
        return made | {
            "loading": self._load_steps,
            "idle": self._idle_steps,
            "example": self._ask_example,
            "example loading": self._example_steps,
        }

    def _asking(self, kind: str, images: int) -> Callable[[], Times]:
        """For each request ensure_cache_available, then has_cache_item, timed the second time.

        The first time it may begin to wait; later ones are how vLLM asks at every step.
        """
        rig, shell = self._rig, self._shell
        case = f"{kind}/{images}"
        # vLLM asks nothing more of a request that decodes.
        plan = [
            (call, [] if kind is DECODING else [(n,) for n in identifiers_of([call[0]])])
            for call in rig.calls(kind, images)
        ]

        def ask() -> Times:
            for _ in range(2):
                ensure: list[int] = []
                has: list[int] = []
                for call, names in plan:
                    ensure += time_each(shell.ensure_cache_available, [call])
                    has += time_each(shell.has_cache_item, names)
                rig.end_step()
            rig.end_requests(kind, images)
            return {f"ensure warm/{case}": ensure, f"has warm/{case}": has}

        return ask

    def _load_steps(self) -> Times:
        """Whole steps: a request of four images that are loaded, then freed on the device."""
        shell = self._shell
        alloc: list[int] = []
        meta: list[int] = []
        freed: list[str] = []
        for request in self._rig.requests[HIT, IMAGES]:
            names = identifiers_of([request])
            shell.ensure_cache_available(request, 0)
            for name in names:
                shell.has_cache_item(name)
            alloc += time_each(
                shell.update_state_after_alloc, [(request, n) for n in range(IMAGES)]
            )
            # What the device drops is not given back to the tier, so the next round hits again.
            meta += time_each(shell.build_connector_meta, [(step_output(freed),)])
            freed = names
        for _ in range(4):  # until the steps in flight are over
            self._rig.end_step(freed)
        return {"alloc/load": alloc, "meta/loads": meta}

    def _idle_steps(self) -> Times:
        steps = [(step_output(),) for _ in range(_IDLE_STEPS)]
        return {"meta/idle": time_each(self._shell.build_connector_meta, steps)}

    def _ask_example(self) -> Times:
        rig, example = self._rig, self._example
        times = {"noop": time_each(example.ensure_cache_available, rig.calls(HIT, IMAGES))}
        for case, names in (("hit", rig.hits), ("miss", rig.misses)):
            calls = [(name,) for name in names]
            for _ in range(2):
                times[f"example warm/{case}"] = time_each(example.has_cache_item, calls)
        return times

    def _example_steps(self) -> Times:
        alloc: list[int] = []
        meta: list[int] = []
        for request in self._rig.requests[HIT, IMAGES]:
            indexes = [(request, n) for n in range(IMAGES)]
            alloc += time_each(self._example.update_state_after_alloc, indexes)
            meta += time_each(self._example.build_connector_meta, [(step_output(),)])
        return {"example/alloc": alloc, "example/meta": meta}

    def hot_path(self) -> HookCalls:
        """ensure_cache_available and has_cache_item for the requests of every kind."""
        shell = self._shell
        calls = [call for key in self._rig.requests for call in self._rig.calls(*key)]
        plan = [(request, tokens, identifiers_of([request])) for request, tokens in calls]

        def run() -> None:
            for request, tokens, names in plan:
                shell.ensure_cache_available(request, tokens)
                for name in names:
                    shell.has_cache_item(name)

        return HookCalls(run, sum(1 + len(names) for _, _, names in plan))

    def example_path(self) -> HookCalls:
        """has_cache_item of the Example for every hit."""

        def run() -> None:
            for name in self._rig.hits:
                self._example.has_cache_item(name)

        return HookCalls(run, len(self._rig.hits))
