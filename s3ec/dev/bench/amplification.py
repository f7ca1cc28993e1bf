# SPDX-License-Identifier: Apache-2.0
"""``bench amplification``: what a server that answers 503 to everything is sent.

A healthy server is asked first, so that the budget of repetitions is as full as it gets. Then a
proxy in front of it answers 503, and workers go on asking, each operation for a name of its own:
requests are counted in front of the server, operations by their distinct names, until the breaker
is open. After that only its probes may come.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from s3ec.dev.bench.context import Bench, Context
from s3ec.dev.bench.result import Spec

if TYPE_CHECKING:
    from s3ec.dev.rigs.proxy import FaultProxy
    from s3ec.settings import Settings

_ROW = "dead.request_amplification"
ROWS = (Spec(_ROW, "ratio", "<= 1.2"),)
WORKERS = (1, 4, 16)
_HEALTHY = 150  # of these pay for ten repetitions, which is what can be saved up
_OPEN_S = 4.0
_TOO_LONG_S = 60.0


def run(context: Context) -> None:
    """Measure; needs the SeaweedFS binary.

    Raises:
        CannotMeasureError: There is no server to be had.
    """
    from s3ec.dev.bench.corpus import filled
    from s3ec.dev.rigs.proxy import FaultProxy

    with contextlib.ExitStack() as stack:
        server, corpus = stack.enter_context(filled(context, 1))
        proxy = stack.enter_context(FaultProxy(server.endpoint_url))
        stack.enter_context(corpus.environment())
        settings = corpus.settings(context.scratch / "tier", "auto")
        settings = settings.model_copy(update={"endpoint_url": proxy.url})
        found = {}
        for workers in WORKERS:
            context.say(f"{workers} at a time")
            found[workers] = asyncio.run(_storm(settings, proxy, workers))
    ratios = {f"{workers} at a time": one.sent / one.offered for workers, one in found.items()}
    context.report(
        _ROW,
        max(ratios.values()),
        samples=sum(one.sent for one in found.values()),
        detail={
            "cases": ratios,
            "offered": [one.offered for one in found.values()],
            "sent": [one.sent for one in found.values()],
            "operations_while_open": [one.refused for one in found.values()],
            "probes_while_open": [one.probes for one in found.values()],
            "open_s": _OPEN_S,
            "note": "requests per operation until the breaker opened; the worst number of workers",
        },
    )


@dataclass(frozen=True, slots=True)
class Storm:
    """What one number of workers did.

    Attributes:
        offered: Operations that were begun before the breaker opened and reached the server.
        sent: Requests for them.
        refused: Operations begun while it was open.
        probes: Requests for those.
    """

    offered: int
    sent: int
    refused: int
    probes: int


async def _storm(settings: Settings, proxy: FaultProxy, workers: int) -> Storm:
    from s3ec.counters import Counters
    from s3ec.dev.rigs.proxy import Rule
    from s3ec.dev.rigs.proxy_faults import s3_error
    from s3ec.errors import UnavailableError
    from s3ec.store.endpoint import Endpoint
    from s3ec.store.open import open_store, resilient

    endpoint = Endpoint.of(settings)
    store = resilient(open_store(settings), endpoint, Counters(), hedge=settings.hedge)
    try:
        for _ in range(_HEALTHY):
            await store.get("healthy", max_bytes=1)
        proxy.clear()
        proxy.add(Rule(s3_error(503, "SlowDown")))
        names = _names()

        async def ask(until_s: float) -> int:
            asked = 0
            was_open = endpoint.breaker.is_open
            while endpoint.breaker.is_open == was_open and time.monotonic() < until_s:
                asked += 1
                with contextlib.suppress(UnavailableError):
                    await store.get(next(names), max_bytes=1)
                if was_open:
                    await asyncio.sleep(0.01)
            return asked

        until_s = time.monotonic() + _TOO_LONG_S
        await asyncio.gather(*(ask(until_s) for _ in range(workers)))
        before = [request.target for request in proxy.requests]
        until_s = time.monotonic() + _OPEN_S
        refused = sum(await asyncio.gather(*(ask(until_s) for _ in range(workers))))
        probes = len(proxy.requests) - len(before)
        return Storm(len(set(before)), len(before), refused, probes)
    finally:
        await store.close()
        proxy.clear()


def _names() -> Iterator[str]:
    number = 0
    while True:
        number += 1
        yield f"absent/{number}"


BENCH = Bench(ROWS, run)
