# SPDX-License-Identifier: Apache-2.0
"""obstore's errors in the words of the SDK, so that both transports map to the same errors.

obstore 0.12 tells neither status nor code as data: its classes merge 409 with 412 and every 404,
so both are read from the text, whose second half is Rust's debug form. There strings are escaped:
no server and no name can forge the lines looked for. What is not found there is no answer, and
never absence. Outside S3 obstore's classes say what S3 says by codes; only what they merge is read
from the text.
"""

from __future__ import annotations

import contextlib
import errno
import html
import re
from collections.abc import Iterator
from dataclasses import dataclass

from botocore.exceptions import ClientError
from obstore import exceptions as obs
from obstore.exceptions import BaseError

from s3ec.errors import AccessError, ConflictError, S3ECError, UnavailableError
from s3ec.store.s3_errors import not_trusted

_START_TOO_LARGE = re.compile(r"^ *source: StartTooLarge \{$", re.MULTILINE)
_ERRNO = re.compile(r"^ *code: (\d+),$", re.MULTILINE)
_REFUSED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG, errno.EISDIR})
_ABSENT = frozenset({errno.ENOENT, errno.ENOTDIR})


class AbsentError(AccessError):
    """There is no such object; where none was asked for, no such bucket."""


class WrongRangeError(UnavailableError):
    """The object ends before the range begins."""


@contextlib.contextmanager
def plain_errors(what: str) -> Iterator[None]:
    """Let no error of obstore out of this block.

    Args:
        what: Begins every message, such as ``GET gs://bucket/name``.

    Raises:
        AbsentError, WrongRangeError: Answers, which the store gives its caller in another form.
        ConflictError: The name is taken.
        UnavailableError, AccessError: Anything else.
    """
    try:
        yield
    except StopAsyncIteration:
        raise
    except TimeoutError as exc:  # the deadline of the turn
        raise UnavailableError(f"{what}: timed out") from exc
    except (obs.BaseError, OSError, NotImplementedError, ValueError) as exc:
        # Not `from exc`: its text repeats what the server said, and that perhaps the request.
        raise _translate_url(exc, what) from None
    except BaseException as exc:
        if not is_panic(exc):
            raise
        raise UnavailableError(f"{what}: obstore failed inside") from exc


def _translate_url(exc: Exception, what: str) -> S3ECError:
    fault = fault_of(str(exc))
    found = _ERRNO.search(fault.debug) if fault.status is None else None
    number = int(found[1]) if found else None
    if isinstance(exc, FileNotFoundError) or number in _ABSENT:
        return AbsentError(f"{what}: there is no such thing; correct `url`", code="NotFound")
    if isinstance(exc, (obs.AlreadyExistsError, obs.PreconditionError)):
        return ConflictError(f"{what}: it is there already")
    if fault.status == 416 or _START_TOO_LARGE.search(fault.debug):
        return WrongRangeError(f"{what}: the object ends before that range")
    if isinstance(exc, (obs.PermissionDeniedError, obs.UnauthenticatedError)):
        return _denied(fault, what)
    if number is not None:
        said = f"{what}: {errno.errorcode.get(number, number)} ({fault.said})"
        if number in _REFUSED:
            return AccessError(
                f"{said}; give this user the right to do that",
                code=errno.errorcode[number],
                is_general=False,
            )
        return UnavailableError(said)
    if fault.status is not None:
        return _from_status(fault, what)
    return _no_answer_of_url(exc, fault, what)


def _denied(fault: Fault, what: str) -> AccessError:
    status = f" ({fault.status})" if fault.status else ""
    return AccessError(
        f"{what}: refused{status}; allow these credentials to read, list and create objects here",
        code=str(fault.status or "PermissionDenied"),
        is_general=fault.status == 401,
    )


def _from_status(fault: Fault, what: str) -> S3ECError:
    status = fault.status or 0
    if status in (401, 403):
        return _denied(fault, what)
    if status in (408, 409, 425, 429) or status >= 500:
        return UnavailableError(
            f"{what}: {status}", status=status, is_throttle=status in (429, 503)
        )
    return AccessError(f"{what}: {status}; correct `url`", code=str(status))


def _no_answer_of_url(exc: Exception, fault: Fault, what: str) -> S3ECError:
    if "InvalidCertificate" in fault.debug:
        return AccessError(
            f"{what}: the server's certificate is not trusted; name its authority in `ca_bundle`",
            code="CertificateNotTrusted",
        )
    if fault.kind in ("Interrupted", "Request"):
        return BrokenConnectionError(f"{what}: the connection broke")
    if fault.kind is not None:
        return UnavailableError(f"{what}: no answer ({fault.kind.lower()})")
    if isinstance(exc, (ValueError, NotImplementedError, obs.NotSupportedError)):
        return AccessError(
            f"{what}: {fault.said}; obstore cannot do that", code="NotSupported", is_general=False
        )
    return UnavailableError(f"{what}: {fault.said or 'obstore failed without a reason'}")


_STATUS = re.compile(r"^ *inner: Status \{\n *status: (\d{3}),$", re.MULTILINE)
_ANSWER = re.compile(r'^ *body: Some\(\n *"(.*)",$', re.MULTILINE)
_NO_ANSWER = re.compile(
    r"^ *(?:source: |inner: Http\(\n *)HttpError \{\n *kind: (\w+),$", re.MULTILINE
)
_WRONG_RANGE = re.compile(r"Requested \d+\.\.\d+, got \d+\.\.\d+")
# Where a redirect to another host ends, see ObstoreStore.
_ELSEWHERE = re.compile(r"^ *127\.0\.0\.1:0,$", re.MULTILINE)
_REASON = re.compile(r'^ *(?:message|error): "(.*)",$', re.MULTILINE)
_ESCAPED = re.compile(r"\\(?:u\{[0-9a-f]+\}|.)")
# Rust's panics: in a coroutine, and from a plain call, where it is a BaseException.
_PANICS = frozenset({"RustPanic", "PanicException"})


class BrokenConnectionError(UnavailableError):
    """The connection ended before the reply did."""


class AskAgainError(UnavailableError):
    """obstore cannot read the reply, or we cannot read obstore's words: the SDK may do better."""


class UnfitError(AskAgainError):
    """obstore refuses this server whatever is asked, and the SDK does not."""


@contextlib.contextmanager
def sdk_errors(what: str, operation: str) -> Iterator[None]:
    """Let no error of obstore out of this block.

    Args:
        what: Begins every message, such as ``GET s3://bucket/name``.
        operation: The SDK's name of what is asked, such as ``GetObject``.

    Raises:
        ClientError: The SDK's, with status, code and message of a server that refused.
        UnavailableError, AccessError: No answer, or none that obstore understands.
    """
    try:
        yield
    except (BaseError, OSError, NotImplementedError, ValueError) as exc:
        # Not `from exc`: its text repeats the server's answer, and the one to a wrong signature
        # repeats the request's headers, session token included.
        raise _translate(str(exc), what, operation) from None
    except BaseException as exc:
        if not is_panic(exc):
            raise
        # The panic's own words went to stderr.
        raise UnavailableError(f"{what}: obstore failed inside") from exc


def is_panic(exc: BaseException) -> bool:
    """Whether Rust panicked inside of obstore."""
    return type(exc).__name__ in _PANICS


@dataclass(frozen=True, slots=True)
class Fault:
    """What the text of an error says.

    Attributes:
        said: The reason, up to where a server's words could begin.
        status: HTTP status of a server that refused, None where none answered.
        kind: Rust's word for why there is no answer, None where there is one.
        debug: Rust's debug form, whose strings are escaped.
    """

    said: str
    status: int | None
    kind: str | None
    debug: str


def fault_of(text: str) -> Fault:
    """Read the text of an error of obstore."""
    # From the right: the first half holds the server's answer as it came.
    said, _, debug = text.rpartition("\n\nDebug source:\n")
    status, kind = _STATUS.search(debug), _NO_ANSWER.search(debug)
    return Fault(
        said=_printable((said or text).partition("Server returned")[0].partition("\n")[0]),
        status=int(status[1]) if status else None,
        kind=kind[1] if kind else None,
        debug=debug,
    )


def _translate(text: str, what: str, operation: str) -> ClientError | S3ECError:
    fault = fault_of(text)
    if fault.status is not None:
        body = _ANSWER.search(fault.debug)
        words = _ESCAPED.sub(_unescape, body[1]) if body else ""
        return _answer(fault.status, words, operation)
    if fault.kind is not None:
        return _no_answer(fault.kind, fault.debug, what, operation)
    reason = fault.said
    if "redirect without LOCATION" in reason:
        return _answer(301, "<Code>PermanentRedirect</Code>", operation)
    if "ETag Header missing" in reason:
        return UnavailableError(f"{what}: the answer is not an S3 server's")
    if _WRONG_RANGE.search(reason):
        return UnavailableError(f"{what}: the answer holds another range ({reason})")
    # The whole object where a range was asked for, a body in chunks, a range "of *"; or the text
    # of a release that words the above differently.
    return AskAgainError(f"{what}: {reason or 'obstore failed without a reason'}")


def _answer(status: int, body: str, operation: str) -> ClientError:
    """What botocore makes of such an answer; these elements of the XML are used, and no other."""
    error = {}
    for name in ("Code", "Message", "Region", "ServerTime"):
        if found := re.search(f"<{name}>([^<]*)</{name}>", body):
            error[name] = html.unescape(found[1])
    response = {
        # botocore's way with a page that is not XML, or none.
        "Error": {"Code": str(status), "Message": "", **error},
        "ResponseMetadata": {"HTTPStatusCode": status, "HTTPHeaders": {}},
    }
    return ClientError(response, operation)


def _no_answer(kind: str, debug: str, what: str, operation: str) -> ClientError | S3ECError:
    if "CaUsedAsEndEntity" in debug:
        return UnfitError(f"{what}: a server's certificate may not be an authority's as well")
    if "InvalidCertificate" in debug:
        return not_trusted(what, debug)
    if "TooManyRedirects" in debug or _ELSEWHERE.search(debug):
        return _answer(307, "<Code>TooManyRedirects</Code>", operation)
    if kind == "Timeout":
        return UnavailableError(f"{what}: timed out")
    reason = _REASON.search(debug)
    why = f" ({_printable(_ESCAPED.sub(_unescape, reason[1]))})" if reason else ""
    if kind == "Connect":
        return UnavailableError(f"{what}: cannot connect{why}")
    if kind in ("Interrupted", "Request"):
        return BrokenConnectionError(f"{what}: the connection broke{why}")
    return UnavailableError(f"{what}: the answer is not HTTP or cannot be read{why}")


def _unescape(found: re.Match[str]) -> str:
    """Undo an escape of Rust's debug form; control characters become spaces."""
    escape = found[0][1:]
    if escape.startswith("u{"):
        return chr(int(escape[2:-1], 16))
    return " " if escape in ("n", "r", "t", "0") else escape


def _printable(text: str) -> str:
    return "".join(c for c in " ".join(text.split()) if c.isprintable())[:200]
