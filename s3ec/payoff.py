# SPDX-License-Identifier: Apache-2.0
"""Computes whether storing embeddings pays, from sizes, times and prices; no I/O.

Bytes divided by the time of one encode decide. That is the bandwidth at which a download takes as
long as the encoder, and with two prices it gives how often an image must be requested again. docs/
does-it-pay.md derives each formula and gives the sources of the presets.

Times are milliseconds, sizes bytes, bandwidths MB/s (10^6 bytes), prices US dollars.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

PRICES_AS_OF = "2026-11"
DAYS_A_MONTH = 30.4
# Default for the reads of one entry from the bucket in a month. Most questions about a document
# come in one session and on one node, whose disk tier serves all but the first.
ASSUMED_READS = 1.5
# Ratios within this factor of 1 count as even.
MARGIN = 1.25
# Large objects are fetched in ranges of this size, all at once.
_RANGE_BYTES = 4 * 2**20
# Speed-up of an encoder for twice the GPUs: 1/1.385 of the time.
_SPEED_UP = 1.385
_MS_AN_HOUR = 3.6e6


class Source(StrEnum):
    """Where a number comes from."""

    MEASURED = "measured"
    GIVEN = "given"
    ASSUMED = "assumed"
    COMPUTED = "computed"
    """From the others, by a formula of docs/does-it-pay.md."""


@dataclass(frozen=True, slots=True)
class Value:
    """A number and where it comes from.

    Attributes:
        value: In the unit of the field that holds it.
        source: Source of the number.
        note: How it was found, or what is doubtful about it; may be empty.
    """

    value: float
    source: Source
    note: str = ""


def given(value: float, note: str = "") -> Value:
    """Return a value that a person gave."""
    return Value(value, Source.GIVEN, note)


def assumed(value: float, note: str = "") -> Value:
    """Return a preset, or an estimate."""
    return Value(value, Source.ASSUMED, note)


def measured(value: float, note: str = "") -> Value:
    """Return a value that was measured here."""
    return Value(value, Source.MEASURED, note)


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU, as used for estimates.

    Attributes:
        label: Name for people.
        dollars_an_hour: Price on demand.
        tflops: TFLOP/s that encoders of up to a billion parameters reach. Known within 40%.
        large_tflops: TFLOP/s that larger encoders reach.
    """

    label: str
    dollars_an_hour: float
    tflops: float
    large_tflops: float


# The values of the last four are scaled from the others by published specifications: dense bf16
# TFLOPS to the power of 0.5 (0.6 for large encoders), times memory bandwidth to the power of 0.3.
# - L40S: 362 TFLOPS, 0.864 TB/s (NVIDIA L40S datasheet)
# - H200: 989 TFLOPS, 4.8 TB/s (NVIDIA H200 datasheet)
# - B200: 2,250 TFLOPS, 8 TB/s (NVIDIA HGX B200: an eighth, without sparsity)
# - MI300X: 1,307 TFLOPS, 5.3 TB/s (AMD Instinct MI300X data sheet)
# Prices are AWS's (g6, g5, p4d, p5, g6e, p5en, p6-b200), and Azure's for the MI300X (ND MI300X v5).
GPUS: Mapping[str, Gpu] = {
    "l4": Gpu("L4", 0.8048, 45, 55),
    "a10g": Gpu("A10G", 1.006, 50, 65),
    "a100": Gpu("A100", 2.7447, 130, 180),
    "h100": Gpu("H100", 6.88, 270, 420),
    "l40s": Gpu("L40S", 1.861, 110, 150),
    "h200": Gpu("H200", 7.91, 300, 470),
    "b200": Gpu("B200", 14.24, 530, 900),
    "mi300x": Gpu("MI300X", 6.0, 350, 570),
}


@dataclass(frozen=True, slots=True)
class StorePreset:
    """A store, from published measurements and price lists.

    Attributes:
        label: Name for people.
        first_byte_ms: Median of one request from within the region or the room.
        stream_mb_s: Bandwidth of one request.
        node_mb_s: Bandwidth of all requests of a node.
        dollars_gb_month: Price of storing 10^9 bytes for a month.
        dollars_get: Price of one request.
        dollars_gb_read: Price of each 10^9 bytes read.
    """

    label: str
    first_byte_ms: float
    stream_mb_s: float
    node_mb_s: float
    dollars_gb_month: float
    dollars_get: float = 0.0
    dollars_gb_read: float = 0.0

    def fetch_ms(self, nbytes: float) -> float:
        """Return the median time of one embedding, with all its ranges requested at once."""
        stream_ms = min(nbytes, _RANGE_BYTES) / self.stream_mb_s / 1e3
        return self.first_byte_ms + max(stream_ms, nbytes / self.node_mb_s / 1e3)


STORES: Mapping[str, StorePreset] = {
    "aws": StorePreset("S3 Standard", 63, 99.6, 1250, 0.023, 4e-7),
    "aws-other-region": StorePreset(
        "S3 Standard of another region", 150, 30, 600, 0.023, 4e-7, 0.02
    ),
    "express": StorePreset("S3 Express One Zone", 15, 99.6, 1250, 0.11, 3e-8, 0.0006),
    "minio-nvme": StorePreset("MinIO on NVMe bought for it", 4, 800, 800, 0.016),
    "own-disks": StorePreset("a store on disks that are there anyway", 4, 800, 800, 0.0),
}


# Dollars for 10^9 bytes from one AWS region to another, by the region that they leave: "Data
# transfer out from Amazon S3 to another AWS Region", https://aws.amazon.com/s3/pricing/.
_CROSSING: Mapping[str, float] = {
    "af-south-1": 0.147, "ap-east-1": 0.09, "ap-northeast-1": 0.09, "ap-northeast-2": 0.08,
    "ap-northeast-3": 0.09, "ap-south-1": 0.086, "ap-southeast-1": 0.09, "ap-southeast-2": 0.098,
    "ap-southeast-3": 0.1, "me-south-1": 0.1105, "sa-east-1": 0.138,
    "us-gov-east-1": 0.03, "us-gov-west-1": 0.03,
}  # fmt: skip
_CROSSING_DOLLARS = 0.02  # from all others in America and Europe
_OHIO_VIRGINIA_DOLLARS = 0.01


def crossing_dollars_gb(source: str | None, target: str | None) -> float | None:
    """Return the price of 10^9 bytes from one AWS region to another; None if not known."""
    if source is None or target is None:
        return None
    if source == target:
        return 0.0
    if {source, target} == {"us-east-1", "us-east-2"}:
        return _OHIO_VIRGINIA_DOLLARS
    usual = _CROSSING_DOLLARS if source.startswith(("us-", "ca-", "eu-")) else None
    return _CROSSING.get(source, usual)


@dataclass(frozen=True, slots=True)
class ModelEstimate:
    """A model's estimate for one A4 page at 150 dpi (1240 x 1754), or 30 s of audio.

    Attributes:
        name: Name for tables.
        hub: Name on the hub.
        rows, width: Shape of the embedding, bf16.
        tflop: Work of one encode.
        gpus: Number of 80 GB GPUs of an engine that serves the model.
        large: True if its encoder has billions of parameters.
    """

    name: str
    hub: str
    rows: int
    width: int
    tflop: float
    gpus: int = 1
    large: bool = False

    @property
    def key(self) -> str:
        """A short name."""
        return self.name.lower().replace(" ", "-")

    @property
    def nbytes(self) -> int:
        """Size of the stored tensor in bytes."""
        return self.rows * self.width * 2

    def encode_ms(self, gpu: Gpu, gpus: int) -> float:
        """Return the time of one encode on ``gpus`` GPUs that share the encoder's work."""
        tflops = gpu.large_tflops if self.large else gpu.tflops
        return self.tflop / tflops * 1e3 / speed_up(gpus)


def speed_up(gpus: float) -> float:
    """Return how many times faster an encoder is on ``gpus`` GPUs: far less than ``gpus``."""
    return float(_SPEED_UP ** math.log2(gpus))


MODELS: Mapping[str, ModelEstimate] = {
    model.key: model
    for model in (
        ModelEstimate("Gemma3-4B", "google/gemma-3-4b-it", 256, 2560, 5.5),
        ModelEstimate("Gemma3-12B", "google/gemma-3-12b-it", 256, 3840, 5.5),
        ModelEstimate("Gemma3-27B", "google/gemma-3-27b-it", 256, 5376, 5.5),
        ModelEstimate(
            "InternVL3-38B", "OpenGVLab/InternVL3-38B", 1792, 5120, 83.9, gpus=2, large=True
        ),
        ModelEstimate(
            "InternVL3-78B", "OpenGVLab/InternVL3-78B", 1792, 8192, 84.2, gpus=4, large=True
        ),
        ModelEstimate("MiniCPM-V-4.5", "openbmb/MiniCPM-V-4_5", 576, 4096, 9.1),
        ModelEstimate("Kimi-VL-A3B-2506", "moonshotai/Kimi-VL-A3B-Thinking-2506", 2835, 2048, 25.5),
        ModelEstimate("GLM-4.5V", "zai-org/GLM-4.5V", 2772, 4096, 34.2, gpus=4),
        ModelEstimate("Kimi-VL-A3B-Instruct", "moonshotai/Kimi-VL-A3B-Instruct", 1053, 2048, 5.7),
        ModelEstimate("Ultravox-8B", "fixie-ai/ultravox-v0_5-llama-3_1-8b", 188, 4096, 2.3),
        ModelEstimate("Qwen2.5-VL-7B", "Qwen/Qwen2.5-VL-7B-Instruct", 2772, 3584, 16.8),
        ModelEstimate("Qwen2.5-VL-72B", "Qwen/Qwen2.5-VL-72B-Instruct", 2772, 8192, 17.0, gpus=4),
        ModelEstimate("Qwen3.5-9B", "Qwen/Qwen3.5-9B", 2145, 4096, 16.4),
        ModelEstimate(
            "Llama-4-Scout", "meta-llama/Llama-4-Scout-17B-16E-Instruct", 2304, 5120, 16.2, gpus=4
        ),
        ModelEstimate(
            "Mistral-Small-3.1-24B",
            "mistralai/Mistral-Small-3.1-24B-Instruct-2503",
            2145,
            5120,
            14.3,
        ),
        ModelEstimate("Phi-4-multimodal", "microsoft/Phi-4-multimodal-instruct", 3281, 3072, 12.3),
        ModelEstimate("Molmo-7B-D", "allenai/Molmo-7B-D-0924", 1152, 3584, 5.1),
        ModelEstimate(
            "Qwen3-VL-235B-A22B", "Qwen/Qwen3-VL-235B-A22B-Instruct", 2145, 16384, 16.9, gpus=8
        ),
        ModelEstimate("Qwen3-VL-8B", "Qwen/Qwen3-VL-8B-Instruct", 2145, 16384, 16.9),
        ModelEstimate("Qwen3-VL-32B", "Qwen/Qwen3-VL-32B-Instruct", 2145, 20480, 17.0, gpus=2),
        ModelEstimate("InternVL3.5-8B", "OpenGVLab/InternVL3_5-8B", 1792, 4096, 5.2),
        ModelEstimate(
            "LLaVA-OneVision-7B", "llava-hf/llava-onevision-qwen2-7b-ov-hf", 7353, 3584, 14.0
        ),
        ModelEstimate("Qwen2-Audio-7B", "Qwen/Qwen2-Audio-7B-Instruct", 750, 4096, 2.3),
        ModelEstimate("Qwen3-Omni-30B-A3B", "Qwen/Qwen3-Omni-30B-A3B-Instruct", 390, 2048, 0.5),
        ModelEstimate("Pixtral-12B", "mistralai/Pixtral-12B-2409", 2944, 5120, 3.4),
    )
}


_BY_NAME = {
    name.lower(): model
    for model in MODELS.values()
    for name in (model.key, model.hub, model.hub.rpartition("/")[2])
}


def find_model(name: str) -> ModelEstimate | None:
    """Find a model by its name on the hub, with or without the owner, or by a folder's path."""
    name = name.lower().rstrip("/")
    return _BY_NAME.get(name) or _BY_NAME.get(name.rpartition("/")[2])


def alike(name: str) -> list[str]:
    """Return models of the table with similar names, as written on the hub."""
    near = difflib.get_close_matches(name.lower().rpartition("/")[2], _BY_NAME, n=6, cutoff=0.5)
    return list(dict.fromkeys(_BY_NAME[one].hub for one in near))[:3]


def transformer_tflop(
    *, layers: int, width: int, inner: int, gated: bool, patches: int, span: int
) -> float:
    """Return the work of one vision transformer over the patches of one image, in TFLOP.

    Args:
        inner: Width of the MLP.
        gated: True if the MLP has a gate, so three matrices.
        patches: Patches of the whole image.
        span: Patches that attend to each other: those of a tile, or of the whole image.
    """
    parameters = layers * (4 * width**2 + (3 if gated else 2) * width * inner)
    return (2 * parameters * patches + 4 * layers * patches * span * width) / 1e12


@dataclass(frozen=True, slots=True)
class Inputs:
    """Facts about one kind of image, an engine and a store.

    Attributes:
        rows, width: Shape of the embedding.
        itemsize: Bytes of one of its values.
        encode_ms: Time of one encode in the engine, on all its GPUs together.
        gpus: GPUs of the engine. All take part in an encode or wait for it.
        gpu_dollars_an_hour: Price of one of them.
        fetch_ms: Median time of one embedding from the bucket to this node, fetched alone.
        node_mb_s: Highest download bandwidth of a node.
        reads: Reads of one entry from the bucket in a month.
        store: The store's prices.
        crossing_dollars_gb: Price of 10^9 bytes from home to a replica; None without one.
        tier_ms: Time of one embedding from this node's disk; None if not known.
        processor_ms: CPU time before the encoder; None if not known.
    """

    rows: Value
    width: Value
    itemsize: Value
    encode_ms: Value
    gpus: Value
    gpu_dollars_an_hour: Value
    fetch_ms: Value
    node_mb_s: Value
    reads: Value
    store: StorePreset
    crossing_dollars_gb: float | None = None
    tier_ms: Value | None = None
    processor_ms: Value | None = None

    @property
    def nbytes(self) -> float:
        """Size of one embedding in bytes."""
        return self.rows.value * self.width.value * self.itemsize.value


@dataclass(slots=True)
class Known:
    """The facts given on the command line; None for those not given.

    Attributes:
        like: A model of the table, in place of one that is read from vLLM.
        rows, width, encode_ms, fetch_ms, reads: As in Inputs.
        gpu: The engine's GPU.
        gpus: Number of GPUs.
        gpu_dollars_an_hour: Price of one GPU.
        store: Preset for prices, and for times that are not measured.
        crossing_dollars_gb: As in Inputs.
    """

    like: ModelEstimate | None = None
    rows: int | None = None
    width: int | None = None
    encode_ms: float | None = None
    fetch_ms: float | None = None
    reads: float | None = None
    gpu: Gpu | None = None
    gpus: int | None = None
    gpu_dollars_an_hour: float | None = None
    store: StorePreset | None = None
    crossing_dollars_gb: float | None = None


@dataclass(frozen=True, slots=True)
class Assessment:
    """One verdict.

    Attributes:
        word: ``yes``, ``even`` or ``no``.
        ratio: How many times better than encoding; 1 is even, and above 1 is better.
        why: A sentence with the numbers that decided.
    """

    word: str
    ratio: float
    why: str


@dataclass(frozen=True, slots=True)
class Payoff:
    """The results for some inputs.

    Attributes:
        nbytes: Size of one embedding.
        encode_ms: As in the inputs.
        tie_mb_s: Bandwidth at which a download takes as long as the encoder; KB per millisecond.
        gain_ms: Time to first token that a hit from the bucket saves, after its fetch and load.
            Below 0 a hit costs time; with ``wait`` = auto no request waits for it then.
        tier_gain_ms: The same for a hit from the tier; None if the tier's time is not known.
        encode_dollars: Price of one encode.
        month_dollars: Price of storing one embedding for a month.
        read_dollars: Price of one read from the bucket.
        break_even_reads: Reads from the bucket in a month from which on storing costs less;
            infinite if one read costs more than an encode.
        keep_days: How long an entry may stay unread before its storage has cost one encode;
            infinite if storage costs nothing.
        latency, throughput, money: The verdict on each.
    """

    nbytes: float
    encode_ms: float
    tie_mb_s: float
    gain_ms: float
    tier_gain_ms: float | None
    encode_dollars: float
    month_dollars: float
    read_dollars: float
    break_even_reads: float
    keep_days: float
    latency: Assessment
    throughput: Assessment
    money: Assessment


def pay_off(inputs: Inputs) -> Payoff:
    """Compare fetching with encoding."""
    nbytes, encode_ms = inputs.nbytes, inputs.encode_ms.value
    store, reads = inputs.store, inputs.reads.value
    gigabytes = nbytes / 1e9
    hit_ms = inputs.fetch_ms.value + (inputs.tier_ms.value if inputs.tier_ms else 0.0)
    tie_mb_s = nbytes / 1e3 / encode_ms
    engine_dollars_a_ms = inputs.gpus.value * inputs.gpu_dollars_an_hour.value / _MS_AN_HOUR
    encode_dollars = encode_ms * engine_dollars_a_ms
    month_dollars = gigabytes * store.dollars_gb_month
    read_dollars = store.dollars_get + gigabytes * store.dollars_gb_read
    saved_dollars = encode_dollars - read_dollars
    if saved_dollars <= 0:
        break_even, keep_days = math.inf, 0.0
    else:
        break_even = month_dollars / saved_dollars
        keep_days = saved_dollars / month_dollars * DAYS_A_MONTH if month_dollars else math.inf
    return Payoff(
        nbytes=nbytes,
        encode_ms=encode_ms,
        tie_mb_s=tie_mb_s,
        gain_ms=encode_ms - hit_ms,
        tier_gain_ms=None if inputs.tier_ms is None else encode_ms - inputs.tier_ms.value,
        encode_dollars=encode_dollars,
        month_dollars=month_dollars,
        read_dollars=read_dollars,
        break_even_reads=break_even,
        keep_days=keep_days,
        latency=_assess(
            encode_ms / hit_ms,
            f"encoding takes {_brief(encode_ms)} ms, a hit from the bucket {_brief(hit_ms)}",
        ),
        throughput=_assess(
            inputs.node_mb_s.value / tie_mb_s,
            f"a node fetches {_brief(inputs.node_mb_s.value)} MB/s; at {_brief(tie_mb_s)} MB/s it "
            "brings as many embeddings as the encoder makes",
        ),
        money=_assess(
            math.inf if break_even == 0 else reads / break_even,
            f"{reads:.2g} reads from the bucket a month, "
            + (
                "and one of them costs more than an encode"
                if math.isinf(break_even)
                else f"{break_even:.2g} are needed"
            ),
        ),
    )


def _brief(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _assess(ratio: float, why: str) -> Assessment:
    if ratio > MARGIN:
        return Assessment("yes", ratio, why)
    return Assessment("no" if ratio < 1 / MARGIN else "even", ratio, why)


def advised_settings(payoff: Payoff) -> dict[str, str]:
    """Return the settings of s3ec that follow, as in vLLM's JSON; defaults are left out."""
    return {} if payoff.money.word == "yes" else {"save": "worth"}


def figures(inputs: Inputs, payoff: Payoff) -> list[dict[str, Any]]:
    """Return every number with unit and source, in the order for display."""
    crossing = inputs.crossing_dollars_gb
    once = None if crossing is None else assumed(payoff.nbytes / 1e3 * crossing, "once a replica")
    rows: list[tuple[str, Value | float | None, str]] = [
        ("rows", inputs.rows, "rows"),
        ("width", inputs.width, "values"),
        ("itemsize", inputs.itemsize, "bytes"),
        ("embedding", payoff.nbytes / 1e6, "MB"),
        ("encode", inputs.encode_ms, "ms"),
        ("processor", inputs.processor_ms, "ms"),
        ("fetch", inputs.fetch_ms, "ms"),
        ("tier_read", inputs.tier_ms, "ms"),
        ("node_bandwidth", inputs.node_mb_s, "MB/s"),
        ("tie_bandwidth", payoff.tie_mb_s, "MB/s"),
        ("gain", payoff.gain_ms, "ms"),
        ("tier_gain", payoff.tier_gain_ms, "ms"),
        ("gpus", inputs.gpus, "GPUs"),
        ("gpu_price", inputs.gpu_dollars_an_hour, "$/h"),
        ("encode_price", payoff.encode_dollars * 1e6, "$ per million"),
        ("storage_price", payoff.month_dollars * 1e6, "$ per million and month"),
        ("read_price", payoff.read_dollars * 1e6, "$ per million"),
        ("crossing_price", once, "$ per million"),
        ("reads", inputs.reads, "a month"),
        ("break_even_reads", payoff.break_even_reads, "a month"),
        ("keep", payoff.keep_days, "days"),
    ]
    return [
        {
            "name": name,
            "value": one.value if math.isfinite(one.value) else None,
            "unit": unit,
            "source": str(one.source),
            "note": one.note,
        }
        for name, value, unit in rows
        if value is not None
        for one in [value if isinstance(value, Value) else Value(value, Source.COMPUTED)]
    ]
