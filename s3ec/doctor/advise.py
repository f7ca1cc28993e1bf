# SPDX-License-Identifier: Apache-2.0
"""Finds out what ``s3ec advise`` calculates with: measured where that can be done here.

What cannot be measured is what the user gave, and else an assumption that says so.
"""

from __future__ import annotations

import re
import statistics
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from s3ec.codec import checksum
from s3ec.doctor.latency import StoreLatency, measure_store
from s3ec.doctor.node import at_folder, probe_file
from s3ec.errors import ConfigError, S3ECError, UnavailableError
from s3ec.payoff import (
    ASSUMED_READS,
    GPUS,
    STORES,
    Gpu,
    Inputs,
    Known,
    StorePreset,
    Value,
    assumed,
    given,
    measured,
    speed_up,
    transformer_tflop,
)
from s3ec.runtime import LoopThread
from s3ec.settings import Settings
from s3ec.store.open import open_store, probe_name

_METRICS_TIMEOUT_S = 5.0
_MOST_METRICS_BYTES = 16 * 2**20
_SECONDS, _ROWS = "vllm:s3ec_encode_seconds_total", "vllm:s3ec_encoded_rows_total"
_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{[^}]*\})?\s+([0-9.eE+-]+)", re.MULTILINE)
_TIER_READS = 20
# Measuring the store takes at most twice its 20 s of reading, one write and one deletion.
LATENCY_LIMIT_S = 120.0
_LARGE_ENCODER = 2e9  # parameters


@dataclass(slots=True)
class Measured:
    """What was measured; None where that was not asked for, or failed.

    Attributes:
        pages: Of the model's processor, as describe_pages returns it.
        encode_ms_a_row: Of a running engine.
        latency: Of the store, at the size of one embedding.
        tier_ms: Of this node's disk, at that size.
        notes: What failed and why, for people.
    """

    pages: Mapping[str, Any] | None = None
    encode_ms_a_row: float | None = None
    latency: StoreLatency | None = None
    tier_ms: float | None = None
    notes: list[str] = field(default_factory=list)


def inputs_of(known: Known, found: Measured) -> Inputs:
    """Everything that the arithmetic needs, the better source first.

    Raises:
        ConfigError: Nothing says how large an embedding is, or how long encoding takes.
    """
    pages, like = found.pages, known.like
    rows = _size("rows", known.rows, pages, like.rows if like else None)
    width = _size("width", known.width, pages, like.width if like else None)
    itemsize = measured(pages["itemsize"]) if pages else assumed(2, "bf16 or fp16")
    gpus = _gpus(known, pages)
    gpu, gpu_note = _gpu(known, pages)
    store = known.store or STORES["aws"]
    nbytes = rows.value * width.value * itemsize.value
    fetch_ms, node_mb_s = _store_times(known, found, store, nbytes)
    dollars = known.gpu_dollars_an_hour
    return Inputs(
        rows=rows,
        width=width,
        itemsize=itemsize,
        encode_ms=_encode_ms(known, found, rows.value, gpu, gpu_note, gpus.value),
        gpus=gpus,
        gpu_dollars_an_hour=(
            assumed(gpu.dollars_an_hour, f"{gpu.label} on demand; {gpu_note}")
            if dollars is None
            else given(dollars)
        ),
        fetch_ms=fetch_ms,
        node_mb_s=node_mb_s,
        reads=(
            assumed(ASSUMED_READS, "`--reads` says what you see")
            if known.reads is None
            else given(known.reads)
        ),
        store=store,
        tier_ms=(
            None if found.tier_ms is None else measured(found.tier_ms, "read and checked, cached")
        ),
        processor_ms=measured(pages["processor_ms"], _of_pages(pages)) if pages else None,
    )


def _of_pages(pages: Mapping[str, Any]) -> str:
    return f"median of {pages['pages']} pictures" if pages["pages"] else "one blank A4 page"


def _size(
    name: str, said: int | None, pages: Mapping[str, Any] | None, estimate: int | None
) -> Value:
    if said is not None:
        return given(said)
    if pages:
        return measured(pages[name], _of_pages(pages))
    if estimate is None:
        raise ConfigError(
            f"nothing says how large an embedding is: `--{name}` is missing; give `--rows` and "
            "`--width`, or `--like` with a model of the table",
            field=name,
        )
    return assumed(estimate, "of the table, an A4 page at 150 dpi")


def _gpus(known: Known, pages: Mapping[str, Any] | None) -> Value:
    if known.gpus is not None:
        return given(known.gpus)
    if pages:
        return given(pages["gpus"], "by vLLM's arguments")
    return assumed(known.like.gpus if known.like else 1)


def _gpu(known: Known, pages: Mapping[str, Any] | None) -> tuple[Gpu, str]:
    """The GPU, and how it is known."""
    if known.gpu is not None:
        return known.gpu, "by `--gpu`"
    here = preset_of(str(pages["gpu"])) if pages and pages["gpu"] else None
    return (here, "of this machine") if here else (GPUS["h100"], "`--gpu` names another")


def preset_of(device: str) -> Gpu | None:
    """The preset of a device as CUDA names it, such as ``NVIDIA H100 80GB HBM3``."""
    words = set(re.split(r"[^a-z0-9]+", device.lower()))
    return next((gpu for name, gpu in GPUS.items() if name in words), None)


def _encode_ms(
    known: Known, found: Measured, rows: float, gpu: Gpu, gpu_note: str, gpus: float
) -> Value:
    if known.encode_ms is not None:
        return given(known.encode_ms)
    if found.encode_ms_a_row is not None:
        return measured(found.encode_ms_a_row * rows, "in the engine of `--from-metrics`")
    pages, like = found.pages, known.like
    note = f"within 40%, on {gpus:g} {gpu.label}, {gpu_note}"
    encoder = pages["encoder"] if pages else None
    if pages and encoder and pages["patches"]:
        tflop = transformer_tflop(**encoder, patches=int(pages["patches"]), span=int(pages["span"]))
        parameters = 12 * encoder["layers"] * encoder["width"] ** 2
        tflops = gpu.large_tflops if parameters > _LARGE_ENCODER else gpu.tflops
        return assumed(tflop / tflops * 1e3 / speed_up(gpus), f"{tflop:.2g} TFLOP, {note}")
    if like is not None:
        return assumed(like.encode_ms(gpu, int(gpus)), note)
    raise ConfigError(
        "nothing says how long encoding takes; give `--encode-ms`, or `--from-metrics` with the "
        "/metrics of an engine that runs s3ec",
        field="encode_ms",
    )


def _store_times(
    known: Known, found: Measured, store: StorePreset, nbytes: float
) -> tuple[Value, Value]:
    """Of one fetch in milliseconds, and what a node can fetch in MB/s."""
    latency = found.latency
    node_mb_s = assumed(store.node_mb_s, store.label)
    if latency is not None:
        alone, together = latency.alone, latency.together
        fetch_ms = measured(
            alone.p50_ms,
            f"p90 {alone.p90_ms:.3g}, p99 {alone.p99_ms:.3g}; 16 at a time p50 "
            f"{together.p50_ms:.3g}, p99 {together.p99_ms:.3g}",
        )
        node_mb_s = measured(latency.node_mb_s, "16 at a time")
    else:
        fetch_ms = assumed(store.fetch_ms(nbytes), store.label)
    if known.fetch_ms is not None:
        fetch_ms = given(known.fetch_ms)
    return fetch_ms, node_mb_s


def read_metrics(url: str) -> float:
    """Milliseconds that an engine with s3ec takes to encode one row.

    Args:
        url: Of its /metrics page, http or https.

    Raises:
        ConfigError: It cannot be read, or has no such figures yet.
    """
    if not url.startswith(("http://", "https://")):
        raise ConfigError("`--from-metrics` takes an http:// or https:// URL", field="from_metrics")
    try:
        with urllib.request.urlopen(url, timeout=_METRICS_TIMEOUT_S) as answer:  # noqa: S310
            text = answer.read(_MOST_METRICS_BYTES).decode(errors="replace")
    except (OSError, ValueError) as exc:  # URLError is an OSError
        reason = exc.reason if isinstance(exc, urllib.error.URLError) else exc
        raise ConfigError(
            f"`--from-metrics` {url}: {reason}; it is the engine's /metrics page",
            field="from_metrics",
        ) from exc
    sums = {_SECONDS: 0.0, _ROWS: 0.0}
    for name, value in _SAMPLE.findall(text):
        if name in sums:
            sums[name] += float(value)
    if not (sums[_SECONDS] > 0 and sums[_ROWS] > 0):
        raise ConfigError(
            f"`--from-metrics` {url}: no {_SECONDS} above 0; ask an engine with s3ec and `wait` = "
            "auto that has encoded something",
            field="from_metrics",
        )
    return sums[_SECONDS] / sums[_ROWS] * 1e3


def prices_of(settings: Settings) -> StorePreset:
    """The preset of a corpus: AWS's, or that of disks in the same room."""
    elsewhere = settings.endpoint_url and "amazonaws.com" not in settings.endpoint_url
    return STORES["minio-nvme" if elsewhere else "aws"]


def measure_bucket(settings: Settings, nbytes: int) -> StoreLatency:
    """As measure_store, with the store that the connector would use.

    Raises:
        S3ECError: As measure_store, and ConfigError.
    """
    loop = LoopThread("s3ec-advise")
    store = open_store(settings, patient=True)
    try:
        name = probe_name()
        return loop.run(measure_store(store, name, nbytes), LATENCY_LIMIT_S)
    except TimeoutError as exc:
        raise UnavailableError(f"no end within {LATENCY_LIMIT_S:.0f} s") from exc
    finally:
        loop.run(store.close(), 1.0)
        loop.stop(1.0)


def measure_tier(folder: Path, nbytes: int) -> float:
    """Milliseconds to read and check an entry of this size in the cache folder; the median.

    The file is in the page cache, as one that was fetched lately is.

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


def measure_here(known: Known, found: Measured, settings: Settings) -> None:
    """Measure bucket and tier at the size that is known by now; what fails becomes a note."""
    nbytes = int(inputs_of(known, found).nbytes)
    if settings.bucket or settings.url:
        try:
            found.latency = measure_bucket(settings, nbytes)
            if found.latency.left:
                found.notes.append(f"the probe object {found.latency.left} could not be deleted")
        except S3ECError as exc:
            found.notes.append(f"the bucket was not measured: {exc}")
    try:
        found.tier_ms = measure_tier(settings.cache_dir, nbytes)
    except OSError as exc:
        found.notes.append(f"the disk tier was not measured: {settings.cache_dir}: {exc.strerror}")
