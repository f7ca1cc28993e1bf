# SPDX-License-Identifier: Apache-2.0
"""obstore's errors about a corpus outside S3, as errors of s3ec.

obstore's classes say what S3 says by codes; only what they merge is read from the text, see
obstore_errors.
"""

from __future__ import annotations

import contextlib
import errno
import re
from collections.abc import Iterator

from obstore import exceptions as obs

from s3ec.errors import AccessError, ConflictError, S3ECError, UnavailableError
from s3ec.store.obstore_errors import (
    BrokenConnectionError,
    Fault,
    fault_of,
    is_panic,
)

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
        raise _translate(exc, what) from None
    except BaseException as exc:
        if not is_panic(exc):
            raise
        raise UnavailableError(f"{what}: obstore failed inside") from exc


def _translate(exc: Exception, what: str) -> S3ECError:
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
    return _no_answer(exc, fault, what)


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


def _no_answer(exc: Exception, fault: Fault, what: str) -> S3ECError:
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
