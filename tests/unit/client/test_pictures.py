# SPDX-License-Identifier: Apache-2.0
"""Parts with and without pixels, and chats with the openai package; a real vLLM answers in e2e."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from s3ec.client import AsyncPictures, Pictures
from s3ec.corpus.catalog_file import CatalogRow, to_table
from s3ec.corpus.catalog_index import CatalogIndex
from s3ec.errors import ConfigError, NotFoundError, SourceError
from tests.unit.client.conftest import GRID, WITH, WITHOUT, Server, row_of

Make = Callable[..., Pictures]


def index_of(*rows: CatalogRow) -> CatalogIndex:
    return CatalogIndex.from_table(to_table(rows))


@pytest.fixture
def make(files: list[Path]) -> Iterator[Make]:
    """Pictures of the three files."""
    made: list[Pictures] = []

    def one(*rows: CatalogRow, **arguments: Any) -> Pictures:
        made.append(Pictures(index_of(*(rows or map(row_of, files))), **arguments))
        return made[-1]

    yield one
    for pictures in made:
        pictures.close()


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url, api_key="none", max_retries=0) as made:
        yield made


def data_url(path: Path, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"


def asking(*parts: dict[str, Any]) -> dict[str, Any]:
    content = [*parts, {"type": "text", "text": "what is it?"}]
    return {"model": "m", "messages": [{"role": "user", "content": content}]}


# -- parts -------------------------------------------------------------------------------------


def test_a_document_gives_its_size_and_its_identifier_and_no_pixels(
    make: Make, files: list[Path]
) -> None:
    row = row_of(files[0])
    assert make().parts("a.png") == [
        {"type": "image_embeds", "image_embeds": GRID, "uuid": row.identifier}
    ]


def test_each_page_gives_a_part_and_a_named_page_its_own(make: Make, files: list[Path]) -> None:
    rows = [row_of(path, document="report", page=n) for n, path in enumerate(files, 1)]
    pictures = make(*reversed(rows))
    assert [part["uuid"] for part in pictures.parts("report")] == [row.identifier for row in rows]
    assert [part["uuid"] for part in pictures.parts("report", page=2)] == [rows[1].identifier]


@pytest.mark.parametrize(
    ("changes", "arguments"),
    [
        ({}, {"without_pixels": False}),
        ({"placeholder": {}}, {}),
        ({"placeholder": None}, {"without_pixels": True}),
        ({}, {"modalities": ("audio",)}),
    ],
    ids=["server that takes none", "model without sizes", "unknown size", "other modality"],
)
def test_what_cannot_go_without_pixels_has_them_and_its_identifier(
    changes: dict[str, Any], arguments: dict[str, Any], make: Make, files: list[Path]
) -> None:
    row = row_of(files[0], **changes)
    assert make(row, **arguments).parts("a.png") == [
        {
            "type": "image_url",
            "image_url": {"url": data_url(files[0])},
            "uuid": row.identifier,
        }
    ]


def test_an_address_is_handed_to_the_server_unless_fetch_reads_it(
    make: Make, files: list[Path]
) -> None:
    row = row_of(files[0], uri="https://example.org/a.jpg")
    (handed,) = make(row, without_pixels=False).parts("a.png")
    assert handed["image_url"]["url"] == "https://example.org/a.jpg"
    fetching = make(row, without_pixels=False, fetch=lambda _row: files[0].read_bytes())
    (read,) = fetching.parts("a.png")
    assert read["image_url"]["url"] == data_url(files[0], "image/jpeg")
    assert handed["uuid"] == read["uuid"] == row.identifier


def test_a_file_that_has_changed_does_not_get_the_identifier_of_the_old_one(
    make: Make, files: list[Path]
) -> None:
    pictures = make(without_pixels=False)
    files[0].write_bytes(b"another picture")
    with pytest.raises(SourceError, match="is not what it was"):
        pictures.parts("a.png")


def test_a_fetch_that_fails_is_a_file_that_cannot_be_read(make: Make) -> None:
    def fetch(_row: CatalogRow) -> bytes:
        raise LookupError("no such shelf")

    with pytest.raises(SourceError, match=r"`fetch` failed .* no such shelf"):
        make(without_pixels=False, fetch=fetch).parts("a.png")


def test_an_unknown_document_is_named_with_what_to_do(make: Make) -> None:
    with pytest.raises(NotFoundError, match=r"page 3 of `z.png` is not in the catalogue: .*`data`"):
        make().parts("z.png", page=3)


def test_bytes_decide_whatever_the_document_is_called(make: Make, files: list[Path]) -> None:
    pictures = make()
    assert pictures.parts("upload", data=files[1].read_bytes()) == pictures.parts("b.png")
    (fresh,) = pictures.parts("a.png", data=b"a newer one")
    assert fresh["type"] == "image_url"
    assert fresh["uuid"].startswith("sha256:")
    assert fresh["uuid"] != row_of(files[0]).identifier


def test_an_address_serves_for_a_document_that_the_catalogue_lacks(make: Make) -> None:
    url = "https://example.org/z.mp4"
    pictures = make()
    assert pictures.parts("z", url=url, modality="video") == [
        {"type": "video_url", "video_url": {"url": url}}
    ]
    assert pictures.parts("a.png", url=url) == pictures.parts("a.png")


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda make: make().parts("a.png", page=0), "page"),
        (lambda make: make().parts("a.png", modality="smell"), "modality"),
        (lambda make: make(modalities="image"), "modalities"),
        (lambda make: make(modalities=["picture"]), "modalities"),
        (lambda make: make(refresh_s=0), "refresh_s"),
        (lambda _make: Pictures("catalogue.csv"), "catalog"),
        (lambda _make: Pictures(7), "catalog"),  # type: ignore[arg-type]
    ],
)
def test_a_wrong_argument_is_named(call: Callable[[Make], object], field: str, make: Make) -> None:
    with pytest.raises(ConfigError, match=f"`{field}`|no exported catalogue") as caught:
        call(make)
    assert caught.value.field == field


# -- chats -------------------------------------------------------------------------------------


def test_one_request_without_pixels_is_enough_where_the_server_has_the_embedding(
    make: Make, client: openai.OpenAI, server: Server
) -> None:
    pictures = make()
    reply = pictures.chat(client, **asking(*pictures.parts("a.png")))
    assert reply.choices[0].message.content == "yes"
    assert server.kinds == [WITHOUT]


def test_an_embedding_that_cannot_be_had_costs_one_more_request_and_then_rests(
    make: Make, server: Server, files: list[Path]
) -> None:
    server.answer = lambda kind, _number: 500 if kind == WITHOUT else "yes"
    pictures = make()
    # The package's own retries would ask three times without pixels.
    with openai.OpenAI(base_url=server.url, api_key="none") as client:
        for _ in range(2):
            reply = pictures.chat(client, **asking(*pictures.parts("a.png")))
            assert reply.choices[0].message.content == "yes"
        assert server.kinds == [WITHOUT, WITH, WITH]
        assert server.seen[1][0]["image_url"]["url"] == data_url(files[0])
        assert server.seen[1][0]["uuid"] == server.seen[0][0]["uuid"]
        server.answer = lambda _kind, _number: "yes"
        pictures.chat(client, **asking(*pictures.parts("b.png")))
    assert server.kinds[3:] == [WITHOUT]


def test_a_server_that_takes_none_is_asked_without_pixels_once(
    make: Make, client: openai.OpenAI, server: Server
) -> None:
    server.answer = lambda kind, _number: 400 if kind == WITHOUT else "yes"
    pictures = make()
    for name in ("a.png", "b.png"):
        assert pictures.chat(client, **asking(*pictures.parts(name))).choices
    assert server.kinds == [WITHOUT, WITH, WITH]


def test_a_request_that_is_wrong_with_pixels_too_teaches_nothing(
    make: Make, client: openai.OpenAI, server: Server
) -> None:
    server.answer = lambda _kind, _number: 400
    pictures = make()
    with pytest.raises(openai.BadRequestError):
        pictures.chat(client, **asking(*pictures.parts("a.png")))
    server.answer = lambda _kind, _number: "yes"
    pictures.chat(client, **asking(*pictures.parts("a.png")))
    assert server.kinds == [WITHOUT, WITH, WITHOUT]


def test_other_errors_are_the_callers(make: Make, client: openai.OpenAI, server: Server) -> None:
    server.answer = lambda _kind, _number: 404
    pictures = make()
    with pytest.raises(openai.NotFoundError):
        pictures.chat(client, **asking(*pictures.parts("a.png")))
    assert server.kinds == [WITHOUT]


def test_a_busy_server_is_asked_again_as_the_package_would_and_without_pixels(
    make: Make, server: Server
) -> None:
    server.answer = lambda _kind, number: "yes" if number else 503
    pictures = make()
    with openai.OpenAI(base_url=server.url, api_key="none", max_retries=1) as client:
        assert pictures.chat(client, **asking(*pictures.parts("a.png"))).choices
    assert server.kinds == [WITHOUT, WITHOUT]


def test_a_request_goes_without_all_of_its_pictures_pixels_or_with_all(
    make: Make, client: openai.OpenAI, server: Server
) -> None:
    pictures = make()
    fresh = pictures.parts("upload", data=b"not in the corpus")
    pictures.chat(client, **asking(*pictures.parts("a.png"), *fresh, *pictures.parts("b.png")))
    assert [part["type"] for part in server.seen[0][:3]] == ["image_url"] * 3
    assert all("uuid" in part for part in server.seen[0][:3])


def test_pixels_that_cannot_be_read_leave_the_servers_error_with_a_note(
    make: Make, client: openai.OpenAI, server: Server, files: list[Path]
) -> None:
    server.answer = lambda _kind, _number: 500
    pictures = make()
    files[0].unlink()
    with pytest.raises(openai.InternalServerError) as caught:
        pictures.chat(client, **asking(*pictures.parts("a.png")))
    assert "with pixels" in caught.value.__notes__[0]


def test_messages_of_the_caller_stay_as_they_are(
    make: Make, client: openai.OpenAI, server: Server
) -> None:
    server.answer = lambda kind, _number: 500 if kind == WITHOUT else "yes"
    pictures = make()
    request = asking(*pictures.parts("a.png"))
    pictures.chat(client, **request)
    assert request["messages"][0]["content"][0]["type"] == "image_embeds"


def words(chunks: Any) -> list[str]:
    return [chunk.choices[0].delta.content for chunk in chunks]


def test_a_stream_that_fails_before_its_first_word_is_another_one(
    make: Make, client: openai.OpenAI, server: Server
) -> None:
    server.answer = lambda kind, _number: 500 if kind == WITHOUT else "yes"
    pictures = make()
    request = asking(*pictures.parts("a.png"))
    assert words(pictures.chat(client, stream=True, **request)) == ["", "y", "e", "s"]
    assert server.kinds == [WITHOUT, WITH]


def test_a_stream_that_is_refused_is_another_one(
    make: Make, client: openai.OpenAI, server: Server
) -> None:
    server.answer = lambda kind, _number: 400 if kind == WITHOUT else "yes"
    pictures = make()
    request = asking(*pictures.parts("a.png"))
    for _ in range(2):
        assert words(pictures.chat(client, stream=True, **request)) == ["", "y", "e", "s"]
    assert server.kinds == [WITHOUT, WITH, WITH]


def test_a_good_stream_goes_through(make: Make, client: openai.OpenAI, server: Server) -> None:
    pictures = make()
    chunks = pictures.chat(client, stream=True, **asking(*pictures.parts("a.png")))
    assert words(chunks) == ["", "y", "e", "s"]
    assert server.kinds == [WITHOUT]


# -- the same, asynchronous --------------------------------------------------------------------


async def test_async_chats_do_the_same(server: Server, files: list[Path]) -> None:
    server.answer = lambda kind, number: 500 if kind == WITHOUT and number < 4 else "yes"
    async with (
        AsyncPictures(index_of(*map(row_of, files))) as pictures,
        openai.AsyncOpenAI(base_url=server.url, api_key="none") as client,
    ):
        reply = await pictures.chat(client, **asking(*await pictures.parts("a.png")))
        assert reply.choices[0].message.content == "yes"
        request = asking(*await pictures.parts("b.png"))
        chunks = await pictures.chat(client, stream=True, **request)
        assert [chunk.choices[0].delta.content async for chunk in chunks] == ["", "y", "e", "s"]
        assert server.kinds == [WITHOUT, WITH, WITHOUT, WITH]
        request = asking(*await pictures.parts("c.png"))
        chunks = await pictures.chat(client, stream=True, **request)
        assert [chunk.choices[0].delta.content async for chunk in chunks] == ["", "y", "e", "s"]
        assert server.kinds[4:] == [WITHOUT]
        await pictures.refresh()
