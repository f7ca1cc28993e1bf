# SPDX-License-Identifier: Apache-2.0
"""Reads what obstore's errors say, for the one table in s3_errors.py.

obstore 0.12 tells neither status nor code as data. Its classes merge 409 with 412 and every 404, so
both are read from the text, whose second half is Rust's debug form. There strings are escaped: no
server and no name can forge the lines that are looked for. What is not found there is no answer,
and never absence.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType

from obstore import exceptions as obs

from s3ec.errors import UnavailableError
from s3ec.store.s3_errors import ObstoreFailure, from_obstore, from_url, one_line

_STATUS = re.compile(r"^ *inner: Status \{\n *status: (\d{3}),$", re.MULTILINE)
_ANSWER = re.compile(r'^ *body: Some\(\n *"(.*)",$', re.MULTILINE)
_NO_ANSWER = re.compile(
    r"^ *(?:source: |inner: Http\(\n *)HttpError \{\n *kind: (\w+),$", re.MULTILINE
)
_WRONG_RANGE = re.compile(r"Requested \d+\.\.\d+, got \d+\.\.\d+")
_START_TOO_LARGE = re.compile(r"^ *source: StartTooLarge \{$", re.MULTILINE)
# Where a redirect to another host ends, see ObstoreStore.
_ELSEWHERE = re.compile(r"^ *127\.0\.0\.1:0,$", re.MULTILINE)
_REASON = re.compile(r'^ *(?:message|error): "(.*)",$', re.MULTILINE)
_ERRNO = re.compile(r"^ *code: (\d+),$", re.MULTILINE)
_ESCAPED = re.compile(r"\\(?:u\{[0-9a-f]+\}|.)")
# Rust's panics: in a coroutine, and from a plain call, where it is a BaseException.
_PANICS = frozenset({"RustPanic", "PanicException"})
_ERRORS = (obs.BaseError, OSError, NotImplementedError, ValueError)
_CLASSES: dict[str, tuple[type[Exception], ...]] = {
    "absent": (FileNotFoundError,),
    "taken": (obs.AlreadyExistsError, obs.PreconditionError),
    "denied": (obs.PermissionDeniedError, obs.UnauthenticatedError),
    "unsupported": (ValueError, NotImplementedError, obs.NotSupportedError),
}
_NO_ANSWERS = {
    "Timeout": "timeout",
    "Connect": "no connection",
    "Interrupted": "broken",
    "Request": "broken",
}


def sdk_errors(what: str, operation: str) -> AbstractContextManager[None]:
    """Let no error of obstore out of this block; for a bucket of S3.

    Args:
        what: Begins every message, such as ``GET s3://bucket/name``.
        operation: The SDK's name of what is asked, such as ``GetObject``.

    Raises:
        ClientError: The SDK's, with status, code and message of a server that refused.
        UnavailableError, AccessError: No answer, or none that obstore understands.
    """
    return _Boundary(what, lambda failure: from_obstore(failure, what, operation))


def plain_errors(what: str) -> AbstractContextManager[None]:
    """Let no error of obstore out of this block; for what a ``url`` names.

    Args:
        what: Begins every message, such as ``GET gs://bucket/name``.

    Raises:
        AbsentError, WrongRangeError: Answers, which the store gives its caller in another form.
        ConflictError: The name is taken.
        UnavailableError, AccessError: Anything else.
    """
    return _Boundary(what, lambda failure: from_url(failure, what))


class _Boundary(AbstractContextManager[None]):
    """A class, since there are two around each GET and a generator costs five times as much."""

    __slots__ = ("_translate", "_what")

    def __init__(self, what: str, translate: Callable[[ObstoreFailure], Exception]) -> None:
        self._what = what
        self._translate = translate

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if exc is None:
            return
        if isinstance(exc, TimeoutError):  # a deadline of ours
            raise UnavailableError(f"{self._what}: timed out") from exc
        if isinstance(exc, _ERRORS):
            # Not `from exc`: its text repeats the server's answer, and the one to a wrong
            # signature repeats the request's headers, session token included.
            raise self._translate(failure_of(exc)) from None
        if type(exc).__name__ in _PANICS:
            # The panic's own words went to stderr.
            raise UnavailableError(f"{self._what}: obstore failed inside") from exc


def failure_of(exc: Exception) -> ObstoreFailure:
    """What an error of obstore says."""
    text = str(exc)
    # From the right: the first half holds the server's answer as it came.
    first, _, debug = text.rpartition("\n\nDebug source:\n")
    first = one_line((first or text).partition("Server returned")[0].partition("\n")[0])
    status, body, errno = _STATUS.search(debug), _ANSWER.search(debug), _ERRNO.search(debug)
    reason = _REASON.search(debug)
    return ObstoreFailure(
        said=_said(first, debug),
        by_class=next((said for said, kinds in _CLASSES.items() if isinstance(exc, kinds)), ""),
        text=first,
        reason=one_line(_unescaped(reason[1])) if reason else "",
        status=int(status[1]) if status else None,
        error=_elements(_unescaped(body[1])) if body else {},
        errno=int(errno[1]) if errno and not status else None,
        debug=debug,
    )


def _said(first: str, debug: str) -> str:
    if _START_TOO_LARGE.search(debug):
        return "start too large"
    if found := _NO_ANSWER.search(debug):
        if "CaUsedAsEndEntity" in debug:
            return "authority"
        if "InvalidCertificate" in debug:
            return "not trusted"
        if "TooManyRedirects" in debug or _ELSEWHERE.search(debug):
            return "redirected"
        return _NO_ANSWERS.get(found[1], "unreadable")
    if "redirect without LOCATION" in first:
        return "moved"
    if "ETag Header missing" in first:
        return "no etag"
    return "wrong range" if _WRONG_RANGE.search(first) else ""


def _elements(body: str) -> dict[str, str]:
    """Of an XML answer these elements are used, and no other."""
    found = {}
    for name in ("Code", "Message", "Region", "ServerTime"):
        if element := re.search(f"<{name}>([^<]*)</{name}>", body):
            found[name] = html.unescape(element[1])
    return found


def _unescaped(text: str) -> str:
    return _ESCAPED.sub(_unescape, text)


def _unescape(found: re.Match[str]) -> str:
    """Undo an escape of Rust's debug form; control characters become spaces."""
    escape = found[0][1:]
    if escape.startswith("u{"):
        return chr(int(escape[2:-1], 16))
    return " " if escape in ("n", "r", "t", "0") else escape
