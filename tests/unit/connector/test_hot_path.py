# SPDX-License-Identifier: Apache-2.0
"""The hooks that vLLM calls for every request in every pass make no system call."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from s3ec.dev.bench.syscalls import parse

REPOSITORY = Path(__file__).parents[3]
TRIES = 3

# Real parts all around: the index, the prefetcher with its running loop, a file
# that is open.
CHILD = f"""
import sys
from pathlib import Path
from s3ec.dev.bench.syscalls import mark
from s3ec.connector.vllm_config import Role
from s3ec.connector.scheduler import SchedulerHalf
from s3ec.store.endpoint import Breaker
from tests.unit.connector.scheduling import feature, has_no_pixels, identifier_of, request
from tests.unit.tier.cases import key_of
from tests.unit.test_prefetch import LAYOUT, Bench, entry, want

bench = Bench(Path(sys.argv[1]))
bench.make(deadline_s=3600)  # all is slow under strace
role = Role(producer=True, consumer=True, window_tokens=1000, ranks=1, steps_in_flight=2,
            defer_timeout_s=3600.0)
half = SchedulerHalf(role, index=bench.index, local=bench.local, prefetcher=bench.prefetcher,
                     residents=bench.residents, store=Breaker(), disk=bench.loop.watch,
                     needs_embedding=has_no_pixels,
                     placeholder_of=lambda _: {{}}, counters=bench.counters)
gate = bench.hold(name=key_of(identifier_of("slow")).name)
bench.stock("ready", "slow")
wanted = request("all", feature("ready"), feature("slow", 10), feature("absent", 20))
half.ensure_cache_available(wanted, 0)
half.build_connector_meta([], scheduled_tokens=1)
assert gate.reached.wait(60)
while not bench.prefetcher.has_news:
    pass

ready = request("ready", feature("ready"))
slow = request("slow", feature("slow"))
absent = request("absent", feature("absent"))
old = request("decoding", feature("ready"))
resident = key_of(identifier_of("ready")).digest

def hot(rounds):
    for _ in range(rounds):
        assert half.ensure_cache_available(ready, 0)
        assert half.has_cache_item(ready.mm_features[0].identifier)
        assert not half.ensure_cache_available(slow, 0)
        assert half.ensure_cache_available(absent, 0)
        assert not half.has_cache_item(absent.mm_features[0].identifier)
        assert half.ensure_cache_available(old, 100)
        assert bench.residents.get(resident, 0.0) is not None

hot(1000)
for number in range({TRIES}):
    mark(number, "begin")
    hot(10_000)
    mark(number, "end")
gate.release()
bench.end()
"""


@pytest.mark.slow
def test_ensure_and_has_make_no_system_call(tmp_path: Path) -> None:
    strace = shutil.which("strace")
    if strace is None:
        pytest.skip("no strace here")
    trace = tmp_path / "trace"
    try:
        subprocess.run(
            [strace, "-f", "-o", tmp_path / "may-i", sys.executable, "-c", ""],
            check=True,
            capture_output=True,
            timeout=300,
        )
    except subprocess.CalledProcessError as exc:
        pytest.skip(f"strace may not trace here: {exc.stderr!r:.200}")
    done = subprocess.run(
        [strace, "-f", "-o", trace, sys.executable, "-c", CHILD, str(tmp_path / "cache")],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
    )
    assert done.returncode == 0, done.stderr
    lines = trace.read_text().splitlines()
    # What a hook does shows in every try. A call in one of them only is the interpreter's: another
    # thread went to sleep, or woke up and asked for its lock.
    calls = [parse(lines, number) for number in range(TRIES)]
    assert Counter() in calls, calls
