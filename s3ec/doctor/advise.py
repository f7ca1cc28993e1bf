# SPDX-License-Identifier: Apache-2.0
"""Collects the inputs of ``s3ec advise``: measured values where this machine can measure them.

Values from the user come first; a value that is neither given nor measured is a marked assumption.
"""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from s3ec.codec import checksum
from s3ec.config import LoadedSettings
from s3ec.doctor.check import CheckContext
from s3ec.doctor.latency import MOST_REQUESTS, StoreLatency, measure_store
from s3ec.doctor.node import at_folder, probe_file
from s3ec.doctor.replicas import crossing_price
from s3ec.errors import ConfigError, S3ECError
from s3ec.payoff import (
    ASSUMED_READS,
    GPUS,
    STORES,
    Gpu,
    Inputs,
    Known,
    ModelEstimate,
    Value,
    assumed,
    find_model,
    given,
    measured,
    speed_up,
    transformer_tflop,
)
from s3ec.settings import Settings, is_amazons
from s3ec.store.open import probe_name

_TIER_READS = 20
_LARGE_ENCODER = 2e9  # parameters


@dataclass(slots=True)
class Measured:
    """The measurements; None for one that was not requested, or that failed.

    Attributes:
        pages: Of the model's processor, as describe_pages returns it.
        latency: Of the store, at the size of one embedding.
        tier_ms: Of this node's disk, at that size.
        notes: Messages on failed measurements.
    """

    pages: Mapping[str, Any] | None = None
    latency: StoreLatency | None = None
    tier_ms: float | None = None
    notes: list[str] = field(default_factory=list)


def inputs_of(known: Known, found: Measured) -> Inputs:
    """The inputs of the calculation, each from its best source.

    Raises:
        ConfigError: No source has the size of an embedding, or the time of an encode.
    """
    pages, like = found.pages or {}, known.like
    store = known.store or STORES["aws"]
    of_pages, of_table = _of_pages(pages), "of the table, an A4 page at 150 dpi"
    like_rows, like_width = (like.rows, like.width) if like else (None, None)
    rows = _best("rows", known.rows, pages.get("rows"), like_rows, of_pages, of_table)
    width = _best("width", known.width, pages.get("width"), like_width, of_pages, of_table)
    itemsize = _best("itemsize", None, pages.get("itemsize"), 2, "", "bf16 or fp16")
    # vLLM's arguments have the number of GPUs, too.
    gpus = _best("gpus", known.gpus or pages.get("gpus"), None, like.gpus if like else 1)
    gpu, gpu_note = _gpu(known, pages)
    tflop, tflops = _work(known, pages, gpu) or (None, 1.0)
    encode_ms = _best(
        "encode_ms",
        known.encode_ms,
        None,
        None if tflop is None else tflop / tflops * 1e3 / speed_up(gpus.value),
        "",
        f"{tflop or 0:.2g} TFLOP, within 40%, on {gpus.value:g} {gpu.label}, {gpu_note}",
    )
    price, of_price = gpu.dollars_an_hour, f"{gpu.label} on demand; {gpu_note}"
    fetch_ms, node_mb_s, spread = None, None, ""
    if found.latency is not None:
        seen = found.latency
        fetch_ms, node_mb_s = seen.p50_ms, seen.node_mb_s
        spread = f"p90 {seen.p90_ms:.3g}, p99 {seen.p99_ms:.3g}"
    guess_ms = store.fetch_ms(rows.value * width.value * itemsize.value)
    tier_ms, of_tier = found.tier_ms, "read and checked, cached"
    return Inputs(
        rows=rows,
        width=width,
        itemsize=itemsize,
        encode_ms=encode_ms,
        gpus=gpus,
        gpu_dollars_an_hour=_best("price", known.gpu_dollars_an_hour, None, price, "", of_price),
        fetch_ms=_best("fetch_ms", known.fetch_ms, fetch_ms, guess_ms, spread, store.label),
        node_mb_s=_best("node", None, node_mb_s, store.node_mb_s, "16 at a time", store.label),
        reads=_best("reads", known.reads, None, ASSUMED_READS, "", "`--reads` says what you see"),
        store=store,
        crossing_dollars_gb=known.crossing_dollars_gb,
        tier_ms=None if tier_ms is None else measured(tier_ms, of_tier),
        processor_ms=measured(pages["processor_ms"], of_pages) if pages else None,
    )


def _best(
    name: str,
    said: float | None,
    seen: float | None,
    guess: float | None,
    seen_note: str = "",
    guess_note: str = "",
) -> Value:
    """The user's value, else the measured one, else an assumption.

    Raises:
        ConfigError: There is none of these.
    """
    if said is not None:
        return given(said)
    if seen is not None:
        return measured(seen, seen_note)
    if guess is not None:
        return assumed(guess, guess_note)
    option = f"`--{name.replace('_', '-')}`"
    raise ConfigError(
        f"nothing says how large an embedding is, or how long encoding takes: {option} is missing; "
        "give `--like` a model of the table, or `--rows`, `--width` and `--encode-ms`",
        field=name,
    )


def _of_pages(pages: Mapping[str, Any]) -> str:
    return f"median of {pages['pages']} pictures" if pages.get("pages") else "one blank A4 page"


def _gpu(known: Known, pages: Mapping[str, Any]) -> tuple[Gpu, str]:
    """The GPU, and the source of this value."""
    if known.gpu is not None:
        return known.gpu, "by `--gpu`"
    here = preset_of(str(pages.get("gpu")))
    return (here, "of this machine") if here else (GPUS["h100"], "`--gpu` names another")


def preset_of(device: str) -> Gpu | None:
    """The preset of a device, by its name in CUDA or ROCm, such as ``NVIDIA H100 80GB HBM3``."""
    words = set(re.split(r"[^a-z0-9]+", device.lower()))
    return next((gpu for name, gpu in GPUS.items() if name in words), None)


def _work(known: Known, pages: Mapping[str, Any], gpu: Gpu) -> tuple[float, float] | None:
    """TFLOP of one encode and TFLOP/s of the GPU; None if the encoder is not known."""
    encoder, like = pages.get("encoder"), known.like
    if encoder and pages["patches"]:
        tflop = transformer_tflop(**encoder, patches=int(pages["patches"]), span=int(pages["span"]))
        is_large = 12 * encoder["layers"] * encoder["width"] ** 2 > _LARGE_ENCODER
    elif like is not None:
        tflop, is_large = like.tflop, like.large
    else:
        return None
    return tflop, gpu.large_tflops if is_large else gpu.tflops


def named_model(vllm_args: Sequence[str]) -> ModelEstimate | None:
    """The model of the table that arguments of ``vllm serve`` name."""
    return next(filter(None, (find_model(arg.rpartition("=")[2]) for arg in vllm_args)), None)


# -- bucket and disk -----------------------------------------------------------------------------


def use_prices(settings: Settings, known: Known) -> None:
    """Use a corpus's prices if none are given, and the price of a transfer to the first replica."""
    near = settings.replicas[:1]
    crossing, store = crossing_price(settings, *near), STORES["aws"]
    if near:
        known.crossing_dollars_gb = crossing
    elif crossing:
        store = replace(STORES["aws-other-region"], dollars_gb_read=crossing)
    elsewhere = settings.endpoint_url and not is_amazons(settings.endpoint_url)
    known.store = known.store or (STORES["minio-nvme"] if elsewhere else store)


def measure_tier(folder: Path, nbytes: int) -> float:
    """Milliseconds to read and check an entry of this size in the cache folder; the median.

    The file is in the page cache, as a recently fetched one is.

    Raises:
        OSError: The folder cannot be written.
    """
    times_s = []
    with at_folder(folder) as there, probe_file(there) as path:
        path.write_bytes(bytes(nbytes))
        buffer = bytearray(nbytes)
        for _ in range(_TIER_READS):
            began_s = time.perf_counter()
            with path.open("rb", buffering=0) as file:
                file.readinto(buffer)
            checksum(buffer)
            times_s.append(time.perf_counter() - began_s)
    return statistics.median(times_s) * 1e3


def measure_here(known: Known, found: Measured, loaded: LoadedSettings) -> None:
    """Measure bucket and tier at the known size of an embedding; a failure becomes a note."""
    nbytes, settings = int(inputs_of(known, found).nbytes), loaded.settings
    if settings.bucket or settings.url:
        context = CheckContext(loaded, {}, None)
        try:
            found.latency = context.ask_store(
                lambda store: measure_store(store, probe_name(), nbytes), requests=MOST_REQUESTS
            )
            if found.latency.left:
                found.notes.append(f"the probe object {found.latency.left} could not be deleted")
        except S3ECError as exc:
            found.notes.append(f"the bucket was not measured: {exc}")
        finally:
            context.close()
    try:
        found.tier_ms = measure_tier(settings.cache_dir, nbytes)
    except OSError as exc:
        found.notes.append(f"the disk tier was not measured: {settings.cache_dir}: {exc.strerror}")
