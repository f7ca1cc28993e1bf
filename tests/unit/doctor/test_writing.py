# SPDX-License-Identifier: Apache-2.0
"""Checks that write, on servers that lack this or that."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest

from s3ec.dev.rigs.proxy import Exchange, FaultProxy, Rule
from s3ec.dev.rigs.proxy_faults import Replace, s3_error
from s3ec.doctor import bucket
from s3ec.doctor.check import CheckContext, Outcome, Verdict
from s3ec.testing.server import MotoServer
from tests.unit.doctor.conftest import MakePatient, ReplyHeaders, WithoutHeader, says

LeftOver = Callable[[], list[str]]
DENIED = s3_error(403, "AccessDenied")
SSE = "x-amz-server-side-encryption"
CHECKS = (
    bucket.write,
    bucket.sse,
    bucket.conditional_put,
    bucket.ranges,
    bucket.listing,
)


UNAVAILABLE = s3_error(503, "SlowDown")
NO_CHECKSUM = s3_error(501, "NotImplemented")
ODD_SERVERS = {
    "denied writing": (bucket.write, [Rule(DENIED, method="PUT")], "s3:PutObject"),
    "denied condition": (
        bucket.write,  # no entry would be written
        [Rule(DENIED, method="PUT", header="if-none-match")],
        "s3:PutObject",
    ),
    "refused checksums": (
        bucket.write,  # the store writes without
        [
            Rule(NO_CHECKSUM, method="PUT", header=header)
            for header in ("x-amz-sdk-checksum-algorithm", "x-amz-checksum-crc32")
        ],
        "",
    ),
    "ignored condition": (
        bucket.conditional_put,
        [Rule(WithoutHeader("if-none-match"))],
        "overwrites",
    ),
    "a store that fails": (bucket.conditional_put, [Rule(UNAVAILABLE, method="PUT")], "try again"),
    "other bytes": (bucket.ranges, [Rule(Replace(b"????"), method="GET")], "other bytes"),
    "no ranges": (bucket.ranges, [Rule(WithoutHeader("range"), method="GET")], "the whole object"),
    "a listing that fails once": (
        bucket.listing,
        [Rule(s3_error(500, "InternalError"), target="list-type=2", times=1)],
        "",
    ),
}


@pytest.mark.parametrize(("check", "rules", "part"), ODD_SERVERS.values(), ids=ODD_SERVERS)
def test_what_a_server_lacks_is_named_and_leaves_nothing(
    make_patient: MakePatient,
    proxy: FaultProxy,
    left_over: LeftOver,
    check: Callable[[CheckContext], Outcome],
    rules: list[Rule],
    part: str,
) -> None:
    for rule in rules:
        proxy.add(rule)
    outcome = check(make_patient())
    verdict = Verdict.WARN if part == "overwrites" else Verdict.FAIL if part else Verdict.OK
    assert outcome.verdict == verdict, outcome
    assert part in outcome.found + outcome.mend
    assert ("ec_consumer" in outcome.mend) == (check is bucket.write and part != "")
    assert left_over() == []


def test_consumer_does_not_write(
    make_patient: MakePatient, proxy: FaultProxy, left_over: LeftOver
) -> None:
    patient = make_patient({"ec_role": "ec_consumer"})
    assert bucket.write(patient).verdict == Verdict.SKIP
    assert proxy.requests == []


def test_denied_deleting_is_well_and_leaves_one_object_however_often(
    make_patient: MakePatient, proxy: FaultProxy, left_over: LeftOver
) -> None:
    proxy.add(Rule(DENIED, method="DELETE"))
    for _ in range(2):
        patient = make_patient(sse="AES256")
        says(bucket.write(patient), Verdict.OK, found="deleting is not")
        assert bucket.sse(patient).verdict == Verdict.OK
        assert bucket.conditional_put(patient).verdict == Verdict.OK
        assert bucket.ranges(patient).verdict == Verdict.OK
        assert bucket.listing(patient).verdict == Verdict.SKIP
    assert left_over() == [".s3ec-probe/kept"]


def test_refused_encryption_fails_with_the_setting_that_asks_for_it(
    make_patient: MakePatient, proxy: FaultProxy
) -> None:
    proxy.add(Rule(s3_error(400, "InvalidRequest"), method="PUT", header=SSE))
    outcome = bucket.write(make_patient(sse="aws:kms"))
    assert outcome.verdict == Verdict.FAIL
    assert "It asked for aws:kms" in outcome.mend
    assert "`sse` = `none`" in outcome.mend
    assert bucket.write(make_patient()).verdict == Verdict.OK


@pytest.mark.parametrize("confirmed", [None, "AES256"])
def test_encryption_that_is_not_confirmed_is_a_warning(
    make_patient: MakePatient, proxy: FaultProxy, confirmed: str | None
) -> None:
    proxy.add(Rule(ReplyHeaders({SSE: confirmed}), method="HEAD"))
    patient = make_patient(sse="aws:kms")
    bucket.write(patient)
    says(bucket.sse(patient), Verdict.WARN, found=(confirmed or "nothing"))


def test_default_encryption_of_the_bucket_is_told(
    make_patient: MakePatient, proxy: FaultProxy
) -> None:
    proxy.add(Rule(ReplyHeaders({SSE: "AES256"}), method="HEAD"))
    patient = make_patient()
    bucket.write(patient)
    assert "by default (AES256)" in bucket.sse(patient).found


def test_bucket_that_takes_only_encrypted_writes_is_well_where_the_settings_encrypt(
    make_patient: MakePatient, proxy: FaultProxy, left_over: LeftOver
) -> None:
    class OnlyEncrypted:
        async def apply(self, exchange: Exchange) -> None:
            if SSE in exchange.request.headers:
                await exchange.send(await exchange.forward())
            else:
                await DENIED.apply(exchange)

    proxy.add(Rule(OnlyEncrypted(), method="PUT"))
    patient = make_patient(sse="AES256")
    for check in CHECKS:
        assert check(patient).verdict == Verdict.OK, check(patient)
    assert left_over() == []
    assert bucket.write(make_patient()).verdict == Verdict.FAIL


def test_listing_that_loses_what_comes_after_its_first_page_fails(
    make_patient: MakePatient, proxy: FaultProxy, left_over: LeftOver
) -> None:
    class FirstPageOnly:
        async def apply(self, exchange: Exchange) -> None:
            reply = await exchange.forward()
            reply.body = reply.body.replace(b"NextContinuationToken", b"Other")
            await exchange.send(reply)

    proxy.add(Rule(FirstPageOnly(), method="GET", target="list-type=2"))
    says(bucket.listing(make_patient()), Verdict.FAIL, found="not each came once")
    proxy.clear()
    assert left_over() == []


def test_listing_that_begins_again_at_each_page_ends_and_fails(
    make_patient: MakePatient, proxy: FaultProxy
) -> None:
    class AtTheBeginning:
        async def apply(self, exchange: Exchange) -> None:
            target = re.sub("&?continuation-token=[^&]*", "", exchange.request.target)
            exchange.request = replace(exchange.request, target=target)
            await exchange.send(await exchange.forward())

    proxy.add(Rule(AtTheBeginning(), method="GET", target="list-type=2"))
    assert bucket.listing(make_patient()).verdict == Verdict.FAIL
    assert sum("list-type=2" in request.target for request in proxy.requests) == 50


def test_what_other_doctors_left_does_not_hide_the_objects_of_this_one(
    make_patient: MakePatient, moto_server: MotoServer, doctor_bucket: str
) -> None:
    patient = make_patient()
    for number in range(60):  # more than there are pages
        key = f"{patient.settings.prefix}/.s3ec-probe/{number:016x}"
        moto_server.client().put_object(Bucket=doctor_bucket, Key=key, Body=b"left over")
    says(bucket.listing(patient), Verdict.OK)


def test_server_with_pages_of_its_own_size_is_well(
    make_patient: MakePatient, proxy: FaultProxy
) -> None:
    class LargePages:
        async def apply(self, exchange: Exchange) -> None:
            target = exchange.request.target.replace("max-keys=1", "max-keys=1000")
            exchange.request = replace(exchange.request, target=target)
            await exchange.send(await exchange.forward())

    proxy.add(Rule(LargePages(), method="GET"))
    says(bucket.listing(make_patient()), Verdict.OK, found="pages of the server's own size")
