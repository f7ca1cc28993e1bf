# SPDX-License-Identifier: Apache-2.0
"""Errors of each client by what the caller does next; what servers say is in tests/contract."""

from __future__ import annotations

import asyncio
import ssl
from typing import Any

import pytest
from botocore import exceptions as sdk
from botocore.parsers import ResponseParserError

from s3ec.errors import AccessError, ConfigError, ConflictError, S3ECError, UnavailableError
from s3ec.store.s3_errors import boundary, is_absent, reading_answer, retry_after_s

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


def meaning(error: S3ECError) -> str:
    """What the caller learns: who is refused, or why it asks again."""
    if isinstance(error, AccessError):
        return "all refused" if error.is_general else "refused"
    if isinstance(error, UnavailableError):
        return "too much" if error.is_throttle else "later"
    assert type(error) is ConflictError
    return "taken"


@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [
        (412, "PreconditionFailed", "taken"),
        (412, "", "taken"),
        (409, "ConditionalRequestConflict", "later"),
        (408, "", "later"),
        (423, "Locked", "later"),
        (499, "ClientClosedRequest", "later"),
        (500, "InternalError", "later"),
        (200, "InternalError", "later"),
        (0, "", "later"),
        (400, "RequestTimeout", "later"),
        (400, "BadDigest", "later"),
        (400, "IncompleteBody", "later"),
        (400, "XAmzContentSHA256Mismatch", "later"),
        (400, "InternalError", "later"),
        (400, "XMinioServerNotInitialized", "later"),
        (503, "SlowDown", "too much"),
        (429, "TooManyRequests", "too much"),
        (429, "", "too much"),
        (420, "EnhanceYourCalm", "too much"),
        (400, "SlowDown", "too much"),
        (400, "ThrottlingException", "too much"),
        (400, "KMS.ThrottlingException", "too much"),
        (400, "RequestLimitExceeded", "too much"),
        (400, "TooManyRequestsException", "too much"),
        (400, "BandwidthLimitExceeded", "too much"),
        (403, "RequestThrottled", "too much"),
        (403, "AccessDenied", "refused"),
        (401, "", "refused"),
        (400, "KMS.DisabledException", "refused"),
        (400, "KeyTooLongError", "refused"),
        (400, "InvalidRequest", "refused"),
        (405, "MethodNotAllowed", "refused"),
        (501, "NotImplemented", "refused"),
        (400, "ExpiredToken", "all refused"),
        (403, "InvalidAccessKeyId", "all refused"),
        (403, "SignatureDoesNotMatch", "all refused"),
        (403, "RequestTimeTooSkewed", "all refused"),
        (404, "NoSuchBucket", "all refused"),
        (404, "", "all refused"),
        (301, "PermanentRedirect", "all refused"),
    ],
)
def test_answer_maps_by_status_then_code(status: int, code: str, expected: str) -> None:
    error = translated(answer(status, code))
    assert meaning(error) == expected
    assert str(status) in str(error)
    if isinstance(error, AccessError):
        assert error.code == (code or str(status))


@pytest.mark.parametrize(
    ("exc", "expected"),
    [
        (sdk.EndpointConnectionError(**URL, error="refused"), "later"),
        (sdk.ConnectTimeoutError(**URL, error="slow"), "later"),
        (sdk.ReadTimeoutError(**URL, error="slow"), "later"),
        (sdk.ConnectionClosedError(**URL, error="gone"), "later"),
        (sdk.ProxyConnectionError(proxy_url="http://p", error="gone"), "later"),
        (sdk.HTTPClientError(error="what"), "later"),
        (sdk.IncompleteReadError(actual_bytes=1, expected_bytes=2), "later"),
        (sdk.MetadataRetrievalError(error_msg="no answer"), "later"),
        (ResponseParserError("not XML"), "later"),
        (TimeoutError(), "later"),
        (ConnectionResetError(104, "reset"), "later"),
        (ssl.SSLError("handshake"), "later"),
        (ssl.SSLCertVerificationError("self-signed"), "all refused"),
        (sdk.NoCredentialsError(), "all refused"),
        (sdk.PartialCredentialsError(provider="env", cred_var="x"), "all refused"),
        (sdk.CredentialRetrievalError(provider="p", error_msg="e"), "all refused"),
        (sdk.TokenRetrievalError(provider="sso", error_msg="expired"), "all refused"),
        (sdk.UnauthorizedSSOTokenError(), "all refused"),
        (sdk.ParamValidationError(report="bad"), "all refused"),
        (sdk.InvalidRegionError(region_name="?"), "all refused"),
        (answer(403, "403", operation="HeadObject"), "refused"),
        (answer(403, "AccessDenied", headers={"x-amz-bucket-region": "eu-west-1"}), "all refused"),
        (answer(403, "AccessDenied", operation="AssumeRole"), "all refused"),
    ],
    ids=str,
)
def test_what_the_sdk_raises_maps_by_what_helps(exc: Exception, expected: str) -> None:
    assert meaning(translated(exc)) == expected


def test_a_request_that_got_no_answer_is_not_repeated_in_the_message() -> None:
    url = {"endpoint_url": "http://h:1/b?list-type=2&a=b"}
    for exc in (
        sdk.EndpointConnectionError(**url, error="refused"),
        sdk.ConnectTimeoutError(**url, error="slow"),
        sdk.ReadTimeoutError(**url, error="slow"),
        sdk.ConnectionClosedError(**url, error="gone"),
    ):
        assert "list-type" not in str(translated(exc))


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


# -- Retry-After -------------------------------------------------------------------------------


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
        ({"retry-after": "Wed, 21 Oct 2099 07:28:30 GMT"}, None),
    ],
)
def test_retry_after_is_read_as_seconds(headers: dict[str, str], expected: float | None) -> None:
    assert retry_after_s(headers) == expected
