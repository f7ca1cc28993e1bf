# SPDX-License-Identifier: Apache-2.0
"""Keys that are not to be had: denied for a while, and never more of them than there is room."""

from __future__ import annotations

from s3ec.index.missing import NEGATIVE_ENTRIES, NegativeCache
from tests.support.clock import Clock


def test_a_key_is_denied_until_its_time_is_over_or_it_is_there_again() -> None:
    clock = Clock(0.0)
    missing = NegativeCache(60.0, clock)
    missing.add_locked(b"a")
    missing.add_locked(b"b")
    missing.discard_locked(b"b")
    assert [missing.holds(digest) for digest in (b"a", b"b", b"c")] == [True, False, False]
    clock.now_s = 59.9
    assert missing.holds(b"a")
    missing.sweep_locked()
    assert list(missing.until) == [b"a"]
    clock.now_s = 60.0
    assert not missing.holds(b"a")
    missing.sweep_locked()
    assert not missing.until


def test_the_oldest_make_room() -> None:
    missing = NegativeCache(60.0, Clock(0.0))
    digests = [number.to_bytes(16, "big") for number in range(NEGATIVE_ENTRIES + 1000)]
    missing.add_locked(digests[0])
    for digest in digests:  # the first is renewed, and still among the oldest
        missing.add_locked(digest)
    assert list(missing.until) == digests[1000:]
