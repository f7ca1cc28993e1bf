# SPDX-License-Identifier: Apache-2.0
"""Fetchers in processes of their own, which do what they are told over a pipe."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from s3ec.dev.bench.children import Child
from s3ec.dev.bench.corpus import SHAPE, Corpus


@dataclass(frozen=True, slots=True)
class Hired:
    """What a member of the crew is made of; picklable."""

    corpus: Corpus
    cache_dir: Path
    transport: str


class Member(Child):
    """One process with a Fetcher, which takes the orders ``fetch``, ``read`` and ``empty``."""

    def __init__(self, hired: Hired) -> None:
        super().__init__(_work, hired)


@contextmanager
def crew(hired: Sequence[Hired]) -> Iterator[list[Member]]:
    """As many processes, started and ready, ended afterwards."""
    members = [Member(one) for one in hired]
    try:
        for member in members:
            member.answer()  # that it is ready
        yield members
    finally:
        for member in members:
            member.close()


def together(members: Sequence[Member], order: str) -> list[Any]:
    """Have all do the same at the same time; their answers."""
    for member in members:
        member.tell(order)
    return [member.answer() for member in members]


def _work(pipe: Connection, hired: Hired) -> None:
    """A member's whole life."""
    from s3ec.dev.bench.fetcher import Fetcher

    with hired.corpus.environment():
        fetcher = Fetcher(hired.corpus, hired.cache_dir, hired.transport)
        orders = {
            "fetch": fetcher.fetch,
            "read": lambda: _read_all(fetcher),
            "empty": fetcher.empty,
        }
        try:
            pipe.send(None)
            while True:
                # What an order raises ends the process with a traceback on stderr.
                pipe.send(_timed(orders[pipe.recv()]))
        except (EOFError, BrokenPipeError):
            pass  # whoever gave the orders is done, or gone
        finally:
            fetcher.close()


def _timed(order: Any) -> dict[str, float]:
    """When it began and ended, of a clock that all processes share."""
    started = time.monotonic()
    order()
    return {"started": started, "ended": time.monotonic()}


def _read_all(fetcher: Any) -> None:
    """Pin, read, verify and let go of every entry, as the workers of a node do."""
    import torch

    from s3ec.connector.loads import read_data
    from s3ec.connector.messages import Load

    tier = fetcher.node.tier
    for key in fetcher.corpus.keys:
        pin = tier.entries.pin(key)
        if pin is None:
            raise RuntimeError("an entry is not in the tier")
        memory = torch.empty(SHAPE.nbytes, dtype=torch.uint8)
        read_data(Load.of(key.identifier, pin), memory)
        tier.entries.unpin(pin)
