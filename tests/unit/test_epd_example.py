# SPDX-License-Identifier: Apache-2.0
"""examples/epd/proxy.py between stand-ins that note what they are asked. tests/e2e has vLLM."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.support.serving import running
from tests.support.waiting import eventually

EXAMPLE = Path(__file__).parents[2] / "examples" / "epd"
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
SOUND = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
WORDS = {"type": "text", "text": "what is it?"}
NAMES = {"ab" * 32: {"item_indices": [0], "metadata": {}}}
RUNS = re.compile("Running on (http://127.0.0.1:[0-9]+) ")

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("aiohttp") is None, reason="aiohttp comes with vLLM"
)


class StandIn:
    """An instance of vLLM; ``answers`` maps a path to a status and a body."""

    def __init__(self) -> None:
        self.begin_anew({})
        stand_in = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                with contextlib.suppress(ValueError):
                    body = json.loads(body)
                self.answer("POST", body)

            def do_GET(self) -> None:
                self.answer("GET", None)

            def answer(self, method: str, body: Any) -> None:
                stand_in.asked.append((method, self.path, body))
                stand_in.headers.append(dict(self.headers))
                self.send_response(stand_in.status)
                self.send_header("X-From", "vLLM")
                self.send_header("Content-Length", str(len(stand_in.body)))
                self.end_headers()
                self.wfile.write(stand_in.body)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._running = running(self._server)
        self._running.__enter__()

    def begin_anew(self, answer: Any) -> None:
        """Forget what was asked, and give this answer."""
        self.asked: list[tuple[str, str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.status = 200
        self.body = json.dumps(answer).encode()

    def close(self) -> None:
        self._running.__exit__(None, None, None)


@pytest.fixture(scope="module")
def encoder_server() -> Iterator[StandIn]:
    with contextlib.closing(StandIn()) as made:
        yield made


@pytest.fixture(scope="module")
def language_server() -> Iterator[StandIn]:
    with contextlib.closing(StandIn()) as made:
        yield made


@pytest.fixture
def encoder(encoder_server: StandIn) -> StandIn:
    encoder_server.begin_anew({"choices": [], "ec_transfer_params": NAMES})
    return encoder_server


@pytest.fixture
def language(language_server: StandIn) -> StandIn:
    language_server.begin_anew({"choices": ["an answer"]})
    return language_server


@contextlib.contextmanager
def proxy(encoder: str, language: str, log_path: Path) -> Iterator[str]:
    arguments = ["--port", "0", "--encoder", encoder, "--language", language]
    with (
        open(log_path, "ab") as log,
        subprocess.Popen(
            [sys.executable, str(EXAMPLE / "proxy.py"), *arguments, "--encoder-timeout-s", "60"],
            stdout=log,
            stderr=log,
        ) as process,
    ):
        try:
            eventually(lambda: RUNS.search(log_path.read_text()) is not None, "the proxy runs")
            found = RUNS.search(log_path.read_text())
            assert found is not None
            yield found[1]
        finally:
            process.terminate()


Post = Callable[..., tuple[int, bytes]]


@pytest.fixture(scope="module")
def proxy_url(
    encoder_server: StandIn, language_server: StandIn, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    log_path = tmp_path_factory.mktemp("proxy") / "proxy.log"
    with proxy(encoder_server.url, language_server.url, log_path) as url:
        yield url


@pytest.fixture
def post(proxy_url: str, encoder: StandIn, language: StandIn) -> Post:
    """Ask the proxy between the two."""

    def post(body: Any, path: str = "/v1/chat/completions") -> tuple[int, bytes]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", "Authorization": "Bearer key"}
        asked = urllib.request.Request(f"{proxy_url}{path}", data, headers)
        try:
            with urllib.request.urlopen(asked, timeout=300) as reply:
                assert reply.headers["X-From"] == "vLLM"
                return reply.status, reply.read()
        except urllib.error.HTTPError as exc:
            return exc.code, exc.read()

    return post


def chat(*parts: Any, **more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": list(parts)}], **more}


def test_the_encoder_gets_the_media_and_the_language_instance_all_of_it_with_names(
    post: Post, encoder: StandIn, language: StandIn
) -> None:
    asked = chat(PICTURE, WORDS, SOUND, temperature=0, mm_processor_kwargs={"a": 1}, stream=True)
    assert post(asked) == (200, language.body)
    [(_, path, order)] = encoder.asked
    assert path == "/v1/chat/completions"
    assert order == {
        "model": "m",
        "mm_processor_kwargs": {"a": 1},
        "messages": [{"role": "user", "content": [PICTURE, SOUND]}],
        "max_tokens": 1,
    }
    assert language.asked == [("POST", path, {**asked, "ec_transfer_params": NAMES})]
    for instance in (encoder, language):
        assert instance.headers[0]["Authorization"] == "Bearer key"


def test_what_a_client_has_named_itself_stays(post: Post, language: StandIn) -> None:
    post(chat(PICTURE, ec_transfer_params={"own": {}}))
    assert language.asked[0][2]["ec_transfer_params"] == {**NAMES, "own": {}}


@pytest.mark.parametrize(
    "body",
    [
        chat(WORDS),
        {"model": "m", "messages": [{"role": "user", "content": "words only"}]},
        {"model": "m", "messages": [{"role": "user"}]},
        {"messages": [1]},
        {"messages": 1},
        [],
        {},
        b"no JSON",
        b"",
    ],
)
def test_what_has_no_media_goes_on_as_it_is(
    post: Post, encoder: StandIn, language: StandIn, body: Any
) -> None:
    assert post(body) == (200, language.body)
    assert encoder.asked == []
    assert language.asked == [("POST", "/v1/chat/completions", body)]


def test_other_paths_go_on_as_they_are(post: Post, encoder: StandIn, language: StandIn) -> None:
    post(chat(PICTURE), "/v1/other?a=b")
    assert encoder.asked == []
    assert language.asked == [("POST", "/v1/other?a=b", chat(PICTURE))]


@pytest.mark.parametrize(
    ("status", "body"), [(500, b"{}"), (200, b"no JSON"), (200, b"{}"), (200, b"[]")]
)
def test_an_encoder_that_fails_costs_the_names_only(
    post: Post, encoder: StandIn, language: StandIn, status: int, body: bytes
) -> None:
    encoder.status, encoder.body = status, body
    assert post(chat(PICTURE)) == (200, language.body)
    assert language.asked[0][2] == {**chat(PICTURE), "ec_transfer_params": {}}


def test_an_error_of_the_language_instance_is_the_clients(post: Post, language: StandIn) -> None:
    language.status, language.body = 400, b'{"error": "no"}'
    assert post(chat(PICTURE)) == (400, language.body)


def test_without_a_language_instance_the_client_is_told(encoder: StandIn, tmp_path: Path) -> None:
    nobody = "http://127.0.0.1:1"
    with (
        proxy(encoder.url, nobody, tmp_path / "proxy.log") as url,
        pytest.raises(urllib.error.HTTPError) as caught,
    ):
        urllib.request.urlopen(f"{url}/health", timeout=300)
    assert caught.value.code == 502
    caught.value.close()


def test_every_file_of_the_example_is_named_in_its_readme() -> None:
    text = (EXAMPLE / "README.md").read_text()
    names = {path.name for path in EXAMPLE.iterdir()} - {"README.md", "__pycache__"}
    assert {name for name in names if f"`{name}`" not in text} == set()
