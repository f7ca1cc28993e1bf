# SPDX-License-Identifier: Apache-2.0
"""Rows for the tests of the index, and the plain model that they are compared with."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from hypothesis import strategies as st

from s3ec.identity import canonical_json
from s3ec.index.rows import EntryInfo, Rows, Tombstone
from s3ec.safetensors_file import seal

OTHER = "gemma-fedcba9876543210"
TOP = 2**64 - 1

Items = list[tuple[bytes, EntryInfo | Tombstone]]
Half = tuple[int, int]

# Halves that meet: edges, neighbours, equal first halves, a shared leading byte, and anything.
halves = st.one_of(
    st.sampled_from([0, 1, 2, 2**32, 2**63 - 1, 2**63, TOP - 1, TOP]),
    st.integers(0xAB << 56, (0xAB << 56) + 5),
    st.integers(0, TOP),
)
digests = st.builds(lambda hi, lo: struct.pack(">QQ", hi, lo), halves, halves)
times = st.integers(0, 3) | st.integers(0, 2**32 - 1)
facts = st.builds(
    EntryInfo,
    nbytes=st.integers(0, TOP),
    rows=st.integers(0, 2**32 - 1),
    width=st.integers(0, 2**32 - 1),
    dtype=st.sampled_from(["", "bfloat16", "float16", "float32"]),
    checksum=st.integers(0, 2**32 - 1),
    time_s=times,
)
items: st.SearchStrategy[Items] = st.lists(
    st.tuples(digests, st.one_of(facts, st.builds(Tombstone, times))), max_size=60
)


def as_items(rows: Rows) -> Items:
    """What rows say, in their order."""
    return [
        (
            rows.digest(row),
            Tombstone(rows.facts(row).time_s) if rows.deleted[row] else rows.facts(row),
        )
        for row in range(len(rows))
    ]


def rank(said: EntryInfo | Tombstone) -> tuple[int, bool]:
    """Of two rows for a key the one of the higher rank counts, of equal ones the later."""
    return said.time_s, isinstance(said, Tombstone)


def winners(parts: Iterable[Items]) -> dict[bytes, EntryInfo | Tombstone]:
    """The rule of conflicts, as a loop over a dict."""
    result: dict[bytes, EntryInfo | Tombstone] = {}
    for part in parts:
        for digest, said in part:
            if digest not in result or rank(said) >= rank(result[digest]):
                result[digest] = said
    return dict(sorted(result.items()))


def rows_of(count: int, *, seed: int = 0, deleted: bool = False) -> Rows:
    """Sorted rows of random digests; with ``deleted`` every fifth is a tombstone."""
    source = random.Random(seed)
    made: Items = []
    for number in range(count):
        digest = source.randbytes(16)
        if deleted and number % 5 == 0:
            made.append((digest, Tombstone(number)))
        else:
            made.append((digest, EntryInfo(100 + number, number + 1, 8, "bfloat16", number, 50)))
    return Rows.from_facts(made).sorted_unique()


def halves_of(rows: Rows) -> list[Half]:
    return list(zip(rows.digest_hi.tolist(), rows.digest_lo.tolist(), strict=True))


def near(rows: Rows) -> Iterator[Half]:
    """Digests beside those of rows, which a sloppy search would find."""
    for hi, lo in halves_of(rows):
        yield from ((hi, lo ^ 1), (hi ^ 1, lo), (lo, hi), (hi, 0), (hi, TOP), (~hi & TOP, lo))
    yield from ((0, 0), (TOP, TOP), (0, TOP), (TOP, 0))


def forged(blob: bytes, change: Callable[[dict[str, Any]], object], data: bytes = b"") -> bytes:
    """A file whose header was changed and sealed again, as one who knows the format would.

    Args:
        change: Given the header's content.
        data: In place of the columns; what was there where empty.
    """
    (length,) = struct.unpack_from("<Q", blob)
    content = json.loads(blob[8 : 8 + length])
    change(content)
    metadata = content.pop("__metadata__")
    metadata["header_xxh3"] = seal(metadata, content)
    body = canonical_json({"__metadata__": metadata, **content}).encode()
    body += b" " * (-(8 + len(body)) % 64)
    return struct.pack("<Q", len(body)) + body + (data or blob[8 + length :])
