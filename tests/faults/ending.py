# SPDX-License-Identifier: Apache-2.0
"""Processes that are told to end while they save: commands of living.py's children."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.faults.saving import NAMESPACE, WIDTH, data_at, identifier_at, spooled_below

if TYPE_CHECKING:
    import torch

    from s3ec.connector.saves import SaveQueue
    from s3ec.node import Node

ROWS = 64


def say(line: str) -> None:
    os.write(1, f"{os.getpid()} {line}\n".encode())


class _Heard(logging.Handler):
    """Says what is logged as a warning or worse."""

    def emit(self, record: logging.LogRecord) -> None:
        say(f"log {record.getMessage()}")


class _Engine:
    """What an engine has to end: a node that is shared, as the connector's is, and its saves."""

    def __init__(self, settings: dict[str, str], *, budget_bytes: int = 2**22) -> None:
        from s3ec.connector.saves import SaveQueue
        from s3ec.node import Node
        from s3ec.settings import Settings

        self.node: Node = Node.shared(Settings.model_validate(settings), NAMESPACE)
        self.queue: SaveQueue = SaveQueue(self.node, budget_bytes=budget_bytes, overflow="block")
        self.ended = False

    def save(self, number: int) -> bool:
        import torch

        from s3ec.connector.messages import Save

        tensor = torch.frombuffer(bytearray(data_at(number, ROWS)), dtype=torch.bfloat16)
        return self.queue.put(identifier_at(number), Save("image", {}), tensor.view(ROWS, WIDTH))

    def end(self, timeout_s: float, *, close_s: float = 5) -> int:
        """As the connector's shutdown does."""
        left = self.queue.drain(timeout_s)
        if not self.ended:
            self.ended = True
            self.node.release(close_s)
        return left


def terminated(*, settings: dict[str, str], count: int, how: str, timeout_s: float) -> None:
    """Save until SIGTERM comes, end in order, and say what is left.

    Args:
        how: ``raises``: the handler raises SystemExit, as vLLM's does; ``ends``: it ends the
            engine itself.
        timeout_s: What the bucket gets to confirm the rest.
    """
    logging.getLogger("s3ec").addHandler(_Heard(logging.WARNING))
    engine = _Engine(settings)
    counters = engine.node.counters

    def handle(*_: object) -> None:
        if how == "ends":
            engine.end(timeout_s)
        raise SystemExit(0)

    signal.signal(signal.SIGTERM, handle)
    try:
        for number in range(count):
            engine.save(number)
        while len(spooled_below(Path(settings["cache_dir"]))) < count:
            time.sleep(0.001)
        say("saved")
        while True:
            time.sleep(0.001)
    except SystemExit:
        left = engine.end(timeout_s)
        engine.end(timeout_s)
    say(f"counted {counters.get('spool.left'):g} {counters.get('internal_errors'):g}")
    say(f"left {left}")


class _Interrupted(defaultdict[str, float]):
    """Sums in the middle of whose change a signal arrives."""

    def __setitem__(self, name: str, amount: float) -> None:
        if name == "trap":
            signal.raise_signal(signal.SIGUSR1)
        super().__setitem__(name, amount)


def interrupted(*, settings: dict[str, str]) -> None:
    """End an engine from a signal handler, while this thread is at each place that it may be at."""
    from s3ec.node import Node

    def in_counters(engine: _Engine) -> None:
        engine.node.counters._sums = _Interrupted(float)
        engine.node.counters.add("trap")

    def in_put_locked(engine: _Engine) -> None:
        full = engine.queue._is_full

        def asked(nbytes: int) -> bool:
            signal.raise_signal(signal.SIGUSR1)
            return full(nbytes)

        engine.queue._is_full = asked  # type: ignore[method-assign]
        say(f"taken {engine.save(1)}")

    def in_put_copying(engine: _Engine) -> None:
        staging = engine.queue._staging

        def asked(device: torch.device) -> Any:
            signal.raise_signal(signal.SIGUSR1)
            return staging(device)

        engine.queue._staging = asked  # type: ignore[method-assign]
        engine.save(1)

    def in_put_waiting(engine: _Engine) -> None:
        engine.queue._spool_bytes = 1  # full: put waits for room
        main = threading.main_thread().ident
        assert main is not None
        timer = threading.Timer(0.1, signal.pthread_kill, (main, signal.SIGUSR1))
        timer.start()
        say(f"taken {engine.save(1)}")

    def in_drain(engine: _Engine) -> None:
        wait = engine.queue._wait_for_bucket_locked

        def asked(deadline: float) -> None:
            engine.queue._wait_for_bucket_locked = wait  # type: ignore[method-assign]
            signal.raise_signal(signal.SIGUSR1)
            wait(deadline)

        engine.queue._wait_for_bucket_locked = asked  # type: ignore[method-assign]
        say(f"again {engine.end(0.05, close_s=0.5)}")

    def holding(name: str) -> Any:
        def hold(engine: _Engine) -> None:
            engine.node.loop.disk_soon(int)
            loop, pool = engine.node.loop, engine.node.loop._pool
            assert pool is not None
            locks = {"sharing": Node._sharing(), "loop": loop._lock, "pool": pool._guard}
            with locks[name]:
                signal.raise_signal(signal.SIGUSR1)

        return hold

    places = {
        "counters": in_counters,
        "put, locked": in_put_locked,
        "put, copying": in_put_copying,
        "put, waiting": in_put_waiting,
        "drain": in_drain,
        **{name: holding(name) for name in ("sharing", "loop", "pool")},
    }
    for place, interrupt in places.items():
        engine = _Engine(settings)
        engine.save(0)
        while any(list(engine.queue._pending.values())):
            time.sleep(0.001)  # until it is in the spool

        def handle(*_: object, engine: _Engine = engine) -> None:
            say(f"ended {engine.end(0.05, close_s=0.5)}")

        signal.signal(signal.SIGUSR1, handle)
        say(f"at {place}")
        interrupt(engine)
        counters = engine.node.counters
        say(f"counted {counters.get('spool.left'):g} {counters.get('internal_errors'):g}")
    say("done")


COMMANDS = {function.__name__: function for function in (terminated, interrupted)}
