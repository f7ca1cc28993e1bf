# SPDX-License-Identifier: Apache-2.0
"""Checks that write: permission, conditional PUT, checksums, encryption.

Each writes throw-away objects below ``.s3ec-probe/`` and deletes them.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator

from s3ec.doctor.bucket import outcome_of
from s3ec.doctor.patient import Patient
from s3ec.doctor.report import Outcome, fail, ok, skip, warn
from s3ec.errors import AccessError, S3ECError
from s3ec.store.base import Store
from s3ec.store.open import PROBE_PREFIX, ConditionalPut, probe_conditional_put


@contextlib.contextmanager
def _probe_object(patient: Patient) -> Iterator[str]:
    """The name of an object to write, deleted afterwards where that is allowed."""
    if not patient.may_delete:
        # One name for ever, so that one small object stays however often the doctor comes.
        yield f"{PROBE_PREFIX}kept"
        return
    name = f"{PROBE_PREFIX}{secrets.token_hex(8)}"
    try:
        yield name
    finally:
        with contextlib.suppress(S3ECError):
            patient.ask(lambda: patient.s3.delete(name))


def write(patient: Patient) -> Outcome:
    """Whether objects can be written, as the settings ask for them to be."""
    if patient.only_reads:
        return skip("ec_role is ec_consumer, which never writes")
    try:
        patient.ask(lambda: patient.s3.delete(f"{PROBE_PREFIX}{secrets.token_hex(8)}"))
    except AccessError:
        patient.may_delete = False  # a good policy: only `gc` jobs need to delete
    except S3ECError as exc:
        return outcome_of(exc, "s3:PutObject")
    wants_sse = patient.settings.sse != "none"
    with _probe_object(patient) as name:
        try:
            patient.encryption = _put(patient, name, encrypted=wants_sse)
        except S3ECError as exc:
            # Where it is allowed without encryption, the `sse` check says what is wrong.
            if not wants_sse or not _puts_plain(patient, name):
                refused = outcome_of(exc, "s3:PutObject")
                hint = "; a node that only reads takes ec_role `ec_consumer`"
                return fail(refused.found, refused.mend + hint)
        if not patient.may_delete:
            return ok(f"allowed; deleting is not, so one object stays: {name}")
    return ok("allowed; a throw-away object was written and deleted")


def write_by_store(patient: Patient) -> Outcome:
    """Whether objects can be written where there is no S3 to ask for more."""
    if patient.only_reads:
        return skip("ec_role is ec_consumer, which never writes")
    name = f"{PROBE_PREFIX}{secrets.token_hex(8)}"

    async def put_and_delete(store: Store) -> None:
        await store.put_if_absent(name, [b"s3ec doctor"])
        await store.delete(name)

    try:
        patient.ask_store(put_and_delete)
    except S3ECError as exc:
        hint = "; a node that only reads takes ec_role `ec_consumer`"
        return fail(str(exc), f"allow this user to create and delete objects there{hint}")
    return ok("allowed; a throw-away object was written and deleted")


def _put(patient: Patient, name: str, *, encrypted: bool) -> str | None:
    """Write with a CRC, or without one where the server refuses it."""
    try:
        return patient.ask(lambda: patient.s3.put(name, encrypted=encrypted)).sse
    except S3ECError:
        if encrypted:
            raise
    patient.ask(lambda: patient.s3.put_bare(name))
    return None


def _puts_plain(patient: Patient, name: str) -> bool:
    try:
        _put(patient, name, encrypted=False)
    except S3ECError:
        return False
    return True


def conditional_put(patient: Patient) -> Outcome:
    """Whether a second ``If-None-Match: *`` of the same name is really refused."""
    try:
        answer = patient.ask_store(probe_conditional_put)
    except S3ECError as exc:
        return outcome_of(exc, "s3:PutObject")
    if answer is ConditionalPut.ENFORCED:
        code = " (412)" if patient.settings.url is None else ""
        return ok(f"a second PUT of one name is refused{code}")
    if answer is ConditionalPut.UNKNOWN:
        return warn(
            "a PUT with `If-None-Match: *` is refused, one without is not",
            "allow s3:PutObject with conditions; s3ec writes with them only",
        )
    return warn(
        "the server accepts `If-None-Match: *` and overwrites all the same",
        "s3ec looks before it writes here, one request more per save; two writers at one moment "
        "still write the same bytes. The index is never compacted, so engines start slower the "
        "more was stored. A server with conditional writes does without",
    )


def checksums(patient: Patient) -> Outcome:
    """Whether the CRC that SDKs send today is accepted, kept, and compared."""
    with _probe_object(patient) as name:
        try:
            patient.ask(lambda: patient.s3.put(name))
            crc = patient.ask(lambda: patient.s3.stored_crc(name))
        except S3ECError as exc:
            return warn(
                f"a PUT with CRC32 is refused: {exc}",
                "s3ec then sends none and relies on its own checksum; set "
                "AWS_REQUEST_CHECKSUM_CALCULATION=when_required for other tools",
            )
        compared = _refuses_wrong_crc(patient, name)
    kept = "kept and returned" if crc else "accepted but not kept"
    also = "a wrong one is refused" if compared else "a wrong one is not noticed"
    return ok(f"CRC32 is {kept}; {also}. s3ec checks its own xxh3 at every read")


def _refuses_wrong_crc(patient: Patient, name: str) -> bool:
    try:
        patient.ask(lambda: patient.s3.put(name, wrong_crc=True))
    except S3ECError:
        return True
    return False


def sse(patient: Patient) -> Outcome:
    """Whether the encryption that the settings ask for is accepted and confirmed."""
    wanted = patient.settings.sse
    if wanted == "none":
        default = f"; the bucket encrypts by default ({patient.encryption})"
        return ok("not asked for" + (default if patient.encryption else ""))
    action = "s3:PutObject, kms:GenerateDataKey and kms:Decrypt"
    with _probe_object(patient) as name:
        try:
            used = patient.ask(lambda: patient.s3.put(name, encrypted=True)).sse
            patient.ask(lambda: patient.s3.stored_crc(name))
        except S3ECError as exc:
            refused = outcome_of(exc, action)
            return fail(
                f"{wanted}: {refused.found}",
                f"{refused.mend}; or set `sse` = `none` and leave it to the bucket",
            )
    if used != wanted:
        return warn(
            f"{wanted} was asked for, the server confirms {used or 'nothing'}",
            "set a default encryption on the bucket, or `sse` = `none` if it has one",
        )
    return ok(f"{wanted} is accepted and confirmed; the object could be read back")
