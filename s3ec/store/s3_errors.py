# SPDX-License-Identifier: Apache-2.0
"""The one table from the errors of botocore and aiobotocore to those of s3ec.

The HTTP status is mapped first, because HEAD replies carry no error code and servers spell codes
differently. obstore's errors are only types; where a type is not enough, botocore makes the same
request, see s3.py. Checked against botocore 1.40 and 1.44, and aiobotocore 2.25.
"""

from __future__ import annotations

import contextlib
import re
import ssl
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar
from urllib.parse import urlsplit

from botocore import exceptions as sdk
from botocore.parsers import ResponseParserError
from urllib3.util.ssl_match_hostname import CertificateError

from s3ec.errors import AccessError, ConflictError, S3ECError, UnavailableError, causes_of

# A server's number is an input like any other.
_LONGEST_S = 86400.0


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Seconds that a server asks its clients to wait, 0 to a day; None if it does not ask.

    Args:
        headers: Of the response, names in lower case. A date in ``retry-after`` is not read.
    """
    said = headers.get("retry-after", "").strip()
    return min(float(said[:9]), _LONGEST_S) if said.isascii() and said.isdigit() else None


# Everything the SDK raises. OSError includes TimeoutError, refused connections and ssl.SSLError.
SDK_ERRORS = (
    sdk.BotoCoreError,
    sdk.ClientError,
    ResponseParserError,
    OSError,
)
# Errors of the SDK's parsers for a response that no S3 server sends: a number or a date is invalid,
# or a field is missing. The code that reads the parsed response raises them too.
_UNREADABLE = (ValueError, KeyError, TypeError, OverflowError, RuntimeError)
_OPERATIONS = frozenset({
    "GetObject", "PutObject", "CopyObject", "HeadObject", "DeleteObject", "DeleteObjects",
    "ListObjectsV2", "HeadBucket"
})  # fmt: skip
# Statuses that mean "later", as all from 500 up do. The second set means "too many requests".
_LATER = frozenset({408, 409, 420, 423, 425, 429, 499})
_THROTTLES = frozenset({420, 429, 503})
# "404" is how botocore spells a status without a code: a HEAD reply, or a page that is not XML.
_ABSENT_CODES = frozenset({"NoSuchKey", "404", "NotFound"})
# Codes that may come with 400 or 403 as well. "Too many requests":
_THROTTLE_CODE = re.compile("Throttl|SlowDown|TooManyRequests|Limit.*Exceeded|PriorRequestNot")
# "Later", or the fault is in this transfer, not in the request:
_LATER_CODES = frozenset({
    "BadDigest", "IncompleteBody", "InternalError", "RequestTimeout", "ServiceUnavailable",
    "XAmzContentChecksumMismatch", "XAmzContentSHA256Mismatch", "XMinioServerNotInitialized"
})  # fmt: skip
# The status that the code of one object, in a response about many, would have by itself.
_STATUS_OF_CODE = {
    "AccessDenied": 403,
    "InternalError": 500,
    "NoSuchKey": 404,
    "NotImplemented": 501,
    "OperationAborted": 409,
    "ServiceUnavailable": 503,
    "SlowDown": 503,
}
# Refusals that other credentials may end.
_CREDENTIAL_CODES = frozenset({
    "ExpiredToken", "ExpiredTokenException", "InvalidAccessKeyId", "InvalidSecurity",
    "InvalidToken", "SignatureDoesNotMatch", "TokenRefreshRequired"
})  # fmt: skip
# Refusals of the caller, whatever the request; a status below 400 is one as well.
_GENERAL_CODES = _CREDENTIAL_CODES | {
    "404", "407", "AccountProblem", "AllAccessDisabled", "AuthorizationHeaderMalformed",
    "NoSuchBucket", "NotSignedUp", "RequestExpired", "RequestTimeTooSkewed"
}  # fmt: skip
_NO_CREDENTIALS = (
    sdk.NoCredentialsError,
    sdk.PartialCredentialsError,
    sdk.CredentialRetrievalError,
    sdk.NoAuthTokenError,
    sdk.TokenRetrievalError,
    sdk.SSOError,
    sdk.InvalidConfigError,
    sdk.RefreshWithMFAUnsupportedError,
)
_TRANSPORT = (
    sdk.HTTPClientError,
    sdk.ConnectionError,
    sdk.IncompleteReadError,
    sdk.MetadataRetrievalError,
    ResponseParserError,
    OSError,
)
_TOO_SLOW = (TimeoutError, sdk.ReadTimeoutError, sdk.ConnectTimeoutError)
_CREDENTIALS_FIX = (
    "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or `profile`, or give this machine a role"
)
_FIXES = {
    "NoSuchBucket": "create the bucket or correct `bucket` and `endpoint_url`",
    "InvalidAccessKeyId": "the endpoint does not know these credentials",
    "SignatureDoesNotMatch": "the secret key is wrong for this endpoint",
    "ExpiredToken": "renew the credentials",
    "ExpiredTokenException": "renew the credentials",
    "InvalidToken": "renew the credentials",
    "TokenRefreshRequired": "renew the credentials",
    "RequestTimeTooSkewed": "set this machine's clock",
    "KeyTooLongError": "shorten `prefix`",
    "407": "give the proxy's user name and password in its variable, http://USER:PASSWORD@HOST:PORT",
    "404": "nothing here answers as a bucket, correct `endpoint_url` or `bucket`",
    "NotImplemented": "the server lacks a feature that the request asked for",
}
# http.client tells the status of a proxy's refusal in no other way.
_WANTS_CREDENTIALS = re.compile(r"\b407\b")
_EXPIRED, _OTHER_HOST, _OTHER_ADDRESS = 10, 62, 64
_REDIRECT_FIX = "the endpoint redirects, correct `endpoint_url` or `region`"
# What a server's code and region may be; S3's own are shorter.
_CODE_CHARACTERS = 64
_REGION = re.compile(r"[a-z0-9-]{1,64}")
# Secrets of a request that a server may repeat: parts of a presigned URL, an access key.
_SIGNED = re.compile(r"(?i)\b(x-amz-[a-z-]+|signature|sig|awsaccesskeyid|token)=[^&\s\"'<>]*")
_ACCESS_KEY = re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{8,}")
# User name and password in a URL.
_USER = re.compile(r"(?<=://)[^/@\s]+@")
_READ = "s3:GetObject, and s3:ListBucket without which S3 answers 403 for an absent object too"
# The permission that an operation needs, for the message of its denial.
_ACTIONS = {
    "GetObject": _READ,
    "HeadObject": _READ,
    "PutObject": "s3:PutObject",
    "CopyObject": "s3:PutObject here and s3:GetObject there",
    "DeleteObject": "s3:DeleteObject",
    "DeleteObjects": "s3:DeleteObject",
    "ListObjectsV2": "s3:ListBucket",
}


E = TypeVar("E", bound=BaseException)


@contextlib.contextmanager
def boundary(
    what: str, region: Callable[[], str], by: Callable[[], str] = lambda: ""
) -> Iterator[None]:
    """Let no SDK error out of this block.

    Args:
        what: The request, such as ``GET s3://bucket/name``; begins every message.
        region: Returns the region that was signed for; called only after a failure.
        by: Returns the proxy that the request passed, as ``Way.by``; likewise.

    Raises:
        UnavailableError, AccessError, ConflictError: Instead of the SDK's error.
    """
    try:
        yield
    except SDK_ERRORS as exc:
        # Tracebacks show the SDK's own text as well.
        exc.args = tuple(_scrubbed(arg) if isinstance(arg, str) else arg for arg in exc.args)
        error = error_of(exc, what + by(), region())
        if isinstance(exc, sdk.ProxyConnectionError):
            # aiohttp's own error repeats the proxy's URL, password included.
            exc.__cause__ = exc.__context__ = None
        raise error from exc


@contextlib.contextmanager
def reading_answer() -> Iterator[None]:
    """Wrap the SDK's own call, or code that reads its response, inside a boundary.

    Nothing else may be in this block: a fault of ours would be reported as the server's.

    Raises:
        ResponseParserError: The SDK's, instead of any error that an unreadable response caused.
    """
    try:
        yield
    except (S3ECError, *SDK_ERRORS):
        raise  # a certificate that is not trusted is a ValueError too
    except _UNREADABLE as exc:
        raise ResponseParserError("the answer is not an S3 server's") from exc


def is_absent(exc: sdk.ClientError) -> bool:
    """True if the server says that this object does not exist (not: this bucket)."""
    return status_of(exc) == 404 and code_of(exc) in _ABSENT_CODES


def others_may_help(exc: sdk.ClientError) -> bool:
    """True if other credentials may end this refusal; the refusal of a HEAD has no code."""
    code = code_of(exc)
    return code in _CREDENTIAL_CODES or (
        exc.operation_name == "HeadObject" and code in ("400", "403")
    )


def status_of(exc: sdk.ClientError) -> int:
    """HTTP status of a response, 0 if unknown."""
    return int(exc.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def code_of(exc: sdk.ClientError) -> str:
    """The server's error code, a short word for logs; the status as digits if there is none."""
    # An error body that is XML without a <Code> leaves None or an empty string here.
    code = one_line(exc.response.get("Error", {}).get("Code") or "")[:_CODE_CHARACTERS]
    return code or str(status_of(exc))


def error_of_key(entry: Any, what: str, region: str) -> S3ECError | None:
    """The error of one object in a response to DeleteObjects; None if the object is absent.

    Args:
        entry: The SDK's, with ``Code`` and ``Message``.
    """
    code = str(entry.get("Code") or "")
    response = {
        "Error": entry,
        "ResponseMetadata": {"HTTPStatusCode": _STATUS_OF_CODE.get(code, 400)},
    }
    exc = sdk.ClientError(response, "DeleteObjects")
    return None if is_absent(exc) else _from_answer(exc, what, region)


def error_of(exc: Exception, what: str, region: str) -> S3ECError:
    """Map an error of the SDK to the one that ``boundary`` raises."""
    if isinstance(exc, sdk.ClientError):
        return _from_answer(exc, what, region)
    if isinstance(exc, _NO_CREDENTIALS):
        return AccessError(
            f"{what}: no usable credentials ({exc}); {_CREDENTIALS_FIX}", code=type(exc).__name__
        )
    if unproven := [c for c in causes_of(exc) if isinstance(c, ssl.SSLCertVerificationError)]:
        # The number is OpenSSL's own error's; aiohttp's is of this type too and has none.
        return _not_trusted(what, getattr(unproven[-1], "verify_code", 0))
    if _caused_by(exc, CertificateError):
        return _not_trusted(what, _OTHER_HOST)
    if isinstance(exc, sdk.ProxyConnectionError):
        return _from_proxy(exc, what)
    if isinstance(exc, _TOO_SLOW):
        return UnavailableError(f"{what}: timed out")
    if isinstance(exc, _TRANSPORT):
        return UnavailableError(f"{what}: {_no_answer(exc)}")
    # The rest are botocore's own refusals: parameters, endpoint rules, region names.
    return AccessError(f"{what}: {one_line(exc)}", code=type(exc).__name__)


def _from_answer(exc: sdk.ClientError, what: str, region: str) -> S3ECError:
    status, code = status_of(exc), code_of(exc)
    # STS or SSO: a 404 or 412 of theirs says nothing about an object.
    is_credential_service = exc.operation_name not in _OPERATIONS
    if is_credential_service:
        what = f"{what}: {exc.operation_name} for the credentials"
    message = one_line(exc.response.get("Error", {}).get("Message") or "")
    said = (
        f"{what}: {status}" + f" {code}" * (code != str(status)) + f" ({message})" * bool(message)
    )
    if status == 412 and not is_credential_service:
        return ConflictError(said)
    if status == 501 and not is_credential_service:
        return AccessError(f"{said}; {_FIXES['NotImplemented']}", code=code, is_general=False)
    is_throttle = status in _THROTTLES or _THROTTLE_CODE.search(code) is not None
    if status < 300 or status in _LATER or status >= 500 or is_throttle or code in _LATER_CODES:
        headers = exc.response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
        wait_s = retry_after_s(headers)
        return UnavailableError(said, status=status, retry_after_s=wait_s, is_throttle=is_throttle)
    if is_credential_service:
        fix = "correct the role, or the credentials that it needs"
        return AccessError(f"{said}; {fix}", code=code)
    right = _right_region(exc.response)
    if right and right != region:
        return AccessError(f"{said}; the bucket is in region {right}, set `region`", code=code)
    if status < 400:
        return AccessError(f"{said}; {_REDIRECT_FIX} (now {region})", code=code)
    fix = _FIXES.get(code, "")
    if not fix and status in (401, 403):
        fix = f"allow this identity {_ACTIONS.get(exc.operation_name, 's3:ListBucket')}"
    return AccessError(
        f"{said}; {fix}" if fix else said, code=code, is_general=code in _GENERAL_CODES
    )


def _from_proxy(exc: Exception, what: str) -> S3ECError:
    """The error for a proxy that let no request through; its first cause has the reason."""
    reason = one_line(list(causes_of(exc))[-1])
    if _WANTS_CREDENTIALS.search(reason):
        return AccessError(f"{what}: {reason}; {_FIXES['407']}", code="407")
    return UnavailableError(f"{what}: {reason}")


def _no_answer(exc: Exception) -> str:
    """Describe a failure in our words where possible: the SDK's repeat the whole request."""
    if isinstance(exc, sdk.EndpointConnectionError):
        url = urlsplit(str(exc.kwargs.get("endpoint_url")))
        return f"cannot connect to {url.scheme}://{url.netloc}{_reason(exc)}"
    if isinstance(exc, sdk.ConnectionClosedError):
        return f"the connection broke{_reason(exc)}"
    if isinstance(exc, sdk.ConnectionError):  # TLS among others
        return one_line(exc.kwargs.get("error") or type(exc).__name__)
    return one_line(exc) or type(exc).__name__


def _reason(exc: Exception) -> str:
    """The operating system's message, in brackets; empty if there is none."""
    first = _caused_by(exc, OSError)
    return f" ({first.strerror})" if first is not None and first.strerror else ""


def _right_region(response: Any) -> str:
    """The bucket's region as the server reports it; empty if that cannot be a region's name."""
    headers = response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    told = headers.get("x-amz-bucket-region") or response.get("Error", {}).get("Region") or ""
    return str(told) if _REGION.fullmatch(str(told)) else ""


def _not_trusted(what: str, code: int) -> AccessError:
    """The error for a server that cannot prove its identity; a retry is useless.

    Args:
        code: OpenSSL's number for the reason (``X509_V_ERR_`` in x509_vfy.h), 0 if unknown.
    """
    if code == _EXPIRED:
        found, fix = "has expired", "renew it, or set this machine's clock"
    elif code in (_OTHER_HOST, _OTHER_ADDRESS):
        found, fix = "is for another host", "correct `endpoint_url`, or the names in it"
    else:
        found, fix = "is not trusted", "name its authority in `ca_bundle`"
    return AccessError(
        f"{what}: the server's certificate {found}; {fix}", code="CertificateNotTrusted"
    )


def _caused_by(exc: BaseException, kind: type[E]) -> E | None:
    """The first error of a kind among this error and its causes."""
    return next((cause for cause in causes_of(exc) if isinstance(cause, kind)), None)


def one_line(value: object) -> str:
    """Keep at most 300 printable characters: the text is the server's and goes to our log."""
    text = _scrubbed(" ".join(str(value).split()))
    return "".join(c for c in text if c.isprintable())[:300]


def _scrubbed(text: str) -> str:
    return _SIGNED.sub(r"\1=***", _ACCESS_KEY.sub("***", _USER.sub("***@", text)))
