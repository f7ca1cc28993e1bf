# SPDX-License-Identifier: Apache-2.0
"""What ``bench rag`` measures with: engines of seven configurations, a bucket, and a folder.

The bucket, a tier and a folder of vLLM's ECExampleConnector hold the same embeddings of all
pictures before anything is measured. A leg is one configuration at one latency.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from s3ec.dev.bench import engines, measure
from s3ec.dev.bench.context import Context
from s3ec.dev.bench.workloads import Ask, Workload
from s3ec.dev.rigs.vllm_cpu import NEW_PICTURES, ONE_PROCESS

if TYPE_CHECKING:
    from s3ec.dev.rigs.engine import EngineProcess
    from s3ec.dev.rigs.nursery import EngineForkServer
    from s3ec.dev.rigs.proxy import Exchange
    from s3ec.testing.server import LocalS3

_BUCKET = "rag"
# Otherwise glibc gives a prefill's memory back to the kernel, in one engine more than in another:
# 16 questions took 184,000 to 315,000 page faults in place of 25,000, and up to twice the time.
_ENV = ONE_PROCESS | {
    "MALLOC_MMAP_THRESHOLD_": str(2**25),
    "MALLOC_TRIM_THRESHOLD_": str(2**32),
}
_TOKENS = 4
# Of the question and the template.
_WORDS_TOKENS = 256
_LEAST_BATCH = 512
# Embeddings that an engine's own cache holds.
DEVICE_IMAGES = 8
# With `wait: auto` a node that has learned nothing encodes a few pictures to learn what that costs.
_WARM_UP, _WARM_UP_COLD = 1, 3
_SAVES = "vllm:s3ec_saves"
_FROM_BUCKET = "vllm:s3ec_fetches{source=bucket}"


@dataclass(frozen=True, slots=True)
class Config:
    """How an engine caches embeddings.

    Attributes:
        name: For people.
        manager: Class of the encoder cache's manager in ``s3ec``; None is vLLM's own.
        store: ``memory``, ``s3ec``, or how ECExampleConnector has its files: ``folder``, or
            ``copies``, a folder whose files are copied as they are loaded.
        warm_tier: Whether the node's disk holds everything at the start, for ``s3ec``.
    """

    name: str
    manager: str | None
    store: str
    warm_tier: bool = False

    @property
    def has_bucket(self) -> bool:
        """Whether the latency of a bucket matters."""
        return self.store == "s3ec"


CONFIGS: Mapping[int, Config] = {
    1: Config("vLLM alone", None, "memory"),
    2: Config("LRU", "LRUEncoderCacheManager", "memory"),
    3: Config("LRU + s3ec, empty disk", "LRUEncoderCacheManager", "s3ec"),
    4: Config("tiered + s3ec, warm disk", "TieredEncoderCacheManager", "s3ec", warm_tier=True),
    5: Config("ECExample, local folder", None, "folder"),
    7: Config("ECExample, one copy a load", None, "copies"),
    8: Config("LRU + s3ec, warm disk", "LRUEncoderCacheManager", "s3ec", warm_tier=True),
}


@dataclass(frozen=True, slots=True)
class Encoder:
    """What plays the encoder.

    Attributes:
        preset: One of ``s3ec.dev.rigs.models.GEMMA3_PRESETS``.
        dtype: Of weights and embeddings.
        rows: Of an embedding.
        width: Of a row, in values.
        pause_s: How long an encode takes beyond what the model's own does.
        said: The same for people.
    """

    preset: str
    dtype: str
    rows: int
    width: int
    pause_s: float
    said: str

    @property
    def nbytes(self) -> int:
        """Of one embedding."""
        return self.rows * self.width * (2 if self.dtype == "bfloat16" else 4)


# It sleeps as long as Gemma3-27B's encoder takes at half its resolution on a core that does nothing
# else.
ON_CPU = Encoder("embedding-2.75mb", "float32", 256, 2688, 1.6, "sleeps 1.6 s")
# As a GPU has it: at its full resolution.
ON_GPU = Encoder("gemma3-27b", "bfloat16", 256, 5376, 0.0, "real, Gemma3-27B's")
# For a look that takes no time.
TINY = Encoder("tiny", "bfloat16", 64, 64, 0.1, "sleeps 100 ms")


@dataclass(slots=True)
class Leg:
    """One configuration at one latency: what was counted while it was asked.

    Attributes:
        number: Of the configuration.
        latency_ms: Added to each request to the bucket.
        first_s: Seconds to the first token, of each request.
        rounds: Of each time it was asked, their median and the seconds until all had ended.
        seconds: Until all had ended, without the engines' starts.
        references: Pictures shown.
        encodes: Pictures encoded, and ``encode_s`` the time in the encoder.
        allocations: Embeddings that came new into the engine's own cache.
        from_bucket: Embeddings that came from the bucket.
        bucket_bytes: Answered by the server, with everything that was asked of it.
        bucket_requests: How many requests that took.
        cpu_s: Of the engines outside their encoders while they were asked.
    """

    number: int
    latency_ms: int
    first_s: list[float] = field(default_factory=list)
    rounds: list[tuple[float, float]] = field(default_factory=list)
    seconds: float = 0.0
    references: int = 0
    encodes: int = 0
    encode_s: float = 0.0
    allocations: int = 0
    from_bucket: int = 0
    bucket_bytes: int = 0
    bucket_requests: int = 0
    cpu_s: float = 0.0

    @property
    def config(self) -> Config:
        """Which configuration it is."""
        return CONFIGS[self.number]

    @property
    def name(self) -> str:
        """For people."""
        far = f", {self.latency_ms} ms" if self.config.has_bucket else ""
        return f"({self.number}) {self.config.name}{far}"

    def document(self, nbytes: int) -> dict[str, Any]:
        """All figures of it, for a report; ``nbytes`` is of one embedding."""
        loads = self.allocations - self.encodes  # from anywhere but the encoder
        bucket = min(self.from_bucket, loads)
        shares = {
            "device": self.references - self.allocations,
            "node": loads - bucket,
            "bucket": bucket,
            "encoded": self.encodes,
        }
        return {
            **{key: value for key, value in asdict(self).items() if key != "first_s"},
            "name": self.name,
            "requests": len(self.first_s),
            "ttft_s": {f"p{share}": self.ttft_s(share) for share in (50, 90, 99)},
            "all_ttft_s": sorted(self.first_s),
            "requests_per_s": len(self.first_s) / self.seconds,
            "hit_ratio": {name: count / self.references for name, count in shares.items()},
            "loaded_bytes": loads * nbytes,
            "cpu_s_per_gb": self.cpu_s / (loads * nbytes) * 1e9 if loads else None,
        }

    def ttft_s(self, percent: float) -> float:
        """A percentile of the time to the first token."""
        return measure.percentile(self.first_s, percent)


@dataclass(slots=True)
class _Link:
    """The bucket from so far away: replies come later, and are counted."""

    delay_s: float
    url: str = ""
    nbytes: int = 0
    requests: int = 0

    async def apply(self, exchange: Exchange) -> None:
        await asyncio.sleep(self.delay_s)
        reply = await exchange.forward()
        self.requests += 1
        self.nbytes += len(reply.body)
        await exchange.send(reply)


@contextlib.contextmanager
def running(
    context: Context,
    encoder: Encoder,
    workload: Workload,
    configs: Sequence[int],
    latencies_ms: Sequence[int],
    *,
    device: str,
    name: str = "rag",
) -> Iterator[Rig]:
    """A rig whose bucket, tier and folders hold all pictures of the workload.

    Args:
        context: Has the scratch folder.
        encoder: What plays the encoder.
        workload: What will be asked.
        configs: Numbers of the configurations.
        latencies_ms: Added to each request to the bucket.
        device: ``cpu`` or ``cuda``.
        name: Of the rig's folder: another one for each rig of a run.

    Raises:
        CannotMeasureError: There is no server or no vLLM.
    """
    from s3ec.dev.rigs.models import write_gemma3
    from s3ec.dev.rigs.nursery import EngineForkServer
    from s3ec.dev.rigs.proxy import FaultProxy, Rule

    scratch = context.scratch / name
    scratch.mkdir()
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(engines.local_server(_BUCKET))
        # One has imported vLLM's runner for the CPU, which takes the place of CUDA's events.
        log, env = scratch / "imports.log", server.env() | _ENV
        nursery = stack.enter_context(EngineForkServer(log, env)) if device == "cpu" else None
        context.say("building the model and the pictures")
        model = write_gemma3(scratch / "model", encoder.preset)
        links = {}
        for latency_ms in {0, *latencies_ms}:
            links[latency_ms] = link = _Link(latency_ms / 1e3)
            proxy = stack.enter_context(FaultProxy(server.endpoint_url))
            proxy.add(Rule(link))
            link.url = proxy.url
        rig = Rig(context, encoder, workload, scratch, nursery, server, links, model)
        rig.fill({CONFIGS[number].store for number in configs})
        yield rig


class Rig:
    """Server, proxies, model, pictures and full caches; made by ``running``."""

    def __init__(
        self,
        context: Context,
        encoder: Encoder,
        workload: Workload,
        scratch: Path,
        nursery: EngineForkServer | None,
        server: LocalS3,
        links: Mapping[int, _Link],
        model: Path,
    ) -> None:
        self._context = context
        self._encoder = encoder
        self._scratch = scratch
        self._example = scratch / "example"
        self._nursery = nursery
        self._server = server
        self._links = links
        self._model = model
        self._most_images = workload.most_images
        names = workload.names
        self._ids = {name: hashlib.sha256(name.encode()).hexdigest() for name in names}
        self._warm_up_file, *files = engines.write_patterns(
            scratch / "pictures", len(self._ids) + 1, 0
        )
        self._files = dict(zip(self._ids, files, strict=True))
        self._engines = 0

    @contextlib.contextmanager
    def started(
        self, leg: Leg, *, empty: bool = False, language_model: bool = True
    ) -> Iterator[EngineProcess]:
        """A new engine that has answered a few questions.

        Args:
            leg: Which configuration.
            empty: Whether this node's disk holds nothing yet.
            language_model: False for one that leaves its layers out.
        """
        from s3ec.dev.rigs.engine import text

        with self._engine(leg.config, leg.latency_ms) as engine:
            if not language_model:
                engine.leave_out_language_model()
            engine.slow_encoder(self._encoder.pause_s)
            engine.work()
            # Words, and pictures that nobody else is asked about: first forwards take longer.
            engine.chat([[text("what time is it?")]], max_tokens=_TOKENS)
            for _ in range(_WARM_UP_COLD if empty else _WARM_UP):
                asked = engines.prompt(self._warm_up_file, secrets.token_hex(32))
                engine.replay([asked], max_tokens=_TOKENS, clients=1)
            yield engine

    def ask(self, leg: Leg, engine: EngineProcess, requests: Sequence[Ask], clients: int) -> None:
        """Ask some requests, and add to the leg what was counted.

        Args:
            leg: Where the counts go.
            engine: One of its configuration.
            requests: In their order.
            clients: Requests at a time.
        """
        from_bucket = self._from_bucket(leg, engine)
        before = self._counts(leg, engine)
        first_s, seconds = engine.replay(
            [self._prompt(ask.images, ask.question) for ask in requests],
            max_tokens=_TOKENS,
            clients=clients,
        )
        after = self._counts(leg, engine)
        for name, count in after.items():
            setattr(leg, name, getattr(leg, name) + count - before[name])
        leg.from_bucket += self._from_bucket(leg, engine) - from_bucket
        leg.first_s += first_s
        leg.rounds.append((measure.percentile(first_s, 50), seconds))
        leg.seconds += seconds
        leg.references += sum(len(ask.images) for ask in requests)

    def _counts(self, leg: Leg, engine: EngineProcess) -> dict[str, float]:
        """By the leg's attributes."""
        work, link = engine.work(), self._links[leg.latency_ms]
        return {
            "cpu_s": work["cpu_s"],
            "encodes": int(work["encodes"]),
            "encode_s": work["encode_s"],
            "allocations": int(work["allocations"]),
            "bucket_bytes": link.nbytes,
            "bucket_requests": link.requests,
        }

    @staticmethod
    def _from_bucket(leg: Leg, engine: EngineProcess) -> int:
        is_ours = leg.config.store == "s3ec"
        return int(engines.counters(engine).get(_FROM_BUCKET, 0)) if is_ours else 0

    def _prompt(self, images: Sequence[str], question: str) -> list[dict[str, Any]]:
        from s3ec.dev.rigs.engine import image, text

        shown = [image(self._files[name], self._ids[name]) for name in images]
        return [*shown, text(question)]

    def _engine(
        self, config: Config, latency_ms: int, *, role: str = "ec_both", tier: str | None = None
    ) -> EngineProcess:
        from s3ec.dev.rigs.engine import EngineProcess

        encoder, on_gpu = self._encoder, self._nursery is None
        tokens = self._most_images * (encoder.rows + 8) + _WORDS_TOKENS
        options: dict[str, Any] = {
            **NEW_PICTURES,
            # vLLM's encoder cache holds as many rows as a step has tokens.
            "max_num_batched_tokens": max(_LEAST_BATCH, DEVICE_IMAGES * encoder.rows),
            "max_model_len": tokens,
            "limit_mm_per_prompt": {"image": self._most_images},
            "dtype": encoder.dtype,
            # What memory an encode takes is no question on a CPU, and asking it takes seconds.
            "skip_mm_profiling": not on_gpu,
        }
        if config.manager is not None:
            options["ec_manager_config"] = {"encoder_cache_manager_cls": f"s3ec.{config.manager}"}
        if on_gpu:
            options["gpu_memory_utilization"] = 0.25  # three engines at once
            # Both halves of vLLM's cache of processed pictures forget in the same order only where
            # they see requests in the same order; a replay renders all before it asks for any.
            options["mm_processor_cache_gb"] = 16
        self._engines += 1
        return EngineProcess(
            self._model,
            ec=self._transfer(config, latency_ms, role, tier),
            log_path=self._scratch / f"engine-{self._engines}.log",
            media=self._scratch,
            env=self._server.env() | _ENV,
            options=options,
            nursery=self._nursery,
        )

    def _transfer(
        self, config: Config, latency_ms: int, role: str, tier: str | None
    ) -> dict[str, Any] | None:
        """Content of ``--ec-transfer-config``."""
        from s3ec.dev.rigs.engine import ec_config

        if config.store == "memory":
            return None
        if config.store == "s3ec":
            folder = tier or ("warm tier" if config.warm_tier else f"tier {latency_ms}")
            settings = {
                "bucket": _BUCKET,
                "endpoint_url": self._links[latency_ms].url,
                "min_free_bytes": 0,
                "weights": "name",
                "cache_dir": str(self._scratch / folder),
            }
            return ec_config(role, settings, ec_connector_module_path="s3ec.connector")
        names = {"ec_connector": "ECExampleConnector"}
        if config.store == "copies":
            names = {
                "ec_connector": "CopyingExampleConnector",
                "ec_connector_module_path": "s3ec.dev.rigs.copying_example",
            }
        return ec_config(role, {"shared_storage_path": str(self._example)}) | names

    def fill(self, stores: set[str]) -> None:
        """Have all pictures encoded once; bucket, tier and folder then hold the same."""
        if stores == {"memory"}:
            return
        count = len(self._ids)
        self._context.say(f"encoding {count} pictures into the bucket")
        with self._engine(CONFIGS[4], 0, role="ec_producer", tier="warm tier") as producer:
            # A tier keeps what encoding costs there.
            producer.slow_encoder(self._encoder.pause_s)
            for name, path in self._files.items():
                producer.chat([engines.prompt(path, self._ids[name])], max_tokens=1)
            engines.until(
                lambda: engines.counters(producer).get(_SAVES, 0) >= count, "all is stored"
            )
        if stores - {"memory", "s3ec"}:
            self._context.say("writing the same for ECExampleConnector")
            self._copy_for_example()

    def _copy_for_example(self) -> None:
        """The bucket's embeddings in the files that vLLM's ECExampleConnector reads."""
        import torch
        from safetensors.torch import save_file

        from s3ec import codec
        from s3ec.identity import is_object_name

        client = self._server.client()
        pages = client.get_paginator("list_objects_v2").paginate(Bucket=_BUCKET)
        for item in [item for page in pages for item in page.get("Contents", [])]:
            if not is_object_name(item["Key"].partition("/objects/")[2]):
                continue
            blob = client.get_object(Bucket=_BUCKET, Key=item["Key"])["Body"].read()
            header = codec.parse_header(blob)
            shape = header.shape
            values = bytearray(blob[header.data_start :])
            tensor = torch.frombuffer(values, dtype=getattr(torch, shape.dtype))
            path = self._example / header.identifier / "encoder_cache.safetensors"
            path.parent.mkdir(parents=True, exist_ok=True)
            save_file({"ec_cache": tensor.reshape(shape.rows, shape.width)}, path)
