# SPDX-License-Identifier: Apache-2.0
"""After a soak: is everything there that the bucket confirmed, and can it be read?"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from s3ec import codec
from s3ec.config import load_settings
from s3ec.errors import CorruptEntryError
from s3ec.identity import Key, Namespace, digest_of_name, entry_name, make_key
from s3ec.node import Node
from s3ec.prefetch import FetchOutcome, FetchRequest
from s3ec.testing.server import LocalS3

_STORED = re.compile(r"(\d\d-\d\d \d\d:\d\d:\d\d).*? stored digest=([0-9a-f]{32})")
_OBJECTS = "/objects/"
# The log's clock has whole seconds, and a line may come a little after the reply.
_DOUBT_S = 5.0
_READ_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Holdings:
    """What became of the entries whose storing was confirmed.

    Attributes:
        confirmed: How many.
        deleted: Of those, how many a fault deleted after (or around) their last confirmation.
        missing: Digest of each other one that is not there whole -> why.
    """

    confirmed: int
    deleted: int
    missing: Mapping[str, str]


def confirmations(log: str) -> dict[str, float]:
    """Digest of each entry that a saver's log (level DEBUG) calls stored -> when at last."""
    year = time.localtime().tm_year
    found = {}
    for when, digest in _STORED.findall(log):
        moment = time.strptime(f"{year}-{when}", "%Y-%m-%d %H:%M:%S")
        found[digest] = time.mktime(moment)
    return found


def holdings(
    server: LocalS3, bucket: str, log: str, deleted: Mapping[str, float], scratch: Path
) -> Holdings:
    """List the bucket, and read every confirmed entry of it through an empty tier.

    Args:
        server: Asked directly.
        bucket: On it.
        log: Of the engine that saved.
        deleted: Key of an object that was deleted on purpose -> when.
        scratch: A folder to be made, for the tier.
    """
    confirmed = confirmations(log)
    gone = {_digest(key): when for key, when in deleted.items()}
    wanted = [d for d, when in confirmed.items() if gone.get(d, 0.0) < when - _DOUBT_S]
    client = server.client()
    there: dict[str, list[str]] = {}
    for name in _names(client, bucket):
        there.setdefault(_digest(name), []).append(name)
    missing = {digest: "not listed" for digest in wanted if digest not in there}
    keys: list[tuple[Key, codec.Header]] = []
    for digest in wanted:
        found, why = _read(client, bucket, there.get(digest, []))
        if found is not None:
            keys.append(found)
        elif why:
            missing[digest] = why
    missing |= _through_a_tier(server, bucket, keys, scratch)
    return Holdings(len(confirmed), len(confirmed) - len(wanted), missing)


def _names(client: Any, bucket: str) -> Iterable[str]:
    for page in client.get_paginator("list_objects_v2").paginate(Bucket=bucket):
        for entry in page.get("Contents", []):
            if _OBJECTS in entry["Key"]:
                yield entry["Key"]


def _digest(name: str) -> str:
    """Of the entry that an object belongs to, whichever revision of it; empty if to none."""
    entry = entry_name(name.partition(_OBJECTS)[2])
    return digest_of_name(entry[0]).hex() if entry is not None else ""


def _read(
    client: Any, bucket: str, names: Iterable[str]
) -> tuple[tuple[Key, codec.Header] | None, str]:
    """The first of an entry's objects that is whole; else what is wrong with the last one."""
    why = ""
    for name in names:
        blob = client.get_object(Bucket=bucket, Key=name)["Body"].read()
        try:
            front = codec.parse_header(blob)
            header = codec.verify(blob, namespace=front.namespace, identifier=front.identifier)
        except CorruptEntryError as exc:
            why = str(exc)
            continue
        key = make_key(header.identifier)
        if key is not None and key.digest.hex() == _digest(name):
            return (key, header), ""
        why = "another entry's object"
    return None, why


def _through_a_tier(
    server: LocalS3, bucket: str, keys: list[tuple[Key, codec.Header]], scratch: Path
) -> dict[str, str]:
    """Digest -> outcome, of those that a fresh node cannot have."""
    if not keys:
        return {}
    extra = {
        "bucket": bucket,
        "endpoint_url": server.endpoint_url,
        "cache_dir": str(scratch),
        "min_free_bytes": 0,
    }
    wants = [FetchRequest(key, header.modality, header.shape.rows) for key, header in keys]
    left = {key.digest.hex(): "did not come" for key, _ in keys}
    with mock.patch.dict(os.environ, server.env()):
        node = Node(load_settings(extra).settings, Namespace(keys[0][1].namespace, {}))
        try:
            deadline = time.monotonic() + _READ_TIMEOUT_S
            # As an engine would: where an object was deleted and a revision of it is there, only
            # who knows from the index that the entry exists looks for that.
            node.follow_the_bucket()
            while not node.index.loaded and time.monotonic() < deadline:
                time.sleep(0.01)
            node.prefetcher.submit(wants)
            while any(why == "did not come" for why in left.values()):
                if time.monotonic() > deadline:
                    break
                for fetched in node.prefetcher.drain():
                    digest = fetched.want.key.digest.hex()
                    if fetched.outcome is FetchOutcome.READY and fetched.pin is not None:
                        del left[digest]
                        node.tier.entries.unpin(fetched.pin)
                    else:
                        left[digest] = fetched.outcome.name.lower()
                time.sleep(0.01)
        finally:
            node.close(10)
    return left
