# SPDX-License-Identifier: Apache-2.0
"""Chats about documents of a corpus: without pixels if possible, else once more with them.

vLLM refuses a request that has pixels for some items of a modality and none for others, so a
request has pixels for all of them or for none.

An OpenAI client gets these errors from vLLM 0.32: status 400 if the model or the server does not
accept such parts, and status 500 if the embedding is not available, after about 10 s at most. In a
stream the latter is an error after a chunk without text.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cachetools import TTLCache

from s3ec.client.known import REFRESH_S, KnownCatalog, Source
from s3ec.client.parts import Fetch, Message, Part, PartMaker, modalities_with_pixels, references
from s3ec.errors import S3ECError
from s3ec.trial import Trial

log = logging.getLogger(__name__)

# How long an embedding is sent with pixels after a server could not get it, or did not accept a
# part without pixels: each try without them may take the server 10 s.
_REST_S = 60.0
_MOST_RESTING = 2**16
_REFUSED, _UNAVAILABLE = 400, 500
# Statuses after which the openai package itself retries; 0 stands for no response.
_TRANSIENT = (0, 408, 409, 429, 502, 503, 504)


class _Pictures:
    """The parts that both kinds share."""

    def __init__(
        self,
        catalog: Source,
        *,
        without_pixels: bool | None = None,
        modalities: Collection[str] = ("image",),
        fetch: Fetch | None = None,
        refresh_s: float = REFRESH_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Read nothing yet.

        Args:
            catalog: ``corpus.catalog()``, or the path of an exported one, Parquet.
            without_pixels: True if the server accepts parts without pixels, False if not; None to
                find out.
            modalities: Modalities that may go without pixels. Not every model gives the same
                result for a video: see docs/without-pixels.md.
            fetch: Reads the bytes that the encoder was given, for a row of the catalogue.
            refresh_s: An older catalogue is read again, in the background.
            clock: Monotonic seconds.

        Raises:
            ConfigError: An argument is wrong, or pyarrow is missing.
        """
        self._known = KnownCatalog(catalog, refresh_s, clock)
        allowed = () if without_pixels is False else modalities
        self._maker = PartMaker(self._known, allowed, fetch)
        self._requests = _Requests(self._maker, without_pixels, clock)


class Pictures(_Pictures):
    """Parts of a chat about documents that a corpus holds. Thread-safe.

    **Documents** have the names of the catalogue: the path relative to the source, or the id that a
    list gave. Each part has the ``uuid`` under which the corpus holds its embedding.

    **Pixels** are read only if they are needed: from ``uri`` of the catalogue's row, or by
    ``fetch``. Their sha256 must match the row's, because otherwise another picture would get the
    uuid. An ``http`` or ``https`` address of the catalogue is not used, because a catalogue may
    come from others: ``fetch`` may read it. An address that the caller gives as ``url`` is passed
    to the server without the uuid, so the server names what it reads. An ``s3`` object is read with
    the credentials and the endpoint of the corpus whose catalogue was given; with an exported
    catalogue it is not read.

    **Servers that accept no parts without pixels** are recognized by their answers: such a request
    is sent once more with pixels. After three such answers in a row all requests for that model
    have pixels for a minute. Then one request is tried without them; each failure doubles the time,
    up to an hour.
    """

    def parts(
        self,
        document: str,
        page: int | None = None,
        *,
        data: bytes | None = None,
        url: str | None = None,
        modality: str = "image",
    ) -> list[Part]:
        """Return the content parts of one document: one for each page, or for the given page.

        Blocks while it reads the catalogue: at the first call, and for a document that is not in
        it.

        Args:
            document: Its id in the catalogue.
            page: From 1; None for all pages.
            data: The file's bytes. They decide, whatever the catalogue says of ``document``: if it
                has this file, its entry is used, else the part has the bytes.
            url: The server's address of the file, for a document that may be missing in the
                catalogue. Among files of one name in several places, it also selects one.
            modality: Modality of ``data`` or ``url``.

        Raises:
            NotFoundError: The catalogue has no such document or page, and neither ``data`` nor
                ``url`` is given.
            AmbiguousError: Files of that name are in several places, and ``url`` is none of them.
            SourceError: Pixels are needed and cannot be read.
            S3ECError: The catalogue cannot be read.
        """
        return self._maker.parts(document, page, data=data, url=url, modality=modality)

    def chat(self, client: Any, *, model: str, messages: Sequence[Message], **options: Any) -> Any:
        """Send a chat without pixels if possible, and once more with them if that fails.

        Args:
            client: An ``openai.OpenAI``, or an object with the same ``chat.completions.create``.
            model: The server's name of the model.
            messages: Messages whose contents have parts of ``parts``.
            options: Options of ``create``.

        Returns:
            The result of ``create``; for a stream an iterator over its chunks.

        Raises:
            BaseException: Any error of ``create``. It has a note if pixels were needed and could
                not be read.
        """
        request = self._requests.first(client, model, messages)
        ask = _asker(model, options)
        if not request.references:
            return ask(client, request.messages)

        def again(exc: Exception) -> Any:
            reply = ask(client, self._requests.after(request, exc, client))
            self._requests.learn(request, exc)
            return reply

        try:
            reply = ask(_without_retries(client), request.messages)
        except Exception as exc:  # noqa: BLE001 - a client's error of any class; again() raises it
            return again(exc)
        good = functools.partial(self._requests.succeeded, request)
        if options.get("stream"):
            return _stream(reply, again, good)
        good()
        return reply

    def refresh(self) -> None:
        """Read the catalogue now.

        Raises:
            S3ECError: It cannot be read.
        """
        self._known.read_again()

    def close(self) -> None:
        """End the thread that refreshes the catalogue."""
        self._known.close()

    def __enter__(self) -> Pictures:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncPictures(_Pictures):
    """``Pictures`` for an ``openai.AsyncOpenAI``: a thread reads files and buckets.

    ``fetch`` is a plain function, called in a thread.
    """

    async def parts(
        self,
        document: str,
        page: int | None = None,
        *,
        data: bytes | None = None,
        url: str | None = None,
        modality: str = "image",
    ) -> list[Part]:
        """As Pictures.parts."""
        return await asyncio.to_thread(
            self._maker.parts, document, page, data=data, url=url, modality=modality
        )

    async def chat(
        self, client: Any, *, model: str, messages: Sequence[Message], **options: Any
    ) -> Any:
        """As Pictures.chat; for a stream it returns an asynchronous iterator."""
        requests = self._requests
        request = await asyncio.to_thread(requests.first, client, model, messages)
        ask = _asker(model, options)
        if not request.references:
            return await ask(client, request.messages)

        async def again(exc: Exception) -> Any:
            changed = await asyncio.to_thread(requests.after, request, exc, client)
            reply = await ask(client, changed)
            requests.learn(request, exc)
            return reply

        try:
            reply = await ask(_without_retries(client), request.messages)
        except Exception as exc:  # noqa: BLE001 - a client's error of any class; again() raises it
            return await again(exc)
        good = functools.partial(requests.succeeded, request)
        if options.get("stream"):
            return _async_stream(reply, again, good)
        good()
        return reply

    async def refresh(self) -> None:
        """As Pictures.refresh."""
        await asyncio.to_thread(self._known.read_again)

    async def close(self) -> None:
        """As Pictures.close."""
        await asyncio.to_thread(self._known.close)

    async def __aenter__(self) -> AsyncPictures:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


# -- requests --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Request:
    """The request that is sent first.

    Attributes:
        where: Server and model.
        messages: The messages to send.
        references: Identifier of each part without pixels -> its modality; empty if there is none.
    """

    where: tuple[str, str]
    messages: Sequence[Message]
    references: Mapping[str, str]


class _Requests:
    """Decides which requests go without pixels, and what follows an error. Thread-safe."""

    def __init__(
        self,
        maker: PartMaker,
        without_pixels: bool | None,
        clock: Callable[[], float],
    ) -> None:
        self._maker = maker
        self._without_pixels = without_pixels
        self._clock = clock
        self._lock = threading.Lock()
        self._trials: dict[tuple[str, str], Trial] = {}
        self._resting: TTLCache[str, None] = TTLCache(_MOST_RESTING, _REST_S, clock)

    def first(self, client: Any, model: str, messages: Sequence[Message]) -> _Request:
        """Make the request to send first; reads pixels if it needs them.

        Raises:
            S3ECError: The pixels cannot be read.
        """
        where = (str(getattr(client, "base_url", "")), model)
        request = _Request(where, messages, references(messages))
        if not request.references or self._goes_without(request):
            return request
        return _Request(where, self._maker.with_pixels(messages), {})

    def _goes_without(self, request: _Request) -> bool:
        if not modalities_with_pixels(request.messages).isdisjoint(request.references.values()):
            return False
        with self._lock:
            trial = self._trial(request)
            if self._without_pixels is False or trial.rests:
                return False
            if any(uuid in self._resting for uuid in request.references):
                return False
            trial.begin(request)
            return True

    def _trial(self, request: _Request) -> Trial:
        """The trial of the server and model; under the lock. With ``without_pixels`` none rests."""
        return self._trials.setdefault(request.where, Trial(self._clock))

    def after(self, request: _Request, exc: Exception, client: Any) -> Sequence[Message]:
        """The messages that follow an error: with pixels, or as they were if the server was busy.

        Raises:
            Exception: ``exc``, if a retry is useless.
        """
        status = _status_of(exc)
        if status in _TRANSIENT and int(getattr(client, "max_retries", 0)) > 0:
            return request.messages
        if status not in (_REFUSED, _UNAVAILABLE):
            raise exc
        try:
            return self._maker.with_pixels(request.messages)
        except S3ECError as problem:
            exc.add_note(f"s3ec did not send it again with pixels: {problem}")
            raise exc from None

    def learn(self, request: _Request, exc: Exception) -> None:
        """Note that the same request succeeded with pixels: their absence caused the error."""
        if _status_of(exc) not in (_REFUSED, _UNAVAILABLE):
            return
        count = len(request.references)
        log.info("a request without %d pictures' pixels was sent again with them: %s", count, exc)
        with self._lock:
            self._resting.update(dict.fromkeys(request.references))
            rest_s = 0.0 if self._without_pixels else self._trial(request).failed(request)
        if rest_s:
            log.warning(
                "requests to %s were answered only with pixels; all have them for %.0f s: %s",
                *(request.where[1], rest_s, exc),
            )

    def succeeded(self, request: _Request) -> None:
        """Note that a request succeeded without pixels."""
        with self._lock:
            self._trial(request).succeeded()


_Ask = Callable[[Any, Sequence[Message]], Any]


def _asker(model: str, options: Mapping[str, Any]) -> _Ask:
    return lambda client, messages: client.chat.completions.create(
        model=model, messages=messages, **options
    )


def _without_retries(client: Any) -> Any:
    """The same client for one try: openai's tries three times after status 500, 10 s each."""
    with_options = getattr(client, "with_options", None)
    return client if with_options is None else with_options(max_retries=0)


def _status_of(exc: Exception) -> int:
    """HTTP status of an error response, also of one inside a stream; 0 if there was none."""
    status = getattr(exc, "status_code", None)
    body = getattr(exc, "body", None)
    if status is None and isinstance(body, Mapping):
        status = body.get("code")
    return status if isinstance(status, int) else 0


# -- streams ---------------------------------------------------------------------------------------


def _says_nothing_yet(chunk: Any) -> bool:
    """True if a chunk only opens the answer, as vLLM's first chunk of each choice does."""
    choices = getattr(chunk, "choices", None) or ()
    return bool(choices) and all(
        choice.delta.role and not choice.delta.content and not choice.finish_reason
        for choice in choices
    )


def _stream(
    first: Any, again: Callable[[Exception], Any], good: Callable[[], None]
) -> Iterator[Any]:
    """Yield a stream's chunks; if it fails before any text, those of a second request."""
    stream: Any = first
    held: list[Any] = []
    try:
        chunks = iter(stream)
        try:
            for chunk in chunks:
                held.append(chunk)
                if not _says_nothing_yet(chunk):
                    break
            good()
        except Exception as exc:  # noqa: BLE001 - a client's error of any class; again() raises it
            stream.close()
            held.clear()
            stream = again(exc)
            chunks = iter(stream)
        yield from held
        yield from chunks
    finally:
        stream.close()


async def _async_stream(
    first: Any, again: Callable[[Exception], Any], good: Callable[[], None]
) -> AsyncIterator[Any]:
    """As _stream."""
    stream: Any = first
    held: list[Any] = []
    try:
        chunks = aiter(stream)
        try:
            async for chunk in chunks:
                held.append(chunk)
                if not _says_nothing_yet(chunk):
                    break
            good()
        except Exception as exc:  # noqa: BLE001 - as in _stream
            await stream.close()
            held.clear()
            stream = await again(exc)
            chunks = aiter(stream)
        for chunk in held:
            yield chunk
        async for chunk in chunks:
            yield chunk
    finally:
        await stream.close()
