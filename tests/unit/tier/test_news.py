# SPDX-License-Identifier: Apache-2.0
"""Processes of a node tell each other of new entries."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from s3ec.counters import Counters
from s3ec.tier import news
from s3ec.tier.entries import LocalKeys
from s3ec.tier.news import make_line, parse_lines
from s3ec.tier.tier import Tier
from tests.support.waiting import eventually
from tests.unit.tier.cases import (
    NAMESPACE,
    OTHER_NAMESPACE,
    MakeTier,
    child,
    entry,
    key_at,
    publish,
)


def news_of(root: Path) -> Path:
    return root / "v1" / "news"


class Listener:
    """A process's view of what is here; no walk is made."""

    def __init__(self, tier: Tier) -> None:
        self.keys = LocalKeys()
        tier.follow_news(self.keys.add_all).start()

    def knows(self, *numbers: int) -> bool:
        return all(self.keys(key_at(number)) for number in numbers)

    def hears(self, *numbers: int) -> None:
        eventually(lambda: self.knows(*numbers), f"heard nothing of one of {numbers}")


@pytest.fixture
def hears(tier: Tier) -> Callable[..., None]:
    """Waits until these entries are known; the listener has listened from the start."""
    return Listener(tier).hears


def test_an_entry_that_another_process_publishes_is_known_without_a_walk(
    root: Path, hears: Callable[..., None]
) -> None:
    with child("churn", root, 1 << 30, 0, 8) as other:
        assert other.hear() == "ready"
        other.say()
        hears(*range(8))
        assert other.hear() == "done"
        other.end()


def test_what_was_told_before_the_start_is_left_to_the_walk(tier: Tier) -> None:
    publish(tier, 0)
    listener = Listener(tier)
    publish(tier, 1)
    listener.hears(1)
    assert not listener.knows(0)


def test_another_namespaces_entries_are_not_ours(tier: Tier, make_tier: MakeTier) -> None:
    listener = Listener(tier)
    other = make_tier(namespace=OTHER_NAMESPACE)
    other.writer.publish(key_at(0), [entry(key_at(0), namespace=OTHER_NAMESPACE)])
    publish(tier, 1)
    listener.hears(1)
    assert not listener.knows(0)


def test_a_full_disk_costs_the_news_and_nothing_else(
    make_tier: MakeTier, small_disk: Path, counters: Counters
) -> None:
    tier = make_tier(small_disk)
    listener = Listener(tier)
    filler = small_disk / "filler"
    # One page is left, for the entry.
    subprocess.run(["dd", "if=/dev/zero", f"of={filler}", "bs=4096"], check=False, stderr=-3)
    os.truncate(filler, filler.stat().st_size - 4096)
    publish(tier, 0)
    assert tier.entries.contains(key_at(0))
    assert counters.get("tier.errors") > 0
    filler.unlink()
    publish(tier, 1)
    listener.hears(1)


def test_a_file_that_may_not_be_written_or_read_costs_the_news_only(
    plain_user: Path, make_tier: MakeTier, counters: Counters
) -> None:
    root = plain_user / "cache"
    tier = make_tier(root)
    listener = Listener(tier)
    news_of(root).touch(mode=0)
    publish(tier, 0, 1)
    assert tier.entries.contains(key_at(1))
    eventually(lambda: counters.get("tier.errors") > 2)  # two writes, and the reader's looks
    news_of(root).unlink()
    publish(tier, 2)
    listener.hears(2)


def test_a_link_in_its_place_is_not_written_through(tier: Tier, root: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"kept")
    news_of(root).symlink_to(victim)
    publish(tier, 0)
    assert tier.entries.contains(key_at(0))
    assert victim.read_bytes() == b"kept"


def test_a_large_file_is_begun_anew_and_nothing_is_missed(
    tier: Tier, root: Path, hears: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    line_bytes = len(make_line(NAMESPACE, bytes(16)))
    monkeypatch.setattr(news, "LARGEST_BYTES", 4 * line_bytes)
    publish(tier, *range(3))
    hears(*range(3))  # so that what is open now is the one to be replaced
    publish(tier, *range(3, 6))
    assert news_of(root).stat().st_size == 2 * line_bytes
    hears(*range(6))


def test_an_emptied_folder_is_followed_anew(
    tier: Tier, root: Path, hears: Callable[..., None]
) -> None:
    publish(tier, 0)
    hears(0)
    subprocess.run(["rm", "-r", str(root / "v1")], check=True)
    publish(tier, 1)
    hears(1)


DIGESTS = st.binary(min_size=16, max_size=16)
NOISE = st.one_of(st.just(b""), st.binary(max_size=40), st.just(make_line("x", b"x" * 16)[:-1]))


@given(st.lists(st.tuples(NOISE, DIGESTS)), st.integers(1, 100))
def test_every_whole_line_is_found_however_the_file_is_damaged_and_read(
    told: list[tuple[bytes, bytes]], part_bytes: int
) -> None:
    blob = b"".join(noise + make_line(NAMESPACE, digest) for noise, digest in told)
    digests, at, end = [], 0, 0
    while end < len(blob):
        end = min(len(blob), end + part_bytes)
        found, done = parse_lines(blob[at:end], NAMESPACE)
        digests += found
        at += done
    assert digests == [digest for _, digest in told]
