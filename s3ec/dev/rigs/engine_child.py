# SPDX-License-Identifier: Apache-2.0
"""The child of EngineProcess: one vLLM engine, one JSON line per request and per reply.

The file descriptors of both pipes come as arguments, since vLLM writes to standard output.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

# Answers on a small shared machine matter more than speed: one sequence order, no compilation.
_OPTIONS: dict[str, Any] = {
    "enforce_eager": True,
    "gpu_memory_utilization": 0.3,
    "max_model_len": 4096,
    "max_num_seqs": 8,
    "seed": 0,
    "disable_log_stats": False,
    "limit_mm_per_prompt": {"image": 16},
}
_CPU_BLOCK_TOKENS = 128  # vLLM's choice
_SHUTDOWN_TIMEOUT_S = 100
_OUR_LABELS = ("source", "tier", "outcome", "reason", "field", "event")


class _Engine:
    """Its public methods are the operations of EngineProcess."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        from vllm import LLM
        from vllm.config import ECTransferConfig
        from vllm.platforms import current_platform

        options = {**_OPTIONS, **spec["options"]}
        if current_platform.is_cpu():
            # All sequences at full length. vLLM clears the memory of every block as it starts.
            blocks = options["max_model_len"] // options.get("block_size", _CPU_BLOCK_TOKENS)
            options.setdefault("num_gpu_blocks_override", options["max_num_seqs"] * blocks)
        if spec["ec"] is not None:
            options["ec_transfer_config"] = ECTransferConfig(**spec["ec"])
        self._llm: Any = LLM(model=spec["model"], **options)
        if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0":
            self._rest_where_nothing_runs()
        self._steps_ns: list[int] | None = None
        self._slowed: _SlowEncoder | None = None
        self._allocated = 0
        # Other than vLLM's own, which are small.
        self._numbers = itertools.count(10**9)

    def chat(
        self, prompts: list[Any], max_tokens: int, logprobs: int | None = None
    ) -> list[dict[str, Any]]:
        from vllm import SamplingParams

        messages = [[{"role": "user", "content": parts}] for parts in prompts]
        sampling = SamplingParams(temperature=0, max_tokens=max_tokens, logprobs=logprobs)
        return [_plain(output) for output in self._llm.chat(messages, sampling, use_tqdm=False)]

    def _rest_where_nothing_runs(self) -> None:
        """As vLLM's engine does in a process of its own (``EngineCoreProc``).

        Otherwise the scheduler would ask without a pause and keep the interpreter's lock from the
        threads that fetch what it asks for.
        """
        core = self._core()
        post_step = core.post_step

        def rest(model_executed: bool) -> None:
            post_step(model_executed)
            if not model_executed and core.scheduler.has_requests():
                time.sleep(0.001)

        core.post_step = rest

    def replay(
        self, prompts: list[Any], max_tokens: int, clients: int
    ) -> tuple[list[float], float]:
        """So many requests at a time; seconds to the first token of each, and of all."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        messages = [[{"role": "user", "content": parts}] for parts in prompts]
        # Before the clock starts: a server renders in other processes.
        rendered = self._llm._preprocess_chat(messages)
        due = deque(rendered)
        engine = self._llm.llm_engine
        asked_s: dict[str, float] = {}
        first_s: dict[str, float] = {}
        started_s = time.monotonic()
        while due or engine.has_unfinished_requests():
            while due and engine.get_num_unfinished_requests() < clients:
                name = str(next(self._numbers))
                asked_s[name] = time.monotonic()
                sampling = SamplingParams(
                    temperature=0,
                    max_tokens=max_tokens,
                    ignore_eos=True,
                    output_kind=RequestOutputKind.DELTA,
                )
                engine.add_request(name, due.popleft(), sampling)
            for output in engine.step():
                first_s.setdefault(output.request_id, time.monotonic())
        seconds = time.monotonic() - started_s
        return [first_s[name] - at_s for name, at_s in asked_s.items()], seconds

    def timed(self, prompts: list[Any], max_tokens: int) -> dict[str, Any]:
        """Nanoseconds of the whole call, and of each step of the engine in it."""
        core = self._core()
        if self._steps_ns is None:
            times = self._steps_ns = []
            step = core.step_fn

            def timed() -> Any:
                started = time.perf_counter_ns()
                try:
                    return step()
                finally:
                    times.append(time.perf_counter_ns() - started)

            core.step_fn = timed
        self._steps_ns.clear()
        started = time.perf_counter_ns()
        self.chat(prompts, max_tokens)
        return {"whole": time.perf_counter_ns() - started, "steps": self._steps_ns}

    def generate(
        self, prompt: str, data: Mapping[str, Any], uuids: Mapping[str, Any]
    ) -> dict[str, Any]:
        import torch
        from vllm import SamplingParams

        tensors = {
            modality: {name: torch.tensor(value) for name, value in fields.items()}
            for modality, fields in data.items()
        }
        asked = {"prompt": prompt, "multi_modal_data": tensors, "multi_modal_uuids": uuids}
        sampling = SamplingParams(temperature=0, max_tokens=8)
        (output,) = self._llm.generate([asked], sampling, use_tqdm=False)
        return _plain(output)

    def shuffle(self) -> None:
        """Other weights in a running engine, as `LLM.apply_model` makes them."""
        (shuffled,) = self._llm.apply_model(_shuffle_vision_tower)
        if not shuffled:
            raise ValueError("the model has no vision tower")
        self._llm.reset_prefix_cache()
        self._llm.llm_engine.reset_encoder_cache()

    def serve_metrics(self) -> int:
        """What vLLM's API server shows on /metrics, on a free port of this machine; the port."""
        from prometheus_client import start_http_server

        server, _thread = start_http_server(0, addr="127.0.0.1")
        return server.server_port

    def _core(self) -> Any:
        return self._llm.llm_engine.engine_core.engine_core  # VLLM_ENABLE_V1_MULTIPROCESSING=0

    def leave_out_language_model(self) -> None:
        layers = self._model().language_model.model

        def forward(tokens: Any, *_args: Any, inputs_embeds: Any = None, **_more: Any) -> Any:
            return layers.embed_input_ids(tokens) if inputs_embeds is None else inputs_embeds

        layers.forward = forward

    def slow_encoder(self, seconds: float) -> None:
        self._encoder_here().seconds = seconds

    def _model(self) -> Any:
        # Not by apply_model, after which the weights may be others.
        return self._core().model_executor.driver_worker.get_model()

    def _encoder_here(self) -> _SlowEncoder:
        if self._slowed is None:
            model = self._model()
            self._slowed = _SlowEncoder(model.embed_multimodal)
            model.embed_multimodal = self._slowed
        return self._slowed

    def work(self) -> dict[str, Any]:
        """What this engine has done so far, from the first time that this is asked."""
        encoder = self._encoder_here()
        manager = self._core().scheduler.encoder_cache_manager
        if not hasattr(manager.allocate, "__wrapped__"):
            manager.allocate = self._count_allocations(manager.allocate)
        return {
            "encodes": encoder.pictures,
            "encode_s": encoder.busy_s,
            "allocations": self._allocated,
            "cpu_s": time.process_time() - encoder.cpu_s,
        }

    def _count_allocations(self, allocate: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(allocate)
        def counted(*args: Any, **kwargs: Any) -> Any:
            self._allocated += 1
            return allocate(*args, **kwargs)

        return counted

    def metrics(self) -> dict[str, float]:
        from prometheus_client import REGISTRY

        # Not by LLM.get_metrics, which rounds counters to whole numbers.
        found: dict[str, float] = {}
        for metric in REGISTRY.collect():
            for sample in metric.samples:
                count = f"{metric.name}_count"
                if sample.name not in (metric.name, f"{metric.name}_total", count):
                    continue
                labels = [f"{k}={v}" for k, v in sample.labels.items() if k in _OUR_LABELS]
                name = count if sample.name == count else metric.name
                name += f"{{{','.join(labels)}}}" if labels else ""
                found[name] = found.get(name, 0) + sample.value
        return found

    def shutdown(self) -> None:
        # In order and with time to finish saves; collecting the object would allow 5 seconds.
        self._llm.llm_engine.engine_core.shutdown(timeout=_SHUTDOWN_TIMEOUT_S)


class _SlowEncoder:
    """A model's encoder that takes ``seconds`` longer a picture, and counts.

    It sleeps, which leaves the processor to others as an encoder on a GPU does.
    """

    def __init__(self, embed: Callable[..., Any]) -> None:
        self._embed = embed
        self.seconds = 0.0
        self.pictures = 0
        self.busy_s = 0.0
        self.cpu_s = 0.0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        started, cpu_s = time.perf_counter(), time.thread_time()
        made = self._embed(*args, **kwargs)
        self._wait_for_device()
        time.sleep(self.seconds * len(made))
        took_s = time.perf_counter() - started
        self.pictures += len(made)
        self.busy_s += took_s
        self.cpu_s += time.thread_time() - cpu_s
        return made

    @staticmethod
    def _wait_for_device() -> None:
        """A GPU has only been told what to do when the call returns."""
        import torch

        if torch.cuda.is_available():
            torch.cuda.synchronize()


def _shuffle_vision_tower(model: Any) -> int:
    import torch

    generator = torch.Generator().manual_seed(0)
    count = 0
    for name, weight in model.named_parameters():
        if "vision" in name:
            order = torch.randperm(weight.numel(), generator=generator)
            weight.data.copy_(weight.data.flatten()[order].view_as(weight))
            count += 1
    return count


def _plain(output: Any) -> dict[str, Any]:
    (completion,) = output.outputs
    logprobs = [
        {str(token): value.logprob for token, value in position.items()}
        for position in completion.logprobs or []
    ]
    return {
        "token_ids": list(completion.token_ids),
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "logprobs": logprobs,
        "cached_tokens": output.num_cached_tokens,
        "first_token_s": output.metrics.first_token_latency,
    }


def serve(request_fd: int, reply_fd: int) -> None:
    """Serve requests until their pipe ends."""
    requests = os.fdopen(request_fd, "rb")
    replies = os.fdopen(reply_fd, "wb")
    engine: _Engine | None = None
    for line in requests:
        request = json.loads(line)
        try:
            if engine is None:
                engine = _Engine(request)
                reply: dict[str, Any] = {"value": None}
            else:
                answer = getattr(engine, request["operation"])
                reply = {"value": answer(**request["arguments"])}
        except Exception as exc:  # noqa: BLE001
            # The parent decides what an error means; the traceback is in the log.
            import traceback

            traceback.print_exc()
            reply = {"error": f"{type(exc).__name__}: {exc}"}
        replies.write(json.dumps(reply).encode() + b"\n")
        replies.flush()
        if engine is None:
            break
    if engine is not None:
        engine.shutdown()


if __name__ == "__main__":
    serve(int(sys.argv[1]), int(sys.argv[2]))
