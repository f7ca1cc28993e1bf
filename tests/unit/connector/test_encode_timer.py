# SPDX-License-Identifier: Apache-2.0
"""How long the encoder ran, as the worker half measures it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from s3ec.connector import encode_timer
from s3ec.connector.encode_timer import EncodeTimer
from s3ec.connector.messages import Encode, EncodeTime

IMAGE = Encode("image", 256)


def timer(*seconds: float) -> EncodeTimer:
    return EncodeTimer(lambda: torch.device("cpu"), clock=iter(seconds).__next__)


def test_what_one_step_encodes_is_measured_in_sum() -> None:
    one = timer(1.0, 1.25)
    one.begin([IMAGE, Encode("image", 128)])
    one.end()
    one.end()  # of each further item that is saved
    assert one.take() == [EncodeTime("image", 2, 384, 0.25)]
    assert one.take() == []


def test_step_that_encodes_nothing_is_not_measured() -> None:
    one = timer()
    one.begin([])
    one.end()
    assert one.take() == []


def test_items_of_two_modalities_say_nothing_of_either() -> None:
    one = timer()
    one.begin([IMAGE, Encode("video", 256)])
    one.end()
    assert one.take() == []


def test_step_that_failed_before_its_end_is_dropped() -> None:
    one = timer(1.0, 5.0, 5.5)
    one.begin([IMAGE])
    one.begin([IMAGE])
    one.end()
    assert one.take() == [EncodeTime("image", 1, 256, 0.5)]


def test_step_that_failed_is_dropped_where_the_next_one_encodes_nothing() -> None:
    one = timer(1.0)
    one.begin([IMAGE])
    one.begin([])
    one.end()
    assert one.take() == []


class Event:
    """Stands for torch.cuda.Event: there is no GPU here."""

    times_ms = itertools.count(0, 40)
    passed = True

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        self.time_ms: int | None = None

    def record(self) -> None:
        self.time_ms = next(self.times_ms)

    def query(self) -> bool:
        return Event.passed

    def elapsed_time(self, end: Any) -> float:
        assert self.time_ms is not None
        return float(end.time_ms - self.time_ms)


def test_on_a_gpu_nothing_waits_and_times_come_in_a_later_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(encode_timer.torch.cuda, "Event", Event)
    one = EncodeTimer(lambda: torch.device("cuda", 0))
    monkeypatch.setattr(Event, "passed", False)
    one.begin([IMAGE])
    one.end()
    assert one.take() == []
    monkeypatch.setattr(Event, "passed", True)
    assert one.take() == [EncodeTime("image", 1, 256, 0.04)]
