# SPDX-License-Identifier: Apache-2.0
"""URLs that the operator trusts, by the catalogue."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from s3ec.errors import ConfigError, UnavailableError
from s3ec.middleware.chat_pictures import Picture, UntouchedError
from s3ec.middleware.known_pictures import KnownPictures
from s3ec.middleware.trusted_urls import (
    VARIABLE,
    CatalogPictures,
    Row,
    TrustedUrls,
    are_trusted,
)
from tests.support.catalogues import row
from tests.support.corpora import Filled
from tests.support.folders import in_folder
from tests.support.waiting import eventually
from tests.unit.middleware.test_known_pictures import GRID, Names, name_of

ONE, TWO = name_of(b"one"), name_of(b"two")


@dataclass(frozen=True)
class FakeRow:
    uri: str
    identifier: str
    placeholder: Any = None


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
            FakeRow("https://a/1.png", ONE, GRID),
            FakeRow("https://a/named.png", f"sha256:{ONE}"),
            FakeRow("https://a/adapter.png", f"lora:{ONE}"),
            FakeRow("https://a/2.png", ONE),
            FakeRow("https://a/2.png", TWO),
            FakeRow("file:///a/1.png", ONE),
        )
    )
    eventually(lambda: urls("https://a/1.png") is not None)
    for other in ("named.png", "adapter.png", "2.png", "1.png?"):
        assert urls(f"https://a/{other}") is None
    assert urls("file:///a/1.png") is None


def test_only_domains_that_vllm_reads_from_count(make: Make) -> None:
    urls = make(
        reading(FakeRow("https://a/1.png", ONE), FakeRow("https://b/1.png", ONE)), domains=["a"]
    )
    eventually(lambda: urls("https://a/1.png") is not None)
    assert urls("https://b/1.png") is None


def test_a_bucket_that_does_not_answer_is_read_again(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    answers: list[Any] = [UnavailableError("down"), [FakeRow("https://a/1.png", ONE)]]

    def read() -> Iterable[Row]:
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, Exception):
            raise answer
        return list(answer)

    urls = make(read, refresh_s=0.0)
    eventually(lambda: urls("https://a/1.png") is not None)
    assert "trying again later: down" in caplog.text


def test_what_is_as_it_was_stays_known(make: Make) -> None:
    answers: list[list[Row] | None] = [[FakeRow("https://a/1.png", ONE)], None, None]
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

        catalog.append([row("a"), row("sound", modality="audio")])
        assert uris() == ["file:///corpus/a"]
        assert uris() is None
        catalog.append([row("b")])
        begun = look()
        assert begun is not None
        next(iter(begun))  # broken off: the next look has to bring all of it
        assert uris() == ["file:///corpus/a", "file:///corpus/b"]
        assert uris() is None


def test_a_trusted_picture_is_named_without_a_look_at_it() -> None:
    rows = {"https://a/1.png": FakeRow("https://a/1.png", ONE, GRID),
            "https://a/2.png": FakeRow("https://a/2.png", TWO)}  # fmt: skip
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
