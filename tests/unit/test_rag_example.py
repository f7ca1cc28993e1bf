# SPDX-License-Identifier: Apache-2.0
"""examples/rag/rag.py with a stand-in for the server. tests/e2e has a real one."""

from __future__ import annotations

import hashlib
import importlib.util
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from s3ec.corpus.catalog_index import CatalogIndex
from s3ec.corpus.reading import render_page
from s3ec.errors import UnavailableError
from tests.support.catalogues import row, to_table

EXAMPLE = Path(__file__).parents[2] / "examples" / "rag"
PUMPS = [["Pump service"], ["Pump 3 lost pressure"]]
GARDEN = [["Prune apple trees in February"], ["Roses need water"], ["Beans grow"], ["Tulips bloom"]]


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"rag_example_{name}", EXAMPLE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def rag() -> Any:
    return load("rag")


@pytest.fixture(scope="module")
def tiny() -> Any:
    return load("tiny")


class NoEmbeddingError(Exception):
    """What a server without the embedding answers."""

    status_code = 500


class StandIn:
    """A client of openai's form; its server has no embeddings if ``is_empty``."""

    def __init__(self, *, is_empty: bool = False) -> None:
        self.asked: list[list[dict[str, Any]]] = []
        self.is_empty = is_empty
        self.chat = SimpleNamespace(completions=self)

    def create(self, *, messages: Any, **_: Any) -> Any:
        content = messages[0]["content"]
        self.asked.append([part for part in content if part["type"] != "text"])
        if self.is_empty and any(part["type"] == "image_embeds" for part in content):
            raise NoEmbeddingError
        return SimpleNamespace(choices=[SimpleNamespace(message=SimpleNamespace(content="yes"))])


@pytest.fixture
def folder(tiny: Any, tmp_path: Path) -> Path:
    made: Path = tiny.write_pdfs(tmp_path, {"pumps.pdf": PUMPS, "home/garden.pdf": GARDEN})
    return made


@pytest.fixture
def catalog(folder: Path) -> CatalogIndex:
    """It lacks the garden."""
    rows = []
    for number in (1, 2):
        digest = hashlib.sha256(render_page(folder / "pumps.pdf", number)).hexdigest()
        rows.append(row("pumps.pdf", page=number, sha256=digest, identifier=f"name-{number}"))
    return CatalogIndex.from_table(to_table(rows))


class Down:
    """The catalogue of a bucket that is down."""

    def index(self) -> CatalogIndex:
        raise UnavailableError("down")


Ask = Callable[..., tuple[Any, StandIn, Any]]


@pytest.fixture
def ask(rag: Any, folder: Path, catalog: CatalogIndex) -> Iterator[Ask]:
    """Asks one question: the assistant, its client and the answer."""
    with ExitStack() as stack:

        def ask(question: str, client: StandIn, of: Any = catalog) -> tuple[Any, StandIn, Any]:
            assistant = rag.Assistant(folder, of, client, "model")
            stack.callback(assistant.pictures.close)
            return assistant, client, assistant.answer(question)

        yield ask


def test_pages_are_found_by_their_words_the_best_first(
    rag: Any, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "broken.pdf").write_bytes(b"no PDF")
    with caplog.at_level(logging.WARNING):
        index = rag.PageIndex(folder)
    assert "broken.pdf is left out" in caplog.text
    assert index.search("Which pump lost pressure?", 5) == [("pumps.pdf", 2), ("pumps.pdf", 1)]
    assert index.search("pruning an apple tree", 5) == [("home/garden.pdf", 1)]
    assert index.search('"; DROP TABLE pages --', 5) == []
    assert index.search("?!", 5) == []


def test_page_that_shares_only_a_common_word_is_left_out(
    rag: Any, tiny: Any, tmp_path: Path
) -> None:
    pages = [[f"the page {number}"] for number in range(9)]
    tiny.write_pdfs(tmp_path, {"a.pdf": [*pages, ["the canteen"]]})
    assert rag.PageIndex(tmp_path).search("the canteen", 5) == [("a.pdf", 10)]


def test_stored_pages_are_asked_about_by_name(ask: Ask) -> None:
    _, client, answer = ask("Which pump lost pressure?", StandIn())
    assert (answer.text, list(map(str, answer.pages))) == (
        "yes",
        ["pumps.pdf, page 2", "pumps.pdf, page 1"],
    )
    [parts] = client.asked
    assert [part["uuid"] for part in parts] == ["name-2", "name-1"]
    assert {part["type"] for part in parts} == {"image_embeds"}


def test_page_goes_as_a_picture_if_catalogue_bucket_or_server_do_not_have_it(
    rag: Any, ask: Ask
) -> None:
    assistant, client, _ = ask("When do I prune apple trees?", StandIn())
    assert client.asked == [[assistant.picture(rag.Page("home/garden.pdf", 1))]]
    picture = assistant.picture(rag.Page("pumps.pdf", 2))
    _, client, answer = ask("lost pressure", StandIn(), Down())
    assert (answer.text, client.asked) == ("yes", [[picture]])
    # The server cannot load it: the same request once more, with the picture of that name.
    _, client, answer = ask("lost pressure", StandIn(is_empty=True))
    assert (answer.text, client.asked[1:]) == ("yes", [[{**picture, "uuid": "name-2"}]])


def test_no_page_no_request(ask: Ask) -> None:
    _, client, answer = ask("zebra", StandIn())
    assert (answer.pages, client.asked) == ([], [])
