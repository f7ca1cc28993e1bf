# SPDX-License-Identifier: Apache-2.0
"""Claims: one holder per entry over all Tiers and processes, and none after its death."""

from __future__ import annotations

import errno
import fcntl
import shutil
from pathlib import Path

import pytest

from s3ec.counters import Counters
from s3ec.tier.claims import Claim
from s3ec.tier.open_entry import OpenEntry
from s3ec.tier.tier import Tier
from tests.unit.tier.cases import MakeTier, entry, key_at, refusing

KEY, OTHER = key_at(0), key_at(1)


def claim(tier: Tier, key: object = KEY) -> Claim:
    taken = tier.entries.open_or_claim(key)  # type: ignore[arg-type]
    assert isinstance(taken, Claim)
    return taken


def test_a_claimed_entry_is_refused_until_it_is_released(make_tier: MakeTier) -> None:
    one, two = make_tier(), make_tier()
    taken = claim(one)
    assert two.entries.open_or_claim(KEY) is None
    assert one.entries.open_or_claim(KEY) is None  # also by the Tier that has it
    assert two.claims.is_taken(KEY.digest)
    assert one.claims.is_taken(KEY.digest)
    claim(two, OTHER)
    one.claims.release(taken)
    one.claims.release(taken)
    assert not two.claims.is_taken(KEY.digest)
    claim(two)


def test_a_claim_of_one_namespace_does_not_hold_up_another(
    make_tier: MakeTier,
) -> None:
    claim(make_tier())
    claim(make_tier(namespace="gemma-fedcba9876543210"))


def test_what_was_published_meanwhile_is_opened_not_claimed(
    make_tier: MakeTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look for the file and the claim the one who had it published and let go."""
    tier = make_tier()
    open_ = tier.entries.open
    looks: list[object] = []

    def late(key: object) -> OpenEntry | None:
        looks.append(key)
        if len(looks) == 1:
            tier.writer.publish(KEY, [entry(KEY)])
            return None
        return open_(KEY)

    monkeypatch.setattr(tier.entries, "open", late)
    assert isinstance(tier.entries.open_or_claim(KEY), OpenEntry)
    assert not tier.claims.is_taken(KEY.digest)


def test_a_hanging_holder_can_be_passed_over(make_tier: MakeTier) -> None:
    one, two = make_tier(), make_tier()
    taken = claim(one)
    mine = two.entries.open_or_claim(KEY, ignore_claim=True)
    assert isinstance(mine, Claim)
    assert mine.place is None
    two.claims.release(mine)
    assert two.claims.is_taken(KEY.digest)  # still the other's
    one.claims.release(taken)


def test_a_closed_tier_leaves_no_claim_and_takes_none(make_tier: MakeTier) -> None:
    one, two = make_tier(), make_tier()
    taken = claim(one)
    one.close()
    one.claims.release(taken)
    claim(two)
    assert claim(one).place is None
    assert not one.claims.is_taken(KEY.digest)


def test_a_deleted_folder_does_not_part_those_who_come_later(
    make_tier: MakeTier, root: Path
) -> None:
    one, two = make_tier(), make_tier()
    old = claim(one)
    shutil.rmtree(root)
    fresh = claim(two)  # of the new file, which the first one finds too
    assert one.entries.open_or_claim(KEY) is None
    one.claims.release(old)
    two.claims.release(fresh)
    claim(one)


def test_a_file_system_without_such_locks_shares_no_fetches(
    make_tier: MakeTier, counters: Counters, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = make_tier(), make_tier()
    monkeypatch.setattr(fcntl, "fcntl", refusing(errno.ENOLCK, "no locks available"))
    for tier in (one, two):
        taken = claim(tier)
        assert taken.place is None
        tier.claims.release(taken)
        assert not tier.claims.is_taken(KEY.digest)
    assert counters.get("tier.errors") == 2
