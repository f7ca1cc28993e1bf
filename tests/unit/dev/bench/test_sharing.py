# SPDX-License-Identifier: Apache-2.0
"""The processes of ``bench node`` and ``bench interference``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from s3ec.dev.bench.corpus import Corpus
from s3ec.dev.bench.crew import Hired, Member, crew
from s3ec.identity import Namespace


@pytest.fixture
def member(tmp_path: Path) -> Iterator[Member]:
    """A process with a Fetcher for a corpus of nothing."""
    nobody = Namespace.from_descriptor({"model": "m"})
    corpus = Corpus("http://127.0.0.1:1", {"AWS_REGION": "us-east-1"}, nobody, (), 0)
    with crew([Hired(corpus, tmp_path / "cache", "aioboto3")]) as members:
        yield members[0]


@pytest.mark.slow
def test_member_of_the_crew_does_what_it_is_told(member: Member) -> None:
    for order in ("fetch", "empty"):
        member.tell(order)
        answer = member.answer()
        assert answer["ended"] >= answer["started"]


@pytest.mark.slow
def test_member_that_fails_is_noticed(member: Member) -> None:
    member.tell("no-such-order")
    with pytest.raises(RuntimeError, match="ended"):
        member.answer()
