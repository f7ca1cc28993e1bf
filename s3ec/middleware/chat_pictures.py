# SPDX-License-Identifier: Apache-2.0
"""The pictures of a chat request: found in its body, and replaced by their placeholders' sizes.

Pure functions over JSON. A picture is replaced only if vLLM is certain to get the same prompt: a
request with anything that is not known here is left as it is (``UntouchedError``).

vLLM refuses a request that mixes pictures and embeddings (0.32, renderers/chat_utils.py:
``_resolve_items``), so all pictures of a request are replaced or none. The responses API takes no
part without pixels, and its conversations outlive a request, so it has no place here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from s3ec.middleware.bodies import TwiceSeen, compact_json

MOST_PICTURES = 64
"""The most pictures of one request; each is held on this node's disk until the request ends."""

MARK = b'"image_url"'
"""Without it no part is a picture: another spelling needs an escape or another encoding, and such a
request is left unchanged."""

# If set and not null, each of these changes how pictures or prompts are processed, or the source of
# embeddings. With `echo` a stream has an event before it is certain that the request succeeds.
_OPTIONS = (
    "mm_processor_kwargs",
    "media_io_kwargs",
    "ec_transfer_params",
    "kv_transfer_params",
    "use_beam_search",
    "echo",
)
_TEXT_TYPES = ("text", "refusal")
# vLLM takes a text part for a picture if it has a uuid and one of these.
_NO_TEXT = ("uuid", "image_url", "image_pil", "image_embeds", "audio_embeds", "video_embeds",
            "prompt_embeds", "audio_url", "input_audio", "video_url", "tool_reference")  # fmt: skip
# A client's own name may stand for any picture; here pictures are identified by their bytes.
_PART = frozenset({"type", "image_url", "uuid"})
_URL = frozenset({"url", "detail"})
# vLLM reads `detail` and ignores it; another value is an error.
_DETAILS = ("auto", "low", "high")


class UntouchedError(Exception):
    """A request passes unchanged.

    Attributes:
        reason: One word, for the counters.
    """

    def __init__(self, reason: str) -> None:
        """Note the reason, which clients do not see."""
        super().__init__(reason)
        self.reason = reason


class ChatRequest:
    """A chat request with pictures; changed once, by ``without_pixels``.

    Attributes:
        urls: The URLs of its pictures, in order; of any scheme.
    """

    def __init__(self, content: dict[str, Any], parts: Sequence[dict[str, Any]]) -> None:
        """Take over a parsed request.

        Args:
            content: The whole request.
            parts: The parts of its pictures, inside ``content``.
        """
        self._content = content
        self._parts = parts
        self.urls: list[str] = [part["image_url"]["url"] for part in parts]

    def without_pixels(self, named: Sequence[tuple[str, Mapping[str, Any]]]) -> bytes:
        """The body with metadata instead of pictures.

        Args:
            named: For each picture its identifier, and the size fields of its placeholder.
        """
        for part, (identifier, placeholder) in zip(self._parts, named, strict=True):
            part.clear()
            part.update(type="image_embeds", image_embeds=dict(placeholder), uuid=identifier)
        return compact_json(self._content)


def parse(body: bytes) -> ChatRequest:
    """Find the pictures of a chat request.

    Raises:
        UntouchedError: There are none, or the request has something that is not known here.
    """
    if MARK not in body:
        raise UntouchedError("no_pictures")
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
    return ChatRequest(content, parts)


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
        if part.get("uuid") is not None:
            raise UntouchedError("client_ids")
        found.append(part)
    return found


def _is_plain(part: dict[str, Any]) -> bool:
    """True if a picture's part has only fields that are known here."""
    image = part.get("image_url")
    return (
        part.keys() <= _PART
        and isinstance(image, dict)
        and image.keys() <= _URL
        and isinstance(image.get("url"), str)
        and image["url"] != ""
        and image.get("detail", "auto") in _DETAILS
    )
