# SPDX-License-Identifier: Apache-2.0
"""The figures of one run, put together from what was measured, and what is wrong with them."""

from __future__ import annotations

import json
import shlex
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from s3ec.dev.demo.bucket import Entry
from s3ec.dev.demo.events import (
    logprob_gap,
    own_logprobs,
    parse_events,
    same_tokens,
    seconds_by_digest,
)


@dataclass(frozen=True, slots=True)
class Encoded:
    """A picture that the producer encoded.

    Attributes:
        name: File name.
        seconds: Of the request: reading, preparing, encoding and copying the picture.
        entry: What it left in the bucket.
    """

    name: str
    seconds: float
    entry: Entry


@dataclass(frozen=True, slots=True)
class Asked:
    """One question about one picture, answered.

    Attributes:
        seconds: To its first token, in the engine.
        answer: As EngineProcess.chat returns it, with log probabilities.
    """

    seconds: float
    answer: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Picture:
    """One line of the report; times in seconds, None where the log does not hold them."""

    name: str
    digest: str
    rows: int
    width: int
    dtype: str
    nbytes: int
    encode_s: float
    store_s: float | None
    fetch_s: float | None
    load_s: float | None
    first_token_s: float
    plain_first_token_s: float
    same_tokens: bool
    logprob_gap: float | None
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]

    @property
    def identical(self) -> bool:
        """Whether both engines gave the same tokens with the same probabilities."""
        return self.same_tokens and self.logprob_gap == 0


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over all pictures; times in seconds."""

    nbytes: int
    encode_s: float
    store_s: float
    fetch_s: float
    load_s: float
    first_token_s: float
    plain_first_token_s: float


@dataclass(frozen=True, slots=True)
class Report:
    """Everything the demo found out.

    Attributes:
        preset: Of the model.
        vllm_version: That ran.
        bucket: That held the embeddings.
        namespace: Folder of the embeddings in the bucket.
        pictures: In the order they were asked about.
        hits: Pictures that the consumer took from the cache, by vLLM's metrics.
        misses: Pictures that the consumer encoded, by vLLM's metrics.
        starts_s: Seconds that each engine took to start.
    """

    preset: str
    vllm_version: str
    bucket: str
    namespace: str
    pictures: tuple[Picture, ...]
    hits: int
    misses: int
    starts_s: Mapping[str, float]

    @property
    def totals(self) -> Totals:
        """Sums over all pictures; a time that is not known counts as 0."""
        pictures = self.pictures
        return Totals(
            nbytes=sum(p.nbytes for p in pictures),
            encode_s=sum(p.encode_s for p in pictures),
            store_s=sum(p.store_s or 0 for p in pictures),
            fetch_s=sum(p.fetch_s or 0 for p in pictures),
            load_s=sum(p.load_s or 0 for p in pictures),
            first_token_s=sum(p.first_token_s for p in pictures),
            plain_first_token_s=sum(p.plain_first_token_s for p in pictures),
        )

    @property
    def identical(self) -> bool:
        """Whether every answer is the same as without the connector."""
        return all(picture.identical for picture in self.pictures)

    @property
    def distinct_answers(self) -> int:
        """How many different answers there are, by tokens and their probabilities."""
        return len({(picture.token_ids, picture.logprobs) for picture in self.pictures})

    @property
    def distinct_texts(self) -> int:
        """How many different answers there are, by tokens alone."""
        return len({picture.token_ids for picture in self.pictures})

    @property
    def first_token_ratio(self) -> float:
        """Total time to the first token from the bucket over that without the connector."""
        return self.totals.first_token_s / self.totals.plain_first_token_s

    @property
    def encode_s(self) -> float:
        """What the producer's request for one picture took, in seconds; the median."""
        return statistics.median(picture.encode_s for picture in self.pictures)

    @property
    def break_even_s(self) -> float:
        """How long `encode_s` would have to be for a hit to take no longer than encoding.

        A slower encoder makes the producer's request longer, and the answer without s3ec by as
        much, and a hit not at all. So it is this run's `encode_s`, longer by what the hit took
        more than that answer. Seconds, the median; 0 or less where a hit costs nothing that could
        be measured.
        """
        return statistics.median(
            p.encode_s + p.first_token_s - p.plain_first_token_s for p in self.pictures
        )

    def problems(self) -> list[str]:
        """What the run failed to show, a sentence each; empty if all is well."""
        found = []
        count = len(self.pictures)
        if self.hits != count:
            found.append(f"{self.hits} hits for {count} pictures")
        if self.misses:
            found.append(f"{self.misses} pictures were encoded by the consumer")
        if not self.identical:
            names = [picture.name for picture in self.pictures if not picture.identical]
            found.append(f"other answers than without the connector: {', '.join(names)}")
        if count > 1 and self.distinct_answers == 1:
            found.append("all pictures have the same answer, so comparing answers shows nothing")
        for step, times in (
            ("fetched from the bucket", [p.fetch_s for p in self.pictures]),
            ("loaded into the encoder cache", [p.load_s for p in self.pictures]),
        ):
            missing = times.count(None)
            if missing:
                found.append(f"the log does not show that {missing} pictures were {step}")
        return found

    def to_json(self) -> dict[str, Any]:
        """All figures as plain JSON; times in seconds."""
        return {
            "demo": "s3ec",
            "preset": self.preset,
            "vllm": self.vllm_version,
            "bucket": self.bucket,
            "namespace": self.namespace,
            "ok": not self.problems(),
            "problems": self.problems(),
            "hits": self.hits,
            "misses": self.misses,
            "answers_identical": self.identical,
            "distinct_answers": self.distinct_answers,
            "distinct_texts": self.distinct_texts,
            "first_token_ratio": self.first_token_ratio,
            "encode_s": self.encode_s,
            "break_even_s": self.break_even_s,
            "totals": asdict(self.totals),
            "engine_starts_s": dict(self.starts_s),
            "pictures": [asdict(picture) for picture in self.pictures],
        }


def build_pictures(
    encoded: Sequence[Encoded],
    answers: Sequence[Asked],
    plain_answers: Sequence[Asked],
    *,
    producer_log: str,
    consumer_log: str,
) -> tuple[Picture, ...]:
    """One line per picture.

    Args:
        encoded: What the producer did.
        answers: The consumer's, one per picture in the same order.
        plain_answers: Those of the engine without the connector.
        producer_log: With s3ec's DEBUG lines; gives the store times.
        consumer_log: With s3ec's DEBUG lines; gives the fetch and load times. A fetch that
            did not come from the bucket does not count.
    """
    stored = seconds_by_digest(parse_events(producer_log), "stored")
    consumer = parse_events(consumer_log)
    fetched = seconds_by_digest(consumer, "fetched", source="bucket")
    loaded = seconds_by_digest(consumer, "loaded")
    return tuple(
        Picture(
            name=picture.name,
            digest=picture.entry.digest,
            rows=picture.entry.header.shape.rows,
            width=picture.entry.header.shape.width,
            dtype=picture.entry.header.shape.dtype,
            nbytes=picture.entry.nbytes,
            encode_s=picture.seconds,
            store_s=stored.get(picture.entry.digest),
            fetch_s=fetched.get(picture.entry.digest),
            load_s=loaded.get(picture.entry.digest),
            first_token_s=ours.seconds,
            plain_first_token_s=theirs.seconds,
            same_tokens=same_tokens(ours.answer, theirs.answer),
            logprob_gap=logprob_gap(ours.answer, theirs.answer),
            token_ids=tuple(ours.answer["token_ids"]),
            logprobs=own_logprobs(ours.answer),
        )
        for picture, ours, theirs in zip(encoded, answers, plain_answers, strict=True)
    )


def deploy_command() -> str:
    """The command of a real deployment, with MODEL, BUCKET and REGION to fill in."""
    transfer = {
        "ec_connector": "S3ECConnector",
        "ec_role": "ec_both",
        "ec_connector_extra_config": {"bucket": "BUCKET", "region": "REGION"},
    }
    return f"vllm serve MODEL --ec-transfer-config {shlex.quote(json.dumps(transfer))}"
