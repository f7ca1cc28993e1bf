# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from s3ec.errors import CorruptEntryError
from s3ec.store.replies import SdkReply, read_body


class Trickle:
    """A body of unknown length that comes in small pieces."""

    def __init__(self, nbytes: int) -> None:
        self.left = nbytes

    async def read(self, nbytes: int) -> bytes:
        piece = b"x" * min(self.left, 512)
        self.left -= len(piece)
        return piece

    def close(self) -> None:
        pass


def reply(body: Trickle) -> SdkReply:
    return SdkReply({"ResponseMetadata": {"HTTPStatusCode": 200}, "Body": body})


@pytest.mark.parametrize(("nbytes", "grants"), [(100, 0), (2**18 - 1, 0), (3 * 2**18, 3)])
async def test_bytes_of_a_body_of_unknown_length_that_trickle_get_no_time_of_their_own(
    nbytes: int, grants: int
) -> None:
    granted: list[int] = []
    body = await read_body(reply(Trickle(nbytes)), 2**20, "GET x", granted.append)
    assert len(body) == nbytes
    assert granted == [2**18] * grants


async def test_a_body_of_unknown_length_is_refused_once_it_is_too_long() -> None:
    with pytest.raises(CorruptEntryError, match="more than 10 bytes"):
        await read_body(reply(Trickle(11)), 10, "GET x", lambda _: None)
