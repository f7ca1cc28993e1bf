# SPDX-License-Identifier: Apache-2.0
"""Every error s3ec raises, grouped by what the caller does next.

Absence is None, never an exception. SDK and operating-system errors are mapped to
these at one boundary per transport, so nothing above a transport imports an SDK.
"""

from __future__ import annotations

from collections.abc import Iterator


class S3ECError(Exception):
    """Base of every error that s3ec raises on purpose."""


class ConfigError(S3ECError, ValueError):
    """A setting is wrong; found at start-up.

    The caller prints it and stops (exit status 2). The message names the field and the fix and
    never repeats a value that could be a secret.

    Attributes:
        field: The setting at fault, or None if it is the whole configuration.
    """

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class AmbiguousError(ConfigError):
    """The given name matches several things; the message lists them.

    The caller names one of them.
    """


class NotFoundError(S3ECError):
    """The requested namespace is not in the bucket; on the command line, also a requested entry.

    For ``s3ec.client`` the catalogue has no such document. The caller names another one; the
    message lists the existing ones. For an absent entry the result is None, not an exception.
    """


class UnavailableError(S3ECError):
    """The store gave no good answer: throttled, 409, 5xx, timed out, refused.

    The caller backs off with jitter, bounded; meanwhile the entry is a miss.

    Attributes:
        status: HTTP status of the answer, 0 if there was none.
        retry_after_s: Seconds that the server asked the client to wait, None if it did not.
        is_throttle: Whether the server throttled the request, rather than failed.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 0,
        retry_after_s: float | None = None,
        is_throttle: bool = False,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s
        self.is_throttle = is_throttle


TOO_LARGE = "EntityTooLarge"
"""``AccessError.code`` if a store has no space for one object, but may have for the next."""


class AccessError(S3ECError):
    """The store answered and refused: denied, expired, no such bucket, wrong region.

    The caller logs it once; meanwhile the entry is a miss. Retrying without a change of credentials
    or policy is useless.

    Attributes:
        code: The store's own error code, such as ``AccessDenied``.
        is_general: Whether the store would refuse every other request too: credentials, clock,
            certificate, region, no such bucket. The breaker opens for that. Otherwise it refused
            only this request, its key or its kind: S3 denies an absent key to a client that may not
            list, and a write to a client that may only read, and all other requests succeed.
    """

    def __init__(self, message: str, *, code: str = "", is_general: bool = True) -> None:
        super().__init__(message)
        self.code = code
        self.is_general = is_general


class ConflictError(S3ECError):
    """A conditional write found the name taken (HTTP 412).

    For a content-addressed entry that means "already stored", perhaps by our own write
    whose reply was lost: success.
    """


class CorruptEntryError(S3ECError):
    """Bytes exist but are unusable: short, flipped, foreign, oversized or hostile.

    The caller drops the local copy, fetches once more past the tier, then counts a miss.

    Attributes:
        reason: One word for counters: ``length``, ``header``, ``checksum``, ``identifier``,
            ``namespace``, ``size``, ``dtype``, ``shape``, ``version``, ``nonfinite``, ``order`` (an
            index file that is not sorted) or ``disk`` (one that cannot be read).
    """

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class CutBodyError(CorruptEntryError):
    """A body ended before its announced length: the connection is at fault, not the object.

    ``reason`` is ``length``.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message, reason="length")


class TierError(S3ECError):
    """The node's disk refused an operation: full, read-only, I/O error.

    The caller continues without the tier for this entry and counts it.
    """


class SourceError(S3ECError):
    """One item of a source cannot be read: absent, refused, too large, no page of its PDF.

    The caller lists the item as failed, with the reason, and continues with the next one.

    Attributes:
        reason: Why, in plain words, without the item's name.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def causes_of(exc: BaseException) -> Iterator[BaseException]:
    """Yield this error, then its causes, one after the other."""
    seen: BaseException | None = exc
    while seen is not None:
        yield seen
        seen = seen.__cause__ or seen.__context__
