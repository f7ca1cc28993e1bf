# SPDX-License-Identifier: Apache-2.0
"""Keeps our faults out of the engine: around each of vLLM's hooks."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, TypeVar, cast

from s3ec import runtime
from s3ec.runtime import PASS_THROUGH

log = logging.getLogger(__name__)
F = TypeVar("F", bound=Callable[..., Any])
_FAILED = "%s failed; the request is served without the cache"


def guarded(default: Any = None, *, fallback: Callable[..., Any] | None = None) -> Callable[[F], F]:
    """Let no exception of ours out of a hook: vLLM would end the engine.

    A fault is logged with its traceback and counted where the object's ``parts`` have a node. The
    answer is then what a miss would answer. BaseException counts too: Rust's panics are none of
    Exception's, and neither is a cancellation. What a signal handler raises passes.

    In a forked child of the process that made the node, the hook is not called at all.

    Args:
        default: The answer then; the caller must not change it.
        fallback: Makes the answer instead, from the hook's arguments. Children call it too, so it
            touches neither the node nor a lock. If it fails, ``default`` is the answer.
    """

    def wrap(hook: F) -> F:
        def answer(node: Any, *args: Any, **kwargs: Any) -> Any:
            if fallback is None:
                return default
            try:
                return fallback(*args, **kwargs)
            except PASS_THROUGH:
                raise
            except BaseException:
                _count(node)
                log.exception(_FAILED, fallback.__name__)
                return default

        @functools.wraps(hook)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            node = getattr(getattr(self, "parts", None), "node", None)
            # No call and no os.getpid(): this runs in every hook of a scheduling pass.
            if node is not None and node.process != runtime.process_number:
                return answer(None, self, *args, **kwargs)
            try:
                return hook(self, *args, **kwargs)
            except PASS_THROUGH:
                raise
            except BaseException:
                _count(node)
                log.exception(_FAILED, hook.__name__)
                return answer(node, self, *args, **kwargs)

        return cast("F", call)

    return wrap


def _count(node: Any) -> None:
    if node is not None:
        node.counters.add("internal_errors")


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
