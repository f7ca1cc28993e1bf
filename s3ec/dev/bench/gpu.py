# SPDX-License-Identifier: Apache-2.0
"""``bench gpu``: what only a GPU can tell, in at most 8 minutes, without a network.

Copies come first: loads through pinned memory and through other memory, and from which size on
threads beside the caller bring embeddings to the device sooner. Then engines with the encoder of
Gemma3-27B, random weights and a small language model, on both of vLLM's model runners:

* one without a connector answers questions, each about one picture;
* one with s3ec answers the same from an empty corpus and from its warm disk;
* one with vLLM's ECExampleConnector answers from a warm local folder;
* a consumer with an empty disk answers from the corpus.

The second and the third take turns, four rounds each. `bench rag --device cuda` asks about longer
documents.

Without a GPU the engines have a tiny model and run on the CPU, the V2 runner in Triton's
interpreter. That tests this script: wrong answers count, and no other row has a value.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from s3ec import codec
from s3ec.codec import Shape
from s3ec.dev.bench import engines, measure
from s3ec.dev.bench.context import Bench, CannotMeasureError, Context, Spec
from s3ec.dev.rigs.vllm_cpu import NEW_PICTURES, ONE_PROCESS, V2_RUNNER

if TYPE_CHECKING:
    import torch

    from s3ec.connector.staging import Staging
    from s3ec.dev.rigs.engine import EngineProcess

_PINNED, _READERS = "gpu.load_pinned_ratio", "gpu.readers_ratio"
_WRONG, _ENCODE, _LEARNED = "gpu.wrong_answers", "gpu.encode_ms", "gpu.encode_learned_ratio"
_TOTAL, _P50, _ENCODES = "gpu.warm_total_ratio", "gpu.warm_p50_ratio", "gpu.warm_encodes"
ROWS = (
    Spec(_PINNED, "ratio"),
    Spec(_READERS, "ratio"),
    Spec(_WRONG, "1", "== 0"),
    Spec(_ENCODE, "ms"),
    Spec(_LEARNED, "ratio", "<= 1.25"),
    Spec(_TOTAL, "ratio", "<= 1.1"),
    Spec(_P50, "ratio", "<= 1.1"),
    Spec(_ENCODES, "1", "== 0"),
)
_SAVES, _INDEXED = "vllm:s3ec_saves", "vllm:s3ec_index_entries"
_NO_GPU = "there is no CUDA device here"
_TIME_S = 8 * 60.0
# What the engines of one runner may take, before anybody knows.
_RUNNER_S = 200.0
_ROUNDS, _COPY_ROUNDS = 4, 15
_TOKENS = 4
# Rows and pictures; an engine's own cache holds _HELD of these.
_GPU_ROWS, _GPU_PICTURES, _TINY_ROWS, _TINY_PICTURES, _HELD = 256, 24, 64, 8, 4
# Of an embedding, in megabytes: a thumbnail, Gemma3's, Molmo's, Pixtral's.
SIZES = {"0.26 MB": 256, "2.75 MB": 2_688, "8.8 MB": 8_592, "30 MB": 29_296}
STEPS = (1, 2, 8)  # embeddings of one step
_HELPERS = 3  # threads beside the caller
_ALONE, _OURS, _THEIRS = "no connector", "s3ec", "ECExampleConnector"
_CONSUMER = "s3ec with an empty disk"


def run(context: Context) -> None:
    """Measure all that there is time for.

    Raises:
        CannotMeasureError: There is no vLLM.
    """
    ends_s = time.monotonic() + _TIME_S
    if importlib.util.find_spec("vllm") is None:
        raise CannotMeasureError("vLLM is not installed")
    import torch

    from s3ec.connector import compat

    is_gpu = torch.cuda.is_available()
    about = {"device": compat.device_name(), "vllm": compat.vllm_version(), "is_gpu": is_gpu}
    context.say(", ".join(f"{name} {value}" for name, value in about.items()))
    _copies(context, torch.device("cuda", 0) if is_gpu else torch.device("cpu"), about)
    done: dict[str, Outcome] = {}
    whys: dict[str, str] = {}
    longest_s = _RUNNER_S if is_gpu else 0.0
    for runner in _runners(compat.release(compat.vllm_version()) or (1, 0), whys):
        began_s = time.monotonic()
        if began_s + longest_s > ends_s:
            whys[runner] = "there was no time left for it"
            continue
        try:
            done[runner] = _one_runner(context, runner, is_gpu=is_gpu)
        except Exception as exc:  # noqa: BLE001 (whatever an engine dies of; the other one may not)
            whys[runner] = str(exc).splitlines()[0][:300]
            context.say(f"{runner}: {whys[runner]}")
        longest_s = max(longest_s, time.monotonic() - began_s)
    report(context, done, whys, about)


def _runners(release: tuple[int, int], whys: dict[str, str]) -> list[str]:
    """vLLM's model runners of this release, the one that it chooses on a GPU first."""
    if release >= (0, 32):
        return ["v2", "v1"]
    spec = importlib.util.find_spec("vllm")
    origin = spec.origin if spec else None
    if origin and Path(origin).with_name("v1").joinpath("worker/gpu/ec_connector.py").exists():
        return ["v1", "v2"]
    whys["v2"] = "the V2 runner of this release calls no connector"
    return ["v1"]


# -- copies ----------------------------------------------------------------------------------------


def _copies(context: Context, device: torch.device, about: Mapping[str, Any]) -> None:
    import torch

    from s3ec.connector import staging

    context.say(f"copies from files in the page cache to {device}")
    files = {}
    for name, rows in SIZES.items():
        files[name] = [context.scratch / f"{rows}-{number}" for number in range(max(STEPS))]
        for path in files[name]:
            path.write_bytes(os.urandom(_shape(rows).nbytes))
    kinds: dict[str, Staging] = {"": staging.open_staging(device)}
    if device.type == "cuda":
        for name, can_pin in {"pinned": True, "not pinned": False}.items():
            accelerator = staging.Accelerator(device, can_pin=can_pin)
            kinds[name] = staging.AcceleratorStaging(accelerator)

    def loads(paths: Sequence[Path], rows: int, kind: str, pool: ThreadPoolExecutor | None) -> None:
        left = iter(paths)  # whoever is free takes the next one; next() is one step of the GIL
        helpers = (
            [pool.submit(_load_all, left, rows, kinds[kind]) for _ in range(_HELPERS)]
            if (pool)
            else []
        )
        loaded = _load_all(left, rows, kinds[kind])
        loaded += [tensor for helper in helpers for tensor in helper.result()]
        kinds[kind].finish_loads(loaded)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    with ThreadPoolExecutor(_HELPERS) as pool:
        cases: dict[str, Callable[[], float]] = {}
        for size, rows in SIZES.items():
            for count in STEPS:
                for who, threads in {"alone": None, "threads": pool}.items():
                    arguments = (files[size][:count], rows, "", threads)
                    cases[f"{count} of {size}, {who}"] = _timed(loads, arguments)
            for kind in [kind for kind in kinds if kind]:
                cases[f"{size}, {kind}"] = _timed(loads, (files[size], rows, kind, None))
        kept = measure.interleave(cases, rounds=context.rounds(_COPY_ROUNDS), warmup=2)
    report_copies(context, kept, about)
    for path in [path for paths in files.values() for path in paths]:
        path.unlink()


def _timed(work: Callable[..., None], arguments: tuple[Any, ...]) -> Callable[[], float]:
    return measure.timed(lambda: work(*arguments))


def _shape(rows: int) -> Shape:
    return Shape(rows, 512, "bfloat16")


def _load_all(paths: Iterator[Path], rows: int, staging: Staging) -> list[torch.Tensor]:
    """Read, check and copy what is left, as a load does."""
    from s3ec.connector.staging import bytes_of

    loaded = []
    for path in paths:
        shape = _shape(rows)
        buffer = staging.take(shape)
        view = bytes_of(buffer.memory)[: shape.nbytes]
        file = os.open(path, os.O_RDONLY)
        try:
            os.preadv(file, [view], 0)
        finally:
            os.close(file)
        codec.checksum(view)
        loaded.append(staging.to_device(buffer, shape))
    return loaded


def report_copies(
    context: Context, kept: Mapping[str, Sequence[float]], about: Mapping[str, Any]
) -> None:
    """Report both rows from the seconds of each case, by round."""

    def over(ours: str, theirs: str, names: Sequence[str]) -> dict[str, list[float]]:
        return {
            name: measure.ratios(kept[f"{name}, {ours}"], kept[f"{name}, {theirs}"])
            for name in names
        }

    samples = sum(map(len, kept.values()))
    times_ms = {case: 1e3 * statistics.median(rounds) for case, rounds in kept.items()}
    detail = {**about, "times_ms": times_ms}
    if any(name.endswith(", pinned") for name in kept):
        pinned = over("pinned", "not pinned", list(SIZES))
        context.report_slowest(_PINNED, pinned, samples=samples, detail=detail)
    else:
        context.cannot(_PINNED, _NO_GPU, **about)
    steps = {
        f"{count} of {size}": count * _shape(rows).nbytes
        for size, rows in SIZES.items()
        for count in STEPS
    }
    ratios = over("threads", "alone", list(steps))
    medians = measure.medians(ratios)
    by_size = sorted(steps, key=lambda name: steps[name], reverse=True)
    paying = list(itertools.takewhile(lambda name: medians[name] < 1, by_size))
    says = f"pay from {steps[paying[-1]] / 1e6:.3g} MB a step on" if paying else "do not pay"
    best = min(medians, key=lambda name: medians[name])
    note = f"{_HELPERS} threads beside the caller {says}; the best case: {best}"
    if about["is_gpu"]:
        context.report_median(_READERS, ratios, best, samples=samples, note=note, detail=detail)
    else:
        context.cannot(_READERS, f"{_NO_GPU}; on the CPU {note}", **detail, cases=medians)


# -- engines ---------------------------------------------------------------------------------------


@dataclass(slots=True)
class Outcome:
    """What engines on one runner did.

    Attributes:
        asked: Answers that were compared with those of an engine without a connector.
        wrong: Of these, how many differ.
        encode_ms: Of each encode of one picture, around the encoder.
        learned_ms: What s3ec believes that one takes.
        encodes: Pictures on the warm disk that were encoded.
        consumer_encodes: Pictures of the corpus that a consumer encoded, which may always wait.
        first_s: By engine, of each round: median seconds to the first token.
        seconds: By engine, of each round: until all had ended.
    """

    asked: int = 0
    wrong: int = 0
    encode_ms: list[float] = field(default_factory=list)
    learned_ms: float = 0.0
    encodes: int = 0
    consumer_encodes: int = 0
    first_s: dict[str, list[float]] = field(default_factory=dict)
    seconds: dict[str, list[float]] = field(default_factory=dict)


class _Engines:
    """Engines on one of vLLM's model runners, and what they are asked."""

    def __init__(self, context: Context, stack: ExitStack, runner: str, *, is_gpu: bool) -> None:
        from s3ec.dev.rigs.engine import ec_config
        from s3ec.dev.rigs.models import write_gemma3
        from s3ec.dev.rigs.nursery import EngineForkServer

        self._context, self._runner = context, runner
        self._folder = context.scratch / runner
        rows, count = (_GPU_ROWS, _GPU_PICTURES) if is_gpu else (_TINY_ROWS, _TINY_PICTURES)
        self._model = context.scratch / "model"
        if not self._model.exists():
            context.say("building the model")
            write_gemma3(self._model, "gemma3-27b" if is_gpu else "tiny")
        pictures = engines.write_patterns(self._folder / "pictures", count, seed=0)
        self.prompts = [
            engines.prompt(path, f"{number:064x}") for number, path in enumerate(pictures)
        ]
        self._options = {
            **NEW_PICTURES,
            "mm_processor_cache_gb": 1,  # or the processing of pictures would be timed
            "max_num_batched_tokens": _HELD * rows,  # vLLM's encoder cache holds as many rows
            "gpu_memory_utilization": 0.2,
            "skip_mm_profiling": not is_gpu,
        }
        self._env = {**ONE_PROCESS, "VLLM_LOGGING_LEVEL": "INFO", "VLLM_USE_V2_MODEL_RUNNER": "0"}
        if runner == "v2":
            self._env |= {"VLLM_USE_V2_MODEL_RUNNER": "1"} if is_gpu else V2_RUNNER
        (self._folder / "corpus").mkdir()
        place = {
            "url": (self._folder / "corpus").as_uri(),
            "cache_dir": str(self._folder / "tier"),
            "min_free_bytes": 0,
            "weights": "name",
        }
        empty = {**place, "cache_dir": str(self._folder / "empty tier"), "wait": "always"}
        ours = {"ec_connector_module_path": "s3ec.connector"}
        folder = {"shared_storage_path": str(self._folder / "example")}
        self._configs: dict[str, dict[str, Any] | None] = {
            _ALONE: None,
            _OURS: ec_config("ec_both", place, **ours),
            _CONSUMER: ec_config("ec_consumer", empty, **ours),
            _THEIRS: {
                "ec_connector": "ECExampleConnector",
                "ec_role": "ec_both",
                "ec_connector_extra_config": folder,
            },
        }
        self._nursery = None
        if not is_gpu:  # what it imports of vLLM for the CPU takes the place of CUDA's events
            log = self._folder / "imports.log"
            self._nursery = stack.enter_context(EngineForkServer(log, self._env))

    def engine(self, name: str) -> EngineProcess:
        """One with this connector, not started yet."""
        from s3ec.dev.rigs.engine import EngineProcess

        self._context.say(f"{self._runner}: an engine, {name}")
        return EngineProcess(
            self._model,
            ec=self._configs[name],
            log_path=self._folder / f"{name}.log",
            media=self._context.scratch,
            env=self._env,
            options=self._options,
            nursery=self._nursery,
        )

    def expected(self) -> list[list[int]]:
        """What an engine without a connector answers.

        Raises:
            CannotMeasureError: It has another model runner.
        """
        with self.engine(_ALONE) as alone:
            if (self._runner == "v2") != ("V2 Model Runner" in alone.log):
                raise CannotMeasureError(f"vLLM did not take the {self._runner} runner")
            return self.answers(alone)

    def answers(self, engine: EngineProcess) -> list[list[int]]:
        """The tokens of each answer."""
        asked = [engine.chat([prompt], max_tokens=_TOKENS) for prompt in self.prompts]
        return [answer["token_ids"] for (answer,) in asked]

    def time(self, engine: EngineProcess) -> tuple[float, float]:
        """Median seconds to the first token, and seconds until all had ended; one client."""
        first_s, seconds = engine.replay(self.prompts, max_tokens=_TOKENS, clients=1)
        return statistics.median(first_s), seconds


def _one_runner(context: Context, runner: str, *, is_gpu: bool) -> Outcome:
    outcome = Outcome()
    with ExitStack() as stack:
        rig = _Engines(context, stack, runner, is_gpu=is_gpu)
        expected = rig.expected()

        def compare(engine: EngineProcess) -> None:
            found = rig.answers(engine)
            outcome.asked += len(found)
            outcome.wrong += sum(a != b for a, b in zip(found, expected, strict=True))

        ours = stack.enter_context(rig.engine(_OURS))
        ours.encoder()  # its times are noted from here on
        compare(ours)
        _note_encodes(outcome, ours)
        engines.until(lambda: _counted(ours, _SAVES) >= len(expected), "all is stored")
        theirs = stack.enter_context(rig.engine(_THEIRS))
        compare(theirs)
        compare(ours)
        before = ours.work()["encodes"]
        for number in range(1 + context.rounds(_ROUNDS)):
            for name, engine in {_OURS: ours, _THEIRS: theirs}.items():
                first_s, seconds = rig.time(engine)
                if number:  # the first round warms up
                    outcome.first_s.setdefault(name, []).append(first_s)
                    outcome.seconds.setdefault(name, []).append(seconds)
        outcome.encodes = int(ours.work()["encodes"] - before)
        consumer = stack.enter_context(rig.engine(_CONSUMER))
        engines.until(lambda: _counted(consumer, _INDEXED) >= len(expected), "the index is read")
        consumer.work()  # counts from here on
        compare(consumer)
        outcome.consumer_encodes = int(consumer.work()["encodes"])
    return outcome


def _note_encodes(outcome: Outcome, engine: EngineProcess) -> None:
    found = engine.encoder()
    one_row_s = statistics.mean(found["learned"].values()) if found["learned"] else 0.0
    outcome.encode_ms = [1e3 * took_s for took_s, _rows in found["times"]]
    outcome.learned_ms = 1e3 * one_row_s * (found["times"][0][1] if found["times"] else 0)


def _counted(engine: EngineProcess, name: str) -> float:
    return engines.counters(engine).get(name, 0.0)


def report(
    context: Context,
    done: Mapping[str, Outcome],
    whys: Mapping[str, str],
    about: Mapping[str, Any],
) -> None:
    """Report the rows of the engines; each has the value of the worse runner.

    Args:
        context: Takes them.
        done: What was measured, by runner.
        whys: Why the others were not.
        about: For each row's detail.
    """
    missing = [f"{runner} was not run: {why}" for runner, why in whys.items()]
    if not done:
        for name in (_WRONG, _ENCODE, _LEARNED, _TOTAL, _P50, _ENCODES):
            context.cannot(name, "; ".join(missing), **about)
        return

    def put(name: str, cases: Mapping[str, float], samples: int, **more: Any) -> None:
        detail = {**about, "note": "; ".join(missing), "cases": cases, **more}
        if about["is_gpu"] or name == _WRONG:
            context.report(name, max(cases.values()), samples=samples, detail=detail)
        else:
            context.cannot(name, _NO_GPU, **detail)

    asked = sum(one.asked for one in done.values())
    encodes = {runner: one.consumer_encodes for runner, one in done.items()}
    wrong = {runner: one.wrong for runner, one in done.items()}
    put(_WRONG, wrong, asked, asked=asked, encoded_by_a_consumer=encodes)
    encoded = sum(len(one.encode_ms) for one in done.values())
    encode_ms = {runner: statistics.median(one.encode_ms) for runner, one in done.items()}
    put(_ENCODE, encode_ms, encoded)
    off = {
        runner: measure.furthest_from_one([one.learned_ms / encode_ms[runner]])
        for runner, one in done.items()
        if one.learned_ms
    }
    if off:
        put(_LEARNED, off, encoded)
    else:
        context.cannot(_LEARNED, "nothing was learned", **about)
    for name, of in ((_TOTAL, "seconds"), (_P50, "first_s")):
        times = {runner: getattr(one, of) for runner, one in done.items()}
        ratios = {runner: measure.ratios(by[_OURS], by[_THEIRS]) for runner, by in times.items()}
        put(name, measure.medians(ratios), sum(map(len, ratios.values())), rounds=ratios)
    put(_ENCODES, {runner: one.encodes for runner, one in done.items()}, asked)


BENCH = Bench(ROWS, run)
