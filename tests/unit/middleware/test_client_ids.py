# SPDX-License-Identifier: Apache-2.0
"""The middleware that keeps clients from choosing identifiers, as an ASGI server calls it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from s3ec.errors import ConfigError
from s3ec.middleware import bodies
from s3ec.middleware.bodies import LIMIT_VARIABLE, Message
from s3ec.middleware.client_ids import (
    BodyError,
    StripClientIds,
    rewrite,
)

STOLEN = "ab" * 32
JSON = (b"content-type", b"application/json")


def part(**more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}, **more}


def chat(*parts: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": list(parts)}]}


CHOSEN: dict[str, Any] = {
    "chat completions, embeddings, classify, pooling, tokenize": chat(
        {"type": "text", "text": "hi"}, part(uuid=STOLEN)
    ),
    "a picture of which only the name is sent": chat(
        {"type": "image_url", "image_url": None, "uuid": STOLEN}
    ),
    "a name inside of the picture": chat({"image_url": {"url": "u", "uuid": STOLEN}}),
    "a batch of chats": {"messages": [[{"role": "user", "content": [part(uuid=STOLEN)]}]]},
    "a video": chat({"type": "video_url", "video_url": {"url": "u"}, "uuid": STOLEN}),
    "embeddings": chat({"type": "image_embeds", "image_embeds": "AAAA", "uuid": STOLEN}),
    "a number": chat(part(uuid=7)),
    "an empty name": chat(part(uuid="")),
    "responses": {"input": [{"role": "user", "content": [part(type="input_image", uuid=STOLEN)]}]},
    "what a tool gave back": {
        "input": [{"type": "function_call_output", "output": [part(uuid=STOLEN)]}]
    },
    "score": {"text_1": "q", "text_2": {"content": [part(uuid=STOLEN)]}},
    "score, queries": {"queries": [{"content": [part(uuid=STOLEN)]}], "documents": ["a"]},
    "rerank": {"query": "q", "documents": [{"content": [part(uuid=STOLEN)]}]},
    "messages": {"messages": [{"role": "user", "content": [{"type": "tool_result",
                 "content": [part(uuid=STOLEN)]}]}]},
    "generate": {"token_ids": [1], "content_parts": [part(uuid=STOLEN)]},
    "completions": {"prompt": "p", "multi_modal_uuids": {"image": [STOLEN]}},
}  # fmt: skip


@pytest.mark.parametrize("content", CHOSEN.values(), ids=CHOSEN)
def test_a_name_that_a_client_chose_is_stripped(content: Any) -> None:
    body = json.dumps(content).encode()
    stripped = json.loads(rewrite(body))
    assert STOLEN not in json.dumps(stripped)
    assert '"uuid"' not in json.dumps(stripped)
    assert without_names(content) == stripped


def without_names(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            key: without_names(inner)
            for key, inner in value.items()
            if key not in ("uuid", "multi_modal_uuids")
        }
    return [without_names(inner) for inner in value] if isinstance(value, list) else value


@pytest.mark.parametrize(
    "body",
    [
        json.dumps(CHOSEN["responses"]).encode("utf-16"),
        json.dumps(CHOSEN["responses"]).encode("utf-32-be"),
        b"\xef\xbb\xbf" + json.dumps(CHOSEN["responses"]).encode(),
        json.dumps(CHOSEN["responses"]).replace("uuid", "\\u0075u\\u0069d").encode(),
        b'{"messages":[{"content":[{"uuid":"%s"}],"content":"hi"}]}' % STOLEN.encode(),
        b'{"messages":[{"content":"hi","content":[{"uuid":"%s"}]}]}' % STOLEN.encode(),
        b'{"messages":[{"uuid":null,"content":[{"uuid":"%s","uuid":null}]}]}' % STOLEN.encode(),
        b'  \n{"a":[{"uuid"  :"%s"}]}' % STOLEN.encode(),
        b'{"a":"\\ud800","b":1e999,"c":NaN,"d":[{"uuid":"%s"}]}' % STOLEN.encode(),
    ],
)
def test_another_spelling_hides_no_name(body: bytes) -> None:
    assert STOLEN.encode() not in rewrite(body)
    assert b"uuid" not in rewrite(body).replace(b'"uuid":null', b"")


@pytest.mark.parametrize(
    "content",
    [
        chat({"type": "text", "text": "what is a uuid? mm_hashes \\u0075uid \0"}),
        chat(part(uuid=None)),
        {"tools": [{"function": {"parameters": {"properties": {"uuid": {"type": "string"}}}}}]},
        {"response_format": {"json_schema": {"schema": {"properties": {"uuid": {}}}}}},
        {"text": {"format": {"schema": {"properties": {"uuid": {}}}}}},
        {"metadata": {"uuid": "of the client's own books"}},
        {"messages": [{"content": [{"type": "tool_use", "input": {"uuid": "of an order"}}]}]},
        {"messages": [{"tool_calls": [{"function": {"arguments": '{"uuid": 1}'}}]}]},
        {"messages": [{"tool_calls": [{"function": {"arguments": {"uuid": 1}}}]}]},
        {"features": {"mm_hashes": {}}},
        [],
        "uuid",
        None,
    ],
)
def test_what_is_no_name_of_a_picture_is_left_as_it_came(content: Any) -> None:
    body = json.dumps(content, indent=1).encode()
    assert rewrite(body) is body


def test_a_tool_call_that_is_a_picture_hides_no_name() -> None:
    body = json.dumps(chat(part(type="tool_use", uuid=STOLEN, input={"uuid": 1}))).encode()
    assert json.loads(rewrite(body)) == chat(part(type="tool_use", input={"uuid": 1}))


@pytest.mark.parametrize("where", ["request", "part"])
def test_input_that_only_looks_like_a_tool_calls_hides_no_name(where: str) -> None:
    """The responses API has a list of this name, in requests that may have any other field."""
    asked = {"type": "tool_use", "input": [{"role": "user", "content": [part(uuid=STOLEN)]}]}
    content = asked if where == "request" else {"requests": [asked]}
    body = json.dumps(content).encode()
    assert STOLEN.encode() not in rewrite(body)
    plain = {"type": "tool_use", "input": {"content": [part(uuid=STOLEN)]}}
    assert STOLEN.encode() not in rewrite(json.dumps(plain).encode())


def test_hashes_of_another_servers_renderer_are_refused() -> None:
    body = json.dumps({"token_ids": [1], "features": {"mm_hashes": {"image": [STOLEN]}}}).encode()
    with pytest.raises(BodyError, match="mm_hashes"):
        rewrite(body)


@pytest.mark.parametrize(
    "body",
    [b'{"uuid": ', b"uuid", b'{"uuid": \xff}', b"[" * 100_000 + b'"uuid"', b"\0",
     b'{"uuid":' + b"1" * 5000 + b"}"],
    ids=["cut", "word", "no Unicode", "deep", "zero", "long number"],
)  # fmt: skip
def test_what_cannot_be_read_is_refused_where_it_must_be_json(body: bytes) -> None:
    with pytest.raises(BodyError, match="no JSON"):
        rewrite(body)
    assert rewrite(body, must_be_json=False) is body


# -- as a server calls it ----------------------------------------------------------------------


class Server:
    """One request through the middleware to an application that notes what it gets."""

    def __init__(self) -> None:
        self.got: bytes | None = None
        self.headers: dict[bytes, bytes] = {}
        self.sent: list[Message] = []
        self.calls = 0
        self.last: Message = {}
        self.middleware = StripClientIds(self._app)

    async def _app(self, scope: Any, receive: Callable[[], Awaitable[Message]], send: Any) -> None:
        self.calls += 1
        if scope["type"] != "http":
            return
        self.headers = dict(scope["headers"])
        body, more = b"", True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        self.got = body
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for event in (b"data: 1\n\n", b"data: 2\n\n"):
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
        self.last = await receive()

    def ask(
        self,
        *parts: bytes,
        headers: Sequence[tuple[bytes, bytes]] = (JSON,),
        method: str = "POST",
        leave: bool = False,
    ) -> int | None:
        length = (b"content-length", b"%d" % sum(map(len, parts)))
        scope = {"type": "http", "method": method, "headers": [*headers, length], "path": "/"}

        async def messages() -> AsyncIterator[Message]:
            for number, body in enumerate(parts):
                more = leave or number < len(parts) - 1
                yield {"type": "http.request", "body": body, "more_body": more}
            while True:
                yield {"type": "http.disconnect"}

        incoming = messages()

        async def send(message: Message) -> None:
            self.sent.append(message)

        asyncio.run(self.middleware(scope, incoming.__anext__, send))  # type: ignore[arg-type]
        return self.sent[0]["status"] if self.sent else None


POISONED = json.dumps(chat(part(uuid=STOLEN))).encode()
CLEAN = json.dumps(chat(part())).encode()


def test_the_application_gets_the_shorter_body_with_its_length() -> None:
    server = Server()
    assert server.ask(POISONED[:20], POISONED[20:30], POISONED[30:]) == 200
    assert server.got is not None
    assert json.loads(server.got) == chat(part())
    assert int(server.headers[b"content-length"]) == len(server.got) < len(POISONED)
    assert server.last == {"type": "http.disconnect"}  # the server's word, not ours


def test_a_chunked_body_that_was_shortened_has_a_length_and_the_reply_is_streamed() -> None:
    server = Server()
    server.ask(POISONED, headers=[JSON, (b"Transfer-Encoding", b"chunked")])
    assert b"Transfer-Encoding" not in server.headers
    assert int(server.headers[b"content-length"]) == len(server.got or b"")
    assert [message.get("body") for message in server.sent] == [
        None, b"data: 1\n\n", b"data: 2\n\n", b"",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "kinds",
    [[b"application/json"], [b"Application/JSON; charset=utf-8"], [b"application/vnd.x+json"],
     [b"text/plain"], [], [b"application/octet-stream"],
     [b"multipart/form-data; boundary=x", b"application/json"]],
)  # fmt: skip
def test_names_are_stripped_whatever_the_body_is_said_to_be(kinds: list[bytes]) -> None:
    server = Server()
    server.ask(POISONED, headers=[(b"Content-Type", kind) for kind in kinds])
    assert STOLEN.encode() not in (server.got or STOLEN.encode())


def test_recordings_and_other_bodies_go_through_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LIMIT_VARIABLE, "10")
    form = b"--x\r\ncontent-disposition: form-data; name=uuid\r\n\r\n\0\r\n--x--"
    server = Server()
    assert server.ask(form, headers=[(b"content-type", b"multipart/form-data; boundary=x")]) == 200
    assert server.got == form
    assert server.ask(b"", method="GET") == 200
    other = Server()
    assert other.ask(b"\0uuid", headers=[(b"content-type", b"application/octet-stream")]) == 200
    assert other.got == b"\0uuid"


def test_a_body_over_the_limit_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LIMIT_VARIABLE, str(len(CLEAN)))
    assert Server().ask(CLEAN) == 200
    server = Server()
    assert server.ask(CLEAN, b" ") == 413
    assert server.calls == 0


@pytest.mark.parametrize("limit", ["0", "-1", "1GiB", "1e9", "\u0661"])
def test_a_limit_that_is_no_number_ends_the_start(
    monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    monkeypatch.setenv(LIMIT_VARIABLE, limit)
    with pytest.raises(ConfigError, match=LIMIT_VARIABLE):
        Server()


KEY = [(b"authorization", b"Bearer secret")]


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/v1/chat/completions", [], 401),
        ("/v1/chat/completions", [(b"authorization", b"Bearer other")], 401),
        ("/v1/chat/completions", [(b"authorization", b"Basic secret")], 401),
        # Servers differ in which of two counts.
        ("/v1/chat/completions", [*KEY, (b"authorization", b"Bearer other")], 401),
        ("/v1/chat/completions", KEY, 200),
        ("/v1/embeddings", [], 401),
        ("/tokenize", [], 200),  # nor does vLLM ask for it there
    ],
)
@pytest.mark.parametrize("source", ["args", "environment"])
def test_the_key_is_asked_for_before_the_body_is_read(
    source: str,
    path: str,
    headers: list[tuple[bytes, bytes]],
    status: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    args = SimpleNamespace(api_key=["secret"] if source == "args" else None)
    if source == "environment":
        monkeypatch.setenv("VLLM_API_KEY", "secret")
    app = SimpleNamespace(state=SimpleNamespace(args=args))
    server = Server()
    read: list[int] = []

    async def receive() -> Message:
        read.append(1)
        return {"type": "http.request", "body": POISONED}

    async def send(message: Message) -> None:
        server.sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "headers": [JSON, *headers],
        "app": app,
    }
    asyncio.run(server.middleware(scope, receive, send))
    assert server.sent[0]["status"] == status
    assert bool(read) == (status == 200)
    assert STOLEN.encode() not in (server.got or b"")
    if status == 401:
        assert server.calls == 0
        assert (b"connection", b"close") in server.sent[0]["headers"]


async def test_bodies_of_all_clients_together_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "_ROOM_BYTES", 2 * len(CLEAN))
    monkeypatch.setenv(LIMIT_VARIABLE, str(len(CLEAN)))
    server = Server()
    last = asyncio.Event()

    def ask(*parts: bytes) -> asyncio.Task[None]:
        async def messages() -> AsyncIterator[Message]:
            for part in parts:
                yield {"type": "http.request", "body": part, "more_body": True}
            await last.wait()
            yield {"type": "http.request", "body": CLEAN[-1:]}
            yield {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            server.sent.append(message)

        scope = {"type": "http", "method": "POST", "path": "/", "headers": [JSON]}
        return asyncio.create_task(server.middleware(scope, messages().__anext__, send))  # type: ignore[arg-type]

    slow = [ask(CLEAN[:-1]) for _ in range(2)]
    await asyncio.sleep(0)
    await ask(CLEAN[:-1])  # the last byte that there is room for is the second one's
    assert [one["status"] for one in server.sent if "status" in one] == [503]
    last.set()
    await asyncio.gather(*slow)
    await ask(CLEAN[:-1])
    assert [one["status"] for one in server.sent if "status" in one] == [503, 200, 200, 200]


def test_a_client_that_leaves_gets_no_reply() -> None:
    server = Server()
    assert server.ask(POISONED[:10], leave=True) is None
    assert server.calls == 0


@pytest.mark.parametrize("kind", ["lifespan", "websocket"])
def test_other_protocols_are_not_touched(kind: str) -> None:
    server = Server()
    asyncio.run(server.middleware({"type": kind}, None, None))  # type: ignore[arg-type]
    assert server.calls == 1
