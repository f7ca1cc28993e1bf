# SPDX-License-Identifier: Apache-2.0
"""Parts with and without pixels, and chats with the openai package; a real vLLM answers in e2e."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pyarrow as pa
import pytest

from s3ec.client import AsyncPictures, Pictures
from s3ec.corpus.catalog_file import STAMP, CatalogRow, to_table
from s3ec.corpus.catalog_index import CatalogIndex
from s3ec.corpus.reading import ReadOptions, page_uri, reader_for, render_page
from s3ec.errors import AmbiguousError, ConfigError, NotFoundError, SourceError
from s3ec.settings import Settings
from tests.support.clock import Clock
from tests.support.pdfs import make_pdf
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


def test_files_of_one_name_in_two_places_are_told_apart_by_the_url(
    make: Make, files: list[Path]
) -> None:
    places = [row_of(path, document="x.png") for path in files[:2]]
    pictures = make(*places)
    with pytest.raises(AmbiguousError, match="in several places") as caught:
        pictures.parts("x.png")
    assert all(row.uri in str(caught.value) for row in places)
    for row in places:
        [part] = pictures.parts("x.png", url=row.uri)
        assert part["uuid"] == row.identifier
    moved = dataclasses.replace(places[0], uri="file:///elsewhere/x.png")
    assert len(make(places[0], moved).parts("x.png")) == 1, "the same file in both"


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


@pytest.mark.parametrize("name", ["a.jpg", "a.pdf#page=1", "a.jpg?sig=secret"])
@pytest.mark.parametrize("scheme", ["https", "HTTP"])
def test_an_address_of_a_catalogue_goes_nowhere_and_may_be_fetched(
    scheme: str, name: str, files: list[Path]
) -> None:
    """A catalogue is another's word: neither the server nor the client asks what it names."""
    table = to_table([row_of(files[0])])
    uri = pa.array([f"{scheme}://169.254.169.254/{name}"])
    table = table.set_column(table.schema.get_field_index("uri"), "uri", uri)
    index = CatalogIndex.from_table(table)
    with (
        Pictures(index, without_pixels=False) as pictures,
        pytest.raises(SourceError, match=r"is an address, .*give `fetch`"),
    ):
        pictures.parts("a.png")
    with Pictures(index, without_pixels=False, fetch=lambda _: files[0].read_bytes()) as pictures:
        (read,) = pictures.parts("a.png")
    assert base64.b64decode(read["image_url"]["url"].partition(",")[2]) == files[0].read_bytes()
    assert read["uuid"] == row_of(files[0]).identifier


def test_the_callers_own_address_is_handed_to_the_server_without_a_name(
    make: Make, files: list[Path]
) -> None:
    url = "https://example.org/a.jpg"
    away, here = row_of(files[0], uri="https://example.com/a.png"), row_of(files[1])
    pictures = make(away, here, without_pixels=False)
    handed = {"type": "image_url", "image_url": {"url": url}}
    assert pictures.parts("a.png", url=url) == [handed]
    (read,) = pictures.parts("b.png", url=url)  # which is read here, and keeps its name
    assert (read["image_url"]["url"], read["uuid"]) == (data_url(files[1]), here.identifier)
    (given,) = pictures.parts("a.png", data=files[0].read_bytes())
    assert given["uuid"] == away.identifier


@dataclass
class OfCorpus:
    """A catalogue of an open corpus."""

    row: CatalogRow
    settings: Settings

    def index(self) -> CatalogIndex:
        return index_of(self.row)


@pytest.mark.parametrize("place", [{"bucket": "corpus"}, {"url": "gs://corpus"}, None], ids=str)
def test_an_object_is_read_with_the_settings_of_the_open_corpus_or_not_at_all(
    place: dict[str, str] | None, files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[ReadOptions] = []

    class Reading:
        def read(self, uri: str, page: int | None) -> bytes:
            return files[0].read_bytes()

    def reader(options: ReadOptions) -> Any:
        asked.append(options)
        return Reading() if options.settings else reader_for(options)

    monkeypatch.setattr("s3ec.client.parts.reader_for", reader)
    row = row_of(files[0], uri="s3://documents/a.png")
    settings = Settings.model_validate(place) if place else None
    source = index_of(row) if settings is None else OfCorpus(row, settings)
    pictures = Pictures(source, without_pixels=False)
    if place == {"bucket": "corpus"}:
        assert pictures.parts("a.png")[0]["uuid"] == row.identifier
        assert asked == [ReadOptions(settings=settings, asks_http=False)]
    else:
        with pytest.raises(SourceError, match="none is open"):
            pictures.parts("a.png")
    pictures.close()


@pytest.mark.parametrize(("stamp", "dpi"), [("1 2 150", 150), ("200", 200)])
def test_a_page_is_drawn_as_it_was_when_it_was_encoded(
    stamp: str, dpi: int, make: Make, tmp_path: Path
) -> None:
    path = tmp_path / "report.pdf"
    path.write_bytes(make_pdf(2))
    drawn = render_page(path, 2, dpi=dpi)
    digest = hashlib.sha256(drawn).hexdigest()
    uri = page_uri(path.as_uri(), 2)
    row = row_of(path, page=2, uri=uri, sha256=digest, extra={STAMP: stamp})
    (part,) = make(row, without_pixels=False).parts("report.pdf")
    assert part["image_url"]["url"] == f"data:image/png;base64,{base64.b64encode(drawn).decode()}"
    assert part["uuid"] == row.identifier


@pytest.mark.parametrize("stamp", ["", "1 2", "1 2 x", "1 2 99999", "-150", 7, None])
def test_a_page_whose_row_does_not_say_how_it_was_drawn_is_drawn_as_by_default(
    stamp: object, make: Make, tmp_path: Path
) -> None:
    path = tmp_path / "report.pdf"
    path.write_bytes(make_pdf(1))
    digest = hashlib.sha256(render_page(path, 1)).hexdigest()
    row = row_of(path, page=1, uri=page_uri(path.as_uri(), 1), sha256=digest, extra={STAMP: stamp})
    (part,) = make(row, without_pixels=False).parts("report.pdf")
    assert part["uuid"] == row.identifier


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


def test_an_address_of_the_caller_serves_where_the_server_lacks_the_embedding(
    make: Make, client: openai.OpenAI, server: Server, files: list[Path]
) -> None:
    server.answer = lambda kind, _number: 400 if kind == WITHOUT else "yes"
    pictures = make(row_of(files[0], uri="https://example.com/a.png"))
    url = "https://example.org/a.png"
    for _ in range(2):  # the second one has pixels at once
        assert pictures.chat(client, **asking(*pictures.parts("a.png", url=url))).choices
    assert server.kinds == [WITHOUT, WITH, WITH]
    handed = {"type": "image_url", "image_url": {"url": url}}
    assert [parts[0] for parts in server.seen[1:]] == [handed, handed]


def test_one_refusal_is_that_pictures_alone_and_ends(
    make: Make, client: openai.OpenAI, server: Server
) -> None:
    clock = Clock()
    server.answer = lambda kind, number: 400 if kind == WITHOUT and not number else "yes"
    pictures = make(clock=clock)
    for name in ("a.png", "b.png", "a.png", "c.png"):
        assert pictures.chat(client, **asking(*pictures.parts(name))).choices
    assert server.kinds == [WITHOUT, WITH, WITHOUT, WITH, WITHOUT]
    clock.now_s += 61
    pictures.chat(client, **asking(*pictures.parts("a.png")))
    assert server.kinds[5:] == [WITHOUT]


@pytest.mark.parametrize("status", [400, 500])
@pytest.mark.parametrize("stream", [False, True])
def test_a_server_that_takes_none_is_tried_more_and_more_seldom(
    status: int, stream: bool, make: Make, client: openai.OpenAI, server: Server, tmp_path: Path
) -> None:
    clock = Clock()
    server.answer = lambda kind, _number: status if kind == WITHOUT else "yes"
    paths = [tmp_path / f"{number}.png" for number in range(40)]
    for path in paths:
        path.write_bytes(path.name.encode())
    pictures = make(*map(row_of, paths), clock=clock)
    left = iter(paths)

    def ask() -> None:
        request = asking(*pictures.parts(next(left).name))
        reply = pictures.chat(client, stream=stream, **request)
        assert words(reply) if stream else reply.choices

    for _ in range(5):
        ask()
    assert server.kinds == [WITHOUT, WITH] * 3 + [WITH] * 2
    server.seen.clear()
    for pause_s in (60, 60, 60, 60):  # the rests begin after 60, and take 120 and 240
        clock.now_s += pause_s
        ask()
        ask()
    assert server.kinds == [WITHOUT, WITH, WITH, WITH, WITH, WITHOUT, *[WITH] * 4]
    server.answer = lambda _kind, _number: "yes"
    server.seen.clear()
    clock.now_s += 240
    for _ in range(3):
        ask()
    assert server.kinds == [WITHOUT] * 3


def test_a_server_that_is_not_questioned_is_asked_without_pixels_for_each_picture(
    make: Make, client: openai.OpenAI, server: Server, files: list[Path], tmp_path: Path
) -> None:
    server.answer = lambda kind, _number: 400 if kind == WITHOUT else "yes"
    (tmp_path / "d.png").write_bytes(b"the fourth")
    rows = map(row_of, [*files, tmp_path / "d.png"])
    pictures = make(*rows, without_pixels=True)
    for name in ("a.png", "b.png", "c.png", "d.png", "a.png"):
        assert pictures.chat(client, **asking(*pictures.parts(name))).choices
    assert server.kinds == [WITHOUT, WITH] * 4 + [WITH]


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
