# SPDX-License-Identifier: Apache-2.0
"""Measurements of a made-up run, to build reports from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from s3ec.codec import Header, Shape
from s3ec.dev.demo.bucket import Entry
from s3ec.dev.demo.report import Asked, Encoded, Report, build_pictures
from s3ec.identity import digest_of_name

NAMESPACE = "models-tiny-0123456789abcdef"


def name_of(number: int) -> str:
    """Object name of one embedding, below ``objects/``."""
    identifier = f"{number:064x}"
    return f"{identifier[:2]}/{identifier}.safetensors"


def digest_of(number: int) -> str:
    """As s3ec's log has it."""
    return digest_of_name(name_of(number)).hex()


def entry(number: int) -> Entry:
    """A 2 x 4 embedding in the bucket."""
    header = Header(
        identifier=f"{number:064x}",
        namespace=NAMESPACE,
        modality="image",
        shape=Shape(2, 4, "bfloat16"),
        checksum="0" * 32,
        data_start=448,
    )
    return Entry(f"{NAMESPACE}/objects/{name_of(number)}", digest_of(number), 464, header)


def answer(*tokens: int, shift: float = 0.0) -> dict[str, Any]:
    """An answer as EngineProcess.chat returns it, every probability shifted by ``shift``."""
    logprobs = [{str(token): -0.5 + shift, "999": -3.0 + shift} for token in tokens]
    return {"token_ids": list(tokens), "logprobs": logprobs}


def fetched(number: int, source: str = "bucket") -> str:
    """The line of prefetch.py."""
    return (
        "DEBUG 11-21 10:30:38 [s3ec.prefetch] "
        f"fetched digest={digest_of(number)} source={source} nbytes=464 seconds=0.0{number + 1}0000"
    )


def loaded(number: int) -> str:
    """The line of connector/worker.py."""
    return (
        "DEBUG 11-21 10:30:38 [s3ec.connector.worker] "
        f"loaded digest={digest_of(number)} nbytes=16 seconds=0.00{number + 1}000"
    )


def stored(number: int) -> str:
    """The line of connector/saves.py."""
    return (
        "DEBUG 11-21 10:30:38 [s3ec.connector.saves] "
        f"stored digest={digest_of(number)} nbytes=16 seconds=0.{number + 1}00000"
    )


def make_report(
    count: int = 3,
    *,
    hits: int | None = None,
    misses: int = 0,
    preset: str = "tiny",
    answers: Sequence[dict[str, Any]] | None = None,
    plain_answers: Sequence[dict[str, Any]] | None = None,
    consumer_log: str | None = None,
    first_token_s: float = 0.5,
    encode_s: float = 4.0,
) -> Report:
    """The report of a run in which all went well, but for what is given."""
    numbers = range(count)
    good = [answer(number, 7) for number in numbers]
    if consumer_log is None:
        consumer_log = "\n".join(line for n in numbers for line in (fetched(n), loaded(n)))
    pictures = build_pictures(
        [Encoded(f"p{number}.png", encode_s, entry(number)) for number in numbers],
        [Asked(first_token_s, one) for one in answers or good],
        [Asked(5.0, one) for one in plain_answers or good],
        producer_log="\n".join(map(stored, numbers)),
        consumer_log=consumer_log,
    )
    return Report(
        preset=preset,
        vllm_version="0.32.0",
        bucket="demo-bucket",
        namespace=NAMESPACE,
        pictures=pictures,
        hits=count if hits is None else hits,
        misses=misses,
        starts_s={"producer": 30.0, "consumer": 31.0},
    )
