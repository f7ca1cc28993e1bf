# SPDX-License-Identifier: Apache-2.0
"""What one engine's log and answers say: when which embedding was stored, fetched, loaded."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# s3ec's DEBUG lines (connector/saves.py, prefetch.py, connector/worker.py). Lines of several
# processes come together in the log, so one is taken only if it is whole.
_EVENT = re.compile(
    r"\b(?P<kind>stored|fetched|loaded) digest=(?P<digest>[0-9a-f]{32})"
    r"(?: source=(?P<source>\w+))? nbytes=(?P<nbytes>\d+) seconds=(?P<seconds>\d+\.\d{6})\s*$",
    re.MULTILINE,
)


@dataclass(frozen=True, slots=True)
class Event:
    """One embedding on its way.

    Attributes:
        kind: ``stored`` (in the bucket), ``fetched`` (to this node), ``loaded`` (into the
            engine's encoder cache).
        digest: Of its key, 32 hex digits.
        nbytes: Of the whole entry for ``fetched``, of the tensor for the others.
        seconds: How long it took.
        source: ``bucket`` or ``tier``, for ``fetched`` only.
    """

    kind: str
    digest: str
    nbytes: int
    seconds: float
    source: str | None = None


def parse_events(log: str) -> list[Event]:
    """Every event in a log, in the order of its lines."""
    return [
        Event(
            kind=found["kind"],
            digest=found["digest"],
            nbytes=int(found["nbytes"]),
            seconds=float(found["seconds"]),
            source=found["source"],
        )
        for found in _EVENT.finditer(log)
    ]


def seconds_by_digest(
    events: list[Event], kind: str, source: str | None = None
) -> dict[str, float]:
    """Digest to seconds of the first event of a kind, from one source if that is given."""
    found: dict[str, float] = {}
    for event in events:
        if event.kind == kind and event.source == source:
            found.setdefault(event.digest, event.seconds)
    return found


def same_tokens(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two answers of EngineProcess.chat are the same tokens."""
    return bool(one["token_ids"] == other["token_ids"])


def own_logprobs(answer: Mapping[str, Any]) -> tuple[float, ...]:
    """The log probability of each of the answer's own tokens."""
    return tuple(
        place[str(token)]
        for token, place in zip(answer["token_ids"], answer["logprobs"], strict=True)
    )


def logprob_gap(one: Mapping[str, Any], other: Mapping[str, Any]) -> float | None:
    """Largest difference of log probabilities at the same place.

    Returns:
        None where the answers have no place-by-place counterpart: another length, or other
        tokens among the likeliest.
    """
    ours, theirs = one["logprobs"], other["logprobs"]
    if len(ours) != len(theirs):
        return None
    gap = 0.0
    for here, there in zip(ours, theirs, strict=True):
        if here.keys() != there.keys():
            return None
        gap = max([gap, *(abs(value - there[token]) for token, value in here.items())])
    return gap
