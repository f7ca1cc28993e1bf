# SPDX-License-Identifier: Apache-2.0
"""Deletes entries, or a whole namespace: the objects go, and readers find out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from s3ec.counters import Report, unreported
from s3ec.identity import Key, Layout
from s3ec.index2.local import NodeFolder
from s3ec.index2.maker import Made
from s3ec.store.base import ObjectInfo, Store


async def delete_entries(
    store: Store,
    layout: Layout,
    keys: Iterable[Key],
    *,
    node: NodeFolder | None = None,
    report: Report = unreported,
) -> None:
    """Delete some entries, 1,000 a request; those that are absent too.

    Args:
        node: This node's files, so that its engines are told; others learn by one 404 each.
        report: Told how many are gone.

    Raises:
        UnavailableError: The store does not answer now; some may be deleted.
        AccessError: It refuses.
    """
    raise NotImplementedError


async def delete_chosen(
    store: Store,
    layout: Layout,
    choose: Callable[[Sequence[ObjectInfo]], Sequence[ObjectInfo]],
    *,
    deleted: Callable[[Sequence[Key]], None] = lambda _: None,
    node: NodeFolder | None = None,
    folder: Path | None = None,
    report: Report = unreported,
) -> Made:
    """Delete objects that a listing shows, while it is read; what is left becomes a snapshot.

    Args:
        choose: Given some listed objects, says which of them go.
        deleted: Told of entries that are gone.
        node: This node's files, so that its engines are told.
        folder: For temporary files, as of ``maker.listing_snapshot``.
        report: Told how many objects were looked at.

    Raises:
        UnavailableError, AccessError: As delete_entries. No snapshot is written.
        TierError: The folder for temporary files is full.
    """
    raise NotImplementedError
