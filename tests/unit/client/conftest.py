# SPDX-License-Identifier: Apache-2.0
"""A catalogue of a few files, and a server that answers as vLLM does, by a script."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from s3ec.corpus.catalog_file import CatalogRow
from tests.support.serving import running

GRID = {"image_grid_thw": [1, 16, 16]}
WITHOUT, WITH = "without pixels", "with pixels"


def row_of(path: Path, **changes: Any) -> CatalogRow:
    """What the catalogue says of a file."""
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    row = {
        "document": path.name,
        "page": None,
        "uri": path.as_uri(),
        "sha256": digest,
        "identifier": f"sha256:{digest}",
        "modality": "image",
        "rows": 64,
        "width": 64,
        "dtype": "bfloat16",
        "placeholder": GRID,
        "nbytes": 8192,
        "stored_s": 1.75e9,
        "extra": {"shelf": 3},
    }
    return CatalogRow(**{**row, **changes})


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Three files that a corpus was made of."""
    paths = [tmp_path / f"{name}.png" for name in "abc"]
    for path in paths:
        path.write_bytes(b"the picture " + path.name.encode())
    return paths


@dataclass
class Server:
    """Answers each chat by what ``answer`` says: a status, or the words.

    Attributes:
        url: For ``base_url``.
        answer: Called with WITHOUT or WITH, and how many requests came before.
        seen: The messages' parts of all requests, in order.
    """

    url: str = ""
    answer: Callable[[str, int], int | str] = lambda _kind, _number: "yes"
    seen: list[list[dict[str, Any]]] = field(default_factory=list)

    @property
    def kinds(self) -> list[str]:
        """Of all requests, WITHOUT or WITH."""
        return [_kind(parts) for parts in self.seen]


def _kind(parts: list[dict[str, Any]]) -> str:
    return WITHOUT if any(part["type"].endswith("_embeds") for part in parts) else WITH


def _chunk(**delta: Any) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": None}
    chunk = {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    return b"data: " + json.dumps({**chunk, "choices": [choice]}).encode() + b"\n\n"


def _error(status: int) -> dict[str, Any]:
    return {"error": {"message": "so it is", "type": "Error", "param": None, "code": status}}


@pytest.fixture
def server() -> Iterator[Server]:
    """It runs; the test says what it answers."""
    script = Server()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            parts = [part for message in body["messages"] for part in message["content"]]
            answer = script.answer(_kind(parts), len(script.seen))
            script.seen.append(parts)
            if body.get("stream"):
                self._stream(answer)
            elif isinstance(answer, int):
                self._send(answer, _error(answer))
            else:
                message = {"role": "assistant", "content": answer}
                choice = {"index": 0, "message": message, "finish_reason": "stop"}
                whole = {"id": "1", "object": "chat.completion", "created": 1, "model": "m"}
                self._send(200, {**whole, "choices": [choice]})

        def _stream(self, answer: int | str) -> None:
            """As vLLM does: it refuses at once, and what fails later fails after one chunk."""
            if answer == 400:
                return self._send(400, _error(400))
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.end_headers()
            self.wfile.write(_chunk(role="assistant", content=""))
            if isinstance(answer, int):
                self.wfile.write(b"data: " + json.dumps(_error(answer)).encode() + b"\n\n")
                return None
            for word in answer:
                self.wfile.write(_chunk(content=word))
            self.wfile.write(b"data: [DONE]\n\n")
            return None

        def _send(self, status: int, answer: dict[str, Any]) -> None:
            content = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            """Nothing."""

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    with running(http):
        script.url = f"http://127.0.0.1:{http.server_address[1]}/v1"
        yield script
