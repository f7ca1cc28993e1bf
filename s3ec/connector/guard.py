# SPDX-License-Identifier: Apache-2.0
"""Keeps our faults out of the engine: around each of vLLM's hooks."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, TypeVar, cast

from s3ec.runtime import PASS_THROUGH

log = logging.getLogger(__name__)
F = TypeVar("F", bound=Callable[..., Any])


def guarded(default: Any, *, in_children: bool = False) -> Callable[[F], F]:
    """Let no exception of ours out of a hook: vLLM would end the engine.

    In a forked child of the process that made the object's ``_node`` nothing is called.

    The fault is logged with its traceback, counted where the object has a ``_node``, and answered
    with ``default``, which must be what a miss would answer, and is never changed by the caller.
    BaseException too: Rust's panics are none of Exception's, and neither is a cancellation. What
    a signal handler raises passes.

    Args:
        default: The answer then.
        in_children: What is called touches neither the node nor a lock, so children may.
    """

    def wrap(hook: F) -> F:
        @functools.wraps(hook)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            node = getattr(self, "_node", None)  # shutdown() gives it away
            if node is not None and node.is_foreign:
                if not in_children:
                    return default
                node = None
            try:
                return hook(self, *args, **kwargs)
            except PASS_THROUGH:
                raise
            except BaseException:
                if node is not None:
                    node.counters.add("internal_errors")
                log.exception("%s failed; the request is served without the cache", hook.__name__)
                return default

        return cast("F", call)

    return wrap


def fatal(hook: F) -> F:
    """For a hook that must raise where it failed: an Exception, which vLLM reports as its own.

    Rust's panics and cancellations pass by ``except Exception``, and end a process in silence.
    """

    @functools.wraps(hook)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return hook(*args, **kwargs)
        except (Exception, *PASS_THROUGH):
            raise
        except BaseException as exc:
            raise RuntimeError(f"{hook.__name__} failed: {exc!r}") from exc

    return cast("F", call)
