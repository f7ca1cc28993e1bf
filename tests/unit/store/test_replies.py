# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from s3ec.errors import CorruptEntryError
from s3ec.store.concurrency import PIECE_BYTES, Pieces


@pytest.mark.parametrize(
    ("nbytes", "grants"), [(100, 0), (PIECE_BYTES - 1, 0), (3 * PIECE_BYTES, 3)]
)
def test_bytes_of_a_body_of_unknown_length_that_trickle_get_no_time_of_their_own(
    nbytes: int, grants: int
) -> None:
    granted: list[int] = []
    pieces = Pieces(2**20, "GET x", granted.append)
    for at in range(0, nbytes, 512):
        pieces.add(b"x" * min(512, nbytes - at))
    assert pieces.whole() == b"x" * nbytes
    assert granted == [PIECE_BYTES] * grants


def test_a_body_of_unknown_length_is_refused_once_it_is_too_long() -> None:
    pieces = Pieces(10, "GET x", lambda _: None)
    pieces.add(b"x" * 10)
    with pytest.raises(CorruptEntryError, match="more than 10 bytes") as caught:
        pieces.add(b"x")
    assert caught.value.reason == "size"
