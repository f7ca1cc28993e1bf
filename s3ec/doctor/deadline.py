# SPDX-License-Identifier: Apache-2.0
"""Run a call that may hang, and stop waiting for it in time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from s3ec.errors import UnavailableError

T = TypeVar("T")


def within(timeout_s: float, call: Callable[[], T]) -> T:
    """The result of ``call``, run in a thread that is given up after ``timeout_s``.

    SDKs have timeouts per phase, none over all: name lookup, credentials and a trickling
    reply have none. The thread is a daemon, so that a hanging one does not hold up the exit.

    Raises:
        UnavailableError: No result in time.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as exc:  # noqa: BLE001 - raised again in the caller's thread
            future.set_exception(exc)

    threading.Thread(target=run, name="s3ec-doctor", daemon=True).start()
    try:
        return future.result(timeout_s)
    except TimeoutError as exc:
        if future.done():  # the call's own TimeoutError
            raise
        raise UnavailableError(f"no answer within {timeout_s:.0f} s") from exc
