# SPDX-License-Identifier: Apache-2.0
"""Reads the bytes behind a URI, for a job with a million of them: bounded, with plain reasons.

It reads local files, http and https, objects of S3, and pages of PDF files. No file is decoded,
since the encoder does that. Only pages of a PDF are rendered here.
"""

from __future__ import annotations

import functools
import importlib
import io
import math
import os
import re
import stat
import threading
import time
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urljoin, urlsplit

from s3ec.errors import ConfigError, CorruptEntryError, S3ECError, SourceError

if TYPE_CHECKING:
    from s3ec.corpus.bucket import OpenBucket
    from s3ec.settings import Settings

MAX_BYTES = 256 * 2**20
TIMEOUT_S = 60.0
DPI = 150
_DPI_RANGE = range(18, 1201)

# A page of a PDF has its own size; this many pixels take 0.4 GB while it is rendered.
_MAX_PAGE_PIXELS = 100_000_000
_REDIRECTS = 5
_CONNECT_S = 10.0
_TRIES = 3
_BUSY = (429, 500, 502, 503, 504)
_PIECE_BYTES = 2**16
_KEPT_PDFS = 2  # from elsewhere, in memory

_PAGE_OF = re.compile(r"#page=[0-9]+$")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
# User name and password, and a host with its port, up to the path.
_HOST = re.compile(
    r"(?P<user>(?:[^/?#\\]*@)?)(?:\[[^/?#\]]*\]|[^/?#:\[\]]*)(?::[0-9]*)?(?=[/?#]|$)"
)
_REMOVED = "?..."

# PDFium is not thread-safe, not even for two documents.
_pdfium = threading.Lock()


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """How items are read. Hashable, and small enough to travel with each item.

    Attributes:
        dpi: Dots per inch of a PDF's pages.
        max_bytes: Of one item, and of a PDF file. A larger one is refused.
        timeout_s: For one item over http, response and body together; and to render one page of a
            PDF file.
        settings: Of the corpus whose credentials and endpoint are used for ``s3://``; None to read
            no objects.
        asks_http: True to read ``http`` and ``https`` addresses.

    Raises:
        ConfigError: A number is out of its range.
    """

    dpi: int = DPI
    max_bytes: int = MAX_BYTES
    timeout_s: float = TIMEOUT_S
    settings: Settings | None = None
    asks_http: bool = True

    def __post_init__(self) -> None:
        if self.dpi not in _DPI_RANGE:
            raise ConfigError(
                f"`dpi` is from {_DPI_RANGE[0]} to {_DPI_RANGE[-1]}, not {self.dpi}", field="dpi"
            )
        if self.max_bytes < 1:
            raise ConfigError("`max_bytes` is 1 or more", field="max_bytes")
        if not self.timeout_s > 0:
            raise ConfigError("`timeout_s` is more than 0", field="timeout_s")


def require(module: str, package: str, why: str) -> Any:
    """Import a module that only some sources need.

    Args:
        package: The package for pip.
        why: What the module is needed for.

    Raises:
        ConfigError: It is not installed; the message names the fix.
    """
    try:
        return importlib.import_module(module)
    except ImportError as exc:
        raise ConfigError(f"{why} needs {module} ({exc}); pip install {package}") from exc


def scheme_of(uri: str) -> str:
    """The scheme in lower case; empty for a path."""
    found = _SCHEME.match(uri)
    return found[1].lower() if found else ""


def without_secrets(uri: str) -> str:
    """Remove the secrets of a URI, for readers of the catalogue or a report.

    User name and password are removed, and, except for files and objects, query and fragment: any
    of them may be a signature. ``?...`` replaces a query, so that the result is not the address of
    something else.
    """
    scheme = scheme_of(uri)
    if not scheme:
        return uri
    front, rest = uri[: len(scheme) + 3], uri[len(scheme) + 3 :]
    page = _PAGE_OF.search(rest)
    rest = rest if page is None else rest[: page.start()]
    host = _HOST.match(rest)
    # A password may have an unescaped character, such as a slash: then no host matches.
    rest = rest.rpartition("@")[2] if host is None else rest[host.end("user") :]
    if scheme not in ("file", "s3"):
        rest, mark, _ = rest.partition("?")
        rest = rest.partition("#")[0] + (_REMOVED if mark else "")
    return front + rest + ("" if page is None else page[0])


def suffix_of(uri: str) -> str:
    """The suffix of the file that a URI or path names, in lower case.

    Raises:
        ValueError: It is not a URL; the message may contain its secrets.
    """
    uri = _PAGE_OF.sub("", uri)
    path = urlsplit(uri).path if scheme_of(uri) in ("http", "https", "file") else uri
    return PurePosixPath(path).suffix.lower()


def path_of(uri: str) -> Path:
    """The path that a ``file`` URL names.

    Raises:
        SourceError: It names another machine.
    """
    parts = urlsplit(uri)
    if parts.netloc not in ("", "localhost"):
        raise SourceError("a `file` URL has three slashes, file:///FOLDER/FILE")
    return Path(unquote(parts.path))


def page_uri(uri: str, page: int) -> str:
    """The URI of one page of a PDF file."""
    return f"{uri}#page={page}"


class Reader:
    """Reads items. Thread-safe; connections are opened with the first item that needs them.

    A process has one reader for each set of options: see ``reader_for``.
    """

    def __init__(self, options: ReadOptions) -> None:
        """Open nothing yet."""
        import urllib3

        self._options = options
        self._lock = threading.Lock()
        self._http = urllib3.PoolManager(maxsize=16)
        self._buckets: dict[str, OpenBucket] = {}
        # Cached, since their pages are read one by one.
        self._distant_pdf = functools.lru_cache(_KEPT_PDFS)(self._whole)

    def close(self) -> None:
        """Close the connections."""
        for bucket in self._buckets.values():
            bucket.close()
        self._http.clear()

    def read(self, uri: str, page: int | None = None) -> bytes:
        """Read the bytes of an item for the encoder.

        Args:
            uri: ``file``, ``http``, ``https`` or ``s3``.
            page: Of a PDF file, from 1. Ignored for other files.

        Raises:
            SourceError: It cannot be read, or it is too large.
        """
        if suffix_of(uri) == ".pdf":
            if page is None:
                raise SourceError("its pages could not be counted; run this again")
            dpi, timeout_s = self._options.dpi, self._options.timeout_s
            pdf = self._pdf(_PAGE_OF.sub("", uri))
            body = render_page(pdf, page, dpi=dpi, timeout_s=timeout_s)
        else:
            body = self._whole(uri)
        if len(body) > self._options.max_bytes:  # possible for a rendered page
            raise _too_large(self._options.max_bytes)
        if not body:
            raise SourceError("it is empty")
        return body

    def count_pages(self, uri: str) -> int:
        """Count the pages of a PDF file; a remote one is downloaded for it.

        Raises:
            SourceError: It cannot be read.
            ConfigError: pypdfium2 is not installed.
        """
        pdf = self._pdf(uri)
        with _pdfium, _open_pdf(pdf) as document:
            return len(document)

    def _pdf(self, uri: str) -> Path | bytes:
        """The path of a local PDF file, which is cheap to open; the bytes of a remote one."""
        if scheme_of(uri) == "file":
            path = path_of(uri)
            with _open_regular(path, self._options.max_bytes):
                return path
        return self._distant_pdf(uri)

    def _whole(self, uri: str) -> bytes:
        match scheme_of(uri):
            case "file":
                return read_file(path_of(uri), max_bytes=self._options.max_bytes)
            case "http" | "https":
                return self._download(uri)
            case "s3":
                return self._object(uri)
            case scheme:
                raise SourceError(
                    f"{scheme}:// is not read here; write a path, or a file, http, https or s3 URL"
                )

    # -- http ----------------------------------------------------------------------------------

    def _download(self, url: str) -> bytes:
        """Download a URL; follow a few redirects, never from https to http.

        No error repeats the URL, which may contain a signature.
        """
        import urllib3

        if not self._options.asks_http:
            raise SourceError("addresses are not read here")
        end_s = time.monotonic() + self._options.timeout_s
        try:
            for _ in range(_REDIRECTS + 1):
                parts = urlsplit(url)
                if parts.username or parts.password:
                    raise SourceError("no user name and password in the URL")
                response = self._request(url, end_s)
                try:
                    target = response.headers.get("location")
                    if not (300 <= response.status < 400 and target):
                        return self._body(response, end_s)
                finally:
                    response.close()
                url = urljoin(url, target)
                if scheme_of(url) not in ("http", "https"):
                    raise SourceError("redirected to what is no http or https URL")
                if parts.scheme == "https" and scheme_of(url) == "http":
                    raise SourceError("redirected from https to http")
        except (urllib3.exceptions.HTTPError, OSError, ValueError) as exc:
            raise SourceError(_http_reason(exc)) from exc
        raise SourceError(f"redirected more than {_REDIRECTS} times")

    def _request(self, url: str, end_s: float) -> Any:
        import urllib3

        left_s = self._left_s(end_s)
        return self._http.request(
            "GET",
            url,
            # A compressed body would have to be decoded, and limited twice.
            headers={"Accept-Encoding": "identity", "User-Agent": "s3ec"},
            redirect=False,
            preload_content=False,
            timeout=urllib3.Timeout(connect=min(_CONNECT_S, left_s), read=left_s),
            retries=urllib3.Retry(
                _TRIES - 1,
                redirect=False,
                status_forcelist=_BUSY,
                backoff_factor=0.2,
                raise_on_status=False,
                # A server may ask to wait for an hour.
                respect_retry_after_header=False,
            ),
        )

    def _body(self, response: Any, end_s: float) -> bytes:
        if response.status != 200:
            raise SourceError(f"the server answered with HTTP status {response.status}")
        if response.headers.get("content-encoding", "identity") != "identity":
            raise SourceError("the server compressed it though it was asked not to")
        most = self._options.max_bytes
        # urllib3 before 2.2 has no read1; there a server may send a trickle of bytes.
        read_some = getattr(response, "read1", response.read)
        body = bytearray()
        while piece := read_some(_PIECE_BYTES):
            body += piece
            if len(body) > most:
                raise _too_large(most)
            self._left_s(end_s)
        return bytes(body)

    def _left_s(self, end_s: float) -> float:
        left_s = end_s - time.monotonic()
        if left_s <= 0:
            raise SourceError(f"it took longer than {self._options.timeout_s:g} s")
        return left_s

    # -- S3 ------------------------------------------------------------------------------------

    def _object(self, uri: str) -> bytes:
        bucket, _, key = _PAGE_OF.sub("", uri)[len("s3://") :].partition("/")
        if not bucket or not key:
            raise SourceError("write it as s3://BUCKET/KEY")
        if "@" in bucket:
            raise SourceError("no user name and password in the URL")
        most = self._options.max_bytes

        try:
            body = self._bucket(bucket).run(lambda store: store.get(key, max_bytes=most))
        except CorruptEntryError as exc:
            raise (_too_large(most) if exc.reason == "size" else SourceError(str(exc))) from exc
        except (S3ECError, ValueError) as exc:
            raise SourceError(str(exc)) from exc
        if body is None:
            raise SourceError("no such object")
        return bytes(body)

    def _bucket(self, name: str) -> OpenBucket:
        from s3ec.corpus.bucket import OpenBucket

        with self._lock:
            if name not in self._buckets:
                self._buckets[name] = OpenBucket(self._settings_of(name))
            return self._buckets[name]

    def _settings_of(self, bucket: str) -> Settings:
        settings = self._options.settings
        if settings is None:
            raise SourceError(
                "an object is read with the credentials and the endpoint of a corpus, and none is "
                "open; give its settings (ReadOptions), or for a client its catalogue, or `fetch`"
            )
        values = settings.model_dump() | {"url": None, "bucket": bucket, "prefix": ""}
        return type(settings).model_validate(values)


@functools.cache
def reader_for(options: ReadOptions) -> Reader:
    """This process's reader for these options."""
    return Reader(options)


# -- local files -------------------------------------------------------------------------------


def read_file(path: Path, *, max_bytes: int) -> bytes:
    """Read a local file.

    Raises:
        SourceError: It is absent, not a file, not readable, or larger.
    """
    with _open_regular(path, max_bytes) as file:
        try:
            body = file.read(max_bytes + 1)
        except OSError as exc:
            raise SourceError(_os_reason(exc)) from exc
    if len(body) > max_bytes:  # it has grown since the check
        raise _too_large(max_bytes)
    return body


def _open_regular(path: Path, max_bytes: int) -> io.BufferedReader:
    """Open a regular file; refuse anything that could block its reader."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as exc:
        raise SourceError(_os_reason(exc)) from exc
    file = open(fd, "rb")  # noqa: SIM115  the caller closes it
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise SourceError("it is no file")
        if status.st_size > max_bytes:
            raise _too_large(max_bytes)
    except BaseException:
        file.close()
        raise
    return file


def _os_reason(exc: OSError | ValueError) -> str:
    if isinstance(exc, FileNotFoundError):
        return "no such file"
    if isinstance(exc, OSError) and exc.strerror:
        return exc.strerror[0].lower() + exc.strerror[1:]
    return str(exc)


def _http_reason(exc: Exception) -> str:
    """Describe an error without the URL, which urllib3 repeats."""
    reason = getattr(exc, "reason", None)
    cause = reason if isinstance(reason, Exception) else exc
    return f"the server cannot be read from: {type(cause).__name__}"


def _too_large(max_bytes: int) -> SourceError:
    return SourceError(f"it is larger than {max_bytes} bytes (max_bytes)")


# -- PDF files ---------------------------------------------------------------------------------


def render_page(
    pdf: Path | bytes, page: int, *, dpi: int = DPI, timeout_s: float = TIMEOUT_S
) -> bytes:
    """Render one page of a PDF file as PNG, filled-in form fields included.

    The bytes are the same for the same file, page and dpi while the releases of pypdfium2 and
    Pillow are the same. Takes some 0.1 s at 150 dpi, one page at a time in a process.

    Args:
        pdf: The file, or its content.
        page: From 1.
        dpi: Dots per inch.
        timeout_s: For the rendering. PDFium checks the clock after each 100 objects of a page.

    Raises:
        SourceError: It cannot be opened, has no such page, or the page is too large to render, or
            takes too long.
        ConfigError: pypdfium2 is not installed.
    """
    pdfium = require("pypdfium2", "pypdfium2", "A PDF file")
    require("PIL.Image", "pillow", "A PDF file")
    with _pdfium, _open_pdf(pdf) as document:
        try:
            document.init_forms()  # before any access to pages
            if not 1 <= page <= len(document):
                raise SourceError(f"it has {len(document)} pages, and no page {page}")
            sheet = document[page - 1]
            scale = dpi / 72
            width, height = (round(points * scale) for points in sheet.get_size())
            if width * height > _MAX_PAGE_PIXELS:
                raise SourceError(
                    f"the page is {width} x {height} pixels at {dpi} dpi, and at most "
                    f"{_MAX_PAGE_PIXELS} are drawn; take a smaller dpi"
                )
            picture = _draw(pdfium, sheet, scale, timeout_s)
        except pdfium.PdfiumError as exc:
            raise SourceError(f"the page cannot be drawn: {exc}") from exc
    png = io.BytesIO()
    picture.save(png, "PNG")
    return png.getvalue()


def _draw(pdfium: Any, sheet: Any, scale: float, timeout_s: float) -> Any:
    """Render a page as a Pillow image, as pypdfium2's ``render`` does, but with a time limit."""
    raw = pdfium.raw
    width, height = (math.ceil(points * scale) for points in sheet.get_size())
    bitmap = pdfium.PdfBitmap.new_native(width, height, raw.FPDFBitmap_BGR)
    raw.FPDFBitmap_FillRect(bitmap, 0, 0, width, height, 0xFFFFFFFF)
    end_s = time.monotonic() + timeout_s
    pause = raw.IFSDK_PAUSE(version=1)
    pause.NeedToPauseNow = type(pause.NeedToPauseNow)(lambda _: time.monotonic() >= end_s)
    target = bitmap, sheet, 0, 0, width, height, 0, raw.FPDF_ANNOT
    status = raw.FPDF_RenderPageBitmap_Start(*target, pause)
    raw.FPDF_RenderPage_Close(sheet)
    if status == raw.FPDF_RENDER_TOBECONTINUED:
        raise SourceError(f"to draw the page takes longer than {timeout_s:g} s (timeout_s)")
    if status == raw.FPDF_RENDER_FAILED:
        raise SourceError("the page cannot be drawn")
    if sheet.formenv:
        raw.FPDF_FFLDraw(sheet.formenv, *target)
    return bitmap.to_pil()


def _open_pdf(pdf: Path | bytes) -> Any:
    """Open a PDF file; the caller uses it as a context, under the lock."""
    pdfium = require("pypdfium2", "pypdfium2", "A PDF file")
    try:
        return pdfium.PdfDocument(pdf)
    except (pdfium.PdfiumError, OSError) as exc:
        raise SourceError(f"it cannot be opened as a PDF: {exc}") from exc
