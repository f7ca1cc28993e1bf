# SPDX-License-Identifier: Apache-2.0
"""Whether this node's disk answers at all: known from how long the calls take that wait for it.

There is no way to break off a call that waits for a disk. What can be done is to know of it, and
to ask nothing more of the disk until that call has come back, which is also the sign that it
answers again.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from s3ec.counters import Counters

T = TypeVar("T")
_log = logging.getLogger(__name__)

# A disk that takes longer for one entry, eviction included, is of no use to a request.
PATIENCE_S = 5.0


class DiskWatch:
    """Knows the calls that are under way and when they began. Memory only, any thread.

    Counter: ``tier.hung``, how often the disk was found not to answer.
    """

    def __init__(
        self,
        counters: Counters,
        *,
        patience_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Nothing is under way.

        Args:
            patience_s: From when on a call hangs; None for PATIENCE_S.
            clock: Monotonic seconds.
        """
        self._counters = counters
        self._patience_s = PATIENCE_S if patience_s is None else patience_s
        self._clock = clock
        self._numbers = itertools.count()
        self._begun: dict[int, float] = {}  # in the order of their beginning
        self._hung = False
        self._lock = threading.Lock()

    def begin(self) -> int:
        """A call begins; answers its number, for ``end``."""
        number = next(self._numbers)
        self._begun[number] = self._clock()
        return number

    def end(self, number: int) -> None:
        """A call has come back, or was never made; more than once is fine."""
        self._begun.pop(number, None)

    def run(self, function: Callable[..., T], *args: object) -> T:
        """Make a call in this thread."""
        number = self.begin()
        try:
            return function(*args)
        finally:
            self.end(number)

    @property
    def hangs(self) -> bool:
        """Whether a call has been under way for longer than the patience.

        For a scheduler hook: no system call, no wait. Who asks notices a change, counts and
        logs it.
        """
        try:
            oldest_s = next(iter(self._begun.values()))
        except StopIteration:
            hung = False
        except RuntimeError:  # calls begin and end in this very moment
            return self._hung
        else:
            hung = self._clock() - oldest_s > self._patience_s
        if hung != self._hung:
            self._turn(hung)
        return hung

    def after_fork(self) -> None:
        """In the child: what is under way is the parent's."""
        self._lock = threading.Lock()
        self._begun = {}
        self._hung = False

    def _turn(self, hung: bool) -> None:
        with self._lock:
            if hung == self._hung:
                return
            self._hung = hung
        if hung:
            self._counters.add("tier.hung")
            _log.warning(
                "the disk of `cache_dir` has not answered for %.0f s; it is not used until it "
                "does: images are encoded, saves go to the bucket from memory",
                self._patience_s,
            )
        else:
            _log.info("the disk of `cache_dir` answers again")
