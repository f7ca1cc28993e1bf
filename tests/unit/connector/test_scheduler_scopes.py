# SPDX-License-Identifier: Apache-2.0
"""What the scheduler half does where a modality has names of its own."""

from __future__ import annotations

from s3ec.identity import ModalityScopes
from tests.unit.connector.scheduling import World, bare, feature, identifier_of, request
from tests.unit.tier.cases import key_of

MARK = "video-0123456789abcdef"
SCOPES = ModalityScopes({"video": MARK}, "all-1", frozenset(("image", "video", "audio")))


def marked(text: object) -> str:
    return f"{MARK}:{identifier_of(text)}"


def world() -> World:
    return World(producer=True, scopes=SCOPES)


def test_a_video_is_found_and_loaded_under_its_marked_name_and_a_picture_under_its_own() -> None:
    it = world()
    it.index.add(key_of(marked("film")))
    it.index.add(key_of(identifier_of("cat")))
    asked = request("r", feature("cat"), feature("film", 10, modality="video"))
    assert not it.ask(asked)
    it.step()
    stored = {want.key.stored for want in it.prefetcher.open.values()}
    assert stored == {marked("film"), identifier_of("cat")}
    for text in ("cat", "film"):
        it.finish(text)
    assert it.run(asked) == [True, True]
    loads = {load.identifier: load.renamed for load in it.step().loads}
    assert loads == {identifier_of("cat"): "", identifier_of("film"): marked("film")}


def test_what_is_stored_under_the_plain_name_is_not_this_engine_s_video() -> None:
    it = world()
    it.stock("film")
    assert it.run(request("r", feature("film", modality="video"))) == [False]
    (save,) = it.step().saves.values()
    assert save.renamed == marked("film")


def test_a_client_s_name_of_a_picture_and_of_a_video_are_two_entries() -> None:
    it = world()
    it.index.add(key_of("film"))
    picture, video = (request(kind, feature("film", raw=True, modality=kind)) for kind in
                      ("image", "video"))  # fmt: skip
    assert not it.ask(picture)
    it.step()
    it.prefetcher.finish("film")
    assert it.run(video) == [False]
    (save,) = it.step(freed=()).saves.values()
    assert (save.modality, save.renamed) == ("video", f"{MARK}:film")
    assert it.run(picture) == [True]
    (load,) = it.step().loads
    assert load.renamed == ""


def test_the_name_that_a_client_read_in_the_catalogue_is_taken_as_it_is() -> None:
    it = world()
    it.index.add(key_of(marked("film")))
    asked = request("r", bare(marked("film"), raw=True, modality="video"))
    assert not it.ask(asked)
    it.step()
    (want,) = it.prefetcher.open.values()
    assert (want.key.identifier, want.key.renamed) == (marked("film"), "")


def test_a_pure_producer_skips_what_is_stored_under_the_marked_name_alone() -> None:
    it = World(producer=True, consumer=False, scopes=SCOPES)
    it.stock("plain")
    it.index.add(key_of(marked("marked")))
    for text, is_stored in (("plain", False), ("marked", True)):
        asked = request(text, feature(text, modality="video"))
        assert it.run(asked) == [is_stored]
        assert it.half.request_finished(asked) == []
