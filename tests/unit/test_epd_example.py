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
CHAT = "/v1/chat/completions"
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
SOUND = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
WORDS = {"type": "text", "text": "what is it?"}
NAMES = {"ab" * 32: {"item_indices": [0], "metadata": {}}}
RUNS = re.compile("Running on (http://127.0.0.1:[0-9]+) ")

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("aiohttp") is None, reason="aiohttp comes with vLLM"
)


class StandIn(ThreadingHTTPServer):
    """An instance of vLLM: gives one answer to all that it is asked."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.begin_anew(b"")

    def begin_anew(self, body: bytes, status: int = 200) -> None:
        """Forget what was asked, and give this answer."""
        self.asked: list[tuple[str, Any]] = []
        self.keys: set[str | None] = set()
        self.status, self.body = status, body


class _Handler(BaseHTTPRequestHandler):
    server: StandIn

    def do_POST(self) -> None:
        body: Any = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        with contextlib.suppress(ValueError):
            body = json.loads(body)
        self.server.asked.append((self.path, body))
        self.server.keys.add(self.headers["Authorization"])
        self.send_response(self.server.status)
        self.send_header("X-From", "vLLM")
        self.send_header("Content-Length", str(len(self.server.body)))
        self.end_headers()
        self.wfile.write(self.server.body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


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


Site = tuple[StandIn, StandIn, str]


@pytest.fixture(scope="module")
def running_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Encoder, language instance, and the URL of the proxy between them."""
    log_path = tmp_path_factory.mktemp("proxy") / "proxy.log"
    encoder, language = StandIn(), StandIn()
    with (
        running(encoder),
        running(language),
        proxy(encoder.url, language.url, log_path) as url,
    ):
        yield encoder, language, url


@pytest.fixture
def site(running_site: Site) -> Site:
    encoder, language, _ = running_site
    encoder.begin_anew(json.dumps({"choices": [], "ec_transfer_params": NAMES}).encode())
    language.begin_anew(b'{"choices": ["an answer"]}')
    return running_site


Post = Callable[..., tuple[int, bytes]]


@pytest.fixture
def post(site: Site) -> Post:
    """Ask the proxy."""

    def post(body: Any, path: str = CHAT) -> tuple[int, bytes]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", "Authorization": "Bearer key"}
        asked = urllib.request.Request(f"{site[2]}{path}", data, headers)
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
    post: Post, site: Site
) -> None:
    encoder, language, _ = site
    asked = chat(PICTURE, WORDS, SOUND, temperature=0, mm_processor_kwargs={"a": 1}, stream=True)
    assert post(asked) == (200, language.body)
    order = {
        "model": "m",
        "mm_processor_kwargs": {"a": 1},
        "messages": [{"role": "user", "content": [PICTURE, SOUND]}],
        "max_tokens": 1,
    }
    assert encoder.asked == [(CHAT, order)]
    assert language.asked == [(CHAT, {**asked, "ec_transfer_params": NAMES})]
    assert encoder.keys == language.keys == {"Bearer key"}


@pytest.mark.parametrize(
    ("body", "path"),
    [
        (chat(WORDS), CHAT),
        ({"model": "m", "messages": [{"role": "user", "content": "words only"}]}, CHAT),
        ({"model": "m", "messages": [{"role": "user"}]}, CHAT),
        ({"messages": [1]}, CHAT),
        ({"messages": 1}, CHAT),
        ([], CHAT),
        ({}, CHAT),
        (b"no JSON", CHAT),
        (b"", CHAT),
        (chat(PICTURE), "/v1/other?a=b"),
    ],
)
def test_what_has_no_media_and_other_paths_go_on_as_they_are(
    post: Post, site: Site, body: Any, path: str
) -> None:
    encoder, language, _ = site
    assert post(body, path) == (200, language.body)
    assert encoder.asked == []
    assert language.asked == [(path, body)]


@pytest.mark.parametrize(
    ("status", "body"), [(500, b"{}"), (200, b"no JSON"), (200, b"{}"), (200, b"[]")]
)
def test_an_encoder_that_fails_costs_its_names_only(
    post: Post, site: Site, status: int, body: bytes
) -> None:
    encoder, language, _ = site
    asked = chat(PICTURE, ec_transfer_params={"the client's": {}})
    assert post(asked) == (200, language.body)
    encoder.begin_anew(body, status)
    assert post(asked) == (200, language.body)
    assert [one["ec_transfer_params"] for _, one in language.asked] == [
        {**NAMES, "the client's": {}},
        {"the client's": {}},
    ]


def test_an_error_of_the_language_instance_is_the_clients(
    post: Post, site: Site, tmp_path: Path
) -> None:
    encoder, language, _ = site
    language.begin_anew(b'{"error": "no"}', 400)
    assert post(chat(PICTURE)) == (400, language.body)
    with (
        proxy(encoder.url, "http://127.0.0.1:1", tmp_path / "proxy.log") as url,
        pytest.raises(urllib.error.HTTPError) as caught,
    ):
        urllib.request.urlopen(f"{url}/health", timeout=300)
    assert caught.value.code == 502
    caught.value.close()
