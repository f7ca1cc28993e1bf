# SPDX-License-Identifier: Apache-2.0
"""``bench evict``: what was granted is read later, though the tier is turned over meanwhile.

Two processes publish into one folder, as fast as they turn a whole budget over each second. This
process grants what it finds there, stalls for up to a second, and has another process read it. All
that was granted must be there then, with the right bytes, and no publish is refused for it. Once
with a budget of 300 entries; once with one of 12, where more are granted at a time than there is
room for. In memory: without a journal ext4 becomes slower with each file that is deleted.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from s3ec import codec
from s3ec.connector.messages import Load
from s3ec.counters import Counters
from s3ec.dev.bench import measure
from s3ec.dev.bench.children import Child
from s3ec.dev.bench.context import Bench, Context, Spec
from s3ec.errors import CorruptEntryError, TierError
from s3ec.identity import Key, Namespace, make_key
from s3ec.tier import OpenEntry, Tier

LOST, WRONG, REFUSED = "evict.lost", "evict.wrong", "evict.refused"
TURNOVER, LOADS = "evict.budgets_per_s", "evict.loads"
ROWS = (
    Spec(LOST, "1", "<= 0"),
    Spec(WRONG, "1", "<= 0"),
    Spec(REFUSED, "1", "<= 0"),
    Spec(TURNOVER, "1/s", ">= 1"),
    Spec(LOADS, "1"),
)
_BUDGETS = (300, 12)
_SECONDS, _SECONDS_QUICK = 300.0, 3.0
# So many different entries are published, for each one that the budget has room for.
_KEYS_PER_PLACE = 3
# A part of what is published is there already, and evicts nothing.
_PUBLISHED_PER_PLACE_AND_S = 2.0
_EVICTORS = 2
_GRANTED = 30
_STALLS_S = (0.0, 0.001, 0.02, 0.3, 1.0)
_SAY_EVERY_S = 10.0
_SHAPE = codec.Shape(64, 512, "bfloat16")  # 64 KiB
_NAMESPACE = Namespace.from_descriptor({"model": "evict"}).name


class Grants:
    """What this process holds open, and gives to another one as plans do."""

    def __init__(self, tier: Tier) -> None:
        """Nothing is held yet."""
        self._entries = tier.entries
        self._held: dict[int, OpenEntry] = {}

    def grant(self, number: int) -> Load | None:
        """The load of an entry that is here; None where it is absent, which is a miss."""
        entry = self._entries.open(key_at(number))
        if entry is None:
            return None
        self._held[number] = entry
        return Load.of(identifier_at(number), entry)

    def release(self) -> None:
        """All were read."""
        self._held.clear()


def load_values(load: Load) -> bytes | None:
    """In a process that has opened no tier: what a worker loads. None where it is lost."""
    import torch

    from s3ec.connector.loads import read_data

    memory = torch.empty(load.shape.nbytes, dtype=torch.uint8)
    try:
        read_data(load, memory, hashed=False)
    except FileNotFoundError:
        return None
    except CorruptEntryError:
        return b""
    return memory.numpy().tobytes()


def identifier_at(number: int) -> str:
    """A content hash."""
    return f"{number:064x}"


def key_at(number: int) -> Key:
    """Its key."""
    key = make_key(identifier_at(number))
    if key is None:
        raise ValueError(f"{number} has no key")
    return key


def values_at(number: int) -> bytes:
    """Of an entry; other ones than of any other."""
    return (b"%08d" % number) * (_SHAPE.nbytes // 8)


def entry_at(number: int) -> bytes:
    """A good entry."""
    data = values_at(number)
    header = codec.Header(
        identifier=identifier_at(number),
        namespace=_NAMESPACE,
        modality="image",
        shape=_SHAPE,
        checksum=codec.checksum(data),
    )
    return codec.encode_header(header) + data


def run(context: Context, seconds: float = _SECONDS) -> None:
    """Measure, so many seconds for each budget."""
    seconds = min(seconds, _SECONDS_QUICK) if context.quick else seconds
    with measure.memory_folder(context.scratch / "memory") as (folder, _):
        found = {
            f"{entries} entries": turn_over(folder / str(entries), entries, seconds, context.say)
            for entries in _BUDGETS
        }
    for row in (LOST, WRONG, REFUSED, LOADS):
        cases = {case: counts[row] for case, counts in found.items()}
        context.report(row, sum(cases.values()), samples=len(cases), detail={"cases": cases})
    turned = {case: counts[TURNOVER] / seconds for case, counts in found.items()}
    context.report(TURNOVER, min(turned.values()), samples=len(turned), detail={"cases": turned})


def turn_over(
    root: Path, entries: int, seconds: float, say: Callable[[str], None]
) -> dict[str, float]:
    """One budget; answers what the rows are made of, and how often it was turned over in all."""
    budget_bytes, total = entries * len(entry_at(0)), Counter[str]()
    tier = new_tier(root, budget_bytes)
    churns = [Child(churn, root, budget_bytes, seed) for seed in range(_EVICTORS)]
    reader = Child(read, load_values)
    try:
        for child in churns:
            child.answer()  # it has started
        for child in churns:
            child.tell(seconds)
        began_s = said_s = time.monotonic()
        for counts in grant_and_read(tier, Grants(tier), entries, reader):
            total.update(counts)
            now_s = time.monotonic()
            if now_s >= began_s + seconds:
                break
            if now_s >= said_s + _SAY_EVERY_S:
                said_s, left_s = now_s, began_s + seconds - now_s
                say(f"{entries} entries: {total[LOADS]} loads, {left_s:.0f} s left")
        for child in churns:
            total.update(child.answer(timeout_s=60))
    finally:
        for child in (*churns, reader):
            child.close()
        tier.close()
    return {**total, TURNOVER: total["evicted"] / entries}


def grant_and_read(
    tier: Tier, grants: Grants, entries: int, reader: Child
) -> Iterator[Mapping[str, int]]:
    """Grant some of what is there, stall, and have it read; again and again."""
    chance = random.Random(entries)
    numbers = {key_at(n).name: n for n in range(entries * _KEYS_PER_PLACE)}
    while True:
        here = [numbers[name] for name in tier.entries.names()]
        chosen = chance.sample(here, min(len(here), _GRANTED))
        given = {n: granted for n in chosen if (granted := grants.grant(n)) is not None}
        time.sleep(chance.choice(_STALLS_S))
        reader.tell(given)
        yield reader.answer()
        grants.release()


def new_tier(root: Path, budget_bytes: int, counters: Counters | None = None) -> Tier:
    """As an engine opens it."""
    return Tier(
        root,
        _NAMESPACE,
        budget_bytes=budget_bytes,
        min_free_bytes=0,
        counters=counters or Counters(),
    )


def churn(pipe: Connection, root: Path, budget_bytes: int, seed: int) -> None:
    """A process that publishes at its pace, and evicts for that."""
    counters, chance, refused = Counters(), random.Random(seed), 0
    tier = new_tier(root, budget_bytes, counters)
    places = budget_bytes // len(entry_at(0))
    pause_s = _EVICTORS / (places * _PUBLISHED_PER_PLACE_AND_S)
    pipe.send("started")
    seconds = pipe.recv()
    next_s = time.monotonic()
    ends_s = next_s + seconds
    while time.monotonic() < ends_s:
        number = chance.randrange(places * _KEYS_PER_PLACE)
        try:
            tier.writer.publish(key_at(number), [entry_at(number)])
        except TierError:
            refused += 1
        next_s += pause_s
        time.sleep(max(0.0, next_s - time.monotonic()))
    tier.close()
    pipe.send({REFUSED: refused, "evicted": int(counters.get("tier.evicted"))})


def read(pipe: Connection, load: Callable[[Any], bytes | None]) -> None:
    """A process that reads what another one was granted."""
    while True:
        try:
            given = pipe.recv()
        except EOFError:
            return
        counts = {LOADS: len(given), LOST: 0, WRONG: 0}
        for number, granted in given.items():
            blob = load(granted)
            if blob is None:
                counts[LOST] += 1
            elif blob != values_at(number):
                counts[WRONG] += 1
        pipe.send(counts)


BENCH = Bench(ROWS, run)
