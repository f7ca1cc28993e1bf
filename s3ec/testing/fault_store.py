# SPDX-License-Identifier: Apache-2.0
"""A store around a store that injects scripted faults, and counts calls."""

from __future__ import annotations

import asyncio
import re
import threading
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar, cast

from s3ec.errors import S3ECError, UnavailableError
from s3ec.store.base import ObjectInfo, Store, Wrapper

T = TypeVar("T")


class Gate:
    """Holds operations until a test releases them; wait in any loop, release in any thread.

    Attributes:
        reached: Set once the first operation waits here; wait on it with a timeout.
    """

    def __init__(self) -> None:
        self.reached = threading.Event()
        self._lock = threading.Lock()
        self._is_open = False
        self._held: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    async def wait(self) -> None:
        """Return once the gate is open."""
        passed = asyncio.Event()
        with self._lock:
            if self._is_open:
                return
            self._held.append((asyncio.get_running_loop(), passed))
        self.reached.set()
        await passed.wait()

    def release(self) -> None:
        """Open the gate for good."""
        with self._lock:
            self._is_open = True
            held, self._held = self._held, []
        for loop, passed in held:
            if not loop.is_closed():
                loop.call_soon_threadsafe(passed.set)


@dataclass(slots=True)
class Fault:
    """One fault, and the operations that it strikes.

    Attributes:
        op: Regular expression that the whole name of the method matches, such as
            ``get|get_range``.
        name: Regular expression searched in the object's name, or the listing's prefix; for
            delete_many in its names, one per line.
        gate: Wait here first.
        error: Makes the exception to raise from a message, such as ``UnavailableError``.
        lost_reply: Run the operation, then raise ``error`` (UnavailableError if None).
        partial: In a delete_many only the matching names fail, in its result.
        change: Changes the bytes that get and get_range return; see cut, flip, replace.
        skip: Number of matching calls that pass first.
        times: How often it strikes at most; None for no limit.
        struck: How often it struck.
    """

    op: str = ".*"
    name: str = ""
    gate: Gate | None = None
    error: Callable[[str], Exception] | None = None
    lost_reply: bool = False
    partial: bool = False
    change: Callable[[bytes], bytes] | None = None
    skip: int = 0
    times: int | None = None
    struck: int = 0

    def matches(self, op: str, name: str) -> bool:
        """Return True if this fault matches such a call."""
        return re.fullmatch(self.op, op) is not None and any(
            re.search(self.name, line) for line in name.split("\n")
        )


def cut(nbytes: int) -> Callable[[bytes], bytes]:
    """Keep the first ``nbytes``."""
    return lambda body: body[:nbytes]


def flip(bit: int) -> Callable[[bytes], bytes]:
    """Flip one bit; counted from the front, from the back if negative."""

    def change(body: bytes) -> bytes:
        changed = bytearray(body)
        changed[bit // 8] ^= 1 << bit % 8
        return bytes(changed)

    return change


def replace(other: bytes) -> Callable[[bytes], bytes]:
    """Return another object's bytes in place of the body."""
    return lambda _: other


@dataclass(slots=True)
class Script:
    """Faults in order of precedence; the first that matches and is not used up strikes.

    ``faults`` may be changed while the store is in use.
    """

    faults: list[Fault] = field(default_factory=list)

    def next(self, op: str, name: str) -> Fault | None:
        for fault in self.faults:
            if not fault.matches(op, name) or fault.struck == fault.times:
                continue
            if fault.skip > 0:
                fault.skip -= 1
                continue
            fault.struck += 1
            return fault
        return None


class FaultStore(Wrapper):
    """A Store that behaves as ``plan`` says.

    Args:
        inner: The store that does the work.
        plan: The calls that fail; None for none.

    Attributes:
        plan: As given; may be replaced.
        calls: How often each method was called, struck or not.
        log: Method and name of every call, in order.
    """

    def __init__(self, inner: Store, plan: Script | None = None) -> None:
        super().__init__(inner)
        self.plan = plan or Script()
        self.calls: Counter[str] = Counter()
        self.log: list[tuple[str, str]] = []

    async def _around(self, op: str, name: str, call: Callable[[], Awaitable[T]]) -> T:
        return await self._run(self._strike(op, name), name, call)

    async def list(self, prefix: str, *, start_after: str = "") -> AsyncGenerator[ObjectInfo, None]:
        fault = self._strike("list", prefix)
        pages = self._inner.list(prefix, start_after=start_after)
        if fault is not None:
            await self._before(fault, prefix)
        async for info in pages:
            yield info
        if fault is not None and fault.lost_reply:
            raise _error(fault, prefix)

    async def delete_many(self, names: Sequence[str]) -> dict[str, S3ECError]:
        lines = "\n".join(names)
        fault = self._strike("delete_many", lines)
        if fault is None or not fault.partial:
            return await self._run(fault, lines, lambda: self._inner.delete_many(names))
        struck = {
            name: cast("S3ECError", _error(fault, name))
            for name in names
            if re.search(fault.name, name)
        }
        asked = names if fault.lost_reply else [name for name in names if name not in struck]
        return {**await self._inner.delete_many(asked), **struck}

    def _strike(self, op: str, name: str) -> Fault | None:
        self.calls[op] += 1
        self.log.append((op, name))
        return self.plan.next(op, name)

    async def _run(self, fault: Fault | None, name: str, call: Callable[[], Awaitable[T]]) -> T:
        if fault is None:
            return await call()
        await self._before(fault, name)
        result = await call()
        if fault.lost_reply:
            raise _error(fault, name)
        if fault.change is not None and isinstance(result, (bytes, memoryview)):
            return cast("T", fault.change(bytes(result)))
        return result

    async def _before(self, fault: Fault, name: str) -> None:
        if fault.gate is not None:
            await fault.gate.wait()
        if fault.error is not None and not fault.lost_reply:
            raise _error(fault, name)


def _error(fault: Fault, name: str) -> Exception:
    return (fault.error or UnavailableError)(f"a fault made for {name}")
