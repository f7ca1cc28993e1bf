# SPDX-License-Identifier: Apache-2.0
"""Counts the system calls of pieces of this very process, by attaching strace to it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from s3ec.dev.bench.context import CannotMeasureError

_END_TIMEOUT_S = 10.0
_TRIES = 3
# A file that is looked for and not there: the one call that nothing else makes. Only what lies
# between two of them is counted, so neither the interpreter's start nor strace's own comings.
_MARK = "s3ec-bench-mark"
_PR_SET_PTRACER = 0x59616D61
_CALL = re.compile(r"(\d+) +(\w+)\(")


def count_syscalls(sections: Mapping[str, Callable[[], object]]) -> dict[str, list[Counter[str]]]:
    """Run each section once unobserved, then three times under strace.

    What a section does itself shows in every try. A call in one of them only is the
    interpreter's: another thread woke up and asked for its lock.

    Args:
        sections: Name to what to run. The first, unobserved run takes the memory it needs.

    Returns:
        Name to the system calls of each try, as ``parse`` counts them.

    Raises:
        CannotMeasureError: strace is not installed, or may not attach here.
    """
    runs = [run for run in sections.values() for _ in range(_TRIES)]
    for run in sections.values():
        run()
    with tempfile.TemporaryDirectory(prefix="s3ec-strace-") as folder:
        trace = Path(folder) / "trace"
        with _strace(trace):
            for number, run in enumerate(runs):
                mark(number, "begin")
                run()
                mark(number, "end")
        lines = trace.read_text(encoding="utf-8", errors="replace").splitlines()
    counted = [parse(lines, number) for number in range(len(runs))]
    return {
        name: counted[place * _TRIES : (place + 1) * _TRIES] for place, name in enumerate(sections)
    }


def mark(number: int, which: str) -> None:
    """Leave a mark in the trace of this thread: one ``begin`` and one ``end`` of each number."""
    with contextlib.suppress(FileNotFoundError):
        os.stat(f"{_MARK}-{number}-{which}")


def parse(lines: list[str], number: int) -> Counter[str]:
    """System calls of one thread between its two marks, in the output of ``strace -f -o``.

    Handing work to another thread shows here too, since waking one is a call.
    """
    counts: Counter[str] = Counter()
    caller = None
    for line in lines:
        found = _CALL.match(line)  # what is resumed was counted when it began
        if found is None:
            continue
        thread, name = found.groups()
        if f"{_MARK}-{number}-" in line:
            caller = thread if "-begin" in line else None
        elif thread == caller:
            counts[name] += 1
    return counts


@contextlib.contextmanager
def _strace(trace: Path) -> Iterator[None]:
    """strace attached to this process; detached, and the file complete, at the end."""
    program = shutil.which("strace")
    if program is None:
        raise CannotMeasureError("strace is not installed")
    with contextlib.suppress(OSError, AttributeError):  # Yama lets only an ancestor trace
        ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(-1), 0, 0, 0)
    tracer = subprocess.Popen(
        [program, "-f", "-o", str(trace), "-p", str(os.getpid())],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    try:
        _wait_until_attached(tracer)
        yield
    finally:
        tracer.terminate()  # strace detaches, the process goes on
        try:
            tracer.communicate(timeout=_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            tracer.kill()
            tracer.communicate()


def _wait_until_attached(tracer: subprocess.Popen[bytes]) -> None:
    said = ""
    for line in tracer.stderr or ():  # until it is attached, or has ended
        if b" attached" in line:
            return
        said = said or line.decode(errors="replace").strip()
    # Its message names a process by number, nothing else.
    raise CannotMeasureError(f"strace may not attach here: {said or 'no reason given'}")
