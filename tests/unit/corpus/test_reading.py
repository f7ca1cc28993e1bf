# SPDX-License-Identifier: Apache-2.0
"""The bytes behind a URI: bounded in size and time, and a plain reason where there are none."""

from __future__ import annotations

import io
import socket
import threading
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pypdfium2
import pytest
from PIL import Image

from s3ec.corpus.reading import (
    Reader,
    ReadOptions,
    reader_for,
    render_page,
    without_secrets,
)
from s3ec.errors import SourceError
from s3ec.settings import Settings
from s3ec.testing.server import HOST, REGION, LocalS3
from tests.support.pdfs import make_busy_pdf, make_pdf
from tests.support.serving import running
from tests.support.waiting import DEADLINE_S

MOST = 1000


class Pages(BaseHTTPRequestHandler):
    """What a path does is its name."""

    asked: list[str]
    ended: threading.Event
    pdf = make_pdf(2)

    def do_GET(self) -> None:
        self.asked.append(self.path)
        match self.path.partition("?")[0].strip("/").split("/"):
            case ["to", *rest]:
                self._head(302, Location="/" + "/".join(rest))
            case ["loop"]:
                self._head(302, Location="/loop")
            case ["away"]:
                self._head(302, Location="ftp://127.0.0.1/a.png")
            case ["busy-once"] if self.asked.count(self.path) == 1:
                self._head(503)
            case ["absent"]:
                self._head(404)
            case ["long"]:
                self._body(b"x" * (MOST + 1))
            case ["endless"]:
                self._head(200)
                while not self.ended.is_set():
                    try:
                        self.wfile.write(b"x" * MOST)
                    except OSError:
                        return
            case ["drops"]:
                self._head(200)
                while not self.ended.wait(0.01):
                    try:
                        self.wfile.write(b"x")
                        self.wfile.flush()
                    except OSError:
                        return
            case ["short"]:
                self._head(200, Content_Length=str(MOST))
                self.wfile.write(b"only this")
            case ["packed"]:
                self._body(zlib.compress(b"body"), Content_Encoding="deflate")
            case ["a.pdf"]:
                self._body(self.pdf)
            case _:
                self._body(b"body")

    def _head(self, status: int, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()

    def _body(self, body: bytes, **headers: str) -> None:
        self._head(200, Content_Length=str(len(body)), **headers)
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def serving() -> Iterator[tuple[str, list[str]]]:
    """A server's address, and the paths that it was asked for."""
    asked: list[str] = []
    ended = threading.Event()
    handler = type("Handler", (Pages,), {"asked": asked, "ended": ended})
    server = ThreadingHTTPServer((HOST, 0), handler)
    with running(server):
        try:
            yield f"http://{HOST}:{server.server_port}", asked
        finally:
            ended.set()


@pytest.fixture
def pages() -> Iterator[tuple[str, list[str]]]:
    with serving() as served:
        yield served


@pytest.fixture
def reader() -> Iterator[Reader]:
    made = Reader(ReadOptions(max_bytes=MOST, timeout_s=DEADLINE_S))
    yield made
    made.close()


def reason_of(reader: Reader, uri: str, page: int | None = None) -> str:
    with pytest.raises(SourceError) as caught:
        reader.read(uri, page)
    return caught.value.reason


# -- http --------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/a.png", "/to/a.png", "/to/to/to/to/to/a.png", "/busy-once"])
def test_download_follows_few_redirects_and_asks_a_busy_server_again(
    path: str, pages: tuple[str, list[str]], reader: Reader
) -> None:
    assert reader.read(pages[0] + path) == b"body"


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("/absent", "the server answered with HTTP status 404"),
        ("/loop", "redirected more than 5 times"),
        ("/away", "redirected to what is no http or https URL"),
        ("/long", f"it is larger than {MOST} bytes (max_bytes)"),
        ("/endless", f"it is larger than {MOST} bytes (max_bytes)"),
        ("/short", "the server cannot be read from: ProtocolError"),
        ("/packed", "the server compressed it though it was asked not to"),
    ],
)
def test_download_that_fails_has_a_reason(
    path: str, says: str, pages: tuple[str, list[str]], reader: Reader
) -> None:
    assert reason_of(reader, pages[0] + path) == says


# The second where nothing comes for so long, as on a busy machine.
GIVEN_UP = ("it took longer than 0.2 s", "the server cannot be read from: ReadTimeoutError")


def test_server_that_sends_drop_by_drop_is_given_up(pages: tuple[str, list[str]]) -> None:
    reader = Reader(ReadOptions(timeout_s=0.2))
    assert reason_of(reader, pages[0] + "/drops") in GIVEN_UP
    reader.close()


def test_server_that_says_nothing_is_given_up() -> None:
    reader = Reader(ReadOptions(timeout_s=0.2))
    with socket.create_server((HOST, 0)) as silent:
        said = reason_of(reader, f"http://{HOST}:{silent.getsockname()[1]}/a.png")
    assert said in GIVEN_UP
    reader.close()


def test_reason_does_not_repeat_what_a_url_holds(reader: Reader) -> None:
    refused = reason_of(reader, f"http://{HOST}:1/a.png?signature=secret")
    assert refused == "the server cannot be read from: NewConnectionError"
    assert reason_of(reader, f"http://me:secret@{HOST}/a.png") == (
        "no user name and password in the URL"
    )


@pytest.mark.parametrize(
    ("uri", "told"),
    [
        ("https://h/a.png", "https://h/a.png"),
        ("https://h:8080/@a/b@2x.png", "https://h:8080/@a/b@2x.png"),
        ("https://h/a.png?X-Amz-Signature=SECRET", "https://h/a.png?..."),
        ("https://h?SECRET", "https://h?..."),
        ("https://h/a.pdf?sig=SECRET#page=3", "https://h/a.pdf?...#page=3"),
        ("https://h/a.png#access_token=SECRET", "https://h/a.png"),
        ("https://me:SECRET@h/a.png", "https://h/a.png"),
        ("https://SECRET@h:81/a.png", "https://h:81/a.png"),
        ("https://me:SECRET@[::1]:81/a.png", "https://[::1]:81/a.png"),
        ("https://me:SEC/RET@h/a.png", "https://h/a.png"),
        ("https://me:SEC#RET@h/a.png?SECRET", "https://h/a.png?..."),
        ("https://me:SEC?RET@h/a.png", "https://h/a.png"),
        ("https://me:SECRET@me@h/a.png", "https://h/a.png"),
        ("https://me:SECRET\\@h/a.png", "https://h/a.png"),
        ("HTTPS://me:SECRET@h/a.png?SECRET", "HTTPS://h/a.png?..."),
        ("ftp://me:SECRET@h/a.png?SECRET", "ftp://h/a.png?..."),
        ("s3://KEY:SECRET@bucket/a.png", "s3://bucket/a.png"),
        ("s3://bucket/a?b.png", "s3://bucket/a?b.png"),
        ("file:///a@b/c#row=7&column=image", "file:///a@b/c#row=7&column=image"),
        ("file://me:SECRET@h/a.png", "file://h/a.png"),
        ("a@b/c?d", "a@b/c?d"),
    ],
)
def test_what_is_told_of_a_uri_has_no_secret(uri: str, told: str) -> None:
    assert without_secrets(uri) == told
    assert without_secrets(told) == told


def test_credentials_in_the_url_of_an_object_are_refused(reader: Reader) -> None:
    assert reason_of(reader, "s3://KEY:secret@bucket/a.png") == (
        "no user name and password in the URL"
    )


def test_pdf_from_elsewhere_is_downloaded_once_for_all_its_pages(
    pages: tuple[str, list[str]],
) -> None:
    url, asked = pages
    reader = Reader(ReadOptions())
    assert reader.count_pages(f"{url}/a.pdf?v=1") == 2
    first, second = (reader.read(f"{url}/a.pdf?v=1#page={page}", page) for page in (1, 2))
    assert first != second
    assert asked == ["/a.pdf?v=1"]
    reader.close()


# -- pages -------------------------------------------------------------------------------------


def test_page_has_the_same_bytes_each_time_and_the_size_that_dpi_says(tmp_path: Path) -> None:
    path = tmp_path / "a.pdf"
    path.write_bytes(make_pdf(2, size=(72, 144)))
    drawn = render_page(path, 2, dpi=150)
    assert drawn == render_page(path.read_bytes(), 2, dpi=150)
    assert drawn != render_page(path, 1, dpi=150)
    with Image.open(io.BytesIO(drawn)) as picture:
        assert (picture.format, picture.mode, picture.size) == ("PNG", "RGB", (150, 300))


def test_several_threads_may_draw_at_once(tmp_path: Path) -> None:
    path = tmp_path / "a.pdf"
    path.write_bytes(make_pdf(4))
    alone = [render_page(path, page) for page in (1, 2, 3, 4)]
    with ThreadPoolExecutor(4) as pool:
        drawn = list(pool.map(lambda page: render_page(path, page), (1, 2, 3, 4) * 4))
    assert drawn == alone * 4


def test_page_that_is_too_large_to_draw_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="take a smaller dpi"):
        render_page(make_pdf(1, size=(1000, 1000)), 1, dpi=1200)


def test_a_page_is_drawn_as_pypdfium2_does_it() -> None:
    for pdf in (make_pdf(1), make_busy_pdf(300)):
        document = pypdfium2.PdfDocument(pdf)
        document.init_forms()
        theirs = document[0].render(scale=150 / 72).to_pil()
        with Image.open(io.BytesIO(render_page(pdf, 1, dpi=150))) as ours:
            assert ours.tobytes() == theirs.tobytes()
        document.close()


def test_page_that_takes_too_long_is_refused_and_the_next_one_is_drawn() -> None:
    pdf = make_busy_pdf(300)
    with pytest.raises(SourceError, match=r"takes longer than 0 s \(timeout_s\)"):
        render_page(pdf, 1, timeout_s=0)
    assert render_page(pdf, 1) == render_page(pdf, 1)


def test_local_pdf_that_is_larger_than_allowed_is_refused(tmp_path: Path, reader: Reader) -> None:
    path = tmp_path / "a.pdf"
    path.write_bytes(make_pdf(1) + b"%" * MOST)
    with pytest.raises(SourceError, match="it is larger than 1000 bytes"):
        reader.count_pages(path.as_uri())
    assert reason_of(reader, path.as_uri(), 1) == "it is larger than 1000 bytes (max_bytes)"


def test_a_drawn_page_is_held_to_the_same_size(tmp_path: Path) -> None:
    path = tmp_path / "a.pdf"
    path.write_bytes(make_pdf(1))
    most = path.stat().st_size
    assert len(render_page(path, 1, dpi=600)) > most
    reader = Reader(ReadOptions(dpi=600, max_bytes=most))
    assert reason_of(reader, path.as_uri(), 1) == f"it is larger than {most} bytes (max_bytes)"
    reader.close()


# -- S3 ----------------------------------------------------------------------------------------


@pytest.fixture
def s3_settings(
    local_s3: LocalS3, s3_bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Settings:
    """Of a corpus in another bucket of the same server."""
    for name, value in local_s3.env().items():
        monkeypatch.setenv(name, value)
    return Settings(
        bucket="embeddings",
        prefix="corpus",
        endpoint_url=local_s3.endpoint_url,
        region=REGION,
        cache_dir=tmp_path / "tier",
    )


def test_object_is_read_with_the_settings_of_the_corpus(
    local_s3: LocalS3, s3_bucket: str, s3_settings: Settings
) -> None:
    large = bytes(range(256)) * (9 * 2**20 // 256)
    client = local_s3.client()
    bodies = {"deep/a b%20#c.png": b"body", "large.png": large, "a.pdf": make_pdf(2)}
    for key, body in bodies.items():
        client.put_object(Bucket=s3_bucket, Key=key, Body=body)
    reader = Reader(ReadOptions(settings=s3_settings))
    try:
        assert reader.read(f"s3://{s3_bucket}/deep/a b%20#c.png") == b"body"
        assert reader.read(f"s3://{s3_bucket}/large.png") == large
        assert reader.count_pages(f"s3://{s3_bucket}/a.pdf") == 2
        assert reader.read(f"s3://{s3_bucket}/a.pdf#page=2", 2) == render_page(bodies["a.pdf"], 2)
        assert reason_of(reader, f"s3://{s3_bucket}/absent.png") == "no such object"
        assert reason_of(reader, f"s3://{s3_bucket}/") == "write it as s3://BUCKET/KEY"
        assert reason_of(reader, f"s3://{s3_bucket}/a//b.png")
        assert "no-such-bucket" in reason_of(reader, "s3://no-such-bucket/a.png")
        assert "a bucket name has 3 or more" in reason_of(reader, "s3://x/a.png")
    finally:
        reader.close()


def test_object_that_is_too_large_is_refused(
    local_s3: LocalS3, s3_bucket: str, s3_settings: Settings
) -> None:
    local_s3.client().put_object(Bucket=s3_bucket, Key="a.png", Body=b"x" * (MOST + 1))
    reader = Reader(ReadOptions(max_bytes=MOST, settings=s3_settings))
    assert reason_of(reader, f"s3://{s3_bucket}/a.png") == (
        f"it is larger than {MOST} bytes (max_bytes)"
    )
    reader.close()


def test_process_has_one_reader_for_each_set_of_options(s3_settings: Settings) -> None:
    options = ReadOptions(settings=s3_settings)
    same = ReadOptions(settings=s3_settings.model_copy())
    assert reader_for(options) is reader_for(same)
    assert reader_for(options) is not reader_for(ReadOptions())
    before = reader_for(options)
    reader_for.cache_clear()
    assert reader_for(options) is not before
