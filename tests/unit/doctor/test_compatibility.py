# SPDX-License-Identifier: Apache-2.0
"""The line of the table of stores, from checks that went well, badly, or not at all."""

from __future__ import annotations

from datetime import date

from s3ec.doctor.check import Check, Outcome, fail, ok, skip, warn
from s3ec.doctor.compatibility import COLUMNS, compatibility, row

DAY = date(2026, 1, 2)
CHECKS = {
    "endpoint": ok("", cell="Store 1.2"),
    "bucket": ok(""),
    "cache_folder": ok(""),
    "addressing": ok("", cell="path only"),
    "sse": ok("", cell="AES256 confirmed"),
    "conditional_put": ok("", cell="enforced"),
    "checksums": ok("", cell="CRC32 kept, compared"),
    "ranges": ok("", cell="right"),
    "listing": ok("", cell="paged"),
}


def fields(server: str | None = None, **changes: Outcome) -> dict[str, str] | None:
    checks = [Check(name, outcome) for name, outcome in (CHECKS | changes).items()]
    return compatibility(checks, server=server, day=DAY)


def test_good_store_has_a_word_of_each_check() -> None:
    found = fields()
    assert found is not None
    assert list(found) == list(COLUMNS)
    assert row(list(found.values())) == (
        "| Store 1.2 | 2026-01-02 | enforced | paged | right | CRC32 kept, compared | path only | "
        "AES256 confirmed | nothing |"
    )


def test_failed_and_skipped_checks_are_told_apart_and_the_nodes_own_are_left_out() -> None:
    found = fields(
        ranges=fail("", "", cell="wrong"),
        listing=fail("", ""),
        checksums=skip(""),
        conditional_put=warn("", "", cell="ignored"),
        cache_folder=fail("", ""),
    )
    assert found is not None
    assert found["failed"] == "ranges, listing"
    assert (found["ranges"], found["listing"]) == ("wrong", "fail")
    assert (found["checksums"], found["conditional_put"]) == ("not tried", "ignored")


def test_a_persons_name_for_the_server_goes_before_its_own() -> None:
    named = fields("moto 5.2")
    nameless = fields(endpoint=ok(""))
    assert named is not None
    assert nameless is not None
    assert (named["server"], nameless["server"]) == ("moto 5.2", "unknown")


def test_name_of_a_hostile_server_stays_in_its_cell() -> None:
    found = fields(endpoint=ok("", cell="a|b\n<img src=x>`" + "x" * 1000))
    assert found is not None
    assert found["server"].startswith("a?b??img src=x??xxx")
    assert len(found["server"]) == 60


def test_nobody_there_has_no_line() -> None:
    assert fields(endpoint=fail("", "")) is None
    assert compatibility([Check("bucket", ok(""))], server=None, day=DAY) is None
