# SPDX-License-Identifier: Apache-2.0
"""Chat requests: which pictures are found in them, and what replacing those leaves alone."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from s3ec.middleware.chat_pictures import MOST_PICTURES, UntouchedError, parse

GRID = {"image_grid_thw": [1, 4, 4]}
URL = "data:image/png;base64,AAAA"
TEXT = {"type": "text", "text": "what is it?"}


def part(url: str = URL, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}, **more}


def chat(*parts: Any, **more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": list(parts)}], **more}


def body(content: Any) -> bytes:
    return json.dumps(content).encode()


def named(count: int) -> list[tuple[str, dict[str, Any]]]:
    return [(f"name {number}", GRID) for number in range(count)]


def without(number: int = 0) -> dict[str, Any]:
    return {"type": "image_embeds", "image_embeds": GRID, "uuid": f"name {number}"}


def reason_of(content: Any) -> str:
    with pytest.raises(UntouchedError) as caught:
        parse(content if isinstance(content, bytes) else body(content))
    return caught.value.reason


def test_pictures_of_all_messages_are_found_in_their_order() -> None:
    messages = [
        {"role": "system", "content": "look"},
        {"role": "user", "content": [part("a"), TEXT, "words", part("b")]},
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "tool", "content": [part("c", uuid=None)], "tool_call_id": "1"},
    ]
    request = parse(body({"messages": messages, "n": 3}))
    assert request.urls == ["a", "b", "c"]
    fresh = json.loads(request.without_pixels(named(3)))
    assert fresh["messages"][0] == messages[0]
    assert fresh["messages"][1]["content"] == [without(0), TEXT, "words", without(1)]
    assert fresh["messages"][2] == messages[2]
    assert fresh["messages"][3]["content"] == [without(2)]


@pytest.mark.parametrize("detail", ["auto", "low", "high"])
def test_what_vllm_ignores_goes_with_the_picture(detail: str) -> None:
    request = parse(body(chat({**part(), "image_url": {"url": URL, "detail": detail}}, TEXT)))
    assert json.loads(request.without_pixels(named(1))) == chat(without(), TEXT)


ODD: dict[str, Any] = {
    "no messages": {"image_url": 1},
    "no list of messages": {"messages": {"image_url": 1}},
    "not an object": ["image_url"],
    "a picture as text": b'{"image_url": ',
    "twice the same name": b'{"messages": [], "messages": [{"image_url": 1}]}',
    "deep": b'"image_url"' + b"[" * 100_000,
    "a long number": b'{"image_url":' + b"1" * 5000 + b"}",
}


@pytest.mark.parametrize("content", ODD.values(), ids=ODD)
def test_what_cannot_be_read_is_left_alone(content: Any) -> None:
    assert reason_of(content) == "unreadable"


PARTS: dict[str, Any] = {
    "a video": {"type": "video_url", "video_url": {"url": "u"}},
    "a recording": {"type": "input_audio", "input_audio": {"data": "AA", "format": "wav"}},
    "embeddings": {"type": "image_embeds", "image_embeds": "AAAA"},
    "no type": {"image_url": {"url": URL}},
    "another type": {"type": "input_image", "image_url": URL},
    "a short form": {"type": "image_url", "image_url": URL},
    "no picture": {"type": "image_url", "image_url": None, "uuid": "u"},
    "an empty address": part(""),
    "an address that is no text": {"type": "image_url", "image_url": {"url": 7}},
    "a detail that vLLM refuses": {"type": "image_url", "image_url": {"url": URL, "detail": "x"}},
    "no detail": {"type": "image_url", "image_url": {"url": URL, "detail": None}},
    "a further field": part(cache_control={"type": "ephemeral"}),
    "a further field of the picture": {"type": "image_url", "image_url": {"url": URL, "x": 1}},
    "text that vLLM takes for a picture": {**TEXT, "uuid": "u", "image_url": {"url": URL}},
    "a number": 7,
}


@pytest.mark.parametrize("odd", PARTS.values(), ids=PARTS)
def test_one_part_that_is_not_understood_and_all_are_left_alone(odd: Any) -> None:
    assert reason_of(chat(part(), odd)) == "parts"


@pytest.mark.parametrize("uuid", ["mine", "", 7])
def test_a_picture_with_a_name_of_the_clients_own_is_left_alone(uuid: Any) -> None:
    assert reason_of(chat(part(), part(uuid=uuid))) == "client_ids"


@pytest.mark.parametrize("content", [7, {"image_url": 1}])
def test_content_of_another_kind_is_left_alone(content: Any) -> None:
    assert reason_of({"messages": [{"content": [part()]}, {"content": content}]}) == "parts"
    assert reason_of({"messages": [{"content": [part()]}, "words"]}) == "parts"


@pytest.mark.parametrize(
    "option",
    [
        {"mm_processor_kwargs": {}},
        {"media_io_kwargs": {"image": {}}},
        {"ec_transfer_params": {"a": 1}},
        {"kv_transfer_params": {"a": 1}},
        {"use_beam_search": True},
        {"echo": True},
    ],
    ids=lambda option: next(iter(option)),
)
def test_options_that_may_change_the_prompt_or_the_stream_are_left_alone(option: Any) -> None:
    assert reason_of(chat(part(), **option)) == "options"
    parse(body(chat(part(), **dict.fromkeys(option))))  # null is not set


@pytest.mark.parametrize(
    "content",
    [
        chat(TEXT),
        {"messages": [{"content": "what is an \"image_url\"?"}]},
        {"messages": [], "tools": [{"image_url": 1}]},
    ],
)  # fmt: skip
def test_a_request_without_pictures_is_left_alone(content: Any) -> None:
    assert reason_of(content) == "no_pictures"


@pytest.mark.parametrize(
    "hidden",
    [
        body(chat(part())).replace(b"image_url", b"image\\u005furl"),
        json.dumps(chat(part())).encode("utf-16"),
    ],
)
def test_another_spelling_of_a_picture_is_left_alone(hidden: bytes) -> None:
    assert reason_of(hidden) == "no_pictures"


def test_more_pictures_than_are_held_for_one_request_are_left_alone() -> None:
    assert len(parse(body(chat(*[part()] * MOST_PICTURES))).urls) == MOST_PICTURES
    assert reason_of(chat(*[part()] * (MOST_PICTURES + 1))) == "too_many"


LONG = "data:image/png;base64," + "A" * 5000


json_values: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "image_url", "content", "url", "uuid", "text", "messages"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=15,
)
pictures = st.builds(part, st.sampled_from([URL, LONG, "http://a/b"]))


def with_pictures(
    draw: Callable[[Any], Any],
) -> dict[str, Any]:
    return {
        "messages": [
            {"role": "user", "content": draw(st.lists(pictures | st.just(TEXT), max_size=4))}
            for _ in range(draw(st.integers(1, 3)))
        ],
        **draw(
            st.dictionaries(
                st.sampled_from(["model", "stop", "tools", "n"]), json_values, max_size=3
            )
        ),
    }


@given(st.composite(with_pictures)())
def test_replacing_changes_the_pictures_and_nothing_else(content: dict[str, Any]) -> None:
    asked = copy.deepcopy(content)
    try:
        request = parse(body(content))
    except UntouchedError as exc:
        assert exc.reason == "no_pictures"  # noqa: PT017 (an answer as good as another)
        return
    fresh = json.loads(request.without_pixels(named(len(request.urls))))
    number = 0
    for message in asked["messages"]:
        for place, one in enumerate(message["content"]):
            if one["type"] == "image_url":
                message["content"][place] = without(number)
                number += 1
    assert fresh == asked
    assert number == len(request.urls)
