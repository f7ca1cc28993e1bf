# SPDX-License-Identifier: Apache-2.0
"""Counting system calls: reading strace's words, and strace itself where it may attach."""

from __future__ import annotations

import os
import threading

import pytest

from s3ec.dev.bench import syscalls
from s3ec.dev.bench.context import CannotMeasureError

TRACE = """\
11 newfstatat(AT_FDCWD, "s3ec-bench-mark-0-begin", 0x7ffd, 0) = -1 ENOENT (No such file)
11 mkdir("/a b(c)", 0777) = -1 EEXIST (File exists)
12 futex(0x55, FUTEX_WAIT_PRIVATE, 0, NULL <unfinished ...>
11 mkdir("/d", 0777) = 0
11 --- SIGCHLD {si_signo=SIGCHLD} ---
12 <... futex resumed>) = 0
12 +++ exited with 0 +++
11 newfstatat(AT_FDCWD, "s3ec-bench-mark-0-end", 0x7ffd, 0) = -1 ENOENT (No such file)
11 write(1, "outside", 7) = 7
11 newfstatat(AT_FDCWD, "s3ec-bench-mark-1-begin", 0x7ffd, 0) = -1 ENOENT (No such file)
11 newfstatat(AT_FDCWD, "s3ec-bench-mark-1-end", 0x7ffd, 0) = -1 ENOENT (No such file)
""".splitlines()


def test_only_calls_of_the_thread_between_its_marks_are_counted() -> None:
    assert [syscalls.parse(TRACE, section) for section in (0, 1)] == [{"mkdir": 2}, {}]


def test_real_strace_counts_what_a_section_does_and_nothing_for_one_that_does_nothing() -> None:
    lock = threading.Lock()

    def memory_only() -> None:
        for number in range(1000):
            with lock:
                {number: number}.get(number)

    def files() -> None:
        for _ in range(5):
            os.path.exists("no-such-file")

    try:
        counts = syscalls.count_syscalls({"memory": memory_only, "files": files})
    except CannotMeasureError as exc:
        pytest.skip(str(exc))
    assert min(one.total() for one in counts["memory"]) == 0
    # Where another thread wants the interpreter, waiting for it is a call as well.
    totals = [one.total() for one in counts["files"]]
    assert (len(totals), min(totals)) == (3, 5)
