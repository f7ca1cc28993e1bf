# SPDX-License-Identifier: Apache-2.0
"""The command line; nothing is imported before a command needs it."""

from __future__ import annotations

import atexit
import gc
import os
import sys


def main() -> None:
    """Entry point of the console script ``s3ec``."""
    # At its end the interpreter would look through all that was imported, which takes 0.2 s.
    atexit.register(gc.freeze)
    # Arrow's own allocator keeps what other threads have freed: twice the memory of a job.
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
    try:
        from s3ec.cli.app import app
        from s3ec.cli.output import open_stdout, plain_logs

        open_stdout()
        plain_logs()
        app()
    except KeyboardInterrupt:  # before any command began
        sys.exit(130)
