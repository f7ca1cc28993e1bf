# SPDX-License-Identifier: Apache-2.0
"""The command line; nothing is imported before a command needs it."""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
from types import FrameType


def main() -> None:
    """Entry point of the console script ``s3ec``."""
    # Arrow's own allocator keeps what other threads have freed: twice the memory of a job.
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
    atexit.register(_end_soon)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _on_ctrl_c)
    try:
        from s3ec.cli.app import app
        from s3ec.cli.output import open_stdout, plain_logs

        open_stdout()
        plain_logs()
        app()
    except SystemExit:
        raise
    except BaseException:
        # Ctrl-C came before any command began, or in C code, which turned it into another error.
        if not was_interrupted():
            raise
        from s3ec.cli.output import ended_by

        sys.exit(ended_by(KeyboardInterrupt(), sys.argv[1:]))


def _end_soon() -> None:
    """Spare the interpreter a search through all imported objects, which takes 0.2 s.

    Not with vLLM: its libraries would list on stderr what is left.
    """
    if "vllm" not in sys.modules:
        gc.freeze()


def _on_ctrl_c(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_DFL)  # the second one ends the process at once
    raise KeyboardInterrupt


def was_interrupted() -> bool:
    """True if Ctrl-C has come: a library may have dropped or replaced its exception."""
    return signal.getsignal(signal.SIGINT) is signal.SIG_DFL
