# SPDX-License-Identifier: Apache-2.0
"""A real bucket behind a proxy and the cache folder of one node, looked at from outside."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from s3ec.counters import Counters
from s3ec.dev.rigs.proxy import Exchange, FaultProxy, Rule
from s3ec.dev.rigs.proxy_faults import Stall, StallUpload
from s3ec.identity import Layout, digest_of_name
from s3ec.index.segment import parse_segment
from s3ec.testing.server import LocalS3
from s3ec.tier import Tier
from tests.faults.saving import NAMESPACE, spooled_below
from tests.on_disk import audit_of, found_in

DEADLINE_S = 60.0
OBJECTS = f"/{NAMESPACE.name}/objects/"
LAYOUT = Layout(NAMESPACE.name)


class Created:
    """Lets requests through, and remembers which PUT the server took."""

    def __init__(self) -> None:
        self.names: Counter[str] = Counter()

    async def apply(self, exchange: Exchange) -> None:
        reply = await exchange.forward()
        _, _, name = exchange.request.target.partition(OBJECTS)
        if exchange.request.method == "PUT" and reply.status == 200 and name:
            self.names[name.partition("?")[0]] += 1
        await exchange.send(reply)


class Site:
    """A bucket behind a proxy, and one node's cache folder."""

    def __init__(self, proxy: FaultProxy, bucket: str, server: LocalS3, cache_dir: Path) -> None:
        self.proxy = proxy
        self.bucket = bucket
        self.cache_dir = cache_dir
        self.created = Created()
        self.stocked: set[str] = set()  # names of objects that no client of the proxy put
        self.proxy.add(Rule(self.created))
        self.client = server.client()

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

    def stall(self, after: int) -> None:
        """Let so many objects through, and no more."""
        self.proxy.add(Rule(StallUpload(), method="PUT", target=OBJECTS, skip=after))

    def stall_announcements(self, *, reached: bool) -> None:
        """No delta gets through, or it does and its reply does not."""
        fault = Stall() if reached else StallUpload()
        self.proxy.add(Rule(fault, method="PUT", target=f"/{LAYOUT.deltas}"))

    def let_through(self) -> None:
        self.proxy.clear()
        self.proxy.add(Rule(self.created))

    def objects(self) -> set[str]:
        """Names below ``objects/`` that the bucket holds."""
        pages = self.client.get_paginator("list_objects_v2").paginate(
            Bucket=self.bucket, Prefix=OBJECTS[1:]
        )
        return {
            entry["Key"][len(OBJECTS) - 1 :] for page in pages for entry in page.get("Contents", ())
        }

    def announced(self) -> set[bytes]:
        """Digests that the bucket's deltas tell of."""
        pages = self.client.get_paginator("list_objects_v2").paginate(
            Bucket=self.bucket, Prefix=LAYOUT.deltas
        )
        found = set()
        for page in pages:
            for entry in page.get("Contents", ()):
                reply = self.client.get_object(Bucket=self.bucket, Key=entry["Key"])
                rows = parse_segment(reply["Body"].read(), NAMESPACE.name)
                found |= {rows.digest(row) for row in range(len(rows)) if not rows.deleted[row]}
        return found

    def body(self, name: str) -> bytes:
        """One object as the bucket holds it."""
        reply = self.client.get_object(Bucket=self.bucket, Key=OBJECTS[1:] + name)
        body: bytes = reply["Body"].read()
        return body

    def stock(self, name: str, body: bytes) -> None:
        """Put one object into the bucket, past the proxy."""
        self.client.put_object(Bucket=self.bucket, Key=OBJECTS[1:] + name, Body=body)
        self.stocked.add(name)

    def stock_record(self, width: int) -> None:
        """Put the modality's record, as the corpus's first producer did."""
        name = f"{NAMESPACE.name}/modality/image.json"
        body = b'{"dtype":"bfloat16","width":%d}' % width
        self.client.put_object(Bucket=self.bucket, Key=name, Body=body)

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


def eventually(condition: Callable[[], bool]) -> None:
    """Poll until it is true; fails after a generous deadline."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)
