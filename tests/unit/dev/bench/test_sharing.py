# SPDX-License-Identifier: Apache-2.0
"""``bench node`` and ``bench interference`` run from end to end; no time is looked at."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from s3ec.dev.bench.corpus import Corpus
from s3ec.dev.bench.crew import Hired, Member, crew
from s3ec.errors import ConfigError
from s3ec.identity import Namespace
from s3ec.testing.server import find_weed
from tests.unit.dev.bench.benches import quick_rows


@pytest.fixture
def _server_installed() -> None:
    try:
        find_weed()
    except ConfigError as exc:
        pytest.skip(str(exc))


@pytest.mark.slow
@pytest.mark.usefixtures("_server_installed")
def test_requests_of_two_processes_are_counted_by_key() -> None:
    rows = quick_rows("node", "node", "--processes", "2")
    gets = rows["node.gets_per_key"]
    # More where the machine is so busy that a process no longer waits for the other.
    assert 1.0 <= gets["value"] <= 2.0, gets["detail"]
    assert gets["detail"]["keys_never_asked_for"] == 0
    assert rows["node.tier_gb_per_s"]["value"] > 0


@pytest.mark.slow
@pytest.mark.usefixtures("_server_installed")
def test_lateness_is_measured_idle_here_and_beside_another_process() -> None:
    rows = quick_rows("interference")
    detail = rows["interference.p99_ms"]["detail"]
    here = f"during, {detail['transport']}"
    raw = "during a raw loop that writes files, obstore"
    assert {"idle", here, raw, "while another process fetches, aioboto3"} <= detail["cases"].keys()
    assert all(value > 0 for value in detail["cases"].values())
    assert all(ticks > 0 for ticks in detail["ticks"].values())
    for added in ("p99_added_ms", "p99_added_by_interpreter_ms"):
        assert here in rows[f"interference.{added}"]["detail"]["cases"]


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
