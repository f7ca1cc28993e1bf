# SPDX-License-Identifier: Apache-2.0
"""The parts of a soak: its plan, how answers are compared, what counts as growth or as lost."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, cast

import pytest

from s3ec.dev.bench import engines, soak, soak_engine, soak_run
from s3ec.dev.bench.soak_engine import LiveEngine, PictureSet, Sample, compare, growths
from s3ec.dev.rigs.engine import EngineError, EngineProcess
from tests.support.waiting import eventually

KINDS = ["killed", "cut", "full", "flipped", "swapped"]


def test_a_seed_gives_the_same_steps_and_another_seed_others() -> None:
    first, again, other = (list(islice(soak_run.plan(seed, KINDS), 20)) for seed in (7, 7, 8))
    assert first == again
    assert first != other


def test_every_kind_comes_before_any_comes_again() -> None:
    kinds = [kind for step in islice(soak_run.plan(1, KINDS), 30) for kind in step.kinds]
    for start in range(0, len(kinds) - len(KINDS), len(KINDS)):
        assert Counter(kinds[start : start + len(KINDS)]) == Counter(KINDS)


def answer(*tokens: int, shift: float = 0.0) -> dict[str, Any]:
    positions = [{str(token): -1.0 + shift, "999": -3.0} for token in tokens]
    return {"token_ids": list(tokens), "finish_reason": "length", "logprobs": positions}


@pytest.mark.parametrize(
    ("seen", "right", "exact"),
    [
        (answer(1, 2), True, True),
        (answer(1, 2, shift=0.0005), True, False),
        (answer(1, 2, shift=0.05), False, False),
        (answer(1, 3), False, False),
        ({**answer(1, 2), "finish_reason": "error"}, False, False),
    ],
)
def test_an_answer_is_right_where_tokens_are_equal_and_probabilities_close(
    seen: dict[str, Any], right: bool, exact: bool
) -> None:
    verdict = compare(seen, answer(1, 2))
    assert (verdict.right, verdict.exact) == (right, exact)


class FakeEngine:
    """Answers by picture; dies where it is told to."""

    def __init__(self, answers: Mapping[str, dict[str, Any]]) -> None:
        self.answers = answers
        self.alive = True
        self.starts = 0
        self.asked = threading.Event()

    @property
    def pid(self) -> int:
        if not self.alive:
            raise EngineError("the engine is not running")
        return 1

    def chat(self, prompts: Sequence[Any], **_: Any) -> list[dict[str, Any]]:
        if not self.alive:
            raise EngineError("the engine ended")
        self.asked.set()
        urls = [prompt[0]["image_url"]["url"] for prompt in prompts]
        return [self.answers[url.rpartition("/")[2]] for url in urls]

    def counters(self) -> dict[str, float]:
        return {soak_engine.HITS: 3, soak_engine.FROM_BUCKET: 1}

    def start(self) -> None:
        self.starts += 1
        self.alive = True

    def stop(self, timeout_s: float = 0) -> None:
        self.alive = False

    def kill(self) -> None:
        self.alive = False
        time.sleep(0.05)  # its asker may notice before this returns


def live(fake: FakeEngine, tmp_path: Path) -> LiveEngine:
    paths = [tmp_path / "a.png", tmp_path / "b.png"]
    reference = {path: answer(number) for number, path in enumerate(paths)}
    return LiveEngine(
        "one", cast("EngineProcess", fake), album=PictureSet(paths), reference=reference, seed=0
    )


@pytest.fixture
def right() -> FakeEngine:
    return FakeEngine({"a.png": answer(0), "b.png": answer(1)})


@pytest.fixture
def engine(right: FakeEngine, tmp_path: Path) -> Iterator[LiveEngine]:
    made = live(right, tmp_path)
    made.start(lambda: "a fault")
    assert right.asked.wait(10)
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
    assert engine.tally.dead == 1
    assert engine.tally.deaths[0].startswith("a fault: ")
    assert engine.tally.wrong == 0


def test_a_wrong_answer_is_counted_and_told(tmp_path: Path) -> None:
    fake = FakeEngine({"a.png": answer(5), "b.png": answer(5)})
    engine = live(fake, tmp_path)
    engine.start(lambda: "bits flipped")
    assert fake.asked.wait(10)
    engine.stop()
    tally = engine.tally
    assert tally.wrong == tally.requests > 0
    assert tally.examples[0]["said"] == [5]
    assert tally.examples[0]["during"] == "bits flipped"


def test_pictures_that_come_later_are_asked_about_later() -> None:
    album = PictureSet([Path(f"{number}") for number in range(100)], window=10)
    source = random.Random(0)
    early = {path for _ in range(200) for path in album.pick(source)}
    album.share = 1.0
    late = {path for _ in range(200) for path in album.pick(source)}
    assert early == set(album.paths[:10])
    assert set(album.paths[90:]) < late


def test_no_two_patterns_are_alike(tmp_path: Path) -> None:
    paths = engines.write_patterns(tmp_path, 5, seed=1)
    assert len({path.read_bytes() for path in paths}) == 5


def test_growth_is_that_of_each_long_life_after_its_warm_up() -> None:
    def life(number: int, sizes: Sequence[int]) -> list[Sample]:
        return [Sample("one", number, 5.0 * at, n, 30, 9) for at, n in enumerate(sizes)]

    warm_up, early, late = [500] * 20, [1000] * 60, [1020] * 20
    found = growths(life(1, [1] * 10) + life(2, warm_up + early + late))
    assert [(growth.life, round(growth.share, 3)) for growth in found] == [(2, 0.02)]
    assert found[0].fds == (30, 30)


def test_the_last_confirmation_of_each_entry_is_read_from_the_log() -> None:
    digest = "ab" * 16
    line = "DEBUG 11-22 05:00:0{} [s3ec.connector.uploads] stored digest={} nbytes=1 seconds=0.1\n"
    found = soak.confirmations(
        "".join(line.format(second, digest) for second in (1, 7)) + "INFO something else\n"
    )
    assert list(found) == [digest]
    assert time.localtime(found[digest]).tm_sec == 7


def test_the_first_interrupt_ends_it_early_and_with_a_report() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with soak.stopped_by_signals() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.wait(10)
        assert signal.getsignal(signal.SIGTERM) == before
    assert signal.getsignal(signal.SIGTERM) == before
