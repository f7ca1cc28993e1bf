# SPDX-License-Identifier: Apache-2.0
"""URLs that the operator trusts, by the catalogue."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from s3ec.corpus.catalog_file import decode_part
from s3ec.errors import ConfigError, UnavailableError
from s3ec.identity import Layout
from s3ec.middleware.chat_pictures import Picture, UntouchedError
from s3ec.middleware.known_pictures import KnownPictures
from s3ec.middleware.trusted_urls import (
    VARIABLE,
    CatalogPictures,
    Row,
    TrustedUrls,
    are_trusted,
)
from s3ec.middleware.vllm_names import Decoded
from tests.support.catalogues import LATER, row
from tests.support.corpora import Filled
from tests.support.folders import in_folder, put_over
from tests.support.waiting import eventually
from tests.unit.middleware.test_known_pictures import GRID, Names, name_of

ONE, TWO = name_of(b"one"), name_of(b"two")


Make = Callable[..., TrustedUrls]


@pytest.fixture
def make() -> Iterator[Make]:
    made = []

    def make_one(read: Callable[[], Iterable[Row]], **more: Any) -> TrustedUrls:
        made.append(TrustedUrls(read, **more))
        return made[-1]

    yield make_one
    for one in made:
        one.close()


def reading(*rows: Row) -> Callable[[], Sequence[Row]]:
    return lambda: rows


def test_a_url_of_the_catalogue_is_known_and_others_are_not(make: Make) -> None:
    urls = make(
        reading(
            Row("https://a/1.png", ONE, json.dumps(GRID)),
            Row("https://a/2.png", ONE, key=1),
            Row("https://a/2.png", TWO, key=2),
            Row("https://a/3.png", TWO, key=3),
            Row("https://a/3.png", TWO, key=4),
        )
    )
    eventually(lambda: urls("https://a/1.png") is not None)
    known = urls("https://a/1.png")
    assert known is not None
    assert (known.identifier, known.placeholder) == (ONE, GRID)
    assert urls("https://a/3.png") is not None
    for other in ("2.png", "1.png?"):
        assert urls(f"https://a/{other}") is None


@pytest.mark.parametrize("order", [1, -1])
def test_of_the_rows_of_a_document_the_newest_counts(make: Make, order: int) -> None:
    rows = [Row("https://a/1.png", ONE, part="A"), Row("https://a/1.png", TWO, part="B")]
    urls = make(reading(*rows[::order]))
    eventually(lambda: urls("https://a/1.png") is not None)
    known = urls("https://a/1.png")
    assert known is not None
    assert known.identifier == TWO


def test_memory_is_bounded_and_later_rows_still_count(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("s3ec.middleware.trusted_urls._MOST", 2)
    rows = [Row(f"https://a/{number}.png", ONE, key=number) for number in range(4)]
    urls = make(reading(*rows, Row("https://a/0.png", TWO, key=9)))
    eventually(lambda: urls("https://a/1.png") is not None)
    assert [urls(f"https://a/{number}.png") is None for number in range(4)] == [
        *(True, False),
        *(True, True),
    ]
    assert "knows 2 URLs of the catalogue only" in caplog.text


def test_a_long_placeholder_is_not_kept(make: Make) -> None:
    urls = make(reading(Row("https://a/1.png", ONE, json.dumps({"a": [1] * 300}))))
    eventually(lambda: urls("https://a/1.png") is not None)
    known = urls("https://a/1.png")
    assert known is not None
    assert known.placeholder is None


def test_only_domains_that_vllm_reads_from_count(make: Make) -> None:
    urls = make(reading(Row("https://a/1.png", ONE), Row("https://b/1.png", ONE)), domains=["a"])
    eventually(lambda: urls("https://a/1.png") is not None)
    assert urls("https://b/1.png") is None


def test_a_bucket_that_does_not_answer_is_read_again(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    answers: list[Any] = [UnavailableError("down"), [Row("https://a/1.png", ONE)]]

    def read() -> Iterable[Row]:
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, Exception):
            raise answer
        return list(answer)

    urls = make(read, refresh_s=0.0)
    eventually(lambda: urls("https://a/1.png") is not None)
    assert "trying again later: down" in caplog.text


def test_what_is_as_it_was_stays_known(make: Make) -> None:
    answers: list[list[Row] | None] = [[Row("https://a/1.png", ONE)], None, None]
    urls = make(lambda: answers.pop(0) if answers else None, refresh_s=0.0)
    eventually(lambda: not answers, "the catalogue is looked at again")
    assert urls("https://a/1.png") is not None


def test_a_catalogue_is_read_again_only_where_it_has_another_part(tmp_path: Path) -> None:
    with in_folder(tmp_path) as corpus:
        filled = Filled(corpus)
        catalog = corpus.catalog()
        look = CatalogPictures(corpus.settings, filled.name)

        def uris() -> list[str] | None:
            rows = look()
            return None if rows is None else sorted(one.uri for one in rows)

        catalog.append(
            [
                row("a", uri="https://a/1"),
                row("sound", uri="https://a/2", modality="audio"),
                row("file"),
                row("signed", uri="https://a/5?sig=secret"),
                row("named", uri="https://a/3", identifier=f"sha256:{ONE}"),
                row("adapter", uri="https://a/4", identifier=f"lora:{ONE}"),
            ]
        )
        assert uris() == ["https://a/1"]
        assert uris() is None
        catalog.append([row("b", uri="https://b/1")])
        begun = look()
        assert begun is not None
        with closing(begun):
            next(begun)  # broken off: the next look has to bring all of it
        assert uris() == ["https://a/1", "https://b/1"]
        assert uris() is None


def test_a_catalogue_is_read_part_by_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    decoded: list[str] = []

    def decode(blob: Any, namespace: str, *, ulid: str, name: str) -> Any:
        decoded.append(name)
        return decode_part(blob, namespace, ulid=ulid, name=name)

    monkeypatch.setattr("s3ec.corpus.catalog.decode_part", decode)
    with in_folder(tmp_path) as corpus:
        filled = Filled(corpus)
        for name in "abc":
            corpus.catalog().append([row(name, uri=f"https://a/{name}")])
        put_over(tmp_path, Layout(filled.name).catalog_part(LATER), b"junk")
        rows = CatalogPictures(corpus.settings, filled.name)()
        assert rows is not None
        with closing(rows):
            for count in (3, 4, 5):  # after the damaged one, which was read twice
                next(rows)
                assert len(decoded) == count
            assert list(rows) == []
        assert LATER in caplog.text


def test_a_trusted_picture_is_named_without_a_look_at_it() -> None:
    rows = {
        "https://a/1.png": Decoded(ONE, GRID),
        "https://a/2.png": Decoded(TWO, None),
    }
    known = KnownPictures(Names(), most_bytes=1, urls=rows.get)
    assert known.name(Picture("https://a/1.png", None)) == (ONE, None)
    assert known.name(Picture("https://a/1.png", "mine")) == ("mine", GRID)
    for picture in (Picture("https://a/3.png", None), Picture("https://a/2.png", "mine")):
        with pytest.raises(UntouchedError):
            known.name(picture)
    known.close()


@pytest.mark.parametrize(
    ("text", "trusted"), [(None, False), ("", False), ("never", False), ("trust", True)]
)
def test_the_environment_says_whether_urls_are_trusted(
    text: str | None, trusted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    if text is not None:
        monkeypatch.setenv(VARIABLE, text)
    assert are_trusted() is trusted


def test_another_word_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "yes")
    with pytest.raises(ConfigError, match=f"{VARIABLE} must be never or trust"):
        are_trusted()
