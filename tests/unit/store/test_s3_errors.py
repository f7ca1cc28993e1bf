# SPDX-License-Identifier: Apache-2.0
"""Errors of each client by what the caller does next; what servers say is in tests/contract."""

from __future__ import annotations

import asyncio
import ssl
from typing import Any

import obstore
import pytest
from botocore import exceptions as sdk
from botocore.exceptions import ClientError
from botocore.parsers import ResponseParserError
from obstore import exceptions
from obstore.exceptions import AlreadyExistsError, BaseError, GenericError
from obstore.store import MemoryStore

from s3ec.errors import AccessError, ConfigError, ConflictError, S3ECError, UnavailableError
from s3ec.store.obstore_errors import plain_errors, sdk_errors
from s3ec.store.s3_errors import (
    AbsentError,
    AskAgainError,
    BrokenConnectionError,
    boundary,
    is_absent,
    reading_answer,
    retry_after_s,
)

URL = {"endpoint_url": "http://127.0.0.1:1"}


def answer(
    status: int,
    code: str = "",
    *,
    operation: str = "GetObject",
    message: str = "",
    headers: dict[str, str] | None = None,
    **error: Any,
) -> sdk.ClientError:
    response: dict[str, Any] = {
        "Error": {"Code": code, "Message": message, **error},
        "ResponseMetadata": {"HTTPStatusCode": status, "HTTPHeaders": headers or {}},
    }
    return sdk.ClientError(response, operation)


def translated(exc: Exception) -> S3ECError:
    with pytest.raises(S3ECError) as caught, boundary("GET s3://b/n", lambda: "us-east-1"):
        raise exc
    assert caught.value.__cause__ is exc
    assert str(caught.value).startswith("GET s3://b/n")
    return caught.value


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (412, "PreconditionFailed", ConflictError),
        (412, "", ConflictError),
        (409, "ConditionalRequestConflict", UnavailableError),
        (408, "", UnavailableError),
        (429, "TooManyRequests", UnavailableError),
        (500, "InternalError", UnavailableError),
        (503, "SlowDown", UnavailableError),
        (200, "InternalError", UnavailableError),
        (0, "", UnavailableError),
        (501, "NotImplemented", AccessError),
        (400, "RequestTimeout", UnavailableError),
        (400, "BadDigest", UnavailableError),
        (400, "IncompleteBody", UnavailableError),
        (400, "XAmzContentSHA256Mismatch", UnavailableError),
        (400, "ExpiredToken", AccessError),
        (400, "KMS.DisabledException", AccessError),
        (400, "KeyTooLongError", AccessError),
        (401, "", AccessError),
        (403, "AccessDenied", AccessError),
        (403, "RequestTimeTooSkewed", AccessError),
        (404, "NoSuchBucket", AccessError),
        (405, "MethodNotAllowed", AccessError),
        (301, "PermanentRedirect", AccessError),
    ],
)
def test_answer_maps_by_status_then_code(status: int, code: str, kind: type[S3ECError]) -> None:
    error = translated(answer(status, code))
    assert type(error) is kind
    assert str(status) in str(error)
    if isinstance(error, AccessError):
        assert error.code == (code or str(status))


@pytest.mark.parametrize(
    ("exc", "is_general"),
    [
        (answer(403, "AccessDenied"), False),
        (answer(403, "403", operation="HeadObject"), False),
        (answer(400, "KeyTooLongError"), False),
        (answer(400, "InvalidRequest", operation="PutObject"), False),
        (answer(400, "KMS.DisabledException", operation="PutObject"), False),
        (answer(501, "NotImplemented"), False),
        (answer(403, "InvalidAccessKeyId"), True),
        (answer(403, "SignatureDoesNotMatch"), True),
        (answer(403, "RequestTimeTooSkewed"), True),
        (answer(400, "ExpiredToken"), True),
        (answer(404, "NoSuchBucket"), True),
        (answer(404, "404", operation="ListObjectsV2"), True),
        (answer(301, "PermanentRedirect"), True),
        (answer(403, "AccessDenied", headers={"x-amz-bucket-region": "eu-west-1"}), True),
        (answer(403, "AccessDenied", operation="AssumeRole"), True),
        (sdk.NoCredentialsError(), True),
        (ssl.SSLCertVerificationError("self-signed"), True),
    ],
    ids=str,
)
def test_a_refusal_tells_whether_others_would_be_refused_too(
    exc: Exception, is_general: bool
) -> None:
    error = translated(exc)
    assert isinstance(error, AccessError)
    assert error.is_general is is_general


@pytest.mark.parametrize(
    ("exc", "kind"),
    [
        (sdk.EndpointConnectionError(**URL, error="refused"), UnavailableError),
        (sdk.ConnectTimeoutError(**URL, error="slow"), UnavailableError),
        (sdk.ReadTimeoutError(**URL, error="slow"), UnavailableError),
        (sdk.ConnectionClosedError(**URL, error="gone"), UnavailableError),
        (sdk.ProxyConnectionError(proxy_url="http://p", error="gone"), UnavailableError),
        (sdk.HTTPClientError(error="what"), UnavailableError),
        (sdk.IncompleteReadError(actual_bytes=1, expected_bytes=2), UnavailableError),
        (sdk.MetadataRetrievalError(error_msg="no answer"), UnavailableError),
        (ResponseParserError("not XML"), UnavailableError),
        (TimeoutError(), UnavailableError),
        (ConnectionResetError(104, "reset"), UnavailableError),
        (ssl.SSLError("handshake"), UnavailableError),
        (ssl.SSLCertVerificationError("self-signed"), AccessError),
        (sdk.NoCredentialsError(), AccessError),
        (sdk.PartialCredentialsError(provider="env", cred_var="x"), AccessError),
        (sdk.CredentialRetrievalError(provider="p", error_msg="e"), AccessError),
        (sdk.TokenRetrievalError(provider="sso", error_msg="expired"), AccessError),
        (sdk.UnauthorizedSSOTokenError(), AccessError),
        (sdk.ParamValidationError(report="bad"), AccessError),
        (sdk.InvalidRegionError(region_name="?"), AccessError),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_what_the_sdk_raises_maps_by_what_helps(exc: Exception, kind: type[S3ECError]) -> None:
    assert type(translated(exc)) is kind


def test_missing_credentials_say_how_to_give_some() -> None:
    error = translated(sdk.NoCredentialsError())
    assert "AWS_ACCESS_KEY_ID" in str(error)
    assert isinstance(error, AccessError)
    assert error.code == "NoCredentialsError"


@pytest.mark.parametrize(
    "exc",
    [
        answer(400, "AuthorizationHeaderMalformed", Region="eu-north-1"),
        answer(301, "PermanentRedirect", headers={"x-amz-bucket-region": "eu-north-1"}),
        answer(400, "400", operation="HeadObject", headers={"x-amz-bucket-region": "eu-north-1"}),
        answer(403, "AccessDenied", headers={"x-amz-bucket-region": "eu-north-1"}),
    ],
)
def test_wrong_region_names_the_right_one(exc: sdk.ClientError) -> None:
    assert "region eu-north-1, set `region`" in str(translated(exc))


def test_denial_in_the_right_region_is_not_blamed_on_the_region() -> None:
    error = translated(answer(403, "AccessDenied", headers={"x-amz-bucket-region": "us-east-1"}))
    assert "set `region`" not in str(error)
    assert "s3:ListBucket" in str(error)


def test_credential_service_that_refuses_is_an_access_error_whatever_its_status() -> None:
    for status in (400, 403, 404, 412):
        error = translated(answer(status, "Nope", operation="AssumeRole"))
        assert type(error) is AccessError
        assert "correct the role" in str(error)
    assert type(translated(answer(503, "Busy", operation="AssumeRole"))) is UnavailableError


@pytest.mark.parametrize(
    ("exc", "expected"),
    [
        (answer(404, "NoSuchKey"), True),
        (answer(404, "404", operation="HeadObject"), True),
        (answer(404, "NotFound"), True),
        (answer(404, "NoSuchBucket"), False),
        (answer(404, "NoSuchUpload"), False),
        (answer(403, "AccessDenied"), False),
        (answer(500, "NoSuchKey"), False),
    ],
)
def test_absence_is_404_of_a_key_only(exc: sdk.ClientError, expected: bool) -> None:
    assert is_absent(exc) is expected


def test_hostile_message_becomes_one_short_printable_line() -> None:
    error = translated(answer(500, "Oops", message="a\nb\x1b[31m\u202e" + "x" * 5000))
    assert str(error).isprintable()
    assert len(str(error)) < 400
    assert "a b[31m" in str(error)


@pytest.mark.parametrize("operation", ["GetObject", "AssumeRole"])
def test_hostile_code_becomes_a_short_printable_word(operation: str) -> None:
    error = translated(answer(400, "A\nWARNING forged " * 5000, operation=operation))
    assert isinstance(error, AccessError)
    for told in (str(error), error.code):
        assert told.isprintable()
        assert len(told) < 300
    assert error.code.startswith("A WARNING forged A")


@pytest.mark.parametrize("region", ["eu\nWARNING forged", "e" * 65, "EU", "eu\n", "eu;x"])
def test_what_is_no_name_of_a_region_is_not_told(region: str) -> None:
    by_header = answer(403, "AccessDenied", headers={"x-amz-bucket-region": region})
    by_body = answer(400, "AuthorizationHeaderMalformed", Region=region)
    for exc in (by_header, by_body):
        assert "region" not in str(translated(exc))


@pytest.mark.parametrize(
    "exc",
    [answer(403, "AccessDenied"), ConfigError("ours"), ssl.SSLCertVerificationError("self-signed")],
    ids=lambda exc: type(exc).__name__,
)
def test_what_has_a_meaning_already_is_not_called_an_unreadable_answer(exc: Exception) -> None:
    with pytest.raises(type(exc)) as caught, reading_answer():
        raise exc
    assert caught.value is exc


@pytest.mark.parametrize("exc", [asyncio.CancelledError(), KeyError("ours"), ConflictError("x")])
def test_what_is_not_the_sdks_passes_unchanged(exc: BaseException) -> None:
    with pytest.raises(type(exc)) as caught, boundary("GET", str):
        raise exc
    assert caught.value is exc


@pytest.mark.parametrize(
    "told",
    [None, {"a": "b"}, "soon", "0001-01-01T00:00:00", "1 Jan 99999999999999999 00:00:00 +0000",
     "Mon, 01 Jan 2020 00:00:00 +99999999999999999999"],
)  # fmt: skip
def test_a_servers_time_that_cannot_be_read_is_left_out(told: Any) -> None:
    error = translated(answer(403, "RequestTimeTooSkewed", ServerTime=told))
    assert isinstance(error, AccessError)
    assert str(error).endswith("set this machine's clock")


# -- Retry-After -------------------------------------------------------------------------------

DATE = "Wed, 21 Oct 2015 07:28:00 GMT"
LATER = "Wed, 21 Oct 2015 07:28:30 GMT"


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, None),
        ({"retry-after": "7"}, 7),
        ({"retry-after": "0"}, 0),
        ({"retry-after": "9" * 400}, 86400),
        ({"retry-after": "-3"}, None),
        ({"retry-after": "\u0663"}, None),
        ({"retry-after": "soon"}, None),
        ({"retry-after": LATER, "date": DATE}, 30),
        ({"retry-after": DATE, "date": LATER}, 0),
        ({"retry-after": LATER}, 20),
        ({"retry-after": LATER, "date": "never"}, 20),
    ],
)
def test_retry_after_is_read_as_seconds_or_as_a_date(
    headers: dict[str, str], expected: float | None
) -> None:
    assert retry_after_s(headers, clock=lambda: 1445412490.0) == expected


# -- texts of obstore -----------------------------------------------------------------------------

WHAT = "GET s3://b/n"


def raised(exc: BaseException) -> BaseException:
    with pytest.raises(BaseException) as caught, sdk_errors(WHAT, "GetObject"):  # noqa: PT011
        raise exc
    return caught.value


def answer_text(status: int, body: str) -> str:
    """What obstore 0.12 says; ``body`` as Rust's debug form has it."""
    raw = body.replace(r"\n", "\n").replace(r"\"", '"')
    return (
        f"Generic S3 error: Error performing GET http://h/b/n in 1ms - Server returned non-2xx "
        f"status code: {status} Whatever: {raw}\n\nDebug source:\nGeneric {{\n"
        f'    store: "S3",\n    source: RetryError(\n        RetryErrorImpl {{\n'
        "            method: GET,\n            inner: Status {\n"
        f"                status: {status},\n"
        f'                body: Some(\n                    "{body}",\n                ),\n'
        "            },\n        },\n    ),\n}"
    )


def no_answer(kind: str, inside: str = "") -> str:
    return (
        "Generic S3 error: HTTP error: request or response body error\n\nDebug source:\n"
        f'Generic {{\n    store: "S3",\n    source: HttpError {{\n        kind: {kind},\n'
        f"        source: reqwest::Error {{\n{inside}\n        }},\n    }},\n}}"
    )


@pytest.mark.parametrize(
    ("kind", "status"),
    [(FileNotFoundError, 404), (AlreadyExistsError, 409), (AlreadyExistsError, 412)],
)
def test_status_counts_and_not_the_class(kind: type[Exception], status: int) -> None:
    error = raised(kind(answer_text(status, r"<Error><Code>A&amp;B</Code>\n</Error>")))
    assert isinstance(error, ClientError)
    assert error.response["ResponseMetadata"]["HTTPStatusCode"] == status
    assert error.response["Error"]["Code"] == "A&B"


def test_answer_without_a_code_has_the_status_as_its_code() -> None:
    error = raised(FileNotFoundError(answer_text(404, "<html>")))
    assert isinstance(error, ClientError)
    assert is_absent(error)


def test_missing_file_without_a_status_is_not_absence() -> None:
    for exc in (FileNotFoundError("Object at location n not found"), FileNotFoundError(2, "gone")):
        assert type(raised(exc)) is AskAgainError


def test_body_of_an_answer_cannot_forge_another_status() -> None:
    forged = answer_text(404, "<Code>NoSuchKey</Code>").replace("\n", r"\n").replace('"', r"\"")
    error = raised(GenericError(answer_text(503, forged)))
    assert isinstance(error, ClientError)
    assert error.response["ResponseMetadata"]["HTTPStatusCode"] == 503


def test_text_of_an_answer_is_neither_in_the_error_nor_in_its_cause() -> None:
    error = raised(GenericError(answer_text(403, "<Code>X</Code><Token>s3cret</Token>")))
    assert "s3cret" not in str(error)
    assert error.__cause__ is None
    assert error.__suppress_context__


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        (no_answer("Timeout"), UnavailableError, "timed out"),
        (no_answer("Interrupted"), BrokenConnectionError, "the connection broke"),
        (no_answer("Connect", '   message: "Connection refused",'), UnavailableError, "refused"),
        (no_answer("Unknown"), UnavailableError, "not HTTP"),
        ("Content-Length Header missing from response", AskAgainError, "missing"),
        ("Requested 0..10, got 5..15", UnavailableError, "another range"),
        ("ETag Header missing from response", UnavailableError, "not an S3 server's"),
        ("a text of the next release", AskAgainError, "a text of the next release"),
        ("", AskAgainError, "without a reason"),
    ],
)
def test_what_is_no_answer_is_unavailable(
    text: str, kind: type[UnavailableError], message: str
) -> None:
    error = raised(GenericError(text if "\n" in text else f"{text}\n\nDebug source:\nX"))
    assert type(error) is kind
    assert str(error).startswith(WHAT)
    assert message in str(error)


def test_unknown_text_ends_where_a_servers_words_could_begin() -> None:
    text = "Error performing GET - Server returned some code: <Token>s3cret</Token>"
    assert "s3cret" not in str(raised(BaseError(text)))


async def test_panic_of_rust_is_unavailable(capfd: pytest.CaptureFixture[str]) -> None:
    store = MemoryStore()
    await obstore.put_async(store, "n", b"0123456789")
    with pytest.raises(UnavailableError, match="failed inside"), sdk_errors(WHAT, "GetObject"):
        # A range that begins behind the end, beside one that does not.
        await obstore.get_ranges_async(store, "n", starts=[2, 12], lengths=[2, 4])
    with pytest.raises(UnavailableError, match="failed inside"), sdk_errors(WHAT, "GetObject"):
        obstore.get_ranges(store, "n", starts=[2, 12], lengths=[2, 4])
    assert "panicked" in capfd.readouterr().err


@pytest.mark.parametrize("exc", [asyncio.CancelledError(), KeyError("ours"), KeyboardInterrupt()])
def test_what_is_not_obstores_passes_unchanged(exc: BaseException) -> None:
    assert raised(exc) is exc


def os_error(code: int) -> Exception:
    """What obstore says of an error of the file system."""
    debug = f"Generic {{\n    source: UnableToOpenFile {{\n        code: {code},\n    }},\n}}"
    return exceptions.GenericError(f"Generic LocalFileSystem error: no\n\nDebug source:\n{debug}")


@pytest.mark.parametrize(
    ("raised", "expected", "words"),
    [
        (os_error(28), UnavailableError, "ENOSPC"),
        (os_error(5), UnavailableError, "EIO"),
        (os_error(13), AccessError, "EACCES.*right"),
        (os_error(30), AccessError, "EROFS"),
        (os_error(20), AbsentError, "no such thing"),
        (FileNotFoundError("gone"), AbsentError, "no such thing"),
        (TimeoutError(), UnavailableError, "timed out"),
        (exceptions.PermissionDeniedError("x"), AccessError, "refused"),
        (exceptions.GenericError("in other words"), UnavailableError, "in other words"),
        (NotImplementedError("append"), AccessError, "append; obstore cannot"),
    ],
)
def test_errors_of_obstore_by_what_the_caller_does_next(
    raised: Exception, expected: type[S3ECError], words: str
) -> None:
    with pytest.raises(expected, match=f"^GET x: .*{words}"), plain_errors("GET x"):
        raise raised
