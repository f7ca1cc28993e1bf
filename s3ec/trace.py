# SPDX-License-Identifier: Apache-2.0
"""Traces: what running engines asked of their encoder caches, as a file for replay.

A trace is JSON Lines. The first line is the header, each further line one event::

    {"format": "s3ec-trace", "version": 1, "began_s": 1764000000.0, "engines": [{...}, ...]}
    {"kind": "access", "at_s": 1.25, "engine": 0, "request": "9f...", "item": "3c...",
     "rows": 256, "modality": "image", "outcome": "bucket", "fetch_s": 0.021, ...}
    {"kind": "lost", "at_s": 2.0, "engine": 0, "count": 17}

An access is one encoder input of one request, at the moment from which the device holds it, or
will when the step has run. Requests and items are hashed with a secret that nobody keeps: equal
items have equal hashes within one trace, and nothing can be looked up by them. So a trace can be
given away, unless it was asked for with names: those of stored objects, for `s3ec hydrate`. Fields
and kinds of events that a reader does not know are ignored. The last line may be cut, as a process
that was killed leaves it.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast, get_args

import numpy as np

from s3ec.errors import ConfigError

VERSION = 1
_FORMAT = "s3ec-trace"
# Longer than any line of ours, so that a file of something else costs no memory.
_LONGEST_LINE_BYTES = 1 << 20
_HASH_BYTES = 12
# So that every time and every sum of times is a number.
_MOST_S = 1e12
# As identity.py makes them; who looks one up checks it once more.
_OBJECT_NAME = re.compile(r"[a-z0-9][a-z0-9/-]{1,240}\.safetensors")

Outcome: TypeAlias = Literal["device", "node", "bucket", "encoded", "stored"]
"""Where an access found its item.

``device``: in the engine's own encoder cache. ``node``: on this node's disk. ``bucket``: in the
bucket. ``encoded``: nowhere, or it was not worth the wait. ``stored``: a pure producer need not
encode it, since the corpus has it.
"""
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine of a trace.

    Attributes:
        namespace: What it reads and writes.
        model: Its name, as vLLM was told.
        role: ``ec_both``, ``ec_consumer`` or ``ec_producer``.
        encoder_cache_rows: What its device cache has room for, by vLLM's configuration; vLLM makes
            it larger where one item would not fit. None where that is not known.
    """

    namespace: str = ""
    model: str = ""
    role: str = ""
    encoder_cache_rows: int | None = None


@dataclass(frozen=True, slots=True)
class Header:
    """What a trace says about itself.

    Attributes:
        began_s: Seconds since the epoch. The times of its events count from here.
        engines: An event names one by its place.
    """

    began_s: float
    engines: tuple[Engine, ...]


@dataclass(frozen=True, slots=True)
class Access:
    """One encoder input that a request needed.

    Attributes:
        at_s: Since the trace began.
        request: Hashed. All items of one request have the same.
        item: Hashed. Equal for equal pictures, within one trace and namespace.
        rows: Rows of the embedding, in which vLLM counts its encoder cache.
        outcome: Where it was found.
        modality: ``image``, ``video``...
        engine: Place in the header's ``engines``. Each has an encoder cache of its own.
        nbytes: Size of the stored object; None where not known.
        waited_s: How long its request was put off for embeddings until then, all of them together.
        fetch_s: What bringing it to this node took; None where nothing was brought.
        encode_s: What encoding it is expected to take, by what this engine has measured, whatever
            the outcome was; None where nothing like it was encoded there.
        name: Of the item's object, below ``objects/``; None in a trace without names.
    """

    at_s: float
    request: str
    item: str
    rows: int
    outcome: Outcome
    modality: str = "image"
    engine: int = 0
    nbytes: int | None = None
    waited_s: float = 0.0
    fetch_s: float | None = None
    encode_s: float | None = None
    name: str | None = None

    @property
    def cost_s(self) -> float | None:
        """What this outcome took; None where that was not measured."""
        if self.outcome == "encoded":
            return self.encode_s
        return self.fetch_s if self.outcome in ("node", "bucket") else 0.0


@dataclass(frozen=True, slots=True)
class Lost:
    """Events that were not recorded, since they came faster than the disk took them.

    Attributes:
        at_s: When this was noticed, since the trace began.
        count: How many since the last such event.
    """

    at_s: float
    count: int
    engine: int = 0


Event: TypeAlias = Access | Lost


class Hasher:
    """Replaces names by hashes, with a secret."""

    def __init__(self, secret: bytes) -> None:
        """Take the secret of one trace; at most 64 bytes."""
        self._secret = secret

    def __call__(self, *names: str) -> str:
        """The hash of some names together; about 1 us."""
        parts = "\0".join(names).encode("utf-8", "surrogatepass")
        return hashlib.blake2b(parts, key=self._secret, digest_size=_HASH_BYTES).hexdigest()


# -- writing -----------------------------------------------------------------------------------


def header_line(header: Header) -> str:
    """The first line of a trace, without its end."""
    return _compact({"format": _FORMAT, "version": VERSION, **asdict(header)})


def event_line(event: Event) -> str:
    """One further line, without its end."""
    kind = "access" if isinstance(event, Access) else "lost"
    fields = {name: value for name, value in asdict(event).items() if value is not None}
    for name in ("at_s", "waited_s", "fetch_s", "encode_s"):
        if name in fields:
            fields[name] = round(fields[name], 6)
    return _compact({"kind": kind, **fields})


def _compact(document: Mapping[str, Any]) -> str:
    return json.dumps(document, separators=(",", ":"), allow_nan=False)


def merge(paths: Sequence[Path]) -> Iterator[str]:
    """The lines of one trace, from those of several engines, in order of time.

    Args:
        paths: Traces that began together, each in order of time.

    Raises:
        ConfigError, OSError: As ``events``; or there is none.
    """
    headers = [read_header(path) for path in paths]
    if not headers:
        raise ConfigError("no trace to merge; name one or more", field="trace")
    places: list[int] = []
    engines: list[Engine] = []
    for header in headers:
        places.append(len(engines))
        engines += header.engines
    began_s = min(header.began_s for header in headers)

    def moved(path: Path, header: Header, first: int) -> Iterator[Event]:
        later_s = header.began_s - began_s
        for event in events(path):
            yield replace(event, at_s=event.at_s + later_s, engine=event.engine + first)

    parts = [moved(*each) for each in zip(paths, headers, places, strict=True)]
    yield header_line(Header(began_s, tuple(engines)))
    for event in heapq.merge(*parts, key=lambda event: event.at_s):
        yield event_line(event)


# -- reading -----------------------------------------------------------------------------------


def read(path: Path) -> Iterator[Access]:
    """All accesses of a trace, in the order of its lines.

    Raises:
        ConfigError: Not a trace, or a broken one; names the line.
        OSError: It cannot be read.
    """
    return (event for event in events(path) if isinstance(event, Access))


def read_header(path: Path) -> Header:
    """What a trace says about itself. Raises as ``read``."""
    with path.open("rb") as file:
        return _parse_header(path, file.readline(_LONGEST_LINE_BYTES))


def events(path: Path) -> Iterator[Event]:
    """All events of a trace that this version knows. Raises as ``read``."""
    with path.open("rb") as file:
        header = _parse_header(path, file.readline(_LONGEST_LINE_BYTES))
        number = 1
        while line := file.readline(_LONGEST_LINE_BYTES):
            number += 1
            try:
                event = _parse_event(line, len(header.engines))
            except ValueError as exc:
                if not line.endswith(b"\n") and len(line) < _LONGEST_LINE_BYTES:
                    return  # the process was killed while it wrote this
                raise _broken(path, number, str(exc)) from exc
            if event is not None:
                yield event


def _broken(path: Path, number: int, problem: str) -> ConfigError:
    return ConfigError(
        f"{path} line {number}: {problem}; record it again (`s3ec trace`), or cut the file before "
        "this line",
        field="trace",
    )


def _parse_header(path: Path, line: bytes) -> Header:
    try:
        document = _object(line)
    except ValueError as exc:
        raise _no_trace(path) from exc
    if document.get("format") != _FORMAT:
        raise _no_trace(path)
    version = document.get("version")
    if version != VERSION:
        raise ConfigError(
            f"{path} line 1: a trace of version {version!r:.20}, and this s3ec reads version "
            f"{VERSION}; take the s3ec that has written it",
            field="trace",
        )
    try:
        given = document.get("engines")
        if not isinstance(given, list) or not given:
            raise ValueError("`engines` is not a list of engines")
        return Header(_seconds(document, "began_s") or 0.0, tuple(map(_parse_engine, given)))
    except ValueError as exc:
        raise _broken(path, 1, str(exc)) from exc


def _no_trace(path: Path) -> ConfigError:
    return ConfigError(
        f"{path} line 1: not a trace of s3ec; record one with `s3ec trace --out FILE`",
        field="trace",
    )


def _parse_engine(given: Any) -> Engine:
    if not isinstance(given, dict):
        raise ValueError("an engine is not a JSON object")
    return Engine(
        _text(given, "namespace", ""),
        _text(given, "model", ""),
        _text(given, "role", ""),
        _count(given, "encoder_cache_rows"),
    )


def _parse_event(line: bytes, engines: int) -> Event | None:
    document = _object(line)
    kind = document.get("kind")
    if kind not in ("access", "lost"):
        return None
    at_s = _seconds(document, "at_s")
    engine = document.get("engine", 0)
    if at_s is None:
        raise ValueError("`at_s` is missing")
    if type(engine) is not int or not 0 <= engine < engines:
        raise ValueError("`engine` is not the place of an engine of the header")
    if kind == "lost":
        return Lost(at_s, _count(document, "count") or 0, engine)
    rows = _count(document, "rows")
    if not rows:
        raise ValueError("`rows` is not a whole number of 1 or more")
    outcome = document.get("outcome")
    if outcome not in OUTCOMES:
        raise ValueError(f"`outcome` is none of {', '.join(OUTCOMES)}")
    return Access(
        at_s,
        _text(document, "request"),
        _text(document, "item"),
        rows,
        cast("Outcome", outcome),
        _text(document, "modality", "image"),
        engine,
        _count(document, "nbytes"),
        _seconds(document, "waited_s") or 0.0,
        _seconds(document, "fetch_s"),
        _seconds(document, "encode_s"),
        _name(document),
    )


def _name(document: Mapping[str, Any]) -> str | None:
    name = document.get("name")
    if name is not None and not (isinstance(name, str) and _OBJECT_NAME.fullmatch(name)):
        raise ValueError("`name` is not the name of an object")
    return name


def _object(line: bytes) -> dict[str, Any]:
    try:
        document = json.loads(line)
    except (ValueError, RecursionError):
        raise ValueError("not JSON") from None
    if not isinstance(document, dict):
        raise ValueError("not a JSON object")
    return document


def _seconds(document: Mapping[str, Any], name: str) -> float | None:
    value = document.get(name)
    if value is None:
        return None
    if type(value) not in (int, float) or not 0 <= value <= _MOST_S:
        raise ValueError(f"`{name}` is not a number of seconds")
    return float(value)


def _count(document: Mapping[str, Any], name: str) -> int | None:
    value = document.get(name)
    if value is not None and (type(value) is not int or value < 0):
        raise ValueError(f"`{name}` is not a whole number of 0 or more")
    return value


def _text(document: Mapping[str, Any], name: str, default: str | None = None) -> str:
    value = document.get(name, default)
    if not isinstance(value, str):
        raise ValueError(f"`{name}` is not a text")
    return value


# -- what is in it -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Summary:
    """What ``s3ec trace show`` prints.

    Attributes:
        outcomes: Accesses by outcome.
        rows: Of all distinct items, each with the most rows that it was asked with.
        seconds: From the first access to the last.
        waited_s: By all requests together.
        top_share: Share of the accesses that went to the most asked 1% of the items, 0 to 1.
        again_share: Share of the accesses that were not the first of their item.
        zipf: Exponent under which this many accesses of each item are most likely, were they drawn
            from a Zipf law; None with fewer than two items. A few accesses an item look more
            skewed than their source is.
        lost: Events that were not recorded.
    """

    accesses: int
    requests: int
    items: int
    outcomes: dict[str, int]
    rows: int
    seconds: float
    waited_s: float
    top_share: float
    again_share: float
    zipf: float | None
    lost: int


def summarize(found: Iterable[Event]) -> Summary:
    """Count the events of a trace; memory grows with its distinct items and requests."""
    items: Counter[str] = Counter()
    outcomes: Counter[str] = Counter()
    rows: dict[str, int] = {}
    waited: dict[str, float] = {}
    first_s, last_s, lost = None, 0.0, 0
    for event in found:
        if isinstance(event, Lost):
            lost += event.count
            continue
        items[event.item] += 1
        outcomes[event.outcome] += 1
        rows[event.item] = max(event.rows, rows.get(event.item, 0))
        waited[event.request] = max(event.waited_s, waited.get(event.request, 0.0))
        first_s = event.at_s if first_s is None else first_s
        last_s = event.at_s
    counts = sorted(items.values(), reverse=True)
    accesses = sum(counts)
    top = counts[: max(1, len(counts) // 100)]
    return Summary(
        accesses,
        len(waited),
        len(counts),
        {name: outcomes[name] for name in OUTCOMES if outcomes[name]},
        sum(rows.values()),
        last_s - (first_s or 0.0),
        sum(waited.values()),
        sum(top) / accesses if accesses else 0.0,
        1 - len(counts) / accesses if accesses else 0.0,
        zipf_exponent(counts),
        lost,
    )


_STEEPEST = 5.0


def zipf_exponent(counts: Sequence[int]) -> float | None:
    """The most likely exponent, 0 to 5, for counts by rank; None with fewer than two of them.

    Args:
        counts: How often each item was asked for, the most asked first.
    """
    if len(counts) < 2:
        return None
    weights = np.asarray(counts, dtype=np.float64)
    logs = np.log(np.arange(1, len(counts) + 1))
    mean = float(weights @ logs / weights.sum())
    low, high = 0.0, _STEEPEST
    # The mean of the logarithm of the rank falls with the exponent; it is to be the one seen.
    for _ in range(50):
        middle = (low + high) / 2
        chances = np.exp(-middle * logs)
        if float(chances @ logs / chances.sum()) > mean:
            low = middle
        else:
            high = middle
    return low
