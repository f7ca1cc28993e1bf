# SPDX-License-Identifier: Apache-2.0
"""Log lines and answers, as real engines give them, read back."""

from __future__ import annotations

import pytest

from s3ec.dev.demo.events import (
    Event,
    logprob_gap,
    own_logprobs,
    parse_events,
    same_tokens,
    seconds_by_digest,
)
from tests.unit.dev.demo.cases import answer, digest_of, fetched, loaded, stored

A_DIGEST = "dc990b12b70927af9a18c5290671fb9a"
STAMP = "DEBUG 11-21 10:30:38"
# Lines of a real consumer (vLLM 0.32), with the noise around them.
REAL_LOG = f"""\
(Worker pid=16419) WARNING 11-21 10:30:33 [cpu_worker.py:140] CPU backend doesn't allow to use
Loading safetensors checkpoint shards: 100% Completed | 1/1 [00:00<00:00, 225.25it/s]

INFO 11-21 10:30:37 [s3ec.connector.connector] s3ec namespace tiny-93641bdbb156945e in bucket b
{STAMP} [s3ec.prefetch] fetched digest={A_DIGEST} source=bucket nbytes=8576 seconds=0.032835
{STAMP} [s3ec.connector.worker] loaded digest={A_DIGEST} nbytes=8192 seconds=0.000289
"""


def test_parse_events_finds_the_lines_of_a_real_log() -> None:
    assert parse_events(REAL_LOG) == [
        Event("fetched", A_DIGEST, 8576, 0.032835, source="bucket"),
        Event("loaded", A_DIGEST, 8192, 0.000289),
    ]


def test_parse_events_reads_all_three_kinds() -> None:
    log = "\n".join([stored(0), fetched(1), loaded(2)])
    assert [event.kind for event in parse_events(log)] == ["stored", "fetched", "loaded"]


@pytest.mark.parametrize(
    "line",
    [
        "",
        "DEBUG fetch of dc990b12: no answer",
        f"loaded digest={A_DIGEST} nbytes=8192 seconds=0.00",  # cut off by another process
        f"loaded digest={A_DIGEST} nbytes=8192 seconds=0.000289(Worker) more",
        f"loaded digest={A_DIGEST[:-1]} nbytes=8192 seconds=0.000289",
        "loaded digest=? nbytes=8192 seconds=0.000289",
        f"unloaded digest={A_DIGEST} nbytes=8192 seconds=0.000289",
    ],
)
def test_parse_events_skips_what_is_no_whole_event(line: str) -> None:
    assert parse_events(f"{line}\n{loaded(1)}\n") == parse_events(loaded(1))


def test_seconds_by_digest_takes_the_first_of_a_kind() -> None:
    again = loaded(0).replace("0.001000", "9.000000")
    events = parse_events("\n".join([stored(0), loaded(0), again, loaded(1)]))
    assert seconds_by_digest(events, "loaded") == {digest_of(0): 0.001, digest_of(1): 0.002}


def test_seconds_by_digest_keeps_sources_apart() -> None:
    events = parse_events("\n".join([fetched(0, source="tier"), fetched(1)]))
    assert seconds_by_digest(events, "fetched", source="bucket") == {digest_of(1): 0.02}


def test_equal_answers_have_the_same_tokens_and_no_gap() -> None:
    assert same_tokens(answer(1, 2), answer(1, 2))
    assert logprob_gap(answer(1, 2), answer(1, 2)) == 0


def test_logprob_gap_is_the_largest_difference() -> None:
    other = answer(1, 2)
    other["logprobs"][1]["999"] -= 0.25
    assert logprob_gap(answer(1, 2), other) == pytest.approx(0.25)


@pytest.mark.parametrize("other", [answer(1), answer(1, 3), answer(1, 2, 2)])
def test_logprob_gap_is_none_where_places_do_not_correspond(other: dict[str, object]) -> None:
    assert not same_tokens(answer(1, 2), other)
    assert logprob_gap(answer(1, 2), other) is None


def test_own_logprobs_are_those_of_the_chosen_tokens() -> None:
    one = answer(4, 9)
    one["logprobs"][1]["9"] = -0.25
    assert own_logprobs(one) == (-0.5, -0.25)
