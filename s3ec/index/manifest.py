# SPDX-License-Identifier: Apache-2.0
"""The manifest in the bucket: names of deltas, heads of bases, and how to list it."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from s3ec.errors import CorruptEntryError, UnavailableError
from s3ec.identity import OBJECT_SUFFIX, Layout, canonical_json, is_ulid
from s3ec.safetensors_file import CHECKSUM, plain_json, running_checksum
from s3ec.store.base import ObjectInfo, Store

# Crockford's: no I, L, O or U. In ASCII's order, so that names sort as their numbers do.
_DIGITS = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_VALUE = {digit: value for value, digit in enumerate(_DIGITS)}
_LENGTH = 26
_TIME_DIGITS = 10
_MAX_MS = 2**48 - 1
_RANDOM_BITS = 80
# How far one name of a millisecond is from the last one. More than one step, so that a process
# and its fork do not make the same names.
_STEP_BITS = 32


def time_ms(name: str) -> int:
    """When a name was made, by its writer's clock; milliseconds since the epoch.

    Args:
        name: One for which identity.is_ulid holds.
    """
    value = 0
    for digit in name[:_TIME_DIGITS]:
        value = value << 5 | _VALUE[digit]
    return value


def first_ulid(at_ms: int) -> str:
    """The smallest name of a millisecond: those made at that time or later are not below it.

    Args:
        at_ms: Milliseconds since the epoch; what a name cannot hold becomes the nearest it can.
    """
    return _spell(min(max(at_ms, 0), _MAX_MS), 0)


class Ulids:
    """Makes names. Each is greater than the one before, even if the clock stands or steps back.

    Not thread-safe. Two makers agree on a name with a chance of 2**-80 per millisecond.
    """

    def __init__(self, *, random_bits: Callable[[int], int] = secrets.randbits) -> None:
        self._random_bits = random_bits
        self._ms = -1
        self._random = 0

    def next(self, now_s: float) -> str:
        """A fresh name.

        Args:
            now_s: Seconds since the epoch.
        """
        ms = min(max(int(now_s * 1000), 0), _MAX_MS)
        if ms <= self._ms:
            self._random += 1 + self._random_bits(_STEP_BITS)
            if self._random < 1 << _RANDOM_BITS:
                return _spell(self._ms, self._random)
            ms = self._ms + 1
        self._ms = ms
        self._random = self._random_bits(_RANDOM_BITS)
        return _spell(ms, self._random)


def _spell(ms: int, random: int) -> str:
    value = ms << _RANDOM_BITS | random
    return "".join(_DIGITS[value >> shift & 31] for shift in range(5 * (_LENGTH - 1), -1, -5))


FORMAT = 1
# A hundred thousand merged deltas are 3 MB; a compaction takes far fewer.
MAX_HEAD_BYTES = 8 * 2**20
# Named by one head, as its size is bounded. Further deltas wait until some of these are deleted,
# and are applied by readers meanwhile.
MAX_MERGED = 100_000
MAX_VERSION = 10**12 - 1
MAX_SHARD_ROWS = 2**20
# Digests are hashes, so shards differ: by a thousandth at this size, as a standard deviation.
_ROOM = 0.99
_MAX_NUMBER = 10**15 - 1  # what plain_json reads
_RUN = re.compile(r"[0-9a-f]{16}")
_HEAD_FIELDS = {*("format", "version", "run", "created_s", "entries", "shards", "merged")}


@dataclass(frozen=True, slots=True)
class BaseFile:
    """One file of a base.

    Attributes:
        nbytes: Its size.
        xxh3: xxh3-128 of all its bytes, 32 hex digits.
    """

    nbytes: int
    xxh3: str

    @classmethod
    def of(cls, pieces: Iterable[bytes | memoryview]) -> BaseFile:
        """Size and checksum of a file that consists of these pieces."""
        nbytes, running = 0, running_checksum()
        for piece in pieces:
            nbytes += memoryview(piece).nbytes
            running.update(piece)
        return cls(nbytes, running.hexdigest())


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of a base whose digests' leading byte is in ``first..last``.

    Every shard has both files, also one without entries.

    Attributes:
        first: Lowest leading byte.
        last: Highest leading byte.
        entries: Rows.
        segment: Its rows.
        bloom: Its filter.
    """

    first: int
    last: int
    entries: int
    segment: BaseFile
    bloom: BaseFile


@dataclass(frozen=True, slots=True)
class BaseManifest:
    """What ``manifest/head/VERSION.json`` says.

    Attributes:
        version: Counts from 1.
        run: 16 hex digits of the compaction that wrote the shards.
        created_s: Unix seconds.
        entries: Rows of all shards.
        shards: Cover the leading bytes 0..255 in order, without gap or overlap.
        merged: ULIDs of deltas that are contained in the base and may still be in the bucket.
    """

    version: int
    run: str
    created_s: int
    entries: int
    shards: tuple[Shard, ...]
    merged: frozenset[str] = field(default_factory=frozenset)

    @property
    def nbytes(self) -> int:
        """Bytes of all segments together, filters left out."""
        return sum(shard.segment.nbytes for shard in self.shards)

    @property
    def bloom_nbytes(self) -> int:
        """Bytes of all filters together."""
        return sum(shard.bloom.nbytes for shard in self.shards)

    def segment_name(self, layout: Layout, shard: Shard) -> str:
        """Object name of one shard's rows."""
        return layout.shard(self.version, self.run, shard.first, shard.last)

    def bloom_name(self, layout: Layout, shard: Shard) -> str:
        """Object name of one shard's filter."""
        return layout.bloom(self.version, self.run, shard.first, shard.last)

    def to_json(self) -> bytes:
        """The file: canonical JSON, so equal heads are equal bytes."""
        content = {
            "format": FORMAT,
            "version": self.version,
            "run": self.run,
            "created_s": self.created_s,
            "entries": self.entries,
            "shards": [
                {
                    "first": shard.first,
                    "last": shard.last,
                    "entries": shard.entries,
                    "nbytes": shard.segment.nbytes,
                    "xxh3": shard.segment.xxh3,
                    "bloom": {"nbytes": shard.bloom.nbytes, "xxh3": shard.bloom.xxh3},
                }
                for shard in self.shards
            ],
            "merged": sorted(self.merged),
        }
        return canonical_json(content).encode()


def shard_ranges(entries: int) -> list[tuple[int, int]]:
    """Leading bytes (first, last) of each shard of a base of so many entries.

    A power of two of them, at most 256, so that shards have at most about 2**20 rows.
    """
    shards = 1
    while shards < 256 and entries > shards * MAX_SHARD_ROWS * _ROOM:
        shards *= 2
    step = 256 // shards
    return [(first, first + step - 1) for first in range(0, 256, step)]


def parse_head(blob: bytes | memoryview, *, name: str = "head") -> BaseManifest:
    """Read and check a head.

    Args:
        blob: The whole file.
        name: What errors call it.

    Raises:
        CorruptEntryError: ``reason`` is ``version`` where another format wrote it: a newer
            s3ec, so the base is of no use here; ``size`` or ``header`` where it is unusable.
    """
    if len(blob) > MAX_HEAD_BYTES:
        raise CorruptEntryError(
            f"{name}: {len(blob)} bytes are over the limit of {MAX_HEAD_BYTES}", reason="size"
        )
    try:
        content = plain_json(bytes(blob).decode("utf-8"))
    except (ValueError, RecursionError) as exc:
        raise CorruptEntryError(f"{name}: not acceptable JSON: {exc}", reason="header") from exc
    if not isinstance(content, dict) or "format" not in content:
        raise CorruptEntryError(f"{name}: not a head of an index", reason="header")
    if content["format"] != FORMAT or type(content["format"]) is not int:
        raise CorruptEntryError(
            f"{name}: format {content['format']!r:.40}, expected {FORMAT}", reason="version"
        )
    try:
        return _checked(content)
    except _WrongError as exc:
        raise CorruptEntryError(f"{name}: {exc}", reason="header") from exc


class _WrongError(ValueError):
    """What a head says cannot be true."""


def _checked(content: dict[str, Any]) -> BaseManifest:
    if content.keys() != _HEAD_FIELDS:
        raise _WrongError("has other fields than a head")
    if not isinstance(content["shards"], list) or not isinstance(content["merged"], list):
        raise _WrongError("shards and merged must be lists")
    merged = content["merged"]
    if not all(isinstance(name, str) and is_ulid(name) for name in merged):
        raise _WrongError("merged holds something else than ULIDs")
    shards = tuple(_checked_shard(shard) for shard in content["shards"])
    _check_cover(shards)
    head = BaseManifest(
        version=_number(content, "version", 1, MAX_VERSION),
        run=_text(content, "run", _RUN),
        created_s=_number(content, "created_s", 0, _MAX_NUMBER),
        entries=_number(content, "entries", 0, _MAX_NUMBER),
        shards=shards,
        merged=frozenset(merged),
    )
    if head.entries != sum(shard.entries for shard in shards):
        raise _WrongError("entries and shards disagree")
    return head


def _checked_shard(content: object) -> Shard:
    if not isinstance(content, dict) or content.keys() != {
        *("first", "last", "entries", "nbytes", "xxh3", "bloom")
    }:
        raise _WrongError("a shard has other fields")
    first = _number(content, "first", 0, 255)
    return Shard(
        first=first,
        last=_number(content, "last", first, 255),
        entries=_number(content, "entries", 0, _MAX_NUMBER),
        segment=_checked_blob({name: content[name] for name in ("nbytes", "xxh3")}),
        bloom=_checked_blob(content["bloom"]),
    )


def _checked_blob(content: object) -> BaseFile:
    if not isinstance(content, dict) or content.keys() != {"nbytes", "xxh3"}:
        raise _WrongError("a file must have nbytes and xxh3")
    return BaseFile(_number(content, "nbytes", 1, _MAX_NUMBER), _text(content, "xxh3", CHECKSUM))


def _check_cover(shards: tuple[Shard, ...]) -> None:
    expected = 0
    for shard in shards:
        if shard.first != expected:
            raise _WrongError("shards overlap or leave a gap")
        expected = shard.last + 1
    if expected != 256:
        raise _WrongError("shards do not cover all leading bytes")


def _number(content: dict[str, Any], name: str, low: int, high: int) -> int:
    value = content[name]
    # By type, since Python takes True for 1 and other readers don't.
    if type(value) is not int or not low <= value <= high:
        raise _WrongError(f"{name} must be a number in {low}..{high}")
    return value


def _text(content: dict[str, Any], name: str, pattern: re.Pattern[str]) -> str:
    value = content[name]
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise _WrongError(f"{name} is malformed")
    return value


Run = tuple[int, str]


@dataclass(frozen=True, slots=True)
class ManifestListing:
    """What one listing showed. Names of no known form are left out, and so never deleted.

    Attributes:
        deltas: ULID to object; in a look for news, known ones among them.
        heads: Version to object.
        runs: Version and run to the shards and filters of that run; none in a look for news.
        complete: Whether the listing was to begin at the first delta.
    """

    deltas: Mapping[str, ObjectInfo]
    heads: Mapping[int, ObjectInfo]
    runs: Mapping[Run, Sequence[ObjectInfo]]
    complete: bool = True

    @property
    def version(self) -> int:
        """The version of the newest base, 0 where there is none."""
        return max(self.heads, default=0)

    def unmerged(self, head: BaseManifest | None) -> list[str]:
        """ULIDs of the deltas that are not in this base, in rising order; all if it is None."""
        return sorted(self.deltas.keys() - (head.merged if head else frozenset()))


async def take_snapshot(store: Store, layout: Layout, start_after: str = "") -> ManifestListing:
    """List ``manifest/``, one request per 1000 objects.

    Args:
        start_after: The name behind which to begin; empty for all.

    Raises:
        UnavailableError: The store does not answer now.
        AccessError: It refuses.
    """
    deltas: dict[str, ObjectInfo] = {}
    heads: dict[int, ObjectInfo] = {}
    runs: dict[Run, list[ObjectInfo]] = defaultdict(list)
    async for info in store.list(layout.manifest, start_after=start_after):
        if (ulid := layout.delta_of(info.name)) is not None:
            deltas[ulid] = info
        elif (version := layout.version_of(info.name)) is not None:
            heads[version] = info
        elif info.name.endswith(OBJECT_SUFFIX) and (run := layout.run_of(info.name)) is not None:
            runs[run].append(info)
    return ManifestListing(deltas, heads, dict(runs))


async def read_head(store: Store, layout: Layout, version: int) -> BaseManifest | None:
    """The head of one version, or None where it is gone.

    Raises:
        CorruptEntryError: It cannot be used; the message names it. Reason ``version`` where a
            newer s3ec wrote it.
    """
    name = layout.head(version)
    blob = await store.get(name, max_bytes=MAX_HEAD_BYTES)
    if blob is None:
        return None
    # It may name a hundred thousand deltas.
    head = await asyncio.to_thread(parse_head, blob, name=name)
    if head.version != version:
        raise CorruptEntryError(f"{name}: says it is version {head.version}", reason="header")
    return head


async def newest_head(
    store: Store, layout: Layout, snapshot: ManifestListing
) -> BaseManifest | None:
    """The head that readers use now; None where there is no base yet.

    Raises:
        CorruptEntryError: As read_head.
        UnavailableError: It vanished since it was listed.
    """
    if not snapshot.version:
        return None
    head = await read_head(store, layout, snapshot.version)
    if head is None:
        raise UnavailableError(f"{layout.head(snapshot.version)} vanished while it was looked at")
    return head


async def indexed_entries(store: Store, layout: Layout) -> int | None:
    """How many entries the newest base holds; None where there is none that can be read.

    What was stored since is not in it. Costs two small requests.

    Raises:
        UnavailableError: The store does not answer now.
        AccessError: It refuses.
    """
    versions = [layout.version_of(info.name) or 0 async for info in store.list(layout.heads)]
    if not any(versions):
        return None
    try:
        head = await read_head(store, layout, max(versions))
    except CorruptEntryError:
        return None
    return head.entries if head else None


# A delta is named by its writer's clock and a little before it appears: so far before the newest
# one a look begins. Those of writers that are further behind are found by the looks from the start.
OVERLAP_S = 600.0
_FULL_EVERY = 30


class ManifestPoller:
    """Looks for news of one namespace. One request a look, and one per 1000 new deltas.

    ``base/`` sorts before ``delta/``, and ``head/`` after it: a listing that starts at a delta
    shows all later deltas and all heads, and none of the shards. Nothing relies on the order;
    it saves requests.
    """

    def __init__(self, store: Store, layout: Layout) -> None:
        self._store = store
        self._layout = layout
        self._newest_ms = 0.0
        self._looks = 0

    async def look(self, *, complete: bool = False) -> ManifestListing:
        """List once.

        Args:
            complete: From the first delta, which otherwise only each thirtieth look does.

        Raises:
            UnavailableError, AccessError: Nothing is taken note of.
        """
        complete = complete or self._looks % _FULL_EVERY == 0
        start_after = self._start_after(complete=complete)
        news = await take_snapshot(self._store, self._layout, start_after)
        self._looks += 1
        for ulid, info in news.deltas.items():
            self._newest_ms = max(self._newest_ms, _seen_ms(ulid, info))
        return replace(news, complete=complete)

    def _start_after(self, *, complete: bool) -> str:
        start_ms = int(self._newest_ms - OVERLAP_S * 1000)
        if complete or start_ms <= 0:
            return self._layout.deltas
        return self._layout.deltas + first_ulid(start_ms)


def _seen_ms(ulid: str, info: ObjectInfo) -> float:
    """When a delta was written, in doubt earlier: a writer's clock may be ahead."""
    named_ms = time_ms(ulid)
    return min(named_ms, info.modified_s * 1000) if info.modified_s > 0 else named_ms
