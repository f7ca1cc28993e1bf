# SPDX-License-Identifier: Apache-2.0
"""Texts of obstore as errors; what real servers make of it is in tests/contract."""

from __future__ import annotations

import asyncio

import obstore
import pytest
from botocore.exceptions import ClientError
from obstore.exceptions import AlreadyExistsError, BaseError, GenericError
from obstore.store import MemoryStore

from s3ec.errors import UnavailableError
from s3ec.store.obstore_errors import sdk_errors
from s3ec.store.s3_errors import AskAgainError, BrokenConnectionError, is_absent

WHAT = "GET s3://b/n"


def raised(exc: BaseException) -> BaseException:
    with pytest.raises(BaseException) as caught, sdk_errors(WHAT, "GetObject"):  # noqa: PT011
        raise exc
    return caught.value


def answer(status: int, body: str) -> str:
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
    error = raised(kind(answer(status, r"<Error><Code>A&amp;B</Code>\n</Error>")))
    assert isinstance(error, ClientError)
    assert error.response["ResponseMetadata"]["HTTPStatusCode"] == status
    assert error.response["Error"]["Code"] == "A&B"


def test_answer_without_a_code_has_the_status_as_its_code() -> None:
    error = raised(FileNotFoundError(answer(404, "<html>")))
    assert isinstance(error, ClientError)
    assert is_absent(error)


def test_missing_file_without_a_status_is_not_absence() -> None:
    for exc in (FileNotFoundError("Object at location n not found"), FileNotFoundError(2, "gone")):
        assert type(raised(exc)) is AskAgainError


def test_body_of_an_answer_cannot_forge_another_status() -> None:
    forged = answer(404, "<Code>NoSuchKey</Code>").replace("\n", r"\n").replace('"', r"\"")
    error = raised(GenericError(answer(503, forged)))
    assert isinstance(error, ClientError)
    assert error.response["ResponseMetadata"]["HTTPStatusCode"] == 503


def test_text_of_an_answer_is_neither_in_the_error_nor_in_its_cause() -> None:
    error = raised(GenericError(answer(403, "<Code>X</Code><Token>s3cret</Token>")))
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
