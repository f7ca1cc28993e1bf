# SPDX-License-Identifier: Apache-2.0
"""Sources of a job over many files: folders, lists and PDF files, one item at a time.

``open_source`` finds what a text names, and yields its items. Nothing is read ahead, and no list is
held in memory. An item that cannot be named or read is still yielded: its ``read`` raises why.
"""

from __future__ import annotations

import functools
import glob
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from s3ec.corpus.reading import (
    ReadOptions,
    page_uri,
    reader_for,
    require,
    scheme_of,
    suffix_of,
)
from s3ec.errors import ConfigError, SourceError

_FILMS = (".avi", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg", ".mpg", ".webm")
_SOUNDS = (".flac", ".m4a", ".mp3", ".oga", ".ogg", ".opus", ".wav")
MODALITIES = ("image", "video", "audio")
_KINDS = "give a folder, a glob such as 'pages/**/*.png', a .jsonl list, or a .pdf file"
_DOCUMENT_KEYS = ("document", "id")
_PLACE_KEYS = ("path", "url", "uri")
_LIST_NEEDS = "a list names `document` (or `id`), and one of `path`, `url` and `uri`"
# A longer line is not an item: a file without line ends would be read whole.
_MAX_LINE_BYTES = 2**20


@functools.cache
def suffixes() -> Mapping[str, str]:
    """The modality of a folder's files, by their suffix; ``.pdf`` is handled apart.

    Pictures are the files that Pillow opens, with its registered plugins.
    """
    pillow = require("PIL.Image", "pillow", "A job over files")
    known = pillow.registered_extensions()
    return {
        **{suffix: "image" for suffix, kind in known.items() if kind in pillow.OPEN},
        **dict.fromkeys(_FILMS, "video"),
        **dict.fromkeys(_SOUNDS, "audio"),
    }


@dataclass(frozen=True, slots=True)
class SourceItem:
    """One picture, page, sound or film of a source. Small, and can be sent to another process.

    Attributes:
        document: Its id; of a file below a folder, the path from there.
        page: From 1; None if it has none.
        uri: Its URL: ``file``, ``http``, ``https`` or ``s3``. That of a page of a PDF file ends
            with ``#page=3``.
        extra: Further values from the source; JSON.
        modality: ``image``, ``video`` or ``audio``.
        options: How it is read.
        problem: Why it cannot be read, if that is known already; else empty.
    """

    document: str
    page: int | None
    uri: str
    extra: Mapping[str, Any] = field(default_factory=dict)
    modality: str = "image"
    options: ReadOptions = field(default=ReadOptions(), repr=False, compare=False)
    problem: str = field(default="", compare=False)

    def read(self) -> bytes:
        """Read the file's bytes as they are; a PDF's page is rendered as PNG.

        Blocks, for at most ``options.timeout_s`` if it is downloaded over http or rendered.

        Raises:
            SourceError: It cannot be read.
            ConfigError: A package that it needs is not installed.
        """
        if self.problem:
            raise SourceError(self.problem)
        return reader_for(self.options).read(self.uri, self.page)


def open_source(text: str, options: ReadOptions | None = None) -> Iterator[SourceItem]:
    """Yield the items of a source lazily.

    =====================  ==============================================================
    text                   items
    =====================  ==============================================================
    a folder               files below it by suffix, in order; pages of its PDF files
    a glob, ``**`` too     the same of what it matches, in the file system's own order
    ``.jsonl``             a JSON object a line
    ``.pdf``, a picture    its pages; itself
    =====================  ==============================================================

    A row of a list has ``document`` or ``id``; one of ``path``, ``url`` and ``uri``; and optionally
    ``page`` and ``modality``. The rest is ``extra``. A path starts at the list's folder. A PDF file
    without ``page`` becomes an item for each of its pages.

    Files that are left out become items that cannot be read: one for each link to a folder, and one
    for each suffix of no picture, film, sound or PDF file.

    Args:
        text: The source.
        options: How items are read.

    Raises:
        ConfigError: The text names nothing, or an unusable list; or a package is not installed. The
            message names the fix.
    """
    options = options or ReadOptions()
    if scheme_of(text) == "file":
        raise ConfigError(f"SOURCE is a path, not a URL: {_KINDS}", field="source")
    if scheme_of(text):
        raise ConfigError(
            "SOURCE is on this machine; write URLs and s3:// objects into a .jsonl list",
            field="source",
        )
    path = Path(text).absolute()
    if path.is_dir():
        return _items_of_files(_walk(path), path, options)
    if path.is_file():
        return _items_of_file(path, options)
    if glob.has_magic(text):
        return _glob_items(text, options)
    raise ConfigError(f"no such file or folder: {text}; {_KINDS}", field="source")


def _items_of_file(path: Path, options: ReadOptions) -> Iterator[SourceItem]:
    suffix = path.suffix.lower()
    if suffix == ".jsonl":
        _check_list(path)
        return _list_items(path, options)
    if suffix == ".pdf" or suffix in suffixes():
        return _items_of_files([path], path.parent, options)
    raise ConfigError(f"{path.name} is of no kind that can be read; {_KINDS}", field="source")


# -- files -------------------------------------------------------------------------------------


def _walk(folder: Path) -> Iterator[Path | tuple[Path, str]]:
    """Yield files below a folder in order, and, with a reason, folders that are not entered."""
    try:
        with os.scandir(folder) as found:
            entries = sorted(found, key=lambda entry: entry.name)
    except OSError as exc:
        yield folder, f"the folder cannot be read: {exc.strerror}"
        return
    for entry in entries:
        path = folder / entry.name
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(path)
        elif entry.is_symlink() and path.is_dir():
            fix = "name the folder as a SOURCE, or give a glob, which follows links"
            yield path, f"links to folders are not followed; {fix}"
        else:
            yield path


def _glob_items(pattern: str, options: ReadOptions) -> Iterator[SourceItem]:
    """Yield the items of a glob; documents are named from its last folder without a wildcard."""
    root = Path(pattern).absolute()
    while glob.has_magic(str(root)):
        root = root.parent
    if not root.is_dir():
        raise ConfigError(f"no such folder: {root}; {_KINDS}", field="source")
    matches = glob.iglob(str(Path(pattern).absolute()), recursive=True, include_hidden=True)
    files = (path for path in map(Path, matches) if not path.is_dir())
    return _items_of_files(files, root, options)


def _items_of_files(
    found: Iterable[Path | tuple[Path, str]], root: Path, options: ReadOptions
) -> Iterator[SourceItem]:
    known = suffixes()
    left_out: dict[str, tuple[Path, int]] = {}  # by suffix: the first file, and how many there are
    for each in found:
        path, problem = each if isinstance(each, tuple) else (each, "")
        suffix = path.suffix.lower()
        if problem or suffix == ".pdf" or suffix in known:
            yield from _pages_of(_item_of_path(path, root, options, problem))
        else:
            first, count = left_out.get(suffix, (path, 0))
            left_out[suffix] = first, count + 1
    for suffix, (path, count) in left_out.items():
        what = f"end with {suffix}" if suffix else "have no suffix"
        problem = (
            f"left out: {count} of the files {what}, and none is taken for a picture, film, sound "
            "or PDF file; a glob such as 'pages/**/*.png' names only what is wanted"
        )
        yield _item_of_path(path, root, options, problem)


def _item_of_path(path: Path, root: Path, options: ReadOptions, problem: str) -> SourceItem:
    name = str(path.relative_to(root))
    document = os.fsencode(name).decode("utf-8", "replace")
    if document != name:
        problem = problem or "its name is not UTF-8; give it another one"
    return SourceItem(
        document=document,
        page=None,
        uri=path.as_uri(),
        modality=suffixes().get(path.suffix.lower(), "image"),
        options=options,
        problem=problem,
    )


def _pages_of(item: SourceItem) -> Iterator[SourceItem]:
    """Yield a PDF file's pages; any other item as it is.

    A file whose pages cannot be counted is one item that cannot be read.
    """
    if item.problem or suffix_of(item.uri) != ".pdf":
        yield item
        return
    if item.page is not None:
        yield replace(item, page=item.page, uri=page_uri(item.uri, item.page))
        return
    try:
        count = reader_for(item.options).count_pages(item.uri)
    except SourceError as exc:
        yield replace(item, problem=exc.reason)
        return
    for page in range(1, count + 1):
        yield replace(item, page=page, uri=page_uri(item.uri, page))


# -- lists -------------------------------------------------------------------------------------


def _list_items(path: Path, options: ReadOptions) -> Iterator[SourceItem]:
    for number, line in _lines(path):
        try:
            item = _item_of_line(line, path.parent, options)
        except ValueError as exc:
            yield SourceItem(
                document=f"{path.name}:{number}",
                page=None,
                uri=f"{path.as_uri()}#line={number}",
                options=options,
                problem=f"line {number}: {exc}",
            )
            continue
        yield from _pages_of(item)


def _check_list(path: Path) -> None:
    """Refuse a list whose first row is invalid, since the others will be, too.

    Raises:
        ConfigError: The message names the line and the fix.
    """
    try:
        number, line = next(_lines(path), (0, b""))
        if line:
            _item_of_line(line, path.parent, ReadOptions())
    except OSError as exc:
        raise ConfigError(f"{path} cannot be read: {exc.strerror}", field="source") from exc
    except ValueError as exc:
        raise ConfigError(f"{path.name}, line {number}: {exc}", field="source") from exc


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield lines that are not empty, with their number; of a too long one its beginning."""
    with path.open("rb") as file:
        number = 0
        while line := file.readline(_MAX_LINE_BYTES + 1):
            number += 1
            if line.strip():
                yield number, line
            while len(line) > _MAX_LINE_BYTES and not line.endswith(b"\n"):
                line = file.readline(_MAX_LINE_BYTES + 1)


def _item_of_line(line: bytes, folder: Path, options: ReadOptions) -> SourceItem:
    """Make an item of a row.

    Raises:
        ValueError: The row is invalid. The message says what to fix.
    """
    if len(line) > _MAX_LINE_BYTES:
        raise ValueError(f"it is longer than {_MAX_LINE_BYTES} bytes")
    try:
        # pandas writes a gap as NaN, which is not JSON. 1e999 would be read as infinity.
        rest = json.loads(line, parse_constant=lambda _: None, parse_float=_finite)
    except (ValueError, RecursionError) as exc:
        raise ValueError(f"it is no JSON ({exc})") from exc
    if not isinstance(rest, dict):
        raise ValueError("it is no JSON object")
    document = _document(rest)
    uri = _place(rest, folder)
    try:
        suffix = suffix_of(uri)
    except ValueError:  # its message repeats a part of the URL
        raise ValueError("its place is no URL") from None
    page = _page(rest.pop("page", None))
    modality = rest.pop("modality", None) or suffixes().get(suffix, "image")
    if modality not in MODALITIES:
        raise ValueError(f"`modality` is one of {', '.join(MODALITIES)}")
    extra = {key: value for key, value in rest.items() if value is not None}
    return SourceItem(document, page, uri, extra, modality, options)


def _finite(digits: str) -> float | None:
    value = float(digits)
    return value if math.isfinite(value) else None


def _document(rest: dict[str, Any]) -> str:
    for key in _DOCUMENT_KEYS:
        value = rest.pop(key, None)
        if value is None:
            continue
        if not isinstance(value, str | int) or isinstance(value, bool) or value == "":
            raise ValueError(f"`{key}` is a text or a whole number")
        return str(value)
    raise ValueError(f"no `document`: {_LIST_NEEDS}")


def _place(rest: dict[str, Any], folder: Path) -> str:
    given = [(key, rest.pop(key)) for key in _PLACE_KEYS if rest.get(key) is not None]
    for key in _PLACE_KEYS:
        rest.pop(key, None)
    if len(given) != 1:
        raise ValueError(f"{len(given) or 'none'} of `path`, `url` and `uri`: {_LIST_NEEDS}")
    key, value = given[0]
    if not isinstance(value, str) or not value or not value.isprintable():
        raise ValueError(f"`{key}` is a path or a URL")
    if value != value.strip():  # a URL would be taken for a path, and printed with its secrets
        raise ValueError(f"`{key}` begins or ends with a space")
    if scheme_of(value):
        return value
    return (folder / value).absolute().as_uri()


def _page(value: Any) -> int | None:
    """Parse a page's number; pandas writes whole numbers as floats if a column has gaps."""
    if value is None:
        return None
    whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    if not whole or isinstance(value, bool) or value < 1:
        raise ValueError("`page` is a whole number from 1")
    return int(value)
