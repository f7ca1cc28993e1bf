# SPDX-License-Identifier: Apache-2.0
"""Servers of this process, for as long as a test needs them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import HTTPServer


@contextmanager
def running(server: HTTPServer) -> Iterator[None]:
    """Serve in a thread. It ends at once: by itself a server looks for its end twice a second."""
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
    )
    with server:
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join()
