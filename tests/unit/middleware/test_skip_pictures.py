# SPDX-License-Identifier: Apache-2.0
"""Requests through SkipPictures to an application that answers as vLLM does."""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from s3ec.counters import Counters
from s3ec.errors import ConfigError
from s3ec.identity import KeyPolicy
from s3ec.middleware import SkipPictures, StripClientIds, bodies
from s3ec.middleware.bodies import LIMIT_VARIABLE, Message
from s3ec.middleware.known_pictures import Opener
from s3ec.middleware.skip_pictures import PATH, FirstEvents, HeldBack, Node
from s3ec.tier.tier import Tier
from tests.support.waiting import until
from tests.unit.middleware.test_chat_pictures import chat, part
from tests.unit.middleware.test_known_pictures import (
    FIELDS,
    GRID,
    NAMESPACE,
    Names,
    name_of,
    open_of,
    publish,
    url_of,
)

KNOWN = json.dumps(chat(part(url_of(b"one")), part(url_of(b"two"))), indent=1).encode()
UNKNOWN = json.dumps(chat(part(url_of(b"one")), part(url_of(b"three"))), indent=1).encode()
WITHOUT = chat(*(
    {"type": "image_embeds", "image_embeds": GRID, "uuid": name_of(data)}
    for data in (b"one", b"two")
))  # fmt: skip
JSON = (b"content-type", b"application/json")
STREAM = (b"content-type", b"text/event-stream; charset=utf-8")
ROLE = b'{"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}'
ERROR = b'{"error":{"message":"Internal server error","code":500}}'
WORD = b'{"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":null}]}'
END = b"[DONE]"


def event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


class App:
    """Notes what it is asked, and answers as it was told.

    Answers are given in turn, the last one to all further requests: a status and the parts of the
    body, or what is raised.
    """

    def __init__(self, *answers: Any) -> None:
        self.answers = answers or ((200, JSON, [b"{}"]),)
        self.bodies: list[bytes] = []
        self.lengths: list[int] = []
        self.when_asked: Callable[[], Awaitable[None]] | None = None
        self.listens = False
        self.lifespans = 0

    async def __call__(
        self, scope: Any, receive: Callable[[], Awaitable[Message]], send: Any
    ) -> None:
        if scope["type"] == "lifespan":
            self.lifespans += 1
            await receive()
            return
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            more = message.get("more_body", False)
        number = len(self.bodies)
        self.bodies.append(body)
        self.lengths.append(int(dict(scope["headers"])[b"content-length"]))
        if self.when_asked is not None:
            await self.when_asked()
        if self.listens:
            await receive()
        answer = self.answers[min(number, len(self.answers) - 1)]
        if isinstance(answer, Exception):
            raise answer
        status, kind, parts = answer
        await send({"type": "http.response.start", "status": status, "headers": [kind]})
        for one in parts:
            await send({"type": "http.response.body", "body": one, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


class Rig:
    """A node that has two pictures, and a client."""

    def __init__(self, tier: Tier, app: App, **more: Any) -> None:
        self.tier = tier
        self.app = app
        self.names = Names()
        self.now_s = 0.0
        self.closed = threading.Event()
        self.node = Node(
            lambda data: self.names.name(data),
            Opener(tier, KeyPolicy(), FIELDS),
            close=self.closed.set,
            **more,
        )
        self.middleware = SkipPictures(
            app, open_node=lambda _state, _counters: self.opened(), clock=lambda: self.now_s
        )
        self.sent: list[Message] = []

    def opened(self) -> Node | str:
        return self.node

    def count(self, outcome: str) -> float:
        return self.middleware.counters.get(f"skip.{outcome}")

    async def start(self) -> None:
        """Have it open its node, as a first request does, which passes as it came."""
        answers, self.app.answers = self.app.answers, ((200, JSON, [b"{}"]),)
        while not self.count("untouched.no_pictures") and not self.count("untouched.no_key"):
            await self.ask(b"{}")
        self.app.answers = answers
        self.app.bodies.clear()
        self.app.lengths.clear()
        self.sent.clear()

    async def ask(
        self,
        *parts: bytes,
        leave: bool = False,
        is_cut: bool = False,
        headers: Sequence[tuple[bytes, bytes]] = (JSON,),
        **scope: Any,
    ) -> None:
        """Send a request.

        Args:
            leave: After the body.
            is_cut: The body does not end.
        """
        length = (b"content-length", b"%d" % sum(map(len, parts)))
        asked = {"type": "http", "method": "POST", "path": PATH, **scope}
        asked["headers"] = [*headers, length]

        async def messages() -> AsyncIterator[Message]:
            for number, body in enumerate(parts):
                more = number < len(parts) - 1 or is_cut
                yield {"type": "http.request", "body": body, "more_body": more}
            if not leave:
                await asyncio.Event().wait()
            yield {"type": "http.disconnect"}

        incoming = messages()

        async def send(message: Message) -> None:
            self.sent.append(message)

        await self.middleware(asked, incoming.__anext__, send)  # type: ignore[arg-type]

    @property
    def statuses(self) -> list[int]:
        return [one["status"] for one in self.sent if "status" in one]

    @property
    def answer(self) -> bytes:
        return b"".join(one.get("body", b"") for one in self.sent)

    async def nothing_is_held(self) -> None:
        await until(lambda: open_of(self.tier) == [])


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[Tier]:
    made = Tier(
        tmp_path / "tier", NAMESPACE, budget_bytes=1 << 20, min_free_bytes=0, counters=Counters()
    )
    for data in (b"one", b"two"):
        publish(made, name_of(data))
    yield made
    made.close()


Make = Callable[..., Awaitable[Rig]]


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine is not what these tests are about."""
    monkeypatch.setattr("s3ec.middleware.skip_pictures._PATIENCE_S", 60.0)


@pytest.fixture
def make(tier: Tier) -> Make:
    async def make_one(*answers: Any, **more: Any) -> Rig:
        rig = Rig(tier, App(*answers), **more)
        await rig.start()
        return rig

    return make_one


# -- what the application is asked -----------------------------------------------------------------


async def test_known_pictures_are_replaced_and_the_length_is_the_bodys(make: Make) -> None:
    rig = await make()
    await rig.ask(KNOWN[:30], KNOWN[30:])
    assert json.loads(rig.app.bodies[0]) == WITHOUT
    assert rig.app.lengths == [len(rig.app.bodies[0])]
    assert rig.statuses == [200]
    assert rig.count("replaced") == 1
    await rig.nothing_is_held()


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (UNKNOWN, "not_here"),
        (json.dumps(chat(part("http://a/b"))).encode(), "url"),
        (json.dumps(chat(part(url_of(b"one"), uuid=name_of(b"two")))).encode(), "client_ids"),
        (json.dumps(chat(part(url_of(b"one")), mm_processor_kwargs={})).encode(), "options"),
        (b'{"image_url": ', "unreadable"),
        (b'{"messages": [ ] }', "no_pictures"),
        (b'"' + b" " * (1 << 17) + b'image_url"', "no_pictures"),
    ],
)
async def test_what_is_not_known_passes_as_it_came(body: bytes, reason: str, make: Make) -> None:
    rig = await make()
    await rig.ask(body[:11], body[11:])
    assert rig.app.bodies == [body]
    assert rig.app.lengths == [len(body)]
    assert rig.count(f"untouched.{reason}") >= 1
    assert rig.statuses == [200]
    await rig.nothing_is_held()


@pytest.mark.parametrize(
    "scope",
    [
        {"path": "/v1/responses"},
        {"path": "/v1/chat/completions/batch"},
        {"method": "PUT"},
        {"headers": [(b"content-type", b"text/plain")]},
        {"headers": []},
    ],
    ids=str,
)
async def test_requests_of_other_kinds_are_not_looked_at(scope: Any, make: Make) -> None:
    rig = await make()
    before = rig.middleware.counters.snapshot()
    await rig.ask(KNOWN, **scope)
    assert rig.app.bodies == [KNOWN]
    assert rig.middleware.counters.snapshot() == before


async def test_a_body_over_the_limit_passes_as_it_came(
    monkeypatch: pytest.MonkeyPatch, make: Make
) -> None:
    monkeypatch.setenv(LIMIT_VARIABLE, str(len(KNOWN)))
    rig = await make()
    await rig.ask(KNOWN)
    assert rig.count("replaced") == 1
    longer = [KNOWN[:50], KNOWN[50:], b"   ", b" "]
    await rig.ask(*longer)
    assert rig.app.bodies[1] == b"".join(longer)
    assert rig.count("untouched.too_large") == 1


class Refusing(App):
    """Answers without reading, as vLLM does where the key is missing."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 401, "headers": [JSON]})
        await send({"type": "http.response.body", "body": b"{}"})


@pytest.mark.parametrize("state", ["no key", "off", "resting"])
async def test_a_body_that_is_not_looked_at_is_not_read_either(state: str, tier: Tier) -> None:
    key = hashlib.sha256(b"secret").digest()
    rig = Rig(tier, Refusing(), api_keys=(key,) if state == "no key" else ())
    if state == "off":
        rig.opened = lambda: "a reason"  # type: ignore[method-assign]
    else:
        await rig.start()
    if state == "resting":
        rig.app = rig.middleware._app = App((500, JSON, [ERROR]))
        for _ in range(3):
            await rig.ask(KNOWN)
        rig.middleware._app = Refusing()
    asked: list[bytes] = []

    async def receive() -> Message:
        asked.append(b"")
        return {"type": "http.request", "body": KNOWN}

    async def send(message: Message) -> None:
        rig.sent.append(message)

    scope = {"type": "http", "method": "POST", "path": PATH, "headers": [JSON]}
    await rig.middleware(scope, receive, send)
    assert asked == []
    assert rig.statuses[-1] == 401
    assert rig.count(f"untouched.{state.replace(' ', '_')}") >= 1


async def test_bodies_of_all_clients_together_are_bounded_and_what_is_over_passes(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "_ROOM_BYTES", 3 * len(KNOWN))
    monkeypatch.setenv(LIMIT_VARIABLE, str(2 * len(KNOWN)))
    rig = await make()
    gate, waiting = asyncio.Event(), asyncio.Semaphore(0)

    async def wait() -> None:
        waiting.release()
        await gate.wait()

    rig.app.when_asked = wait
    tasks = [asyncio.create_task(rig.ask(KNOWN)) for _ in range(3)]
    for _ in tasks:
        await waiting.acquire()
    # Their pictures are held until it is certain that nobody needs them again.
    tasks.append(asyncio.create_task(rig.ask(KNOWN)))
    await waiting.acquire()
    assert rig.app.bodies[3] == KNOWN
    assert rig.count("untouched.busy") == 1
    gate.set()
    await asyncio.gather(*tasks)
    assert rig.count("replaced") == 3
    await rig.ask(KNOWN)
    assert rig.count("replaced") == 4


async def test_nobody_without_the_servers_key_has_pictures_looked_up(make: Make) -> None:
    rig = await make(api_keys=(hashlib.sha256(b"secret").digest(),))
    for headers in ([JSON], [JSON, (b"authorization", b"Bearer other")],
                    [JSON, (b"authorization", b"Basic secret")]):  # fmt: skip
        await rig.ask(KNOWN, headers=headers)
    assert rig.app.bodies == [KNOWN] * 3
    assert rig.names.asked == 0
    await rig.ask(KNOWN, headers=[JSON, (b"Authorization", b"bearer secret")])
    assert rig.count("replaced") == 1


async def test_a_fault_of_ours_is_logged_once_and_costs_no_answer(
    make: Make, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = await make()

    def fail(data: bytes) -> str | None:
        raise ZeroDivisionError

    monkeypatch.setattr(rig.names, "name", fail)
    for _ in range(2):
        await rig.ask(KNOWN)
    assert rig.app.bodies == [KNOWN, KNOWN]
    assert rig.statuses == [200, 200]
    assert caplog.text.count("SkipPictures: a request passes as it came") == 1
    assert rig.count("untouched.fault") == 2


async def test_a_disk_that_hangs_costs_no_answer_and_what_comes_late_is_let_go_of(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("s3ec.middleware.skip_pictures._PATIENCE_S", 0.05)
    rig = await make()
    gate, hangs, open_ = threading.Event(), threading.Event(), rig.tier.entries.open
    late: list[bool] = []

    def slow(key: Any) -> Any:
        hangs.set()
        gate.wait()
        found = open_(key)
        late.append(found is not None)
        return found

    monkeypatch.setattr(rig.tier.entries, "open", slow)
    asked = 0
    while not hangs.is_set():  # a busy machine may not get to it at first
        await rig.ask(KNOWN)
        asked += 1
    assert rig.count("untouched.slow") >= 1
    for _ in range(3):  # for which nobody waits
        await rig.ask(KNOWN)
    assert rig.app.bodies == [KNOWN] * (asked + 3)
    assert rig.count("untouched.busy") >= 3
    assert rig.count("untouched.slow") + rig.count("untouched.busy") == asked + 3
    gate.set()
    await until(lambda: late == [True, True])
    await rig.nothing_is_held()
    monkeypatch.setattr("s3ec.middleware.skip_pictures._PATIENCE_S", 60.0)
    await rig.ask(KNOWN)
    assert rig.count("replaced") == 1


# -- answers ---------------------------------------------------------------------------------------


async def test_an_error_is_repeated_with_the_pixels_and_the_client_sees_that_answer(
    make: Make,
) -> None:
    rig = await make((500, JSON, [ERROR]), (200, JSON, [b"good"]))
    await rig.ask(KNOWN)
    assert json.loads(rig.app.bodies[0]) == WITHOUT
    assert rig.app.bodies[1:] == [KNOWN]
    assert rig.app.lengths[1] == len(KNOWN)
    assert rig.statuses == [200]
    assert rig.answer == b"good"
    assert rig.count("repeated") == 1
    assert rig.count("replaced") == 0
    await rig.nothing_is_held()


@pytest.mark.parametrize("status", [401, 403, 404, 413, 429, 502, 503])
@pytest.mark.parametrize("streamed", [False, True])
async def test_an_error_that_pixels_would_not_mend_is_handed_on(
    status: int, streamed: bool, make: Make
) -> None:
    error = b'{"error":{"message":"Too busy","code":%d}}' % status
    parts = [event(ROLE), event(error)] if streamed else [error]
    kind = (200, STREAM) if streamed else (status, JSON)
    rig = await make((*kind, parts))
    for _ in range(5):
        await rig.ask(KNOWN)
    assert [json.loads(one) for one in rig.app.bodies] == [WITHOUT] * 5
    assert rig.statuses == [kind[0]] * 5
    assert rig.answer == b"".join(parts) * 5
    assert rig.count("repeated") == rig.count("untouched.resting") == 0


async def test_a_stream_that_begins_with_an_error_is_repeated(make: Make) -> None:
    failed = [b": keep-alive\n\n", event(ROLE), event(ERROR), event(END)]
    good = [event(ROLE), event(WORD), event(END)]
    rig = await make((200, STREAM, failed), (200, STREAM, good))
    await rig.ask(KNOWN)
    assert rig.app.bodies[1:] == [KNOWN]
    assert rig.statuses == [200]
    assert rig.answer == b"".join(good)
    assert rig.count("repeated") == 1


async def test_an_error_after_the_first_word_reaches_the_client(make: Make) -> None:
    rig = await make((200, STREAM, [event(ROLE), event(WORD), event(ERROR)]))
    await rig.ask(KNOWN)
    assert rig.answer == event(ROLE) + event(WORD) + event(ERROR)
    assert len(rig.app.bodies) == 1


@pytest.mark.parametrize("answer", [(500, JSON, [b"x"]), ZeroDivisionError()], ids=["500", "raise"])
async def test_a_client_that_has_left_is_not_asked_for_again(answer: Any, make: Make) -> None:
    rig = await make(answer)
    rig.app.listens = True
    if isinstance(answer, Exception):
        with pytest.raises(ZeroDivisionError):
            await rig.ask(KNOWN, leave=True)
    else:
        await rig.ask(KNOWN, leave=True)
    assert len(rig.app.bodies) == 1
    assert rig.sent == []
    assert rig.count("repeated") == 0
    await rig.nothing_is_held()


async def test_a_request_that_is_cancelled_holds_nothing(make: Make) -> None:
    rig = await make()
    asked = asyncio.Event()

    async def wait() -> None:
        asked.set()
        await asyncio.Event().wait()

    rig.app.when_asked = wait
    task = asyncio.create_task(rig.ask(KNOWN))
    await asked.wait()
    assert len(open_of(rig.tier)) == 2
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await rig.nothing_is_held()


@pytest.mark.parametrize("status", [400, 500])
async def test_a_server_that_takes_none_for_good_is_tried_more_and_more_seldom(
    status: int, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    rig = await make()

    async def stopped(scope: Any, receive: Any, send: Any) -> None:
        body = (await receive())["body"]
        answer = status if b"image_embeds" in body else 200
        await send({"type": "http.response.start", "status": answer, "headers": [JSON]})
        await send({"type": "http.response.body", "body": b"{}"})

    rig.middleware._app = stopped
    for _ in range(4):
        await rig.ask(KNOWN)
    assert "none is replaced for 60 s" in caplog.text
    assert rig.count("repeated") == 3
    assert rig.count("untouched.resting") == 1
    for minute in range(1, 24 * 60):
        rig.now_s = minute * 60.0
        await asyncio.gather(*(rig.ask(KNOWN) for _ in range(5)))
    assert set(rig.statuses) == {200}
    # Three begin it. One goes after 1, 2, 4, 8, 16 and 32 minutes each, and then every hour.
    assert rig.count("repeated") == 3 + 6 + 22
    rig.middleware._app = rig.app
    rig.now_s += 3600
    await rig.ask(KNOWN)
    assert rig.count("replaced") == 1
    await asyncio.gather(*(rig.ask(KNOWN) for _ in range(5)))
    assert rig.count("replaced") == 6


async def test_errors_that_are_the_clients_own_are_no_reason_to_rest(make: Make) -> None:
    rig = await make((400, JSON, [b"x"]))
    for _ in range(5):
        await rig.ask(KNOWN)
    assert rig.count("repeated") == 5
    assert rig.statuses == [400] * 5


@pytest.mark.parametrize(
    ("events", "good"),
    [
        ([ROLE], None),
        ([ROLE, WORD], True),
        ([ERROR], False),
        ([ROLE, ERROR], False),
        ([ERROR.replace(b"500", b"400")], False),
        ([ERROR.replace(b"500", b"503")], True),
        ([ERROR.replace(b"500", b"null")], False),
        ([ERROR.replace(b"500", b"[]")], False),
        ([b'{"error":"words"}'], False),
        ([ROLE, ROLE.replace(b'"index":0', b'"index":1')], None),
        ([ROLE, WORD, ERROR], True),
        ([END], True),
        ([b"words"], True),
        ([b"[1]"], True),
        ([b'{"choices":[]}'], True),
        ([b'{"choices":[{"index":0,"delta":{"role":"assistant","tool_calls":[1]}}]}'], True),
        ([b'{"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}'], True),
        ([b'{"choices":[{"index":0,"delta":{"role":"assistant"},"finish_reason":"stop"}]}'], True),
    ],
)
def test_a_stream_is_certain_with_the_first_word(events: list[bytes], good: bool | None) -> None:
    whole = b"".join(map(event, events))
    assert FirstEvents().take(whole) is good
    reader = FirstEvents()
    found = None
    for number in range(len(whole)):  # whatever the parts are
        found = reader.take(whole[number : number + 1])
        if found is not None:
            break
    assert found is good


def test_a_stream_that_says_nothing_is_not_held_back_for_ever() -> None:
    reader = FirstEvents()
    assert reader.take(b": wait\n\n") is None
    assert reader.take(b":" + b" " * (1 << 20)) is True


async def test_messages_of_an_unknown_kind_keep_their_place() -> None:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    held = HeldBack(send)
    messages: list[Message] = [
        {"type": "http.response.start", "status": 200, "headers": [STREAM]},
        {"type": "http.response.debug"},
        {"type": "http.response.body", "body": event(ROLE)},
    ]
    for one in messages:
        await held(one)
    assert held.is_good  # nothing more comes
    assert sent == messages


# -- start and end ---------------------------------------------------------------------------------


async def test_the_servers_start_opens_the_node_and_its_end_closes_it(
    tier: Tier, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "s3ec")
    rig = Rig(tier, App())
    ending = asyncio.Event()

    async def receive() -> Message:
        await ending.wait()
        return {"type": "lifespan.shutdown"}

    task = asyncio.create_task(rig.middleware({"type": "lifespan"}, receive, None))  # type: ignore[arg-type]
    await until(lambda: "replaces pictures" in caplog.text)
    await rig.ask(KNOWN)
    assert rig.count("replaced") == 1
    ending.set()
    await task
    assert rig.closed.is_set()
    await rig.ask(KNOWN)
    assert rig.app.bodies[1] == KNOWN


@pytest.mark.parametrize("problem", ["a text", ConfigError("a text"), ZeroDivisionError("a text")])
async def test_it_says_once_why_it_is_off_and_everything_passes(
    problem: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "s3ec")
    app = App()
    opened = []

    def fail(state: Any, counters: Counters) -> Node | str:
        opened.append(state)
        if isinstance(problem, Exception):
            raise problem
        return str(problem)

    middleware = SkipPictures(app, open_node=fail)
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def ask() -> None:
        async def receive() -> Message:
            return {"type": "http.request", "body": KNOWN}

        length = (b"content-length", b"%d" % len(KNOWN))
        scope = {"type": "http", "method": "POST", "path": PATH, "headers": [JSON, length]}
        await middleware(scope, receive, send)

    await ask()
    await until(lambda: "SkipPictures is off" in caplog.text)
    await ask()
    assert caplog.text.count("SkipPictures is off") == 1
    assert "a text" in caplog.text
    assert app.bodies == [KNOWN, KNOWN]
    assert len(opened) == 1


def test_an_application_that_is_not_vllms_turns_it_off(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "s3ec")

    async def ask() -> None:
        await SkipPictures(App())({"type": "lifespan"}, asyncio.Event().wait, None)  # type: ignore[arg-type]

    async def start() -> None:
        task = asyncio.create_task(ask())
        await until(lambda: "is off: the application has no vLLM configuration" in caplog.text)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(start())


# -- with the other middleware ---------------------------------------------------------------------


async def test_names_are_stripped_before_pictures_are_replaced(tier: Tier) -> None:
    """vLLM adds each `--middleware` in its turn, and the last one is asked first."""
    applications = pytest.importorskip("starlette.applications")
    httpx = pytest.importorskip("httpx")
    from starlette.requests import Request
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    async def echo(request: Request) -> JSONResponse:
        return JSONResponse(await request.json())

    app = applications.Starlette(routes=[Route(PATH, echo, methods=["POST"])])
    rig = Rig(tier, App())
    made: list[SkipPictures] = []

    def skip(inner: Any) -> SkipPictures:
        made.append(SkipPictures(inner, open_node=lambda _state, _counters: rig.node))
        return made[0]

    for one in (skip, StripClientIds):  # --middleware ...SkipPictures --middleware ...Strip
        app.add_middleware(one)
    stolen = chat(part(url_of(b"one"), uuid=name_of(b"two")), part(url_of(b"two"), uuid="mine"))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:

        async def answer() -> Any:
            return (await client.post(PATH, json=stolen)).json()

        said = await answer()
        while made[0].counters.get("skip.replaced") == 0:
            said = await answer()
    assert said == WITHOUT
