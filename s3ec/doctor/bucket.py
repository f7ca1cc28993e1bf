# SPDX-License-Identifier: Apache-2.0
"""Checks of the way to the bucket: credentials, endpoint, clock, style, list and read."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

from s3ec.corpus import mend_endpoint
from s3ec.doctor.patient import Patient
from s3ec.doctor.report import Outcome, fail, ok, skip, warn
from s3ec.errors import AccessError, S3ECError
from s3ec.store.base import Blob, Store
from s3ec.store.open import PROBE_PREFIX

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


def credentials(patient: Patient) -> Outcome:
    """Where the SDK's chain finds credentials, and whether the role can be assumed."""
    try:
        method = patient.ask(patient.s3.credentials_method)
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
    role = patient.settings.role_arn
    if role is None:
        return ok(found)
    try:
        patient.ask(patient.s3.assume_role)
    except S3ECError as exc:
        return fail(
            f"{found}; cannot assume {role}: {exc}",
            "allow sts:AssumeRole for these credentials, and trust them in the role",
        )
    return ok(f"{found}, then {role}")


def endpoint(patient: Patient) -> Outcome:
    """Whether somebody who speaks S3 answers there."""
    try:
        hello = patient.ask(patient.s3.hello)
    except S3ECError as exc:
        where = patient.settings.endpoint_url or "AWS"
        return fail(f"{where}: {exc}", mend_endpoint(patient.settings, str(exc)))
    patient.hello = hello
    server = f", {hello.server}" if hello.server else ""
    if not hello.is_s3:
        return fail(
            f"{hello.url} answers{server}, but not as S3 does",
            "correct `endpoint_url`: the S3 port, not that of a web console",
        )
    return ok(f"{hello.url} answers{server}", cell=hello.server)


def clock(patient: Patient) -> Outcome:
    """How far this machine's clock is from the server's; signatures depend on it."""
    skew_s = patient.hello.skew_s if patient.hello else None
    if skew_s is None:
        return skip("the server sends no date")
    side = "behind" if skew_s > 0 else "ahead of"
    found = f"{abs(skew_s):.0f} s {side} the server's"
    if abs(skew_s) > FAIL_SKEW_S:
        return fail(found, "set the clock (chrony, ntpd); S3 refuses signatures beyond 900 s")
    if abs(skew_s) > WARN_SKEW_S:
        return warn(found, "set the clock (chrony, ntpd); signatures fail beyond 900 s")
    return ok(f"within {max(abs(skew_s), 1):.0f} s of the server's")


def bucket(patient: Patient) -> Outcome:
    """Whether the bucket is there and can be listed; the index is read by listing."""
    try:
        patient.first_object = patient.ask_store(_first_object)
    except S3ECError as exc:
        return outcome_of(exc, "s3:ListBucket")
    patient.listed = True
    state = "holds objects" if patient.first_object else "is empty"
    return ok(f"{patient.settings.corpus} can be listed and {state}")


async def _first_object(store: Store) -> str | None:
    async for info in store.list(""):
        return info.name
    return None


def addressing(patient: Patient) -> Outcome:
    """Where the bucket's name goes, and whether the other place would do too."""
    hello = patient.hello
    used, other = ("virtual", "path") if hello and hello.virtual_host else ("path", "virtual")
    style = patient.settings.addressing_style
    found = f"{used} style" + (" (auto)" if style == "auto" else "")
    host = urlsplit(patient.settings.endpoint_url or "").hostname or ""
    if other == "virtual" and _is_address(host):
        needs = "virtual style needs a host name, not an address"
        return ok(f"{found}; {needs}", cell=f"{used}; virtual not tried")
    try:
        patient.ask(lambda: patient.s3.list_one(style=other))
    except S3ECError:
        if patient.listed:
            return ok(f"{found}; {other} style does not work here", cell=f"{used} only")
        return skip(f"{found}; the bucket lists in neither style")
    if patient.listed:
        return ok(f"{found}; {other} style works too", cell="path and virtual")
    mend = f"set `addressing_style` = `{other}`"
    return fail(f"{found} does not work, {other} style does", mend, cell=f"{other} only")


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def read(patient: Patient) -> Outcome:
    """Whether objects can be read, and how an absent one is answered."""
    if patient.first_object is not None:
        try:
            _read(patient, patient.first_object)
        except S3ECError as exc:
            return outcome_of(exc, "s3:GetObject")
    try:
        blob = _read(patient, f"{PROBE_PREFIX}absent")
    except S3ECError as exc:
        if not isinstance(exc, AccessError) or exc.is_general:
            return outcome_of(exc, "s3:GetObject")
        return _denied_if_absent(patient)
    if patient.first_object is not None:
        return ok("allowed; an object was read")
    if blob is None:
        code = " with 404" if patient.settings.url is None else " as absent"
        return ok(f"allowed; an absent object is answered{code}")
    return ok("allowed; an object was read")


def _read(patient: Patient, name: str) -> Blob | None:
    return patient.ask_store(lambda store: store.get_range(name, 0, 1))


def _denied_if_absent(patient: Patient) -> Outcome:
    """S3 says whether an object is absent to those only who may list the bucket."""
    listing = (
        "allow s3:ListBucket on the bucket itself (without a condition on `s3:prefix`), so that "
        "an absent object is answered with 404"
    )
    if patient.first_object is None:
        return fail(
            "an object that is not there is denied (403); so may be those that will be",
            f"allow s3:GetObject on the objects for these credentials; and {listing}",
        )
    return warn(
        "an object was read, but an absent one is denied (403): missing s3:ListBucket", listing
    )
