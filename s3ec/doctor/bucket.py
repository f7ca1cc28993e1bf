# SPDX-License-Identifier: Apache-2.0
"""Checks of the bucket and of the way to it: first those that only read, then those that write.

The second kind writes throw-away objects below ``.s3ec-probe/`` and deletes them.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
from collections.abc import Iterator
from urllib.parse import urlsplit

from s3ec.doctor.check import CheckContext, Outcome, fail, ok, skip, warn
from s3ec.errors import AccessError, CorruptEntryError, S3ECError, UnavailableError
from s3ec.store.base import Blob, Store
from s3ec.store.open import (
    KEPT_PROBE,
    PROBE_PREFIX,
    ConditionalPut,
    probe_conditional_put,
    probe_name,
)
from s3ec.store.unreachable import mend_endpoint

WARN_SKEW_S = 60.0
FAIL_SKEW_S = 900.0  # S3 refuses requests that are signed further away from its own clock

_METHODS = {
    "env": "variables AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "shared-credentials-file": "shared credentials file",
    "config-file": "shared configuration file",
    "custom-process": "credential_process of the shared configuration",
    "assume-role": "role of a profile",
    "assume-role-with-web-identity": "web identity token (IRSA)",
    "sso": "single sign-on of a profile",
    "container-role": "container's role (ECS, EKS Pod Identity)",
    "iam-role": "instance role",
}


def outcome_of(exc: S3ECError, action: str) -> Outcome:
    """What a refused request means.

    Args:
        action: The IAM action that the request needed, such as ``s3:ListBucket``.
    """
    if not isinstance(exc, AccessError):
        return fail(str(exc), "try again; if it stays so, look at the server's log")
    # The transport's messages end with a remedy where it knows one.
    found, separator, mend = str(exc).rpartition("; ")
    if not separator or exc.code in ("AccessDenied", "403", "Forbidden"):
        mend = f"allow {action} on the bucket for these credentials"
    return fail(found if separator else str(exc), mend)


def credentials(context: CheckContext) -> Outcome:
    """Where the SDK's chain finds credentials."""
    try:
        method = context.ask(context.s3.credentials_method)
    except S3ECError as exc:
        found = str(exc).rpartition("; ")[0] or str(exc)
        return fail(found, "mend that source of credentials, or choose another `profile`")
    if method is None:
        return fail(
            "none found in the environment, the shared files, web identity or instance role",
            "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, name a `profile`, or give the "
            "pod or instance a role",
        )
    found = f"{method} ({_METHODS[method]})" if method in _METHODS else method
    return ok(found)


def endpoint(context: CheckContext) -> Outcome:
    """Whether an S3 server answers there."""
    try:
        found = context.ask(context.s3.probe_server)
    except S3ECError as exc:
        where = context.settings.endpoint_url or "AWS"
        return fail(f"{where}: {exc}", mend_endpoint(context.settings, exc))
    context.server = found
    name = f", {found.server}" if found.server else ""
    if not found.is_s3:
        return fail(
            f"{found.url} answers{name}, but not as S3 does",
            "correct `endpoint_url`: the S3 port, not that of a web console",
        )
    here = _region_of_machine()
    if here and found.region and here != found.region:
        return warn(
            f"{found.url} answers{name}; the bucket is in {found.region}, this machine in {here}",
            "read a copy that is near (terraform/ replicates buckets): a read from another region "
            "takes longer and costs more than most encodes",
        )
    return ok(f"{found.url} answers{name}", cell=found.server)


def _region_of_machine() -> str:
    """As ECS, EKS and Lambda say it to what they run; empty elsewhere."""
    return os.environ.get("AWS_REGION", "") or os.environ.get("AWS_DEFAULT_REGION", "")


def clock(context: CheckContext) -> Outcome:
    """How far this machine's clock is from the server's. Signatures depend on it."""
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
    """Whether the bucket exists and can be listed, as every reader of the index does."""
    try:
        context.first_object = context.ask_store(_first_object)
    except S3ECError as exc:
        return outcome_of(exc, "s3:ListBucket")
    context.listed = True
    state = "holds objects" if context.first_object else "is empty"
    return ok(f"{context.settings.corpus} can be listed and {state}")


async def _first_object(store: Store) -> str | None:
    async for info in store.list(""):
        return info.name
    return None


def addressing(context: CheckContext) -> Outcome:
    """Whether requests have the bucket in the path or the host name, and whether both work."""
    server = context.server
    used, other = ("virtual", "path") if server and server.virtual_host else ("path", "virtual")
    style = context.settings.addressing_style
    found = f"{used} style" + (" (auto)" if style == "auto" else "")
    host = urlsplit(context.settings.endpoint_url or "").hostname or ""
    if other == "virtual" and _is_address(host):
        needs = "virtual style needs a host name, not an address"
        return ok(f"{found}; {needs}", cell=f"{used}; virtual not tried")
    try:
        context.ask(lambda: context.s3.list_one(style=other))
    except S3ECError:
        if context.listed:
            return ok(f"{found}; {other} style does not work here", cell=f"{used} only")
        return skip(f"{found}; the bucket lists in neither style")
    if context.listed:
        return ok(f"{found}; {other} style works too", cell="path and virtual")
    mend = f"set `addressing_style` = `{other}`"
    return fail(f"{found} does not work, {other} style does", mend, cell=f"{other} only")


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def read(context: CheckContext) -> Outcome:
    """Whether objects can be read, and how an absent one is answered."""
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
    if context.first_object is not None:
        return ok("allowed; an object was read")
    if blob is None:
        code = " with 404" if context.settings.url is None else " as absent"
        return ok(f"allowed; an absent object is answered{code}")
    return ok("allowed; an object was read")


def _read(context: CheckContext, name: str) -> Blob | None:
    return context.ask_store(lambda store: store.get_range(name, 0, 1))


def _denied_if_absent(context: CheckContext) -> Outcome:
    """What a denied read of an absent object means: S3 says 404 only to those who may list."""
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
    """The name of an object to write, deleted afterwards where that is allowed."""
    if not context.may_delete:
        yield KEPT_PROBE
        return
    name = probe_name(begin)
    try:
        yield name
    finally:
        with contextlib.suppress(S3ECError):
            context.ask(lambda: context.s3.delete(name))


def write(context: CheckContext) -> Outcome:
    """Whether objects can be written, as the settings ask for them to be."""
    if context.only_reads:
        return skip("ec_role is ec_consumer, which never writes")
    try:
        context.ask(lambda: context.s3.delete(probe_name()))
    except AccessError:
        context.may_delete = False  # a good policy: only `gc` jobs need to delete
    except S3ECError as exc:
        return outcome_of(exc, "s3:PutObject")
    wants_sse = context.settings.sse != "none"
    with _probe_object(context) as name:
        try:
            context.encryption = _put(context, name)
        except S3ECError as exc:
            # Where it is allowed without encryption, the `sse` check says what is wrong.
            if not wants_sse or not _puts_plain(context, name):
                refused = outcome_of(exc, "s3:PutObject")
                hint = "; a node that only reads takes ec_role `ec_consumer`"
                return fail(refused.found, refused.mend + hint)
        if not context.may_delete:
            return ok(f"allowed; deleting is not, so one object stays: {name}")
    return ok("allowed; a throw-away object was written and deleted")


def write_by_store(context: CheckContext) -> Outcome:
    """Whether objects can be written to a corpus outside S3."""
    if context.only_reads:
        return skip("ec_role is ec_consumer, which never writes")
    name = probe_name()

    async def put_and_delete(store: Store) -> None:
        await store.put_if_absent(name, [b"s3ec doctor"])
        await store.delete(name)

    try:
        context.ask_store(put_and_delete)
    except S3ECError as exc:
        hint = "; a node that only reads takes ec_role `ec_consumer`"
        return fail(str(exc), f"allow this user to create and delete objects there{hint}")
    return ok("allowed; a throw-away object was written and deleted")


def _put(context: CheckContext, name: str, *, sse: str | None = None) -> str | None:
    """Write with a CRC, or without one where the server refuses it."""
    try:
        return context.ask(lambda: context.s3.put(name, sse=sse))
    except S3ECError:
        if (sse or context.settings.sse) != "none":
            raise
    context.ask(lambda: context.s3.put_bare(name))
    return None


def _puts_plain(context: CheckContext, name: str) -> bool:
    try:
        _put(context, name, sse="none")
    except S3ECError:
        return False
    return True


def conditional_put(context: CheckContext) -> Outcome:
    """Whether a second ``If-None-Match: *`` of the same name is really refused."""
    try:
        answer = context.ask_store(probe_conditional_put)
    except S3ECError as exc:
        return outcome_of(exc, "s3:PutObject")
    if answer is ConditionalPut.ENFORCED:
        code = " (412)" if context.settings.url is None else ""
        return ok(f"a second PUT of one name is refused{code}", cell="enforced")
    if answer is ConditionalPut.UNKNOWN:
        return warn(
            "a PUT with `If-None-Match: *` is refused, one without is not",
            "allow s3:PutObject with conditions; s3ec writes with them only",
            cell="refused",
        )
    is_ignored = answer is ConditionalPut.IGNORED
    return warn(
        "the server accepts `If-None-Match: *` and overwrites all the same"
        if is_ignored
        else "the server refuses `If-None-Match: *`, and accepts a PUT without it",
        "s3ec looks before it writes here, one request more per save; two writers at one moment "
        "still write the same bytes, and two engines may make the same snapshot of the index. A "
        "server with conditional writes does without",
        cell="ignored" if is_ignored else "unsupported",
    )


def checksums(context: CheckContext) -> Outcome:
    """Whether the CRC that SDKs send today is accepted, kept, and compared."""
    with _probe_object(context) as name:
        try:
            context.ask(lambda: context.s3.put(name))
            crc = context.ask(lambda: context.s3.stored_crc(name))
        except S3ECError as exc:
            return warn(
                f"a PUT with CRC32 is refused: {exc}",
                "s3ec then sends none and relies on its own checksum; set "
                "AWS_REQUEST_CHECKSUM_CALCULATION=when_required for other tools",
                cell="CRC32 refused",
            )
        compared = _refuses_wrong_crc(context, name)
    kept = "kept and returned" if crc else "accepted but not kept"
    also = "a wrong one is refused" if compared else "a wrong one is not noticed"
    cell = f"CRC32 {'kept' if crc else 'not kept'}, {'compared' if compared else 'not compared'}"
    return ok(f"CRC32 is {kept}; {also}. s3ec checks its own xxh3 at every read", cell=cell)


def _refuses_wrong_crc(context: CheckContext, name: str) -> bool:
    try:
        context.ask(lambda: context.s3.put(name, wrong_crc=True))
    except S3ECError:
        return True
    return False


def sse(context: CheckContext) -> Outcome:
    """Whether the encryption that the settings ask for is accepted and confirmed."""
    wanted = context.settings.sse
    if wanted == "none":
        if context.encryption:
            found = f"not asked for; the bucket encrypts by default ({context.encryption})"
            return ok(found, cell=f"{context.encryption} by default")
        answer = _answer_to_sse(context)
        return ok(f"not asked for; AES256 would be {answer}", cell=f"AES256 {answer}")
    action = "s3:PutObject, kms:GenerateDataKey and kms:Decrypt"
    with _probe_object(context) as name:
        try:
            used = context.ask(lambda: context.s3.put(name))
            context.ask(lambda: context.s3.stored_crc(name))
        except S3ECError as exc:
            refused = outcome_of(exc, action)
            return fail(
                f"{wanted}: {refused.found}",
                f"{refused.mend}; or set `sse` = `none` and leave it to the bucket",
                cell=f"{wanted} refused",
            )
    if used != wanted:
        return warn(
            f"{wanted} was asked for, the server confirms {used or 'nothing'}",
            "set a default encryption on the bucket, or `sse` = `none` if it has one",
            cell=f"{wanted} ignored",
        )
    found = f"{wanted} is accepted and confirmed; the object could be read back"
    return ok(found, cell=f"{wanted} confirmed")


def _answer_to_sse(context: CheckContext) -> str:
    """How the server answers a write that asks for AES256, though the settings ask for none."""
    with _probe_object(context) as name:
        try:
            used = context.ask(lambda: context.s3.put(name, sse="AES256"))
        except S3ECError:
            return "refused"
    return "confirmed" if used == "AES256" else "ignored"


def ranges(context: CheckContext) -> Outcome:
    """Whether a range of an object can be read, as large objects and the index are."""
    start, length = 2, 4
    mend = "s3ec reads large objects and the index in parts: take a server that gives them"
    with _probe_object(context) as name:
        try:
            _put(context, name)
            part = context.ask_store(lambda store: store.get_range(name, start, length))
        except CorruptEntryError:
            found = "the whole object comes where a range of it was asked for"
            return fail(found, mend, cell="ignored")
        except S3ECError as exc:
            return outcome_of(exc, "s3:GetObject")
    if part is None or bytes(part) != context.s3.BODY[start : start + length]:
        return fail("a range of an object comes back as other bytes", mend, cell="wrong")
    return ok("a range of an object is what it should be", cell="right")


def listing(context: CheckContext) -> Outcome:
    """Whether a listing is whole when it comes in several pages (ListObjectsV2)."""
    # A beginning of their own: doctors that were cut short may have left many objects there.
    begin = f"{probe_name()}-"
    with _probe_object(context, begin) as one, _probe_object(context, begin) as other:
        if one == other:
            return skip("needs two throw-away objects, and deleting is not allowed")
        try:
            for name in (one, other):
                _put(context, name)
            try:
                pages = context.ask(lambda: context.s3.pages(begin))
            except UnavailableError:  # busy servers answer 500 now and then, and 503
                pages = context.ask(lambda: context.s3.pages(begin))
        except S3ECError as exc:
            return outcome_of(exc, "s3:ListBucket")
    names = [name for page in pages for name in page]
    if any(names.count(name) != 1 for name in (one, other)):
        return fail(
            "of two objects, listed one to a page, not each came once",
            "s3ec finds objects and the index by ListObjectsV2: take a server that has all of it",
            cell="not whole",
        )
    if any(len(page) > 1 for page in pages):
        return ok("whole, in pages of the server's own size", cell="whole; page size ignored")
    return ok("whole, page by page", cell="paged")
