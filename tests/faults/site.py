# SPDX-License-Identifier: Apache-2.0
"""A real bucket behind a proxy and the cache folder of one node, looked at from outside."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

from s3ec.counters import Counters
from s3ec.dev.rigs.proxy import Exchange, FaultProxy, Rule
from s3ec.dev.rigs.proxy_faults import Stall, StallUpload
from s3ec.identity import digest_of_name
from s3ec.index.deltas import parse_delta
from s3ec.index.names import deltas_prefix
from s3ec.index.snapshot import Segment
from s3ec.testing.server import S3Server
from s3ec.tier.tier import Tier
from tests.faults.embeddings import LAYOUT, NAMESPACE, key_at, spooled_below
from tests.faults.indexed import Bucket
from tests.support.indexes import sizes_in
from tests.support.on_disk import audit_of, found_in

OBJECTS = f"/{LAYOUT.objects}"


class Created:
    """Lets requests through, and remembers which PUT the server took.

    Attributes:
        under_way: Requests that the server has not answered yet, also of processes that are dead.
    """

    def __init__(self) -> None:
        self.names: Counter[str] = Counter()
        self.under_way = 0

    async def apply(self, exchange: Exchange) -> None:
        self.under_way += 1
        try:
            reply = await exchange.forward()
        finally:
            self.under_way -= 1
        _, _, name = exchange.request.target.partition(OBJECTS)
        if exchange.request.method == "PUT" and reply.status == 200 and name:
            self.names[name.partition("?")[0]] += 1
        await exchange.send(reply)


class Site:
    """A bucket behind a proxy, and one node's cache folder.

    Attributes:
        stocked: Names of objects that no client of the proxy put.
    """

    def __init__(self, proxy: FaultProxy, bucket: str, server: S3Server, cache_dir: Path) -> None:
        self.proxy = proxy
        self.bucket = bucket
        self.cache_dir = cache_dir
        self.created = Created()
        self.stocked: set[str] = set()
        self.proxy.add(Rule(self.created))
        self._held = Bucket(server, bucket)
        self.client = self._held.client

    def settings(self, **other: str) -> dict[str, str]:
        return {
            "bucket": self.bucket,
            "endpoint_url": self.proxy.url,
            "region": "us-east-1",
            "cache_dir": str(self.cache_dir),
            "min_free_bytes": "0",
            "connect_timeout_s": "10",
            "read_timeout_s": "60",
            # An answer that a test holds back is no reason for the breaker to open.
            "defer_timeout_s": "60",
            **other,
        }

    # -- the way to the bucket -------------------------------------------------------------------

    def stall(self, after: int) -> None:
        """Let so many objects through, and no more."""
        self.proxy.add(Rule(StallUpload(), method="PUT", target=OBJECTS, skip=after))

    def stall_announcements(self, *, reached: bool) -> None:
        """No delta gets through, or it does and its reply does not."""
        fault = Stall() if reached else StallUpload()
        self.proxy.add(Rule(fault, method="PUT", target=f"/{deltas_prefix(LAYOUT)}"))

    def let_through(self) -> None:
        self.proxy.clear(Rule(self.created))

    def gets(self) -> list[str]:
        """Names of the objects that were asked for since the proxy was cleared, in order."""
        return [
            request.target.partition(OBJECTS)[2].partition("?")[0]
            for request in list(self.proxy.requests)
            if request.method == "GET" and OBJECTS in request.target
        ]

    # -- the bucket, past the proxy --------------------------------------------------------------

    def stock(self, *numbers: int) -> None:
        """Put the modality's record, and these numbers' objects."""
        self._held.stock(*numbers)
        self.stocked.update(key_at(number).name for number in numbers)

    def put(self, number: int, body: bytes) -> None:
        """Put anything under a number's name, past all conditions, as only an outsider can."""
        name = key_at(number).name
        self._held.put(LAYOUT.objects + name, body)
        self.stocked.add(name)

    def objects(self) -> set[str]:
        """Names below ``objects/`` that the bucket holds."""
        names = self._held.names(LAYOUT.objects)
        return {name.removeprefix(LAYOUT.objects) for name in names}

    def announced(self) -> set[bytes]:
        """Digests that the bucket's deltas tell of."""
        found: set[bytes] = set()
        for name in self._held.names(deltas_prefix(LAYOUT)):
            rows = parse_delta(self._held.get(name), LAYOUT, name)
            found |= sizes_in(Segment.of(rows)).keys()
        return found

    def announce(self, *numbers: int) -> None:
        """One delta of these numbers' objects, as a writer of now."""
        self._held.announce(*numbers)

    def body(self, name: str) -> bytes:
        """One object as the bucket holds it."""
        return self._held.get(LAYOUT.objects + name)

    # -- the node's folder -----------------------------------------------------------------------

    def spooled(self) -> set[str]:
        return spooled_below(self.cache_dir)

    def entries(self) -> set[str]:
        """Names of the tier's entries. Not Path.rglob: folders vanish meanwhile."""
        top = str(self.cache_dir / "v1" / "objects" / NAMESPACE.name)
        return {
            f"{folder}/{name}"[len(top) + 1 :]
            for folder, _, names in os.walk(top)
            for name in names
            if name.endswith(".safetensors")
        }

    def lost(self) -> set[str]:
        """Entries that this node serves and that are neither in the bucket nor waiting for it.

        An entry leaves the spool after the bucket has it, so the bucket comes last.
        """
        entries = self.entries()
        spooled = self.spooled()
        in_bucket = self.stocked | set(self.created.names)
        return {name for name in entries - in_bucket if digest_of_name(name).hex() not in spooled}

    def complaints_unswept(self) -> list[str]:
        """The audit, as the dead left it."""
        return audit_of(found_in(self.cache_dir))

    def tier_complaints(self) -> list[str]:
        """The audit, after the sweep that every start of a process does."""
        tier = Tier(
            self.cache_dir,
            NAMESPACE.name,
            budget_bytes=2**30,
            min_free_bytes=0,
            counters=Counters(),
        )
        try:
            return audit_of(tier)
        finally:
            tier.close()
