# SPDX-License-Identifier: Apache-2.0
"""The command line in a process with a Ray of its own: ``python -m tests.e2e.ray_job WORD...``."""

from __future__ import annotations

import os
import runpy
from typing import Any


def start_ray() -> None:
    """Start a Ray of one core on loopback, with its files below RAY_TMPDIR."""
    os.environ |= {
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # has it use loopback, on any system
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",
    }
    import ray

    ray._private.ray_constants.ENABLE_RAY_CLUSTER = False
    quiet: dict[str, Any] = {"log_to_driver": False, "configure_logging": False}
    ray.init("local", num_cpus=1, include_dashboard=False, **quiet)


if __name__ == "__main__":
    start_ray()
    runpy.run_module("s3ec", run_name="__main__", alter_sys=True)
