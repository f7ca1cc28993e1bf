# SPDX-License-Identifier: Apache-2.0
"""Folders, lists and PDF files become items, lazily; what is wrong is said plainly."""

from __future__ import annotations

import json
import os
import pickle
import re
import sys
import tracemalloc
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from s3ec.corpus.reading import ReadOptions, reader_for
from s3ec.corpus.sources import SourceItem, open_source, suffixes
from s3ec.errors import ConfigError, SourceError
from tests.support.pdfs import make_pdf


@pytest.fixture(autouse=True)
def _readers_are_closed() -> Iterator[None]:
    yield
    reader_for.cache_clear()


def write(path: Path, body: bytes = b"anything") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(body)
    return path


def write_lines(path: Path, *rows: Any) -> Path:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    return write(path, "".join(f"{line}\n" for line in lines).encode())


def names(items: Iterator[SourceItem]) -> list[tuple[str, int | None]]:
    return [(item.document, item.page) for item in items]


def reason_of(item: SourceItem) -> str:
    with pytest.raises(SourceError) as caught:
        item.read()
    assert caught.value.reason == str(caught.value)
    return caught.value.reason


# -- folders -----------------------------------------------------------------------------------


def test_folder_gives_its_files_by_suffix_in_order(tmp_path: Path) -> None:
    write(tmp_path / "b" / "two.JPG", b"second")
    write(tmp_path / "a.png", b"first")
    write(tmp_path / "clip.mp4")
    write(tmp_path / "b" / "sound.wav")
    found = list(open_source(str(tmp_path)))
    assert [(item.document, item.modality) for item in found] == [
        ("a.png", "image"),
        ("b/sound.wav", "audio"),
        ("b/two.JPG", "image"),
        ("clip.mp4", "video"),
    ]
    assert [item.read() for item in found][::2] == [b"first", b"second"]
    assert found[0].uri == (tmp_path / "a.png").as_uri()


def test_whatever_pillow_opens_is_a_picture(tmp_path: Path) -> None:
    for suffix in ("avif", "jfif", "jpe", "ppm", "MPG"):
        write(tmp_path / f"a.{suffix}")
    found = {item.document: item.modality for item in open_source(str(tmp_path))}
    pictures = dict.fromkeys(("a.avif", "a.jfif", "a.jpe", "a.ppm"), "image")
    assert found == {**pictures, "a.MPG": "video"}


def test_what_is_left_out_is_an_item_that_cannot_be_read(tmp_path: Path) -> None:
    write(tmp_path / "pages" / "a.png")
    write(tmp_path / "pages" / "b" / "notes.TXT")
    write(tmp_path / "pages" / "more.txt")
    write(tmp_path / "pages" / "README")
    write(tmp_path / "elsewhere" / "c.png")
    (tmp_path / "pages" / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "pages" / "loop").symlink_to(tmp_path / "pages" / "loop")
    picture, link, bare, texts = open_source(str(tmp_path / "pages"))
    assert picture.document == "a.png"
    assert (link.document, reason_of(link)) == (
        "link",
        "links to folders are not followed; name the folder as a SOURCE, or give a glob, which "
        "follows links",
    )
    assert texts.document == "b/notes.TXT"
    assert reason_of(texts).startswith("left out: 2 of the files end with .txt, and none is taken")
    assert bare.document == "README"
    assert reason_of(bare).startswith("left out: 2 of the files have no suffix")
    found = open_source(f"{tmp_path}/pages/**/*.png")
    assert sorted(names(found)) == [("a.png", None), ("link/c.png", None)]


def test_pdf_inside_a_folder_is_its_pages(tmp_path: Path) -> None:
    write(tmp_path / "deep" / "report.pdf", make_pdf(2))
    write(tmp_path / "z.png")
    found = list(open_source(str(tmp_path)))
    assert [(item.document, item.page) for item in found] == [
        ("deep/report.pdf", 1),
        ("deep/report.pdf", 2),
        ("z.png", None),
    ]
    assert found[1].uri == (tmp_path / "deep" / "report.pdf").as_uri() + "#page=2"


def test_pdf_that_is_none_is_one_item_with_its_reason(tmp_path: Path) -> None:
    write(tmp_path / "a.pdf", b"no pdf")
    write(tmp_path / "b.png", b"picture")
    broken, picture = open_source(str(tmp_path))
    assert (broken.document, broken.page) == ("a.pdf", None)
    assert "cannot be opened as a PDF" in reason_of(broken)
    assert picture.read() == b"picture"


def test_file_with_a_hash_and_a_question_mark_in_its_name_is_read(tmp_path: Path) -> None:
    write(tmp_path / "a#page=2?b.png", b"body")
    (item,) = open_source(str(tmp_path))
    assert item.document == "a#page=2?b.png"
    assert item.read() == b"body"


def test_name_that_is_not_utf8_is_an_item_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"\xff.png")).write_bytes(b"body")
    (item,) = open_source(str(tmp_path))
    item.document.encode()
    assert reason_of(item) == "its name is not UTF-8; give it another one"


def test_link_to_nothing_and_a_pipe_are_items_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "gone.png").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe.png")
    gone, pipe = open_source(str(tmp_path))
    assert reason_of(gone) == "no such file"
    assert reason_of(pipe) == "it is no file"


def test_empty_file_and_a_larger_one_than_allowed_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.png", b"")
    write(tmp_path / "b.png", b"12345")
    empty, large = open_source(str(tmp_path), ReadOptions(max_bytes=4))
    assert reason_of(empty) == "it is empty"
    assert reason_of(large) == "it is larger than 4 bytes (max_bytes)"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("nowhere", "no such file or folder: nowhere; give a folder"),
        ("nowhere/**/*.png", "no such folder"),
        ("s3://bucket/pages", "write URLs and s3:// objects into a .jsonl list"),
        ("file:///pages", "SOURCE is a path, not a URL"),
    ],
)
def test_source_that_is_none_is_refused_at_once(
    text: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=re.escape(says)) as caught:
        open_source(text)
    assert caught.value.field == "source"


def test_file_of_another_kind_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"list\.csv is of no kind that can be read"):
        open_source(str(write(tmp_path / "list.csv")))


def test_one_picture_is_a_source_too(tmp_path: Path) -> None:
    (item,) = open_source(str(write(tmp_path / "a.png", b"body")))
    assert (item.document, item.read()) == ("a.png", b"body")


# -- lists -------------------------------------------------------------------------------------


def test_jsonl_row_keeps_what_it_says_beside_its_place(tmp_path: Path) -> None:
    write(tmp_path / "data" / "a.png", b"body")
    rows = [
        {"document": "doc-1", "path": "data/a.png", "page": 3, "lang": "de", "id": 7, "none": None},
        {"id": 12, "uri": (tmp_path / "data" / "a.png").as_uri(), "modality": "audio"},
        {"id": "c", "url": "http://localhost/x.webm?size=2", "path": None},
    ]
    first, second, third = open_source(str(write_lines(tmp_path / "list.jsonl", *rows)))
    assert (first.document, first.page, first.extra) == ("doc-1", 3, {"lang": "de", "id": 7})
    assert (second.document, second.page, second.modality) == ("12", None, "audio")
    assert (third.uri, third.modality) == ("http://localhost/x.webm?size=2", "video")
    assert first.read() == second.read() == b"body"


def test_pdf_in_a_list_is_all_its_pages_or_the_one_that_is_named(tmp_path: Path) -> None:
    write(tmp_path / "a.pdf", make_pdf(3))
    rows = [
        {"id": "all", "path": "a.pdf", "year": 2026},
        {"id": "one", "path": "a.pdf", "page": 2},
        {"id": "beyond", "path": "a.pdf", "page": 4},
    ]
    found = list(open_source(str(write_lines(tmp_path / "list.jsonl", *rows))))
    assert names(iter(found)) == [("all", 1), ("all", 2), ("all", 3), ("one", 2), ("beyond", 4)]
    assert [item.extra for item in found[:3]] == [{"year": 2026}] * 3
    assert found[1].uri == found[3].uri
    assert found[1].read() == found[3].read() != found[0].read()
    assert reason_of(found[4]) == "it has 3 pages, and no page 4"


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ("no json", "line 3: it is no JSON (Expecting value"),
        ("[1]", "line 3: it is no JSON object"),
        ({"path": "a.png"}, "line 3: no `document`: a list names"),
        ({"id": 1.5, "path": "a.png"}, "line 3: `id` is a text or a whole number"),
        ({"id": "a"}, "line 3: none of `path`, `url` and `uri`"),
        ({"id": "a", "path": "a", "url": "b"}, "line 3: 2 of `path`, `url` and `uri`"),
        ({"id": "a", "path": 7}, "line 3: `path` is a path or a URL"),
        ({"id": "a", "path": "a.png", "page": 0}, "line 3: `page` is a whole number from 1"),
        ({"id": "a", "path": "a.png", "modality": "smell"}, "`modality` is one of image, video"),
        ("x" * (2**20 + 1), "line 3: it is longer than 1048576 bytes"),
    ],
)
def test_bad_line_is_an_item_with_its_number_and_the_next_one_is_read(
    row: Any, says: str, tmp_path: Path
) -> None:
    good = {"id": "good", "path": "a.png"}
    path = write_lines(tmp_path / "list.jsonl", good, "", row, good)
    _, bad, after = open_source(str(path))
    assert bad.document == "list.jsonl:3"
    assert bad.uri == f"{path.as_uri()}#line=3"
    assert says in reason_of(bad)
    assert after.document == "good"


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ("id,path", "list.jsonl, line 1: it is no JSON"),
        ({"name": "a", "file": "b"}, "list.jsonl, line 1: no `document`: a list names `document`"),
    ],
)
def test_list_whose_first_line_is_bad_is_refused_at_once(
    row: Any, says: str, tmp_path: Path
) -> None:
    path = write_lines(tmp_path / "list.jsonl", row)
    with pytest.raises(ConfigError, match=re.escape(says)):
        open_source(str(path))


def test_empty_list_has_no_items(tmp_path: Path) -> None:
    assert list(open_source(str(write(tmp_path / "list.jsonl", b"\n")))) == []


def test_scheme_of_another_kind_is_an_item_that_cannot_be_read(tmp_path: Path) -> None:
    rows = [{"id": "a", "uri": "ftp://host/a.png"}, {"id": "b", "uri": "file://host/a.png"}]
    ftp, elsewhere = open_source(str(write_lines(tmp_path / "list.jsonl", *rows)))
    assert reason_of(ftp).startswith("ftp:// is not read here; write a path")
    assert reason_of(elsewhere) == "a `file` URL has three slashes, file:///FOLDER/FILE"


@pytest.mark.slow
def test_long_list_is_not_held_in_memory(tmp_path: Path) -> None:
    """Nor is what was read of it kept."""
    line = json.dumps({"id": "a", "path": "a.png", "text": "x" * 1000}).encode() + b"\n"
    path = write(tmp_path / "list.jsonl", line * 20_000)
    tracemalloc.start()
    try:
        count = sum(1 for _ in open_source(str(path)))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert count == 20_000
    assert peak < path.stat().st_size / 10


def test_gaps_and_floats_of_pandas_are_understood(tmp_path: Path) -> None:
    rows = [
        '{"id": "a", "path": "a.pdf", "page": 4.0, "score": NaN, "deep": [NaN, 1, 1e999]}',
        '{"id": "b", "path": "b.mp3", "page": NaN, "score": -1e999}',
    ]
    first, second = open_source(str(write_lines(tmp_path / "list.jsonl", *rows)))
    assert (first.document, first.page, first.extra) == ("a", 4, {"deep": [None, 1, None]})
    assert (second.page, second.modality, second.extra) == (None, "audio", {})


@pytest.mark.parametrize(
    ("module", "name", "fix"),
    [
        ("PIL.Image", "a.png", "pip install pillow"),
        ("pypdfium2", "a.pdf", "pip install pypdfium2"),
    ],
)
def test_package_that_is_missing_is_named_with_the_fix(
    module: str, name: str, fix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "a.png")
    write(tmp_path / "a.pdf", make_pdf(1))
    monkeypatch.setitem(sys.modules, module, None)
    suffixes.cache_clear()
    with pytest.raises(ConfigError, match=re.escape(fix)):
        list(islice(open_source(str(tmp_path / name)), 1))


# -- on their way ------------------------------------------------------------------------------


def test_item_can_be_read_in_another_process(tmp_path: Path) -> None:
    write(tmp_path / "a.pdf", make_pdf(1))
    (item,) = open_source(str(tmp_path), ReadOptions(dpi=72))
    sent = pickle.dumps(item)
    assert len(sent) < 1000
    there = pickle.loads(sent)
    assert there == item
    assert there.read() == item.read()


@pytest.mark.parametrize(
    ("field", "value"), [("dpi", 17), ("dpi", 1201), ("max_bytes", 0), ("timeout_s", 0)]
)
def test_option_out_of_its_range_is_refused(field: str, value: int) -> None:
    with pytest.raises(ConfigError, match=f"`{field}` is") as caught:
        ReadOptions(**{field: value})
    assert caught.value.field == field
