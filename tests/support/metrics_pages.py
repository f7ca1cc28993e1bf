# SPDX-License-Identifier: Apache-2.0
"""Pages as vLLM's /metrics answers them, made of a few figures, and a server for them."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tests.support.serving import running

MODEL = "google/gemma-3-27b-it"
BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0)


def page(
    counts: Mapping[str, float] | None = None,
    levels: Mapping[str, float] | None = None,
    times: Mapping[str, list[float]] | None = None,
    *,
    engine: str = "0",
    model: str = MODEL,
) -> str:
    """One page in the exposition format.

    Args:
        counts: ``hits`` or ``lookups{tier="node",outcome="hit"}`` -> sum.
        levels: The same for gauges.
        times: Histogram -> seconds of each of its events.
        engine, model: vLLM's labels.
    """
    ours = f'engine="{engine}",model_name="{model}"'
    lines: list[str] = []
    said: set[str] = set()

    def family(name: str, kind: str) -> None:
        if name not in said:
            said.add(name)
            lines.append(f"# HELP vllm:s3ec_{name} Text.\n# TYPE vllm:s3ec_{name} {kind}")

    def sample(name: str, labels: str, value: float, *more: str) -> None:
        inside = ",".join(part for part in (ours, labels, *more) if part)
        lines.append(f"vllm:s3ec_{name}{{{inside}}} {value}")

    for kind, values in (("counter", counts or {}), ("gauge", levels or {})):
        for key, value in values.items():
            name, _, labels = key.removesuffix("}").partition("{")
            whole = f"{name}_total" if kind == "counter" else name
            family(whole, kind)
            sample(whole, labels, value)
    for key, seconds in (times or {}).items():
        name, _, labels = key.removesuffix("}").partition("{")
        family(name, "histogram")
        for bound in BOUNDS_S:
            count = sum(one <= bound for one in seconds)
            sample(f"{name}_bucket", labels, count, f'le="{bound}"')
        sample(f"{name}_bucket", labels, len(seconds), 'le="+Inf"')
        sample(f"{name}_count", labels, len(seconds))
        sample(f"{name}_sum", labels, sum(seconds))
    return "\n".join([*lines, ""])


class Pages:
    """What a server answers, one page after the other; the last one again and again.

    Attributes:
        url: Where it listens, on this machine only.
    """

    def __init__(self, pages: list[str | int], url: str) -> None:
        self._pages = pages
        self._lock = threading.Lock()
        self.url = url

    def next(self) -> str | int:
        """The next page, or a status in its place."""
        with self._lock:
            return self._pages.pop(0) if len(self._pages) > 1 else self._pages[0]


@contextmanager
def served(*pages: str | int) -> Iterator[str]:
    """Serve pages, one for each request; a number is a status without a page.

    Yields:
        The URL.
    """
    shown = Pages(list(pages), "")

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            one = shown.next()
            body = one.encode() if isinstance(one, str) else b""
            self.send_response(200 if isinstance(one, str) else one)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    with running(server):
        yield f"http://127.0.0.1:{server.server_port}/metrics"
