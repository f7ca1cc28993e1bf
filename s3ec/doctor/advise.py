# SPDX-License-Identifier: Apache-2.0
"""Finds out what ``s3ec advise`` calculates with: measured where that can be done here.

What cannot be measured is what the user gave, and else an assumption that says so.
"""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path

from s3ec.codec import checksum
from s3ec.config import LoadedSettings
from s3ec.doctor.check import CheckContext
from s3ec.doctor.latency import MOST_REQUESTS, StoreLatency, measure_store
from s3ec.doctor.node import at_folder, probe_file
from s3ec.errors import ConfigError, S3ECError
from s3ec.payoff import (
    ASSUMED_READS,
    GPUS,
    ITEM_BYTES,
    STORES,
    Inputs,
    Known,
    Value,
    assumed,
    given,
    measured,
)
from s3ec.settings import Settings, is_amazons
from s3ec.store.open import probe_name

_TIER_READS = 20


@dataclass(slots=True)
class Measured:
    """What was measured; None where that was not asked for, or failed.

    Attributes:
        latency: Of the store, at the size of one embedding.
        tier_ms: Of this node's disk, at that size.
        notes: What failed and why, for people.
    """

    latency: StoreLatency | None = None
    tier_ms: float | None = None
    notes: list[str] = field(default_factory=list)


def inputs_of(known: Known, found: Measured) -> Inputs:
    """Everything that the arithmetic needs, the better source first.

    Raises:
        ConfigError: Nothing says how large an embedding is, or how long encoding takes.
    """
    like, store, seen = known.like, known.store or STORES["aws"], found.latency
    of_table = "of the table, an A4 page at 150 dpi"
    rows = _best("rows", known.rows, None, like.rows if like else None, "", of_table)
    width = _best("width", known.width, None, like.width if like else None, "", of_table)
    gpus = _best("gpus", known.gpus, None, like.gpus if like else 1)
    gpu, of_gpu = known.gpu or GPUS["h100"], "by `--gpu`" if known.gpu else "`--gpu` names another"
    encode_ms, work = None, ""
    if like is not None:
        encode_ms = like.encode_ms(gpu, gpus.value)
        work = f"{like.tflop:.2g} TFLOP, within 40%, on {gpus.value:g} {gpu.label}, {of_gpu}"
    price, of_price = gpu.dollars_an_hour, f"{gpu.label} on demand; {of_gpu}"
    fetch_ms, node_mb_s, spread = None, None, ""
    if seen is not None:
        fetch_ms, node_mb_s = seen.p50_ms, seen.node_mb_s
        spread = f"p90 {seen.p90_ms:.3g}, p99 {seen.p99_ms:.3g}"
    guess_ms = store.fetch_ms(rows.value * width.value * ITEM_BYTES)
    tier_ms, of_tier = found.tier_ms, "read and checked, cached"
    return Inputs(
        rows=rows,
        width=width,
        encode_ms=_best("encode_ms", known.encode_ms, None, encode_ms, "", work),
        gpus=gpus,
        gpu_dollars_an_hour=_best("price", known.gpu_dollars_an_hour, None, price, "", of_price),
        fetch_ms=_best("fetch_ms", known.fetch_ms, fetch_ms, guess_ms, spread, store.label),
        node_mb_s=_best("node", None, node_mb_s, store.node_mb_s, "16 at a time", store.label),
        reads=_best("reads", known.reads, None, ASSUMED_READS, "", "`--reads` says what you see"),
        store=store,
        tier_ms=None if tier_ms is None else measured(tier_ms, of_tier),
    )


def _best(
    name: str,
    said: float | None,
    seen: float | None,
    guess: float | None,
    seen_note: str = "",
    guess_note: str = "",
) -> Value:
    """What a person said, else what was measured, else an assumption.

    Raises:
        ConfigError: There is none of them.
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


# -- bucket and disk -----------------------------------------------------------------------------


def use_prices(settings: Settings, known: Known) -> None:
    """Take a corpus's prices where none are given: of another region without a replica here."""
    # As ECS, EKS and Lambda say it to what they run.
    here = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    is_far = here and settings.region and settings.region != here and not settings.replicas
    if settings.endpoint_url and not is_amazons(settings.endpoint_url):
        known.store = known.store or STORES["minio-nvme"]
    elif is_far:
        known.store = known.store or STORES["aws-other-region"]


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


def measure_here(known: Known, found: Measured, loaded: LoadedSettings) -> None:
    """Measure bucket and tier at the size that is known by now; what fails becomes a note."""
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
