# SPDX-License-Identifier: Apache-2.0
"""What is new in the bucket's ``manifest/``: one listing, from a little before the newest delta."""

from __future__ import annotations

from dataclasses import dataclass

from s3ec.identity import Layout
from s3ec.index.ulid import first_ulid, time_ms
from s3ec.store.base import ObjectInfo, Store

# A delta is named by its writer's clock and a little before it appears: so far before the newest
# one a look begins. Those of writers that are further behind are found by the looks from the start.
OVERLAP_S = 600.0
_FULL_EVERY = 30


@dataclass(frozen=True, slots=True)
class News:
    """What one listing showed.

    Attributes:
        deltas: ULID to object; known ones among them.
        heads: Version to object.
        complete: Whether the listing began at the first delta.
    """

    deltas: dict[str, ObjectInfo]
    heads: dict[int, ObjectInfo]
    complete: bool

    @property
    def versions(self) -> list[int]:
        """Of all heads, newest first."""
        return sorted(self.heads, reverse=True)


class Watch:
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

    async def look(self, *, complete: bool = False) -> News:
        """List once.

        Args:
            complete: From the first delta, which otherwise only each thirtieth look does.

        Raises:
            UnavailableError, AccessError: Nothing is taken note of.
        """
        complete = complete or self._looks % _FULL_EVERY == 0
        deltas: dict[str, ObjectInfo] = {}
        heads: dict[int, ObjectInfo] = {}
        async for info in self._store.list(
            self._layout.manifest, start_after=self._start_after(complete=complete)
        ):
            ulid = self._layout.delta_of(info.name)
            version = self._layout.version_of(info.name)
            if ulid is not None:
                deltas[ulid] = info
            elif version is not None:
                heads[version] = info
        self._looks += 1
        for ulid, info in deltas.items():
            self._newest_ms = max(self._newest_ms, _seen_ms(ulid, info))
        return News(deltas, heads, complete)

    def _start_after(self, *, complete: bool) -> str:
        start_ms = int(self._newest_ms - OVERLAP_S * 1000)
        if complete or start_ms <= 0:
            return self._layout.deltas
        return self._layout.deltas + first_ulid(start_ms)


def _seen_ms(ulid: str, info: ObjectInfo) -> float:
    """When a delta was written, in doubt earlier: a writer's clock may be ahead."""
    named_ms = time_ms(ulid)
    return min(named_ms, info.modified_s * 1000) if info.modified_s > 0 else named_ms
