# SPDX-License-Identifier: Apache-2.0
"""Which of the freeable entries goes, and what is remembered of those that went."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from s3ec.managers.victims import Frequencies, LeastRecent, LeastWorth, Window

ROWS = 16
TIER_S, BUCKET_S, ENCODE_S = 0.001, 0.03, 0.2


class Cache:
    """Entries of one size that nobody holds for long, in a LeastWorth queue."""

    def __init__(self, size: int, restore_s: Callable[[str], float] = lambda _: ENCODE_S) -> None:
        self.queue = LeastWorth(lambda name, *_: restore_s(name))
        self.names: set[str] = set()
        self.size = size

    def ask(self, name: str) -> bool:
        """One request for it, from begin to end; whether it was here."""
        hit = name in self.names
        if hit:
            self.queue.pop(name)
            self.queue.hit(name)
        else:
            if len(self.names) == self.size:
                victim, rows = self.queue.popitem(last=False)
                assert rows == ROWS
                self.names.remove(victim)
            self.names.add(name)
            self.queue.allocated(name, "image", ROWS)
        self.queue[name] = ROWS
        return hit


# -- by last access --------------------------------------------------------------------------------


def test_an_access_while_others_hold_an_entry_counts() -> None:
    queue = LeastRecent()
    for name in "ab":
        queue.accessed(name)
    queue["a"] = ROWS  # released first,
    queue.accessed("b")
    queue.pop("a")
    queue.accessed("a")  # and wanted again while b is still held
    queue["a"] = ROWS
    queue["b"] = ROWS
    assert queue.popitem(last=False) == ("b", ROWS)
    assert queue.popitem(last=False) == ("a", ROWS)
    with pytest.raises(KeyError):
        queue.popitem(last=False)


# -- by worth --------------------------------------------------------------------------------------


def test_what_the_disk_gives_back_goes_before_the_buckets_and_that_before_what_is_nowhere() -> None:
    seconds = {"t": TIER_S, "b": BUCKET_S, "n": ENCODE_S}
    cache = Cache(12, lambda name: seconds[name[0]])
    for number in range(4):
        for kind in "nbt":  # the tier's are the newest
            cache.ask(f"{kind}{number}")
    gone = []
    for number in range(8):
        before = set(cache.names)
        cache.ask(f"new{number}")
        gone += sorted(before - cache.names)
    # Those that are in the window are too new to go.
    assert [name[0] for name in gone[:6]] == sorted((name[0] for name in gone[:6]), key="tb".index)
    assert "n" not in "".join(gone)


def test_larger_ones_of_the_same_cost_go_first() -> None:
    queue = LeastWorth(lambda *_: ENCODE_S)
    for name, rows in (("small", ROWS), ("large", 10 * ROWS), ("filler", 70 * ROWS)):
        queue.allocated(name, "image", rows)
        queue[name] = rows
    queue.pop("filler")
    queue.hit("filler")  # alone in the window
    assert queue.popitem(last=False) == ("large", 10 * ROWS)


def test_an_entry_that_has_become_dear_is_looked_at_again_before_it_goes() -> None:
    seconds = dict.fromkeys("abcdefgh", TIER_S)
    cache = Cache(5, lambda name: seconds[name])
    for name in "abcde":
        cache.ask(name)
    seconds["a"] = ENCODE_S  # the disk has evicted it
    cache.ask("f")
    assert "a" in cache.names
    assert "b" not in cache.names


def test_entries_that_have_become_cheap_are_found() -> None:
    names = [f"picture-{number}" for number in range(20)]
    seconds = dict.fromkeys(names, ENCODE_S)
    cache = Cache(24, lambda name: seconds.get(name, ENCODE_S))
    for name in names * 3:
        cache.ask(name)
    for number in range(10):  # so that all of them were compared
        cache.ask(f"newer-{number}")
    assert set(names) <= cache.names
    cheap = names[10]
    seconds[cheap] = TIER_S  # its upload has ended
    for number in range(100):
        cache.ask(f"new-{number}")
    assert set(names) - cache.names == {cheap}


def test_a_scan_leaves_what_is_asked_for_again_and_again() -> None:
    hot = [f"hot-{number}" for number in range(60)]
    cache, plain = Cache(100), LeastRecent()
    for _ in range(5):
        for name in hot:
            cache.ask(name)
    for number in range(2_000):
        cache.ask(f"scanned-{number}")
    assert sum(name in cache.names for name in hot) == len(hot)
    # With the order of the last access nothing of it would be left.
    for name in [*hot, *(f"scanned-{number}" for number in range(100))]:
        plain.accessed(name)
        plain[name] = ROWS
    assert {plain.popitem(last=False)[0] for _ in hot} == set(hot)


def test_what_was_hot_yesterday_goes() -> None:
    cache = Cache(50)
    old = [f"old-{number}" for number in range(50)]
    for _ in range(20):
        for name in old:
            cache.ask(name)
    rnd = random.Random(1)
    for _ in range(8_000):
        cache.ask(f"new-{rnd.randrange(50)}")
    assert not any(name in cache.names for name in old)


def test_bursts_that_never_come_back_make_the_window_grow() -> None:
    """Each page is asked for five times within a minute, and twenty of them at a time."""
    rnd = random.Random(2)
    cache, hits, count = Cache(60), 0, 0
    for first in range(0, 12_000, 20):
        asks = [f"page-{first + number}" for number in range(20)] * 5
        rnd.shuffle(asks)
        hits += sum(map(cache.ask, asks))
        count += len(asks)
    assert hits / count > 0.75  # at most 0.8: the first time each of them is encoded


def test_after_a_reset_nothing_is_here_and_frequencies_stay() -> None:
    cache = Cache(4)
    for name in "aaab":
        cache.ask(name)
    cache.queue.clear()
    cache.names.clear()
    assert not cache.queue
    for name in "abcdefg":
        cache.ask(name)
    assert "a" in cache.names


# -- how often -------------------------------------------------------------------------------------


def test_counts_end_at_fifteen_and_halve_with_each_period() -> None:
    counts = Frequencies()
    for _ in range(20):
        counts.add("a")
    assert counts.of("a") == Frequencies.MOST
    counts.begin_period()
    assert counts.of("a") == Frequencies.MOST // 2
    counts.add("a")
    assert counts.of("a") == Frequencies.MOST // 2 + 1
    assert counts.of("never") == 1
    counts.begin_period()
    counts.begin_period()
    assert counts.of("a") == 1
    assert len(counts) == 0


def test_names_of_the_past_are_dropped() -> None:
    cache = Cache(10)
    for number in range(20_000):
        cache.ask(f"picture-{number}")
        assert len(cache.queue.frequencies) < 3_000


def test_the_window_stays_within_its_bounds_whatever_misses_cost() -> None:
    rnd = random.Random(3)
    window = Window()
    for _ in range(5_000):
        window.climb(rnd.choice([0.0, 1e-4, 1.0]))
        assert Window.LEAST <= window.share <= Window.MOST


# -- what a request wants next ---------------------------------------------------------------------


@pytest.mark.parametrize("spared", [{"a"}, {"a", "b"}])
def test_what_is_wanted_next_goes_after_all_others(spared: set[str]) -> None:
    recent = LeastRecent()
    worth = LeastWorth(lambda *_: ENCODE_S)
    for name in "abcd":
        recent.accessed(name)
        worth.allocated(name, "image", ROWS)
        recent[name] = worth[name] = ROWS
    recent.spared = worth.spared = spared
    for queue in (recent, worth):
        gone = [queue.popitem(last=False)[0] for _ in range(4)]
        assert gone == [*sorted(set("abcd") - spared), *sorted(spared)]


# -- what no vLLM does today -----------------------------------------------------------------------


def test_entries_that_a_queue_was_not_told_of_go_last_and_break_nothing() -> None:
    recent, worth = LeastRecent(), LeastWorth(lambda *_: ENCODE_S)
    for queue in (recent, worth):
        queue["unknown"] = ROWS
    recent.accessed("known")
    worth.allocated("known", "image", ROWS)
    worth.hit("unknown")
    for queue in (recent, worth):
        queue["known"] = ROWS
        assert [queue.popitem(last=False)[0] for _ in range(2)] == ["known", "unknown"]
        with pytest.raises(KeyError):
            queue.popitem(last=False)
