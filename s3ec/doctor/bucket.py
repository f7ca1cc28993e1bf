# SPDX-License-Identifier: Apache-2.0
"""Checks of the bucket and of the way to it: first those that only read, then those that write.

The second kind writes throw-away objects below ``.s3ec-probe/`` and deletes them.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from s3ec.doctor.check import CheckContext, Outcome, fail, ok, skip, warn
from s3ec.errors import AccessError, ConflictError, CorruptEntryError, S3ECError, UnavailableError
from s3ec.store.base import Blob, Store
from s3ec.store.open import (
    KEPT_PROBE,
    PROBE_BODY,
    PROBE_PREFIX,
    probe_conditional_put,
    probe_name,
)
from s3ec.store.unreachable import mend_endpoint

WARN_SKEW_S = 60.0
FAIL_SKEW_S = 900.0  # S3 refuses requests that are signed further away from its own clock


def outcome_of(exc: S3ECError, action: str) -> Outcome:
    """The outcome of a check whose request was refused or failed.

    Args:
        exc: Why it failed.
        action: The IAM action that the request needed, such as ``s3:ListBucket``.
    """
    if not isinstance(exc, AccessError):
        waits = "`--timeout` waits longer" if "timed out" in str(exc) else "try again"
        return fail(str(exc), f"{waits}; if it stays so, look at the server's log")
    # The transport's messages end with a fix if it knows one.
    found, separator, mend = str(exc).rpartition("; ")
    if not separator or exc.code in ("AccessDenied", "403", "Forbidden"):
        mend = f"allow {action} on the bucket for these credentials"
    return fail(found if separator else str(exc), mend)


def credentials(context: CheckContext) -> Outcome:
    """Check where the SDK's chain finds credentials."""
    try:
        method = context.s3.credentials_method()
    except UnavailableError as exc:
        return fail(
            str(exc),
            "instance metadata, STS or a `credential_process` does not answer: set "
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or name a `profile`",
        )
    except S3ECError as exc:
        found = str(exc).rpartition("; ")[0] or str(exc)
        return fail(found, "mend that source of credentials, or choose another `profile`")
    if method is None:
        return fail(
            "none found in the environment, the shared files, web identity or instance role",
            "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, name a `profile`, or give the "
            "pod or instance a role",
        )
    return ok(method)


def endpoint(context: CheckContext) -> Outcome:
    """Check whether an S3 server answers at the endpoint."""
    try:
        found = context.s3.probe_server()
    except S3ECError as exc:
        where = context.settings.endpoint_url or "AWS"
        return fail(f"{where}: {exc}", mend_endpoint(context.settings, exc))
    context.server = found
    answers = f"{found.url} answers" + (f", {found.server}" if found.server else "")
    if not found.is_s3:
        return fail(
            f"{answers}, but not as S3 does",
            "correct `endpoint_url`: the S3 port, not that of a web console",
        )
    # ECS, EKS and Lambda set these variables for their workloads; empty elsewhere.
    here = os.environ.get("AWS_REGION", "") or os.environ.get("AWS_DEFAULT_REGION", "")
    if here and found.region and here != found.region and not context.settings.replicas:
        return warn(
            f"{answers}; the bucket is in {found.region}, this machine in {here}",
            "name a copy that is near in `replicas`: a read from another region takes longer and "
            "costs more than most encodes",
        )
    return ok(answers)


def clock(context: CheckContext) -> Outcome:
    """Check this machine's clock against the server's. Signatures depend on it."""
    skew_s = context.server.skew_s if context.server else None
    if skew_s is None:
        return skip("the server sends no date")
    side = "behind" if skew_s > 0 else "ahead of"
    found = f"{abs(skew_s):.0f} s {side} the server's"
    if abs(skew_s) > FAIL_SKEW_S:
        return fail(found, "set the clock (chrony, ntpd); S3 refuses signatures beyond 900 s")
    if abs(skew_s) > WARN_SKEW_S:
        return warn(found, "set the clock (chrony, ntpd); signatures fail beyond 900 s")
    return ok(f"within {max(abs(skew_s), 1):.0f} s of the server's")


def bucket(context: CheckContext) -> Outcome:
    """Check whether the bucket exists and can be listed, as every reader of the index does."""
    try:
        context.first_object = context.ask_store(_first_object)
    except S3ECError as exc:
        refused = outcome_of(exc, "s3:ListBucket")
        if isinstance(exc, AccessError) and exc.code == "NoSuchBucket":
            other = "virtual" if context.settings.path_style else "path"
            more = f"; if the bucket is there, set `addressing_style` = `{other}`"
            return fail(refused.found, refused.mend + more)
        return refused
    state = "holds objects" if context.first_object else "is empty"
    return ok(f"{context.settings.corpus} can be listed and {state}")


async def _first_object(store: Store) -> str | None:
    async for info in store.list(""):
        return info.name
    return None


def read(context: CheckContext) -> Outcome:
    """Check whether objects can be read, and how the server answers for an absent one."""
    if context.first_object is not None:
        try:
            _read(context, context.first_object)
        except S3ECError as exc:
            return outcome_of(exc, "s3:GetObject")
    try:
        blob = _read(context, f"{PROBE_PREFIX}absent")
    except S3ECError as exc:
        if not isinstance(exc, AccessError) or exc.is_general:
            return outcome_of(exc, "s3:GetObject")
        return _denied_if_absent(context)
    if context.first_object is None and blob is None:
        code = " with 404" if context.settings.url is None else " as absent"
        return ok(f"allowed; an absent object is answered{code}")
    return ok("allowed; an object was read")


def _read(context: CheckContext, name: str) -> Blob | None:
    return context.ask_store(lambda store: store.get_range(name, 0, 1))


def _denied_if_absent(context: CheckContext) -> Outcome:
    """The outcome of a denied read of an absent object: S3 says 404 only to those who may list."""
    listing = (
        "allow s3:ListBucket on the bucket itself (without a condition on `s3:prefix`), so that "
        "an absent object is answered with 404"
    )
    if context.first_object is None:
        return fail(
            "an object that is not there is denied (403); so may be those that will be",
            f"allow s3:GetObject on the objects for these credentials; and {listing}",
        )
    return warn(
        "an object was read, but an absent one is denied (403): missing s3:ListBucket", listing
    )


@contextlib.contextmanager
def _probe_object(context: CheckContext, begin: str = PROBE_PREFIX) -> Iterator[str]:
    """Write an object, and delete it afterwards if that is allowed.

    Yields:
        Its name. If deleting is not allowed it is always the same, so that only one object stays.

    Raises:
        S3ECError: It was not written, or by the block.
    """
    name = probe_name(begin) if context.may_delete else KEPT_PROBE

    async def put(store: Store) -> None:
        with contextlib.suppress(ConflictError):  # it was kept
            await store.put_if_absent(name, [PROBE_BODY])

    try:
        # Repeated without a checksum or a condition, if the server refuses one.
        context.ask_store(put, requests=3)
        yield name
    finally:
        if context.may_delete:
            with contextlib.suppress(S3ECError):
                context.ask_store(lambda store: store.delete(name))


def write(context: CheckContext) -> Outcome:
    """Check whether objects can be written as the connector writes them."""
    if context.only_reads:
        return skip("ec_role is ec_consumer, which never writes")
    try:
        context.ask_store(lambda store: store.delete(probe_name()))
    except AccessError:
        context.may_delete = False  # a good policy: only `gc` jobs need to delete
    except S3ECError as exc:
        return outcome_of(exc, "s3:PutObject")
    settings = context.settings
    try:
        with _probe_object(context) as name:
            if settings.url is None:
                with contextlib.suppress(S3ECError):  # it may not be allowed, and tells no more
                    context.encryption = context.s3.encryption_of(name)
    except S3ECError as exc:
        refused = outcome_of(exc, "s3:PutObject")
        mend = refused.mend + "; a node that only reads takes ec_role `ec_consumer`"
        if settings.sse != "none":
            mend += f". It asked for {settings.sse}: `sse` = `none` leaves that to the bucket"
        return fail(refused.found, mend)
    if not context.may_delete:
        return ok(f"allowed; deleting is not, so one object stays: {name}")
    return ok("allowed; a throw-away object was written and deleted")


def sse(context: CheckContext) -> Outcome:
    """Check whether the server confirms the encryption that the settings request."""
    wanted, used = context.settings.sse, context.encryption
    if wanted == "none":
        more = f"; the bucket encrypts by default ({used})" if used else ""
        return ok(f"not asked for{more}")
    if used != wanted:
        return warn(
            f"{wanted} was asked for, the server confirms {used or 'nothing'}",
            "set a default encryption on the bucket, or `sse` = `none` if it has one",
        )
    return ok(f"{wanted} is accepted and confirmed")


def conditional_put(context: CheckContext) -> Outcome:
    """Check whether a second ``If-None-Match: *`` of the same name is really refused."""
    try:
        with _probe_object(context) as name:
            answer = context.ask_store(lambda store: probe_conditional_put(store, name), requests=2)
    except S3ECError as exc:
        return outcome_of(exc, "s3:PutObject")
    if answer:
        code = " (412)" if context.settings.url is None else ""
        return ok(f"a second PUT of one name is refused{code}")
    return warn(
        "the server does not honour `If-None-Match: *`: it overwrites, or refuses the header",
        "s3ec looks before it writes here, one request more per save; two writers at one moment "
        "still write the same bytes, and two engines may make the same snapshot of the index. A "
        "server with conditional writes does without",
    )


def ranges(context: CheckContext) -> Outcome:
    """Check whether a range of an object can be read, as large objects and the index are."""
    start, length = 2, 4
    mend = "s3ec reads large objects and the index in parts: take a server that gives them"
    try:
        with _probe_object(context) as name:
            part = context.ask_store(lambda store: store.get_range(name, start, length))
    except CorruptEntryError:
        return fail("the whole object comes where a range of it was asked for", mend)
    except S3ECError as exc:
        return outcome_of(exc, "s3:GetObject (with sse aws:kms also kms:Decrypt)")
    if part is None or bytes(part) != PROBE_BODY[start : start + length]:
        return fail("a range of an object comes back as other bytes", mend)
    return ok("a range of an object is what it should be")


def listing(context: CheckContext) -> Outcome:
    """Check whether a listing in several pages is complete (ListObjectsV2)."""
    if not context.may_delete:
        return skip("needs two throw-away objects, and deleting is not allowed")
    # A prefix of their own: interrupted doctors may have left many objects under the common one.
    begin = f"{probe_name()}-"
    try:
        with _probe_object(context, begin) as one, _probe_object(context, begin) as other:
            try:
                pages = context.s3.pages(begin)
            except UnavailableError:  # busy servers answer 500 now and then, and 503
                pages = context.s3.pages(begin)
    except S3ECError as exc:
        return outcome_of(exc, "s3:ListBucket")
    names = [name for page in pages for name in page]
    if any(names.count(name) != 1 for name in (one, other)):
        return fail(
            "of two objects, listed one to a page, not each came once",
            "s3ec finds objects and the index by ListObjectsV2: take a server that has all of it",
        )
    if any(len(page) > 1 for page in pages):
        return ok("whole, in pages of the server's own size")
    return ok("whole, page by page")
