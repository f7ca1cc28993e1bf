# SPDX-License-Identifier: Apache-2.0
"""How many requests one node of a fleet sends; docs/sizing.md multiplies what is held here."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import TypeVar

import pytest

from s3ec.index.deltas import encode_delta
from s3ec.index.names import Names, deltas_prefix
from s3ec.store.base import ObjectInfo, Store, Wrapper
from tests.unit.index.corpus import LAYOUT, REFRESH_S, Corpus, Reader, key_of

T = TypeVar("T")

_ENGINES, _WRITERS = 4, 500
_SECONDS = 2400
_PAGE = 1000


class _Billed(Wrapper):
    """Counts requests as S3 bills them: a LIST for each page of a thousand names."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.requests: Counter[str] = Counter()

    async def _around(self, op: str, name: str, call: Callable[[], Awaitable[T]]) -> T:
        self.requests[op] += op != "list"
        return await call()

    async def list(self, prefix: str, *, start_after: str = "") -> AsyncGenerator[ObjectInfo, None]:
        names = 0
        async for info in super().list(prefix, start_after=start_after):
            names += 1
            yield info
        self.requests["list"] += max(1, -(-names // _PAGE))


@pytest.mark.parametrize("per_s", [0, 1])  # 500 writers announce about one delta a second
async def test_a_node_of_four_engines_asks_as_the_page_on_sizing_says(
    per_s: int, corpus: Corpus, make_reader: Callable[..., Reader]
) -> None:
    corpus.snapshot(*range(100))
    engines = [make_reader() for _ in range(_ENGINES)]
    for engine in engines:
        await engine.refresh()
    billed = [_Billed(engine.store) for engine in engines]
    for engine, store in zip(engines, billed, strict=True):
        engine.index._store = store
    writers = [Names() for _ in range(_WRITERS)]
    poll_s = engines[0].index.poll_s
    written = 0
    for poll in range(round(_SECONDS / poll_s)):
        corpus.clock.now_s += poll_s
        while written < per_s * poll * poll_s:
            body = encode_delta([key_of(written).digest], [5], LAYOUT.namespace)
            ulid = writers[written % _WRITERS].next(corpus.clock.now_s)
            corpus.put(deltas_prefix(LAYOUT) + ulid, b"".join(body))
            written += 1
        for engine in engines:
            engine.clock.now_s += poll_s
            await engine.refresh(now=False)
    requests = sum((store.requests for store in billed), Counter())
    refreshes = _SECONDS / REFRESH_S
    assert set(requests) <= {"list", "get"}
    assert refreshes <= requests["list"] <= 1.1 * refreshes
    assert written - poll_s * per_s - REFRESH_S * per_s <= requests["get"] <= written
