# SPDX-License-Identifier: Apache-2.0
"""``bench gc``: ``s3ec gc`` beside boto3 that deletes the same objects as s5cmd does.

Both list the objects of one namespace and delete them by batches of 1000, several at a time. s3ec
reads the index as well, and tells readers before and after each 2500. Every round puts the
objects there anew, untimed.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

from s3ec.dev.bench import measure
from s3ec.dev.bench.context import Bench, Context, Spec

if TYPE_CHECKING:
    from s3ec.dev.bench.corpus import Corpus as Made

_ROW = "gc.deletes_per_s_ratio"
_SPEED = "gc.deletes_per_s"
ROWS = (Spec(_ROW, "ratio", ">= 0.8"), Spec(_SPEED, "1/s"))
_ROUNDS = 2
_OBJECTS = 3000
_OBJECTS_QUICK = 1000
_BODY = bytes(1024)
_OURS = "s3ec gc"
_RAW = "boto3, 16 threads"
_THREADS = 16
_BATCH = 1000
_PUTS = 16
# That a client of boto3 keeps.
_CONNECTIONS = 8


def run(context: Context) -> None:
    """Measure; needs the SeaweedFS binary.

    Raises:
        CannotMeasureError: There is no server to be had.
    """
    from s3ec.corpus import Corpus
    from s3ec.dev.bench.corpus import filled
    from s3ec.identity import Layout
    from s3ec.index.maker import rebuild

    count = _OBJECTS_QUICK if context.quick else _OBJECTS
    source = random.Random(20_261_124)
    names = [f"{source.getrandbits(256):064x}" for _ in range(count)]
    with contextlib.ExitStack() as stack:
        server, made = stack.enter_context(filled(context, 1))
        corpus = stack.enter_context(Corpus(made.settings(context.scratch / "tier")))
        layout = Layout(made.namespace.name)
        objects = [f"{layout.objects}{name[:2]}/{name}.safetensors" for name in names]

        def fill() -> None:
            corpus.run(partial(_put_all, objects=objects))
            corpus.run(lambda store: rebuild(store, layout))
            time.sleep(1.1)  # ages are whole seconds

        def collect() -> float:
            started = time.perf_counter()
            found = corpus.gc(layout.namespace, older_than_s=0.0)
            seconds = time.perf_counter() - started
            if found.objects < count:
                raise RuntimeError(f"{found.objects} of {count} objects are deleted")
            return seconds

        cases: dict[str, Callable[[], float]] = {_OURS: collect}
        clients = [server.client() for _ in range(_THREADS // _CONNECTIONS)]
        cases[_RAW] = partial(_delete_raw, clients, made, layout.objects, count)
        context.say(f"{context.rounds(_ROUNDS)} rounds of {count} objects")
        kept = measure.interleave(cases, rounds=context.rounds(_ROUNDS), between=fill)
    speeds = {case: [count / one for one in times] for case, times in kept.items()}
    ratios = {_OURS: measure.ratios(speeds[_OURS], speeds[_RAW])}
    for row, values, note in ((_ROW, ratios, f"over {_RAW}"), (_SPEED, speeds, "")):
        samples = count * len(values[_OURS])
        detail = {"objects": count}
        context.report_median(row, values, _OURS, samples=samples, note=note, detail=detail)


async def _put_all(store: Any, objects: Sequence[str]) -> None:
    from s3ec.store.concurrency import in_parallel

    await in_parallel(objects, lambda name: store.put_if_absent(name, [_BODY]), width=_PUTS)


def _delete_raw(clients: Sequence[Any], made: Made, prefix: str, count: int) -> float:
    """List page after page, and delete each page while the next one is listed; seconds."""
    turns = itertools.cycle(clients)

    def delete(client: Any, page: Sequence[Any]) -> int:
        wanted = [{"Key": one["Key"]} for one in page]
        reply = client.delete_objects(Bucket=made.bucket, Delete={"Objects": wanted, "Quiet": True})
        if reply.get("Errors"):
            raise RuntimeError(f"boto3: {reply['Errors'][0]}")
        return len(wanted)

    started = time.perf_counter()
    with ThreadPoolExecutor(_THREADS) as pool:
        pages = (
            clients[0]
            .get_paginator("list_objects_v2")
            .paginate(Bucket=made.bucket, Prefix=prefix, PaginationConfig={"PageSize": _BATCH})
        )
        parts = [
            pool.submit(delete, next(turns), page["Contents"])
            for page in pages
            if page.get("Contents")
        ]
        deleted = sum(part.result() for part in parts)
    seconds = time.perf_counter() - started
    if deleted < count:
        raise RuntimeError(f"boto3: {deleted} of {count} objects are deleted")
    return seconds


BENCH = Bench(ROWS, run)
