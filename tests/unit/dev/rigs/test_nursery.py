# SPDX-License-Identifier: Apache-2.0
"""What a nursery hands out; that engines come out of it right is for the end-to-end tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from s3ec.dev.rigs.nursery import EngineForkServer, Forked
from s3ec.dev.rigs.vllm_cpu import engine_env


def test_an_environment_that_was_read_before_the_fork_is_refused_by_name(tmp_path: Path) -> None:
    nursery = EngineForkServer(tmp_path / "log", {"OMP_NUM_THREADS": "1"})
    env = engine_env({**os.environ, "OMP_NUM_THREADS": "2"})
    with pytest.raises(ValueError, match="OMP_NUM_THREADS"):
        nursery.fork(env, 0, 1, 2)


def test_the_end_of_a_process_of_others_is_seen_and_waited_for() -> None:
    command = [sys.executable, "-c", "input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, text=True) as process:
        forked = Forked(process.pid, os.pidfd_open(process.pid))
        assert forked.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            forked.wait(0.01)
        process.communicate("\n")
        forked.wait(60)
        assert forked.poll() is not None
