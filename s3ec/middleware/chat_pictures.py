# SPDX-License-Identifier: Apache-2.0
"""The pictures of a chat request: found in its body, and replaced by what sizes their placeholders.

Pure functions over JSON. What is certain to give vLLM the same prompt is replaced, and nothing
else: a request with anything in it that is not known here is left as it is (``UntouchedError``).

vLLM refuses a request that mixes pictures and embeddings (0.32, renderers/chat_utils.py:
``_resolve_items``), so all pictures of a request are replaced or none. The responses API takes no
part without pixels, and its conversations outlive a request, so it has no place here.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from s3ec.middleware.bodies import TwiceSeen, compact_json

MOST_PICTURES = 64
"""Of one request; each is held on this node's disk until the request ends."""

MARK = b'"image_url"'
"""Without it no part is a picture: another spelling needs an escape or another encoding, and such a
request is left alone."""

# Set and not null, each of these has its own ideas about pictures, prompts or where embeddings come
# from. With `echo` an event of the answer's stream comes before it is certain that there is one.
_OPTIONS = (
    "mm_processor_kwargs",
    "media_io_kwargs",
    "ec_transfer_params",
    "kv_transfer_params",
    "use_beam_search",
    "echo",
)
# Python's parser takes 10 ns for each character of a string, and finds nothing in these.
_LONG_BYTES = 4096
_DATA_URL = b'"data:'
_TEXT_TYPES = ("text", "refusal")
# vLLM takes a text part for a picture if it has a uuid and one of these.
_NO_TEXT = ("uuid", "image_url", "image_pil", "image_embeds", "audio_embeds", "video_embeds",
            "prompt_embeds", "audio_url", "input_audio", "video_url", "tool_reference")  # fmt: skip
_PART = frozenset({"type", "image_url", "uuid"})
_URL = frozenset({"url", "detail"})
# vLLM reads `detail` and ignores it; another value is an error.
_DETAILS = ("auto", "low", "high")


class UntouchedError(Exception):
    """A request goes on as it came.

    Attributes:
        reason: One word, for the counts.
    """

    def __init__(self, reason: str) -> None:
        """A reason is not for clients."""
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Picture:
    """One part of a request.

    Attributes:
        url: Where vLLM would take it from; of any scheme.
        uuid: What the client calls it; None where it has no name.
    """

    url: str
    uuid: str | None


class ChatRequest:
    """A chat request with pictures; changed once, by ``without_pixels``.

    Attributes:
        pictures: In the order in which they are sent.
        cut: How many of the pictures had something stand for their URL.
    """

    def __init__(
        self, content: dict[str, Any], parts: Sequence[dict[str, Any]], urls: Mapping[str, str]
    ) -> None:
        """Take over a parsed request.

        Args:
            content: All of it.
            parts: Its pictures, inside ``content``.
            urls: What stands for a URL in it, and that URL.
        """
        self._content = content
        self._parts = parts
        named = [(part["image_url"]["url"], part.get("uuid")) for part in parts]
        self.pictures = [Picture(urls.get(url, url), uuid) for url, uuid in named]
        self.cut = sum(url in urls for url, _ in named)

    def without_pixels(self, named: Sequence[tuple[str, Mapping[str, Any]]]) -> bytes:
        """The body with metadata instead of pictures.

        Args:
            named: For each picture its identifier, and what sizes its placeholder.
        """
        for part, (identifier, placeholder) in zip(self._parts, named, strict=True):
            part.clear()
            part.update(type="image_embeds", image_embeds=dict(placeholder), uuid=identifier)
        return compact_json(self._content)


def parse(body: bytes) -> ChatRequest:
    """Find the pictures of a chat request.

    Raises:
        UntouchedError: There are none, or something else is in it that is not certain here.
    """
    if MARK not in body:
        raise UntouchedError("no_pictures")
    short, urls = _without_long_urls(body)
    request = _read(short, urls)
    # A long data URL elsewhere, such as in a text: it must come out as it went in.
    return request if request.cut == len(urls) else _read(body, {})


def _without_long_urls(body: bytes) -> tuple[bytes, dict[str, str]]:
    """Have something short stand for each long data URL; what is JSON stays that, and only that.

    A quote without a backslash before it begins a string or ends one, and behind the end of one
    there is no ``data:`` in JSON. The string has no escapes. Control characters may not be in it:
    what is before the comma is looked through here, and where they are behind it, the base64 cannot
    be read and the picture is never known.

    Returns:
        The shorter body, and what stands for each URL.
    """
    nonce = secrets.token_hex(8)  # so that nothing else in the body is called so
    pieces: list[bytes] = []
    urls: dict[str, str] = {}
    done = start = 0
    while (start := body.find(_DATA_URL, start)) >= 0:
        first = start + 1
        end = body.find(b'"', first)
        url = body[first:end] if end - first >= _LONG_BYTES else b""
        is_whole = url and body[start - 1 : start] != b"\\" and b"\\" not in url
        if is_whole and url.isascii() and _has_plain_head(url):
            name = f"data:{nonce}-{len(urls)}"
            urls[name] = url.decode("ascii")
            pieces += body[done:first], name.encode("ascii")
            done = start = end
        start += 1
    return b"".join([*pieces, body[done:]]), urls


def _has_plain_head(url: bytes) -> bool:
    comma = url.find(b",", 0, _LONG_BYTES)
    return comma >= 0 and url[:comma].decode("ascii").isprintable()


def _read(body: bytes, urls: Mapping[str, str]) -> ChatRequest:
    seen = TwiceSeen()
    try:
        # As Starlette does, which finds out the encoding too.
        content = json.loads(body, object_pairs_hook=seen.pairs)
    except (ValueError, RecursionError):
        raise UntouchedError("unreadable") from None
    if seen.found or not isinstance(content, dict):
        raise UntouchedError("unreadable")
    if any(content.get(name) not in (None, False) for name in _OPTIONS):
        raise UntouchedError("options")
    messages = content.get("messages")
    if not isinstance(messages, list):
        raise UntouchedError("unreadable")
    parts = [part for message in messages for part in _pictures_of(message)]
    if not parts:
        raise UntouchedError("no_pictures")
    if len(parts) > MOST_PICTURES:
        raise UntouchedError("too_many")
    return ChatRequest(content, parts, urls)


def _pictures_of(message: Any) -> list[dict[str, Any]]:
    content = message.get("content") if isinstance(message, dict) else 0
    if content is None or isinstance(content, str):
        return []
    if not isinstance(content, list):
        raise UntouchedError("parts")
    found = []
    for part in content:
        if isinstance(part, str):
            continue
        if not isinstance(part, dict):
            raise UntouchedError("parts")
        kind = part.get("type")
        if kind in _TEXT_TYPES and not any(name in part for name in _NO_TEXT):
            continue
        if kind != "image_url" or not _is_plain(part):
            raise UntouchedError("parts")
        found.append(part)
    return found


def _is_plain(part: dict[str, Any]) -> bool:
    """Whether a picture's part has nothing but what is understood here."""
    image, name = part.get("image_url"), part.get("uuid")
    return (
        part.keys() <= _PART
        and isinstance(image, dict)
        and image.keys() <= _URL
        and isinstance(image.get("url"), str)
        and image["url"] != ""
        and image.get("detail", "auto") in _DETAILS
        and (name is None or (isinstance(name, str) and name != ""))
    )
