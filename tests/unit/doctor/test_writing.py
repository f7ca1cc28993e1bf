# SPDX-License-Identifier: Apache-2.0
"""Checks that write, on servers that lack this or that."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from s3ec.doctor import writing
from s3ec.doctor.report import Verdict
from s3ec.testing.proxy import FaultProxy, Rule
from s3ec.testing.proxy_faults import s3_error
from tests.unit.doctor.conftest import MakePatient, ReplyHeaders, WithoutHeader

LeftOver = Callable[[], list[str]]
DENIED = s3_error(403, "AccessDenied")


def test_every_check_is_well_on_moto_and_leaves_nothing(
    make_patient: MakePatient, left_over: LeftOver
) -> None:
    patient = make_patient(sse="AES256")
    for check in (writing.write, writing.sse, writing.conditional_put, writing.checksums):
        assert check(patient).verdict == Verdict.OK, check(patient)
    assert left_over() == []


def test_consumer_does_not_write(
    make_patient: MakePatient, proxy: FaultProxy, left_over: LeftOver
) -> None:
    patient = make_patient({"ec_role": "ec_consumer"})
    assert writing.write(patient).verdict == Verdict.SKIP
    assert proxy.requests == []


def test_denied_writing_names_the_action_and_the_role(
    make_patient: MakePatient, proxy: FaultProxy
) -> None:
    proxy.add(Rule(DENIED, method="PUT"))
    outcome = writing.write(make_patient())
    assert outcome.verdict == Verdict.FAIL
    assert "s3:PutObject" in outcome.mend
    assert "ec_consumer" in outcome.mend


def test_denied_deleting_is_well_and_leaves_one_object_however_often(
    make_patient: MakePatient, proxy: FaultProxy, left_over: LeftOver
) -> None:
    proxy.add(Rule(DENIED, method="DELETE"))
    for _ in range(2):
        patient = make_patient(sse="AES256")
        outcome = writing.write(patient)
        assert outcome.verdict == Verdict.OK
        assert "deleting is not" in outcome.found
        assert writing.sse(patient).verdict == Verdict.OK
        assert writing.conditional_put(patient).verdict == Verdict.OK
        assert writing.checksums(patient).verdict == Verdict.OK
    assert left_over() == [".s3ec-probe/kept"]


def test_ignored_condition_is_a_warning(
    make_patient: MakePatient, proxy: FaultProxy, left_over: LeftOver
) -> None:
    proxy.add(Rule(WithoutHeader("if-none-match")))
    outcome = writing.conditional_put(make_patient())
    assert outcome.verdict == Verdict.WARN
    assert "overwrites" in outcome.found
    assert left_over() == []


def test_denied_condition_is_a_warning(make_patient: MakePatient, proxy: FaultProxy) -> None:
    proxy.add(Rule(DENIED, method="PUT", header="if-none-match"))
    patient = make_patient()
    assert writing.write(patient).verdict == Verdict.OK
    assert writing.conditional_put(patient).verdict == Verdict.WARN


def test_store_that_fails_during_the_condition_fails(
    make_patient: MakePatient, proxy: FaultProxy
) -> None:
    proxy.add(Rule(s3_error(503, "SlowDown"), method="PUT"))
    assert writing.conditional_put(make_patient()).verdict == Verdict.FAIL


def test_refused_checksum_is_a_warning_and_writing_goes_on_without(
    make_patient: MakePatient, proxy: FaultProxy
) -> None:
    for header in ("x-amz-sdk-checksum-algorithm", "x-amz-trailer"):
        proxy.add(Rule(s3_error(501, "NotImplemented"), method="PUT", header=header))
    patient = make_patient()
    assert writing.write(patient).verdict == Verdict.OK
    outcome = writing.checksums(patient)
    assert outcome.verdict == Verdict.WARN
    assert "NotImplemented" in outcome.found


def test_checksum_that_is_not_kept_is_said(make_patient: MakePatient, proxy: FaultProxy) -> None:
    gone = {"x-amz-checksum-crc32": None, "x-amz-checksum-type": None}
    proxy.add(Rule(ReplyHeaders(gone)))
    outcome = writing.checksums(make_patient())
    assert outcome.verdict == Verdict.OK
    assert "not kept" in outcome.found


def test_refused_encryption_fails_where_plain_writing_works(
    make_patient: MakePatient, proxy: FaultProxy
) -> None:
    proxy.add(
        Rule(s3_error(400, "InvalidRequest"), method="PUT", header="x-amz-server-side-encryption")
    )
    patient = make_patient(sse="aws:kms")
    assert writing.write(patient).verdict == Verdict.OK
    outcome = writing.sse(patient)
    assert outcome.verdict == Verdict.FAIL
    assert outcome.found.startswith("aws:kms")
    assert "`sse` = `none`" in outcome.mend


@pytest.mark.parametrize("confirmed", [None, "AES256"])
def test_encryption_that_is_not_confirmed_is_a_warning(
    make_patient: MakePatient, proxy: FaultProxy, confirmed: str | None
) -> None:
    proxy.add(Rule(ReplyHeaders({"x-amz-server-side-encryption": confirmed}), method="PUT"))
    outcome = writing.sse(make_patient(sse="aws:kms"))
    assert outcome.verdict == Verdict.WARN
    assert (confirmed or "nothing") in outcome.found


def test_default_encryption_of_the_bucket_is_told(
    make_patient: MakePatient, proxy: FaultProxy
) -> None:
    proxy.add(Rule(ReplyHeaders({"x-amz-server-side-encryption": "AES256"}), method="PUT"))
    patient = make_patient()
    writing.write(patient)
    assert "by default (AES256)" in writing.sse(patient).found
