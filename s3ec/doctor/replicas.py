# SPDX-License-Identifier: Apache-2.0
"""Checks of replicas: whether each is usable, what is missing, and the cost to cross regions."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Sequence
from contextlib import aclosing, suppress
from typing import Any

from s3ec.doctor.bucket import outcome_of
from s3ec.doctor.check import CheckContext, Outcome, fail, ok, warn
from s3ec.errors import (
    ConfigError,
    ConflictError,
    CorruptEntryError,
    S3ECError,
    UnavailableError,
)
from s3ec.identity import Layout, is_object_name
from s3ec.namespaces import NamespaceInfo, list_namespaces
from s3ec.payoff import DAYS_A_MONTH, crossing_dollars_gb
from s3ec.settings import Replica, Settings, is_amazons
from s3ec.store.base import ObjectInfo, Store, Wrapper
from s3ec.store.concurrency import in_parallel
from s3ec.store.open import KEPT_PROBE, PROBE_BODY, open_replica
from s3ec.store.unreachable import in_plain_words

SAMPLED = 32
"""How many entries are checked at a replica: the newest of those that were listed at home."""
_LISTED = 1000  # of a namespace; one page
_NAMESPACES = 64
_REPLICATION_S = 15 * 60.0  # the limit of S3's replication time control
_MOST_COMPARED_BYTES = 2**26
_REQUESTS = 16  # a check may take as long as so many requests in sequence


async def listed_entries(home: Store, layout: Layout) -> list[ObjectInfo]:
    """List some entries of a namespace, all if there are few: a page from a random place."""
    found: dict[str, ObjectInfo] = {}
    for start_after in (layout.objects + secrets.token_hex(1), ""):
        pages = Wrapper(home).list(layout.objects, start_after=start_after)
        async with aclosing(pages) as infos:
            async for info in infos:
                if is_object_name(info.name.removeprefix(layout.objects)):
                    found[info.name] = info
                if len(found) >= _LISTED:
                    return list(found.values())
    return list(found.values())


def newest(entries: Sequence[ObjectInfo]) -> list[ObjectInfo]:
    """The newest entries, as a sample, the newest first."""
    return sorted(entries, key=lambda info: -info.modified_s)[:SAMPLED]


async def missing_in(near: Store, sample: Sequence[ObjectInfo]) -> list[ObjectInfo]:
    """The entries of a sample that a replica does not have; a HEAD for each."""
    found = await in_parallel(sample, lambda info: near.head(info.name))
    return [info for info, there in zip(sample, found, strict=True) if there is None]


# -- doctor ----------------------------------------------------------------------------------------


def replica(context: CheckContext, place: Replica) -> Outcome:
    """Check whether a replica can be used, and has home's entries. Engines run without: it warns.

    If engines copy entries there, one small object is written, and deleted if that is allowed.
    """
    try:
        near = open_replica(context.patient, place, patient=True)
    except ConfigError as exc:  # no engine starts with it
        found, _, mend = str(exc).rpartition("; ")
        return fail(found or str(exc), mend or "correct `replicas`")
    try:
        return _replica(context, place, near)
    finally:
        with suppress(S3ECError):
            context.ask_store(lambda store: store.close(), store=near)


def _replica(context: CheckContext, place: Replica, near: Store) -> Outcome:
    for action, call, left in (
        ("s3:GetObject", _read, "all is read at home"),
        ("s3:PutObject", _write, "it takes no copies"),
    ):
        if call is _write and not place.fill:
            continue
        try:
            context.ask_store(call, requests=_REQUESTS, store=near)
        except S3ECError as exc:
            refused = outcome_of(exc, f"s3:ListBucket and {action}")
            found, mend = refused.found, refused.mend
            if place.url:
                mend = "look at the server, at its user's commands and password, and at `maxmemory`"
            elif isinstance(exc, UnavailableError) and (
                plain := in_plain_words(exc, context.settings.at(place))
            ):
                found, _, mend = str(plain).rpartition("; ")
            return warn(f"{found}; {left}", mend)
    usable = f"can be read{' and written' * place.fill}"
    try:
        sample = context.ask_store(_sample, requests=_REQUESTS)
        missing = context.ask_store(
            lambda store: missing_in(store, sample), requests=_REQUESTS, store=near
        )
        there = [info for info in sample if info not in missing]
        # The smallest one will do.
        for info in sorted(there, key=lambda info: info.nbytes)[:1]:
            if info.nbytes <= _MOST_COMPARED_BYTES and not _is_equal(context, near, info):
                return warn(
                    f"{usable}, but its copy of {info.name} is not home's",
                    "find out who writes there; `s3ec verify --deep --repair` with its bucket "
                    "deletes what is bad",
                )
    except S3ECError as exc:
        return warn(f"{usable}; what it lacks is not known: {exc}", "see `bucket` and `read`")
    if not sample:
        return ok(f"{usable}; home has no entries to compare with")
    found = f"{usable}; it has {len(there)} of {len(sample)} entries, the newest of home's"
    late_s = max((time.time() - info.modified_s for info in missing), default=0.0)
    if late_s > _REPLICATION_S and not place.fill:
        return warn(
            f"{found}, and lacks one that is {late_s / 60:,.0f} minutes old",
            "set `fill`, or look at the bucket's replication rule and its prefix",
        )
    return ok(found)


async def _read(near: Store) -> None:
    await near.get_range(KEPT_PROBE, 0, 1)  # a HEAD's 404 does not show if the bucket is absent


async def _write(near: Store) -> None:
    try:
        await near.put_if_absent(KEPT_PROBE, [PROBE_BODY])
    except ConflictError:  # it was kept, by users whose home this is
        return
    with suppress(S3ECError):
        await near.delete(KEPT_PROBE)


async def _sample(home: Store) -> list[ObjectInfo]:
    names = (await list_namespaces(home))[:_NAMESPACES]
    listed = await in_parallel(names, lambda name: listed_entries(home, Layout(name)))
    return newest([info for entries in listed for info in entries])


def _is_equal(context: CheckContext, near: Store, info: ObjectInfo) -> bool:
    async def read(store: Store) -> bytes | None:
        body = await store.get(info.name, max_bytes=info.nbytes)
        return None if body is None else bytes(body)

    try:
        return context.ask_store(read, store=near) == context.ask_store(read)
    except CorruptEntryError:  # it is longer
        return False


# -- s3ec ns ---------------------------------------------------------------------------------------


async def replica_rows(
    home: Store, settings: Settings, namespaces: Sequence[NamespaceInfo]
) -> list[dict[str, Any]]:
    """Count the newest entries that each replica misses, and price a month's transfer to it.

    Costs a LIST for each namespace, and 32 HEADs for each replica.

    Returns:
        Rows of ``s3ec ns --json``. A count is None if a replica did not answer, and the price if a
        region or its price is not known. The bytes of a large namespace are estimated.
    """
    entries: list[ObjectInfo] = []
    month_bytes, since_s = 0.0, time.time() - DAYS_A_MONTH * 86400
    for one in namespaces[:_NAMESPACES]:
        listed = await listed_entries(home, Layout(one.name))
        fresh_bytes = sum(info.nbytes for info in listed if info.modified_s >= since_s)
        whole = max(1.0, (one.indexed or 0) / _LISTED) if len(listed) == _LISTED else 1.0
        month_bytes += fresh_bytes * whole
        entries += listed
    sample, rows = newest(entries), []
    for place in settings.replicas:
        missing, problem = None, None
        try:
            near = open_replica(settings, place, patient=True)
            try:
                missing = len(await missing_in(near, sample))
            finally:
                await near.close()
        except S3ECError as exc:  # also a profile or a file that is not there
            problem = str(exc)
        price = crossing_price(settings, place)
        rows.append({
            "replica": place.name,
            "sampled_count": len(sample),
            "missing_count": missing,
            "month_bytes": int(month_bytes),
            "month_dollars": None if price is None else price * month_bytes / 1e9,
            "problem": problem,
        })  # fmt: skip
    return rows


def crossing_price(settings: Settings, place: Replica | None = None) -> float | None:
    """Dollars for 10^9 bytes from home to a replica, or to this machine; None if not known."""
    if settings.endpoint_url and not is_amazons(settings.endpoint_url):
        return None
    # ECS, EKS and Lambda set these variables for their workloads.
    here = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    return crossing_dollars_gb(settings.region or here, (place and place.region) or here)
