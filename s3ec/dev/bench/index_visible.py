# SPDX-License-Identifier: Apache-2.0
"""How long after a producer's confirmed save other processes find the key, all by default.

The producer saves through SaveQueue at random times. Readers on nodes of their own follow the
bucket as engines do. Both note times of a clock that all processes of a machine share.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path

from s3ec.dev.bench import measure
from s3ec.dev.bench.children import Child, wait_for_end
from s3ec.dev.bench.context import Context
from s3ec.dev.bench.corpus import Corpus
from s3ec.dev.bench.index_bucket import settings_of
from s3ec.identity import Key, Namespace, make_key
from s3ec.node import Node

VISIBLE = "index.visible_p99_s"
_SAVES, _SAVES_QUICK = 400, 20
_SAVING_S, _SAVING_S_QUICK = 60.0, 3.0
_READERS = 4
_LOOK_S = 0.005
# A save that nobody found for so long is lost, and the benchmark has failed.
_TIMEOUT_S = 120.0
_READY_S = 60.0
_ROWS, _WIDTH = 16, 64
# Nobody's but this row's, so that no base is there yet: as on a corpus's first day.
_NAMESPACE = Namespace.from_descriptor({"model": "s3ec/bench-visible"})


def measure_visibility(context: Context, corpus: Corpus) -> None:
    """Report the delay; needs torch."""
    try:
        import torch  # noqa: F401  the producer will
    except ImportError as exc:
        context.cannot(VISIBLE, f"no torch, and so no saves: {exc}")
        return
    count, seconds = (_SAVES_QUICK, _SAVING_S_QUICK) if context.quick else (_SAVES, _SAVING_S)
    source = random.Random(2)
    names = [f"{source.getrandbits(256):064x}" for _ in range(count)]
    folder = context.scratch / "visible"
    with ExitStack() as stack:
        reader = stack.enter_context(Child(_read, corpus, folder, names))
        reader.answer()  # that all follow the bucket
        context.say(f"{count} saves in {seconds:.0f} s")
        producer = stack.enter_context(Child(_produce, corpus, folder / "producer", names, seconds))
        stored: dict[str, float] = producer.answer(seconds + _TIMEOUT_S + _READY_S)
        context.say("waiting for the last to be found")
        found: list[dict[str, float]] = reader.answer(_TIMEOUT_S)
    _report(context, stored, found)


def _report(context: Context, stored: dict[str, float], found: Sequence[dict[str, float]]) -> None:
    delays = [one[name] - stored[name] for one in found for name in stored]
    context.report(
        VISIBLE,
        measure.percentile(delays, 99),
        samples=len(delays),
        detail={
            "spread": measure.spread(delays),
            "p50_s": statistics.median(delays),
            "saves": len(stored),
            "readers": len(found),
            "note": "from the bucket's confirmation to a hit on another node",
        },
    )


# -- the producer ----------------------------------------------------------------------------


def _produce(
    pipe: Connection, corpus: Corpus, folder: Path, names: Sequence[str], seconds: float
) -> None:
    """A child's whole life: save all at random times, tell when each was confirmed."""
    import torch

    from s3ec.connector.messages import Save
    from s3ec.connector.saves import SaveQueue

    source = random.Random(3)
    due = sorted(source.uniform(0, seconds) for _ in names)
    stored: dict[str, float] = {}
    with corpus.environment():
        settings = settings_of(corpus, folder)
        node = Node(settings, _NAMESPACE, name="s3ec-bench-producer")
        node.follow_the_bucket()
        saves = SaveQueue(node, budget_bytes=2**28, overflow="block")
        started = time.monotonic()
        deadline = started + seconds + _TIMEOUT_S
        left = list(zip(names, due, strict=True))
        while len(stored) < len(names) and time.monotonic() < deadline:
            while left and time.monotonic() - started >= left[0][1]:
                saves.put(left.pop(0)[0], Save("image", {}), torch.ones(_ROWS, _WIDTH))
            now = time.monotonic()
            stored.update(dict.fromkeys(saves.take_report()[1], now))
            time.sleep(_LOOK_S)
        if len(stored) < len(names):
            raise RuntimeError(f"{len(names) - len(stored)} saves were not confirmed")
        pipe.send(stored)
        wait_for_end(pipe)  # what is announced late is announced by a process that goes on
        saves.drain(20)
        node.close(10)


# -- the readers -----------------------------------------------------------------------------


def _read(pipe: Connection, corpus: Corpus, folder: Path, names: Sequence[str]) -> None:
    """A child's whole life: some nodes, and when each found each key first."""
    with corpus.environment():
        nodes = []
        for number in range(_READERS):
            settings = settings_of(corpus, folder / f"reader-{number}")
            nodes.append(Node(settings, _NAMESPACE, name=f"s3ec-bench-{number}"))
        try:
            # As engines that were started at different times.
            for node in nodes:
                node.follow_the_bucket()
                time.sleep(settings.index_refresh_s / len(nodes))
            _wait_until_loaded(nodes)
            pipe.send("ready")
            pipe.send(_find(pipe, nodes, [_key(name) for name in names]))
            wait_for_end(pipe)
        finally:
            for node in nodes:
                node.close(10)


def _wait_until_loaded(nodes: Sequence[Node]) -> None:
    deadline = time.monotonic() + _READY_S
    while not all(node.index.loaded for node in nodes):
        if time.monotonic() > deadline:
            raise RuntimeError("the readers do not read the bucket")
        time.sleep(_LOOK_S)


def _find(pipe: Connection, nodes: Sequence[Node], keys: Sequence[Key]) -> list[dict[str, float]]:
    """Look for all keys until all nodes have found all."""
    found: list[dict[str, float]] = [{} for _ in nodes]
    missing = [list(keys) for _ in nodes]
    while any(missing):
        if pipe.poll(0):  # nobody waits for it any more
            raise RuntimeError(f"{sum(map(len, missing))} keys were not found")
        for node, at, left in zip(nodes, found, missing, strict=True):
            contains = node.index.maybe_contains
            hits = [key for key in left if contains(key)]
            at.update(dict.fromkeys([key.identifier for key in hits], time.monotonic()))
            left[:] = [key for key in left if key.identifier not in at]
        time.sleep(_LOOK_S)
    return found


def _key(identifier: str) -> Key:
    key = make_key(identifier)
    if key is None:
        raise ValueError(f"{identifier} is no content hash")
    return key
