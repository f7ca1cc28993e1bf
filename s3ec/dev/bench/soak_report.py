# SPDX-License-Identifier: Apache-2.0
"""From what happened in a soak to its rows, and a look at what the bucket confirmed."""

from __future__ import annotations

import os
import re
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from s3ec import codec
from s3ec.config import load_settings
from s3ec.dev.bench import measure
from s3ec.dev.bench.soak import DEAD, FAULTS, HITS, LOST, MEMORY, NOT_BACK, REQUESTS, WRONG
from s3ec.dev.bench.soak_engine import growths
from s3ec.errors import CorruptEntryError
from s3ec.identity import Key, Namespace, digest_of_name, entry_name, make_key
from s3ec.node import Node
from s3ec.prefetch import FetchOutcome, FetchRequest
from s3ec.testing.server import LocalS3

if TYPE_CHECKING:
    from s3ec.dev.bench.context import Context
    from s3ec.dev.bench.soak_engine import LiveEngine
    from s3ec.dev.bench.soak_run import Site, Story


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
        # A busy machine loses no entry.
        "connect_timeout_s": 10,
        "read_timeout_s": 60,
        "defer_timeout_s": 60,
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


_POINTS = 240


def report(context: Context, story: Story, site: Site, saver_log: str, scratch: Path) -> None:
    """Report every row.

    Args:
        context: Where rows go.
        story: What happened; the engines have ended.
        site: What was damaged, healthy by now.
        saver_log: Log of the engine that saved.
        scratch: A folder to be made, for a tier.
    """

    _answers(context, story)
    _memory(context, story)
    _faults(context, story)
    context.say("reading every confirmed entry")
    held = holdings(site.server, site.bucket, saver_log, site.deleted, scratch)
    context.report(
        LOST,
        len(held.missing),
        samples=held.confirmed - held.deleted,
        detail={
            "note": f"of {held.confirmed} confirmed, {held.deleted} deleted by a fault",
            "missing": dict(list(held.missing.items())[:20]),
        },
    )


def _answers(context: Context, story: Story) -> None:
    tallies = {engine.name: engine.tally for engine in story.engines}
    asked = sum(tally.requests for tally in tallies.values())
    exact = sum(tally.exact for tally in tallies.values())
    examples = [example for tally in tallies.values() for example in tally.examples]
    context.report(
        WRONG,
        sum(tally.wrong for tally in tallies.values()),
        samples=asked,
        detail={"note": f"{exact} equal to the last bit", "examples": examples},
    )
    context.report(
        DEAD,
        sum(tally.dead for tally in tallies.values()),
        samples=sum(engine.life for engine in story.engines),
        detail={
            "note": f"{sum(tally.killed for tally in tallies.values())} killed on purpose",
            "deaths": [death for tally in tallies.values() for death in tally.deaths],
            "errors": {engine.name: engine.errors() for engine in story.engines},
        },
    )
    context.report(
        REQUESTS,
        asked,
        samples=asked,
        detail={
            "note": f"in {story.seconds / 60:.1f} minutes, seed {story.plot.seed}",
            "cases": {name: tally.requests for name, tally in tallies.items()},
            "slowest_batch_s": {name: tally.slowest_s for name, tally in tallies.items()},
            "minutes": story.seconds / 60,
            "seed": story.plot.seed,
        },
    )
    counters = {engine.name: dict(engine.tally.counters) for engine in story.engines}
    hits = {name: moved.get("vllm:s3ec_hits", 0.0) for name, moved in counters.items()}
    context.report(
        HITS,
        sum(hits.values()),
        samples=asked,
        detail={"cases": hits, "counters": counters}
        | {"series": {engine.name: _hits(engine, story) for engine in story.engines}},
    )


def _hits(engine: LiveEngine, story: Story) -> list[list[float]]:
    """Minute and hits per second, in even parts of the time."""
    part_s = max(story.seconds / _POINTS, 2.0)
    sums: Counter[int] = Counter()
    for moment in engine.tally.moments:
        sums[int((moment.ended_s - story.began_s) / part_s)] += int(moment.hits)
    last = int(story.seconds / part_s)
    return [[part * part_s / 60, sums[part] / part_s] for part in range(last + 1)]


def _memory(context: Context, story: Story) -> None:
    series = _series(story)
    longest = {growth.engine: growth for growth in sorted(growths(story.samples), key=_length)}
    if not longest:
        why = "no engine lived long enough to tell growth from warm-up"
        context.cannot(MEMORY, why, series=series)
        return
    worst = max(longest.values(), key=lambda growth: growth.share)
    context.report(
        MEMORY,
        worst.share * 100,
        samples=sum(growth.samples for growth in longest.values()),
        detail={
            "note": "median of the last fifth of a life over that of the second; the worst engine",
            "cases": {name: growth.share * 100 for name, growth in longest.items()},
            "lives": [asdict(growth) for growth in longest.values()],
            "series": series,
        },
    )


def _length(growth: Any) -> float:
    minutes: float = growth.minutes
    return minutes


def _series(story: Story) -> dict[str, list[list[float]]]:
    """Engine and life -> minute, MB, descriptors, threads; thinned out."""
    lives: dict[str, list[list[float]]] = {}
    for sample in story.samples:
        lives.setdefault(f"{sample.engine} {sample.life}", []).append(
            [
                (sample.at_s - story.began_s) / 60,
                sample.anon_bytes / 1e6,
                sample.fds,
                sample.threads,
            ]
        )
    return {name: points[:: len(points) // _POINTS + 1] for name, points in lives.items()}


def _faults(context: Context, story: Story) -> None:
    blows = story.blows
    kinds = Counter(kind for blow in blows for kind in blow.struck)
    struck: Counter[str] = Counter()
    for blow in blows:
        struck.update(blow.struck)
    context.report(
        FAULTS,
        sum(kinds.values()),
        samples=len(blows),
        detail={
            "note": f"{len(kinds)} kinds; {sum(n > 0 for n in struck.values())} struck something",
            "cases": dict(sorted(kinds.items())),
            "struck": dict(sorted(struck.items())),
            "steps": [
                [blow.began_s / 60, blow.ended_s / 60, " and ".join(blow.step.kinds), blow.back_s]
                for blow in blows
            ],
        },
    )
    back = [blow.back_s for blow in blows if blow.back_s is not None]
    # Nobody waited after the last one where the soak was ended early.
    whole = story.seconds >= story.plot.minutes * 60
    waited = blows if whole else blows[:-1]
    late = [" and ".join(blow.step.kinds) for blow in waited if blow.back_s is None]
    context.report(
        NOT_BACK,
        len(late),
        samples=len(blows),
        detail={
            "note": f"hits from the bucket again after {statistics.median(back):.1f} s (median)"
            if back
            else "no hit came back",
            "after": late,
            "seconds": measure.spread(back) if back else {},
        },
    )
