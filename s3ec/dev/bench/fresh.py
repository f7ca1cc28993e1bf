# SPDX-License-Identifier: Apache-2.0
"""``bench fresh``: how soon an embedding that was just encoded is a hit elsewhere.

A producer in a process of its own saves one embedding of 2.75 MB after another, as the worker half
does. Two consumers look for each: one shares the producer's ``cache_dir`` and is asked by requests
that name nothing; the other has a disk of its own, with the bucket on loopback in between, and its
request names the embedding. Time runs from the hook that saves to the hook that grants. As vLLM's
idle scheduler does, consumers look once a millisecond.

Then two real engines, an encoder and a language instance, on two tiers: how often each picture is
encoded, and the time to the first token beside a language instance that encodes it once more.
"""

from __future__ import annotations

import contextlib
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from s3ec.dev.bench import measure
from s3ec.dev.bench.children import Child
from s3ec.dev.bench.context import Bench, CannotMeasureError, Context
from s3ec.dev.bench.result import Spec
from s3ec.dev.rigs.vllm_cpu import ONE_PROCESS

if TYPE_CHECKING:
    from s3ec.connector.scheduler import SchedulerHalf
    from s3ec.dev.bench.corpus import Corpus
    from s3ec.dev.rigs.engine import EngineProcess
    from s3ec.node import Node

SAME, OTHER = "fresh.same_node_ms", "fresh.other_node_ms"
ENCODES, TTFT = "fresh.encodes_per_image", "fresh.ttft_ratio"
ROWS = (
    Spec(SAME, "ms", "<= 60"),
    Spec(OTHER, "ms", "<= 300"),
    Spec(ENCODES, "1", "== 1.0"),
    Spec(TTFT, "ratio", "<= 1.0"),
)
SAVES = 200
_SAVES_QUICK = 5
_WARM_UP = 3
_LOOK_S = 0.001
# An embedding that nobody found for so long is lost, and the benchmark has failed.
_PATIENCE_S = 30.0
_PICTURES, _PICTURES_QUICK = 24, 2
# What encoding a picture takes in both engines. They sleep: the processors are free then, as beside
# a GPU.
_ENCODE_S = 0.3


def run(context: Context) -> None:
    """Measure; needs the SeaweedFS binary, torch and vLLM.

    Raises:
        CannotMeasureError: One of them is not there.
    """
    from s3ec.dev.bench.corpus import filled

    with filled(context, 1) as (_, corpus):
        measure_saves(context, corpus)
        measure_pair(context, corpus)


# -- from a save to a hit --------------------------------------------------------------------------


def measure_saves(context: Context, corpus: Corpus) -> None:
    """Report both delays."""
    try:
        import torch  # noqa: F401  the producer will
    except ImportError as exc:
        raise CannotMeasureError(f"no torch, and so no saves: {exc}") from exc
    count = _SAVES_QUICK if context.quick else SAVES
    source = random.Random(4)
    names = [f"{source.getrandbits(256):064x}" for _ in range(2 * (_WARM_UP + count))]
    folder = context.scratch
    waited: dict[str, list[float]] = {SAME: [], OTHER: []}
    with contextlib.ExitStack() as stack:
        producer = stack.enter_context(Child(_produce, corpus, folder / "tier"))
        consumers = {
            SAME: stack.enter_context(_consumer(corpus, folder / "tier")),
            OTHER: stack.enter_context(_consumer(corpus, folder / "other tier")),
        }
        producer.answer()  # that it is ready
        context.say(f"{count} saves for each of two consumers")
        with measure.no_collection():
            for number, name in enumerate(names):
                row = (SAME, OTHER)[number % 2]
                producer.tell(name)
                found_s = consumers[row].find(name, named=row is OTHER)
                waited[row].append(1000 * (found_s - producer.answer()))
    for row, ms in waited.items():
        kept = ms[_WARM_UP:]
        context.report(
            row,
            measure.percentile(kept, 99),
            samples=len(kept),
            detail={
                "spread": measure.spread(kept),
                "p50_ms": statistics.median(kept),
                "first_ms": ms[0],
                "note": "p99, from save_caches to the grant; 2.75 MB each",
            },
        )


def _produce(pipe: Connection, corpus: Corpus, folder: Path) -> None:
    """A child's whole life: save what it is told to, and tell when that began."""
    import torch

    from s3ec.connector.messages import Save
    from s3ec.connector.saves import SaveQueue
    from s3ec.dev.bench.corpus import MODALITY, SHAPE
    from s3ec.node import Node

    with corpus.environment():
        node = Node(corpus.settings(folder, "auto"), corpus.namespace, name="s3ec-bench-producer")
        node.follow_the_bucket()
        saves = SaveQueue(node, budget_bytes=2**28, overflow="drop")
        tensor = torch.randn(SHAPE.rows, SHAPE.width).to(torch.bfloat16)
        pipe.send("ready")
        with contextlib.suppress(EOFError):
            while True:
                name = pipe.recv()
                began_s = time.monotonic()
                if not saves.put(name, Save(MODALITY, {}), tensor):
                    raise RuntimeError("the save was dropped")
                pipe.send(began_s)
        saves.drain(20)
        node.close(10)


class _Consumer:
    """A scheduler half over a real node, asked as vLLM's scheduler asks."""

    def __init__(self, half: SchedulerHalf) -> None:
        self._half = half
        self._requests = 0

    def find(self, name: str, *, named: bool) -> float:
        """Look for one embedding until it is granted.

        Args:
            name: Its identifier.
            named: By one request that names it and waits. Otherwise by one request after the
                other, each of which would encode it instead of waiting.

        Returns:
            When it was granted, in monotonic seconds.

        Raises:
            RuntimeError: It was not found in time, or a request that names it did not wait.
        """
        half, end_s = self._half, time.monotonic() + _PATIENCE_S
        request = self._request(name, named=named)
        while time.monotonic() < end_s:
            if half.ensure_cache_available(request, 0):
                if half.has_cache_item(name):
                    found_s = time.monotonic()
                    half.request_finished(request)
                    half.build_connector_meta([], scheduled_tokens=0)
                    return found_s
                if named:
                    raise RuntimeError("a request that names its embedding was not deferred")
                half.request_finished(request)
                request = self._request(name, named=named)
            half.build_connector_meta([], scheduled_tokens=0)
            time.sleep(_LOOK_S)
        raise RuntimeError(f"not found after {_PATIENCE_S:.0f} s")

    def _request(self, name: str, *, named: bool) -> Any:
        from s3ec.dev.bench.corpus import MODALITY, SHAPE

        self._requests += 1
        position = SimpleNamespace(offset=0, length=SHAPE.rows, get_num_embeds=lambda: SHAPE.rows)
        return SimpleNamespace(
            request_id=f"request {self._requests}",
            mm_features=[
                SimpleNamespace(
                    identifier=name,
                    modality=MODALITY,
                    data={"pixel_values": 1},
                    mm_position=position,
                )
            ],
            num_prompt_tokens=SHAPE.rows + 1,
            arrival_time=time.time(),
            ec_transfer_params={name: {"metadata": {}}} if named else None,
        )


@contextlib.contextmanager
def _consumer(corpus: Corpus, folder: Path) -> Iterator[_Consumer]:
    from s3ec.node import Node

    with corpus.environment():
        node = Node(corpus.settings(folder, "auto"), corpus.namespace, name="s3ec-bench")
    try:
        node.follow_the_bucket()
        yield _Consumer(_half(node))
    finally:
        node.close(10)


def _half(node: Node) -> SchedulerHalf:
    """As an ``ec_consumer`` has it by default."""
    from s3ec.connector.scheduler import SchedulerHalf
    from s3ec.connector.vllm_config import Role

    role = Role(
        producer=False,
        consumer=True,
        window_tokens=8192,
        ranks=1,
        steps_in_flight=1,
        defer_timeout_s=node.settings.defer_timeout_s,
    )
    return SchedulerHalf(
        role,
        index=node.index,
        local=node.local,
        prefetcher=node.prefetcher,
        store=node.breaker,
        disk=node.loop.watch,
        needs_embedding=lambda _: False,
        placeholder_of=lambda _: {},
        counters=node.counters,
        naming=node.naming,
    )


# -- an encoder and a language instance ------------------------------------------------------------


def measure_pair(context: Context, corpus: Corpus) -> None:
    """Report how often each picture is encoded, and what that does to the first token."""
    from s3ec.dev.bench.hooks import need_vllm

    need_vllm(context)
    from s3ec.dev.rigs.engine import image, text
    from s3ec.dev.rigs.pictures import write_pictures

    count = _PICTURES_QUICK if context.quick else _PICTURES
    pictures = iter(write_pictures(context.scratch / "pictures", 2 * (count + 1)))

    def ask(*, named: bool) -> Callable[[], float]:
        def round_() -> float:
            prompt = [image(next(pictures)), text("what is to be seen in it, and where?")]
            started = time.monotonic()
            (answer,) = encoder.chat([prompt], max_tokens=1)
            params = answer["ec_transfer_params"] if named else None
            language.chat([prompt], max_tokens=1, named=params)
            return time.monotonic() - started

        return round_

    with _engines(context, corpus) as (encoder, language):
        for engine in (encoder, language):
            engine.slow_encoder(_ENCODE_S)
        context.say(f"{count} pictures, and as many that are encoded twice")
        encoded: list[int] = []

        def named() -> float:
            for engine in (encoder, language):
                engine.encoder()  # those of the other case
            seconds = ask(named=True)()
            encoded.append(sum(len(engine.encoder()["times"]) for engine in (encoder, language)))
            return seconds

        kept = measure.interleave({"named": named, "twice": ask(named=False)}, rounds=count)
    _report_pair(context, encoded[-count:], kept)


def _report_pair(context: Context, encoded: Sequence[int], kept: dict[str, list[float]]) -> None:
    context.report(
        ENCODES,
        sum(encoded) / len(encoded),
        samples=len(encoded),
        detail={"note": "calls of both encoders for each picture", "most": max(encoded)},
    )
    ratios = [once / twice for once, twice in zip(kept["named"], kept["twice"], strict=True)]
    context.report(
        TTFT,
        statistics.median(kept["named"]) / statistics.median(kept["twice"]),
        samples=len(ratios),
        detail={
            "spread": measure.spread(ratios),
            "median_ms": {name: 1000 * statistics.median(times) for name, times in kept.items()},
            "encode_ms": 1000 * _ENCODE_S,
            "note": "first token with the picture encoded once, beside twice",
        },
    )


@contextlib.contextmanager
def _engines(context: Context, corpus: Corpus) -> Iterator[tuple[EngineProcess, EngineProcess]]:
    """An encoder and a language instance of one model, with a disk each."""
    from concurrent.futures import ThreadPoolExecutor

    from s3ec.dev.rigs.engine import EngineProcess, ec_config
    from s3ec.dev.rigs.models import write_gemma3

    scratch = context.scratch
    context.say("starting two engines")
    model = write_gemma3(scratch / "model")
    path = {"ec_connector_module_path": "s3ec.connector"}
    with contextlib.ExitStack() as stack:
        engines = []
        for role in ("ec_producer", "ec_consumer"):
            settings = {
                "bucket": corpus.bucket,
                "endpoint_url": corpus.endpoint_url,
                "cache_dir": str(scratch / role),
                "min_free_bytes": 0,
                "wait": "always",  # the tiny model's encoder is faster than a fetch
            }
            engines.append(
                EngineProcess(
                    model,
                    ec=ec_config(role, settings, **path),
                    log_path=scratch / f"{role}.log",
                    media=scratch,
                    env=dict(corpus.env) | ONE_PROCESS,
                )
            )
            stack.callback(engines[-1].stop)
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(EngineProcess.start, engines))
        yield engines[0], engines[1]


BENCH = Bench(ROWS, run)
