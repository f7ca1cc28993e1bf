# SPDX-License-Identifier: Apache-2.0
"""OpenTelemetry spans of fetches and saves, if tracing is set up in this process.

vLLM sets it up in each of its processes with ``--otlp-traces-endpoint`` (0.32, ``vllm/tracing``),
and so may any program. This module imports nothing for it: a process without tracing has not
imported the API either. A span is made when its work has ended, by the thread that did it, and
never in a hook. It has no parent, since one fetch serves many requests.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any, Literal, TypeAlias

import s3ec

log = logging.getLogger(__name__)

Value: TypeAlias = str | int | float | bool


class Work:
    """One fetch or save that will have a span.

    Attributes:
        began_ns: Nanoseconds since the epoch.
        counts: Counts noted during the work, such as ``retries``.
    """

    __slots__ = ("began_ns", "counts")

    def __init__(self) -> None:
        """Begin now."""
        self.began_ns = time.time_ns()
        self.counts: dict[str, int] = {}


_work: ContextVar[Work | None] = ContextVar("s3ec_span", default=None)


def note(what: Literal["attempts", "retries", "hedges"]) -> None:
    """Count an event of the current task's work, if it has a span."""
    work = _work.get()
    if work is not None:
        work.counts[what] = work.counts.get(what, 0) + 1


class Spans:
    """Makes the spans of one node."""

    def __init__(self, attributes: Mapping[str, Value] | None = None) -> None:
        """Store the attributes.

        Args:
            attributes: Attributes of every span.
        """
        self._attributes = dict(attributes or {})
        self._provider: Any = None
        self._tracer: Any = None

    def begin(self) -> Work | None:
        """Begin the work of the current task; None without tracing, after 2 us at most.

        The work must have a task of its own: ``note`` finds it by the task.
        """
        if _provider() is None:
            return None
        work = Work()
        _work.set(work)
        return work

    def end(
        self,
        name: str,
        work: Work | None,
        attributes: Mapping[str, Value | None],
        *,
        remote: bool,
        error: str = "",
    ) -> None:
        """End the work, and make its span.

        Args:
            attributes: Attributes of this span; values of None are left out.
            remote: True if another machine was asked.
            error: What went wrong, in one word; empty if nothing did.
        """
        provider = _provider() if work is not None else None
        if work is None or provider is None:
            return
        api = sys.modules["opentelemetry.trace"]
        if provider is not self._provider:
            self._tracer = provider.get_tracer("s3ec", s3ec.__version__)
            self._provider = provider
        counted = {f"s3ec.{what}": count for what, count in work.counts.items()}
        shown = {key: value for key, value in attributes.items() if value is not None}
        if error:
            shown["error.type"] = error
        span = self._tracer.start_span(
            name,
            context=sys.modules["opentelemetry.context"].Context(),  # empty: no parent
            kind=api.SpanKind.CLIENT if remote else api.SpanKind.INTERNAL,
            attributes={**self._attributes, **counted, **shown},
            start_time=work.began_ns,
        )
        if error:
            span.set_status(api.StatusCode.ERROR, error)
        span.end()


def _provider() -> Any:
    """Return the tracer provider that is set up in this process; None without one."""
    api = sys.modules.get("opentelemetry.trace")
    find = getattr(api, "get_tracer_provider", None)  # absent while the API is being imported
    if api is None or find is None:
        return None
    try:
        found = find()
    except Exception:  # OTEL_PYTHON_TRACER_PROVIDER may name a provider that cannot be loaded
        log.debug("no spans", exc_info=True)
        return None
    return None if isinstance(found, (api.ProxyTracerProvider, api.NoOpTracerProvider)) else found
