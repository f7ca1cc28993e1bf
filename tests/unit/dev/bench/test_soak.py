# SPDX-License-Identifier: Apache-2.0
"""How a soak compares answers, and what it counts as growth, as wrong and as dead."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from s3ec.dev.bench import soak_engine
from s3ec.dev.bench.soak_engine import LiveEngine, PictureSet, Sample, growths, is_right
from s3ec.dev.rigs.engine import EngineError, EngineProcess
from tests.support.waiting import DEADLINE_S, eventually


def answer(*tokens: int, shift: float = 0.0) -> dict[str, Any]:
    positions = [{str(token): -1.0 + shift, "999": -3.0} for token in tokens]
    return {"token_ids": list(tokens), "finish_reason": "length", "logprobs": positions}


@pytest.mark.parametrize(
    ("seen", "right"),
    [
        (answer(1, 2), True),
        (answer(1, 2, shift=0.0005), True),
        (answer(1, 2, shift=0.05), False),
        (answer(1, 3), False),
        ({**answer(1, 2), "finish_reason": "error"}, False),
    ],
)
def test_an_answer_is_right_where_tokens_are_equal_and_probabilities_close(
    seen: dict[str, Any], right: bool
) -> None:
    assert is_right(seen, answer(1, 2)) == right


class FakeEngine:
    """Answers by picture; dies where it is told to."""

    pid = 1

    def __init__(self, answers: Mapping[str, dict[str, Any]]) -> None:
        self.answers = answers
        self.alive = True
        self.starts = 0
        self.asked, self.has_ended = threading.Event(), threading.Event()

    def chat(self, prompts: Sequence[Any], **_: Any) -> list[dict[str, Any]]:
        if not self.alive:
            self.has_ended.set()
            raise EngineError("the engine ended")
        self.asked.set()
        urls = [prompt[0]["image_url"]["url"] for prompt in prompts]
        return [self.answers[url.rpartition("/")[2]] for url in urls]

    def counters(self) -> dict[str, float]:
        return {soak_engine.FROM_BUCKET: 1}

    def start(self) -> None:
        self.starts += 1
        self.alive = True

    def stop(self, timeout_s: float = 0) -> None:
        self.alive = False

    def kill(self) -> None:
        self.alive = False
        assert self.has_ended.wait(DEADLINE_S)  # its asker notices before this returns


def live(fake: FakeEngine, tmp_path: Path) -> LiveEngine:
    paths = [tmp_path / "a.png", tmp_path / "b.png"]
    reference = {path: answer(number) for number, path in enumerate(paths)}
    album = PictureSet(paths)
    made = LiveEngine("one", cast("EngineProcess", fake), album=album, reference=reference, seed=0)
    made.start(lambda: "a fault")
    assert fake.asked.wait(DEADLINE_S)
    return made


@pytest.fixture
def right() -> FakeEngine:
    return FakeEngine({"a.png": answer(0), "b.png": answer(1)})


@pytest.fixture
def engine(right: FakeEngine, tmp_path: Path) -> Iterator[LiveEngine]:
    made = live(right, tmp_path)
    yield made
    made.stop()


def test_an_engine_that_is_killed_on_purpose_is_started_again_and_not_counted_as_dead(
    engine: LiveEngine, right: FakeEngine
) -> None:
    with engine.killed():
        pass
    assert (right.starts, engine.tally.killed, engine.tally.dead) == (1, 1, 0)
    assert engine.is_up


def test_an_engine_that_dies_by_itself_is_counted_with_the_fault_of_the_moment(
    engine: LiveEngine, right: FakeEngine
) -> None:
    right.alive = False
    eventually(lambda: right.starts > 0)
    engine.stop()
    assert (engine.tally.dead, engine.tally.wrong) == (1, 0)
    assert engine.tally.deaths[0].startswith("a fault: ")


def test_a_wrong_answer_is_counted_and_told(tmp_path: Path) -> None:
    engine = live(FakeEngine({"a.png": answer(5), "b.png": answer(5)}), tmp_path)
    engine.stop()
    tally = engine.tally
    assert tally.wrong == tally.requests > 0
    assert (tally.examples[0]["said"], tally.examples[0]["during"]) == ([5], "a fault")


def test_growth_is_that_of_the_longest_life_after_its_warm_up() -> None:
    grown = [1000] * 20 + [100] * 20 + [105] * 60
    lives = {("saver", 1): [100] * 60, ("saver", 2): grown, ("reader", 1): [100] * 10}
    samples = [Sample(*life, 0.0, nbytes) for life, some in lives.items() for nbytes in some]
    assert growths(samples) == {"saver": pytest.approx(0.05)}
